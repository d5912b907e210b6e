"""The driver's side of weight updates. It executes the effects of ``core.weight_update``.

The channel sends messages and waits for answers. ``core.weight_update`` decides the next step. Each
pool has one ``WeightChannel``. Every rank has a separate socket for the channel's messages, so
neither a full window nor a long decode step delays them.
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
"""The minimum timeout of the commit, even if the update's timeout is shorter.

A late rank in another phase makes the channel give up the update. A late rank in the commit is
expelled.
"""

_described = msgspec.msgpack.Decoder(ModelDescription)
_prepared = msgspec.msgpack.Decoder(Prepared)
_sent = msgspec.msgpack.Decoder(SentStage)
_committed = msgspec.msgpack.Decoder(Committed)
_pieces = msgspec.msgpack.Decoder(list[Shard])
_dirty = msgspec.msgpack.Decoder(bool)

_MOST_SENDERS = 16
"""The maximum number of senders in other processes.

The channel keeps each sender until the sender reports ``SenderClosed``. A crashed sender never
reports it.
"""


class _Question(NamedTuple):
    """A message to a rank that awaits its answer.

    Attributes:
        needs: the rank that must answer, and the rank that needs the answer, if any.
    """

    answer: asyncio.Future[RankAnswer]
    needs: tuple[Rank, ...]


class _Run:
    """One running update.

    Attributes:
        id: the id of the messages of the current attempt. Each attempt has its own id, so a late
            answer to an earlier attempt is not mistaken for an answer to the current one.
        ranks: the process of each member.
    """

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
        """Return the processes that still take part."""
        return frozenset(self.ranks[member] for member in self.machine.members)

    @property
    def overwriting(self) -> bool:
        """True if a worker may have overwritten some of its live weights.

        This is a worker without room for a second copy. If it does not receive the other weights,
        it must be killed.
        """
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

    Args:
        expel: ``expel(worker, reason)`` kills a worker's processes.
        is_up: ``is_up(worker)`` returns True if the worker has reported ready and is not lost.

    Attributes:
        version: the version of the last update.
        versions: the version of every worker.
        on_updated: called after every update.
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
        """Called when ``version`` has changed."""
        self._folder: UpdateRequest | None = None
        """The request of the last update, if it sent all tensors and read them from files."""
        self.version = 0
        self.versions: dict[int, int] = {}
        self._driver: DriverPort | None = None
        self._address = ""
        self._token = secrets.token_hex(16)
        self._ranks: dict[Member, Rank] = {}
        """The ranks that are not lost."""
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
        """The last manifest that was checked, and whether a partial manifest was allowed."""

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
        """Give up the running update and cancel all waits."""
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
        """Return the address for ``sglrl.weights.Sender.connect``. It contains a secret."""
        return f"{self._address}#{self._token}"

    @property
    def _up(self) -> list[Rank]:
        """Return every rank of every worker that is up.

        A worker that is still starting gets the weights once it is up: see ``sync``.
        """
        return [rank for (worker, _), rank in sorted(self._ranks.items()) if self._is_up(worker)]

    # --- questions --------------------------------------------------------------------------------

    async def describe(self, timeout: float | None) -> ModelDescription:
        """Return the tensors of the model. They never change, so engines are asked only once."""
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
        """Return checksums of live tensor shards by rank. Waits for a running update.

        Raises:
            UpdateInProgress: the running update does not end in time.
            WorkerLost: no worker is left.
        """
        deadline = _deadline(timeout)
        async with turn(self._lock, deadline):
            ranks = await self._greeted(deadline)
            found: dict[Member, list[Shard]] = {}

            async def ask(rank: Rank) -> None:
                # A lost worker has no weights, so it is left out.
                with contextlib.suppress(WorkerLost):
                    answer = await self._question(rank, lambda id_: Checksums(id_, names), deadline)
                    found[rank.member] = body_of(_pieces, answer)

            await asyncio.gather(*map(ask, ranks))
            if not found:
                raise WorkerLost("no worker is left that could be asked")
            return found

    async def settings(self, timeout: float | None) -> RankSettings:
        """Return the settings of the first rank."""
        ranks = await self._greeted(_deadline(timeout))
        if not ranks:
            raise WorkerLost("no worker is left whose settings these would be")
        return ranks[0].settings

    async def _greeted(self, deadline: Deadline) -> list[Rank]:
        """Wait until a worker is up and each of its ranks has sent ``RankHello``; return the ranks.

        Raises:
            UsageError: the engine has no weights to update.
            WorkerLost: no worker is left.
            WeightUpdateError: no worker was up, or a rank sent no ``RankHello``, in time.
        """
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
        """Wait until each rank has sent ``RankHello`` or is lost.

        Raises:
            WeightUpdateError: a rank did neither in time.
        """
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
        """Send a message to ``rank`` and return the answer.

        Args:
            make: returns the message for an id.
            other: the rank that needs the answer, if any.

        Raises:
            WorkerLost: ``rank`` or ``other`` is lost before the answer arrives.
            DeadlineExceeded: no answer arrived in time.
            SglrlError: the error that the rank reported.
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
        """Wait for earlier updates, then run one update to its end.

        If the caller is cancelled, the update is given up. But if live weights are already being
        overwritten, the update is finished first. They are overwritten in the commit, and in mode
        "bucketed" also in the stage.

        Args:
            source: the sender of the tensors; None: the workers read files.
            load: called after all checks, before the first message of the update.

        Raises:
            UpdateInProgress, UsageError, InvalidWeights, SettingsMismatch: the update was not
                started.
            WeightUpdateError, WorkerLost: the update was given up. The live workers have the old
                version.
        """
        request.check(self.version)
        deadline = Deadline(request.timeout, request.begun)
        async with turn(self._lock, deadline, wait=request.wait):
            version = request.check(self.version)
            wanted = await self._describe(deadline)
            # The last await before the run starts, so no rank can be lost in between.
            ranks = await self._greeted(deadline)
            if request.partial and {t.name for t in wanted.tensors} <= {
                spec.name for spec in request.specs
            }:
                # The update contains all tensors, although its caller set ``partial``.
                request = msgspec.structs.replace(request, partial=False)
            if request.partial:
                # A worker with older weights would get a mix of two policies.
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
        """Form the group with ``source`` before the first update.

        It raises the errors of ``update``.

        Returns:
            The milliseconds that this took.
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

    # --- new workers ------------------------------------------------------------------------------

    def must_sync(self, worker: int) -> bool:
        """Return True if a worker that is up must not serve before ``sync``."""
        if worker not in self.versions:
            return False
        return self.versions[worker] != self.version or self._lock.locked()

    async def sync(self, worker: int, timeout: float, serve: Callable[[], None]) -> bool:
        """Send the current weights to a worker that is up, then call ``serve``.

        The weights come from another worker, or again from the files of the last update. ``serve``
        is called before any other update starts.

        Args:
            worker: the index of the worker. Only the current process of the worker gets the
                weights: if it is lost, its replacement is not touched.
            timeout: in seconds. It starts when all earlier updates and copies have ended.

        Returns:
            False if the current weights are not available. The worker gets the weights of the next
            update.

        Raises:
            WeightUpdateError: the copy failed or took too long. The worker has weights of no
                version.
            WorkerLost: the worker is lost.
        """
        mine = [rank for rank in self._ranks.values() if rank.worker == worker]
        if not mine:
            raise lost_error(worker)
        # Each update and each copy has a deadline, so this wait ends.
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
        """Send the current weights to a worker. The caller holds the lock.

        Returns:
            False if the current weights are not available.

        Raises:
            WorkerLost: the worker is lost. Raised as soon as that happens.
            SglrlError: the error of the last copy, if every copy failed and there are no files.
        """
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
            # Half of the time, so that a peer that hangs leaves time for the other peers.
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
            # The files are the cause, not the worker: a replacement could not read them either.
            return False
        if failure is not None:
            raise failure
        return False

    def _is_there(self, request: UpdateRequest) -> bool:
        """Return True if the files of the request exist and have not changed since."""
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
        """Run an update until it has ended.

        If the caller is cancelled, the update is first given up, or finished if it is too late to
        give it up.
        """
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
        """Record a finished update: set the new versions and notify the listeners."""
        self.version = run.version
        for rank in run.left:
            # A lost rank may have a replacement, which does not have the new weights.
            if not rank.lost:
                self.versions[rank.worker] = run.version
        self._folder = run.request if run.request.folder and not run.request.partial else None
        self._joined_after(run)
        for listener in self.on_version:
            listener()
        # Deferred until the lock is free. Also done for an update that was cancelled too late.
        asyncio.get_running_loop().call_soon(self.on_updated)

    def _joined_after(self, run: _Run) -> None:
        """Record which source and ranks form the current group after ``run``."""
        if run.source is None:
            return
        if run.machine.joined:
            self._joined = (run.source, run.left)
        elif run.group or (self._joined is not None and self._joined[0] is run.source):
            # A rank that joins a group leaves its previous group, of any source.
            self._joined = None

    def forget(self, source: Source) -> None:
        """Forget the group of a source that is closed."""
        if self._joined is not None and self._joined[0] is source:
            self._joined = None

    def sender_answered(self, source: Source, answer: RankAnswer) -> bool:
        """Handle an answer of a source. Return False if the answer was not requested."""
        run = self._run
        return run is not None and run.source is source and self._answered(SENDER, answer)

    # --- inside -----------------------------------------------------------------------------------

    def _check_fit(self, wanted: ModelDescription, request: UpdateRequest) -> None:
        """Check the manifest of a request, unless it is the manifest of the last check.

        A sender passes the same list object while its manifest does not change.
        """
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
        # An effect may add further effects.
        while machine.outbox:
            effects, machine.outbox = machine.outbox, []
            for effect in effects:
                try:
                    self._do(run, effect)
                except Exception as error:
                    # The other effects and the timer must still run.
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
        """Return the mode of one member: "full" or "bucketed".

        Either all ranks of a worker pause, or none does. The sender gets "bucketed" if any worker
        pauses.
        """
        found = {
            run.bodies[rank, PREPARE].mode
            for rank in run.machine.members
            if member == SENDER or rank[0] == member[0]
        }
        return "bucketed" if "bucketed" in found else "full"

    def _form(self, run: _Run) -> dict[Member, Join]:
        """Return the ``Join`` message of each member, which assigns its rank.

        Members on the sender's GPU get no rank: they read the sender's memory.
        """
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
        """Accept a sender in another process. Return False if there are too many busy senders."""
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
        """Send a message to a sender in another process. If the sender is lost, end its update."""
        if self._driver is not None and self._driver.send_to_peer(sender.identity, encode(message)):
            return
        self._senders.pop(sender.identity, None)
        if self._run is not None and self._run.source is sender:
            error = WeightUpdateError("the sender is gone")
            self._run.machine.lost_sender(error, time.monotonic())

    def on_connection_broken(self) -> None:
        for sender in list(self._senders.values()):
            # The message has no effect, because the ids of proposals start at 1. Sending it finds
            # lost senders.
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
        """Handle an answer of a rank. Return False if the answer was not requested."""
        run = self._run
        asked = run is not None and run.ranks.get(rank.member) is rank
        return asked and self._answered(rank.member, answer)

    def _answered(self, member: Member, answer: RankAnswer) -> bool:
        """Pass an answer to the running update. Return False if the answer was not requested."""
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
    """Return the deadline of a timeout. Raises ``UsageError`` if the timeout is not valid."""
    return Deadline(check_timeout(timeout))


def _check_alive(ranks: Sequence[Rank]) -> None:
    """Raise ``WorkerLost`` if the worker of these ranks is lost."""
    for rank in ranks:
        rank.check()


def _failure(ended: Ended, machine: WeightUpdate) -> SglrlError:
    """Return the error that the caller gets for an update that was given up."""
    refusals = [error for _, error in ended.errors]
    if ended.why == "refused":
        return refusals[0]
    if ended.why == "broken":
        # Found when the values were read. The other errors are consequences.
        for error in refusals:
            if isinstance(error, InvalidWeights):
                return error
    text = "; ".join(dict.fromkeys(str(e) for e in refusals)) or ended.why
    if not machine.members:
        return WorkerLost("no worker is left to update" + (f": {text}" if refusals else ""))
    return WeightUpdateError(f"the weight update was given up: {text}")
