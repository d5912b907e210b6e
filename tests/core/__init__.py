"""Tests of the core and the wire. They need no event loop, no I/O, only msgspec and numpy."""
