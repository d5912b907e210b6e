"""What passes through a driver for clients in other processes: their requests become calls of its
own fabric, and what comes of these is sent on. ``gateway.py`` says who such a client is.

Every call of such a client comes through here twice, so this is compiled (``_compiled.py``).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import msgspec

from .actor import EndpointSpec
from .codec import MALFORMED, Buffer, encode
from .core.calls import Call
from .core.routing import Route
from .driver import ENVELOPE_BYTES, Driver, now
from .errors import (
    DeadlineExceeded,
    InvalidRequest,
    MessageTooLarge,
    ProtocolError,
    SglrlError,
    UnknownEndpoint,
)
from .messages import (
    Answers,
    End,
    EngineInfo,
    ErrorBody,
    GenerateArgs,
    Item,
    ItemKind,
    News,
    NextTokenArgs,
    Request,
    Sampling,
    ScoreArgs,
    TokenChunk,
)
from .replies import chunk_of, resume
from .sampling import GRAMMARS, MOST_BIAS, check_grammar, most_top_logprobs
from .tokens import in_range

_LONGEST_NAME: Final = 1024
NEWS_SECONDS: Final = 0.1
"""At most so often a busy client is told how full the engines are."""
_KNOWN_SAMPLINGS: Final = 256
"""Sampling values that are remembered as checked. Clients use few different ones."""

_KNOWN_CONVERSATIONS: Final = 1 << 14
"""Of one client."""
_TAIL: Final = 64
"""Bytes by which a conversation is known again."""

_decode_generate: Final = msgspec.msgpack.Decoder(GenerateArgs).decode
_decode_score: Final = msgspec.msgpack.Decoder(ScoreArgs).decode
_decode_next_token: Final = msgspec.msgpack.Decoder(NextTokenArgs).decode
_decode_sampling: Final = msgspec.msgpack.Decoder(Sampling).decode


class Peer:
    """One client, and what it is to be told."""

    def __init__(self, identity: bytes, most_bytes: int) -> None:
        self.identity = identity
        self.most_bytes = most_bytes
        """Of a frame."""
        self.calls: dict[int, Call] = {}
        self.conversations: dict[int, Turns] = {}
        """By the client's numbers; the latest."""
        self.tasks: dict[int, Any] = {}
        """Of what it asks of the pool as a whole."""
        self.items: list[Item] = []
        self.ends: list[End] = []
        self.frames: list[Buffer] = []
        self.told = 0.0


class Turns:
    """Those of one conversation: what routing knows of it, for the next one. Of the tokens that the
    last one's prompt had it is remembered how many bytes they were, and the last of these."""

    __slots__ = ("route", "runs", "size", "tail")

    def __init__(self) -> None:
        self.route = Route(b"")
        self.size = 0
        self.tail = b""
        self.runs = False
        """One does, now."""

    def go_on(self, ids: bytes) -> bool:
        """Whether this can be the next one's prompt. (One that is taken for it and is not costs a
        miss in a prefix cache, never a wrong result.)"""
        tail = self.tail
        return not self.runs and ids.startswith(tail, self.size - len(tail))

    def begin(self, ids: bytes, version: int) -> None:
        self.runs = True
        self.size = len(ids)
        self.tail = ids[-_TAIL:]
        self.route.extend(ids, version)

    def end(self) -> None:
        self.runs = False
        self.route.tokens = b""


class Forward:
    """The ``Reply`` of a call that a client in another process made."""

    __slots__ = ("begun", "id", "peer", "relay", "resumable", "turns")

    def __init__(self, relay: Relay, peer: Peer, id_: int, resumable: bool, begun: bytes) -> None:
        self.turns: Turns | None = None
        """Of the conversation that the call is a turn of."""
        self.relay = relay
        self.peer = peer
        self.id = id_
        self.resumable = resumable
        self.begun: list[TokenChunk] = [TokenChunk(begun)] if begun else []

    def let_go(self) -> None:
        """The call is no more."""
        if self.turns is not None:
            self.turns.end()
            self.turns = None

    def chunk(self, item: Item, frames: Sequence[Buffer]) -> None:
        if self.resumable:
            try:
                self.begun.append(chunk_of(item))
            except ProtocolError:
                # The client will see that for itself.
                self.resumable = False
        self.relay.put(self.peer, Item(self.id, item.kind, item.body, item.frames), frames)

    def restart(self, call: Call) -> None:
        if self.begun:
            # What was received so far leaves first.
            self.relay.flush(self.peer)
            self.peer.ends.append(_end_of(self.id, call, True))
            resume(call, self.begun)

    def end(self, call: Call, outcome: Item | SglrlError, frames: Sequence[Buffer]) -> None:
        peer = self.peer
        self.let_go()
        peer.calls.pop(self.id, None)
        peer.ends.append(_end_of(self.id, call, False))
        if isinstance(outcome, Item):
            self.relay.put(peer, Item(self.id, outcome.kind, outcome.body, outcome.frames), frames)
        else:
            self.relay.fail(peer, self.id, outcome)


