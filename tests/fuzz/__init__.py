"""Mutated messages at every mailbox: nobody raises, and whoever behaves is served as if alone.

``SGLRL_FUZZ_FRAMES``: messages in all (``tox run -e fuzz`` takes more of them than ``tox`` does).
``SGLRL_FUZZ_SEED``: another one finds other things.
"""
