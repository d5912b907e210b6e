"""ZeroMQ ROUTER and DEALER sockets. The only package that imports zmq.

* ``router``: the driver's end, for all peers;
* ``dealers``: a peer's end, on an event loop or polled by a thread;
* ``question``: one message and its answer, and why there is none;
* ``handshakes``: checks the keys of peers, and limits unfinished handshakes;
* ``pump``: drains a socket on an event loop;
* ``sockets``: socket options, sending, receiving and closing; CURVE keys.

With keys, a connection is encrypted and both ends authenticate (CURVE). A peer with an unknown key
is refused before any of its messages is read, even if no handler answers ZeroMQ's question.

Over tcp both ends send heartbeats (``heartbeat_timeout``) from ZeroMQ's own thread. When nothing
arrives on a connection for this time, the end that notices closes the connection. The effect is the
same as if the other end had closed it: a DEALER calls ``on_break``; a ROUTER calls the driver's
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
