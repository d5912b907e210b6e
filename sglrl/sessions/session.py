"""One conversation of several turns, exact to the token.

In every turn the engine receives exactly the tokens of the earlier turns, sampled and observed,
followed by the new tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn, Self, SupportsFloat, Unpack

import numpy as np
from numpy.typing import NDArray

from .. import tracing
from ..core.policy_versions import MODEL
from ..core.turn_tree import ROOT
from ..driver.driver import now
from ..driver.threads import in_thread
from ..errors import Closed, UsageError
from ..inference.completion import Completion
from ..inference.message import ToolCall
from ..inference.prompts import Message, check_conversation, load_tokenizer
from ..inference.replies import OnChunk
from ..inference.sampling import SamplingOptions
from ..inference.sampling_cache import Prepared
from ..inference.spans import turn_attributes
from ..inference.tokens import TokenIds
from ..inference.tool_choice import ToolChoice
from .gate import Gate
from .history import Position, beginning
from .observations import Dialogue, Observation, as_observation, encode_observations, parsed
from .options import turn_values
from .over_http import OverHttp
from .rewards import RewardValue
from .session_spec import SessionSpec
from .shared import Shared
from .tools import OnError, Tool, run_tools
from .trajectory import Trajectory
from .turn_sampler import TurnSampler, TurnSeeds


class Session(OverHttp):
    """A conversation of several turns and an async context manager, made by ``Client.session``.

    Turns are sampled one at a time. The prompt of each turn consists of the exact tokens of the
    earlier turns and observations. Sampled tokens are never tokenized again. Each turn is sent to
    the worker that holds its prefix, unless that worker is overloaded.
    """

    def __init__(
        self,
        spec: SessionSpec,
        gate: Gate | None = None,
        on_turn: Callable[[int, int, int], None] | None = None,
        path: tuple[int | str, ...] = (),
        *,
        shared: Shared | None = None,
    ) -> None:
        self.spec = spec
        self._gate = gate
        self._on_turn = on_turn
        """Called after each turn with the size of its prompt in bytes, the number of cached prompt
        tokens, and the size of the sampled tokens in bytes."""
        self.seeds = TurnSeeds(path)
        self._is_fork = shared is not None
        self._shared = shared or Shared(spec.options)
        spec.requests.sessions.add(self._shared)
        self._history = self._shared.history
        self.sampler = TurnSampler(spec, self._shared, gate)
        self.position = beginning(Dialogue(spec.messages, spec.begun))
        self.address = None
        self._beginning: list[Message] | None = None
        """The messages with which ``rewrite`` has begun a new conversation, or None."""
        self._pending: list[Observation] = []
        """The observations after the last turn."""
        self._taken = 0
        """How many items of ``_pending`` are in the prompt of the turn that is being sampled."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        self.close()

    def __enter__(self) -> NoReturn:
        raise UsageError("use 'async with': the turns of a session are awaited")

    def __exit__(self, *exc: object) -> None: ...

    def __reduce__(self) -> NoReturn:
        raise UsageError(
            "a session cannot be pickled; give client.address, call sglrl.connect(address) there"
        )

    def close(self) -> None:
        """Close the session. A running ``generate`` and every later one raise ``Closed``.

        The forks of a session are closed with it. Closing a fork closes no other session.
        """
        self.sampler.closed = True
        if self._is_fork:
            self.sampler.end_turn()
        else:
            self._shared.close()

    @property
    def metadata(self) -> dict[str, Any]:
        """The metadata of the trajectory. Its values must be values that msgpack can encode."""
        return self._shared.metadata

    @property
    def live_id(self) -> str:
        """The id of this session and its forks in ``Client.live_samples``."""
        return self._shared.live_id

    def fork(self) -> Session:
        """Return a session that goes on from the same place.

        A session and its forks may sample at the same time, for example several answers to one
        question. They share ``turns``, ``trajectory``, ``metadata``, the rewards and the time
        limit. Each conversation is a branch. Closing this session closes its forks.

        Raises:
            UsageError: a turn is being sampled.
        """
        self._check_idle("fork")
        made = self.fork_with(self.spec)
        made.position = self.position
        made._beginning = self._beginning
        made._pending = self._pending[:]
        return made

    def follow(self, fork: Session) -> None:
        """Go on after the last turn of a fork, unless a turn of this session is being sampled."""
        if not self.sampler.busy:
            self.position = fork.position

    def fork_with(self, spec: SessionSpec) -> Session:
        """Return a fork that begins a new conversation with the given spec."""
        made = Session(spec, self._gate, self._on_turn, self.seeds.fork(), shared=self._shared)
        made.sampler.limit = self.sampler.limit
        made.sampler.closed = self.sampler.closed
        return made

    # --- turns ------------------------------------------------------------------------------------

    async def generate(
        self,
        *,
        tool_choice: ToolChoice | None = None,
        parallel_tool_calls: bool = True,
        top_logprobs: int = 0,
        on_chunk: OnChunk | None = None,
        **values: Unpack[SamplingOptions],
    ) -> Completion:
        """Sample the next turn, with logprobs.

        A weight update with ``inflight="abort"`` interrupts a turn. The turn then continues with
        the new weights after its last token. ``Completion.versions`` has the span of each version.
        A turn that ``Client.abort`` or ``Client.pause`` interrupts continues in the same way.

        Args:
            tool_choice: the tool choice of this turn. None: the tool choice of the session.
            parallel_tool_calls: whether the turn may make several calls. False ends it after one.
            top_logprobs: also return this number of most likely tokens at each position.
            on_chunk: called with new tokens as they arrive.
            **values: the fields of ``SamplingParams``. They override the values of the session.
                ``max_new_tokens`` is reduced to the room that is left in the context.

        Raises:
            InvalidRequest: a value is wrong. The subclass ``ContextFull``: no token fits after the
                observations.
            UsageError: a turn is being sampled already.
            Closed: the session is closed.
            Overloaded, DeadlineExceeded, WorkerLost, EngineError: as for ``Client.generate``. The
                session is then unchanged, and the turn may be tried again.
        """
        self.spec.requests.check_top(top_logprobs)
        prepared = self._prepared(dict(values))
        await self.sampler.begin()
        try:
            choice = tool_choice, parallel_tool_calls
            with tracing.span("turn", {}) as span:
                completion = await self._turn(prepared, choice, top_logprobs, on_chunk)
                if span is not None:
                    span.set_attributes(turn_attributes(completion))
            return completion
        except Closed:
            shared = self._shared
            shared.refused = shared.refused or not self.sampler.has_closed
            raise
        finally:
            self.sampler.end()
            self._taken = 0

    async def _turn(
        self,
        prepared: Prepared,
        choice: tuple[ToolChoice | None, bool],
        top_logprobs: int,
        on_chunk: OnChunk | None,
    ) -> Completion:
        """Sample a turn, and add it to the history."""
        self._taken = len(self._pending)
        place, observed = self.position, self._pending[: self._taken]
        if place.begins:
            place, observed = await self._history.opened(
                self.spec, place, self._beginning, observed
            )
        dialogue, before = place.dialogue, place.tokens
        observed_ids = [item for item in observed if isinstance(item, bytes)]
        if len(observed_ids) == len(observed):
            ids = b"".join([before, *observed_ids])
        else:
            await load_tokenizer(self.spec.requests.box)
            # Tokenize in a thread, so that the event loop is not blocked.
            end = None if place.begins else self._history.end_token(place.last)
            arguments = self.spec, observed, before, dialogue, end, self._history.said(place)
            ids, dialogue = await in_thread(encode_observations, *arguments)
        prepared = await self.spec.with_grammar(prepared, *choice, ids)
        begin = 0
        if prepared.params.return_routed_experts and ids.startswith(place.tokens):
            begin = max(self.spec.routed_from, self._history.routed(place))
        completion = await self.sampler.sample(ids, prepared, top_logprobs, on_chunk, begin)
        await self._keep(place, ids, completion, dialogue)
        return completion

    def _prepared(self, values: dict[str, Any]) -> Prepared:
        """Return the checked sampling values of a turn, with the seed of this turn."""
        values = turn_values(values)
        seed = values.get("seed")
        if seed is None:
            seed = self.spec.prepared.seed
        if seed is not None:
            values["seed"] = self.seeds.of_turn(seed)
        return self.spec.prepare(values) if values else self.spec.prepared

    async def _keep(
        self, place: Position, ids: bytes, completion: Completion, dialogue: Dialogue
    ) -> None:
        """Record a finished turn. A failed turn records nothing."""
        chunks = completion.chunks
        said = None
        if (renderer := self.spec.renderer) is not None:
            tokens = b"".join([ids, *[chunk.ids for chunk in chunks]])
            number = self._shared.number_turn()
            said = await in_thread(parsed, renderer, tokens, dialogue, number)
            completion.__dict__["message"] = said
        del self._pending[: self._taken]
        self.position = self._history.keep(place, self.spec, ids, completion, dialogue, said)
        self.seeds.turn_ended()
        if self._on_turn is not None:
            new = len(self.position.tokens) - len(ids)
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

        The calls of a turn run at the same time. Their results are observed as messages with the
        role "tool": texts unchanged, and other values as JSON. A call fails if it is not valid, or
        if the tool does not exist, raises or takes too long. The message of a failed call is
        "error: " and the reason. ``session.metadata["tool_errors"]`` lists all errors.

        Args:
            tools: a mapping from names in the schemas to tools, or a list of functions with these
                names. A tool is a coroutine function, an endpoint of an actor, or a function, which
                runs in a thread. Tools get the arguments of a call by name.
            max_turns: the largest number of turns to sample.
            timeout: seconds for each call. A call that ignores its cancellation is not waited for.
            on_error: "observe" makes errors results. "raise" raises the first ``ToolError``.
            max_result: the largest number of characters of a result that are observed.
            **values: the sampling values of each turn, as for ``generate``.

        Returns:
            The last turn: the first turn without calls, the turn number ``max_turns``, or a turn
            that fills the context. The calls of the last turn are not run.

        Raises:
            ToolError: a call failed, and ``on_error`` is "raise".
            WorkerLost: the actor that runs a tool has lost its state. Errors of ``generate`` are
                raised too.
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

        Before the first turn, and after ``go_back``, observed messages join the messages of the
        prompt, and text and token ids follow its tokens. In a session without a prompt, the first
        observation is the prompt.

        Args:
            what: text, token ids or messages. Text is tokenized separately, and ids are used
                unchanged. Messages are rendered with the chat template, which ends the assistant's
                turn and begins its next one. A session whose prompt is text or token ids accepts
                no messages.

        Raises:
            InvalidRequest: a token id is wrong, or a message lacks a field. If the template rejects
                the messages, ``generate`` raises.
            UsageError: messages cannot follow the prompt.
        """
        new = as_observation(what, self.spec.requests.vocab_size)
        waiting = self._pending[self._taken :]
        if isinstance(new, list):
            if not self.position.takes_messages(self.spec.promptless):
                raise UsageError("this session began without messages: observe text or token ids")
            if waiting and isinstance(waiting[-1], list):
                new = [*self._pending.pop(), *new]
            elif self.position.begins and not self.sampler.busy:
                self.position.check_messages_first(waiting)
        if new:
            self._pending.append(new)

    def go_back(self, turns: int = 1) -> None:
        """Go on as if the last turns had not been sampled, with exactly the tokens before them.

        These turns stay in the trajectory, as a branch. Observations since the last turn are
        discarded.

        Args:
            turns: the number of turns of the current conversation to go back.

        Raises:
            UsageError: the conversation has fewer turns, or a turn is being sampled.
        """
        self._check_idle("go_back")
        path = self._history.path(self.position.last)
        if isinstance(turns, bool) or not isinstance(turns, int) or not 0 < turns <= len(path):
            raise UsageError(f"this conversation has {len(path)} turns: cannot go {turns!r} back")
        self._pending.clear()
        self.position = self._history.before(path[-turns])

    def rewrite(self, messages: Sequence[Message], *, after: int | None = None) -> None:
        """Replace the conversation, for example by a shorter one, before the next turn.

        If ``messages`` begin with the messages of an earlier turn, the exact tokens of that turn
        are kept, and only the rest is rendered. All earlier turns stay in the trajectory, as a
        branch. Observations since the last turn are discarded.

        Args:
            after: the index in ``turns`` of the last turn to keep. ``messages`` must begin with the
                messages up to this turn, which are not compared. None: compare the messages.

        Raises:
            InvalidRequest: a message lacks a field.
            UsageError: the session began without messages, or a turn is being sampled.
        """
        self._check_idle("rewrite")
        if not self.position.takes_messages(self.spec.promptless):
            raise UsageError("this session began without messages")
        new: list[Message] = [dict(m) for m in check_conversation(list(messages))]
        self._pending.clear()
        turn = self._history.find(new) if after is None else after
        if turn == ROOT:
            self._beginning = new
            self.position = beginning(Dialogue(new))
            return
        self.position = self._history.after(turn)
        rest = new[self._history.message_count(turn) :]
        if rest:
            self._pending.append(rest)

    def _check_idle(self, name: str) -> None:
        if self.sampler.busy:
            raise UsageError(f"a turn of this session is being sampled; await it before {name}")

    def unobserve(self) -> None:
        """Discard the observations since the last turn.

        Use this when observations do not fit, or when the chat template rejects them. Observations
        in the prompt of a turn that is being sampled are kept.
        """
        del self._pending[self._taken :]

    def reward(
        self,
        value: RewardValue,
        name: str = "",
        *,
        call: ToolCall | str | None = None,
        weight: SupportsFloat | None = None,
    ) -> None:
        """Add a reward to the last turn, or to the turn that made a tool call.

        The reward of a turn is the sum of its rewards, each times its weight (``reward_weights``).
        ``Turn.rewards`` and ``Trajectory.named_rewards`` also list the rewards with a name.

        Args:
            value: a number, or a dict of names and numbers.
            name: the name of the reward.
            call: the tool call that is rewarded, or the id of the call.
            weight: the weight of this reward. None: that in ``reward_weights``, or 1.

        Raises:
            UsageError: no turn was sampled, no turn has this call, or a value is not finite.
        """
        id_ = call.id if isinstance(call, ToolCall) else call or ""
        turn = self._history.rewarded_turn(self.position.last, id_)
        self._history.rewards.add(turn, value, name, id_, False, weight)

    # --- state ------------------------------------------------------------------------------------

    @property
    def ids(self) -> NDArray[np.int32]:
        """All tokens up to the end of the last turn, int32. Empty before the first turn."""
        return np.frombuffer(self.position.tokens, "<i4")

    @property
    def turns(self) -> list[Completion]:
        """The completions of all turns, in the order in which they were sampled."""
        return self._history.turns[:]

    @property
    def oldest_version(self) -> int | None:
        """A lower bound of the model versions of all sampled tokens. None before the first turn."""
        return self._shared.oldest.get(MODEL)

    @property
    def oldest_versions(self) -> dict[str, int]:
        """``oldest_version`` by adapter name, where "" is the model. See ``Trajectory``."""
        return self._shared.oldest

    @property
    def rewarded(self) -> bool:
        """Whether a reward was added."""
        return self._history.rewards.given

    @property
    def refused(self) -> bool:
        """Whether a turn failed because the client no longer accepts calls."""
        return self._shared.refused

    @property
    def room(self) -> int:
        """The number of tokens that still fit into the context.

        Observed token ids count as used. Observed text and messages do not count, because their
        number of tokens is not known yet.
        """
        observed = sum([len(item) for item in self._pending if isinstance(item, bytes)])
        used = (len(self.position.tokens) + observed) // 4
        return max(0, self.spec.max_tokens - used)

    @property
    def text(self) -> str:
        """The text of all tokens after the prompt, including special tokens."""
        ids = np.frombuffer(self.position.tokens[self.position.prompt_bytes :], "<i4").tolist()
        return self.spec.requests.decode(ids, False)

    def trajectory(self, reward: RewardValue | None = None) -> Trajectory:
        """Return the trajectory of the session, for a trainer.

        If the session has several conversations, the trajectory is the conversation that was
        sampled last. Its ``branches`` are the others.

        Args:
            reward: the reward of the whole trajectory, which is added to the reward of the last
                turn. It is a number, or a dict of names and numbers.

        Raises:
            UsageError: no turn was sampled.
        """
        if reward is not None:
            turn = self._history.rewarded_turn(self.position.last)
            self._history.rewards.add(turn, reward, "", "", True)
        if not self._history.turns:
            raise UsageError("no turn was sampled, so there is no trajectory")
        return self._history.trajectory(
            total=now() - self._shared.began,
            generating=self._shared.generating,
            metadata=dict(self.metadata),
        )

    def trajectories(self, reward: RewardValue | None = None) -> list[Trajectory]:
        """Return one trajectory for each conversation of the session: ``trajectory().leaves``.

        Each sampled token is in the loss mask of exactly one of them.
        """
        return list(self.trajectory(reward).leaves)
