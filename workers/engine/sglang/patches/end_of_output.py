"""Decide when an output ends, by SGLang's rules with four changes.

* A request may reach its length limit with a token that also ends the output in another way: an
  end of sequence, a stop token, or the end of a stop string. The output is then complete. SGLang
  (0.5.17 to 0.5.23) checks the length first. At the limit it checks nothing else, and reports
  "length", so a trainer that masks truncated answers masks this answer, too.
* SGLang runs an aborted request for one more step. If the token of this step ends the output, this
  patch reports the output as complete, not as aborted. Without this change, a caller that continues
  aborted outputs, as sessions do, would continue after the end.
* ``ignore_eos`` concerns only the model's own end of sequence. SGLang also ignores the request's
  ``stop_token_ids``.
* ``min_new_tokens`` holds for every kind of end. SGLang only keeps the sampler from drawing end
  tokens before the minimum. With this patch, a match of a stop string or a stop expression counts
  only if it ends after the minimum. It may begin earlier. vLLM does the same.
"""

from __future__ import annotations

from functools import wraps
from http import HTTPStatus
from typing import Any

from sglang.srt.managers import schedule_batch
from sglang.srt.managers.schedule_batch import (
    FINISH_ABORT,
    FINISH_LENGTH,
    FINISH_MATCHED_STR,
    FINISH_MATCHED_TOKEN,
    FINISHED_MATCHED_REGEX,
    Req,
)

from ..patch import Setup

_update = Req.update_finish_state
_check_tokens = Req._check_token_based_finish
_check_strings = Req._check_str_based_finish


def install(setup: Setup) -> None:
    """Patch SGLang's requests."""
    Req.update_finish_state = _update_finish_state
    Req._check_token_based_finish = _check_token_based_finish
    Req._check_str_based_finish = _check_str_based_finish


# With ``wraps``, the methods below have the names and the docstrings of SGLang's methods.


@wraps(_update)
def _update_finish_state(self: Any, new_accepted_len: int = 1) -> None:
    ended = self.finished()
    _update(self, new_accepted_len)
    reason = self.finished_reason
    # An abort with a status is an error, and no caller requested it.
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
    early = params.min_new_tokens - len(self.output_ids) + len(new_accepted_tokens)
    new_accepted_tokens = new_accepted_tokens[max(0, early) :]
    if not params.ignore_eos or not params.stop_token_ids:
        return bool(_check_tokens(self, new_accepted_tokens))
    for i, token in enumerate(new_accepted_tokens):
        if token in params.stop_token_ids:
            self.finished_reason = FINISH_MATCHED_TOKEN(matched=token)
            self.finished_len = len(self.output_ids) - len(new_accepted_tokens) + i + 1
            return True
    return False


@wraps(_check_strings)
def _check_str_based_finish(self: Any, new_accepted_len: int = 1) -> bool:
    params = self.sampling_params
    least = params.min_new_tokens
    if not least or not (params.stop_strs or params.stop_regex_strs):
        return bool(_check_strings(self, new_accepted_len))
    if len(self.output_ids) <= least:
        return False
    # A match has at most ``stop_str_max_len`` or ``stop_regex_max_len`` tokens.
    size = max(params.stop_str_max_len, params.stop_regex_max_len) + new_accepted_len
    start = max(0, len(self.output_ids) - size)
    before = self.tokenizer.decode(self.output_ids[start : max(start, least)])
    first = max(least, len(self.output_ids) - new_accepted_len) + 1
    for count in range(first, len(self.output_ids) + 1):
        text = self.tokenizer.decode(self.output_ids[start:count])
        # The last character of ``before`` may be incomplete.
        reason = _match(params, text, len(before.rstrip("\ufffd")))
        if reason is not None:
            self.finished_reason, self.finished_len = reason, count
            return True
    return False


def _match(params: Any, text: str, least: int) -> Any:
    """Return the finish reason of a match that ends after ``least`` characters, or None."""
    for stop in params.stop_strs:
        if text.find(stop, max(0, least - len(stop) + 1)) >= 0:
            return FINISH_MATCHED_STR(matched=stop)
    for stop in params.stop_regex_strs:
        try:
            pattern = schedule_batch.re.compile(stop)
            match = pattern.search(text)
            while match is not None and match.end() <= least:
                match = pattern.search(text, match.start() + 1)
        except (schedule_batch.re.error, RecursionError) as error:
            return FINISH_ABORT(
                f"invalid stop_regex {stop!r}: {error}", HTTPStatus.BAD_REQUEST, "BadRequestError"
            )
        if match is not None:
            return FINISHED_MATCHED_REGEX(matched=stop)
    return None
