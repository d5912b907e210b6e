"""The DEALER shell of an engine worker: drained inside the scheduler loop, no thread, no queue.

``receive`` hands what arrived to the engine; ``put`` collects answers; ``flush`` sends everything
that one scheduler step produced as one message. When the engine is idle it blocks in ``wait``, so
an idle worker costs no CPU.
"""

from __future__ import annotations

import logging
import os
import time
import traceback

import msgspec
import numpy as np

from sglrl.errors import MessageTooLarge, ProtocolError, SglrlError
from sglrl.transport.dropped import Dropped
from sglrl.transport.shared_rows import RowsWriter, writer_for
from sglrl.transport.zmq import ZmqPolledDealer
from sglrl.wire.calls import (
    PROTOCOL_VERSION,
    CallMessage,
    Cancel,
    ErrorBody,
    Item,
    ItemKind,
    Ready,
    Results,
    ShareRows,
    Shutdown,
    Starting,
    Submit,
)
from sglrl.wire.codec import Buffer, decode_to_worker, encode, readable
from sglrl.wire.engine import (
    EngineInfo,
    GenerateArgs,
    NextTokenArgs,
    PauseArgs,
    ScoreArgs,
    TokenChunk,
)
from sglrl.wire.processes import WorkerSpec

from .engine.protocol import Engine
from .exit_on_disconnect import leave

logger = logging.getLogger("sglrl.worker")

ROWS = 16
"""In one message. It arrives as a whole, and half a megabyte a row takes its time: the driver
handles the first ones while the others are under way."""

_REPORT_SECONDS = 0.1

ENDPOINTS = [
    "abort",
    "flush_cache",
    "generate",
    "next_token_logprobs",
    "pause",
    "resume",
    "score",
    "stats",
]


