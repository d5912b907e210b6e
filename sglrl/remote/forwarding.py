"""Turn the requests of remote clients into calls of the driver, and send the answers back.

``remote/server.py`` accepts and removes the clients.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import msgspec

from ..actors.actor import EndpointSpec
from ..config import DROPPED_AT
from ..core.calls import Call
from ..core.clients import ClientState
from ..core.prefixes import Route
from ..driver.driver import ENVELOPE_BYTES, Driver, now
from ..errors import (
    DeadlineExceeded,
    InvalidRequest,
    MessageTooLarge,
    ProtocolError,
    SglrlError,
    UnknownEndpoint,
)
from ..inference.replies import chunk_of, resume
from ..inference.sampling import GRAMMARS, MOST_BIAS, check_grammar, most_top_logprobs
from ..inference.tokens import in_range
from ..wire.calls import ErrorBody, Item, ItemKind
from ..wire.codec import MALFORMED, Buffer, encode
from ..wire.engine import EngineInfo, GenerateArgs, NextTokenArgs, Sampling, ScoreArgs, TokenChunk
from ..wire.remote import Answers, PoolStatus, Request

_LONGEST_NAME: Final = 1024
NEWS_SECONDS: Final = 0.1
"""Minimum seconds between two reports of the engines' load to a busy client."""
_KNOWN_SAMPLINGS: Final = 256
"""Maximum number of checked sampling values in the cache. Clients use few different values."""

_KNOWN_CONVERSATIONS: Final = 1 << 14
"""Minimum number of conversations of one client that are kept. At most twice as many are kept."""

_decode_generate: Final = msgspec.msgpack.Decoder(GenerateArgs).decode
_decode_score: Final = msgspec.msgpack.Decoder(ScoreArgs).decode
_decode_next_token: Final = msgspec.msgpack.Decoder(NextTokenArgs).decode
_decode_sampling: Final = msgspec.msgpack.Decoder(Sampling).decode


Part = tuple[Any, ...]
"""A tuple in the layout of ``Answer``, or of its first four fields."""
_KIND: Final = 1
_FRAMES: Final = 3


class Peer:
    """One client and its unsent answers. ``state`` is the client's state in the fabric."""

    def __init__(self, identity: bytes, most_bytes: int, state: ClientState) -> None:
        self.identity = identity
        self.state = state
        self.sent = self.read = 0
        """Bytes of all messages sent to the client, and bytes that the client reported as read."""
        self.most_bytes = most_bytes
        """Maximum bytes of a frame."""
        self.calls: dict[int, Call] = {}
        self.conversations: dict[int, Route] = {}
        """Routes of conversations by the client's numbers."""
        self.silent: dict[int, Route] = {}
        """Routes of conversations without a turn since ``conversations`` was last emptied."""
        self.tasks: dict[int, Any] = {}
        """Running calls of ``PoolEndpoints`` by id."""
        self.items: list[Part] = []
        self.again: list[int] = []
        self.frames: list[Buffer] = []
        self.told = 0.0

    def conversation(self, number: int) -> Route:
        """Return the route for a conversation's next turn.

        It is the route of the previous turn, if that turn is known and has ended. Otherwise it is a
        new route.
        """
        route = self.conversations.get(number)
        if route is None:
            route = self.silent.pop(number, None)
            if route is None:
                route = Route(b"")
            if len(self.conversations) >= _KNOWN_CONVERSATIONS:
                self.silent, self.conversations = self.conversations, {}
            self.conversations[number] = route
        if route.tokens:
            self.conversations[number] = route = Route(b"")
        return route


class Forward:
    """The ``Reply`` of a call from a client in another process.

    Attributes:
        conversation: route of the conversation that the call is a turn of.
        begun: chunks of the answer so far, if another worker can continue from them.
    """

    __slots__ = ("begun", "conversation", "id", "peer", "relay", "resumable")

    def __init__(self, relay: Relay, peer: Peer, id_: int, resumable: bool) -> None:
        self.relay = relay
        self.peer = peer
        self.id = id_
        self.resumable = resumable
        self.conversation: Route | None = None
        self.begun: list[TokenChunk] | None = None

    def let_go(self) -> None:
        """Release the call's route."""
        route = self.conversation
        if route is not None:
            # No turn of the conversation runs, so its tokens need not be kept.
            route.tokens = b""
            self.conversation = None

    def chunk(self, item: Item, frames: Sequence[Buffer]) -> None:
        if self.resumable:
            try:
                chunk = chunk_of(item)
            except ProtocolError:
                # The client detects the malformed chunk itself.
                self.resumable = False
            else:
                if self.begun is None:
                    self.begun = []
                self.begun.append(chunk)
        self.relay.put(self.peer, (self.id, item.kind, item.body, item.frames), frames)

    def restart(self, call: Call) -> None:
        if self.begun is not None:
            # Send the chunks received so far first.
            self.relay.flush(self.peer)
            self.peer.again.append(self.id)
            resume(call, self.begun)

    def end(self, call: Call, outcome: Item | SglrlError, frames: Sequence[Buffer]) -> None:
        self.let_go()
        self.peer.calls.pop(self.id, None)
        if isinstance(outcome, Item):
            part = _part(self.id, outcome.kind, outcome.body, outcome.frames, call)
            self.relay.put(self.peer, part, frames)
        else:
            self.relay.fail(self.peer, self.id, outcome, call)


