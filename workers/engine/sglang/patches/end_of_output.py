"""Decide when an output ends, by SGLang's rules with three changes.

* The last token that a request may have can also end the output: an end of sequence, a stop token,
  or the end of a stop string. SGLang (0.5.17 to 0.5.23) checks the length first, and then nothing
  else. It reports a complete answer as "length", and a trainer that masks truncated answers masks
  this one, too.
* An abort lets a request make one more step. If the token of this step ends the output, the output
  is complete. Otherwise a caller that continues aborted outputs (a session's turn) would continue
  after the end.
* ``ignore_eos`` is about the model's own end of sequence. SGLang also ignores the request's
  ``stop_token_ids``.
"""

from __future__ import annotations

from functools import wraps
from typing import Any

from sglang.srt.managers.schedule_batch import (
    FINISH_ABORT,
    FINISH_LENGTH,
    FINISH_MATCHED_TOKEN,
    Req,
)

from ..patch import Setup

_update = Req.update_finish_state
_check_tokens = Req._check_token_based_finish


def install(setup: Setup) -> None:
    """Patch SGLang's requests."""
    Req.update_finish_state = _update_finish_state
    Req._check_token_based_finish = _check_token_based_finish


# ``wraps`` lets code that reads the source of these methods find SGLang's source.


@wraps(_update)
def _update_finish_state(self: Any, new_accepted_len: int = 1) -> None:
    ended = self.finished()
    _update(self, new_accepted_len)
    reason = self.finished_reason
    # An abort with a status is an error. No caller asked for it.
    asked = type(reason) is FINISH_ABORT and reason.status_code is None
    if ended or not (asked or type(reason) is FINISH_LENGTH):
        return
    if not self.output_ids or not new_accepted_len:
        return
    self.finished_reason = None
    self._check_str_based_finish(new_accepted_len)
    if self.finished_reason is None:
        self._check_token_based_finish(self.output_ids[-new_accepted_len:])
    if self.finished_reason is None:
        self.finished_reason = reason


@wraps(_check_tokens)
def _check_token_based_finish(self: Any, new_accepted_tokens: list[int]) -> bool:
    params = self.sampling_params
    if not params.ignore_eos or not params.stop_token_ids:
        return bool(_check_tokens(self, new_accepted_tokens))
    for i, token in enumerate(new_accepted_tokens):
        if token in params.stop_token_ids:
            self.finished_reason = FINISH_MATCHED_TOKEN(matched=token)
            self.finished_len = len(self.output_ids) - len(new_accepted_tokens) + i + 1
            return True
    return False
