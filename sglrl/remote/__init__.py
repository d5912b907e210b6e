"""Clients that use a pool which another process has launched.

* ``client``: ``connect``, which makes such a client;
* ``pool``, ``driver``: the pool and the driver of such a client. For this driver, the process that
  launched the pool is a single worker;
* ``server``: the side of the process that launched the pool. It serves the clients;
* ``admission``: turns the requests of clients into calls of that process's own driver;
* ``forwarding``: sends the answers of these calls to the clients.
"""
