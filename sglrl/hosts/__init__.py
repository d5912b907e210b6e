"""Workers on other machines.

* ``hosts``: what a program says about the hosts, and the driver's end of all nodes;
* ``node_link``: the driver's end of one node;
* ``launcher``: starts the workers of one pool on hosts;
* ``node``, ``node_pool``: the daemon on another machine.
"""
