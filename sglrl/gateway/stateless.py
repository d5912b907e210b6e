"""Turns that belong to no session.

If a client, a pause or a weight update aborts a turn, the answer has the tokens so far.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import partial

from ..core.calls import Call
from ..driver.driver import now
from ..errors import Closed
from ..inference.completion import Completion
from ..inference.replies import GenerationReply, OnChunk
from ..sessions.session import Session
from ..sessions.session_spec import SessionSpec
from .conversations import OnTokens, Turn, gathered, options_of, sibling
from .dialect import TurnRequest
from .unfinished import aborted, without_tokens


class StatelessTurn(Turn):
    """The choices of requests that belong to no session. All choices are sampled at the same time.

    Args:
        base: the spec whose settings apply to all requests.
        requests: the requests, one for each prompt.
        on_tokens: is called with new tokens if the requests are streams.

    Raises:
        InvalidRequest: a value of a request is wrong.
    """

    def __init__(
        self, base: SessionSpec, requests: Sequence[TurnRequest], on_tokens: OnTokens
    ) -> None:
        self._choices: list[_Choice] = []
        drawn: Counter[int | None] = Counter()
        for request in requests:
            spec, seed = sibling(base, request), request.sampling.get("seed")
            for _ in range(request.choices):
                on_chunk = partial(on_tokens, len(self._choices), spec)
                self._choices.append(_Choice(spec, request, drawn[seed], on_chunk))
                drawn[seed] += 1
        super().__init__(self._sample(), False)

    def abort(self, rid: str | None = None) -> int:
        """End the choices of a request. They keep their tokens, with finish_reason "abort".

        If the request is not a stream, up to 64 tokens are lost, which the worker has not reported
        yet.

        Args:
            rid: the id of the request. None: all requests.

        Returns:
            The number of choices that were running.
        """
        running = [one for one in self._choices if one.running and rid in (None, one.rid)]
        for choice in running:
            choice.abort()
        return len(running)

    async def _sample(self) -> list[Completion]:
        return await gathered([choice.sample() for choice in self._choices])


class _Choice:
    """Samples one choice of a request.

    Args:
        spec: the settings of the choice.
        request: the request.
        number: the number of the choice among the choices with the same seed.
        on_chunk: is called with new tokens.
    """

    def __init__(
        self, spec: SessionSpec, request: TurnRequest, number: int, on_chunk: OnChunk
    ) -> None:
        self.rid = request.rid
        self.running = True
        self.spec = spec
        self._request = request
        self._session = Session(spec, path=(number,))
        self._session.sampler.continues = False
        self._options = options_of(request, spec, on_chunk)
        self._call: Call | None = None
        self._aborted = False
        self._began = now()

    async def sample(self) -> Completion:
        try:
            if self._options["max_new_tokens"] == 0:
                return await self._without_tokens()
            return await self._session.generate(**self._options)
        except Closed:
            if not self._aborted:
                raise
            return await self._so_far()
        finally:
            self.running = False

    def abort(self) -> None:
        self.running, self._aborted = False, True
        self._call = self._session.sampler.call
        self._session.close()

    async def _without_tokens(self) -> Completion:
        """Return a completion without tokens, for a request that wants only prompt logprobs."""
        prompt, request = await self.spec.ids(), self._request
        params = self.spec.prepare({**request.sampling, "max_new_tokens": 1}).params
        return without_tokens(self.spec, prompt, params, request.top_logprobs, self._began)

    async def _so_far(self) -> Completion:
        prompt = await self.spec.ids()
        reply = None if self._call is None else self._call.reply
        chunks = reply.chunks or () if isinstance(reply, GenerationReply) else ()
        params = self.spec.prepare(dict(self._request.sampling)).params
        return aborted(self.spec, prompt, chunks, params, self._request.top_logprobs, self._began)
