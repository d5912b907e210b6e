"""The driver's decisions as pure state machines: no event loop, socket, clock, thread or chance.

``now`` (seconds on any monotonic clock) is always an argument; effects are appended to an outbox
that the shell in ``sglrl.driver`` executes. Everything here runs in tests without any I/O.
"""
