"""Run workers on other machines (hosts). On each host, a daemon (node) starts the workers.

* ``hosts``: the class ``Hosts``, the program's end of the sessions with all nodes;
* ``node_link``: the program's end of the session with one node;
* ``launcher``: starts the workers of one pool on hosts;
* ``started``, ``slurm_nodes``, ``ray_nodes``: hosts whose nodes this program starts itself;
* ``listening``: nodes that wait for programs, and the program's invitations to them;
* ``node``, ``node_pool``: the daemon on another machine.
"""
