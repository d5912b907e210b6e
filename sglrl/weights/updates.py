"""Run the updates of a pool, one at a time, until the loss of a worker cannot undo them."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from typing import Final

import msgspec

from ..core.manifest import ManifestCheck, is_whole, known_after
from ..errors import SglrlError, WeightUpdateError, WorkerLost
from ..wire.weights import ModelDescription
from .catch_up import CatchUp
from .deadline import Deadline, turn
from .kept import Kept
from .peers import PeerCopies
from .questions import Questions
from .ranks import Rank, Ranks, all_said_hello, check_alive
from .safekeeping import Safekeeping
from .sender_group import SenderGroup, check_settings
from .update_report import UpdateReport
from .update_request import Source, UpdateRequest
from .update_run import UpdateRun
from .versions import UNKNOWN, Versions

logger = logging.getLogger("sglrl.weights")

_MAX_ATTEMPTS: Final = 3
"""Number of times that an update may lose all workers before it is given up."""


class Updates:
    """Runs updates, and brings single workers to the current version.

    Args:
        host: ``host(worker)`` returns the name of the worker's host.
        expel: ``expel(worker, reason)`` kills a worker's processes.
        on_done: called after every update, while its lock is held.

    Attributes:
        run: the update that runs.
        group: the current group of a sender and ranks.
    """

    def __init__(
        self,
        versions: Versions,
        ranks: Ranks,
        questions: Questions,
        kept: Kept,
        safekeeping: Safekeeping,
        *,
        host: Callable[[int], str],
        expel: Callable[[int, str], None],
        on_done: Callable[[], None],
    ) -> None:
        self.run: UpdateRun | None = None
        self.group = SenderGroup(host)
        self._versions = versions
        self._ranks = ranks
        self._questions = questions
        self._kept = kept
        self._safekeeping = safekeeping
        self._expel = expel
        self._on_done = on_done
        copies = PeerCopies(ranks, questions)
        self._catch_up = CatchUp(copies, kept, host, self._read_files)
        self._description: ModelDescription | None = None
        self._fits = ManifestCheck()

    async def describe(self, deadline: Deadline) -> ModelDescription:
        """Return the tensors of the model. Engines are asked once; see ``known_after``."""
        if self._description is None:
            self._description = await self._questions.describe(deadline)
        return self._description

    # --- updates ----------------------------------------------------------------------------------

    async def update(
        self,
        request: UpdateRequest,
        source: Source | None,
        load: Callable[[], None] = lambda: None,
    ) -> UpdateReport:
        """Wait for earlier updates, then run one update until a lost worker cannot undo it.

        The weights of an update are safe when two workers have them, or a host keeps them. If all
        workers are lost before that, the source sends the weights to the first replacement. A
        partial update does not wait for a host, because other parts may follow at once.

        If the caller is cancelled, the update is given up. But if live weights are already being
        overwritten, the update is finished first. They are overwritten in the commit, and in mode
        "bucketed" also in the stage.

        Args:
            source: the sender of the tensors; None: the workers read files. It can send them again
                until this method returns.
            load: called after all checks, before the first message of the update.

        Raises:
            UpdateInProgress, UsageError, InvalidWeights, SettingsMismatch: the update was not
                started.
            WeightUpdateError: the update was given up. The live workers have the old version.
            WorkerLost: the update was given up, because no worker is left, or because it has lost
                all workers several times.
        """
        request.check(self._versions.current)
        deadline = Deadline(request.timeout, request.begun)
        self._safekeeping.interrupt()
        attempts = 1
        report: UpdateReport | None = None
        try:
            while True:
                try:
                    report = await self._update(request, source, load, deadline, report)
                except WorkerLost:
                    if attempts == _MAX_ATTEMPTS:
                        raise
                    attempts += 1
                else:
                    await self._until_safe(request)
                    if request.partial or self._is_available(report.version):
                        return report
                logger.warning("a weight update lost all workers; it waits for a replacement")
                await self._ranks.some_up()
                request = msgspec.structs.replace(request, wait=True)
                deadline = Deadline(request.timeout)
        finally:
            self._safekeeping.begin()

    async def _until_safe(self, request: UpdateRequest) -> None:
        self._safekeeping.begin()
        if not request.partial:
            await self._safekeeping.ended()

    def _is_available(self, version: int) -> bool:
        """Return whether a worker or a host has this version, or a newer one has replaced it."""
        return (
            version < self._versions.current
            or bool(self._versions.holders())
            or self._catch_up.has(version)
        )

    async def _update(
        self,
        request: UpdateRequest,
        source: Source | None,
        load: Callable[[], None],
        deadline: Deadline,
        done: UpdateReport | None,
    ) -> UpdateReport:
        """Run one update once.

        Args:
            done: the report of the same update if it was done before, but no worker has its version
                any more.
        """
        async with turn(self._versions.lock, deadline, wait=request.wait):
            self._versions.check_awake()
            if done is not None and self._is_available(done.version):
                return done
            version = request.check(self._versions.current) if done is None else done.version
            wanted = await self.describe(deadline)
            # The last await before the run starts, so no rank can be lost in between.
            ranks = await self._ranks.greeted(deadline)
            if request.partial and is_whole(wanted, request.specs):
                # The update contains all tensors, although its caller set ``partial``.
                request = msgspec.structs.replace(request, partial=False)
            if request.partial:
                ranks = await self._with_version(ranks, deadline)
            self._fits.check(wanted, request.specs, partial=request.partial)
            if source is not None:
                check_settings(source.settings, ranks)
            load()
            run = self._new_run(request, version, source, ranks)
            error = await self._until_ended(run)
            if error is not None:
                raise error
            self._record(run)
            report = run.report()
            logger.info("%s", report)
            return report

    async def _with_version(self, ranks: Sequence[Rank], deadline: Deadline) -> list[Rank]:
        """Return the ranks that a partial update may go to: the ones with the current version.

        A worker with older weights would get a mix of two policies. If no worker has the current
        version, the workers first get it as a replacement does.

        Raises:
            WeightUpdateError: no worker can get the weights of the current version.
        """
        for worker in sorted({rank.worker for rank in ranks}):
            if self._versions.holders():
                break
            await self.bring([rank for rank in ranks if rank.worker == worker], deadline)
        current = [rank for rank in self._versions.holders() if rank in ranks]
        if ranks and not current:
            raise WeightUpdateError(
                f"no worker has the weights of version {self._versions.current}, so a part of the "
                "weights is not enough; send all of them"
            )
        return current

    async def join(self, source: Source, deadline: Deadline) -> float:
        """Form the group with ``source`` before the first update.

        It raises the errors of ``update``.

        Returns:
            The milliseconds that this took.
        """
        begun = time.perf_counter()
        async with turn(self._versions.lock, deadline):
            ranks = await self._ranks.greeted(deadline)
            if not self.group.consists_of(source, ranks):
                check_settings(source.settings, ranks)
                request = UpdateRequest(specs=[], timeout=deadline.left)
                run = self._new_run(request, self._versions.current, source, ranks, join_only=True)
                error = await self._until_ended(run)
                if error is not None:
                    raise error
        return (time.perf_counter() - begun) * 1e3

    def _new_run(
        self,
        request: UpdateRequest,
        version: int,
        source: Source | None,
        ranks: Sequence[Rank],
        *,
        join_only: bool = False,
    ) -> UpdateRun:
        return UpdateRun(
            request,
            version,
            source,
            ranks,
            group=self.group,
            join_only=join_only,
            new_id=self._questions.new_id,
            send=self._ranks.send,
            expel=self._expel,
        )

    async def _until_ended(self, run: UpdateRun) -> SglrlError | None:
        """Run an update to its end and return its error, if any."""
        self.run = run
        try:
            return await run.until_ended()
        except asyncio.CancelledError:
            if run.is_done:
                # It was cancelled too late.
                self._record(run)
            raise
        finally:
            self.run = None

    def _record(self, run: UpdateRun) -> None:
        """Record a finished update: set the new versions and notify the listeners."""
        self._versions.current, self._versions.forgotten = run.version, False
        if self._description is not None and not run.request.partial:
            self._description = known_after(self._description, run.request.specs)
        if run.request.same_version:
            # The other workers and the hosts lack this part.
            self._versions.of = dict.fromkeys(self._versions.of, UNKNOWN)
            self._kept.forget_all()
        for rank in run.left:
            # A lost rank may have a replacement, which does not have the new weights.
            if not rank.lost:
                self._versions.of[rank.worker] = run.version
        self._catch_up.updated(run.request)
        self._on_done()

    # --- single workers ---------------------------------------------------------------------------

    async def bring(self, mine: Sequence[Rank], deadline: Deadline) -> bool:
        """Bring a worker to the current version. The caller holds the lock of updates.

        Args:
            mine: all ranks of the worker.

        Returns:
            False if the current weights are not available.

        Raises:
            WorkerLost: the worker is lost.
            SglrlError: the copy failed. The worker has weights of no version.
        """
        await all_said_hello(mine, deadline)
        check_alive(mine)
        holders = [rank for rank in self._versions.holders() if rank not in mine]
        current = self._versions.current
        if not await self._catch_up.bring(mine, holders, current, deadline):
            return False
        check_alive(mine)
        self._versions.of[mine[0].worker] = current
        return True

    async def _read_files(self, request: UpdateRequest, ranks: Sequence[Rank]) -> SglrlError | None:
        """Let ranks read the files of the last update. The other ranks have these weights."""
        run = self._new_run(request, self._versions.current, None, ranks)
        return await self._until_ended(run)
