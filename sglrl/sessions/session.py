"""One conversation, token in and token out: the engine sees every turn the very tokens that it
sampled and was given before, and the new ones behind them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, Protocol, Self, SupportsFloat

import numpy as np
from numpy.typing import NDArray

from ..driver.driver import now
from ..errors import Closed, UsageError
from ..inference.completion import Completion
from ..inference.prompts import Message
from ..inference.tokens import TokenIds
from .gate import Gate
from .session_spec import SessionSpec
from .session_state import SessionState
from .trajectory import Trajectory


class TimeLimit(Protocol):
    """The time limit of a task, as ``asyncio.timeout``. A paused run stops its clock."""

    def when(self) -> float | None: ...

    def reschedule(self, when: float | None) -> None: ...


class Session:
    """Made by ``Client.session``; an async context manager. Turns are sampled one at a time.

    The prompt of each turn is exactly the tokens of the turns before and what was observed behind
    them; nothing that was sampled is tokenized again. Turns go to the worker that holds their
    prefix, unless it is overloaded.
    """

    def __init__(
        self,
        spec: SessionSpec,
        gate: Gate | None = None,
        on_turn: Callable[[int, int, int], None] | None = None,
        seed: int | None = None,
    ) -> None:
        self._spec = spec
        self._gate = gate
        self._state = SessionState(spec, on_turn, seed)
        self._at_gate: asyncio.Future[None] | None = None
        self._limit: TimeLimit | None = None
        """How long all of it may take, not counting what is spent at the gate."""
        self.metadata: dict[str, Any] = dict(spec.metadata)
        """Goes into the trajectory: anything msgpack can hold."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        self.close()

    def __reduce__(self) -> NoReturn:
        # It stays where its client is, which says so.
        self._spec.client.__reduce__()

    def close(self) -> None:
        """No further turn is sampled, and one that is being sampled is given up: ``generate``
        raises ``Closed``."""
        if self._at_gate is not None and not self._at_gate.done():
            self._at_gate.set_result(None)
        self._state.close()

    # --- turns ------------------------------------------------------------------------------------

    async def generate(self, **values: Any) -> Completion:
        """Sample the next turn, with logprobs.

        Args:
            **values: the fields of ``SamplingParams``; they override the session's.
                ``max_new_tokens`` is lowered to what fits.

        A turn that a weight update with ``inflight="abort"`` returned goes on with the new weights
        from where it was: ``Completion.versions`` says where. So does one that ``Client.abort`` or
        ``Client.pause`` returned.

        Raises:
            InvalidRequest: a value is wrong, or the context is full (``room`` is 0).
            UsageError: a turn is being sampled already.
            Closed: the session is closed.
            Overloaded, DeadlineExceeded, WorkerLost, EngineError: as ``Client.generate``; then the
                session is as it was before, and the turn may be tried again.
        """
        state, gate = self._state, self._gate
        prepared = state.begin(values)
        if gate is not None:
            if gate.opening is not None:
                await self._enter(gate)
            gate.inside += 1
        begun = state.take()
        try:
            before = state.tokens or await self._spec.ids()
            ids = state.prompt(before)
            encoded = None
            if ids is None:
                # Off the event loop.
                pending = state.pending[: state.taken]
                loop = asyncio.get_running_loop()
                encoded = await loop.run_in_executor(None, state.encode, pending)
                ids = before[: state.prompt_bytes] + encoded[0]
            limit, deadline = state.limits(ids, prepared)
            completion = None
            while completion is None or completion._chunks[-1].finish == "abort":
                future = state.ask(ids, prepared, limit, deadline, completion)
                try:
                    completion = await future
                except BaseException:
                    state.give_up()
                    raise
            if encoded is not None:
                _, state.messages, state.answer_at = encoded
            state.keep(ids, completion)
            return completion
        except BaseException as error:
            state.failed(error)
            raise
        finally:
            state.end(begun)
            if gate is not None:
                gate.leave()

    async def _enter(self, gate: Gate) -> None:
        limit, clock = self._limit, asyncio.get_running_loop().time
        until = None if limit is None else limit.when()
        left = None if until is None else until - clock()
        stopped = limit if left is not None and left > 0 else None
        state = self._state
        try:
            if stopped is not None:
                stopped.reschedule(None)
            while (opening := gate.opening) is not None and not state.closed:
                self._at_gate = asyncio.get_running_loop().create_future()
                await asyncio.wait((opening, self._at_gate), return_when=asyncio.FIRST_COMPLETED)
            if state.closed:
                raise Closed("the session was closed")
        except BaseException:
            state.busy = False
            raise
        finally:
            self._at_gate = None
            if stopped is not None and left is not None and not state.closed:
                stopped.reschedule(clock() + left)

    def observe(self, what: str | TokenIds | Message | Sequence[Message]) -> None:
        """Append what the policy did not sample: text or token ids as they are, or messages in the
        chat template's form (only in a session that began with messages).

        Text is tokenized by itself. Messages end the assistant's turn and begin its next one. What
        is observed after the last turn is in no prompt, so it is not in the trajectory either; what
        is observed while a turn is being sampled comes behind that. A turn that fails leaves what
        was observed for the next one; see ``unobserve``.

        Raises:
            InvalidRequest: a token id is wrong, or a message lacks something. For what the template
                refuses, ``generate`` raises.
            UsageError: messages before the first turn, or without a template.
        """
        self._state.observe(what)

    def unobserve(self) -> None:
        """Take back what was observed since the last turn: it did not fit, or the chat template
        does not take it. What a turn that is being sampled has in its prompt stays."""
        self._state.unobserve()

    def reward(self, value: SupportsFloat) -> None:
        """Add to the reward of the last turn.

        Raises:
            UsageError: there is none, or the value is not finite.
        """
        self._state.reward(value)

    # --- what there is ----------------------------------------------------------------------------

    @property
    def ids(self) -> NDArray[np.int32]:
        """int32: all tokens up to the end of the last turn; empty before the first."""
        return np.frombuffer(self._state.tokens, "<i4")

    @property
    def turns(self) -> list[Completion]:
        """What was sampled, in order."""
        return self._state.turns[:]

    @property
    def oldest_version(self) -> int | None:
        """Policy version of the first token, or a lower bound while it is being sampled; None
        before."""
        return self._state.oldest

    @property
    def rewarded(self) -> bool:
        """Whether ``reward`` was called."""
        return self._state.rewarded

    @property
    def refused(self) -> bool:
        """Whether a turn failed because the client takes no calls any more."""
        return self._state.refused

    @property
    def room(self) -> int:
        """Tokens that fit the context behind those that there are, with those that were observed
        as ids; of what was observed as text or messages it is not known yet how many they are."""
        state = self._state
        observed = sum([len(item) for item in state.pending if isinstance(item, bytes)])
        used = (len(state.tokens) + observed) // 4
        return max(0, self._spec.most_tokens - used)

    @property
    def text(self) -> str:
        """All that was sampled and observed behind the prompt, special tokens included."""
        state = self._state
        return state.requests.decode(np.frombuffer(state.response, "<i4").tolist(), False)

    def trajectory(self, reward: SupportsFloat | None = None) -> Trajectory:
        """What a trainer needs of it. ``reward`` is added to the last turn's.

        Raises:
            UsageError: no turn was sampled.
        """
        if reward is not None:
            self.reward(reward)
        state = self._state
        if not state.turns:
            raise UsageError("no turn was sampled, so there is no trajectory")
        return Trajectory.from_turns(
            state.tokens[: state.prompt_bytes],
            state.response,
            state.starts,
            state.turns,
            state.rewards,
            total=now() - state.began,
            generating=state.generating,
            metadata=dict(self.metadata),
        )


def session_of_sample(
    spec: SessionSpec,
    gate: Gate,
    on_turn: Callable[[int, int, int], None],
    seed: int | None,
    item: int,
    sample: int,
) -> Session:
    """Of a run, whose numbers go into the metadata, unless these have such names already."""
    session = Session(spec, gate, on_turn, seed)
    session.metadata.setdefault("item", item)
    session.metadata.setdefault("sample", sample)
    return session
