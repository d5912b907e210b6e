"""One rank's end of the weight channel: its socket, its thread, and the buckets it receives.

Work runs on three threads:

* The socket's thread only receives messages and answers them.
* The link's thread runs work that takes time or waits for other processes.
* The scheduler's thread changes live weights, between two steps (see ``WeightEngine``).
"""

from __future__ import annotations

import collections
import contextlib
import functools
import itertools
import logging
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch

from sglrl.core.manifest import Layout, check_manifest, lay_out
from sglrl.core.weight_update import ABORT, COMMIT, JOIN, PREPARE, STAGE
from sglrl.errors import InvalidWeights, ProtocolError, WeightUpdateError
from sglrl.transport.dropped import Dropped
from sglrl.transport.zmq import ZmqPolledDealer
from sglrl.weights.bucket_sender import perform
from sglrl.weights.cuda_ipc import SharedReader
from sglrl.weights.finite import FiniteCheck, ToCheck
from sglrl.weights.group import Group, connect_store, local_address, settings
from sglrl.weights.link import Link
from sglrl.weights.safetensors_files import weight_files
from sglrl.wire.calls import ErrorBody
from sglrl.wire.codec import decode_to_rank, encode
from sglrl.wire.processes import WorkerSpec
from sglrl.wire.weights import (
    Abort,
    CancelPeerCopy,
    Checksums,
    Commit,
    Committed,
    Describe,
    Join,
    ModelDescription,
    Prepare,
    Prepared,
    RankAnswer,
    RankHello,
    ReceivePeerCopy,
    SendPeerCopy,
    Shard,
    Stage,
    rank_identity,
)

from ..engine.loop import IDLE_WAIT
from ..exit_on_disconnect import leave
from .double_buffer import SPARE_BYTES
from .peer_copy import PeerCopy
from .staging import KEPT_BYTES, Nothing, Slots, Staged, Update
from .weight_engine import WeightEngine

logger = logging.getLogger("sglrl.worker")

RING_BYTES = 6 << 30
"""Bytes of the ring of a bucketed update, which has no memory for a second copy of all weights.

The ring holds the buckets that arrive before the engine is held. With little free memory the ring
is smaller, but has at least ``LEAST_RING`` slots.
"""
LEAST_RING = 2
IN_FLIGHT = 3
"""Maximum buckets being received and unpacked at the same time."""


