"""Workers on other machines.

* ``hosts``: what a program says about the hosts, and the driver's end of all nodes;
* ``node_link``: the driver's end of one node;
* ``launcher``: starts the workers of one pool on hosts;
* ``started``, ``slurm_nodes``, ``ray_nodes``: hosts whose nodes this program starts itself;
* ``node``, ``node_pool``: the daemon on another machine.
"""
