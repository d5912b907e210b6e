"""The state of a session, and the synchronous parts of its methods.

``Session`` is the public class and has the coroutines.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from msgspec.structs import force_setattr

from ..actors.actor import deadline_from
from ..core.calls import Call
from ..core.prefixes import Route
from ..driver.driver import now
from ..errors import Closed, InvalidRequest, UsageError
from ..inference.completion import Beginning, Completion, Conversation
from ..inference.prompts import Message, check_conversation
from ..inference.requests import Requests
from ..inference.sampling import DEFAULT_MAX_NEW_TOKENS, Prepared, own_names
from ..inference.tokens import check_ids
from .renderer import behind_answer
from .session_spec import SessionSpec
from .trajectory import MOST_REWARD


class SessionState:
    """The state of one ``Session``. Arguments of type ``Any`` are not checked yet.

    Attributes:
        tokens: all tokens up to the end of the last turn. Empty before the first turn.
        prompt_bytes: number of bytes of ``tokens`` that belong to the prompt. 0 before the prompt
            is known.
        starts: for each turn, the position in the response at which its tokens begin.
        oldest: see ``Session.oldest_version``.
        pending: observations after the last turn: text, ids, messages.
        taken: number of items of ``pending`` in the prompt of the turn that is being sampled.
        generating: total seconds spent waiting for turns.
        rewarded: whether ``reward`` was called.
        refused: whether a turn failed because the client no longer accepts calls.
        on_turn: called after each turn with the bytes of its prompt, the number of cached prompt
            tokens, and the number of new bytes.
    """

    __slots__ = (
        "answer_at",
        "began",
        "busy",
        "call",
        "closed",
        "conversation",
        "generating",
        "messages",
        "oldest",
        "on_turn",
        "pending",
        "prompt_bytes",
        "refused",
        "requests",
        "rewarded",
        "rewards",
        "route",
        "seed",
        "spec",
        "starts",
        "taken",
        "tokens",
        "turns",
    )

    def __init__(
        self, spec: SessionSpec, on_turn: Callable[[int, int, int], None] | None, seed: Any
    ) -> None:
        self.spec = spec
        self.on_turn = on_turn
        self.seed = seed
        self.requests: Requests = spec.requests
        self.route = Route(b"")
        self.tokens = b""
        self.prompt_bytes = 0
        self.conversation = Conversation()
        self.turns: list[Completion] = []
        self.starts: list[int] = []
        self.rewards: list[float] = []
        self.oldest: int | None = None
        self.messages: list[Message] | None = spec.messages
        self.answer_at = 0
        self.pending: list[Any] = []
        self.taken = 0
        self.busy = self.closed = False
        self.call: Call | None = None
        self.began = now()
        self.generating = 0.0
        self.rewarded = False
        self.refused = False

    @property
    def response(self) -> bytes:
        return self.tokens[self.prompt_bytes :]

    # --- a turn, in the order of ``Session.generate`` ---------------------------------------------

    def begin(self, values: dict[str, Any]) -> Prepared:
        """Begin a turn. Return its checked sampling values.

        Raises:
            Closed, UsageError, InvalidRequest: see ``Session.generate``.
        """
        if self.closed:
            raise Closed("the session is closed")
        if self.busy:
            raise UsageError("a turn of this session is being sampled; await it first")
        if self.seed is not None:
            values = {"seed": self.seed + len(self.turns), **own_names(values)}
        spec = self.spec
        prepared: Prepared = spec.prepare(values) if values else spec.prepared
        self.busy = True
        return prepared

    def take(self) -> float:
        """Freeze pending observations for this turn. Return the current time."""
        self.taken = len(self.pending)
        return now()

    def prompt(self, before: bytes) -> bytes | None:
        """Return the prompt of the turn: the tokens ``before``, then the observations.

        Returns:
            None if an observation must be encoded first.
        """
        if not self.prompt_bytes:
            self.prompt_bytes = len(before)
        if not self.taken:
            return before
        parts = [before]
        for item in self.pending[: self.taken]:
            if not isinstance(item, bytes):
                return None
            parts.append(item)
        return b"".join(parts)

    def limits(self, ids: bytes, prepared: Prepared) -> tuple[int, float | None]:
        """Return the maximum number of new tokens and the deadline of the turn.

        Raises:
            InvalidRequest: the context is full.
        """
        spec = self.spec
        most: int = spec.most_tokens
        room = most - len(ids) // 4
        limit: int = prepared.max_new_tokens or DEFAULT_MAX_NEW_TOKENS
        if limit > room:
            limit = room
        if limit < 1:
            raise InvalidRequest(
                f"the context is full: the session has {len(ids) // 4} tokens, with what was "
                f"observed, of {self.requests.info.context_length} possible; see Session.room "
                "and Session.unobserve"
            )
        timeout: float | None = spec.timeout
        return limit, None if timeout is None else deadline_from(timeout)

    def ask(
        self,
        ids: bytes,
        prepared: Prepared,
        limit: int,
        deadline: float | None,
        begun: Completion | None,
    ) -> asyncio.Future[Completion]:
        """Submit the turn, or the rest of it if it was returned unfinished.

        Args:
            begun: the unfinished completion to continue, if any.
        """
        if self.closed:
            raise Closed("the session was closed")
        spec = self.spec
        version = spec.weights.version
        if not self.turns and (begun is None or not len(begun.output_ids)):
            # No token of the session will have an older version.
            self.oldest = version
        self.route.extend(ids, version)
        priority: int = spec.priority
        self.call, future = self.requests.sample(
            ids, prepared, limit, True, 0, self.route, deadline, priority, None, begun
        )
        return future

    def give_up(self) -> None:
        """Cancel the call of the turn, because its caller no longer waits for it."""
        if self.call is not None:
            self.requests.driver.cancel(self.call)

    def close(self) -> None:
        """Close the session. See ``Session.close``."""
        self.closed = True
        call = self.call
        if call is not None:
            future = call.reply.future
            if not future.done():
                self.requests.driver.cancel(call)
                future.set_exception(Closed("the session was closed"))

    def keep(self, ids: bytes, completion: Completion) -> None:
        """Record a finished turn. A failed turn records nothing."""
        chunks = completion._chunks
        size = len(ids)
        if self.taken:
            del self.pending[: self.taken]
        self.conversation.tokens = ids
        force_setattr(completion, "_prompt", Beginning(self.conversation, size))
        if not self.turns:
            for chunk in chunks:
                if chunk.ids:
                    self.oldest = chunk.version
                    break
        self.turns.append(completion)
        self.starts.append((size - self.prompt_bytes) // 4)
        self.rewards.append(0.0)
        self.tokens = tokens = b"".join([ids, *[chunk.ids for chunk in chunks]])
        if self.on_turn is not None:
            self.on_turn(size, chunks[-1].cached_tokens, len(tokens) - size)

    def failed(self, error: BaseException) -> None:
        if not self.turns:
            self.oldest = None
        if isinstance(error, Closed):
            self.refused = not self.closed

    def end(self, begun: float) -> None:
        """End the turn, whether it succeeded or failed."""
        self.busy = False
        self.taken = 0
        self.call = None
        self.generating += now() - begun

    # --- between turns ----------------------------------------------------------------------------

    def observe(self, what: Any) -> None:
        """Append an observation. See ``Session.observe``."""
        if isinstance(what, str):
            if what:
                self.pending.append(what)
            return
        if type(what) is list and what and type(what[0]) is int:
            # Test for a list of ints first, because isinstance(..., Mapping) is slow.
            self.pending.append(check_ids(what, self.requests.vocab_size))
            return
        several = isinstance(what, (list, tuple)) and what and isinstance(what[0], Mapping)
        if not isinstance(what, Mapping) and not several:
            if not hasattr(what, "__len__") or len(what):
                # An empty list is allowed and ignored: the output of a tool may be empty.
                self.pending.append(check_ids(what, self.requests.vocab_size))
            return
        new: list[Any] = [what] if isinstance(what, Mapping) else list(what)
        new = [dict(message) for message in check_conversation(new)]
        if self.messages is None:
            raise UsageError("this session began without messages: observe text or token ids")
        behind = len(self.pending) > self.taken
        if behind and isinstance(self.pending[-1], list):
            self.pending[-1] += new
        elif not self.turns:
            raise UsageError("no turn was sampled yet: put these messages into the session's own")
        else:
            self.pending.append(new)

    def unobserve(self) -> None:
        del self.pending[self.taken :]

    def reward(self, value: Any) -> None:
        """Add to the reward of the last turn. See ``Session.reward``."""
        if not self.turns:
            raise UsageError("no turn was sampled yet that could be rewarded")
        try:
            total = self.rewards[-1] + float(value)
        except (TypeError, ValueError, OverflowError, RuntimeError):
            # A tensor of several numbers raises RuntimeError.
            raise UsageError(f"a reward must be a number, got {value!r:.200}") from None
        if not abs(total) <= MOST_REWARD:
            raise UsageError(f"a reward must be finite, also in float32; got {value}")
        self.rewards[-1] = total
        self.rewarded = True

    # --- messages ---------------------------------------------------------------------------------

    def encode(
        self, pending: list[str | bytes | list[Message]]
    ) -> tuple[bytes, list[Message] | None, int]:
        """Encode observations. Runs in a thread and changes no state.

        Returns:
            ``(response, messages, answer_at)`` of the session after the observations. ``answer_at``
            is the byte of the response at which the assistant's turn begins.
        """
        box, spec = self.requests.box, self.spec
        vocab_size = spec.vocab_size
        response, messages, answer_at = self.response, self.messages, self.answer_at
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
                spec.render, messages, answer, item, allow_rewrite=spec.allow_rewrite
            )
            ids = box.encode_rendered([text])[0]
            if ended is not None and ids[:1] == [ended]:
                # The model sampled the same end token as the template writes, so add it only once.
                ids = ids[1:]
            response += check_ids(ids, vocab_size)
            messages = [*messages, {"role": "assistant", "content": answer}, *item]
            answer_at = len(response)
        return response, messages, answer_at

    def _ended_by(self, size: int) -> int | None:
        """Return the token that ended the last turn, if it is the last token of the response.

        Args:
            size: bytes of the response.
        """
        start, completion = self.starts[-1], self.turns[-1]
        ids = completion.output_ids
        if not len(ids) or 4 * (start + len(ids)) != size:
            return None
        # Also test the model's end tokens: with ignore_eos or a stop string, stop_match is not one.
        last = int(ids[-1])
        ends = last == completion.stop_match or last in self.requests.info.eos_token_ids
        return last if ends else None


def _joined(pending: Sequence[str | bytes | list[Message]]) -> list[str | bytes | list[Message]]:
    """Join adjacent lists of messages, because no answer is between them.

    Adjacent lists arise when a turn fails: one list was observed before the turn, the other while
    it was being sampled.
    """
    found: list[str | bytes | list[Message]] = []
    for item in pending:
        if isinstance(item, list) and found and isinstance(found[-1], list):
            found[-1] = [*found[-1], *item]
        else:
            found.append(item)
    return found
