"""All messages between processes, as msgspec structs and as bytes.

A module contains either the messages between certain processes, with a union of structs for each
direction, or the arguments and results in such messages:

* ``calls``: messages between the driver and a worker;
* ``engine``: arguments and results of the endpoints of an engine worker;
* ``adapters``: arguments of the endpoints for LoRA adapters;
* ``weights``: messages between the driver and every rank of every worker, or a sender of weights;
* ``remote``: messages between the driver and a client in another process;
* ``processes``: messages between the driver and its fork server;
* ``nodes``: messages between the driver and the daemons of other machines.

``codec`` converts messages into frames and back. A message is one msgpack frame. Raw frames may
follow it. They contain the large binary arguments (numpy arrays, bytes) of its calls or items.

Rules: append fields with defaults, and never change a type. Hot structs are ``array_like`` and
``gc=False``. The modules other than ``codec`` contain only structs and the identities of sockets.
"""
