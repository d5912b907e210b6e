"""A client for a pool that another process has launched.

* ``client``: ``connect``, the client's side;
* ``driver``: the fabric of such a client; its one worker is the other process's pool;
* ``server``: the driver's side;
* ``forwarding``: requests of remote clients become calls of the driver's own fabric.
"""
