"""The client of an engine pool: tokens in, tokens and logprobs out.

* ``client``: ``Client`` with ``generate``, ``stream`` and ``session``;
* ``scores``: its methods that compute logprobs of given tokens.
"""