def _end_of(id_: int, call: Call, again: bool) -> End:
    worker, begun = call.worker, call.submitted_at
    queued, first = call.sent_at - begun, call.first_at - begun
    return End(
        id_,
        -1 if worker is None else worker.index,
        call.attempts,
        queued if queued > 0.0 else 0.0,
        first if first > 0.0 else 0.0,
        again,
    )


class Relay:
    """Of one driver, for all clients in other processes. ``news``: how the pool is, now.
    ``on_lost``: a client cannot be told anything any more."""

    def __init__(
        self, driver: Driver, news: Callable[[], News], on_lost: Callable[[Peer], None]
    ) -> None:
        self._driver = driver
        self._news = news
        self._on_lost = on_lost
        self._unsent: dict[Peer, None] = {}
        self._flush_scheduled = False

    def put(self, peer: Peer, item: Item, frames: Sequence[Buffer]) -> None:
        """Leaves when the loop tick ends, with all else for this client as one message."""
        peer.items.append(item)
        if frames:
            peer.frames.extend(frames)
        self._unsent[peer] = None
        if not self._flush_scheduled:
            self._flush_scheduled = True
            self._driver.loop.call_soon(self._flush_all)

    def fail(self, peer: Peer, id_: int, error: SglrlError) -> None:
        body = ErrorBody(type(error).__name__, error.message, getattr(error, "traceback", ""))
        self.put(peer, Item(id_, ItemKind.FAILED, encode(body)), ())

    def flush(self, peer: Peer) -> None:
        self._unsent.pop(peer, None)
        if not peer.items and not peer.ends:
            return
        items, peer.items = peer.items, []
        ends, peer.ends = peer.ends, []
        frames, peer.frames = peer.frames, []
        news: News | None = None
        if now() - peer.told > NEWS_SECONDS:
            news = self._news()
            peer.told = now()
        self._send_answers(peer, items, ends, frames, news)

    def forget(self, peer: Peer) -> None:
        """Nobody waits for its calls any more."""
        self._unsent.pop(peer, None)
        for call in peer.calls.values():
            self._driver.cancel(call)
        for task in peer.tasks.values():
            task.cancel()
        peer.calls.clear()
        peer.tasks.clear()
        peer.conversations.clear()

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
        self.put(peer, Item(id_, ItemKind.CANCELLED), ())

    def _flush_all(self) -> None:
        self._flush_scheduled = False
        for peer in list(self._unsent):
            self.flush(peer)

    def _send_answers(
        self,
        peer: Peer,
        items: list[Item],
        ends: list[End],
        frames: list[Buffer],
        news: News | None,
    ) -> None:
        body = encode(Answers(items, ends, news))
        largest = max(len(body), *map(len, frames)) if frames else len(body)
        if largest > peer.most_bytes and len(items) > 1:
            half = len(items) // 2
            count = sum(item.frames for item in items[:half])
            self._send_answers(peer, items[:half], ends, frames[:count], news)
            self._send_answers(peer, items[half:], [], frames[count:], None)
        elif largest > peer.most_bytes and items and items[0].kind != ItemKind.FAILED:
            what = (
                f"the answer has {largest:,} bytes, of at most {peer.most_bytes:,} that fit one "
                "message of this client (max_message_bytes)"
            )
            body = encode(ErrorBody(MessageTooLarge.__name__, what, ""))
            if items[0].kind == ItemKind.CHUNK:
                # For the client the call ends with this.
                self.cancel(peer, items[0].id)
            item = Item(items[0].id, ItemKind.FAILED, body)
            self._send_answers(peer, [item], ends, [], news)
        elif not self._driver.send_to_peer(peer.identity, body, *frames):
            self._on_lost(peer)


