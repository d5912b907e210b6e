"""``sglrl top``: watch a running pool in the terminal, and act on its workers.

* ``command``: the command and its options;
* ``tables``: a snapshot of a pool as tables of text;
* ``app``: the Textual application.
"""
