"""One conversation of several turns, exact to the token.

In every turn the engine receives exactly the tokens of the earlier turns, sampled and observed,
followed by the new tokens.
"""

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
    """The time limit of a task, as ``asyncio.timeout``. Its clock stops while a run is paused."""

    def when(self) -> float | None: ...

    def reschedule(self, when: float | None) -> None: ...


class Session:
    """A conversation of several turns. ``Client.session`` returns one; an async context manager.

    Turns are sampled one at a time. The prompt of each turn consists of the exact tokens of the
    earlier turns and observations. Sampled tokens are never tokenized again. Each turn is sent to
    the worker that holds its prefix, unless that worker is overloaded.
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
        """Time limit of the whole session. Time spent waiting at the gate does not count."""
        self.metadata: dict[str, Any] = dict(spec.metadata)
        """Metadata of the trajectory: values that msgpack can encode."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        self.close()

    def __reduce__(self) -> NoReturn:
        # A session cannot be pickled because its client cannot; raise the client's error.
        self._spec.client.__reduce__()

    def close(self) -> None:
        """Close the session. A running ``generate`` and every later one raise ``Closed``."""
        if self._at_gate is not None and not self._at_gate.done():
            self._at_gate.set_result(None)
        self._state.close()

    # --- turns ------------------------------------------------------------------------------------

    async def generate(self, **values: Any) -> Completion:
        """Sample the next turn, with logprobs.

        A weight update with ``inflight="abort"`` interrupts a turn. The turn then continues with
        the new weights from its last token; ``Completion.versions`` states the position. A turn
        that ``Client.abort`` or ``Client.pause`` interrupts continues in the same way.

        Args:
            **values: the fields of ``SamplingParams``. They override those of the session.
                ``max_new_tokens`` is reduced to the room that is left in the context.

        Raises:
            InvalidRequest: a value is wrong, or the context is full (``room`` is 0).
            UsageError: a turn is being sampled already.
            Closed: the session is closed.
            Overloaded, DeadlineExceeded, WorkerLost, EngineError: as for ``Client.generate``. The
                session is then unchanged, and the turn may be tried again.
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
                # Tokenize in a thread, so that the event loop is not blocked.
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
        """Append an observation: input that the policy did not sample.

        Observations become part of the prompt of the next turn. Observations after the last turn
        are in no prompt, so they are not in the trajectory. Observations made while a turn is
        being sampled come after that turn. If a turn fails, its observations are kept for the next
        turn; see ``unobserve``.

        Args:
            what: text, token ids or messages. Text is tokenized separately, and ids are used
                unchanged. Messages are rendered with the chat template: they end the assistant's
                turn and begin its next one. Only a session that began with messages accepts
                messages.

        Raises:
            InvalidRequest: a token id is wrong, or a message lacks a field. If the template rejects
                the messages, ``generate`` raises.
            UsageError: messages were given before the first turn, or in a session without messages.
        """
        self._state.observe(what)

    def unobserve(self) -> None:
        """Discard the observations since the last turn.

        Use this when observations do not fit, or when the chat template rejects them. Observations
        in the prompt of a turn that is being sampled are kept.
        """
        self._state.unobserve()

    def reward(self, value: SupportsFloat) -> None:
        """Add to the reward of the last turn.

        Raises:
            UsageError: no turn was sampled, or the value is not finite.
        """
        self._state.reward(value)

    # --- state ------------------------------------------------------------------------------------

    @property
    def ids(self) -> NDArray[np.int32]:
        """All tokens up to the end of the last turn, int32. Empty before the first turn."""
        return np.frombuffer(self._state.tokens, "<i4")

    @property
    def turns(self) -> list[Completion]:
        """The completions of all turns, in order."""
        return self._state.turns[:]

    @property
    def oldest_version(self) -> int | None:
        """Policy version of the first sampled token.

        While the first token is being sampled, this is a lower bound. Before that, it is None.
        """
        return self._state.oldest

    @property
    def rewarded(self) -> bool:
        """Whether ``reward`` was called."""
        return self._state.rewarded

    @property
    def refused(self) -> bool:
        """Whether a turn failed because the client no longer accepts calls."""
        return self._state.refused

    @property
    def room(self) -> int:
        """Number of tokens that still fit the context.

        Observed token ids count as used. Observed text and messages do not count, because their
        number of tokens is not known yet.
        """
        state = self._state
        observed = sum([len(item) for item in state.pending if isinstance(item, bytes)])
        used = (len(state.tokens) + observed) // 4
        return max(0, self._spec.most_tokens - used)

    @property
    def text(self) -> str:
        """The text of all tokens after the prompt, including special tokens."""
        state = self._state
        return state.requests.decode(np.frombuffer(state.response, "<i4").tolist(), False)

    def trajectory(self, reward: SupportsFloat | None = None) -> Trajectory:
        """Return the trajectory of the session, for a trainer.

        Args:
            reward: added to the reward of the last turn.

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
    """Return the session of one sample of a run.

    The numbers ``item`` and ``sample`` are added to the metadata, unless it has these names.
    """
    session = Session(spec, gate, on_turn, seed)
    session.metadata.setdefault("item", item)
    session.metadata.setdefault("sample", sample)
    return session