class Admission:
    """Makes calls of requests that clients in other processes have sent, which are not trusted.

    ``controls``: endpoints of the engines beside those that take tokens. ``weights``: what has
    their ``version`` of now. ``of_pool``: endpoints of the pool as a whole, for which ``ask`` is
    called with the client and its request.
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
        """max_new_tokens of those that were checked, as they came."""

    def begin(self, peer: Peer, requests: Sequence[Request]) -> bool:
        """False if one of them uses the id of another that has not ended."""
        taken = True
        for request in requests:
            id_ = request.id
            if id_ in peer.calls or id_ in peer.tasks:
                taken = False
                continue
            try:
                spec = self._of_pool.get(request.endpoint)
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
        """Raises ``InvalidRequest`` for what the client should not have let through, and
        ``DeadlineExceeded``."""
        deadline: float | None = None
        if request.timeout is not None:
            if not request.timeout > 0:
                raise DeadlineExceeded("the deadline had passed before the call was here")
            deadline = now() + request.timeout if math.isfinite(request.timeout) else None
        endpoint = request.endpoint
        control = self._controls.get(endpoint)
        if control is not None:
            arguments(control, request)
            return Call(
                endpoint,
                msgspec.Raw(bytes(request.args)),
                Forward(self._relay, peer, request.id, False, b""),
                deadline=deadline,
                pinned=request.worker,
                idempotent=control.idempotent,
                urgent=request.worker is not None,
            )
        begun = b""
        args: msgspec.Struct
        try:
            if endpoint == "generate":
                args, ids, begun = self._generate(request)
            elif endpoint == "score":
                args, ids = self._score(request)
            elif endpoint == "next_token_logprobs":
                args, ids = self._next_token(request)
            else:
                raise UnknownEndpoint(f"the engine has no endpoint {endpoint!r}")
        except MALFORMED as error:
            raise InvalidRequest(f"{endpoint}: {error}") from None
        if not ids or len(ids) % 4:
            raise InvalidRequest("token ids are int32, at least one")
        if not in_range(ids, self._vocab_size):
            raise InvalidRequest("token ids are outside the vocabulary")
        if len(ids) // 4 > (self._most_total if endpoint == "score" else self._most_prompt):
            raise InvalidRequest(f"the prompt has {len(ids) // 4} tokens, which is too many")
        if len(request.args) > self._max_body:
            raise InvalidRequest("the request does not fit one message to a worker")
        session = request.session
        if session is not None and len(session) > _LONGEST_NAME:
            raise InvalidRequest(f"a session's name has at most {_LONGEST_NAME} characters")
        generate = endpoint == "generate"
        forward = Forward(self._relay, peer, request.id, generate, begun)
        version: int = self._weights.version
        if request.conversation < 0 or session is not None:
            route = Route(ids, version, session)
        else:
            forward.turns = turns = _turns(peer, request.conversation, ids)
            turns.begin(ids, version)
            route = turns.route
        return Call(
            endpoint,
            args,
            forward,
            deadline=deadline,
            priority=request.priority,
            pinned=request.worker,
            route=route,
            idempotent=True,
            resumable=generate,
        )

    def _generate(self, request: Request) -> tuple[GenerateArgs, bytes, bytes]:
        wanted = _decode_generate(request.args)
        ids, begun = wanted.input_ids, wanted.resume
        if begun and not in_range(begun, self._vocab_size):
            raise InvalidRequest("token ids are outside the vocabulary, or no int32")
        # Not a view of all that came with it, which would be kept as long as the call.
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
        return args, ids, begun

    def _score(self, request: Request) -> tuple[ScoreArgs, bytes]:
        wanted = _decode_score(request.args)
        ids = wanted.input_ids
        if not 0 <= wanted.start < len(ids) // 4:
            raise InvalidRequest(f"start={wanted.start} is beyond the tokens given")
        _check_top(wanted.top_logprobs, self._most_top)
        return wanted, ids

    def _next_token(self, request: Request) -> tuple[NextTokenArgs, bytes]:
        wanted = _decode_next_token(request.args)
        _check_top(wanted.top_k, self._vocab_size)
        return wanted, wanted.input_ids

    def _check_sampling(self, raw: bytes) -> int:
        """What an engine would not survive; the rest it checks itself. Its max_new_tokens."""
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


def _turns(peer: Peer, number: int, ids: bytes) -> Turns:
    """Those that this may be one more of."""
    conversations = peer.conversations
    found = conversations.pop(number, None)
    if found is None or not found.go_on(ids):
        found = Turns()
        if len(conversations) >= _KNOWN_CONVERSATIONS:
            # The one that has been silent for longest.
            del conversations[next(iter(conversations))]
    conversations[number] = found
    return found


def _check_top(count: int, most: int) -> None:
    if not 0 <= count <= most:
        raise InvalidRequest(f"{count} likeliest tokens are too many, or too few")


def arguments(spec: EndpointSpec, request: Request) -> dict[str, Any]:
    """Raises ``InvalidRequest`` unless they are those of the endpoint."""
    try:
        return spec.arguments.decode(request.args, ())
    except msgspec.ValidationError as error:
        raise InvalidRequest(f"{spec.name}(): {error}") from None
