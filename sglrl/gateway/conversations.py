"""The calls of one agent, as a tree of turns.

An agent sends its whole conversation with every call. A conversation that begins with an earlier
turn goes on with exactly the tokens of that turn. Any other begins a new branch.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine, Mapping, Sequence
from functools import partial
from hashlib import blake2b
from typing import Any

from ..core.turn_tree import ROOT
from ..errors import Closed, UsageError
from ..inference.client import Client
from ..inference.completion import Completion
from ..inference.prompts import Message, check_conversation
from ..inference.replies import OnChunk
from ..sessions.rewards import RewardValue
from ..sessions.session import Session
from ..sessions.session_spec import SessionSpec
from ..sessions.trajectory import Trajectory
from ..wire.engine import TokenChunk
from .answers import message_of
from .dialect import TurnRequest

_REMEMBERED = 64
"""Answers of a session that a client may ask for again."""
MOST_TOKENS = 1 << 30
"""Without a limit a turn may fill the context, as in OpenAI's API."""
OnTokens = Callable[[int, SessionSpec, TokenChunk], None]
"""Called with new tokens of a choice, and the spec of its session."""


class Turn:
    """The choices of one request. Wait for them inside ``with turn:``.

    Args:
        keeps: sample to the end if nobody waits any more, because the client has disconnected.

    Attributes:
        delivered: a client has got the choices.
    """

    def __init__(self, sampling: Coroutine[Any, Any, list[Completion]], keeps: bool) -> None:
        self.task = asyncio.ensure_future(sampling)
        # Nobody may be left to get its error.
        self.task.add_done_callback(lambda task: task.cancelled() or task.exception())
        self.delivered = False
        self._keeps = keeps
        self._waiting = 0

    @property
    def failed(self) -> bool:
        task = self.task
        return task.done() and (task.cancelled() or task.exception() is not None)

    @property
    def orphaned(self) -> bool:
        """Whether the client has disconnected before it got the choices."""
        return not (self._waiting or self.delivered or self.failed)

    async def result(self) -> list[Completion]:
        """Wait for the choices.

        Raises:
            Closed: the session has ended.
        """
        await asyncio.wait({self.task})
        if self.task.cancelled():
            raise Closed("the session has ended, or the gateway is ending")
        return self.task.result()

    def __enter__(self) -> None:
        self._waiting += 1

    def __exit__(self, *exc: object) -> None:
        self._waiting -= 1
        if not self._waiting and not self._keeps:
            self.task.cancel()


class _Thread:
    """A session whose turns are sampled one after another. Others run at the same time."""

    def __init__(self, spec: SessionSpec) -> None:
        self.spec = spec
        self.session = Session(spec)
        self.lock = asyncio.Lock()


