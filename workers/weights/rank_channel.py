"""One rank's end of the weight channel: receive updates, and answer the driver's messages.

The work runs on three threads:

* The socket's thread only receives messages and sends answers.
* The link's thread runs work that takes time or waits for other processes.
* The scheduler's thread changes live weights, between two steps (see ``WeightEngine``).
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from typing import Any

import msgspec

from sglrl.core.weight_update import ABORT, COMMIT, JOIN, PREPARE, STAGE
from sglrl.errors import WeightUpdateError
from sglrl.transport.addresses import host_of
from sglrl.weights.bucket_sender import perform
from sglrl.weights.cuda_ipc import SharedReader
from sglrl.weights.group import Group, connect_store, local_address, settings
from sglrl.weights.link import Link
from sglrl.wire.calls import ErrorBody
from sglrl.wire.codec import encode
from sglrl.wire.processes import EngineSpec, WorkerSpec
from sglrl.wire.weights import (
    Abort,
    CancelCopy,
    Checksums,
    Commit,
    Committed,
    Describe,
    Join,
    KeepWeights,
    ModelDescription,
    Prepare,
    Prepared,
    RankAnswer,
    ReceivePeerCopy,
    Rejoin,
    RestoreWeights,
    SendPeerCopy,
    Shard,
    Stage,
)

from .announcements import Announcements
from .current_update import CurrentUpdate
from .kept_weights import KeptWeights
from .peer_copy import PeerCopy
from .preparation import Preparation
from .rank_socket import RankSocket
from .side_stream import SideStream
from .stage_bucketed import BucketedStage
from .stage_files import FilesStage
from .stage_full import FullStage, SpareStage
from .staging_memory import StagingMemory, ring_sizes
from .weight_engine import WeightEngine


class RankWeights:
    """Serves one rank's weight channel until ``close``.

    Args:
        socket: calls ``handle`` and ``connection_broke``. None creates and starts a new socket.
    """

    def __init__(
        self, spec: WorkerSpec, rank: int, engine: WeightEngine, socket: RankSocket | None = None
    ) -> None:
        self._engine = engine
        live, device = engine.live, engine.live.device
        self._device = device
        self._stream = SideStream(device)
        self._link = Link()
        self._questions = Link()
        self._timeout = 60.0
        """Seconds that the members of the current group wait for each other."""
        self._last = Prepare(0, 0, [], 0, "", "", False, "")
        """The last ``Prepare``. The next ``Prepare`` may refer to its tensors."""
        self._description: ModelDescription | None = None
        self._describing = threading.Lock()
        self._current = CurrentUpdate()
        self._memory = StagingMemory(device)
        self._preparation = Preparation(live, self._describe, self._memory, self._stream)
        announcements = Announcements(engine)
        self._spare = SpareStage(self._current, self._memory, self._stream, announcements)
        self._full = FullStage(live, announcements)
        self._bucketed = BucketedStage(engine, self._current, self._stream)
        self._files = FilesStage(live, self._current, self._stream)
        # The scheduler runs Python code for milliseconds at a time. With the default switch
        # interval, a message of an update could wait for 5 ms.
        sys.setswitchinterval(5e-4)
        self._newest = 0
        """The id of the driver's last message."""
        self._socket = socket or RankSocket(
            spec, rank, settings(device), self.handle, self.connection_broke
        )
        host = _own_address(spec.address)
        self._peer_copy = PeerCopy(engine, host, self._stream.use, self._socket.answer)
        path = spec.body.kept_weights if isinstance(spec.body, EngineSpec) else ""
        self._kept = KeptWeights(engine, path, self._stream, self._socket.answer)
        if socket is None:
            self._socket.start()

    def close(self) -> None:
        """Stop serving soon. This does not wait for the thread."""
        self._socket.close()

    def committed(self, update: int, pause: Callable[[], float], error: str = "") -> None:
        """Report to the driver that the update is live, or that the commit failed.

        The engine calls this.

        Args:
            pause: waits until the update is live, and returns the number of milliseconds in which
                no step could run.
            error: the reason why the commit failed, or "".
        """

        def finish() -> Committed:
            if error:
                raise WeightUpdateError(error)
            pause_ms = pause()
            done = self._current.end(update)
            if done is not None:
                self._preparation.committed(done)
            return Committed(pause_ms)

        if self._socket.is_this_thread:
            # Answer here, because another thread would wait for the GIL of the running scheduler.
            self._socket.answer_now(perform(update, COMMIT, finish))
        else:
            self._run(update, COMMIT, finish)
        # Free the memory after the answer, because freeing thousands of views takes a while.
        self._link.submit(self._preparation.free)

    # --- the socket's thread ----------------------------------------------------------------------

    def handle(self, message: Any) -> None:
        """Handle a message of the driver."""
        self._newest = max(self._newest, getattr(message, "id", 0))
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
            case KeepWeights():
                self._kept.keep(message)
            case RestoreWeights():
                self._kept.restore(message)
            case CancelCopy():
                self._cancel_copies()
            case Rejoin():
                self._socket.say_hello(dirty=self.connection_broke())

    def _run(self, id_: int, phase: str, work: Callable[[], Any]) -> None:
        """Run a phase of an update on the link's thread, and answer with the result."""
        self._link.submit(lambda: self._socket.answer(perform(id_, phase, work)))

    def _ask(self, id_: int, phase: str, work: Callable[[], Any]) -> None:
        """Answer a question. Questions are not part of updates, so an abort does not stop them."""
        self._questions.submit(lambda: self._socket.answer(perform(id_, phase, work)))

    def _commit(self, id_: int) -> None:
        update = self._current.find(id_)
        if update is None:
            self._socket.answer(
                RankAnswer(id_, COMMIT, ErrorBody("WeightUpdateError", "there is no such update"))
            )
        elif update.mode == "bucketed":
            self._current.dirty = False
            held_ms = self._engine.release(id_, update.message.version)
            self.committed(id_, lambda: held_ms)
        elif update.drained:
            self._engine.release(id_, update.message.version, staged=True)
        else:
            self._engine.commit(id_, update.message.version, update.message.inflight)

    def _abort(self, message: Abort) -> None:
        """Discard the update and answer at once, even while the link's thread is blocked."""
        dirty = self._give_up(message.id, leave=message.leave)
        self._socket.answer(RankAnswer(message.id, ABORT, None, msgspec.Raw(encode(dirty))))

    def connection_broke(self) -> bool:
        """Give up all work for the driver. Return whether some but not all live weights are new."""
        self._cancel_copies()
        return self._give_up(self._newest, leave=True)

    def _cancel_copies(self) -> None:
        self._peer_copy.cancel()
        self._kept.cancel()

    def _give_up(self, id_: int, *, leave: bool) -> bool:
        """Discard all updates up to ``id_``. Return whether some but not all live weights are new.

        Args:
            leave: whether to leave the group as well.
        """
        update = self._current.abort(id_, self._link if leave else None)
        if leave:
            self._link = Link()
        self._preparation.free()
        self._engine.forget()
        dirty = self._current.dirty
        held = update is not None and (update.mode == "bucketed" or update.drained)
        if update is not None and held and not dirty:
            self._engine.release(update.id, None)
        # If only some weights are new, the engine stays held until another update succeeds or the
        # worker is killed.
        return dirty

    # --- the link's thread ------------------------------------------------------------------------

    def _describe(self) -> ModelDescription:
        with self._describing:
            if self._description is None:
                self._description = self._engine.live.describe()
            return self._description

    def _checksums(self, names: list[str]) -> list[Shard]:
        self._describe()
        with self._stream.use():
            return self._engine.live.checksums(names)

    def _join(self, link: Link, join: Join) -> None:
        store = connect_store(join.host, join.port, join.timeout)
        prefix = f"sglrl/{join.group}"
        if join.reader >= 0:
            link.reader = SharedReader(store, prefix, join.reader, self._device, join.timeout)
            link.check()
            return
        own = local_address(join.host, join.port)
        groups = []
        for name, rank, size in (
            (prefix, join.rank, join.size),
            (f"{prefix}/{join.local_group}", join.local_rank, join.local_size),
        ):
            if rank < 0:
                continue
            group = Group(store, name, rank, size, self._device, own, join.timeout)
            groups.append(group)
            link.group = groups[0]
            group.begin()
            link.check()
        if len(groups) == 2:
            groups[0].onward = groups[1]

    def _prepare(self, message: Prepare) -> Prepared:
        """Check the manifest, get memory for the update, and drain the engine if requested."""
        if message.like:
            raise WeightUpdateError("the manifest is one that this rank does not have")
        update = self._preparation.prepare(message, dirty=self._current.dirty)
        self._current.begin(update)
        if update.drained and not self._current.dirty:
            # Drain before STAGE, because the wait can be longer than the time limit of a
            # collective, and because the update can still be aborted.
            self._engine.hold(message.id, message.inflight)
            while not self._engine.held(message.id, 0.1):
                self._current.check(message.id)
        return Prepared(update.mode, update.room)

    def _stage(self, link: Link, message: Stage) -> None:
        update = self._current.find(message.id)
        if update is None:
            raise WeightUpdateError("there is no such update")
        with self._stream.use():
            if message.mode == "bucketed" and update.mode == "full":
                # Another rank of this replica has less room. All ranks must use the same mode.
                update.mode, update.memory, update.bound = "bucketed", [], None
                update.staged, update.spare = [], None
                sizes = ring_sizes(update.layout, update.layout.total)
                update.memory = self._memory.allocate(sizes)
            if update.message.source:
                self._files.read(link, update)
            elif update.spare is not None:
                self._spare.receive(link, update)
            elif update.mode == "full":
                self._full.receive(link, update)
            else:
                self._bucketed.receive(link, update, self._timeout)
        link.check()
        if update.mode == "full":
            # An abort drops staged tensors, so do not stage them after an abort.
            with self._current.writing(link, update.id):
                self._engine.staged(message.id, update.bound)


def _own_address(driver: str) -> str:
    """Return the address at which other workers reach this process.

    It is the address of the interface that this process uses to reach the driver.
    """
    host = host_of(driver)
    if not driver.startswith("tcp://") or ":" in host:
        # The driver is on this machine, or its address is IPv6, which torch's store does not use.
        return "127.0.0.1"
    return local_address(host, int(driver.rpartition(":")[2]))
