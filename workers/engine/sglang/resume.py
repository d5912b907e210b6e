"""Continue a request that another worker has begun.

The request continues like a request that SGLang itself has retracted. Its tokens so far are output,
not prompt, so every limit, stop string, penalty and grammar continues from its previous state. The
prefill covers prompt and output. No token is sent twice. The penalties are restored
by ``patches/penalties.py``.
"""

from __future__ import annotations

from array import array
from typing import Any


def begin(request: Any, ids: array[int]) -> None:
    """Mark a request as one that has already sent ``ids``.

    The request comes fresh from SGLang's constructor.
    """
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
            # Placeholders for the logprobs that another worker has sent.
            getattr(logprob, f"{name}_val").extend([None] * count)
            getattr(logprob, f"{name}_idx").extend([None] * count)
        request.send_output_token_logprobs_offset = count


def enter(request: Any) -> None:
    """Prepare a resumed request that SGLang is about to queue.

    Advance its grammar, if any, to the end of the output. Request logprobs from there on. If the
    grammar rejects the output, the request ends with an error, like a request whose grammar cannot
    be compiled.
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
