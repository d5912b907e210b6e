"""The decisions of the driver as pure state machines.

The state machines use no event loop, socket, clock, thread or randomness.

``now`` (seconds on any monotonic clock) is always an argument. The state machines append effects to
an outbox. The shell in ``sglrl.driver`` executes these effects. All modules of this package run in
tests without any I/O.
"""
