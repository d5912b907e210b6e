"""Frames between one driver and its workers.

* ``base``: the interface of a transport;
* ``addresses``: which addresses are allowed, and how to reach them;
* ``zmq``: ZeroMQ ROUTER and DEALER sockets, the only package that imports zmq;
* ``memory``: both sides in one process, for tests and benchmarks;
* ``shared_rows``: rows of logprobs in memory that a worker shares with its driver;
* ``curve_keys``: folders of CURVE keys;
* ``dropped``: counts and logs dropped messages.
"""
