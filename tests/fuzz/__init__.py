"""Mutated messages at every mailbox: nothing raises, and valid peers are served as usual.

``SGLRL_FUZZ_FRAMES`` is the total number of messages (``tox run -e fuzz`` uses more than ``tox``).
``SGLRL_FUZZ_SEED`` selects other mutations, which may find other errors.
"""
