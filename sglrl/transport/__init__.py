"""Frames between one driver and its workers.

* ``base``: the interface of a transport;
* ``zmq``: ZeroMQ ROUTER and DEALER sockets, the only module that imports zmq;
* ``memory``: both sides in one process, for tests and benchmarks;
* ``shared_rows``: rows of logprobs in memory that a worker shares with its driver;
* ``curve_keys``: folders of CURVE keys;
* ``dropped``: counts and logs dropped messages.
"""
