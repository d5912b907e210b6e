"""The methods of ``Client`` that compute logprobs of given tokens."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from typing import Any, Literal, Unpack, overload

from .. import tracing
from ..errors import InvalidRequest
from ..inference.completion import NextTokenLogprobs, ScoreLogprobs, Scores
from ..inference.number_checks import check_number
from ..inference.options import CallKeywords
from ..inference.prompts import check_given_ids
from ..inference.spans import trace_call
from ..inference.tokens import TokenIds, check_ids
from ..wire.engine import EngineInfo
from .with_requests import WithRequests


class ScoreMethods(WithRequests):
    """The methods of ``Client`` that compute logprobs of given tokens, without sampling."""

    @property
    def info(self) -> EngineInfo:
        """The properties of the loaded model: vocabulary, context length, dtype, device, ..."""
        return self.requests.info

    @overload
    async def score(  # type: ignore[overload-overlap]
        self,
        input_ids: TokenIds,
        *,
        start: int = 0,
        top_logprobs: Literal[0] = 0,
        temperature: float = 1.0,
        **options: Unpack[CallKeywords],
    ) -> ScoreLogprobs: ...
    @overload
    async def score(
        self,
        input_ids: TokenIds,
        *,
        start: int = 0,
        top_logprobs: int,
        temperature: float = 1.0,
        **options: Unpack[CallKeywords],
    ) -> Scores: ...
    @overload
    async def score(  # type: ignore[overload-overlap]
        self,
        input_ids: Sequence[TokenIds],
        *,
        start: int = 0,
        top_logprobs: Literal[0] = 0,
        temperature: float = 1.0,
        **options: Unpack[CallKeywords],
    ) -> list[ScoreLogprobs]: ...
    @overload
    async def score(
        self,
        input_ids: Sequence[TokenIds],
        *,
        start: int = 0,
        top_logprobs: int,
        temperature: float = 1.0,
        **options: Unpack[CallKeywords],
    ) -> list[Scores]: ...

    async def score(
        self,
        input_ids: TokenIds | Sequence[TokenIds],
        *,
        start: int = 0,
        top_logprobs: int = 0,
        temperature: float = 1.0,
        **options: Unpack[CallKeywords],
    ) -> Any:
        """Return the model's logprobs of given tokens, without generating.

        Args:
            input_ids: tokens [length], or a list of token sequences. The maximum length is the same
                as for ``generate``.
            start: the first position to return. Earlier positions are context only.
            top_logprobs: also return this number of most likely tokens at each position.
            temperature: the positive number by which the logits are divided.
            **options: ``timeout``, ``worker``, ``priority`` and ``lora``, as for ``generate``.

        Returns:
            ``ScoreLogprobs``, an array float32 [length - start]: ``log p(token i | tokens before
            i)`` at this temperature. Position 0 has no context, so its value is NaN. With
            ``top_logprobs``, the result is ``Scores``. A list of sequences gives a list of results.

            Each result has a ``version``, the weight version at the launch of the forward pass for
            the last position. When the result arrives, ``weight_version`` may already be newer. A
            score that is submitted after ``update_weights`` has returned has the new version.

            The engine may prefill a text in several parts, and a weight update may happen between
            two parts. After ``update_weights(inflight="continue")``, each part has the version of
            its own forward pass, and ``versions`` lists these versions. With the other values of
            ``inflight``, all positions have one version.
        """
        requests = self.requests
        checked = requests.options(top_logprobs=top_logprobs, **options)
        several, prompts = check_given_ids(input_ids, requests.vocab_size)
        if isinstance(start, bool) or not isinstance(start, int) or start < 0:
            raise InvalidRequest(f"start must be an integer of at least 0, got {start!r}")
        check_number("temperature", temperature, 0.0, math.inf, open_low=True)
        calls, futures = requests.scores(prompts, start, float(temperature), checked)
        results = await requests.submit_all(calls, futures)
        return results if several else results[0]

    async def next_token_logprobs(
        self,
        ids: TokenIds,
        top_k: int | None = None,
        **options: Unpack[CallKeywords],
    ) -> NextTokenLogprobs:
        """Return the distribution of the next token after ``ids``.

        The values are the float32 log-softmax of the model's logits. The engine batches concurrent
        calls with each other and with the prefills of ``generate``. A prefix that ``ids`` share
        with earlier calls comes from the prefix cache.

        Args:
            ids: tokens [length].
            top_k: return only this number of most likely tokens. None: return all tokens.
            **options: ``timeout``, ``worker``, ``priority`` and ``lora``, as for ``generate``.

        Returns:
            ``NextTokenLogprobs``. Its ``version`` is the weight version at the launch of the
            forward pass that computed the distribution. When the result arrives,
            ``weight_version`` may already be newer. A call that is submitted after
            ``update_weights`` has returned has the new version.

        Raises:
            UsageError: an argument is wrong, and nothing was sent. The subclass ``InvalidRequest``
                is raised for a wrong prompt or ``top_k``.
            Overloaded, DeadlineExceeded, WorkerLost, EngineError, Closed: see ``sglrl.errors``.
        """
        requests = self.requests
        checked = check_ids(ids, requests.vocab_size)
        future: asyncio.Future[NextTokenLogprobs] = asyncio.get_running_loop().create_future()
        call = requests.next_token_call(checked, top_k, future, requests.options(**options))
        requests.driver.submit(call)
        if tracing.tracer is not None:
            trace_call(call, future, requests.info.model)
        try:
            return await future
        except BaseException:
            requests.driver.cancel(call)
            raise
