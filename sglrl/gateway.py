"""Clients in other processes, as the driver sees them: see ``remote.py`` for their end.

Their calls become calls of the driver's own fabric, so routing, back-pressure, deadlines and the
continuation after a lost worker are the same for all. What a client sends is not trusted: it is
checked as its own ``Client`` has checked it, and what is no message is dropped and counted.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import math
import secrets
from collections.abc import Coroutine, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import msgspec
import numpy as np

from .actor import Actor, EndpointSpec, endpoint, endpoints_of
from .codec import MALFORMED, Buffer, decode_from_client, encode
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
    PROTOCOL_VERSION,
    Admitted,
    Answers,
    Approach,
    Cancel,
    Dismissed,
    End,
    ErrorBody,
    GenerateArgs,
    Item,
    ItemKind,
    Leave,
    ModelDescription,
    News,
    NextTokenArgs,
    Piece,
    Request,
    Requests,
    Sampling,
    ScoreArgs,
    ToClient,
    TokenChunk,
    WorkerNews,
)
from .replies import chunk_of, resume
from .sampling import GRAMMARS, MOST_BIAS, check_grammar, most_top_logprobs
from .weights.report import UpdateReport

if TYPE_CHECKING:
    from .client import Client
    from .pool import Pool

logger = logging.getLogger("sglrl.gateway")

_MOST_PEERS: Final = 1024
"""Each is remembered until it takes its leave, or cannot be reached."""
_LONGEST_NAME: Final = 1024
_NEWS_SECONDS: Final = 0.1
"""At most so often a busy client is told how full the engines are."""

_generate: Final = msgspec.msgpack.Decoder(GenerateArgs)
_score: Final = msgspec.msgpack.Decoder(ScoreArgs)
_next_token: Final = msgspec.msgpack.Decoder(NextTokenArgs)
_sampling: Final = msgspec.msgpack.Decoder(Sampling)


class PoolEndpoints(Actor):
    """What a client in another process may ask of the pool as a whole."""

    def __init__(self, client: Client, pool: Pool) -> None:
        self._client = client
        self._pool = pool

    @endpoint
    async def pause(self, mode: str, seconds: float | None) -> None:
        logger.warning("a client in another process pauses the engines (%s)", mode)
        await self._client.pause(mode, timeout=seconds)  # type: ignore[arg-type]

    @endpoint
    async def resume(self, seconds: float | None) -> None:
        await self._client.resume(timeout=seconds)

    @endpoint
    async def abort(self, worker: int | None, seconds: float | None) -> int:
        return await self._client.abort(worker=worker, timeout=seconds)

    @endpoint
    async def full(self, seconds: float | None) -> None:
        await self._client.wait_until_full(seconds)

    @endpoint
    async def describe(self, seconds: float) -> ModelDescription:
        return await self._pool.weights.describe(seconds)

    @endpoint
    async def checksums(
        self, names: list[str], seconds: float
    ) -> list[tuple[tuple[int, int], list[Piece]]]:
        return [*(await self._pool.weights.checksums(names, seconds)).items()]

    @endpoint
    async def update_weights_from_disk(
        self,
        path: str,
        version: int | None,
        inflight: str,
        partial: bool,
        seconds: float,
        drain_timeout: float,
        wait: bool,
    ) -> UpdateReport:
        return await self._client.update_weights_from_disk(
            path,
            version=version,
            inflight=inflight,
            partial=partial,
            timeout=seconds,
            drain_timeout=drain_timeout,
            wait=wait,
        )


class _Peer:
    """One client, and what it is to be told."""

    def __init__(self, identity: bytes, most_bytes: int) -> None:
        self.identity = identity
        self.most_bytes = most_bytes
        """Of a frame."""
        self.calls: dict[int, Call] = {}
        self.tasks: dict[int, asyncio.Task[None]] = {}
        self.items: list[Item] = []
        self.ends: list[End] = []
        self.frames: list[Buffer] = []
        self.told = 0.0


class _Forward:
    """The ``Reply`` of a call that a client in another process made."""

    __slots__ = ("_begun", "_gateway", "_id", "_peer", "_resumable")

    def __init__(
        self, gateway: Gateway, peer: _Peer, id_: int, resumable: bool, begun: bytes
    ) -> None:
        self._gateway = gateway
        self._peer = peer
        self._id = id_
        self._resumable = resumable
        self._begun = [TokenChunk(begun)] if begun else []

    def chunk(self, item: Item, frames: Sequence[Buffer]) -> None:
        if self._resumable:
            try:
                self._begun.append(chunk_of(item))
            except ProtocolError:
                # The client will see that for itself.
                self._resumable = False
        self._gateway.put(self._peer, Item(self._id, item.kind, item.body, item.frames), frames)

    def restart(self, call: Call) -> None:
        if self._begun:
            # What was received so far leaves first.
            self._gateway.flush(self._peer)
            self._peer.ends.append(_end_of(self._id, call, again=True))
            resume(call, self._begun)

    def end(self, call: Call, outcome: Item | SglrlError, frames: Sequence[Buffer]) -> None:
        peer = self._peer
        peer.calls.pop(self._id, None)
        peer.ends.append(_end_of(self._id, call))
        if isinstance(outcome, Item):
            item = Item(self._id, outcome.kind, outcome.body, outcome.frames)
            self._gateway.put(peer, item, frames)
        else:
            self._gateway.fail(peer, self._id, outcome)


def _end_of(id_: int, call: Call, *, again: bool = False) -> End:
    worker, begun = call.worker, call.submitted_at
    return End(
        id_,
        -1 if worker is None else worker.index,
        call.attempts,
        max(0.0, call.sent_at - begun),
        max(0.0, call.first_at - begun),
        again,
    )


class Gateway:
    """Made by a ``Client`` that has a pool of its own; on its event loop. ``controls``: endpoints
    of the engines beside those that take tokens. ``address``: what ``sglrl.connect`` takes. It
    holds a secret."""

    def __init__(
        self,
        client: Client,
        driver: Driver,
        pool: Pool,
        controls: Mapping[str, EndpointSpec],
    ) -> None:
        self._client = client
        self._driver = driver
        self._pool = pool
        self._max_body = driver.max_message_bytes - ENVELOPE_BYTES
        self._token = secrets.token_hex(16)
        self._peers: dict[bytes, _Peer] = {}
        self._unsent: dict[_Peer, None] = {}
        self._endpoints = PoolEndpoints(client, pool)
        self._specs: dict[str, EndpointSpec] = endpoints_of(PoolEndpoints)
        self._controls = controls
        self._flush_scheduled = False
        self._watch: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self.address = f"{pool.outer_address}#{self._token}"
        driver.on_client = self._on_message
        pool.weights.on_version.add(self._tell_all)
        driver.on_loads.add(self._on_loads)

    def _on_loads(self) -> None:
        """An engine has said how full it is. Clients with long calls hear nothing else for long."""
        waiting = [
            peer
            for peer in self._peers.values()
            if peer.calls and now() - peer.told > _NEWS_SECONDS
        ]
        if waiting:
            answers = Answers([], [], self._news())
            for peer in waiting:
                peer.told = now()
                self._tell(peer, answers)

    async def close(self) -> None:
        """After the pool: the calls have ended."""
        self._driver.on_loads.discard(self._on_loads)
        if self._watch is not None:
            self._watch.cancel()
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
        self._peers.clear()

    # --- what clients are told --------------------------------------------------------------------

    def put(self, peer: _Peer, item: Item, frames: Sequence[Buffer] = ()) -> None:
        """Leaves when the loop tick ends, with all else for this client as one message."""
        peer.items.append(item)
        peer.frames.extend(frames)
        self._unsent[peer] = None
        if not self._flush_scheduled:
            self._flush_scheduled = True
            asyncio.get_running_loop().call_soon(self._flush_all)

    def fail(self, peer: _Peer, id_: int, error: SglrlError) -> None:
        body = ErrorBody(type(error).__name__, error.message, getattr(error, "traceback", ""))
        self.put(peer, Item(id_, ItemKind.FAILED, encode(body)))

    def flush(self, peer: _Peer) -> None:
        self._unsent.pop(peer, None)
        if not peer.items and not peer.ends:
            return
        items, peer.items = peer.items, []
        ends, peer.ends = peer.ends, []
        frames, peer.frames = peer.frames, []
        news = None
        if now() - peer.told > _NEWS_SECONDS:
            news = self._news()
            peer.told = now()
        self._send_answers(peer, items, ends, frames, news)

    def _flush_all(self) -> None:
        self._flush_scheduled = False
        for peer in list(self._unsent):
            self.flush(peer)

    def _send_answers(
        self,
        peer: _Peer,
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
                self._cancel(peer, items[0].id)
            item = Item(items[0].id, ItemKind.FAILED, body)
            self._send_answers(peer, [item], ends, [], news)
        elif not self._driver.send_to_peer(peer.identity, body, *frames):
            self._lose(peer)

    def _tell(self, peer: _Peer, message: ToClient) -> None:
        if not self._driver.send_to_peer(peer.identity, encode(message)):
            self._lose(peer)

    def _tell_all(self) -> None:
        if self._peers:
            answers = Answers([], [], self._news())
            for peer in list(self._peers.values()):
                # What came before the change is told before it.
                self.flush(peer)
                self._tell(peer, answers)

    def _news(self) -> News:
        members = self._driver.fabric.members
        workers = []
        for w in self._client.workers:
            m = members[w.id]
            workers.append(
                WorkerNews(
                    w.id,
                    w.pid,
                    w.state,
                    w.weight_version,
                    w.device,
                    w.load,
                    w.window,
                    m.kv_usage,
                    m.waiting,
                    m.preempted,
                )
            )
        return News(self._client.weight_version, self._driver.fabric.waiting, workers)

    async def _watch_workers(self) -> None:
        while True:
            await self._driver.change()
            self._tell_all()

    def _lose(self, peer: _Peer) -> None:
        """It is gone, or cannot be told anything any more."""
        if calls := len(peer.calls) + len(peer.tasks):
            logger.warning(
                "a client in another process is gone, or has not read for so long that nothing "
                "more can be sent to it; its calls (%d) are given up",
                calls,
            )
        self._forget(peer)

    def _forget(self, peer: _Peer) -> None:
        """Nobody waits for its calls any more."""
        self._peers.pop(peer.identity, None)
        self._unsent.pop(peer, None)
        for call in peer.calls.values():
            self._driver.cancel(call)
        for task in peer.tasks.values():
            task.cancel()
        peer.calls.clear()
        peer.tasks.clear()

    # --- what clients say -------------------------------------------------------------------------

    def _on_message(self, identity: bytes, frames: list[Buffer]) -> bool:
        """False: nothing that a client would say."""
        peer = self._peers.get(identity)
        if peer is None and not self._is_client(identity):
            return False
        try:
            message = decode_from_client(frames[0])
        except ProtocolError as error:
            logger.debug("a message of a client in another process: %s", error)
            return False
        if len(frames) > 1:
            return False
        match message:
            case Approach() if peer is None:
                return self._admit(identity, message)
            case _ if peer is None:
                self._dismiss(identity, "it is not known to the pool any more")
                return False
            case Requests(requests=requests):
                taken = [self._begin(peer, request) for request in requests]
                return all(taken)
            case Cancel(ids=ids):
                for id_ in ids:
                    self._cancel(peer, id_)
            case Leave():
                self._forget(peer)
            case _:
                return False
        return True

    def _is_client(self, identity: bytes) -> bool:
        kind, _, rest = identity.partition(b"/")
        token, _, _ = rest.partition(b"/")
        return kind == b"client" and hmac.compare_digest(token, self._token.encode())

    def _dismiss(self, identity: bytes, reason: str) -> None:
        self._driver.send_to_peer(identity, encode(Dismissed(reason)))

    def _admit(self, identity: bytes, client: Approach) -> bool:
        if client.protocol != PROTOCOL_VERSION:
            self._dismiss(
                identity,
                f"it speaks version {client.protocol} of the protocol and the pool version "
                f"{PROTOCOL_VERSION}; install the same sglrl on both sides",
            )
            return False
        if len(self._peers) >= _MOST_PEERS:
            # Those that cannot be reached are forgotten.
            self._tell_all()
        if len(self._peers) >= _MOST_PEERS:
            self._dismiss(identity, f"the pool has {_MOST_PEERS} clients in other processes")
            return False
        most = min(client.max_message_bytes, self._driver.max_message_bytes)
        peer = self._peers[identity] = _Peer(identity, most)
        self._tell(
            peer,
            Admitted(
                PROTOCOL_VERSION,
                self._client.model,
                self._driver.max_message_bytes,
                self._pool.weights.address,
                self._client.info,
                self._news(),
            ),
        )
        if self._watch is None:
            self._watch = self._run(self._watch_workers())
        return True

    def _begin(self, peer: _Peer, request: Request) -> bool:
        id_ = request.id
        if id_ in peer.calls or id_ in peer.tasks:
            return False
        try:
            spec = self._specs.get(request.endpoint)
            if spec is not None:
                kwargs = _arguments(spec, request)
                peer.tasks[id_] = self._run(self._ask_pool(peer, id_, spec, kwargs))
            else:
                call = self._call(peer, request)
                self._driver.submit(call)
                peer.calls[id_] = call
        except SglrlError as error:
            self.fail(peer, id_, error)
        return True

    def _cancel(self, peer: _Peer, id_: int) -> None:
        call = peer.calls.pop(id_, None)
        task = peer.tasks.pop(id_, None)
        if call is not None:
            self._driver.cancel(call)
        elif task is not None:
            task.cancel()
        else:
            return
        self.put(peer, Item(id_, ItemKind.CANCELLED))

    async def _ask_pool(
        self, peer: _Peer, id_: int, spec: EndpointSpec, kwargs: dict[str, Any]
    ) -> None:
        try:
            value = await getattr(self._endpoints, spec.name)(**kwargs)
            body, frames = spec.result.encode(value)
        except SglrlError as error:
            if peer.tasks.pop(id_, None) is not None:
                self.fail(peer, id_, error)
        else:
            if peer.tasks.pop(id_, None) is not None:
                self.put(peer, Item(id_, ItemKind.DONE, body, len(frames)), frames)

    def _run(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _call(self, peer: _Peer, request: Request) -> Call:
        """Raises ``InvalidRequest`` for what the client should not have let through."""
        deadline = None
        if request.timeout is not None:
            if not request.timeout > 0:
                raise DeadlineExceeded("the deadline had passed before the call was here")
            deadline = now() + request.timeout if math.isfinite(request.timeout) else None
        control = self._controls.get(request.endpoint)
        if control is not None:
            _arguments(control, request)
            return Call(
                request.endpoint,
                msgspec.Raw(bytes(request.args)),
                _Forward(self, peer, request.id, False, b""),
                deadline=deadline,
                pinned=request.worker,
                idempotent=control.idempotent,
                urgent=request.worker is not None,
            )
        args: msgspec.Struct
        begun = b""
        vocab_size = self._client.info.vocab_size
        try:
            match request.endpoint:
                case "generate":
                    wanted = _generate.decode(request.args)
                    # Not a view of all that came with it, which would be kept as long as the call.
                    args = msgspec.structs.replace(wanted, sampling=wanted.sampling.copy())
                    ids, begun = wanted.input_ids, wanted.resume
                    self._check_ids(begun, empty=True)
                    self._check_sampling(bytes(wanted.sampling), len(ids) // 4)
                    self._check_top(wanted.top_logprobs, most_top_logprobs(vocab_size))
                case "score":
                    args = scored = _score.decode(request.args)
                    ids = scored.input_ids
                    if not 0 <= scored.start < len(ids) // 4:
                        raise InvalidRequest(f"start={scored.start} is beyond the tokens given")
                    self._check_top(scored.top_logprobs, most_top_logprobs(vocab_size))
                case "next_token_logprobs":
                    args = next_token = _next_token.decode(request.args)
                    ids = next_token.input_ids
                    self._check_top(next_token.top_k, vocab_size)
                case other:
                    raise UnknownEndpoint(f"the engine has no endpoint {other!r}")
        except MALFORMED as error:
            raise InvalidRequest(f"{request.endpoint}: {error}") from None
        self._check_ids(ids)
        info = self._client.info
        scores = request.endpoint == "score"
        if len(ids) // 4 > (info.max_total_tokens if scores else info.max_prompt_tokens):
            raise InvalidRequest(f"the prompt has {len(ids) // 4} tokens, which is too many")
        if len(request.args) > self._max_body:
            raise InvalidRequest("the request does not fit one message to a worker")
        if len(request.session or "") > _LONGEST_NAME:
            raise InvalidRequest(f"a session's name has at most {_LONGEST_NAME} characters")
        generate = request.endpoint == "generate"
        return Call(
            request.endpoint,
            args,
            _Forward(self, peer, request.id, generate, begun),
            deadline=deadline,
            priority=request.priority,
            pinned=request.worker,
            route=Route(ids, self._client.weight_version, request.session),
            idempotent=True,
            resumable=generate,
        )

    def _check_ids(self, ids: bytes, *, empty: bool = False) -> None:
        if len(ids) % 4 or (not ids and not empty):
            raise InvalidRequest("token ids are int32, at least one")
        if ids:
            tokens = np.frombuffer(ids, dtype="<i4")
            if tokens.min() < 0 or tokens.max() >= self._client.info.vocab_size:
                raise InvalidRequest("token ids are outside the vocabulary")

    def _check_sampling(self, raw: bytes, prompt_tokens: int) -> None:
        """What an engine would not survive; the rest it checks itself."""
        info = self._client.info
        sampling = _sampling.decode(raw)
        if not 1 <= sampling.max_new_tokens <= info.max_total_tokens - prompt_tokens:
            raise InvalidRequest(
                f"max_new_tokens={sampling.max_new_tokens} does not fit a prompt of "
                f"{prompt_tokens} tokens"
            )
        if not all(0 <= token < info.vocab_size for token in sampling.stop_token_ids):
            raise InvalidRequest("stop_token_ids are outside the vocabulary")
        for token, bias in sampling.logit_bias.items():
            if not 0 <= token < info.vocab_size or not abs(bias) <= MOST_BIAS:
                raise InvalidRequest("logit_bias is outside the vocabulary, or no number")
        for name in GRAMMARS:
            grammar = getattr(sampling, name)
            if grammar is not None:
                check_grammar(name, grammar)

    def _check_top(self, count: int, most: int) -> None:
        if not 0 <= count <= most:
            raise InvalidRequest(f"{count} likeliest tokens are too many, or too few")


def _arguments(spec: EndpointSpec, request: Request) -> dict[str, Any]:
    try:
        return spec.arguments.decode(request.args, ())
    except msgspec.ValidationError as error:
        raise InvalidRequest(f"{spec.name}(): {error}") from None
