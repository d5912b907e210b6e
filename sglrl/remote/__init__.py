"""A client for a pool that another process has launched.

* ``client``: ``connect``, the client's side;
* ``pool``, ``driver``: the pool and the fabric of such a client, whose one worker is the
  process that launched the pool;
* ``server``: the driver's side;
* ``admission``: requests of remote clients become calls of the driver's own fabric;
* ``forwarding``: the answers of these calls go back to the clients.
"""
