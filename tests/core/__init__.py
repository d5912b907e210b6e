"""The pure core and the wire: no event loop, no I/O, nothing installed but msgspec and numpy."""
