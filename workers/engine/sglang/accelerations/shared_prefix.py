"""Prefill one request of a group with a shared prefix before the others.

A group is, for example, n samples of one prompt, or requests with the same system prompt.
``core/prefix_groups.py`` decides which requests wait.

SGLang's scheduler plans the next prefill without the requests that wait. They keep their places in
SGLang's queue, so that the rest of SGLang still finds them. SGLang itself has two similar
mechanisms. Its ``Engine`` prefills the prompt of n samples with an extra request before the
samples. Its in-batch prefix caching (``schedule_policy="lpm"``) puts requests with a shared prefix
last, but in the same step if there is room.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import numpy as np
from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams
from sglang.srt.mem_cache.radix_cache import RadixKey

from sglrl.core.prefix_groups import LEAST, Prompt, followers

from .. import compat
from ..patch import Setup

_MOST: Final = 512
"""Maximum number of waiting requests considered, from the first on. A step prefills fewer."""


def install(setup: Setup) -> Callable[[Any], bool]:
    """Return a function that makes the scheduler plan prefills without the requests that wait."""
    return _wrap


def _wrap(scheduler: Any) -> bool:
    plan_prefill = scheduler.get_new_batch_prefill
    shared = SharedPrefix(scheduler)
    tree = scheduler.tree_cache
    # The cache of a state-space model has states only at the ends of prompts. A request that
    # computes its last token again cannot use such a state.
    if getattr(tree, "disable", True) or tree.supports_mamba():
        return False

    def plan_with_shared_prefixes(running_batch: Any) -> Any:
        waiting: list[Any] = scheduler.waiting_queue
        if (running_batch.batch_is_full or not waiting) and scheduler.chunked_req is None:
            # In this case, SGLang checks only grammars and candidates for preemption.
            return plan_prefill(running_batch)
        later = shared.later(waiting)
        if not later:
            return plan_prefill(running_batch)
        scheduler.waiting_queue = [request for request in waiting if request not in later]
        plan = plan_prefill(running_batch)
        left, before = set(scheduler.waiting_queue), set(waiting)
        come = [request for request in scheduler.waiting_queue if request not in before]
        scheduler.waiting_queue = [r for r in waiting if r in later or r in left] + come
        return plan

    scheduler.get_new_batch_prefill = plan_with_shared_prefixes
    return True


class SharedPrefix:
    """Finds the requests that the next prefill omits. All ranks of a replica find the same ones."""

    def __init__(self, scheduler: Any) -> None:
        self._scheduler = scheduler

    def later(self, waiting: list[Any]) -> set[Any]:
        """Return the waiting requests that the next prefill should omit."""
        begun = list(self._scheduler.sglrl_prefilling)
        in_parts = self._scheduler.chunked_req
        if in_parts is not None and in_parts not in begun:
            begun.append(in_parts)
        if len(begun) + len(waiting) < 2:
            return set()
        candidates = waiting[:_MOST]
        both = begun + candidates
        indices = followers(
            [_prompt(request) for request in begun],
            [_prompt(request) for request in candidates],
            lambda index: self._cached(both[index]),
        )
        return {candidates[index] for index in indices}

    def _cached(self, request: Any) -> int:
        """Return the number of the request's tokens in the prefix cache."""
        ids = request.origin_input_ids + request.output_ids
        key = RadixKey(ids, request.extra_key)
        return compat.matched(self._scheduler.tree_cache.match_prefix(MatchPrefixParams(key=key)))


def _prompt(request: Any) -> Prompt:
    """Return the request's prompt and its output so far. Cache the result until the next token."""
    size = len(request.origin_input_ids) + len(request.output_ids)
    had = getattr(request, "sglrl_prompt", None)
    if had is not None and had[0] == size:
        return had[1]  # type: ignore[no-any-return]
    most = size - 1
    if request.return_logprob and request.logprob_start_len >= 0:
        # Logprobs of the prompt must be computed, because the cache does not contain them.
        most = min(most, request.logprob_start_len)
    tokens = b""
    if size > LEAST and request.multimodal_inputs is None and request.input_embeds is None:
        ids = request.origin_input_ids + request.output_ids
        tokens = np.asarray(ids, np.int64).tobytes()
    prompt = Prompt(tokens, 8, most, (request.extra_key, request.priority))
    request.sglrl_prompt = size, prompt
    return prompt