def _part(id_: int, kind: int, body: bytes, frames: int, call: Call) -> Part:
    worker, begun = call.worker, call.submitted_at
    if worker is None:
        return (id_, kind, body, frames)
    queued, first = call.sent_at - begun, call.first_at - begun
    return (
        id_,
        kind,
        body,
        frames,
        worker.index,
        call.attempts,
        queued if queued > 0.0 else 0.0,
        first if first > 0.0 else 0.0,
    )


class Relay:
    """Sends the answers of one driver to its remote clients.

    Args:
        driver: the driver whose transport sends the answers.
        status: returns the pool's status.
        on_lost: called with a client that cannot receive messages any more.
    """

    def __init__(
        self, driver: Driver, status: Callable[[], PoolStatus], on_lost: Callable[[Peer], None]
    ) -> None:
        self._driver = driver
        self._status = status
        self._on_lost = on_lost
        self._unsent: dict[Peer, None] = {}
        self._flush_scheduled = False
        most = max(driver.fabric.config.max_unread_bytes, driver.max_message_bytes)
        self._most_unread = DROPPED_AT * most

    def put(self, peer: Peer, item: Part, frames: Sequence[Buffer]) -> None:
        """Send an item when the loop tick ends, in one message with the client's other items."""
        peer.items.append(item)
        if frames:
            peer.frames.extend(frames)
        self._unsent[peer] = None
        if not self._flush_scheduled:
            self._flush_scheduled = True
            self._driver.loop.call_soon(self._flush_all)

    def fail(self, peer: Peer, id_: int, error: SglrlError, call: Call | None = None) -> None:
        found = ErrorBody(type(error).__name__, error.message, getattr(error, "traceback", ""))
        body = encode(found)
        if call is None:
            self.put(peer, (id_, ItemKind.FAILED, body, 0), ())
        else:
            self.put(peer, _part(id_, ItemKind.FAILED, body, 0, call), ())

    def flush(self, peer: Peer) -> None:
        self._unsent.pop(peer, None)
        if not peer.items and not peer.again:
            return
        items, peer.items = peer.items, []
        again, peer.again = peer.again, []
        frames, peer.frames = peer.frames, []
        status: PoolStatus | None = None
        if now() - peer.told > NEWS_SECONDS:
            status = self._status()
            peer.told = now()
        self._send_answers(peer, items, again, frames, status)

    def send(self, peer: Peer, body: bytes, frames: Sequence[Buffer] = ()) -> None:
        """Send one message.

        The client is lost if it is unreachable or has left too many bytes unread.
        """
        if not self._driver.send_to_peer(peer.identity, body, *frames):
            self._on_lost(peer)
            return
        size = len(body)
        for frame in frames:
            size += len(frame)
        peer.sent += size
        peer.state.unread += size
        if peer.sent - peer.read > self._most_unread:
            self._on_lost(peer)

    def read_so_far(self, peer: Peer, size: int) -> bool:
        """Record how many bytes the client has read. Return False if the number is impossible."""
        if not peer.read <= size <= peer.sent:
            return False
        more, peer.read = size - peer.read, size
        self._driver.read_by_client(peer.state, more)
        return True

    def forget(self, peer: Peer) -> None:
        """Remove a client and cancel its calls."""
        self._unsent.pop(peer, None)
        for call in peer.calls.values():
            self._driver.cancel(call)
        self._driver.fabric.remove_client(peer.state)
        for task in peer.tasks.values():
            task.cancel()
        peer.calls.clear()
        peer.tasks.clear()
        peer.conversations.clear()
        peer.silent.clear()

    def cancel(self, peer: Peer, id_: int) -> None:
        call = peer.calls.pop(id_, None)
        task = peer.tasks.pop(id_, None)
        if call is not None:
            self._driver.cancel(call)
            call.reply.let_go()
        elif task is not None:
            task.cancel()
        else:
            return
        self.put(peer, (id_, ItemKind.CANCELLED, b"\xc0", 0), ())

    def _flush_all(self) -> None:
        self._flush_scheduled = False
        for peer in list(self._unsent):
            self.flush(peer)

    def _send_answers(
        self,
        peer: Peer,
        items: list[Part],
        again: list[int],
        frames: list[Buffer],
        status: PoolStatus | None,
    ) -> None:
        body = encode(Answers(items, again, status))  # type: ignore[arg-type]
        largest = max(len(body), *map(len, frames)) if frames else len(body)
        if largest > peer.most_bytes and len(items) > 1:
            half = len(items) // 2
            count = sum(item[_FRAMES] for item in items[:half])
            self._send_answers(peer, items[:half], again, frames[:count], status)
            self._send_answers(peer, items[half:], [], frames[count:], None)
        elif largest > peer.most_bytes and items and items[0][_KIND] != ItemKind.FAILED:
            what = (
                f"the answer has {largest:,} bytes, of at most {peer.most_bytes:,} that fit one "
                "message of this client (max_message_bytes)"
            )
            body = encode(ErrorBody(MessageTooLarge.__name__, what, ""))
            id_, kind, _, _, *end = items[0]
            if kind == ItemKind.CHUNK:
                # For the client, the call ends with this error.
                self.cancel(peer, id_)
            item = (id_, ItemKind.FAILED, body, 0, *end)
            self._send_answers(peer, [item], again, [], status)
        else:
            self.send(peer, body, frames)