class Conversations:
    """All calls of one agent.

    Args:
        client: of the pool.
        metadata: of the trajectory.
        reward_weights: as for ``Client.session``.
    """

    def __init__(
        self,
        client: Client,
        metadata: Mapping[str, Any] | None = None,
        reward_weights: Mapping[str, float] | None = None,
    ) -> None:
        self._client = client
        self._metadata = dict(metadata or {})
        self._reward_weights = reward_weights
        self._threads: list[_Thread] = []
        self._ends: dict[bytes, tuple[_Thread, int]] = {}
        """Turns, by digest of the conversation that they end, as the client sees it."""
        self._answers: dict[bytes, list[Turn]] = {}
        """By digest of the request, the last ones."""
        self._last: _Thread | None = None
        self._closed = False

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

        Args:
            body: digest of the request.
            repeated: the client says that it has sent the request before. It gets that turn: one
                whose client has disconnected, or else the last one.
            keeps: see ``Turn``.
            on_tokens: called with new tokens, if the first request is a stream.

        Raises:
            Closed: the session has ended.
        """
        if self._closed:
            raise Closed("this session has ended")
        turns = [turn for turn in self._answers.pop(body, ()) if not turn.failed]
        self._answers[body] = turns
        if len(self._answers) > _REMEMBERED:
            del self._answers[next(iter(self._answers))]
        if repeated and turns:
            return next((turn for turn in turns if turn.orphaned), turns[-1])
        turns.append(Turn(self._sample(requests, on_tokens), keeps))
        return turns[-1]

    async def _sample(
        self, requests: Sequence[TurnRequest], on_tokens: OnTokens
    ) -> list[Completion]:
        made: list[Completion] = []
        for request in requests:
            made += await self._sample_one(request, len(made), on_tokens)
        return made

    async def _sample_one(
        self, request: TurnRequest, first: int, on_tokens: OnTokens
    ) -> list[Completion]:
        seen = check_conversation(request.messages or ())
        template = {"tools": request.tools, "chat_template_kwargs": request.chat_template_kwargs}
        digests = digests_of(seen, template)
        # At least the last message comes after the turn.
        known = next((self._ends[d] for d in reversed(digests[:-1]) if d in self._ends), None)
        if known is None:
            spec = spec_of(self._client, request, self._metadata, self._reward_weights)
            known = _Thread(spec), ROOT
            self._threads.append(known[0])
        thread, after = known
        made = []
        async with thread.lock:
            for number in range(request.choices):
                thread.session.rewrite(seen, after=after)
                completion = await thread.session.generate(
                    **options_of(request, number, partial(on_tokens, first + number, thread.spec))
                )
                made.append(completion)
                shown = digests_of([*seen, message_of(completion)], template)[-1]
                self._ends[shown] = thread, len(thread.session.turns) - 1
                self._last = thread
        return made

    # --- the end ----------------------------------------------------------------------------------

    def reward(self, value: RewardValue, name: str = "", call: str | None = None) -> None:
        """Add to the reward of the last turn, or of the turn with a call. See ``Session.reward``.

        Raises:
            UsageError: no turn was sampled, or none has this call, or a value is not finite.
        """
        if call is not None:
            for thread in reversed(self._threads):
                for turn in thread.session.turns:
                    if any(made.id == call for made in turn.tool_calls):
                        thread.session.reward(value, name, call=call)
                        return
        if self._last is None:
            raise UsageError("no turn was sampled yet that could be rewarded")
        self._last.session.reward(value, name, call=call)

    def trajectory(self) -> Trajectory | None:
        """Return the trajectory of all turns, or None if there are none.

        It is the conversation that was sampled last, and the others are its branches.
        """
        found = [
            leaf
            for thread in self._threads
            if thread is not self._last and thread.session.turns
            for leaf in thread.session.trajectory().leaves
        ]
        if self._last is None:
            return None
        *own, last = self._last.session.trajectory().leaves
        return last.with_branches([*found, *own])

    async def close(self) -> None:
        """End all running turns."""
        self._closed = True
        turns = [turn for several in self._answers.values() for turn in several]
        tasks = [turn.task for turn in turns if not turn.task.done()]
        for thread in self._threads:
            thread.session.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def digests_of(messages: Sequence[Message], template: Mapping[str, Any]) -> list[bytes]:
    """Return a digest of each beginning of a conversation.

    It depends on what clients of OpenAI's API send back unchanged: not on reasoning, nor on the
    form of the arguments of calls, nor on white space around the content, nor on whether an empty
    content is "" or null.
    """
    state = blake2b(json.dumps(template, sort_keys=True).encode(), digest_size=16)
    found = []
    for message in messages:
        state.update(json.dumps(_seen(message), sort_keys=True).encode())
        found.append(state.digest())
    return found


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
    try:
        return json.loads(arguments) if isinstance(arguments, str) else arguments
    except ValueError:
        return arguments


def spec_of(
    client: Client,
    request: TurnRequest,
    metadata: Mapping[str, Any] | None = None,
    reward_weights: Mapping[str, float] | None = None,
) -> SessionSpec:
    """Return the spec of a session that begins with a request."""
    prompt: dict[str, Any] = {}
    if request.messages is not None:
        prompt["messages"] = request.messages
        prompt["tools"] = request.tools
        prompt["chat_template_kwargs"] = request.chat_template_kwargs
    elif isinstance(request.prompt, str):
        prompt["prompt"] = request.prompt
    else:
        prompt["input_ids"] = request.prompt
    return SessionSpec(
        client,
        **prompt,
        priority=request.priority,
        metadata=metadata,
        reward_weights=reward_weights,
        max_new_tokens=MOST_TOKENS,
    )


def options_of(request: TurnRequest, number: int, on_chunk: OnChunk) -> dict[str, Any]:
    """Return the arguments of ``Session.generate`` for a choice.

    Args:
        number: of the choice.
    """
    options = {
        **request.sampling,
        "tool_choice": request.tool_choice,
        "top_logprobs": request.top_logprobs,
    }
    if "seed" in options:
        options["seed"] += number
    if request.stream:
        options["on_chunk"] = on_chunk
    return options


def sample_alone(client: Client, requests: Sequence[TurnRequest], on_tokens: OnTokens) -> Turn:
    """Sample the choices of requests that belong to no session."""
    return Turn(_sample_alone(client, requests, on_tokens), False)


async def _sample_alone(
    client: Client, requests: Sequence[TurnRequest], on_tokens: OnTokens
) -> list[Completion]:
    tasks: list[asyncio.Task[Completion]] = []
    try:
        for request in requests:
            spec = spec_of(client, request)
            for number in range(request.choices):
                on_chunk = partial(on_tokens, len(tasks), spec)
                sampling = Session(spec).generate(**options_of(request, number, on_chunk))
                tasks.append(asyncio.ensure_future(sampling))
        return await asyncio.gather(*tasks)
    finally:
        # If one fails, or this is cancelled, the others end.
        for task in tasks:
            task.cancel()