class Mailbox:
    """One engine worker's connection to the driver. Belongs to the scheduler's thread."""

    def __init__(self, spec: WorkerSpec) -> None:
        self.stopped = False
        self.progress = 0
        """Turns of the loop that it had a reason for; the engine may count what else it does."""
        self._waited = False
        self._reported = 0.0
        """When the driver was last told how full the engine is."""
        self._dealer = ZmqPolledDealer(
            spec.address,
            spec.identity,
            max_message_bytes=spec.max_message_bytes,
            keys=spec.keys,
            on_break=leave,
            heartbeat_timeout=spec.heartbeat_timeout,
        )
        self._most_bytes = spec.max_message_bytes
        self._drop = Dropped(logger)
        self._held: set[int] = set()
        """Calls that have not been answered."""
        self._unsendable: list[int] = []
        """Calls that go on, and have had a part that was too large."""
        self._items: list[Item] = []
        self._frames: list[Buffer] = []
        """Raw frames of the items, in their order."""
        self._slots: list[int] = []
        """Where these are instead, in memory that the driver sees."""
        self._offered: RowsWriter | None = None
        self.rows: RowsWriter | None = None
        """That memory, once the driver has opened it."""
        self._generate = msgspec.msgpack.Decoder(GenerateArgs)
        self._score = msgspec.msgpack.Decoder(ScoreArgs)
        self._pause = msgspec.msgpack.Decoder(PauseArgs)
        self._next_token = msgspec.msgpack.Decoder(NextTokenArgs)
        self._encode = msgspec.msgpack.Encoder().encode

    def starting(self, stage: str) -> None:
        """Tell the user what takes so long."""
        self._dealer.send([encode(Starting(stage))])

    def ready(self, window: int, info: EngineInfo) -> None:
        self._offered = writer_for(4 * info.vocab_size)
        offer = None if self._offered is None else self._offered.offer
        pid, device = os.getpid(), info.device
        ready = Ready(PROTOCOL_VERSION, pid, window, ENDPOINTS, device, info, offer)
        self._dealer.send([encode(ready)])

    def receive(self, engine: Engine) -> bool:
        """Hand what has arrived to the engine, without waiting; True if there was anything."""
        any_ = False
        while self._unsendable:
            engine.abort(self._unsendable.pop())
        while (frames := self._dealer.receive()) is not None:
            any_ = True
            try:
                message = decode_to_worker(frames[0])
            except ProtocolError as error:
                self._drop("a message of the driver: %s", error)
                continue
            match message:
                case Submit(calls=calls):
                    for call in calls:
                        self._begin(engine, call)
                case Cancel(ids=ids):
                    for id_ in ids:
                        engine.abort(id_)
                case ShareRows():
                    self.rows = self._offered
                case Shutdown():
                    self.stopped = True
        # That a wait has ended is no reason. A worker that waits while the driver counts calls
        # there has lost them, and is found as one that hangs.
        if any_ or not self._waited:
            self.progress += 1
        self._waited = False
        return any_

    def wait(self, seconds: float) -> None:
        """Block until something arrives, at most so long."""
        if not self.stopped:
            self._waited = True
            self._dealer.wait(seconds)

    def wake(self) -> None:
        """End the wait under way. The one method for other threads."""
        self._dealer.wake()

    def put(self, id_: int, kind: int, chunk: TokenChunk | None = None) -> None:
        """An answer, or a part of one; leaves with the next ``flush``."""
        if kind != ItemKind.CHUNK:
            self._held.discard(id_)
        if chunk is None:
            self._items.append(Item(id_, kind))
        else:
            self._items.append(Item(id_, kind, self._encode(chunk)))

    def put_row(self, id_: int, chunk: TokenChunk, row: Buffer) -> None:
        """The answer to ``next_token_logprobs`` for the whole vocabulary. ``row`` is sent as it is:
        it must not change any more. Leaves with the next ``flush``, or before."""
        rows = self.rows
        if rows is not None and len(row) == rows.offer.row_bytes and (slots := rows.take(1)):
            rows[slots[0]][:] = np.frombuffer(row, "<f4")
            self.put_slot(id_, chunk, slots[0])
            return
        if len(row) > self._most_bytes:
            self.put_error(
                id_,
                MessageTooLarge.__name__,
                f"the logprobs of all tokens have {len(row):,} bytes, of at most "
                f"{self._most_bytes:,} that fit one message (max_message_bytes); ask for the "
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
        """The same, of a row that lies in this slot of ``rows``. Leaves with the next ``flush``, or
        before."""
        if self._frames:
            self.flush()
        self._held.discard(id_)
        self._items.append(Item(id_, ItemKind.DONE, self._encode(chunk), 1))
        self._slots.append(slot)

    def put_value(self, id_: int, value: object) -> None:
        """The answer of a control endpoint; leaves with the next ``flush``."""
        self._held.discard(id_)
        self._items.append(Item(id_, ItemKind.DONE, encode(value)))

    def put_error(self, id_: int, kind: str, message: str, trace: str = "") -> None:
        self._held.discard(id_)
        body = encode(ErrorBody(kind, readable(message), readable(trace)))
        self._items.append(Item(id_, ItemKind.ERROR, body))

    @property
    def report_is_due(self) -> bool:
        return time.monotonic() - self._reported >= _REPORT_SECONDS

    def flush(self, kv_usage: float = -1.0, waiting: int = 0, preempted: int = 0) -> None:
        """Send what was put since the last flush, if anything, as one message. How full the engine
        is goes with it (see ``Results``), and now and then by itself: with long answers nothing
        else would say so."""
        report = kv_usage >= 0
        if self._items or (report and self.report_is_due):
            if report:
                self._reported = time.monotonic()
            items, self._items = self._items, []
            frames, self._frames = self._frames, []
            slots, self._slots = self._slots, []
            self._send(items, frames, slots, kv_usage, waiting, preempted)

    def _send(
        self,
        items: list[Item],
        frames: list[Buffer],
        slots: list[int],
        kv_usage: float,
        waiting: int,
        preempted: int,
    ) -> None:
        head = self._encode(Results(items, kv_usage, waiting, preempted, slots))
        if len(head) <= self._most_bytes or not items:
            self._dealer.send([head, *frames])
        elif len(items) > 1:
            half = len(items) // 2
            raw = sum(item.frames for item in items[:half])
            # Of one message all raw frames are in it, or all in memory.
            for part, own, there in (
                (items[:half], frames[:raw], slots[:raw]),
                (items[half:], frames[raw:], slots[raw:]),
            ):
                self._send(part, own, there, kv_usage, waiting, preempted)
        else:
            (item,) = items
            if item.kind == ItemKind.CHUNK:
                # For the driver the call ends with this.
                self._held.discard(item.id)
                self._unsendable.append(item.id)
            what = (
                f"the answer has {len(item.body):,} bytes, of at most {self._most_bytes:,} that "
                "fit one message (max_message_bytes)"
            )
            body = encode(ErrorBody(MessageTooLarge.__name__, what, ""))
            self._send([Item(item.id, ItemKind.ERROR, body)], [], [], kv_usage, waiting, preempted)

    def close(self) -> None:
        self._dealer.close(linger=0.5)

    def _begin(self, engine: Engine, call: CallMessage) -> None:
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
                case "pause":
                    engine.pause(call.id, self._pause.decode(call.args).mode)
                case "resume":
                    engine.resume(call.id)
                case "abort":
                    self.put_value(call.id, engine.abort_all())
                case "stats":
                    self.put_value(call.id, engine.stats())
                case "flush_cache":
                    engine.flush_cache(call.id)
                case other:
                    self.put_error(
                        call.id, "UnknownEndpoint", f"the engine has no endpoint {other!r}"
                    )
        except SglrlError as error:
            self.put_error(call.id, type(error).__name__, error.message)
        except Exception as error:
            # The engine lives on: a request it cannot take is that request's failure alone.
            self.put_error(call.id, type(error).__name__, str(error), traceback.format_exc())
