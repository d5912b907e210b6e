"""One conversation of several turns, exact to the token.

In every turn the engine receives exactly the tokens of the earlier turns, sampled and observed,
followed by the new tokens.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn, Self, Unpack

import numpy as np
from numpy.typing import NDArray

from ..actors.actor import deadline_from
from ..core.calls import Call
from ..core.prefixes import Route
from ..core.turn_tree import ROOT
from ..driver.driver import now
from ..errors import Closed, InvalidRequest, UsageError
from ..inference.completion import Completion
from ..inference.message import ToolCall
from ..inference.options import SamplingOptions
from ..inference.prompts import Message, check_conversation, load_tokenizer
from ..inference.replies import OnChunk
from ..inference.sampling import DEFAULT_MAX_NEW_TOKENS, Prepared, own_names
from ..inference.tokens import TokenIds
from ..inference.tool_choice import ToolChoice
from .gate import Gate, TimeLimit
from .history import History
from .observations import Dialogue, Observation, as_observation, encode_observations, parsed
from .rewards import RewardValue
from .session_spec import SessionSpec
from .tools import OnError, Tool, run_tools
from .trajectory import Trajectory


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
        self._on_turn = on_turn
        """Called after each turn with the bytes of its prompt, the number of cached prompt tokens,
        and the number of new bytes."""
        self._seed = seed
        self._at_gate: asyncio.Future[None] | None = None
        self._limit: TimeLimit | None = None
        """Time limit of the whole session. Time spent waiting at the gate does not count."""
        self._route = Route(b"")
        self._history = History(spec, Dialogue(spec.messages, spec.begun))
        self._beginning: list[Message] | None = None
        """The messages with which ``rewrite`` has begun a new conversation; None: the spec's."""
        self._oldest: int | None = None
        self._pending: list[Observation] = []
        """Observations after the last turn."""
        self._taken = 0
        """Number of items of ``_pending`` in the prompt of the turn that is being sampled."""
        self._busy = self._closed = self._refused = False
        self._call: Call | None = None
        self._began = now()
        self._generating = 0.0
        """Total seconds spent waiting for turns."""
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
        self._closed = True
        if self._call is not None:
            future = self._call.reply.future
            if not future.done():
                self._spec.requests.driver.cancel(self._call)
                future.set_exception(Closed("the session was closed"))

    # --- turns ------------------------------------------------------------------------------------

    async def generate(
        self,
        *,
        tool_choice: ToolChoice | None = None,
        top_logprobs: int = 0,
        on_chunk: OnChunk | None = None,
        **values: Unpack[SamplingOptions],
    ) -> Completion:
        """Sample the next turn, with logprobs.

        A weight update with ``inflight="abort"`` interrupts a turn. The turn then continues with
        the new weights from its last token; ``Completion.versions`` states the position. A turn
        that ``Client.abort`` or ``Client.pause`` interrupts continues in the same way.

        Args:
            tool_choice: as in ``Client.session``, for this turn. None: that of the session.
            top_logprobs: also return this many most likely tokens at each position.
            on_chunk: called with new tokens as they arrive.
            **values: the fields of ``SamplingParams``. They override those of the session.
                ``max_new_tokens`` is reduced to the room that is left in the context.

        Raises:
            InvalidRequest: a value is wrong, or the context is full (``room`` is 0).
            UsageError: a turn is being sampled already.
            Closed: the session is closed.
            Overloaded, DeadlineExceeded, WorkerLost, EngineError: as for ``Client.generate``. The
                session is then unchanged, and the turn may be tried again.
        """
        self._spec.requests.check_top(top_logprobs)
        prepared = self._begin(dict(values))
        gate = self._gate
        if gate is not None:
            if gate.opening is not None:
                await self._enter(gate)
            gate.inside += 1
        began = now()
        self._taken = len(self._pending)
        try:
            history = self._history
            dialogue = history.dialogue
            before = history.tokens
            if not before:
                before = await self._spec.ids(self._beginning)
                dialogue = dialogue._replace(answer_at=len(before))
            observed = self._pending[: self._taken]
            observed_ids = [item for item in observed if isinstance(item, bytes)]
            if len(observed_ids) == len(observed):
                ids = b"".join([before, *observed_ids])
            else:
                await load_tokenizer(self._spec.requests.box)
                # Tokenize in a thread, so that the event loop is not blocked.
                end = None if history.begins else history.end_token(history.last)
                arguments = self._spec, observed, before, dialogue, end, history.said()
                ids, dialogue = await asyncio.to_thread(encode_observations, *arguments)
            prepared = await self._spec.with_tool_choice(prepared, tool_choice)
            completion = await self._sample(ids, prepared, top_logprobs, on_chunk)
            await self._keep(ids, completion, dialogue)
            return completion
        except BaseException as error:
            if not self._history.turns:
                self._oldest = None
            if isinstance(error, Closed):
                self._refused = not self._closed
            raise
        finally:
            self._busy = False
            self._taken = 0
            self._call = None
            self._generating += now() - began
            if gate is not None:
                gate.leave()

    def _begin(self, values: dict[str, Any]) -> Prepared:
        """Begin a turn. Return its checked sampling values."""
        if self._closed:
            raise Closed("the session is closed")
        if self._busy:
            raise UsageError("a turn of this session is being sampled; await it first")
        if self._seed is not None:
            values = {"seed": self._seed + len(self._history.turns), **own_names(values)}
        prepared = self._spec.prepare(values) if values else self._spec.prepared
        self._busy = True
        return prepared

    async def _enter(self, gate: Gate) -> None:
        self._at_gate = asyncio.get_running_loop().create_future()
        try:
            await gate.wait(self._limit, self._at_gate)
            if self._closed:
                raise Closed("the session was closed")
        except BaseException:
            self._busy = False
            raise
        finally:
            self._at_gate = None

    async def _sample(
        self, ids: bytes, prepared: Prepared, top_logprobs: int, on_chunk: OnChunk | None
    ) -> Completion:
        """Sample a turn after the prompt ``ids``. Continue a turn that was returned unfinished."""
        spec = self._spec
        size = len(ids) // 4
        limit = min(prepared.max_new_tokens or DEFAULT_MAX_NEW_TOKENS, spec.most_tokens - size)
        if limit < 1:
            raise InvalidRequest(
                f"the context is full: the {'session' if self._history.turns else 'prompt'} has "
                f"{size} tokens, with what was observed, and the longest possible is "
                f"{spec.most_tokens} with its response; see Session.room and Session.unobserve"
            )
        deadline = None if spec.timeout is None else deadline_from(spec.timeout)
        completion = None
        while completion is None or completion._chunks[-1].finish == "abort":
            if self._closed:
                raise Closed("the session was closed")
            version = spec.weights.version
            if not self._history.turns and (completion is None or not len(completion.output_ids)):
                # No token of the session will have an older version.
                self._oldest = version
            if not ids.startswith(self._route.tokens):
                self._route = Route(b"")
            self._route.extend(ids, version)
            call, future = spec.requests.sample(
                ids,
                prepared,
                limit,
                True,
                top_logprobs,
                self._route,
                deadline,
                spec.priority,
                None,
                completion,
                on_chunk,
            )
            self._call = call
            try:
                completion = await future
            except BaseException:
                spec.requests.driver.cancel(call)
                raise
        return completion

    async def _keep(self, ids: bytes, completion: Completion, dialogue: Dialogue) -> None:
        """Record a finished turn. A failed turn records nothing."""
        chunks = completion._chunks
        said = None
        if (renderer := self._spec.renderer) is not None:
            tokens = b"".join([ids, *[chunk.ids for chunk in chunks]])
            number = len(self._history.turns)
            said = await asyncio.to_thread(parsed, renderer, tokens, dialogue, number)
            completion.__dict__["message"] = said
        del self._pending[: self._taken]
        if not self._history.turns:
            first = next((chunk for chunk in chunks if chunk.ids), None)
            self._oldest = self._oldest if first is None else first.version
        self._history.keep(ids, completion, dialogue, said)
        if self._on_turn is not None:
            new = len(self._history.tokens) - len(ids)
            self._on_turn(len(ids), chunks[-1].cached_tokens, new)

    async def run_tools(
        self,
        tools: Mapping[str, Tool] | Sequence[Tool],
        *,
        max_turns: int = 10,
        timeout: float | None = 60.0,
        on_error: OnError = "observe",
        max_result: int = 32_768,
        **values: Unpack[SamplingOptions],
    ) -> Completion:
        """Sample turns and run the tools that they call, until a turn calls none.

        The calls of a turn run at the same time. Their results are observed as messages of the role
        "tool": text as it is, everything else as JSON. A call gives no result if it is not valid,
        if there is no such tool, if the tool raises, or if it takes too long. The observation then
        says why, after "error: ". ``session.metadata["tool_errors"]`` has all of them.

        Args:
            tools: coroutine functions, endpoints of actors, or functions, which run in threads; by
                the name in their schema, or as a list of functions with these names. They get the
                arguments of a call by name.
            max_turns: the number of turns that may be sampled.
            timeout: seconds for each call. A tool that does not end when it is cancelled is left
                alone.
            on_error: "raise": raise the first ``ToolError`` of a turn instead of observing its
                results.
            max_result: characters of a result that are observed.
            **values: as for ``generate``, for each turn.

        Returns:
            The last turn: the first one without calls, or that of ``max_turns``, or one that fills
            the context. The calls of the last turn are not run.

        Raises:
            ToolError: see ``on_error``. Others as ``generate``.
        """
        limits = {"max_turns": max_turns, "timeout": timeout, "max_result": max_result}
        return await run_tools(self, tools, on_error=on_error, **limits, **values)  # type: ignore[arg-type]

    # --- observations and rewards -----------------------------------------------------------------

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
        new = as_observation(what, self._spec.vocab_size)
        if not isinstance(new, list):
            if new:
                self._pending.append(new)
            return
        if self._history.dialogue.messages is None:
            raise UsageError("this session began without messages: observe text or token ids")
        last = self._pending[-1] if len(self._pending) > self._taken else None
        if isinstance(last, list):
            last += new
        elif self._history.begins:
            raise UsageError(
                "no turn was sampled yet, or since go_back: put these messages into the session's "
                "own, or use rewrite"
            )
        else:
            self._pending.append(new)

    def go_back(self, turns: int = 1) -> None:
        """Go on as if the last turns had not been sampled, with exactly the tokens before them.

        They stay in the trajectory, as a branch. Observations since the last turn are discarded.

        Args:
            turns: how many turns of the current conversation.

        Raises:
            UsageError: the conversation has fewer turns, or a turn is being sampled.
        """
        self._check_idle("go_back")
        path = self._history.path()
        if isinstance(turns, bool) or not isinstance(turns, int) or not 0 < turns <= len(path):
            raise UsageError(f"this conversation has {len(path)} turns: cannot go {turns!r} back")
        self._pending.clear()
        self._history.go_before(path[-turns])

    def rewrite(self, messages: Sequence[Message], *, after: int | None = None) -> None:
        """Replace the conversation, for example by a shorter one. The next turn goes on from it.

        If it begins with the messages of an earlier turn, the exact tokens of that turn are kept,
        and only the rest is rendered. What was sampled so far stays in the trajectory, as a branch.
        Observations since the last turn are discarded.

        Args:
            after: the turn with whose messages they begin, an index of ``turns``. The answers may
                then be in another form. None: find it.

        Raises:
            InvalidRequest: a message lacks a field.
            UsageError: the session began without messages, or a turn is being sampled.
        """
        self._check_idle("rewrite")
        if self._spec.messages is None:
            raise UsageError("this session began without messages")
        new: list[Message] = [dict(m) for m in check_conversation(list(messages))]
        self._pending.clear()
        turn = self._history.find(new) if after is None else after
        if turn == ROOT:
            self._beginning = new
            self._history.begin(Dialogue(new))
            return
        self._history.go_to(turn)
        rest = new[len(self._history.messages(turn) or ()) :]
        if rest:
            self._pending.append(rest)

    def _check_idle(self, name: str) -> None:
        if self._busy:
            raise UsageError(f"a turn of this session is being sampled; await it before {name}")

    def unobserve(self) -> None:
        """Discard the observations since the last turn.

        Use this when observations do not fit, or when the chat template rejects them. Observations
        in the prompt of a turn that is being sampled are kept.
        """
        del self._pending[self._taken :]

    def reward(
        self, value: RewardValue, name: str = "", *, call: ToolCall | str | None = None
    ) -> None:
        """Add to the reward of the last turn, or of the turn with a call.

        The rewards of a turn are added up, each times its weight (``reward_weights``), and those
        with a name are also kept: ``Turn.rewards``, ``Trajectory.named_rewards``.

        Args:
            value: a number, or a dict of names and numbers.
            name: of the reward.
            call: the call of a tool that is rewarded, or its id.

        Raises:
            UsageError: no turn was sampled, or none has this call, or a value is not finite.
        """
        id_ = call.id if isinstance(call, ToolCall) else call or ""
        self._history.reward(value, name, id_, False)

    # --- state ------------------------------------------------------------------------------------

    @property
    def ids(self) -> NDArray[np.int32]:
        """All tokens up to the end of the last turn, int32. Empty before the first turn."""
        return np.frombuffer(self._history.tokens, "<i4")

    @property
    def turns(self) -> list[Completion]:
        """The completions of all turns, in the order in which they were sampled."""
        return self._history.turns[:]

    @property
    def oldest_version(self) -> int | None:
        """Policy version of the first sampled token.

        While the first token is being sampled, this is a lower bound. Before that, it is None.
        """
        return self._oldest

    @property
    def rewarded(self) -> bool:
        """Whether there was a reward."""
        return self._history.rewards.given

    @property
    def refused(self) -> bool:
        """Whether a turn failed because the client no longer accepts calls."""
        return self._refused

    @property
    def room(self) -> int:
        """Number of tokens that still fit the context.

        Observed token ids count as used. Observed text and messages do not count, because their
        number of tokens is not known yet.
        """
        observed = sum([len(item) for item in self._pending if isinstance(item, bytes)])
        used = (len(self._history.tokens) + observed) // 4
        return max(0, self._spec.most_tokens - used)

    @property
    def text(self) -> str:
        """The text of all tokens after the prompt, including special tokens."""
        history = self._history
        ids = np.frombuffer(history.tokens[history.prompt_bytes :], "<i4").tolist()
        return self._spec.requests.decode(ids, False)

    def trajectory(self, reward: RewardValue | None = None) -> Trajectory:
        """Return the trajectory of the session, for a trainer.

        If the session has branches, it is the conversation that was sampled last, and the others
        are its ``branches``.

        Args:
            reward: of the whole trajectory: a number, or a dict of names and numbers. It is added
                to the reward of the last turn.

        Raises:
            UsageError: no turn was sampled.
        """
        if reward is not None:
            self._history.reward(reward, "", "", True)
        if not self._history.turns:
            raise UsageError("no turn was sampled, so there is no trajectory")
        return self._history.trajectory(
            total=now() - self._began,
            generating=self._generating,
            metadata=dict(self.metadata),
        )

    def trajectories(self, reward: RewardValue | None = None) -> list[Trajectory]:
        """Return ``leaves`` of ``trajectory``: each conversation of the session.

        Each sampled token is in the loss of one of them.
        """
        return list(self.trajectory(reward).leaves)
