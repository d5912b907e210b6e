"""Send messages, which are lists of frames, between a driver and its workers.

* ``base``: the interface of a transport;
* ``addresses``: checks addresses, and finds the address at which another machine is reached;
* ``zmq``: ZeroMQ ROUTER and DEALER sockets, the only package that imports zmq;
* ``memory``: both sides in one process, for tests and benchmarks;
* ``shared_rows``: rows of logprobs in memory that a worker shares with its driver;
* ``curve_keys``: folders of CURVE keys;
* ``dropped``: counts and logs dropped messages;
* ``system_limits``: limits of the system, such as open files and threads;
* ``unclosed``: warns about objects that are never closed.
"""
