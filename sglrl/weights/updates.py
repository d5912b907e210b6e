"""Run the updates of a pool one at a time. Repeat an update if lost workers would undo it."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from typing import Final

import msgspec

from ..core.manifest import ManifestCheck, is_whole, known_after
from ..core.weight_update import Member
from ..errors import SglrlError, WeightUpdateError, WorkerLost
from ..wire.weights import ModelDescription, RankAnswer, RankSettings, Shard
from .catch_up import CatchUp
from .deadline import Deadline, turn
from .kept import Kept
from .questions import Questions
from .ranks import Rank, Ranks, all_said_hello, check_alive
from .sender_group import SenderGroup, check_settings
from .update_report import UpdateReport
from .update_request import Source, UpdateRequest
from .update_run import UpdateRun
from .versions import Versions

logger = logging.getLogger("sglrl.weights")

_MAX_ATTEMPTS: Final = 3
"""An update fails when this number of its attempts have lost all workers."""


class Updates:
    """Runs updates, and brings single workers to the current version.

    Attributes:
        run: the running update, or None.
        group: the current group of a sender and ranks.
        versions: the version of each worker's weights.
    """

    def __init__(self, ranks: Ranks, versions: Versions, questions: Questions, kept: Kept) -> None:
        self.run: UpdateRun | None = None
        self.group = SenderGroup(ranks.host)
        self.versions = versions
        self._ranks = ranks
        self._questions = questions
        self._kept = kept
        self._catch_up = CatchUp(questions, kept, ranks.host, self._read_files)
        self._description: ModelDescription | None = None
        self._fits = ManifestCheck()

    def close(self) -> None:
        """Give up the running update, the running copy and all questions."""
        self._kept.interrupt()
        if self.run is not None:
            self.run.close()
        self._questions.close()

    # --- questions of senders ---------------------------------------------------------------------

    async def settings(self, deadline: Deadline) -> RankSettings:
        """Return the settings that the first rank has sent in its ``RankHello``."""
        ranks = await self._ranks.greeted(deadline)
        if not ranks:
            raise WorkerLost("no worker is left")
        return ranks[0].settings

    async def describe(self, deadline: Deadline) -> ModelDescription:
        """Return the tensors of the model. The result is cached until an update replaces it."""
        if self._description is None:
            self._description = await self._questions.describe(deadline)
        return self._description

    async def checksums(self, names: list[str], deadline: Deadline) -> dict[Member, list[Shard]]:
        """Return checksums of live tensor shards by rank. Wait for a running update first.

        Raises:
            UpdateInProgress: the running update does not end in time.
            WorkerLost: no worker is left.
        """
        async with turn(self.versions.lock, deadline):
            self.versions.check_awake()
            return await self._questions.checksums(names, deadline)

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

        If the caller is cancelled, the update is given up. If a worker already overwrites its live
        weights, the update is finished first. Workers do so in the commit, and in mode "bucketed"
        also in the stage.

        Args:
            source: the sender of the tensors. None if the workers read files. The source can send
                the tensors again until this method returns.
            load: called after all checks and before the first message of the update.

        Raises:
            UpdateInProgress, UsageError, InvalidWeights, SettingsMismatch: the update was not
                started.
            WeightUpdateError: the update was given up. The live workers have the old version.
            WorkerLost: the update was given up, because no worker is left, or because all workers
                were lost several times.
        """
        request.check(self.versions.current)
        deadline = Deadline(request.timeout, request.begun)
        self._kept.interrupt()
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
            self._kept.begin()

    async def _until_safe(self, request: UpdateRequest) -> None:
        self._kept.begin()
        if not request.partial:
            await self._kept.ended()

    def _is_available(self, version: int) -> bool:
        """Return True if a worker, a host or files have this version, or if it is outdated."""
        return (
            version < self.versions.current
            or bool(self.versions.holders())
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
            done: the report of an earlier, successful run of the same update, or None. All workers
                with the new version were lost after that run.
        """
        async with turn(self.versions.lock, deadline, wait=request.wait):
            self.versions.check_awake()
            if done is not None and self._is_available(done.version):
                return done
            version = request.check(self.versions.current) if done is None else done.version
            wanted = await self.describe(deadline)
            # This is the last await before the run starts, so no rank can be lost in between.
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
            self.versions.reports.append(report)
            logger.info("%s", report)
            return report

    async def _with_version(self, ranks: Sequence[Rank], deadline: Deadline) -> list[Rank]:
        """Return the ranks that have the current version. Only they receive a partial update.

        A worker with older weights would get a mix of two policies. If no worker has the current
        version, a worker is first brought to this version, like a replacement.

        Raises:
            WeightUpdateError: no worker can get the weights of the current version.
        """
        for worker in sorted({rank.worker for rank in ranks}):
            if self.versions.holders():
                break
            await self.bring([rank for rank in ranks if rank.worker == worker], deadline)
        current = [rank for rank in self.versions.holders() if rank in ranks]
        if ranks and not current:
            raise WeightUpdateError(
                f"no worker has the weights of version {self.versions.current}, so a part of the "
                "weights is not enough; send all of them"
            )
        return current

    async def join(self, source: Source, deadline: Deadline) -> float:
        """Form the group with ``source`` before the first update.

        This method raises the errors of ``update``.

        Returns:
            The duration in milliseconds.
        """
        begun = time.perf_counter()
        async with turn(self.versions.lock, deadline):
            ranks = await self._ranks.greeted(deadline)
            if not self.group.consists_of(source, ranks):
                check_settings(source.settings, ranks)
                request = UpdateRequest(specs=[], timeout=deadline.left)
                run = self._new_run(request, self.versions.current, source, ranks, join_only=True)
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
            pool=self._ranks,
            group=self.group,
            join_only=join_only,
        )

    async def _until_ended(self, run: UpdateRun) -> SglrlError | None:
        """Run an update to its end and return its error, if any."""
        self.run = run
        try:
            return await run.until_ended()
        except asyncio.CancelledError:
            if run.is_done:
                # The cancellation came too late.
                self._record(run)
            raise
        finally:
            self.run = None

    def _record(self, run: UpdateRun) -> None:
        """Record a finished update: set the new versions and notify the listeners."""
        self.versions.current, self.versions.forgotten = run.version, False
        if self._description is not None and not run.request.partial:
            self._description = known_after(self._description, run.request.specs)
        if run.request.same_version:
            # The other workers and the copies of the hosts lack this part.
            self.versions.forget()
            self._kept.forget_all()
        for rank in run.left:
            # A lost rank may have a replacement, which does not have the new weights.
            if not rank.lost:
                self.versions.of[rank.worker] = run.version
        self._catch_up.updated(run.request)
        self.versions.updated()

    # --- events -----------------------------------------------------------------------------------

    def rank_answered(self, rank: Rank, answer: RankAnswer) -> bool:
        """Handle an answer of a rank. Return False if the answer was not requested."""
        return (
            self._questions.answered(rank, answer)
            or (self.run is not None and self.run.rank_answered(rank, answer))
            or self._is_late(answer)
        )

    def sender_answered(self, source: Source, answer: RankAnswer) -> bool:
        """Handle an answer of a source. Return False if the answer was not requested."""
        in_run = self.run is not None and self.run.sender_answered(source, answer)
        return in_run or self._is_late(answer)

    def _is_late(self, answer: RankAnswer) -> bool:
        """Return True for an answer to a finished request, for example of a cancelled update."""
        current = self.run is not None and answer.id == self.run.id
        return not current and self._questions.is_late(answer.id)

    def lost(self, worker: int, ranks: Sequence[Rank]) -> None:
        """Handle the loss of a worker that had these ranks."""
        self.group.lost(ranks)
        self._questions.lost(ranks)
        if self.run is not None:
            self.run.lost(worker, ranks)
        # The loss may leave only one worker with the current weights.
        self._kept.begin()

    def sender_lost(self, source: Source) -> None:
        """Handle the loss of a source in another process."""
        if self.run is not None:
            self.run.sender_lost(source)

    # --- single workers ---------------------------------------------------------------------------

    async def bring(self, mine: Sequence[Rank], deadline: Deadline) -> bool:
        """Bring a worker to the current version. The caller holds the lock of updates.

        Args:
            mine: all ranks of the worker.

        Returns:
            False if the current weights are not available.

        Raises:
            WorkerLost: the worker is lost.
            SglrlError: the copy failed. The weights of the worker then have no version.
        """
        await all_said_hello(mine, deadline)
        check_alive(mine)
        holders = [rank for rank in self.versions.holders() if rank not in mine]
        current = self.versions.current
        if not await self._catch_up.bring(mine, holders, current, deadline):
            return False
        check_alive(mine)
        self.versions.of[mine[0].worker] = current
        return True

    async def _read_files(self, request: UpdateRequest, ranks: Sequence[Rank]) -> SglrlError | None:
        """Let ranks read the files of the last update. Return the error, or None."""
        run = self._new_run(request, self.versions.current, None, ranks)
        return await self._until_ended(run)
