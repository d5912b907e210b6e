"""The driver's side of weight updates: asks, waits, and does what ``core.weights`` decides.

One ``WeightChannel`` a pool. Its messages have sockets of their own in every rank, so neither a
full window nor a long decode step delays them.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
import secrets
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import msgspec

from ..config import check_timeout
from ..core.driver_listener import DriverListener
from ..core.fabric import Fabric
from ..core.manifest import check_manifest, differences, merged
from ..core.weight_update import (
    ABORT,
    COMMIT,
    DONE,
    JOIN,
    PREPARE,
    SENDER,
    STAGE,
    Ask,
    Effect,
    Ended,
    Expel,
    Limits,
    Member,
    WeightUpdate,
)
from ..errors import (
    Closed,
    DeadlineExceeded,
    InvalidWeights,
    ModelError,
    ProtocolError,
    SettingsMismatch,
    SglrlError,
    UsageError,
    WeightUpdateError,
    WorkerLost,
)
from ..wire.codec import Buffer, decode_from_rank, encode
from ..wire.weights import (
    Abort,
    Checksums,
    Commit,
    Committed,
    Describe,
    Join,
    ModelDescription,
    Prepare,
    Prepared,
    Proposed,
    RankAnswer,
    RankHello,
    RankSettings,
    SenderClosed,
    SentStage,
    Shard,
    Stage,
    TensorSpec,
    ToRank,
)
from .answers import body_of, error_of
from .deadline import Deadline, turn
from .peers import PeerCopies
from .ranks import Rank, lost_error
from .remote_source import RemoteSource
from .safetensors_files import fingerprint, weight_files
from .update_report import UpdateReport
from .update_request import Source, UpdateRequest

logger = logging.getLogger("sglrl.weights")

ABORT_SECONDS = 5.0
LEAST_COMMIT_SECONDS = 1.0
"""Whatever the time-out: who is late in another phase has the update given up; in this one, it is
expelled."""

_described = msgspec.msgpack.Decoder(ModelDescription)
_prepared = msgspec.msgpack.Decoder(Prepared)
_sent = msgspec.msgpack.Decoder(SentStage)
_committed = msgspec.msgpack.Decoder(Committed)
_pieces = msgspec.msgpack.Decoder(list[Shard])
_dirty = msgspec.msgpack.Decoder(bool)

_MOST_SENDERS = 16
"""In other processes: each is remembered until it says farewell, which one that died did not."""


class _Question(NamedTuple):
    """``needs``: the rank that is asked, and the rank that the answer is for."""

    answer: asyncio.Future[RankAnswer]
    needs: tuple[Rank, ...]


class _Run:
    """One update under way. ``id``: of its messages. Every attempt has one of its own, so that what
    still comes of an attempt that was given up is not taken for an answer to the next one.
    ``ranks``: the processes behind the members."""

    def __init__(
        self,
        id_: int,
        request: UpdateRequest,
        version: int,
        source: Source | None,
        ranks: Sequence[Rank],
    ):
        self.id = id_
        self.request = request
        self.version = version
        self.source = source
        self.ranks = {rank.member: rank for rank in ranks}
        self.machine: WeightUpdate
        self.ended: asyncio.Future[Ended] = asyncio.get_running_loop().create_future()
        self.attempt = 1
        self.phase = ""
        self.began: dict[str, float] = {}
        self.bodies: dict[tuple[Member, str], Any] = {}
        self.group: dict[Member, Join] = {}

    @property
    def left(self) -> frozenset[Rank]:
        """The processes that still take part."""
        return frozenset(self.ranks[member] for member in self.machine.members)

    @property
    def overwriting(self) -> bool:
        """Some worker without room for a second copy may have half of the new weights, and could
        only be ended if it did not get the rest."""
        return self.phase == STAGE and any(
            self.bodies[member, PREPARE].mode == "bucketed" for member in self.machine.members
        )


class DriverPort(Protocol):
    """The parts of ``Driver`` that a weight channel uses."""

    fabric: Fabric

    def add_listener(self, listener: DriverListener) -> None: ...

    def change(self) -> asyncio.Future[None]: ...

    def send_to_peer(self, identity: bytes, *frames: Buffer) -> bool: ...


class WeightChannel(DriverListener):
    """Weight updates of one pool.

    ``expel(worker, reason)`` ends a worker's processes; ``is_up(worker)``: it has said that it is
    ready, and is not gone. ``versions``: of every worker. ``on_updated()``: after every update.
    """

    def __init__(
        self,
        expel: Callable[[int, str], None],
        is_up: Callable[[int], bool] = lambda worker: True,
    ) -> None:
        self._expel = expel
        self._is_up = is_up
        self.on_updated: Callable[[], None] = lambda: None
        self.on_version: set[Callable[[], None]] = set()
        """Told when ``version`` has changed."""
        self._folder: UpdateRequest | None = None
        """The last update, if it gave all tensors and came from files."""
        self.version = 0
        self.versions: dict[int, int] = {}
        self._driver: DriverPort | None = None
        self._address = ""
        self._token = secrets.token_hex(16)
        self._ranks: dict[Member, Rank] = {}
        """Those that are not lost."""
        self._by_identity: dict[bytes, Rank] = {}
        self._lock = asyncio.Lock()
        self._run: _Run | None = None
        self._next_id = 0
        self._next_group = 0
        self._joined: tuple[Source, frozenset[Rank]] | None = None
        self._asked: dict[int, _Question] = {}
        self._peer_copies = PeerCopies(self._question, self._send)
        self._timer: asyncio.TimerHandle | None = None
        self._senders: dict[bytes, RemoteSource] = {}
        self._description: ModelDescription | None = None
        self._fitting: tuple[Sequence[TensorSpec], bool] | None = None
        """The last manifest that was checked, and whether it may be a part."""

    # --- for the pool -----------------------------------------------------------------------------

    def attach(self, driver: DriverPort, address: str) -> None:
        self._driver = driver
        self._address = address
        driver.add_listener(self)

    def add_rank(self, worker: int, rank: int, identity: bytes) -> None:
        added = Rank((worker, rank), identity)
        self._ranks[added.member] = self._by_identity[identity] = added
        self.versions[worker] = 0

    async def close(self) -> None:
        """Give up what is under way."""
        senders, self._senders = self._senders, {}
        for sender in senders.values():
            sender.cancel()
        if self._run is not None:
            self._run.machine.cancel(time.monotonic())
            if not self._run.ended.done():
                self._run.ended.set_exception(Closed("the client was closed"))
                self._run.ended.exception()
        for question in self._asked.values():
            question.answer.cancel()
        for rank in self._ranks.values():
            rank.hello.cancel()
        if self._timer is not None:
            self._timer.cancel()

    @property
    def address(self) -> str:
        """What ``sglrl.weights.Sender.connect`` takes. It holds a secret."""
        return f"{self._address}#{self._token}"

    @property
    def _up(self) -> list[Rank]:
        """Every rank of every worker that is up. One that is still starting gets the weights when
        it is: see ``sync``."""
        return [rank for (worker, _), rank in sorted(self._ranks.items()) if self._is_up(worker)]

    # --- questions --------------------------------------------------------------------------------

    async def describe(self, timeout: float | None) -> ModelDescription:
        """What the engines take. Asked once: it does not change."""
        return await self._describe(_deadline(timeout))

    async def _describe(self, deadline: Deadline) -> ModelDescription:
        while self._description is None:
            ranks = await self._greeted(deadline)
            if not ranks:
                continue
            try:
                answers = await asyncio.gather(
                    *(
                        self._question(rank, Describe, deadline)
                        for rank in ranks
                        if rank.worker == ranks[0].worker
                    )
                )
            except WorkerLost:
                continue
            self._description = merged([body_of(_described, answer) for answer in answers])
        return self._description

    async def checksums(self, names: list[str], timeout: float | None) -> dict[Member, list[Shard]]:
        """Checksums of live tensor shards by rank; waits for a running update. Raises
        ``UpdateInProgress`` if that does not end in time."""
        deadline = _deadline(timeout)
        async with turn(self._lock, deadline):
            ranks = await self._greeted(deadline)
            found: dict[Member, list[Shard]] = {}

            async def ask(rank: Rank) -> None:
                # A worker that is lost has no weights to differ.
                with contextlib.suppress(WorkerLost):
                    answer = await self._question(rank, lambda id_: Checksums(id_, names), deadline)
                    found[rank.member] = body_of(_pieces, answer)

            await asyncio.gather(*map(ask, ranks))
            if not found:
                raise WorkerLost("no worker is left that could be asked")
            return found

    async def settings(self, timeout: float | None) -> RankSettings:
        """Of the first rank."""
        ranks = await self._greeted(_deadline(timeout))
        if not ranks:
            raise WorkerLost("no worker is left whose settings these would be")
        return ranks[0].settings

    async def _greeted(self, deadline: Deadline) -> list[Rank]:
        """All ranks that are up, once each has said who it is."""
        if not self.versions:
            raise UsageError("this engine has no weights to update: engine='sglang' has")
        driver = self._driver
        try:
            async with deadline.limit():
                while not (ranks := self._up):
                    if driver is None or not driver.fabric.alive:
                        raise WorkerLost("no worker is left")
                    await driver.change()
        except TimeoutError:
            raise WeightUpdateError(f"no worker was up within {deadline}") from None
        await self._all_said_hello(ranks, deadline)
        return [rank for rank in ranks if not rank.lost]

    async def _all_said_hello(self, ranks: Sequence[Rank], deadline: Deadline) -> None:
        """Those that are lost do not count."""
        waiting = [rank.hello for rank in ranks if not rank.hello.done()]
        if waiting:
            await asyncio.wait(waiting, timeout=deadline.left)
            if any(not hello.done() for hello in waiting):
                raise WeightUpdateError(f"not every rank was there within {deadline}")

    async def _question(
        self,
        rank: Rank,
        make: Callable[[int], ToRank],
        deadline: Deadline,
        other: Rank | None = None,
    ) -> RankAnswer:
        """Ask ``rank``. ``other``: the rank that the answer is for.

        Raises:
            WorkerLost: one of them is lost, or is lost before the answer comes.
            DeadlineExceeded: no answer came in time.
        """
        needs = (rank,) if other is None else (rank, other)
        for needed in needs:
            needed.check()
        self._next_id += 1
        id_ = self._next_id
        question = _Question(asyncio.get_running_loop().create_future(), needs)
        self._asked[id_] = question
        try:
            self._send(rank, make(id_))
            async with deadline.limit():
                answer = await question.answer
        except TimeoutError:
            raise DeadlineExceeded(
                f"worker {rank.worker} did not answer within {deadline}"
            ) from None
        finally:
            del self._asked[id_]
        if answer.error is not None:
            raise error_of(answer.error)
        return answer

    # --- updates ----------------------------------------------------------------------------------

    async def update(
        self,
        request: UpdateRequest,
        source: Source | None,
        load: Callable[[], None] = lambda: None,
    ) -> UpdateReport:
        """Run one update to its end, after those before it.

        Cancelling gives it up, unless live weights are being overwritten (in the commit; in mode
        "bucketed" from the stage on): then it is finished first.

        Args:
            load: called when it is this update's turn.

        Raises:
            UpdateInProgress, UsageError, InvalidWeights, SettingsMismatch: nothing was begun.
            WeightUpdateError, WorkerLost: it was given up; the live workers have the old version.
        """
        request.check(self.version)
        deadline = Deadline(request.timeout, request.begun)
        async with turn(self._lock, deadline, wait=request.wait):
            version = request.check(self.version)
            wanted = await self._describe(deadline)
            # No wait comes behind this one, so none of them can be lost before the run has it.
            ranks = await self._greeted(deadline)
            if request.partial and {t.name for t in wanted.tensors} <= {
                spec.name for spec in request.specs
            }:
                # It is no part, whatever its caller says of all its updates.
                request = msgspec.structs.replace(request, partial=False)
            if request.partial:
                # One without the current weights would have parts of two policies.
                current = [r for r in ranks if self.versions[r.worker] == self.version]
                if ranks and not current:
                    raise WeightUpdateError(
                        f"no worker has the weights of version {self.version}, which a part of the "
                        "weights would go with; give all of them"
                    )
                ranks = current
            self._check_fit(wanted, request)
            if source is not None:
                self._check_settings(source.settings, ranks)
            load()
            run = self._new_run(request, version, source, ranks)
            ended = await self._until_ended(run)
            return self._finish(run, ended)

    async def join(self, source: Source, timeout: float) -> float:
        """Form the group with ``source`` ahead of the first update. Milliseconds that it took.

        Raises what ``update`` raises.
        """
        begun = time.perf_counter()
        deadline = _deadline(timeout)
        async with turn(self._lock, deadline):
            ranks = await self._greeted(deadline)
            if self._joined != (source, frozenset(ranks)):
                self._check_settings(source.settings, ranks)
                request = UpdateRequest(specs=[], timeout=deadline.left)
                run = self._new_run(request, self.version, source, ranks, join_only=True)
                ended = await self._until_ended(run)
                self._joined_after(run)
                if ended.state != DONE:
                    raise _failure(ended, run.machine)
        return (time.perf_counter() - begun) * 1e3

    # --- workers that are new ---------------------------------------------------------------------

    def must_sync(self, worker: int) -> bool:
        """It is up, and must not serve before ``sync``."""
        if worker not in self.versions:
            return False
        return self.versions[worker] != self.version or self._lock.locked()

    async def sync(self, worker: int, timeout: float, serve: Callable[[], None]) -> bool:
        """Give a worker that is up the current weights: another worker's, or again from the files
        of the last update. Then call ``serve``, before any other update begins. False if nobody has
        them: the next update will do.

        Args:
            worker: the process that has this index now. If it is lost, its replacement is not
                touched.
            timeout: seconds, from the end of the updates and copies before it.

        Raises:
            WeightUpdateError: the worker has now weights of no version.
            WorkerLost: the worker is lost.
        """
        mine = [rank for rank in self._ranks.values() if rank.worker == worker]
        if not mine:
            raise lost_error(worker)
        # Each update and each copy has a deadline of its own, so this wait ends.
        async with self._lock:
            _check_alive(mine)
            if self.versions[worker] != self.version:
                deadline = Deadline(timeout)
                try:
                    async with deadline.limit() as limit:
                        if not await self._catch_up(mine, deadline):
                            return False
                except TimeoutError:
                    if not limit.expired():
                        raise
                    raise WeightUpdateError(
                        f"worker {worker} did not get the weights within {deadline}"
                    ) from None
                _check_alive(mine)
            self.versions[worker] = self.version
            serve()
            return True

    async def _catch_up(self, mine: Sequence[Rank], deadline: Deadline) -> bool:
        """Under the lock. Raises ``WorkerLost`` as soon as the worker is lost."""
        worker = mine[0].worker
        await self._all_said_hello(mine, deadline)
        _check_alive(mine)
        peers: dict[int, list[Rank]] = {}
        for rank in self._up:
            if rank.worker != worker and self.versions[rank.worker] == self.version:
                peers.setdefault(rank.worker, []).append(rank)
        failure: SglrlError | None = None
        while peers:
            peer = min(peers)
            senders = peers.pop(peer)
            begun = time.perf_counter()
            # One that hangs leaves time for the others.
            limit = Deadline(deadline.left / 2) if peers else deadline
            failed = await self._peer_copies.copy_worker(mine, senders, self.version, limit)
            _check_alive(mine)
            if failed is not None:
                failure = failed
                logger.warning("worker %d could not give its weights: %s", peer, failure)
            else:
                logger.info(
                    "worker %d got the weights of version %d from worker %d in %.0f ms",
                    worker,
                    self.version,
                    peer,
                    (time.perf_counter() - begun) * 1e3,
                )
                return True
        if self._folder is not None and self._is_there(self._folder):
            run = self._new_run(self._folder, self.version, None, mine)
            ended = await self._until_ended(run)
            if ended.state == DONE:
                return True
            failure = _failure(ended, run.machine)
            _check_alive(mine)
            logger.warning("worker %d could not read %s: %s", worker, run.request.folder, failure)
            # The weights are what is missing, and another worker would not find them either.
            return False
        if failure is not None:
            raise failure
        return False

    def _is_there(self, request: UpdateRequest) -> bool:
        """The files that it was read from, as they were."""
        folder = Path(request.folder)
        try:
            same = fingerprint(weight_files(folder)) == request.seen
        except (ModelError, OSError):
            same = False
        if not same:
            logger.warning(
                "%s does not hold the weights of version %d any more", folder, self.version
            )
        return same

    def _new_run(
        self,
        request: UpdateRequest,
        version: int,
        source: Source | None,
        ranks: Sequence[Rank],
        *,
        join_only: bool = False,
    ) -> _Run:
        self._next_id += 1
        run = _Run(self._next_id, request, version, source, ranks)
        drain = request.drain_timeout if request.inflight == "drain" else None
        run.machine = WeightUpdate(
            run.ranks,
            joined=source is not None and self._joined == (source, frozenset(ranks)),
            sender=source is not None,
            limits=Limits(
                request.timeout,
                max(request.timeout, LEAST_COMMIT_SECONDS),
                ABORT_SECONDS,
                prepare=drain,
            ),
            now=time.monotonic(),
            join_only=join_only,
        )
        return run

    async def _until_ended(self, run: _Run) -> Ended:
        """Let it run. Cancelled, it is given up (or finished, if it is too late for that) first."""
        self._run = run
        cancelled: asyncio.CancelledError | None = None
        try:
            self._execute()
            while not run.ended.done():
                try:
                    await asyncio.shield(run.ended)
                except asyncio.CancelledError as error:
                    cancelled = error
                    if not run.overwriting:
                        run.machine.cancel(time.monotonic())
                        self._execute()
            ended = run.ended.result()
        finally:
            self._run = None
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None
        if cancelled is None:
            return ended
        if ended.state == DONE and not run.machine.join_only:
            self._record(run)
        else:
            self._joined_after(run)
        raise cancelled

    def _finish(self, run: _Run, ended: Ended) -> UpdateReport:
        if ended.state != DONE:
            self._joined_after(run)
            raise _failure(ended, run.machine)
        self._record(run)
        machine = run.machine
        end = time.perf_counter()
        at = run.began

        modes = {self._mode(run, member) for member in machine.members}
        pauses = {
            w: max(run.bodies[m, COMMIT].pause_ms for m in machine.members if m[0] == w)
            for w in sorted(machine.workers)
        }
        sent = run.bodies[SENDER, STAGE] if run.source is not None else SentStage(0.0, 0.0)
        report = UpdateReport(
            version=run.version,
            bytes=run.request.total,
            workers=sorted(machine.workers),
            mode="disk" if run.request.folder else "bucketed" if "bucketed" in modes else "full",
            join_ms=(at[PREPARE] - at[JOIN]) * 1e3 if JOIN in at else 0.0,
            prepare_ms=(at[STAGE] - at[PREPARE]) * 1e3,
            gather_ms=sent.gather_ms,
            broadcast_ms=sent.broadcast_ms,
            stage_ms=(at[COMMIT] - at[STAGE]) * 1e3,
            commit_ms=(end - at[COMMIT]) * 1e3,
            total_ms=(end - run.request.begun) * 1e3,
            pause_ms=list(pauses.values()),
            attempts=machine.attempts,
        )
        logger.info("%s", report)
        return report

    def _record(self, run: _Run) -> None:
        """The update is done: what follows is of the new version."""
        self.version = run.version
        for rank in run.left:
            # One that was lost since may have a replacement, which has not got them.
            if not rank.lost:
                self.versions[rank.worker] = run.version
        self._folder = run.request if run.request.folder and not run.request.partial else None
        self._joined_after(run)
        for listener in self.on_version:
            listener()
        # When the lock is free, also if this update was cancelled when it was too late for that.
        asyncio.get_running_loop().call_soon(self.on_updated)

    def _joined_after(self, run: _Run) -> None:
        if run.source is None:
            return
        if run.machine.joined:
            self._joined = (run.source, run.left)
        elif run.group or (self._joined is not None and self._joined[0] is run.source):
            # A rank that joins a group has left the one before, whoever's it was.
            self._joined = None

    def forget(self, source: Source) -> None:
        """The source is closed."""
        if self._joined is not None and self._joined[0] is source:
            self._joined = None

    def sender_answered(self, source: Source, answer: RankAnswer) -> bool:
        """False if it was not asked for that."""
        run = self._run
        return run is not None and run.source is source and self._answered(SENDER, answer)

    # --- inside -----------------------------------------------------------------------------------

    def _check_fit(self, wanted: ModelDescription, request: UpdateRequest) -> None:
        """A sender gives the same list while its manifest stays what it is."""
        if self._fitting is not None:
            specs, partial = self._fitting
            if specs is request.specs and partial == request.partial:
                return
        check_manifest(wanted, request.specs, partial=request.partial)
        self._fitting = (request.specs, request.partial)

    def _check_settings(self, ours: RankSettings, ranks: Sequence[Rank]) -> None:
        for rank in ranks:
            theirs = rank.settings
            found = differences(
                {"device": ours.device, "torch": ours.torch, "NCCL": ours.nccl} | ours.environment,
                {"device": theirs.device, "torch": theirs.torch, "NCCL": theirs.nccl}
                | theirs.environment,
            )
            if found:
                raise SettingsMismatch(
                    f"the sender and worker {rank.worker} cannot form a group: {'; '.join(found)} "
                    "(here is the sender, there the worker); set them alike in both"
                )

    def _execute(self) -> None:
        run = self._run
        if run is None:
            return
        machine = run.machine
        # An effect may add others.
        while machine.outbox:
            effects, machine.outbox = machine.outbox, []
            for effect in effects:
                try:
                    self._do(run, effect)
                except Exception as error:
                    # It must not take the others with it, nor the timer.
                    logger.exception("a weight update")
                    if isinstance(effect, Ask):
                        failed = WeightUpdateError(f"{effect.phase} could not be asked: {error!r}")
                        machine.answered(effect.member, effect.phase, failed, time.monotonic())
        if not machine.ended:
            if self._timer is not None:
                self._timer.cancel()
            wait = max(0.0, machine.deadline - time.monotonic())
            self._timer = asyncio.get_running_loop().call_later(wait, self._on_timer)

    def _do(self, run: _Run, effect: Effect) -> None:
        match effect:
            case Ask(phase=phase, member=member):
                self._ask(run, phase, member)
            case Expel(worker=worker, reason=reason):
                self._expel(worker, reason)
            case Ended():
                if not run.ended.done():
                    run.ended.set_result(effect)

    def _on_timer(self) -> None:
        if self._run is not None:
            self._run.machine.tick(time.monotonic())
            self._execute()

    def _ask(self, run: _Run, phase: str, member: Member) -> None:
        if run.attempt != run.machine.attempts:
            run.attempt = run.machine.attempts
            self._next_id += 1
            run.id = self._next_id
        if phase != run.phase:
            run.phase = phase
            run.began[phase] = time.perf_counter()
            if phase == JOIN:
                run.group = self._form(run)
        message: ToRank
        if phase == JOIN:
            message = run.group[member]
        elif phase == PREPARE:
            message = self._prepare(run, member)
        elif phase == STAGE:
            message = Stage(run.id, self._mode(run, member))
        elif phase == COMMIT:
            message = Commit(run.id)
        else:
            assert phase == ABORT
            message = Abort(run.id, run.machine.leave)
        if member != SENDER:
            self._send(run.ranks[member], message)
        elif run.source is not None:
            run.source.ask(message)

    def _prepare(self, run: _Run, member: Member) -> Prepare:
        r, rank = run.request, run.ranks[member]
        (specs, like), rank.manifest = rank.manifest, (None, 0)
        if specs is not r.specs:
            like = 0
        return Prepare(
            run.id,
            run.version,
            [] if like else list(r.specs),
            r.bucket_bytes or 0,
            r.mode,
            r.inflight,
            r.partial,
            r.folder,
            like,
            r.check_finite,
        )

    def _mode(self, run: _Run, member: Member) -> str:
        """All ranks of a replica pause, or none does. The sender gets "bucketed" if some do."""
        found = {
            run.bodies[rank, PREPARE].mode
            for rank in run.machine.members
            if member == SENDER or rank[0] == member[0]
        }
        return "bucketed" if "bucketed" in found else "full"

    def _form(self, run: _Run) -> dict[Member, Join]:
        """Who is which rank. Members on the sender's own GPU read its memory instead."""
        assert run.source is not None
        ours = run.source.settings
        self._next_group += 1
        uuids = {m: run.ranks[m].settings.uuid for m in sorted(run.machine.members)}
        readers = [m for m, uuid in uuids.items() if uuid and uuid == ours.uuid]
        ranks = [m for m in uuids if m not in readers]

        def join(rank: int, reader: int) -> Join:
            return Join(
                run.id,
                self._next_group,
                ours.host,
                ours.port,
                rank,
                len(ranks) + 1,
                reader,
                len(readers),
                run.request.timeout,
            )

        group = {SENDER: join(0, -1)}
        group |= {m: join(rank, -1) for rank, m in enumerate(ranks, 1)}
        group |= {m: join(-1, reader) for reader, m in enumerate(readers)}
        return group

    def _send(self, rank: Rank, message: ToRank) -> None:
        if not rank.lost and self._driver is not None:
            self._driver.send_to_peer(rank.identity, encode(message))

    def on_peer(self, identity: bytes, frames: Sequence[Buffer]) -> bool:
        rank = self._by_identity.get(identity)
        sender = self._senders.get(identity)
        if rank is None and sender is None and not self._is_sender(identity):
            return False
        try:
            message = decode_from_rank(frames[0])
        except ProtocolError as error:
            logger.debug("a message of the weight channel: %s", error)
            return False
        match message:
            case RankHello(settings=settings) if rank is not None:
                if rank.hello.done():
                    return False
                rank.hello.set_result(settings)
            case RankAnswer() if rank is not None:
                question = self._asked.get(message.id)
                if question is None or question.needs[0] is not rank:
                    return self._rank_answered(rank, message)
                if not question.answer.done():
                    question.answer.set_result(message)
            case SenderClosed() if sender is not None:
                self._dismiss(sender)
            case RankHello(settings=settings) if sender is None:
                return self._admit(identity, settings)
            case _ if sender is not None:
                return sender.receive(message)
            case _:
                return False
        return True

    def _admit(self, identity: bytes, settings: RankSettings) -> bool:
        """A sender in another process. False if there are too many that are busy."""
        if len(self._senders) >= _MOST_SENDERS:
            joined = None if self._joined is None else self._joined[0]
            others = (s for s in self._senders.values() if s is not joined and not s.busy)
            idle = next(others, None)
            if idle is None:
                return False
            self._dismiss(idle)
        self._senders[identity] = RemoteSource(self, identity, settings)
        self._senders[identity].welcome()
        return True

    def tell(self, sender: RemoteSource, message: ToRank) -> None:
        """To a sender in another process; one that is gone can end no update."""
        if self._driver is not None and self._driver.send_to_peer(sender.identity, encode(message)):
            return
        self._senders.pop(sender.identity, None)
        if self._run is not None and self._run.source is sender:
            error = WeightUpdateError("the sender is gone")
            self._run.machine.lost_sender(error, time.monotonic())

    def on_connection_broken(self) -> None:
        for sender in list(self._senders.values()):
            # Of an update that it did not propose; numbers begin at 1. It has no effect.
            self.tell(sender, Proposed(0, None))

    def _dismiss(self, sender: RemoteSource) -> None:
        sender.cancel()
        self.forget(sender)
        self._senders.pop(sender.identity, None)

    def _is_sender(self, identity: bytes) -> bool:
        kind, _, rest = identity.partition(b"/")
        token, _, _ = rest.partition(b"/")
        return kind == b"sender" and hmac.compare_digest(token, self._token.encode())

    def _rank_answered(self, rank: Rank, answer: RankAnswer) -> bool:
        """False if it was not asked for that."""
        run = self._run
        asked = run is not None and run.ranks.get(rank.member) is rank
        return asked and self._answered(rank.member, answer)

    def _answered(self, member: Member, answer: RankAnswer) -> bool:
        """False if it was not asked for."""
        run = self._run
        if run is None or answer.id != run.id:
            return False
        machine, phase = run.machine, answer.phase
        if phase != machine.state or member not in machine.waiting:
            machine.late_answers += 1
            return False
        dirty = False
        error = None if answer.error is None else error_of(answer.error, member)
        if error is None:
            try:
                if phase == PREPARE:
                    run.bodies[member, phase] = body_of(_prepared, answer)
                    run.ranks[member].manifest = (run.request.specs, run.id)
                elif phase == STAGE and member == SENDER:
                    run.bodies[member, phase] = body_of(_sent, answer)
                elif phase == COMMIT:
                    run.bodies[member, phase] = body_of(_committed, answer)
                elif phase == ABORT and member != SENDER:
                    dirty = body_of(_dirty, answer)
            except ProtocolError as malformed:
                error = malformed
        machine.answered(member, phase, error, time.monotonic(), dirty)
        self._execute()
        return True

    def on_lost(self, worker: int) -> None:
        lost = {rank for rank in self._ranks.values() if rank.worker == worker}
        for rank in lost:
            del self._ranks[rank.member], self._by_identity[rank.identity]
            rank.lose()
        if self._joined is not None and self._joined[1] & lost:
            self._joined = None
        for question in self._asked.values():
            if not lost.isdisjoint(question.needs) and not question.answer.done():
                question.answer.set_exception(lost_error(worker))
        run = self._run
        if run is not None and not lost.isdisjoint(run.ranks.values()):
            run.machine.lost(worker, time.monotonic())
            self._execute()


def _deadline(timeout: Any) -> Deadline:
    """Raises ``UsageError`` unless it is a timeout."""
    return Deadline(check_timeout(timeout))


def _check_alive(ranks: Sequence[Rank]) -> None:
    """Raise ``WorkerLost`` if their worker was lost."""
    for rank in ranks:
        rank.check()


def _failure(ended: Ended, machine: WeightUpdate) -> SglrlError:
    """What the caller is told of an update that was given up."""
    refusals = [error for _, error in ended.errors]
    if ended.why == "refused":
        return refusals[0]
    if ended.why == "broken":
        # Found when the values were read. Whatever else went wrong followed from that.
        for error in refusals:
            if isinstance(error, InvalidWeights):
                return error
    text = "; ".join(dict.fromkeys(str(e) for e in refusals)) or ended.why
    if not machine.members:
        return WorkerLost("no worker is left to update" + (f": {text}" if refusals else ""))
    return WeightUpdateError(f"the weight update was given up: {text}")
