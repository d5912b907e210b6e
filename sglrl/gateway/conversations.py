"""The requests of one agent as a tree of turns.

An agent sends its whole conversation with every request. If the messages begin with the messages
and the answer of an earlier turn, the new turn continues exactly the tokens of the earlier turn. If
not, the new turn begins a new branch.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping, Sequence
from functools import partial
from hashlib import blake2b
from typing import Any

import msgspec

from ..core.turn_tree import ROOT
from ..errors import Closed
from ..inference.completion import Completion
from ..inference.prompts import Message, check_conversation
from ..inference.replies import OnChunk
from ..inference.tokens import without_surrogates
from ..sessions.rewards import RewardValue
from ..sessions.session import Session
from ..sessions.session_spec import SessionSpec
from ..sessions.trajectory import Trajectory
from ..wire.engine import TokenChunk
from .answers import message_of
from .dialect import TurnRequest
from .errors import HttpError

_encode = msgspec.json.Encoder(order="sorted", enc_hook=str).encode
_REMEMBERED = 64
"""Number of latest requests of a session for which a repetition receives the same answer."""
MAX_TOKENS = 1 << 30
"""``max_new_tokens`` of a turn without a limit, which may fill the context as in OpenAI's API."""
OnTokens = Callable[[int, SessionSpec, TokenChunk], None]
"""A function that receives the number of a choice, the spec of its session, and new tokens."""


class Turn:
    """The choices of one request. Wait for them inside ``with turn:``.

    Args:
        sampling: samples the choices.
        keeps: whether to sample to the end even if the client disconnects.
        repeated: whether the client states that it has sent the request before. The first attempt
            may arrive after this one.
        late: whether this is probably a first attempt that arrives after its repetition. The client
            no longer waits for the first attempt, so ``keeps`` has no effect.

    Attributes:
        task: the task that samples the choices.
        delivered: whether a client has received the choices.
        repeated: as in the arguments.
    """

    def __init__(
        self,
        sampling: Coroutine[Any, Any, list[Completion]],
        keeps: bool,
        *,
        repeated: bool = False,
        late: bool = False,
    ) -> None:
        self.task = asyncio.ensure_future(sampling)
        # If the client has disconnected, nothing else reads the error of the task.
        self.task.add_done_callback(lambda task: task.cancelled() or task.exception())
        self.delivered = False
        self.repeated = repeated
        self._aborted = False
        self._keeps = keeps and not late
        self._late = late
        self._waiting = 0

    @property
    def failed(self) -> bool:
        """Whether the turn returns no choices: it has failed, or was or is being cancelled."""
        task = self.task
        if not task.done():
            return task.cancelling() > 0
        return task.cancelled() or task.exception() is not None

    @property
    def repeatable(self) -> bool:
        """Whether a client that repeats the request may receive these choices."""
        return self.delivered or not self._late

    @property
    def orphaned(self) -> bool:
        """Whether the client has disconnected before it received the choices."""
        return not (self._waiting or self.delivered or self.failed)

    def cancel(self) -> None:
        """End the turn, because a client has asked for it."""
        self._aborted = True
        self.task.cancel()

    async def result(self) -> list[Completion]:
        """Wait for the choices.

        Raises:
            HttpError: a client has aborted the turn. The status is one that clients do not retry.
            Closed: the session has ended.
        """
        await asyncio.wait({self.task})
        if self.task.cancelled() and self._aborted:
            raise HttpError(400, "the request was aborted")
        if self.task.cancelled():
            raise Closed("the session has ended, or the gateway is ending")
        return self.task.result()

    def __enter__(self) -> None:
        self._waiting += 1

    def __exit__(self, *exc: object) -> None:
        self._waiting -= 1
        if not self._waiting and not self._keeps:
            self.task.cancel()


