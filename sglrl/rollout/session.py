"""One conversation, token in and token out: the engine sees every turn the very tokens that it
sampled and was given before, and the new ones behind them.

Every turn of an agent goes through here, so this is compiled (``_compiled.py``).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self, SupportsFloat

import numpy as np
from msgspec.structs import force_setattr
from numpy.typing import NDArray

from ..actor import deadline_from
from ..completion import Beginning, Completion, Conversation
from ..core.calls import Call
from ..core.routing import Route
from ..driver import now
from ..errors import Closed, InvalidRequest, UsageError
from ..prompts import Message, check_conversation
from ..sampling import DEFAULT_MAX_NEW_TOKENS, own_names
from ..tokens import TokenIds, check_ids
from .gate import Gate
from .opening import Opening
from .template import behind_answer
from .trajectory import MOST_REWARD, Trajectory


class Session:
    """Made by ``Client.session``; an async context manager. Turns are sampled one at a time.

    The prompt of each turn is exactly the tokens of the turns before and what was observed behind
    them; nothing that was sampled is tokenized again. Turns go to the worker that holds their
    prefix, unless it is overloaded. Something of your own goes into its ``metadata``.
    """

    __slots__ = (
        "_answer_at",
        "_at_gate",
        "_began",
        "_busy",
        "_call",
        "_client",
        "_closed",
        "_conversation",
        "_gate",
        "_generating",
        "_limit",
        "_messages",
        "_oldest",
        "_on_turn",
        "_opening",
        "_pending",
        "_prompt_bytes",
        "_requests",
        "_rewards",
        "_route",
        "_seed",
        "_starts",
        "_taken",
        "_tokens",
        "_turns",
        "metadata",
        "refused",
        "rewarded",
    )

    def __init__(
        self,
        opening: Opening,
        gate: Gate | None = None,
        on_turn: Callable[[int, int, int], None] | None = None,
        seed: int | None = None,
    ) -> None:
        self._opening = opening
        self._gate = gate
        self._on_turn = on_turn
        """Told of each: bytes of its prompt, how many of its tokens were cached, and new bytes."""
        self._seed = seed
        self._client = opening.client
        self._requests = opening.requests
        self._route = Route(b"")
        self._tokens = b""
        """All up to the end of the last turn; none before the first."""
        self._prompt_bytes = 0
        """How many of them are the prompt's."""
        self._conversation = Conversation()
        self._turns: list[Completion] = []
        self._starts: list[int] = []
        """Where in the response each one's tokens begin."""
        self._rewards: list[float] = []
        self._oldest: int | None = None
        self._messages = opening.messages
        self._answer_at = 0
        self._pending: list[str | bytes | list[Message]] = []
        """What was observed behind the last turn."""
        self._taken = 0
        """How much of that is in the prompt of the turn that is being sampled."""
        self._busy = self._closed = False
        self._call: tuple[Call, asyncio.Future[Completion]] | None = None
        self._at_gate: asyncio.Future[None] | None = None
        self._limit: asyncio.Timeout | None = None
        """How long all of it may take, not counting what is spent at the gate."""
        self._began = now()
        self._generating = 0.0
        self.rewarded = False
        """Whether ``reward`` was called."""
        self.refused = False
        """Whether a turn failed because the client takes no calls any more."""
        self.metadata: dict[str, Any] = dict(opening.metadata)
        """Goes into the trajectory: anything msgpack can hold."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """No further turn is sampled, and one that is being sampled is given up: ``generate``
        raises ``Closed``."""
        self._closed = True
        if self._at_gate is not None and not self._at_gate.done():
            self._at_gate.set_result(None)
        if self._call is not None:
            call, future = self._call
            if not future.done():
                self._requests.driver.cancel(call)
                future.set_exception(Closed("the session was closed"))

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
        if self._closed:
            raise Closed("the session is closed")
        if self._busy:
            raise UsageError("a turn of this session is being sampled; await it first")
        opening = self._opening
        if self._seed is not None:
            values = {"seed": self._seed + len(self._turns), **own_names(values)}
        prepared = opening.prepare(values) if values else opening.prepared
        self._busy = True
        gate = self._gate
        if gate is not None:
            if gate.opening is not None:
                await self._enter(gate)
            gate.inside += 1
        begun = now()
        try:
            # What is observed from now on comes behind this turn.
            pending = self._pending
            taken = self._taken = len(pending)
            before = self._tokens or await opening.ids()
            prompt_bytes = self._prompt_bytes or len(before)
            encoded = None
            if not taken:
                ids = before
            elif taken == 1 and type(pending[0]) is bytes:
                ids = before + pending[0]
            else:
                encoded = await self._with(pending[:taken])
                ids = before[:prompt_bytes] + encoded[0]
            limit = prepared.max_new_tokens or DEFAULT_MAX_NEW_TOKENS
            room = opening.most_tokens - len(ids) // 4
            if limit > room:
                limit = room
            if limit < 1:
                raise InvalidRequest(
                    f"the context is full: the session has {len(ids) // 4} tokens, with what was "
                    f"observed, of {self._client.info.context_length} possible; see Session.room "
                    "and Session.unobserve"
                )
            requests = self._requests
            deadline = None if opening.timeout is None else deadline_from(opening.timeout)
            completion = None
            while True:
                if self._closed:
                    raise Closed("the session was closed")
                version = opening.weights.version
                if not self._turns and (completion is None or not len(completion.output_ids)):
                    # No token will be older.
                    self._oldest = version
                self._route.extend(ids, version)
                self._call = call, future = requests.sample(
                    ids,
                    prepared,
                    limit,
                    True,
                    0,
                    self._route,
                    deadline,
                    opening.priority,
                    None,
                    completion,
                )
                try:
                    completion = await future
                except BaseException:
                    requests.driver.cancel(call)
                    raise
                chunks = completion._chunks
                if chunks[-1].finish != "abort":
                    break
            # It has happened, and not before.
            if taken:
                del pending[:taken]
                if encoded is not None:
                    _, self._messages, self._answer_at = encoded
        except BaseException as error:
            if not self._turns:
                self._oldest = None
            if isinstance(error, Closed):
                self.refused = not self._closed
            raise
        finally:
            self._busy = False
            self._taken = 0
            self._call = None
            self._generating += now() - begun
            if gate is not None:
                gate.leave()
        size = len(ids)
        self._conversation.tokens = ids
        force_setattr(completion, "_prompt", Beginning(self._conversation, size))
        if not self._turns:
            self._prompt_bytes = prompt_bytes
            self._oldest = next((c.version for c in chunks if c.ids), self._oldest)
        self._turns.append(completion)
        self._starts.append((size - prompt_bytes) // 4)
        self._rewards.append(0.0)
        self._tokens = tokens = b"".join((ids, *[chunk.ids for chunk in chunks]))
        if self._on_turn is not None:
            self._on_turn(size, chunks[-1].cached_tokens, len(tokens) - size)
        return completion

    async def _enter(self, gate: Gate) -> None:
        limit, clock = self._limit, asyncio.get_running_loop().time
        until = None if limit is None else limit.when()
        left = None if until is None else until - clock()
        stopped = limit if left is not None and left > 0 else None
        if stopped is not None:
            stopped.reschedule(None)
        try:
            while (opening := gate.opening) is not None and not self._closed:
                self._at_gate = asyncio.get_running_loop().create_future()
                await asyncio.wait((opening, self._at_gate), return_when=asyncio.FIRST_COMPLETED)
            if self._closed:
                raise Closed("the session was closed")
        except BaseException:
            self._busy = False
            raise
        finally:
            self._at_gate = None
            if stopped is not None and left is not None and not self._closed:
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
        if isinstance(what, str):
            if what:
                self._pending.append(what)
            return
        if type(what) is list and what and type(what[0]) is int:
            # What is cheap to recognize first: the looks at Mapping take longer than the rest.
            self._pending.append(check_ids(what, self._opening.vocab_size))
            return
        several = isinstance(what, (list, tuple)) and what and isinstance(what[0], Mapping)
        if not isinstance(what, Mapping) and not several:
            if not hasattr(what, "__len__") or len(what):
                # A tool may have nothing to say.
                self._pending.append(check_ids(what, self._opening.vocab_size))
            return
        new: list[Any] = [what] if isinstance(what, Mapping) else list(what)
        check_conversation(new)
        new = [dict(message) for message in new]
        if self._messages is None:
            raise UsageError("this session began without messages: observe text or token ids")
        behind = len(self._pending) > self._taken
        if behind and isinstance(self._pending[-1], list):
            self._pending[-1] += new
        elif not self._turns:
            raise UsageError("no turn was sampled yet: put these messages into the session's own")
        else:
            self._pending.append(new)

    def unobserve(self) -> None:
        """Take back what was observed since the last turn: it did not fit, or the chat template
        does not take it. What a turn that is being sampled has in its prompt stays."""
        del self._pending[self._taken :]

    def reward(self, value: SupportsFloat) -> None:
        """Add to the reward of the last turn.

        Raises:
            UsageError: there is none, or the value is not finite.
        """
        if not self._turns:
            raise UsageError("no turn was sampled yet that could be rewarded")
        try:
            total = self._rewards[-1] + float(value)
        except (TypeError, ValueError, OverflowError):
            raise UsageError(f"a reward must be a number, got {value!r:.200}") from None
        if not abs(total) <= MOST_REWARD:
            raise UsageError(f"a reward must be finite, also in float32; got {value}")
        self._rewards[-1] = total
        self.rewarded = True

    # --- what there is ----------------------------------------------------------------------------

    @property
    def ids(self) -> NDArray[np.int32]:
        """int32: all tokens up to the end of the last turn; empty before the first."""
        return np.frombuffer(self._tokens, "<i4")

    @property
    def turns(self) -> list[Completion]:
        """What was sampled, in order."""
        return self._turns[:]

    @property
    def oldest_version(self) -> int | None:
        """Policy version of the first token, or a lower bound while it is being sampled; None
        before."""
        return self._oldest

    @property
    def room(self) -> int:
        """Tokens that fit the context behind those that there are, with those that were observed
        as ids; of what was observed as text or messages it is not known yet how many they are."""
        observed = sum([len(item) for item in self._pending if isinstance(item, bytes)])
        used = (len(self._tokens) + observed) // 4
        return max(0, self._opening.most_tokens - used)

    @property
    def text(self) -> str:
        """All that was sampled and observed behind the prompt, special tokens included."""
        return self._requests.decode(np.frombuffer(self._response, "<i4").tolist(), False)

    def trajectory(self, reward: SupportsFloat | None = None) -> Trajectory:
        """What a trainer needs of it. ``reward`` is added to the last turn's.

        Raises:
            UsageError: no turn was sampled.
        """
        if reward is not None:
            self.reward(reward)
        if not self._turns:
            raise UsageError("no turn was sampled, so there is no trajectory")
        return Trajectory.from_turns(
            self._tokens[: self._prompt_bytes],
            self._response,
            self._starts,
            self._turns,
            self._rewards,
            total=now() - self._began,
            generating=self._generating,
            metadata=dict(self.metadata),
        )

    # --- inside -----------------------------------------------------------------------------------

    @property
    def _response(self) -> bytes:
        return self._tokens[self._prompt_bytes :]

    async def _with(
        self, pending: list[str | bytes | list[Message]]
    ) -> tuple[bytes, list[Message] | None, int]:
        """See ``_encode``; off the event loop, unless they are ids only."""
        if all(isinstance(item, bytes) for item in pending):
            response = self._response + b"".join(pending)  # type: ignore[arg-type]
            return response, self._messages, self._answer_at
        return await asyncio.get_running_loop().run_in_executor(None, self._encode, pending)

    def _encode(
        self, pending: list[str | bytes | list[Message]]
    ) -> tuple[bytes, list[Message] | None, int]:
        """The session's response, messages and beginning of the assistant's turn, with these."""
        box, opening = self._requests.box, self._opening
        vocab_size = opening.vocab_size
        response, messages, answer_at = self._response, self._messages, self._answer_at
        for item in _joined(pending):
            if isinstance(item, bytes):
                response += item
                continue
            if isinstance(item, str):
                response += check_ids(box.encode_rendered([item])[0], vocab_size)
                continue
            assert messages is not None
            tokens = np.frombuffer(response[answer_at:], "<i4").tolist()
            ended = self._ended_by(len(response))
            answer = box.decode(tokens if ended is None else tokens[:-1], False)
            text = behind_answer(
                opening.render, messages, answer, item, allow_rewrite=opening.allow_rewrite
            )
            ids = box.encode_rendered([text])[0]
            if ended is not None and ids[:1] == [ended]:
                # The model has ended its turn as the template does.
                ids = ids[1:]
            response += check_ids(ids, vocab_size)
            messages = [*messages, {"role": "assistant", "content": answer}, *item]
            answer_at = len(response)
        return response, messages, answer_at

    def _ended_by(self, size: int) -> int | None:
        """The token that ended the last turn, if the response of so many bytes ends with it."""
        start, completion = self._starts[-1], self._turns[-1]
        ids = completion.output_ids
        if not len(ids) or 4 * (start + len(ids)) != size:
            return None
        # Also of a turn that went on behind the model's end, or that its text has ended.
        last = int(ids[-1])
        ends = last == completion.stop_match or last in self._requests.info.eos_token_ids
        return last if ends else None


def _joined(pending: Sequence[str | bytes | list[Message]]) -> list[str | bytes | list[Message]]:
    """With messages that come directly behind others in one list with them: no answer is between
    them. (Some were observed before a turn that failed, and some while it was being sampled.)"""
    found: list[str | bytes | list[Message]] = []
    for item in pending:
        if isinstance(item, list) and found and isinstance(found[-1], list):
            found[-1] = [*found[-1], *item]
        else:
            found.append(item)
    return found


def session_of_sample(
    opening: Opening,
    gate: Gate,
    on_turn: Callable[[int, int, int], None],
    seed: int | None,
    item: int,
    sample: int,
) -> Session:
    """Of a run, whose numbers go into the metadata, unless these have such names already."""
    session = Session(opening, gate, on_turn, seed)
    session.metadata.setdefault("item", item)
    session.metadata.setdefault("sample", sample)
    return session