class RankWeights:
    """Serves one rank's weight channel until ``close``."""

    def __init__(self, spec: WorkerSpec, rank: int, engine: WeightEngine) -> None:
        self._spec = spec
        self._engine = engine
        self._device = engine.device
        self._identity = rank_identity(spec.identity, rank)
        self._link = Link()
        self._questions = Link()
        self._last = Prepare(0, 0, [], 0, "", "", False, "")
        """The last ``Prepare``. The next one may refer to its tensors."""
        self._update: Update | None = None
        """The current update."""
        self._kept: Update | None = None
        """The last update, if the next one may use its memory."""
        self._spent: Update | None = None
        """The last update, until ``_free`` frees its memory."""
        self._timeout = 60.0
        self._dirty = False
        """Some live weights are new and some are old."""
        self._given_up = 0
        """Id of the last update that was aborted."""
        self._writing = threading.Lock()
        """Held while this class writes live weights, and to stop writing them after an abort."""
        self._manifest: tuple[tuple[Any, ...], Layout] | None = None
        self._had = 0
        """Bytes of the last update's staging memory, which torch still caches."""
        self._rate = 0.0
        """Bytes per second of the last update that was received into spare memory."""
        self._description: ModelDescription | None = None
        self._describing = threading.Lock()
        self._answers: collections.deque[RankAnswer] = collections.deque()
        self._stream = torch.cuda.Stream(self._device) if self._device.type == "cuda" else None
        self._peer_copy = PeerCopy(engine, self._on_stream, self._answer)
        self._closed = False
        self._drop = Dropped(logger)
        # The scheduler runs Python code for milliseconds at a time. With the default interval, an
        # update's messages could wait for five milliseconds.
        sys.setswitchinterval(5e-4)
        self._hello = encode(RankHello(settings(self._device)))
        self._dealer: ZmqPolledDealer | None = None
        self._thread = threading.Thread(
            target=self._serve, name="sglrl-weight-channel", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """Stop serving. Does not wait for the thread."""
        self._closed = True
        self._wake()

    def committed(self, update: int, pause: Callable[[], float], error: str = "") -> None:
        """Report that the update is live, or that the commit failed. The engine calls this.

        Args:
            pause: waits until the update is live, and returns for how many milliseconds no step
                could run.
            error: why the commit failed, or "".
        """

        def finish() -> Committed:
            if error:
                raise WeightUpdateError(error)
            pause_ms = pause()
            done = self._update
            if done is None or done.id != update:
                return Committed(pause_ms)
            self._update = None
            if done.worth_keeping:
                self._kept = done
                if done.spare is not None and done.layout.total > KEPT_BYTES:
                    done.forget_memory()
            else:
                self._spent = done
            return Committed(pause_ms)

        if threading.current_thread() is self._thread:
            # The scheduler continues now. Another thread would have to wait for the GIL.
            assert self._dealer is not None
            self._dealer.send([encode(perform(update, COMMIT, finish))])
        else:
            self._run(update, COMMIT, finish)
        # Freeing thousands of views takes a while, so answer first.
        self._link.submit(self._free)

    def _free(self) -> None:
        """Free the last update's memory, and prepare the engine for the next update."""
        self._spent = None
        self._engine.settle()

    # --- the channel's thread ---------------------------------------------------------------------

    def _serve(self) -> None:
        dealer = ZmqPolledDealer(
            self._spec.address,
            self._identity,
            max_message_bytes=self._spec.max_message_bytes,
            keys=self._spec.keys,
            on_break=leave,
            heartbeat_timeout=self._spec.heartbeat_timeout,
        )
        self._dealer = dealer
        dealer.send([self._hello])
        while not self._closed:
            while self._answers:
                dealer.send([encode(self._answers.popleft())])
            frames = dealer.receive()
            if frames is None:
                dealer.wait(IDLE_WAIT)
                continue
            try:
                self._handle(decode_to_rank(frames[0]))
            except ProtocolError as error:
                self._drop("a message of the weight channel: %s", error)
            except Exception:
                logger.exception("a message of the weight channel failed")
        dealer.close()

    def _wake(self) -> None:
        if self._dealer is not None:
            self._dealer.wake()

    def _answer(self, answer: RankAnswer) -> None:
        self._answers.append(answer)
        self._wake()

    def _handle(self, message: Any) -> None:
        match message:
            case Describe():
                self._ask(message.id, "describe", self._describe)
            case Checksums():
                self._ask(message.id, "checksums", lambda: self._checksums(message.names))
            case Join():
                self._link.abandon()
                link = self._link = Link()
                self._timeout = message.timeout
                self._run(message.id, JOIN, lambda: self._join(link, message))
            case Prepare():
                if message.like and message.like == self._last.id:
                    message = msgspec.structs.replace(message, tensors=self._last.tensors, like=0)
                self._last = message
                self._run(message.id, PREPARE, lambda: self._prepare(message))
            case Stage():
                link = self._link
                self._run(message.id, STAGE, lambda: self._stage(link, message))
            case Commit():
                self._commit(message.id)
            case Abort():
                self._abort(message)
            case SendPeerCopy():
                self._peer_copy.send(message)
            case ReceivePeerCopy():
                self._peer_copy.receive(message)
            case CancelPeerCopy():
                self._peer_copy.cancel()

    def _run(self, id_: int, phase: str, work: Callable[[], Any]) -> None:
        """Run a phase of an update on the link's thread, and answer with its result."""
        self._link.submit(lambda: self._answer(perform(id_, phase, work)))

    def _ask(self, id_: int, phase: str, work: Callable[[], Any]) -> None:
        """Answer a question. Questions are not part of an update: an abort does not affect them."""
        self._questions.submit(lambda: self._answer(perform(id_, phase, work)))

    def _commit(self, id_: int) -> None:
        update = self._update
        if update is None or update.id != id_:
            self._answer(
                RankAnswer(id_, COMMIT, ErrorBody("WeightUpdateError", "there is no such update"))
            )
        elif update.mode == "bucketed":
            self._dirty = False
            held_ms = self._engine.release(id_, update.message.version)
            self.committed(id_, lambda: held_ms)
        elif update.drained:
            self._engine.release(id_, update.message.version, staged=True)
        else:
            self._engine.commit(id_, update.message.version, update.message.inflight)

    def _abort(self, message: Abort) -> None:
        """Discard the update and answer at once, even while the link's thread waits."""
        if message.leave:
            with self._writing:
                self._link.abandon()
            self._link = Link()
        with self._writing:
            self._given_up = message.id
            update, self._update = self._update, None
        self._free()
        self._engine.forget()
        held = update is not None and (update.mode == "bucketed" or update.drained)
        if update is not None and held and not self._dirty:
            self._engine.release(update.id, None)
        # While only some weights are new, the engine stays held: until another update succeeds or
        # the worker is killed.
        self._answer(RankAnswer(message.id, ABORT, None, msgspec.Raw(encode(self._dirty))))

    # --- the link's thread ------------------------------------------------------------------------

    def _describe(self) -> ModelDescription:
        with self._describing:
            if self._description is None:
                self._description = self._engine.describe()
            return self._description

    def _checksums(self, names: list[str]) -> list[Shard]:
        self._describe()
        with self._on_stream():
            return self._engine.checksums(names)

    def _join(self, link: Link, join: Join) -> None:
        store = connect_store(join.host, join.port, join.timeout)
        prefix = f"sglrl/{join.group}"
        if join.reader >= 0:
            link.reader = SharedReader(store, prefix, join.reader, self._device, join.timeout)
        else:
            own = local_address(join.host, join.port)
            link.group = Group(store, prefix, join.rank, join.size, self._device, own, join.timeout)
            link.group.begin()
        link.check()

    def _prepare(self, message: Prepare) -> Prepared:
        """Check the manifest, get memory for the update, and hold the engine if it must drain."""
        if message.like:
            raise WeightUpdateError("the manifest is one that this rank does not have")
        kept, self._kept = self._kept, None
        update = None
        if kept is not None and kept.serves(message):
            update = kept.again(message)
            if update.spare is not None and self._spare(message) is None:
                # There is no longer room for the spare memory.
                update = None
        if update is None:
            # Free the kept memory, because the new update may need the room.
            kept = None
            update = self._first(message)
        with self._writing:
            if message.id <= self._given_up:
                raise WeightUpdateError("the update was given up")
            self._update = update
        if update.drained and not self._dirty:
            # Drain now: this wait can be longer than a collective's timeout, and the update can
            # still be aborted.
            self._engine.hold(message.id, message.inflight)
            while not self._engine.held(message.id, 0.1):
                if message.id <= self._given_up:
                    raise WeightUpdateError("the update was given up")
        return Prepared(update.mode, update.room)

    def _first(self, message: Prepare) -> Update:
        """Check the manifest, and allocate the memory of an update."""
        layout = self._checked(message)
        # If only some live weights are new, overwrite them in place: the engine is still held.
        in_place = message.mode == "bucketed" or self._dirty
        if not in_place:
            update = Update(message, layout, "full", layout.total)
            update.spare = self._spare(message)
            if update.spare is not None and self._has_room_to_unpack(update):
                return update
        room = self._room(RING_BYTES if in_place else layout.total)
        mode, memory = self._choose("bucketed" if in_place else message.mode, layout, room)
        update = Update(message, layout, mode, room)
        with self._on_stream():
            update.memory = self._memory(memory)
        self._had = sum(memory)
        return update

    def _spare(self, message: Prepare) -> Staged | None:
        """Return the engine's own memory for new weights. None if the engine has none."""
        with self._on_stream():
            return self._engine.spare([spec.name for spec in message.tensors])

    def _has_room_to_unpack(self, update: Update) -> bool:
        """Return True if the buckets that arrive as one piece have memory outside ``spare``."""
        layout = update.layout
        if all(map(update.in_pieces, range(len(layout.sizes)))):
            return True
        wanted = IN_FLIGHT * layout.ring_slot if self._device.type == "cuda" else max(layout.sizes)
        return self._room(wanted) >= wanted

    def _checked(self, message: Prepare) -> Layout:
        """Check that the manifest fits the model, and return its layout.

        The last manifest is cached: a trainer sends the same manifest each time, and checking a few
        hundred names takes a millisecond.
        """
        manifest = (message.tensors, message.bucket_bytes, message.partial, message.source)
        if self._manifest is None or self._manifest[0] != manifest:
            description = self._describe()
            # Ignored names may be experts of other ranks. The driver has asked all ranks for their
            # tensors, and has checked these names.
            elsewhere = set(description.ignored)
            mine = [spec for spec in message.tensors if spec.name not in elsewhere]
            if not message.source and (mine or not message.partial):
                check_manifest(description, mine, partial=message.partial)
            self._manifest = (manifest, lay_out(message.tensors, message.bucket_bytes))
        return self._manifest[1]

    def _memory(self, sizes: Sequence[int]) -> list[torch.Tensor]:
        return [torch.empty(size, dtype=torch.uint8, device=self._device) for size in sizes]

    @staticmethod
    def _ring(layout: Layout, room: int) -> list[int]:
        """Return the sizes of a bucketed update's slots.

        The last slot is a large one, if some buckets are larger than a slot.
        """
        slot = layout.ring_slot
        large = max((size for size in layout.sizes if size > slot), default=0)
        wanted = -(-RING_BYTES // slot)
        ring = max(LEAST_RING, min(wanted, len(layout.sizes), (room - large) // slot))
        return [slot] * ring + ([large] if large else [])

    def _choose(self, wanted: str, layout: Layout, room: int) -> tuple[str, list[int]]:
        """Choose the mode of an update.

        Returns:
            The mode and the sizes of its memory: of every bucket, or of the slots of a ring.

        Raises:
            InvalidWeights: there is no room for the mode that was requested.
        """
        if wanted in ("auto", "full") and layout.total <= room:
            return "full", layout.sizes
        ring = self._ring(layout, room)
        if wanted != "full" and (sum(ring) <= room or self._dirty):
            return "bucketed", ring
        least = layout.total if wanted == "full" else sum(ring)
        raise InvalidWeights(
            f"no room to stage the weights: {least / 1e9:.2f} GB are needed and "
            f"{room / 1e9:.2f} GB are free; lower mem_fraction_static, or bucket_bytes"
        )

    def _room(self, wanted: int) -> int:
        """Return the bytes that staging may use, or any number of at least ``wanted``."""
        if self._device.type == "cpu":
            meminfo = Path("/proc/meminfo").read_text()
            (line,) = [text for text in meminfo.splitlines() if text.startswith("MemAvailable")]
            return int(line.split()[1]) * 1024
        # memory_reserved() and similar functions build a dict of all statistics, which takes a
        # millisecond.
        stats = torch._C._cuda_memoryStats(self._device.index)
        cached: int = (
            stats["reserved_bytes"]["all"]["current"] - stats["allocated_bytes"]["all"]["current"]
        )
        if cached >= wanted and wanted <= self._had:
            # The last update's memory is enough. Asking the CUDA driver can take a millisecond.
            return cached
        free: int = torch.cuda.mem_get_info(self._device)[0]
        return max(0, free + cached - SPARE_BYTES)

    def _stage(self, link: Link, message: Stage) -> None:
        update = self._update
        if update is None or update.id != message.id:
            raise WeightUpdateError("there is no such update")
        with self._on_stream():
            if message.mode == "bucketed" and update.mode == "full":
                # Another rank of this replica has less room, and all ranks pause together.
                update.mode, update.memory, update.bound = "bucketed", [], None
                update.staged, update.spare = [], None
                update.memory = self._memory(self._ring(update.layout, update.layout.total))
            if update.message.source:
                self._read_files(link, update)
            elif update.spare is not None:
                self._stage_spare(link, update)
            elif update.mode == "full":
                self._stage_full(link, update)
            else:
                self._stage_bucketed(link, update)
        link.check()
        if update.mode == "full":
            with self._writing:
                # An abort drops staged tensors. After an abort, do not stage this update.
                self._check_wanted(update)
                self._engine.staged(message.id, update.bound)

    def _stage_spare(self, link: Link, update: Update) -> None:
        """Receive all buckets into the spare memory, while the scheduler continues."""
        group, buckets = link.group, range(len(update.layout.sizes))
        if group is None:
            assert link.reader is not None
            for bucket in buckets:
                unpack = functools.partial(update.unpack, bucket)
                put = functools.partial(self._put, link, update, unpack)
                link.reader.receive(update.id, bucket, put)
            if self._stream is not None:
                self._stream.synchronize()
            return
        on_cpu = self._device.type == "cpu"
        slots = 1 if on_cpu else IN_FLIGHT
        packed = {b for b in buckets if not (group.takes_pieces and update.in_pieces(b))}
        if len(update.memory) < min(slots, len(packed)):
            largest = max(update.layout.sizes[bucket] for bucket in packed)
            update.forget_memory()
            update.memory = self._memory([largest] * min(slots, len(packed)))
        turns = itertools.cycle(update.memory)
        waiting: collections.deque[tuple[int, Any, torch.Tensor | None]] = collections.deque()
        arrivals: list[torch.cuda.Event] = []
        link.check()
        expected = not on_cpu and self._expect(update)

        def arrive() -> None:
            bucket, work, data = waiting.popleft()
            work.wait()
            if data is not None:
                unpack = functools.partial(update.unpack, bucket, again=True)
                self._put(link, update, unpack, data)
            if not on_cpu:
                arrivals.append(torch.cuda.Event(enable_timing=True))
                arrivals[-1].record()

        with group.deadline():
            for bucket in buckets:
                link.check()
                if len(waiting) == slots:
                    arrive()
                data, pieces = None, list(update.spare_views(bucket).values())
                if bucket in packed:
                    data = next(turns)[: update.layout.sizes[bucket]]
                    pieces = [data]
                waiting.append((bucket, group.broadcast(pieces), data))
            while waiting:
                arrive()
            if arrivals and not expected:
                self._watch(link, update, arrivals)
            group.synchronize()
        if len(arrivals) > 1:
            took = arrivals[0].elapsed_time(arrivals[-1]) / 1e3
            self._rate = sum(update.layout.sizes[1:]) / max(1e-6, took)

    def _expect(self, update: Update) -> bool:
        """Announce the update to the engine at once, if it will take less than two steps.

        The estimate is the rate of the last update. A later announcement could be too late, after
        the launch of another step.

        Returns:
            True if no later announcement is needed.
        """
        if update.drained:
            # The engine is already held.
            return True
        seconds = update.layout.total / self._rate if self._rate else float("inf")
        if seconds > 2 * self._engine.step_seconds():
            return False
        self._engine.nearly_staged(seconds, True)
        return True

    def _put(
        self, link: Link, update: Update, write: Callable[[torch.Tensor], Any], data: torch.Tensor
    ) -> None:
        """Write to memory that the next update uses, too. Raise if this update was aborted."""
        with self._writing:
            link.check()
            self._check_wanted(update)
            write(data)

    def _check_wanted(self, update: Update) -> None:
        """Raise ``WeightUpdateError`` if the update was aborted."""
        if update.id <= self._given_up:
            raise WeightUpdateError("the update was given up")

    def _stage_full(self, link: Link, update: Update) -> None:
        """Receive all buckets into staging memory, while the scheduler continues.

        The engine copies the weights from there when they become live.
        """
        group = link.group
        staged = update.staged
        if group is not None:
            with group.deadline():
                works = []
                for bucket, data in enumerate(update.memory):
                    link.check()
                    if bucket == len(staged):
                        staged.append(update.views(bucket, data))
                    works.append(self._receive(group, update, bucket, data, staged[bucket]))
                    if self._device.type == "cpu":
                        works[-1].wait()
                arrivals = self._arrivals(works)
                self._bind(update)
                if arrivals and not update.drained:
                    self._watch(link, update, arrivals)
                group.synchronize()
        else:
            assert link.reader is not None
            for bucket, data in enumerate(update.memory):
                link.reader.receive(update.id, bucket, data.copy_)
            self._bind(update)

    @staticmethod
    def _receive(
        group: Group, update: Update, bucket: int, data: torch.Tensor, views: Staged
    ) -> Any:
        pieces = group.takes_pieces and update.in_pieces(bucket)
        return group.broadcast(list(views.values()) if pieces else [data])

    def _bind(self, update: Update) -> None:
        """Bind all staged tensors, unless they are in the spare memory."""
        if update.bound is None and update.spare is None:
            staged = update.staged
            for bucket in range(len(staged), len(update.memory)):
                staged.append(update.views(bucket, update.memory[bucket]))
            update.bound = self._engine.bind({k: v for views in staged for k, v in views.items()})

    def _arrivals(self, works: list[Any]) -> list[torch.cuda.Event]:
        """Record one event for each bucket of a broadcast between GPUs. No events on a CPU."""
        events = []
        for work in works if self._device.type == "cuda" else []:
            work.wait()
            events.append(torch.cuda.Event(enable_timing=True))
            events[-1].record()
        return events

    def _watch(self, link: Link, update: Update, arrivals: list[torch.cuda.Event]) -> None:
        """Announce the update to the engine about one step before all buckets have arrived."""
        sizes = update.layout.sizes
        middle = len(arrivals) // 2
        arrivals[middle].synchronize()
        # Use the GPU's clock, because this thread may be late.
        took = arrivals[0].elapsed_time(arrivals[middle]) / 1e3
        rate = sum(sizes[1 : middle + 1]) / max(1e-6, took)
        ahead = self._engine.step_seconds() * rate
        near = middle
        while near < len(sizes) - 1 and sum(sizes[near + 2 :]) >= ahead:
            near += 1
        arrivals[near].synchronize()
        link.check()
        # With a single bucket there is no rate, and no bucket is left.
        left = sum(sizes[near + 1 :]) / rate if rate else 0.0
        self._engine.nearly_staged(left, update.spare is not None)

    def _stage_bucketed(self, link: Link, update: Update) -> None:
        """Receive into the live weights while the scheduler is held.

        Buckets go through a ring of slots until the scheduler is held, and if they do not have the
        layout of the live tensors.
        """
        engine, group, layout = self._engine, link.group, update.layout
        if not self._dirty and update.message.inflight != "drain":
            engine.hold(update.id, update.message.inflight)
        slots = Slots(update)
        waiting: collections.deque[tuple[int, Any, Staged]] = collections.deque()
        straight = []

        def apply_oldest() -> None:
            bucket, work, views = waiting.popleft()
            work.wait()
            if not self._dirty and not engine.held(update.id, self._timeout):
                raise WeightUpdateError("the engine did not come to rest in time")
            with self._writing:
                link.check()
                self._dirty = True
                engine.copy(engine.bind(views))
            slots.free(bucket)

        with group.deadline() if group is not None else contextlib.nullcontext():
            for bucket, size in enumerate(layout.sizes):
                link.check()
                in_pieces = group is not None and group.takes_pieces and update.in_pieces(bucket)
                targets = engine.targets(update.names(bucket)) if in_pieces and bucket else None
                if group is not None and targets and (self._dirty or engine.held(update.id, 0)):
                    with self._writing:
                        link.check()
                        self._dirty = True
                        straight.append(group.broadcast(targets))
                    continue
                while not slots.has_room(bucket):
                    apply_oldest()
                data = slots.take(bucket)[:size]
                views = update.views(bucket, data)
                work: Any = Nothing
                if group is not None:
                    work = self._receive(group, update, bucket, data, views)
                else:
                    assert link.reader is not None
                    link.reader.receive(update.id, bucket, data.copy_)
                waiting.append((bucket, work, views))
                if group is not None and not bucket:
                    # The sender checks the weights, then sends the first bucket. Overwrite no live
                    # weights before that.
                    work.wait()
                    group.synchronize()
                if self._dirty or engine.held(update.id, 0):
                    # The scheduler is already held, so copy at once.
                    apply_oldest()
            # Copy after all broadcasts are launched, because they would wait for these copies.
            while waiting:
                apply_oldest()
            for work in straight:
                work.wait()
            if group is not None:
                group.synchronize()
        if self._stream is not None:
            self._stream.synchronize()

    def _read_files(self, link: Link, update: Update) -> None:
        """Read the weights from a folder of safetensors files, cast to the engine's dtypes."""
        from safetensors import safe_open

        if update.mode != "full":
            raise InvalidWeights("weights from files need room for all of them")
        memory, layout = update.memory, update.layout
        views: list[ToCheck] = []
        wanted = {spec.name: index for index, spec in enumerate(update.message.tensors)}
        for path in weight_files(Path(update.message.source)):
            with safe_open(path, framework="pt", device="cpu") as file:
                for name in file.keys():  # noqa: SIM118
                    index = wanted.pop(name, None)
                    if index is None:
                        continue
                    place, spec = layout.places[index], update.message.tensors[index]
                    if update.spare is not None:
                        view = update.spare[name]
                    else:
                        flat = memory[place.bucket][place.offset : place.offset + place.nbytes]
                        view = flat.view(getattr(torch, spec.dtype)).view(spec.shape)
                    self._put(link, update, view.copy_, file.get_tensor(name))
                    views.append((name, view, view.dtype))
        if wanted:
            raise WeightUpdateError(f"the files no longer hold {', '.join(sorted(wanted)[:8])}")
        if update.message.check_finite:
            check = FiniteCheck()
            check.add(views)
            check.finish()
        self._bind(update)
        if self._stream is not None:
            self._stream.synchronize()

    @contextlib.contextmanager
    def _on_stream(self) -> Iterator[None]:
        """Run the block without gradients and, on a GPU, on this class's stream."""
        with torch.no_grad():
            if self._stream is None:
                yield
            else:
                with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
                    yield