class Conversations:
    """All conversations of one agent.

    Args:
        session: the session that collects the turns. A fork of it samples each conversation.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._ends: dict[bytes, tuple[SessionSpec, int]] = {}
        """For each conversation that ends with a turn, the spec of the turn's session and the
        number of the turn. The key is the digest of the conversation as the client sees it."""
        self._idle: dict[int, Session] = {}
        """Forks that sample nothing now, by the number of the last turn that each has sampled."""
        self._answers: dict[bytes, list[Turn]] = {}
        """The turns of the latest requests, by the digest of the request."""
        self._drawn: Counter[str] = Counter()
        """The number of choices so far, by the ``_seed_key`` of their conversation."""
        self._closed = False

    @property
    def spec(self) -> SessionSpec:
        """The settings of all turns."""
        return self._session.spec

    # --- turns ------------------------------------------------------------------------------------

    def sample(
        self,
        requests: Sequence[TurnRequest],
        body: bytes,
        repeated: bool,
        keeps: bool,
        on_tokens: OnTokens,
    ) -> Turn:
        """Sample the choices of requests.

        A repeated request receives an earlier turn with the same digest: a turn whose client has
        disconnected, or else the last turn. If there is no such turn, a new turn is sampled.

        Args:
            requests: the requests, one for each prompt.
            body: the digest of the HTTP request.
            repeated: whether the client states that it has sent the request before.
            keeps: as in ``Turn``.
            on_tokens: is called with new tokens if the requests are streams.

        Raises:
            Closed: the session has ended.
        """
        if self._closed:
            raise Closed("this session has ended")
        turns = [turn for turn in self._answers.pop(body, ()) if not turn.failed]
        self._answers[body] = turns
        if len(self._answers) > _REMEMBERED:
            del self._answers[next(iter(self._answers))]
        if repeated and (known := [turn for turn in turns if turn.repeatable]):
            return next((turn for turn in known if turn.orphaned), known[-1])
        late = not repeated and any(turn.repeated for turn in turns)
        sampling = self._sample(requests, on_tokens)
        turns.append(Turn(sampling, keeps, repeated=repeated, late=late))
        return turns[-1]

    async def _sample(
        self, requests: Sequence[TurnRequest], on_tokens: OnTokens
    ) -> list[Completion]:
        sampling: list[Callable[[], Coroutine[Any, Any, Completion]]] = []
        for request in requests:
            sampling += self._choices(request, len(sampling), on_tokens)
        return await gathered([sample() for sample in sampling])

    def _choices(
        self, request: TurnRequest, first: int, on_tokens: OnTokens
    ) -> list[Callable[[], Coroutine[Any, Any, Completion]]]:
        """Return for each choice of a request a function that samples it.

        Args:
            request: the request.
            first: the number of the first choice among the choices of all requests.
            on_tokens: is called with new tokens if the request is a stream.
        """
        base = self._session.spec
        if request.messages is None or request.prompt is not None:
            spec, after, seen, digest = sibling(base, request), ROOT, None, None
        else:
            seen = check_conversation(request.messages)
            digest = Digest(
                seen, {**template_of(request), "lora": request.lora or base.options.lora or ""}
            )
            # The last message is always new, so no earlier turn ends with it.
            known = reversed(digest.beginnings[:-1])
            ends = (self._ends[one] for one in known if one in self._ends)
            spec, after = next(ends, None) or (sibling(base, request), ROOT)
            spec = spec.with_priority(request.priority or base.options.priority)
            spec = spec.with_later_tools(request.later_tools)

        key = self._seed_key(request, base)

        async def sample(number: int, drawn: int) -> Completion:
            session = self._idle.pop(after, None)
            if session is None or session.spec is not spec:
                session = self._session.fork_with(spec)
            session.seeds.select(*self._session.seeds.path, key, drawn)
            if seen is not None:
                session.rewrite(seen, after=after)
            on_chunk = partial(on_tokens, first + number, spec)
            completion = await session.generate(**options_of(request, spec, on_chunk))
            turn = session.position.last
            self._session.follow(session)
            self._idle[turn] = session
            if digest is not None:
                self._ends[digest.with_answer(message_of(completion))] = spec, turn
            return completion

        first_draw = self._drawn[key]
        self._drawn[key] += request.choices
        return [partial(sample, i, first_draw + i) for i in range(request.choices)]

    def _seed_key(self, request: TurnRequest, base: SessionSpec) -> str:
        """Return a key of the request's conversation, from which the seeds of choices are derived.

        The key and the number of earlier choices with this key select a seed. Seeds therefore do
        not depend on the order in which the turns of other conversations end. Without a seed in the
        request or the session, the key is "".
        """
        if request.sampling.get("seed") is None and base.prepared.seed is None:
            return ""
        values = request.messages, request.prompt, template_of(request), request.lora
        return blake2b(_encode(_without_ids(values)), digest_size=16).hexdigest()

    # --- the end ----------------------------------------------------------------------------------

    def reward(self, value: RewardValue, name: str = "", call: str | None = None) -> None:
        """Add to the reward of the last turn, or of the turn that has the tool call ``call``.

        See ``Session.reward``.

        Raises:
            UsageError: no turn was sampled, no turn has this tool call, or a value is not finite.
        """
        self._session.reward(value, name, call=call)

    @property
    def turns(self) -> int:
        """The number of finished turns."""
        return len(self._session.turns)

    def trajectory(self) -> Trajectory | None:
        """Return the trajectory of all turns, or None if there are none."""
        return self._session.trajectory() if self._session.turns else None

    async def close(self) -> None:
        """End all running turns."""
        self._closed = True
        turns = [turn for several in self._answers.values() for turn in several]
        tasks = [turn.task for turn in turns if not turn.task.done()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class Digest:
    """Digests of a conversation up to each of its messages.

    A digest depends only on the parts of answers that clients send back unchanged. Reasoning, the
    form of the arguments of tool calls and white space around the content have no effect. An empty
    content may be "" or null. A lone surrogate in an argument may be replaced by another.

    Args:
        messages: the messages of the conversation.
        template: the values that decide how the conversation is rendered, and the name of the LoRA
            adapter.

    Attributes:
        beginnings: for each message, the digest of the conversation up to and with this message.
    """

    def __init__(self, messages: Sequence[Message], template: Mapping[str, Any]) -> None:
        self._state = blake2b(_encode(template), digest_size=16)
        self.beginnings = [self._add(self._state, message) for message in messages]

    def with_answer(self, message: Message) -> bytes:
        """Return the digest of the conversation with one more message."""
        return self._add(self._state.copy(), message)

    def _add(self, state: blake2b, message: Message) -> bytes:
        state.update(_encode(_seen(message)))
        return state.digest()


def _seen(message: Message) -> Message:
    if message.get("role") != "assistant":
        return message
    calls = [
        (call.get("id"), function.get("name"), _parsed(function.get("arguments")))
        for call in message.get("tool_calls") or ()
        if isinstance(call, Mapping) and isinstance(function := call.get("function"), Mapping)
    ]
    return {"role": "assistant", "content": (message.get("content") or "").strip(), "calls": calls}


def _parsed(arguments: Any) -> Any:
    """Return the value of arguments in a form that does not depend on the client's JSON library.

    JavaScript, for example, writes 1.0 as 1, -0.0 as 0, and NaN as null.
    """
    text = arguments if isinstance(arguments, str) else json.dumps(arguments)
    try:
        return without_surrogates(
            json.loads(
                text, parse_int=_number, parse_float=_number, parse_constant=lambda name: None
            )
        )
    except ValueError:
        return arguments


def _number(text: str) -> float:
    return float(text) + 0.0


def _without_ids(value: Any) -> Any:
    """Return a JSON value without the ids of tool calls, which depend on the order of the turns."""
    if isinstance(value, Mapping):
        ids = ("id", "tool_call_id")
        return {name: _without_ids(one) for name, one in value.items() if name not in ids}
    return [*map(_without_ids, value)] if isinstance(value, (list, tuple)) else value


def template_of(request: TurnRequest) -> dict[str, Any]:
    """Return the values of a request that decide how its conversation is rendered."""
    return {"tools": request.tools, "chat_template_kwargs": request.chat_template_kwargs}


def sibling(spec: SessionSpec, request: TurnRequest) -> SessionSpec:
    """Return the spec of the conversation that a request begins, with the settings of ``spec``."""
    own: dict[str, Any] = {
        "priority": request.priority or spec.options.priority,
        "lora": request.lora or spec.options.lora,
    }
    given = request.prompt
    if request.messages is not None:
        made = spec.sibling(messages=request.messages, **own, **template_of(request))
        made = made.with_later_tools(request.later_tools)
        return made if given is None or isinstance(given, str) else made.with_ids(given)
    prompt: dict[str, Any] = {"prompt" if isinstance(given, str) else "input_ids": given}
    made = spec.sibling(**own, **prompt)
    made.routed_from = request.experts_from or 0
    return made


def options_of(request: TurnRequest, spec: SessionSpec, on_chunk: OnChunk) -> dict[str, Any]:
    """Return the arguments of ``Session.generate`` for a choice."""
    options = {
        **request.sampling,
        "tool_choice": request.tool_choice,
        "parallel_tool_calls": request.parallel_tool_calls,
        "top_logprobs": request.top_logprobs,
    }
    if spec.prepared.max_new_tokens is None:
        options.setdefault("max_new_tokens", MAX_TOKENS)
    if request.experts_from is not None and spec.requests.info.routed_experts is not None:
        options["return_routed_experts"] = True
    if request.stream:
        options["on_chunk"] = on_chunk
    return options


async def gathered(sampling: Sequence[Coroutine[Any, Any, Completion]]) -> list[Completion]:
    """Run coroutines at the same time and return their completions.

    If one of them fails, or the caller is cancelled, all others are cancelled.
    """
    tasks = [asyncio.ensure_future(one) for one in sampling]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
