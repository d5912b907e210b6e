"""Run a plain actor on its own event loop.

Each call is one task. All answers of one loop tick are sent as one message. Cancelling a call
cancels its task. The worker answers the call only after the task has finished, so the driver's
window counts every task that still runs.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import logging
import os
import time
import traceback
from functools import partial
from typing import Any

import cloudpickle
import uvloop

from sglrl import tracing
from sglrl.actors.actor import Actor, EndpointSpec, constructor_arguments, endpoints_of
from sglrl.driver.driver import ENVELOPE_BYTES
from sglrl.errors import MessageTooLarge, ProtocolError, SglrlError
from sglrl.transport.base import WorkerTransport
from sglrl.transport.dropped import Dropped
from sglrl.transport.zmq import ZmqDealer
from sglrl.wire.calls import (
    PROTOCOL_VERSION,
    CallMessage,
    Cancel,
    ErrorBody,
    Heartbeat,
    Item,
    ItemKind,
    Ready,
    Results,
    Shutdown,
    Starting,
    Submit,
)
from sglrl.wire.codec import Buffer, decode_to_worker, encode, readable, split_frames
from sglrl.wire.processes import ActorSpec, WorkerSpec

from .liveness import RECONNECT_SECONDS, BreakWatch, start_heartbeats

logger = logging.getLogger("sglrl.worker")

_AT_ONCE = 64
"""Number of collected items at which a stream lets the event loop send them."""
_SECONDS = 0.005
"""Age in seconds of the first collected item at which a stream lets the event loop send them."""

_FLUSH_SECONDS = 2.0
"""Maximum seconds in which the spans of the process are exported before it exits."""


def load_class(spec: ActorSpec) -> type[Actor]:
    """Import the actor class by name, or unpickle it when it has no importable name."""
    if not spec.target:
        loaded: type[Actor] = cloudpickle.loads(spec.code)
        return loaded
    module, _, qualname = spec.target.partition(":")
    value: Any = importlib.import_module(module)
    for part in qualname.split("."):
        value = getattr(value, part)
    return value  # type: ignore[no-any-return]


class Host:
    """Serves one actor instance over a transport until ``Shutdown``."""

    def __init__(
        self,
        actor: Actor,
        endpoints: dict[str, EndpointSpec],
        transport: WorkerTransport,
        max_message_bytes: int,
    ) -> None:
        self.max_message_bytes = max_message_bytes
        self.actor = actor
        self.endpoints = endpoints
        self.transport = transport
        self.stopped = asyncio.Event()
        self.running: dict[int, asyncio.Task[None]] = {}
        self._loop = asyncio.get_running_loop()
        self._drop = Dropped(logger)
        self._items: list[Item] = []
        self._frames: list[Buffer] = []
        self._first = 0.0
        """Time at which the first of ``_items`` was collected."""
        self._ready = b""
        self._returning = False
        """Whether the connection was replaced, and ``Ready`` is sent as soon as no call is left."""

    async def serve(self, window: int) -> None:
        """Report that the worker is ready, serve calls until ``Shutdown``, then close the actor."""
        self._ready = encode(Ready(PROTOCOL_VERSION, os.getpid(), window, sorted(self.endpoints)))
        self.transport.start(self._on_message)
        self.transport.send([self._ready])
        async with asyncio.TaskGroup() as self._group:
            await self.stopped.wait()
            self._cancel_calls()
        await self.actor.close()

    def reconnect(self, transport: WorkerTransport) -> None:
        """Replace the connection and cancel all calls, because the old connection lost messages.

        The driver moves these calls to other workers, at the latest when ``Ready`` arrives.
        """
        self.transport = transport
        if not self._ready:
            return
        transport.start(self._on_message)
        self._returning = True
        self._cancel_calls()
        self._end_return()

    def _cancel_calls(self) -> None:
        for task in self.running.values():
            task.cancel()

    def _end_return(self) -> None:
        """Send ``Ready`` again, if the connection was replaced and no call is left."""
        if self._returning and not self.running:
            self._returning = False
            self._items.clear()
            self._frames.clear()
            self.transport.send([self._ready])

    def _on_message(self, frames: list[Buffer]) -> None:
        try:
            message = decode_to_worker(frames[0])
            owned = split_frames(message.calls, frames) if isinstance(message, Submit) else []
        except ProtocolError as error:
            self._drop("a message of the driver: %s", error)
            return
        match message:
            case Submit(calls=calls) if not self._returning:
                for call, own in zip(calls, owned, strict=True):
                    if call.id in self.running or self.stopped.is_set():
                        self._drop("call %d, which arrived twice or too late", call.id)
                        continue
                    task = self._group.create_task(self._run(call, own))
                    self.running[call.id] = task
                    task.add_done_callback(partial(self._ended, call.id))
            case Cancel(ids=ids):
                for id_ in ids:
                    running = self.running.get(id_)
                    if running is not None:
                        running.cancel()
            case Shutdown():
                self.stopped.set()

    def _ended(self, id_: int, task: asyncio.Task[None]) -> None:
        """Forget a task. Answer its call if the task was cancelled before ``_run`` began."""
        if self.running.pop(id_, None) is not None:
            self._put(Item(id_, ItemKind.CANCELLED))
        self._end_return()

    async def _run(self, call: CallMessage, frames: list[Buffer]) -> None:
        try:
            if call.trace:
                with tracing.within(call.trace):
                    await self._answer(call, frames)
            else:
                await self._answer(call, frames)
        except asyncio.CancelledError:
            self._put(Item(call.id, ItemKind.CANCELLED))
        except (SystemExit, KeyboardInterrupt):
            raise
        except BaseException as error:
            # Not every error is an Exception, for example a panic in an extension.
            kind = type(error).__name__
            # An error of sglrl itself is clear without a traceback.
            trace = "" if isinstance(error, SglrlError) else traceback.format_exc()
            body = encode(ErrorBody(kind, readable(error), readable(trace)))
            self._put(Item(call.id, ItemKind.ERROR, body))
        finally:
            self.running.pop(call.id, None)

    async def _answer(self, call: CallMessage, frames: list[Buffer]) -> None:
        spec = self.endpoints.get(call.endpoint)
        if spec is None:
            raise ProtocolError(f"there is no endpoint {call.endpoint!r}")
        arguments = spec.arguments.decode(call.args, frames)
        method = getattr(self.actor, spec.name)
        if spec.streaming:
            async for value in method(**arguments):
                self._put_value(call.id, ItemKind.CHUNK, spec, value)
                if len(self._items) >= _AT_ONCE or time.monotonic() - self._first > _SECONDS:
                    # The stream may never await, so let the loop send items and cancel this task.
                    await asyncio.sleep(0)
            self._put(Item(call.id, ItemKind.DONE))
        else:
            self._put_value(call.id, ItemKind.DONE, spec, await method(**arguments))

    def _put_value(self, id_: int, kind: int, spec: EndpointSpec, value: Any) -> None:
        body, frames = spec.result.encode(value)
        limit = self.max_message_bytes - ENVELOPE_BYTES
        largest = max(len(body), *map(len, frames)) if frames else len(body)
        if largest > limit:
            raise MessageTooLarge(
                f"{spec.name}() returned {largest:,} bytes; at most {limit:,} fit one message"
            )
        self._put(Item(id_, kind, body, len(frames)), frames)

    def _put(self, item: Item, frames: list[Buffer] | None = None) -> None:
        if not self._items:
            self._first = time.monotonic()
            self._loop.call_soon(self._flush)
        self._items.append(item)
        if frames:
            self._frames.extend(frames)

    def _flush(self) -> None:
        items, self._items = self._items, []
        frames, self._frames = self._frames, []
        if self._returning or not items:
            return
        body = encode(Results(items))
        if len(body) <= self.max_message_bytes:
            self.transport.send([body, *frames])
            return
        # ``_put_value`` has checked that each item fits into its own message.
        for item in items:
            own, frames = frames[: item.frames], frames[item.frames :]
            self.transport.send([encode(Results([item])), *own])


class Turns:
    """Counts turns of the event loop, at most one for each heartbeat.

    The count grows while calls await, even when they await for a long time. A call that blocks the
    event loop stops the count.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._count = 0
        self._asked = False

    def next_heartbeat(self) -> Heartbeat:
        """Return a heartbeat with the count, and schedule a turn. Any thread may call this."""
        heartbeat = Heartbeat(self._count)
        if not self._asked:
            self._asked = True
            with contextlib.suppress(RuntimeError):  # The loop is closed: the process exits.
                self._loop.call_soon_threadsafe(self._turn)
        return heartbeat

    def _turn(self) -> None:
        self._count += 1
        self._asked = False


