"""Continue a request that another worker has begun.

The request continues like a request that SGLang itself has retracted. Its tokens so far are output
and not prompt, so every limit, stop string, penalty and grammar continues from its previous state.
The prefill covers the prompt and this output. No token is sent twice.
``patches/penalties.py`` restores the penalties.
"""

from __future__ import annotations

from array import array
from typing import Any

from .commands import Resume


class Resumes:
    """The requests that another worker has begun, until SGLang has queued them."""

    def __init__(self) -> None:
        self._announced: dict[str, Resume] = {}
        """Commands whose requests have not arrived yet, by SGLang's request id."""
        self._entering: set[str] = set()
        """SGLang's ids of requests that have arrived and that SGLang has not queued yet."""

    def announce(self, command: Resume) -> None:
        """Keep a command until its request arrives in ``begin``."""
        self._announced[command.rid] = command

    def begin(self, request: Any) -> None:
        """Give an announced request the tokens that were already sent.

        Call this directly after SGLang has constructed the request.
        """
        command = self._announced.pop(request.rid, None)
        if command is not None:
            _begin(request, command.ids)
            self._entering.add(request.rid)

    def enter(self, request: Any) -> None:
        """Prepare a request that SGLang is about to queue, if it is resumed."""
        if request.rid in self._entering:
            self._entering.discard(request.rid)
            if not request.finished():
                _enter(request)

    def discard(self, rid: str) -> None:
        """Drop a request that ends before SGLang queues it."""
        self._entering.discard(rid)


def _begin(request: Any, ids: array[int]) -> None:
    count = len(ids)
    request.output_ids = array("q", ids)
    request.send_token_offset = count
    if request.return_logprob:
        logprob = request.logprob
        for name in (
            "output_token_logprobs",
            "output_top_logprobs",
            "output_token_ids_logprobs",
        ):
            # These are placeholders for the logprobs that another worker has already sent.
            getattr(logprob, f"{name}_val").extend([None] * count)
            getattr(logprob, f"{name}_idx").extend([None] * count)
        request.send_output_token_logprobs_offset = count


def _enter(request: Any) -> None:
    """Set up the grammar and the logprobs of a resumed request.

    The grammar, if any, advances to the end of the output so far. Logprobs are computed only for
    later tokens. If the grammar rejects the output, the request ends with an error, like a request
    whose grammar cannot be compiled.
    """
    if request.return_logprob:
        request.logprob_start_len = len(request.origin_input_ids) + len(request.output_ids)
    if request.grammar is not None:
        try:
            for token in request.output_ids:
                request.grammar.accept_token(token)
        except ValueError:
            request.set_finish_with_abort(
                f"the {len(request.output_ids)} tokens to go on from do not fit the grammar"
            )
