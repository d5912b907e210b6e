"""ZeroMQ ROUTER and DEALER sockets. The only package that imports zmq.

* ``router``: the driver's end, for all peers;
* ``dealers``: a peer's end, on an event loop or polled by a thread;
* ``question``: sends one message, and returns its answer or the reason why there is none;
* ``handshakes``: checks the keys of peers, and limits unfinished handshakes;
* ``pump``: receives the messages of a socket on an event loop;
* ``sockets``: opens, uses and closes sockets, and makes CURVE keys.

With keys, a connection is encrypted and both ends authenticate (CURVE). A peer with an unknown key
is refused before any of its messages is read, even if no handler is there to check the key.

Over tcp both ends send heartbeats from ZeroMQ's own thread. When nothing arrives on a connection
for ``heartbeat_timeout`` seconds, the waiting end closes the connection. The effect is the same as
if the other end had closed it: a DEALER calls ``on_break``, and a ROUTER calls the driver's
``on_break`` and forgets the peer.
"""

from .dealers import ZmqDealer, ZmqPolledDealer
from .question import ask, check_port
from .router import ZmqRouter
from .sockets import key_pair, public_key

__all__ = [
    "ZmqDealer",
    "ZmqPolledDealer",
    "ZmqRouter",
    "ask",
    "check_port",
    "key_pair",
    "public_key",
]
