"""The connection of an engine worker to the driver, through a DEALER socket.

The scheduler loop reads and writes the socket itself. There is no other thread and no queue.
``receive`` passes new messages to the engine. ``put`` collects answers. ``flush`` sends all answers
of one scheduler step as one message. While the engine is idle, the loop blocks in ``wait``, so an
idle worker uses no CPU.
"""

from __future__ import annotations

import logging
import os
import time
import traceback
from collections.abc import Sequence
from typing import Any, Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from sglrl.actors.actor import EndpointSpec
from sglrl.control.engine_endpoints import ENGINE_ENDPOINTS
from sglrl.errors import InvalidRequest, MessageTooLarge, ProtocolError, SglrlError
from sglrl.transport.dropped import Dropped
from sglrl.transport.shared_rows import RowsWriter, writer_for
from sglrl.transport.zmq import ZmqPolledDealer
from sglrl.wire.adapters import LoraCommit, LoraKeep, LoraPart, LoraPrepare
from sglrl.wire.calls import (
    PROTOCOL_VERSION,
    CallMessage,
    Cancel,
    ErrorBody,
    Item,
    ItemKind,
    Load,
    Ready,
    Results,
    ShareRows,
    Shutdown,
    Starting,
    Submit,
)
from sglrl.wire.codec import Buffer, decode_to_worker, encode, readable, split_frames
from sglrl.wire.engine import (
    EngineInfo,
    GenerateArgs,
    NextTokenArgs,
    ScoreArgs,
    TokenChunk,
)
from sglrl.wire.processes import WorkerSpec

from .engine.protocol import LATER, Engine
from .liveness import RECONNECT_SECONDS, BreakWatch

logger = logging.getLogger("sglrl.worker")

ROWS = 16
"""Maximum rows of logprobs that one message carries.

A row has about half a megabyte, and a message arrives as a whole. With small messages the driver
handles the first rows while the other rows are in transit.
"""

_REPORT_SECONDS = 0.1

ENDPOINTS: Final = sorted(
    {
        *("generate", "score", "next_token_logprobs"),
        *("lora_commit", "lora_keep", "lora_part", "lora_prepare"),
        *ENGINE_ENDPOINTS,
    }
)


