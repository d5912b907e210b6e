"""Run workers on other machines (hosts). On each host, a daemon (node) starts the workers.

* ``hosts``: the class ``Hosts`` of a program, which is the driver's end for all nodes;
* ``node_link``: the driver's end for one node;
* ``launcher``: starts the workers of one pool on hosts;
* ``started``, ``slurm_nodes``, ``ray_nodes``: hosts whose nodes this program starts itself;
* ``listening``: nodes that wait for programs, and the program's invitations to them;
* ``node``, ``node_pool``: the daemon on another machine.
"""
