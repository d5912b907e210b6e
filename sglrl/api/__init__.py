"""What a program calls first.

* ``launching``: ``launch`` starts engine workers;
* ``blocking``: the same client without asyncio.
"""