class Mailbox:
    """One engine worker's connection to the driver. Only the scheduler's thread may use it.

    Attributes:
        stopped: whether the driver has sent ``Shutdown``.
        progress: the number of loop turns, without turns that only ended a wait and found no
            message. The engine may add its own work to this count.
        rows: the memory shared with the driver for whole rows of logprobs. None until the driver
            has opened it.
    """

    def __init__(self, spec: WorkerSpec) -> None:
        self.stopped = False
        self.progress = 0
        self._waited = False
        self._reported = 0.0
        """Time of the last report of the engine's load to the driver."""
        self._broken = False
        self._returns = spec.returns
        self._watch = BreakWatch(self._returns, self._on_break)
        self._dealer = ZmqPolledDealer(
            spec.address,
            spec.identity,
            max_message_bytes=spec.max_message_bytes,
            keys=spec.keys,
            on_break=self._watch,
            heartbeat_timeout=spec.heartbeat_timeout,
            reconnect_seconds=RECONNECT_SECONDS,
        )
        self._ready: tuple[int, EngineInfo] | None = None
        """The arguments of ``ready``, or None before the worker is ready."""
        self._returning = False
        """Whether the connection was replaced, and ``Ready`` is sent as soon as no call is left."""
        self._max_bytes = spec.max_message_bytes
        self._drop = Dropped(logger)
        self._held: set[int] = set()
        """Ids of calls that have no final answer yet."""
        self._unsendable: list[int] = []
        """Ids of running calls to abort, because a part of their answer was too large."""
        self._items: list[Item] = []
        self._frames: list[Buffer] = []
        """Raw frames of the answers in ``_items``, in the same order."""
        self._slots: list[int] = []
        """Slots of ``rows`` for answers in ``_items``. Either this list or ``_frames`` is empty."""
        self._offered: RowsWriter | None = None
        self.rows: RowsWriter | None = None
        self._generate = msgspec.msgpack.Decoder(GenerateArgs)
        self._score = msgspec.msgpack.Decoder(ScoreArgs)
        self._next_token = msgspec.msgpack.Decoder(NextTokenArgs)
        self._lora_part = msgspec.msgpack.Decoder(LoraPart)
        self._lora: dict[str, msgspec.msgpack.Decoder[Any]] = {
            "lora_commit": msgspec.msgpack.Decoder(LoraCommit),
            "lora_keep": msgspec.msgpack.Decoder(LoraKeep),
            "lora_prepare": msgspec.msgpack.Decoder(LoraPrepare),
        }
        self._encode = msgspec.msgpack.Encoder().encode

    def starting(self, stage: str) -> None:
        """Report to the user which stage the worker's start has reached."""
        self._dealer.send([encode(Starting(stage))])

    def ready(self, window: int, info: EngineInfo) -> None:
        """Report that the worker accepts calls, and offer memory for rows to the driver."""
        self._ready = window, info
        self._offered = writer_for(4 * info.vocab_size)
        offer = None if self._offered is None else self._offered.offer
        pid, device = os.getpid(), info.device
        ready = Ready(PROTOCOL_VERSION, pid, window, ENDPOINTS, device, info, offer)
        self._dealer.send([encode(ready)])

    def receive(self, engine: Engine) -> bool:
        """Pass all messages that have arrived to the engine, without waiting.

        Returns:
            True if there was at least one message.
        """
        any_ = False
        if self._broken:
            self._reconnect(engine)
        while self._unsendable:
            engine.abort(self._unsendable.pop())
        while (frames := self._dealer.receive()) is not None:
            any_ = True
            try:
                message = decode_to_worker(frames[0])
                owned = split_frames(message.calls, frames) if isinstance(message, Submit) else []
            except ProtocolError as error:
                self._drop("a message of the driver: %s", error)
                continue
            match message:
                case Submit(calls=calls) if not self._returning:
                    for call, raw in zip(calls, owned, strict=True):
                        self._begin(engine, call, raw)
                case Cancel(ids=ids):
                    for id_ in ids:
                        engine.abort(id_)
                case ShareRows():
                    self.rows = self._offered
                case Shutdown():
                    self.stopped = True
        # The end of a wait alone is not progress. If the driver counts calls as pending while the
        # worker only waits, these calls are lost, and the hang detector must notice the loss.
        if any_ or not self._waited:
            self.progress += 1
        self._waited = False
        return any_

    def wait(self, seconds: float) -> None:
        """Block until a message arrives, for at most ``seconds``."""
        if not self.stopped:
            self._waited = True
            self._dealer.wait(seconds)

    def wake(self) -> None:
        """End the current ``wait``. This is the only method that other threads may call."""
        self._dealer.wake()

    def put(
        self,
        id_: int,
        kind: int,
        chunk: TokenChunk | None = None,
        routed: NDArray[Any] | None = None,
    ) -> None:
        """Collect an answer, or a part of one. The next ``flush`` sends it.

        Args:
            routed: rows of routed experts, [n, layers, k], that are sent with the chunk. The rows
                must not change after the call.
        """
        if kind != ItemKind.CHUNK:
            self._held.discard(id_)
        if chunk is None:
            self._items.append(Item(id_, kind))
        elif routed is None or not len(routed):
            self._items.append(Item(id_, kind, self._encode(chunk)))
        else:
            self._put_routed(id_, kind, chunk, routed)

    def _put_routed(self, id_: int, kind: int, chunk: TokenChunk, routed: NDArray[Any]) -> None:
        if self._slots:
            self.flush()
        chunk = msgspec.structs.replace(chunk, routed=len(routed))
        # Each frame holds as many whole rows as fit into it.
        count = max(1, self._max_bytes // routed[0].nbytes)
        parts = [routed[at : at + count] for at in range(0, len(routed), count)]
        self._items.append(Item(id_, kind, self._encode(chunk), len(parts)))
        self._frames += [
            np.ascontiguousarray(part).view(np.uint8).reshape(-1).data for part in parts
        ]

    def put_row(self, id_: int, chunk: TokenChunk, row: Buffer) -> None:
        """Collect an answer to ``next_token_logprobs`` for the whole vocabulary.

        The next ``flush`` sends it. This method may call ``flush`` itself.

        Args:
            row: float32 logprobs. ``row`` may be sent without a copy, so it must not change.
        """
        rows = self.rows
        if rows is not None and len(row) == rows.offer.row_bytes and (slots := rows.take(1)):
            rows[slots[0]][:] = np.frombuffer(row, "<f4")
            self.put_slot(id_, chunk, slots[0])
            return
        if len(row) > self._max_bytes:
            self.put_error(
                id_,
                MessageTooLarge.__name__,
                f"the logprobs of all tokens have {len(row):,} bytes, of at most "
                f"{self._max_bytes:,} that fit one message (max_message_bytes); ask for the "
                "likeliest with top_k=",
            )
            return
        if self._slots:
            self.flush()
        self._held.discard(id_)
        self._items.append(Item(id_, ItemKind.DONE, self._encode(chunk), 1))
        self._frames.append(row)
        if len(self._frames) >= ROWS:
            self.flush()

    def put_slot(self, id_: int, chunk: TokenChunk, slot: int) -> None:
        """Collect an answer like ``put_row``, for a row that is already in a slot of ``rows``."""
        if self._frames:
            self.flush()
        self._held.discard(id_)
        self._items.append(Item(id_, ItemKind.DONE, self._encode(chunk), 1))
        self._slots.append(slot)

    def put_value(self, id_: int, value: object) -> None:
        """Collect the answer of a control endpoint. The next ``flush`` sends it."""
        self._held.discard(id_)
        self._items.append(Item(id_, ItemKind.DONE, encode(value)))

    def put_error(self, id_: int, kind: str, message: str, trace: str = "") -> None:
        """Collect an error as the answer. The next ``flush`` sends it."""
        self._held.discard(id_)
        body = encode(ErrorBody(kind, readable(message), readable(trace)))
        self._items.append(Item(id_, ItemKind.ERROR, body))

    @property
    def report_is_due(self) -> bool:
        """True if the last report of the engine's load is at least ``_REPORT_SECONDS`` old."""
        return time.monotonic() - self._reported >= _REPORT_SECONDS

    def flush(self, load: Load | None = None) -> None:
        """Send all collected answers as one message.

        The message also reports ``load``. Without answers, the load is sent alone if
        ``report_is_due``. The driver thus receives the load even during a long call.
        """
        if self._items or (load is not None and self.report_is_due):
            if load is not None:
                self._reported = time.monotonic()
            items, self._items = self._items, []
            frames, self._frames = self._frames, []
            slots, self._slots = self._slots, []
            if not self._returning:
                self._send(items, frames, slots, load)
        if self._returning and not self._held and self._ready is not None:
            self._returning = False
            self.ready(*self._ready)

    def _send(
        self,
        items: list[Item],
        frames: list[Buffer],
        slots: list[int],
        load: Load | None,
    ) -> None:
        head = self._encode(Results(items, load, slots))
        if len(head) <= self._max_bytes or not items:
            self._dealer.send([head, *frames])
        elif len(items) > 1:
            half = len(items) // 2
            raw = sum(item.frames for item in items[:half])
            # A message has raw frames or slots, never both: one of the two lists is empty.
            for part, own, there in (
                (items[:half], frames[:raw], slots[:raw]),
                (items[half:], frames[raw:], slots[raw:]),
            ):
                self._send(part, own, there, load)
        else:
            (item,) = items
            if item.kind == ItemKind.CHUNK:
                # The error below is final for the driver, but the engine still runs the call.
                self._held.discard(item.id)
                self._unsendable.append(item.id)
            what = (
                f"the answer has {len(item.body):,} bytes, of at most {self._max_bytes:,} that "
                "fit one message (max_message_bytes)"
            )
            body = encode(ErrorBody(MessageTooLarge.__name__, what, ""))
            self._send([Item(item.id, ItemKind.ERROR, body)], [], [], load)

    def close(self) -> None:
        self._watch.handled()
        self._dealer.close(linger=0.5)

    def _on_break(self) -> None:
        """Request that the scheduler's thread replace the socket. Called on another thread."""
        self._broken = True
        self._dealer.wake()

    def _reconnect(self, engine: Engine) -> None:
        """Replace the connection and abort all calls, because the old connection lost messages.

        The driver moves these calls to other workers, at the latest when ``Ready`` arrives.
        """
        self._broken = False
        self._watch.handled()
        self._watch = BreakWatch(self._returns, self._on_break)
        self._dealer.reconnect(self._watch)
        self._items, self._frames, self._slots, self._unsendable = [], [], [], []
        self.rows = self._offered = None
        if self._ready is None:
            return
        self._returning = True
        # End a pause, because the driver pauses this engine again if all other engines are paused.
        # The id -1 means that no call waits for the answer.
        engine.controls.resume(-1)
        for id_ in list(self._held):
            engine.abort(id_)

    def _control(self, engine: Engine, call: CallMessage, spec: EndpointSpec) -> None:
        method = getattr(engine.controls, spec.name, None)
        if method is None:
            raise InvalidRequest(f"this engine has no {spec.name}")
        answer = method(call.id, **spec.arguments.decode(call.args, ()))
        if answer is not LATER:
            self.put_value(call.id, answer)

    def _begin(self, engine: Engine, call: CallMessage, raw: Sequence[Buffer]) -> None:
        if call.id in self._held:
            self._drop("call %d, which is here already", call.id)
            return
        self._held.add(call.id)
        try:
            match call.endpoint:
                case "generate":
                    engine.generate(call.id, self._generate.decode(call.args))
                case "score":
                    engine.score(call.id, self._score.decode(call.args))
                case "next_token_logprobs":
                    engine.next_token_logprobs(call.id, self._next_token.decode(call.args))
                case "lora_part":
                    part = self._lora_part.decode(call.args)
                    (data,) = raw
                    engine.adapters(call.id, msgspec.structs.replace(part, data=data))
                case name if name in self._lora:
                    engine.adapters(call.id, self._lora[name].decode(call.args))
                case name if name in ENGINE_ENDPOINTS:
                    self._control(engine, call, ENGINE_ENDPOINTS[name])
                case other:
                    self.put_error(
                        call.id, "UnknownEndpoint", f"the engine has no endpoint {other!r}"
                    )
        except SglrlError as error:
            self.put_error(call.id, type(error).__name__, error.message)
        except Exception as error:
            # The engine keeps running: only this request fails.
            self.put_error(call.id, type(error).__name__, str(error), traceback.format_exc())
