"""Tests of the core and the wire. They need msgspec and numpy, and no I/O."""
