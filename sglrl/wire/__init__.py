"""Everything that crosses a process boundary, as msgspec structs and as bytes.

One module holds one protocol, with a union of structs for each direction:

* ``calls``: the driver and a worker;
* ``engine``: arguments and results of the endpoints of an engine worker;
* ``adapters``: arguments of those that concern LoRA adapters;
* ``weights``: the driver, every rank of every worker, and a sender in another process;
* ``remote``: the driver and a client in another process;
* ``processes``: the driver and its fork server;
* ``nodes``: the driver and the daemons of other machines.

``codec`` turns them into frames and back. A message is one msgpack frame. Raw frames may follow it:
they hold the large binary arguments (numpy arrays, bytes) of its calls or items, in order.

Rules: append fields with defaults, never change a type. Hot structs are ``array_like`` and
``gc=False``. These modules hold structs and the identities of sockets only.
"""
