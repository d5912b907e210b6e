"""The driver's side of weight updates. Each pool has one ``WeightChannel``.

Every rank has a separate socket for the channel's messages, so neither a full window nor a long
decode step delays them.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, Final

import msgspec

from ..config import check_timeout
from ..core.driver_listener import DriverListener
from ..core.manifest import check_manifest
from ..core.weight_update import Member
from ..errors import ProtocolError, SglrlError, UsageError, WeightUpdateError
from ..wire.calls import Ready
from ..wire.codec import Buffer, decode_from_rank
from ..wire.weights import (
    ModelDescription,
    RankAnswer,
    RankHello,
    RankSettings,
    Rejoin,
    Shard,
    TensorSpec,
)
from .catch_up import CatchUp
from .deadline import Deadline, turn
from .kept import Kept
from .peers import PeerCopies
from .questions import Questions
from .ranks import (
    DriverPort,
    Rank,
    Ranks,
    all_said_hello,
    check_alive,
    lost_error,
    with_version,
)
from .remote_source import RemoteSenders
from .sender_group import SenderGroup, check_settings
from .update_report import UpdateReport
from .update_request import Source, UpdateRequest
from .update_run import UpdateRun

logger = logging.getLogger("sglrl.weights")

_KEEP_SECONDS: Final = 120.0
"""Seconds for the hosts to keep the weights of an update."""
_UNKNOWN: Final = -1
"""The version of a worker that was away during an update."""


class WeightChannel(DriverListener):
    """Weight updates of one pool.

    Args:
        expel: ``expel(worker, reason)`` kills a worker's processes.
        is_up: ``is_up(worker)`` returns True if the worker has reported ready and is not lost.
        host: ``host(worker)`` returns the name of the worker's host.
        keeps: each host keeps the current weights in memory.

    Attributes:
        version: the version of the last update.
        versions: the version of every worker.
        on_updated: called after every update.
        on_version: called when ``version`` has changed.
        host: the address at which workers reach a sender in this process.
        workers_return: a rank whose connection breaks connects again, and says hello again.
    """

    def __init__(
        self,
        expel: Callable[[int, str], None],
        is_up: Callable[[int], bool] = lambda worker: True,
        *,
        host: Callable[[int], str] = lambda worker: "",
        keeps: bool = False,
    ) -> None:
        self._expel = expel
        self.version = 0
        self.versions: dict[int, int] = {}
        self.on_updated: Callable[[], None] = lambda: None
        self.on_version: set[Callable[[], None]] = set()
        self.host = "127.0.0.1"
        self.workers_return = False
        self._ranks = Ranks(is_up)
        self._questions = Questions(self._ranks)
        self._group = SenderGroup(host)
        self._senders = RemoteSenders(self, self._group)
        self._kept = Kept(self._ranks, self._questions, host)
        self._keeps = keeps
        self._keeping: asyncio.Task[None] | None = None
        self._asleep = False
        copies = PeerCopies(self._ranks, self._questions)
        self._catch_up = CatchUp(copies, self._kept, host, self._read_files)
        self._lock = asyncio.Lock()
        """Held by each update, copy and request for checksums."""
        self._run: UpdateRun | None = None
        self._description: ModelDescription | None = None
        self._fitting: tuple[Sequence[TensorSpec], bool] | None = None
        """The last manifest that was checked, and whether a partial manifest was allowed."""

    # --- for the pool -----------------------------------------------------------------------------

    def attach(self, driver: DriverPort, address: str) -> None:
        self._ranks.attach(driver)
        self._senders.attach(driver, address)
        driver.add_listener(self)

    def add_rank(self, worker: int, rank: int, identity: bytes) -> None:
        self._ranks.add((worker, rank), identity)
        self.versions[worker] = 0

    async def close(self) -> None:
        """Give up the running update and cancel all waits."""
        self._senders.close()
        if self._keeping is not None:
            self._keeping.cancel()
        if self._run is not None:
            self._run.close()
        self._questions.close()
        self._ranks.close()

    @property
    def address(self) -> str:
        """Return the address for ``sglrl.weights.Sender.connect``. It contains a secret."""
        return self._senders.address

    # --- questions --------------------------------------------------------------------------------

    async def describe(self, timeout: float | None) -> ModelDescription:
        """Return the tensors of the model. They never change, so engines are asked only once."""
        return await self._describe(_deadline(timeout))

    async def _describe(self, deadline: Deadline) -> ModelDescription:
        if self._description is None:
            self._description = await self._questions.describe(deadline)
        return self._description

    async def checksums(self, names: list[str], timeout: float | None) -> dict[Member, list[Shard]]:
        """Return checksums of live tensor shards by rank. Waits for a running update.

        Raises:
            UpdateInProgress: the running update does not end in time.
            WorkerLost: no worker is left.
        """
        deadline = _deadline(timeout)
        async with turn(self._lock, deadline):
            self._check_awake()
            return await self._questions.checksums(names, deadline)

    async def settings(self, timeout: float | None) -> RankSettings:
        """Return the settings of the first rank."""
        return await self._questions.settings(_deadline(timeout))

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
            self._check_awake()
            version = request.check(self.version)
            wanted = await self._describe(deadline)
            # The last await before the run starts, so no rank can be lost in between.
            ranks = await self._ranks.greeted(deadline)
            if request.partial and {t.name for t in wanted.tensors} <= {
                spec.name for spec in request.specs
            }:
                # The update contains all tensors, although its caller set ``partial``.
                request = msgspec.structs.replace(request, partial=False)
            if request.partial:
                ranks = with_version(ranks, self.versions, self.version)
            self._check_fit(wanted, request)
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

    async def join(self, source: Source, deadline: Deadline) -> float:
        """Form the group with ``source`` before the first update.

        It raises the errors of ``update``.

        Returns:
            The milliseconds that this took.
        """
        begun = time.perf_counter()
        async with turn(self._lock, deadline):
            ranks = await self._ranks.greeted(deadline)
            if not self._group.consists_of(source, ranks):
                check_settings(source.settings, ranks)
                request = UpdateRequest(specs=[], timeout=deadline.left)
                run = self._new_run(request, self.version, source, ranks, join_only=True)
                error = await self._until_ended(run)
                if error is not None:
                    raise error
        return (time.perf_counter() - begun) * 1e3

    def forget(self, source: Source) -> None:
        """Forget the group of a source that is closed."""
        self._group.forget(source)

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
            group=self._group,
            join_only=join_only,
            new_id=self._questions.new_id,
            send=self._ranks.send,
            expel=self._expel,
        )

    async def _until_ended(self, run: UpdateRun) -> SglrlError | None:
        """Run an update to its end and return its error, if any."""
        self._run = run
        try:
            return await run.until_ended()
        except asyncio.CancelledError:
            if run.is_done:
                # It was cancelled too late.
                self._record(run)
            raise
        finally:
            self._run = None

    def _record(self, run: UpdateRun) -> None:
        """Record a finished update: set the new versions and notify the listeners."""
        self.version = run.version
        for rank in run.left:
            # A lost rank may have a replacement, which does not have the new weights.
            if not rank.lost:
                self.versions[rank.worker] = run.version
        self._catch_up.updated(run.request)
        for listener in self.on_version:
            listener()
        # Deferred until the lock is free.
        asyncio.get_running_loop().call_soon(self.on_updated)
        self._keep_soon()

    # --- kept weights -----------------------------------------------------------------------------

    def kept_bytes(self, worker: int) -> int:
        """Return the bytes of its host's memory in which a worker keeps its weights."""
        return self._kept.sizes.get(worker, 0)

    def _keep_soon(self) -> None:
        """Let hosts keep the current weights, once no update or copy runs."""
        if self._keeps and (self._keeping is None or self._keeping.done()):
            self._keeping = asyncio.get_running_loop().create_task(self._keep())

    async def _keep(self) -> None:
        # Each update and each copy has a deadline, so this wait ends.
        async with self._lock:
            if self.version and not self._asleep:
                await self._kept.keep(self._holders(), self.version, Deadline(_KEEP_SECONDS))

    def _holders(self) -> list[Rank]:
        """Return the ranks that have the current weights."""
        return [rank for rank in self._ranks.up if self.versions[rank.worker] == self.version]

    # --- sleep ------------------------------------------------------------------------------------

    def at_rest(self, deadline: Deadline) -> AbstractAsyncContextManager[None]:
        """Return a context in which no update, copy or request for checksums runs: see ``turn``."""
        return turn(self._lock, deadline)

    def sleep(self, *, kept: bool) -> None:
        """The engines give the memory of their weights away. Call this ``at_rest``.

        Args:
            kept: ``wake`` brings the weights back. Otherwise the next update must have all of them.
        """
        self._asleep = True
        if not kept:
            self.versions = dict.fromkeys(self.versions, _UNKNOWN)

    def wake(self) -> None:
        """The engines have the memory of their weights again."""
        if self._asleep:
            self._asleep = False
            self.on_updated()

    def _check_awake(self) -> None:
        if self._asleep:
            raise UsageError('the weights are asleep: await client.wake(["weights"]) first')

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
        mine = self._ranks.of(worker)
        if not mine:
            raise lost_error(worker)
        # Each update and each copy has a deadline, so this wait ends.
        async with self._lock:
            check_alive(mine)
            if self.versions[worker] != self.version:
                if self._asleep:
                    return False
                deadline = Deadline(timeout)
                try:
                    async with deadline.limit() as limit:
                        if not await self._bring_weights(mine, deadline):
                            return False
                except TimeoutError:
                    if not limit.expired():
                        raise
                    raise WeightUpdateError(
                        f"worker {worker} did not get the weights within {deadline}"
                    ) from None
                check_alive(mine)
            self.versions[worker] = self.version
            serve()
            self._keep_soon()
            return True

    async def _bring_weights(self, mine: Sequence[Rank], deadline: Deadline) -> bool:
        await all_said_hello(mine, deadline)
        check_alive(mine)
        holders = [rank for rank in self._holders() if rank not in mine]
        return await self._catch_up.bring(mine, holders, self.version, deadline)

    async def _read_files(self, request: UpdateRequest, ranks: Sequence[Rank]) -> SglrlError | None:
        """Let ranks read the files of the last update. The other ranks have these weights."""
        return await self._until_ended(self._new_run(request, self.version, None, ranks))

    # --- events -----------------------------------------------------------------------------------

    def on_peer(self, identity: bytes, frames: Sequence[Buffer]) -> bool:
        rank = self._ranks.find(identity)
        if rank is None and not self._senders.knows(identity):
            return False
        try:
            message = decode_from_rank(frames[0])
        except ProtocolError as error:
            logger.debug("a message of the weight channel: %s", error)
            return False
        if rank is None:
            return self._senders.receive(identity, message)
        match message:
            case RankHello():
                return self._on_hello(rank, message)
            case RankAnswer():
                return self._questions.answered(rank, message) or (
                    self._run is not None and self._run.rank_answered(rank, message)
                )
            case _:
                return False

    def _on_hello(self, rank: Rank, hello: RankHello) -> bool:
        if not self.workers_return and rank.hello.done():
            return False
        if hello.dirty:
            self._expel(rank.worker, "its connection broke while its weights changed")
        elif not rank.hello.done():
            rank.connection = hello.connection
            rank.hello.set_result(hello.settings)
        elif hello.connection <= rank.connection:
            # The answer to ``Rejoin``. The rank had already said hello on this connection.
            return rank.returns
        elif self._lock.locked():
            self._expel(rank.worker, "its connection broke during a weight update")
        else:
            # Its worker serves calls, on another connection.
            self._return(rank.worker)
        return True

    def on_lost(self, worker: int) -> None:
        self._lose(worker)

    def _lose(self, worker: int) -> list[Rank]:
        lost = self._ranks.lose(worker)
        self._group.lost(lost)
        self._questions.lost(lost)
        if self._run is not None:
            self._run.lost(worker, lost)
        return lost

    def on_away(self, worker: int) -> None:
        for rank in self._lose(worker):
            self._ranks.add(rank.member, rank.identity, returns=True)
            if self._lock.locked():
                # An update may have become live there, or not.
                self.versions[worker] = _UNKNOWN

    def on_ready(self, worker: int, ready: Ready) -> None:
        self._rejoin(worker)

    def _return(self, worker: int) -> None:
        """Use new records for the ranks of a worker that has connected again."""
        self.on_away(worker)
        self._rejoin(worker)

    def _rejoin(self, worker: int) -> None:
        """Ask the ranks of a worker that was away to say hello, unless they have done so."""
        for rank in self._ranks.of(worker):
            if rank.returns and not rank.hello.done():
                self._ranks.send(rank, Rejoin(self._questions.new_id()))

    def on_connection_broken(self) -> None:
        self._senders.find_lost()

    def sender_answered(self, source: Source, answer: RankAnswer) -> bool:
        """Handle an answer of a source. Return False if the answer was not requested."""
        return self._run is not None and self._run.sender_answered(source, answer)

    def sender_lost(self, source: Source) -> None:
        """Handle the loss of a source in another process."""
        if self._run is not None:
            self._run.sender_lost(source)


def _deadline(timeout: Any) -> Deadline:
    """Return the deadline of a timeout. Raises ``UsageError`` if the timeout is not valid."""
    return Deadline(check_timeout(timeout))
