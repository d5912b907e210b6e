"""The client of an engine pool, which samples tokens and computes logprobs.

* ``client``: ``Client`` with ``generate``, ``stream`` and ``session``;
* ``scores``: the methods of ``Client`` that compute logprobs of given tokens.
"""