class Admission:
    """Checks the requests of remote clients, which are not trusted, and turns them into calls.

    Args:
        relay: sends the answers.
        driver: accepts the calls.
        info: limits of the engine.
        controls: endpoints of the engines that take no tokens.
        weights: an object whose ``version`` is the current version of the weights.
        of_pool: endpoints of the pool as a whole.
        ask: ``ask(peer, request, spec)`` runs an endpoint of the pool for a client.
    """

    def __init__(
        self,
        relay: Relay,
        driver: Driver,
        info: EngineInfo,
        controls: Mapping[str, EndpointSpec],
        weights: Any,
        of_pool: Mapping[str, EndpointSpec],
        ask: Callable[[Peer, Request, EndpointSpec], None],
    ) -> None:
        self._relay = relay
        self._driver = driver
        self._of_pool = of_pool
        self._ask = ask
        self._vocab_size: int = info.vocab_size
        self._most_prompt: int = info.max_prompt_tokens
        self._most_total: int = info.max_total_tokens
        self._most_top = most_top_logprobs(info.vocab_size)
        self._max_body = driver.max_message_bytes - ENVELOPE_BYTES
        self._controls = controls
        self._weights = weights
        self._samplings: dict[bytes, int] = {}
        """Checked sampling values, encoded as received, with their ``max_new_tokens``."""

    def begin(self, peer: Peer, requests: Sequence[Request]) -> bool:
        """Start requests. Return False if a request has the id of one that has not ended."""
        taken = True
        for request in requests:
            id_ = request[0]
            if id_ in peer.calls or id_ in peer.tasks:
                taken = False
                continue
            try:
                spec = self._of_pool.get(request[1])
                if spec is not None:
                    self._ask(peer, request, spec)
                else:
                    call = self._call(peer, request)
                    try:
                        self._driver.submit(call)
                    except SglrlError:
                        call.reply.let_go()
                        raise
                    peer.calls[id_] = call
            except SglrlError as error:
                self._relay.fail(peer, id_, error)
        return taken

    def _call(self, peer: Peer, request: Request) -> Call:
        """Return the call for a request.

        Raises:
            InvalidRequest: the request is wrong. A correct client checks this before sending.
            DeadlineExceeded: the deadline has passed.
        """
        fields: tuple[int, str, Any, float | None, int, int | None, str | None, int] = request
        id_, endpoint, raw, timeout, priority, worker, session, number = fields
        deadline: float | None = None
        if timeout is not None:
            if not timeout > 0:
                raise DeadlineExceeded("the deadline had passed before the call was here")
            deadline = now() + timeout if math.isfinite(timeout) else None
        generate = endpoint == "generate"
        forward = Forward(self._relay, peer, id_, generate)
        control = None if generate else self._controls.get(endpoint)
        if control is not None:
            arguments(control, request)
            return Call(
                endpoint,
                raw.copy(),
                forward,
                deadline=deadline,
                pinned=worker,
                idempotent=control.idempotent,
                urgent=worker is not None,
                client=peer.state,
            )
        args: msgspec.Struct
        answer = 0
        try:
            if generate:
                args, ids = self._generate(raw, forward)
            elif endpoint == "score":
                args, ids, answer = self._score(raw)
            elif endpoint == "next_token_logprobs":
                args, ids, answer = self._next_token(raw)
            else:
                raise UnknownEndpoint(f"the engine has no endpoint {endpoint!r}")
        except MALFORMED as error:
            raise InvalidRequest(f"{endpoint}: {error}") from None
        size = len(ids)
        if not size or size % 4:
            raise InvalidRequest("token ids are int32, at least one")
        if not in_range(ids, self._vocab_size):
            raise InvalidRequest("token ids are outside the vocabulary")
        if size // 4 > (self._most_total if endpoint == "score" else self._most_prompt):
            raise InvalidRequest(f"the prompt has {size // 4} tokens, which is too many")
        if len(raw) > self._max_body:
            raise InvalidRequest("the request does not fit one message to a worker")
        if session is not None and len(session) > _LONGEST_NAME:
            raise InvalidRequest(f"a session's name has at most {_LONGEST_NAME} characters")
        version: int = self._weights.version
        if number < 0 or session is not None:
            route = Route(ids, version, session)
        else:
            # The claim that the call continues the conversation is not checked. A false claim costs
            # a miss in a prefix cache.
            forward.conversation = route = peer.conversation(number)
            route.extend(ids, version)
        call = Call(
            endpoint,
            args,
            forward,
            (),
            deadline,
            priority,
            worker,
            route,
            True,
            False,
            generate,
            client=peer.state,
        )
        call.answer_bytes = answer
        call.extra_bytes = len(raw) - size
        return call

    def _generate(self, raw: Any, forward: Forward) -> tuple[GenerateArgs, bytes]:
        wanted = _decode_generate(raw)
        ids: bytes = wanted.input_ids
        begun = wanted.resume
        if begun:
            if not in_range(begun, self._vocab_size):
                raise InvalidRequest("token ids are outside the vocabulary, or no int32")
            forward.begun = [TokenChunk(begun)]
        # Copy: a view would keep the whole message alive as long as the call.
        sampling = bytes(wanted.sampling)
        new = self._samplings.get(sampling, 0)
        if not new:
            new = self._check_sampling(sampling)
        if not 1 <= new <= self._most_total - len(ids) // 4:
            raise InvalidRequest(
                f"max_new_tokens={new} does not fit a prompt of {len(ids) // 4} tokens"
            )
        _check_top(wanted.top_logprobs, self._most_top)
        args = GenerateArgs(
            ids,
            msgspec.Raw(sampling),
            wanted.logprobs,
            wanted.top_logprobs,
            wanted.stream,
            wanted.priority,
            begun,
        )
        return args, ids

    def _score(self, raw: Any) -> tuple[ScoreArgs, bytes, int]:
        """Return the arguments, the token ids and the bytes of the answer, like ``_next_token``."""
        wanted = _decode_score(raw)
        ids: bytes = wanted.input_ids
        count = len(ids) // 4
        if not 0 <= wanted.start < count:
            raise InvalidRequest(f"start={wanted.start} is beyond the tokens given")
        _check_top(wanted.top_logprobs, self._most_top)
        return wanted, ids, (count - wanted.start) * (4 + 8 * wanted.top_logprobs)

    def _next_token(self, raw: Any) -> tuple[NextTokenArgs, bytes, int]:
        wanted = _decode_next_token(raw)
        ids: bytes = wanted.input_ids
        _check_top(wanted.top_k, self._vocab_size)
        return wanted, ids, 8 * wanted.top_k if wanted.top_k else 4 * self._vocab_size

    def _check_sampling(self, raw: bytes) -> int:
        """Check the sampling values that could crash an engine. Return ``max_new_tokens``.

        The engine checks the other values itself.
        """
        vocab_size = self._vocab_size
        sampling = _decode_sampling(raw)
        if not all(0 <= token < vocab_size for token in sampling.stop_token_ids):
            raise InvalidRequest("stop_token_ids are outside the vocabulary")
        for token, bias in sampling.logit_bias.items():
            if not 0 <= token < vocab_size or not abs(bias) <= MOST_BIAS:
                raise InvalidRequest("logit_bias is outside the vocabulary, or no number")
        for name in GRAMMARS:
            grammar = getattr(sampling, name)
            if grammar is not None:
                check_grammar(name, grammar)
        new: int = sampling.max_new_tokens
        if len(self._samplings) >= _KNOWN_SAMPLINGS:
            self._samplings.clear()
        if len(raw) < 1024:
            self._samplings[raw] = new
        return new


def _check_top(count: int, most: int) -> None:
    if not 0 <= count <= most:
        raise InvalidRequest(f"{count} likeliest tokens are too many, or too few")


def arguments(spec: EndpointSpec, request: Request) -> dict[str, Any]:
    """Return the arguments of a request by name.

    Raises:
        InvalidRequest: the arguments do not match the endpoint.
    """
    try:
        return spec.arguments.decode(request.args, ())
    except msgspec.ValidationError as error:
        raise InvalidRequest(f"{spec.name}(): {error}") from None
