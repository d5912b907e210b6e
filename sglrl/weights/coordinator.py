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
from typing import Any

import msgspec

from ..codec import Buffer, decode_from_rank, encode
from ..config import check_timeout
from ..core.manifest import check_manifest, differences, merged
from ..core.weights import (
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
from ..driver import Driver
from ..errors import (
    Closed,
    DeadlineExceeded,
    ModelError,
    ProtocolError,
    SettingsMismatch,
    SglrlError,
    UpdateInProgress,
    UsageError,
    WeightUpdateError,
    WorkerLost,
)
from ..messages import (
    Abort,
    Checksums,
    Commit,
    Committed,
    Describe,
    Farewell,
    Join,
    ModelDescription,
    Piece,
    Prepare,
    Prepared,
    RankAnswer,
    RankHello,
    RankSettings,
    SentStage,
    Stage,
    TensorSpec,
    ToRank,
)
from .answers import body_of, error_of
from .files import fingerprint, weight_files
from .hand_over import HandOvers
from .remote_source import RemoteSource
from .report import UpdateReport
from .request import Source, UpdateRequest

logger = logging.getLogger("sglrl.weights")

ABORT_SECONDS = 5.0
LEAST_COMMIT_SECONDS = 1.0
"""Whatever the time-out: who is late in another phase has the update given up; in this one, it is
expelled."""

_described = msgspec.msgpack.Decoder(ModelDescription)
_prepared = msgspec.msgpack.Decoder(Prepared)
_sent = msgspec.msgpack.Decoder(SentStage)
_committed = msgspec.msgpack.Decoder(Committed)
_pieces = msgspec.msgpack.Decoder(list[Piece])
_dirty = msgspec.msgpack.Decoder(bool)

_MOST_SENDERS = 16
"""In other processes: each is remembered until it says farewell, which one that died did not."""


class _Run:
    """One update under way. ``id``: of its messages. Every attempt has one of its own, so that what
    still comes of an attempt that was given up is not taken for an answer to the next one."""

    def __init__(self, id_: int, request: UpdateRequest, version: int, source: Source | None):
        self.id = id_
        self.request = request
        self.version = version
        self.source = source
        self.machine: WeightUpdate
        self.ended: asyncio.Future[Ended] = asyncio.get_running_loop().create_future()
        self.attempt = 1
        self.phase = ""
        self.began: dict[str, float] = {}
        self.bodies: dict[tuple[Member, str], Any] = {}
        self.group: dict[Member, Join] = {}

    @property
    def overwriting(self) -> bool:
        """Some worker without room for a second copy may have half of the new weights, and could
        only be ended if it did not get the rest."""
        return self.phase == STAGE and any(
            self.bodies[member, PREPARE].mode == "bucketed" for member in self.machine.members
        )


class WeightChannel:
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
        self._driver: Driver | None = None
        self._address = ""
        self._token = secrets.token_hex(16)
        self._ranks: dict[bytes, Member] = {}
        self._identities: dict[Member, bytes] = {}
        self._hellos: dict[Member, asyncio.Future[RankSettings]] = {}
        self._lock = asyncio.Lock()
        self._run: _Run | None = None
        self._next_id = 0
        self._next_group = 0
        self._joined: tuple[Source, frozenset[Member]] | None = None
        self._asked: dict[tuple[int, Member], asyncio.Future[RankAnswer]] = {}
        self._hand_overs = HandOvers(self._question, self._send)
        self._timer: asyncio.TimerHandle | None = None
        self._senders: dict[bytes, RemoteSource] = {}
        self._description: ModelDescription | None = None
        self._fitting: tuple[Sequence[TensorSpec], bool] | None = None
        """The last manifest that was checked, and whether it may be a part."""
        self._prepared: dict[Member, tuple[Sequence[TensorSpec], int]] = {}
        """The manifest that a rank has said yes to, if it is the last one that it was sent, and the
        message's id: a trainer sends the same one each time, which takes half a millisecond."""

    # --- for the pool -----------------------------------------------------------------------------

    def attach(self, driver: Driver, address: str) -> None:
        self._driver = driver
        self._address = address
        driver.on_peer = self._on_peer
        driver.on_lost = self._on_lost

    def add_rank(self, worker: int, rank: int, identity: bytes) -> None:
        member = (worker, rank)
        self._ranks[identity] = member
        self._identities[member] = identity
        self._hellos[member] = asyncio.get_running_loop().create_future()
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
        for asked in self._asked.values():
            asked.cancel()
        for hello in self._hellos.values():
            hello.cancel()
        if self._timer is not None:
            self._timer.cancel()

    @property
    def address(self) -> str:
        """What ``sglrl.weights.Sender.connect`` takes. It holds a secret."""
        return f"{self._address}#{self._token}"

    @property
    def members(self) -> list[Member]:
        """Every rank of every worker that is up. One that is still starting gets the weights when
        it is: see ``sync``."""
        return sorted(member for member in self._identities if self._is_up(member[0]))

    # --- questions --------------------------------------------------------------------------------

    async def describe(self, timeout: float) -> ModelDescription:
        """What the engines take. Asked once: it does not change."""
        while self._description is None:
            members = await self._greeted(timeout)
            if not members:
                continue
            ranks = [member for member in members if member[0] == members[0][0]]
            try:
                answers = await asyncio.gather(
                    *(self._question(member, Describe, timeout) for member in ranks)
                )
            except WorkerLost:
                continue
            self._description = merged([body_of(_described, answer) for answer in answers])
        return self._description

    async def checksums(self, names: list[str], timeout: float) -> dict[Member, list[Piece]]:
        """Of the live tensors' pieces, by rank; behind an update that runs."""
        async with self._lock:
            return await self._checksums(names, timeout)

    async def _checksums(self, names: list[str], timeout: float) -> dict[Member, list[Piece]]:
        members = await self._greeted(timeout)
        found: dict[Member, list[Piece]] = {}

        async def ask(member: Member) -> None:
            # A worker that is lost has no weights to differ.
            with contextlib.suppress(WorkerLost):
                answer = await self._question(member, lambda id_: Checksums(id_, names), timeout)
                found[member] = body_of(_pieces, answer)

        await asyncio.gather(*map(ask, members))
        if not found:
            raise WorkerLost("no worker is left that could be asked")
        return found

    async def settings(self, timeout: float) -> RankSettings:
        """Of the first rank."""
        members = await self._greeted(timeout)
        if not members:
            raise WorkerLost("no worker is left whose settings these would be")
        return self._hellos[members[0]].result()

    async def _greeted(self, timeout: float) -> list[Member]:
        """All members, once each has said who it is."""
        if not self._hellos:
            raise UsageError("this engine has no weights to update: engine='sglang' has")
        check_timeout(timeout)
        driver = self._driver
        try:
            async with asyncio.timeout(timeout):
                while not (members := self.members):
                    if driver is None or not driver.fabric.alive:
                        raise WorkerLost("no worker is left")
                    await driver.change()
        except TimeoutError:
            raise WeightUpdateError(f"no worker was up within {timeout:g} s") from None
        await self._all_said_hello(members, timeout)
        return [m for m in members if m in self._identities]

    async def _all_said_hello(self, members: Sequence[Member], timeout: float) -> None:
        waiting = [self._hellos[m] for m in members if not self._hellos[m].done()]
        if waiting:
            await asyncio.wait(waiting, timeout=timeout)
            if any(not future.done() for future in waiting):
                raise WeightUpdateError(f"not every rank was there within {timeout:g} s")

    async def _question(
        self, member: Member, make: Callable[[int], ToRank], timeout: float
    ) -> RankAnswer:
        self._next_id += 1
        key = (self._next_id, member)
        future = self._asked[key] = asyncio.get_running_loop().create_future()
        try:
            self._send(member, make(key[0]))
            async with asyncio.timeout(timeout):
                answer: RankAnswer = await future
        except TimeoutError:
            raise DeadlineExceeded(
                f"worker {member[0]} did not answer within {timeout:g} s"
            ) from None
        finally:
            del self._asked[key]
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
        if self._lock.locked() and not request.wait:
            raise UpdateInProgress("another weight update is running")
        async with self._lock:
            version = request.check(self.version)
            members = await self._greeted(request.timeout)
            wanted = await self.describe(request.timeout)
            if request.partial and {t.name for t in wanted.tensors} <= {
                spec.name for spec in request.specs
            }:
                # It is no part, whatever its caller says of all its updates.
                request = msgspec.structs.replace(request, partial=False)
            if request.partial:
                # One without the current weights would have parts of two policies.
                current = [m for m in members if self.versions[m[0]] == self.version]
                if members and not current:
                    raise WeightUpdateError(
                        f"no worker has the weights of version {self.version}, which a part of the "
                        "weights would go with; give all of them"
                    )
                members = current
            self._check_fit(wanted, request)
            if source is not None:
                self._check_settings(source.settings, members)
            load()
            run = self._new_run(request, version, source, members)
            ended = await self._until_ended(run)
            return self._finish(run, ended)

    async def join(self, source: Source, timeout: float) -> float:
        """Form the group with ``source`` ahead of the first update. Milliseconds that it took.

        Raises what ``update`` raises.
        """
        begun = time.perf_counter()
        async with self._lock:
            members = await self._greeted(timeout)
            if self._joined != (source, frozenset(members)):
                self._check_settings(source.settings, members)
                request = UpdateRequest(specs=[], timeout=timeout)
                run = self._new_run(request, self.version, source, members, join_only=True)
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

        Raises:
            WeightUpdateError, WorkerLost: the worker has now weights of no version.
        """
        async with self._lock:
            if self.versions[worker] != self.version and not await self._catch_up(worker, timeout):
                return False
            self.versions[worker] = self.version
            serve()
            return True

    async def _catch_up(self, worker: int, timeout: float) -> bool:
        """Under the lock."""
        mine = [m for m in sorted(self._identities) if m[0] == worker]
        await self._all_said_hello(mine, timeout)
        peers = sorted({w for w, _ in self.members if self.versions[w] == self.version} - {worker})
        failure: SglrlError | None = None
        for peer in peers:
            begun = time.perf_counter()
            failed = await self._hand_overs.to_all(mine, peer, self.version, timeout)
            if worker not in self._workers():
                raise WorkerLost(f"worker {worker} was lost", worker=worker)
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
            if worker not in self._workers():
                raise failure
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

    def _workers(self) -> set[int]:
        return {worker for worker, _ in self._identities}

    def _new_run(
        self,
        request: UpdateRequest,
        version: int,
        source: Source | None,
        members: list[Member],
        *,
        join_only: bool = False,
    ) -> _Run:
        self._next_id += 1
        run = _Run(self._next_id, request, version, source)
        drain = request.drain_timeout if request.inflight == "drain" else None
        run.machine = WeightUpdate(
            members,
            joined=source is not None and self._joined == (source, frozenset(members)),
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
        for worker in run.machine.workers:
            self.versions[worker] = run.version
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
            self._joined = (run.source, frozenset(run.machine.members))
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

    def _check_settings(self, ours: RankSettings, members: Sequence[Member]) -> None:
        for member in members:
            theirs = self._hellos[member].result()
            found = differences(
                {"device": ours.device, "torch": ours.torch, "NCCL": ours.nccl} | ours.environment,
                {"device": theirs.device, "torch": theirs.torch, "NCCL": theirs.nccl}
                | theirs.environment,
            )
            if found:
                raise SettingsMismatch(
                    f"the sender and worker {member[0]} cannot form a group: {'; '.join(found)} "
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
            self._send(member, message)
        elif run.source is not None:
            run.source.ask(message)

    def _prepare(self, run: _Run, member: Member) -> Prepare:
        r = run.request
        specs, like = self._prepared.pop(member, (None, 0))
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
        )

    def _mode(self, run: _Run, member: Member) -> str:
        """All ranks of a replica pause, or none does."""
        if member == SENDER:
            return ""
        found = {
            run.bodies[rank, PREPARE].mode for rank in run.machine.members if rank[0] == member[0]
        }
        return "bucketed" if "bucketed" in found else "full"

    def _form(self, run: _Run) -> dict[Member, Join]:
        """Who is which rank. Members on the sender's own GPU read its memory instead."""
        assert run.source is not None
        ours = run.source.settings
        self._next_group += 1
        uuids = {m: self._hellos[m].result().uuid for m in sorted(run.machine.members)}
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

    def _send(self, member: Member, message: ToRank) -> None:
        identity = self._identities.get(member)
        if identity is not None and self._driver is not None:
            self._driver.send_to_peer(identity, encode(message))

    def _on_peer(self, identity: bytes, frame: Buffer) -> bool:
        member = self._ranks.get(identity)
        sender = self._senders.get(identity)
        if member is None and sender is None and not self._is_sender(identity):
            return False
        try:
            message = decode_from_rank(frame)
        except ProtocolError as error:
            logger.debug("a message of the weight channel: %s", error)
            return False
        match message:
            case RankHello(settings=settings) if member is not None:
                hello = self._hellos[member]
                if hello.done():
                    return False
                hello.set_result(settings)
            case RankAnswer() if member is not None:
                waiting = self._asked.get((message.id, member))
                if waiting is None:
                    return self._answered(member, message)
                if not waiting.done():
                    waiting.set_result(message)
            case Farewell() if sender is not None:
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

    def _dismiss(self, sender: RemoteSource) -> None:
        sender.cancel()
        self.forget(sender)
        self._senders.pop(sender.identity, None)

    def _is_sender(self, identity: bytes) -> bool:
        kind, _, rest = identity.partition(b"/")
        token, _, _ = rest.partition(b"/")
        return kind == b"sender" and hmac.compare_digest(token, self._token.encode())

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
                    self._prepared[member] = (run.request.specs, run.id)
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

    def _on_lost(self, worker: int) -> None:
        for member in [m for m in self._identities if m[0] == worker]:
            del self._ranks[self._identities.pop(member)]
            self._hellos[member].cancel()
            self._prepared.pop(member, None)
            if self._joined is not None and member in self._joined[1]:
                # Its replacement will have its name, and not be in the group.
                self._joined = None
            error = WorkerLost(f"worker {worker} was lost", worker=worker)
            for (_, asked), future in list(self._asked.items()):
                # What waits for a giver that is lost would wait in vain.
                if member in (asked, self._hand_overs.givers.get(asked)) and not future.done():
                    future.set_exception(error)
        if self._run is not None:
            self._run.machine.lost(worker, time.monotonic())
            self._execute()


def _failure(ended: Ended, machine: WeightUpdate) -> SglrlError:
    """What the caller is told of an update that was given up."""
    refusals = [error for _, error in ended.errors]
    if ended.why == "refused":
        return refusals[0]
    text = "; ".join(dict.fromkeys(str(e) for e in refusals)) or ended.why
    if not machine.members:
        return WorkerLost("no worker is left to update" + (f": {text}" if refusals else ""))
    return WeightUpdateError(f"the weight update was given up: {text}")