class _Connection:
    """The worker's connection to the driver.

    A broken socket is replaced if ``spec.returns``. Otherwise a break ends the process.

    Attributes:
        host: the ``Host`` that uses the connection. None: the actor is not ready yet.
    """

    def __init__(self, spec: WorkerSpec) -> None:
        self._spec = spec
        self._loop = asyncio.get_running_loop()
        self.host: Host | None = None
        self.transport = self._open()

    def _open(self) -> ZmqDealer:
        self._watch = watch = BreakWatch(self._spec.returns, lambda: self._tell(watch))
        return ZmqDealer(
            self._spec.address,
            self._spec.identity,
            max_message_bytes=self._spec.max_message_bytes,
            keys=self._spec.keys,
            on_break=watch,
            heartbeat_timeout=self._spec.heartbeat_timeout,
            reconnect_seconds=RECONNECT_SECONDS,
        )

    def _tell(self, watch: BreakWatch) -> None:
        with contextlib.suppress(RuntimeError):  # The loop is closed: the process exits.
            self._loop.call_soon_threadsafe(self._replace, watch)

    def _replace(self, watch: BreakWatch) -> None:
        if watch is self._watch:
            self.close()
            self.transport = self._open()
            if self.host is not None:
                self.host.reconnect(self.transport)

    def close(self) -> None:
        self._watch.handled()
        self.transport.close()


async def _main(spec: WorkerSpec, body: ActorSpec) -> None:
    connection = _Connection(spec)
    try:
        connection.transport.send([encode(Starting("constructing the actor"))])
        cls = load_class(body)
        arguments = constructor_arguments(cls).decode(body.args, body.frames)
        actor = cls(**arguments)
        start_heartbeats(spec, Turns().next_heartbeat)
        if "open" not in endpoints_of(cls):
            await actor.open()
        connection.host = host = Host(
            actor, endpoints_of(cls), connection.transport, spec.max_message_bytes
        )
        await host.serve(body.window)
    finally:
        connection.close()


def run_actor(spec: WorkerSpec, body: ActorSpec) -> None:
    """Construct and serve the actor until ``Shutdown``. Errors of its ``__init__`` propagate."""
    uvloop.run(_main(spec, body))
    tracing.flush(_FLUSH_SECONDS)
