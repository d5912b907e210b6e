"""The driver's side of weight updates. Each pool has one ``WeightChannel``.

Every rank has a separate socket for the channel's messages, so neither a full window nor a long
decode step delays them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from ..config import check_timeout
from ..core.driver_listener import DriverListener
from ..core.weight_update import Member
from ..errors import ProtocolError, WeightUpdateError
from ..wire.calls import Ready
from ..wire.codec import Buffer, decode_from_rank
from ..wire.weights import ModelDescription, RankAnswer, RankHello, Rejoin, Shard
from .deadline import Deadline
from .kept import KeepMode, Kept
from .questions import Questions
from .ranks import DriverPort, Rank, Ranks, check_alive, lost_error
from .remote_source import RemoteSenders
from .updates import Updates
from .versions import UNKNOWN, Versions

logger = logging.getLogger("sglrl.weights")


class WeightChannel(DriverListener):
    """The ranks of a pool that take part in weight updates, and the weights that they have.

    Args:
        expel: ``expel(worker, reason)`` kills a worker's processes.
        is_up: ``is_up(worker)`` returns True if the worker has reported ready and is not lost.
        host: ``host(worker)`` returns the name of the worker's host.
        keep: which hosts keep the current weights in memory, as in ``Kept``.

    Attributes:
        updates: runs updates, and answers the questions of senders.
        versions: the version of each worker's weights.
        kept: copies of the current weights in the memory of hosts.
        on_version: functions to call after a change of ``version`` or of a LoRA adapter's version.
        host: the address at which workers reach a sender in this process.
        workers_return: whether a rank connects again after a break, and sends ``RankHello`` again.
    """

    def __init__(
        self,
        expel: Callable[[int, str], None],
        is_up: Callable[[int], bool] = lambda worker: True,
        *,
        host: Callable[[int], str] = lambda worker: "",
        keep: KeepMode = None,
    ) -> None:
        self.host = "127.0.0.1"
        self.workers_return = False
        self._ranks = Ranks(expel, is_up, host)
        self.versions = Versions(self._ranks)
        self.on_version = self.versions.on_version
        questions = Questions(self._ranks)
        self.kept = Kept(keep, self.versions, questions, host)
        self.updates = Updates(self._ranks, self.versions, questions, self.kept)
        self._senders = RemoteSenders(self.updates)

    # --- for the pool -----------------------------------------------------------------------------

    def attach(self, driver: DriverPort, address: str) -> None:
        self._ranks.attach(driver)
        self._senders.attach(driver, address)
        driver.add_listener(self)

    def add_rank(self, worker: int, rank: int, identity: bytes) -> None:
        self._ranks.add((worker, rank), identity)
        self.versions.of[worker] = 0

    async def close(self) -> None:
        """Give up the running update, and cancel all waits."""
        self._senders.close()
        self.updates.close()
        self._ranks.close()

    # --- for clients ------------------------------------------------------------------------------

    @property
    def address(self) -> str:
        """Return the address for ``sglrl.weights.Sender.connect``. It contains a secret."""
        return self._senders.address

    @property
    def version(self) -> int:
        """Return the version of the last update."""
        return self.versions.current

    async def describe(self, timeout: float | None) -> ModelDescription:
        """Return the tensors of the model; see ``Updates.describe``."""
        return await self.updates.describe(Deadline(check_timeout(timeout)))

    async def checksums(self, names: list[str], timeout: float | None) -> dict[Member, list[Shard]]:
        """Return checksums of live tensor shards by rank; see ``Updates.checksums``."""
        return await self.updates.checksums(names, Deadline(check_timeout(timeout)))

    # --- new workers ------------------------------------------------------------------------------

    def must_sync(self, worker: int) -> bool:
        """Return True if a worker that is up must not serve before ``sync``."""
        if worker not in self.versions.of:
            return False
        return not self.versions.is_current(worker) or self.versions.lock.locked()

    async def sync(self, worker: int, timeout: float, serve: Callable[[], None]) -> bool:
        """Send the current weights to a worker that is up, then call ``serve``.

        The weights come from another worker, from the memory of a host, or from the files of the
        last update. ``serve`` is called before any other update starts.

        Args:
            worker: the index of the worker. Only the current process of the worker gets the
                weights. If the process is lost, its replacement is not touched.
            timeout: the limit in seconds. It starts when all earlier updates and copies have ended.

        Returns:
            False if the current weights are not available. The worker gets the weights of the next
            update.

        Raises:
            WeightUpdateError: the copy failed or took too long. The weights of the worker then have
                no version.
            WorkerLost: the worker is lost.
        """
        mine = self._ranks.of(worker)
        if not mine:
            raise lost_error(worker)
        # Each update and each copy has a deadline, so the wait for the lock ends.
        async with self.versions.lock:
            check_alive(mine)
            if not self.versions.is_current(worker):
                if self.versions.asleep:
                    return False
                deadline = Deadline(timeout)
                try:
                    async with deadline.limit() as limit:
                        if not await self.updates.bring(mine, deadline):
                            return False
                except TimeoutError:
                    if not limit.expired():
                        raise
                    raise WeightUpdateError(
                        f"worker {worker} did not get the weights within {deadline}"
                    ) from None
            serve()
            self.kept.begin()
            return True

    # --- events -----------------------------------------------------------------------------------

    def on_peer(self, identity: bytes, frames: Sequence[Buffer]) -> bool:
        rank = self._ranks.find(identity)
        if rank is None and not self._senders.knows(identity):
            return self._ranks.was_lost(identity)
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
                return self.updates.rank_answered(rank, message)
            case _:
                return False

    def _on_hello(self, rank: Rank, hello: RankHello) -> bool:
        if not self.workers_return and rank.hello.done():
            return False
        if hello.dirty:
            self._ranks.expel(rank.worker, "its connection broke while its weights changed")
        elif not rank.hello.done():
            rank.connection = hello.connection
            rank.hello.set_result(hello.settings)
        elif hello.connection <= rank.connection:
            # This hello answers ``Rejoin``, but an earlier hello came over the same connection.
            return rank.returns
        elif self.versions.lock.locked():
            self._ranks.expel(rank.worker, "its connection broke during a weight update")
        else:
            # The worker continues to serve calls, because these use another connection.
            self.on_away(rank.worker)
            self._rejoin(rank.worker)
        return True

    def on_lost(self, worker: int) -> None:
        self._lose(worker)

    def _lose(self, worker: int) -> list[Rank]:
        lost = self._ranks.lose(worker)
        self.updates.lost(worker, lost)
        return lost

    def on_away(self, worker: int) -> None:
        for rank in self._lose(worker):
            self._ranks.add(rank.member, rank.identity, returns=True)
            if self.versions.lock.locked():
                # An update may or may not have become live on this worker.
                self.versions.of[worker] = UNKNOWN

    def on_ready(self, worker: int, ready: Ready) -> None:
        self._rejoin(worker)

    def _rejoin(self, worker: int) -> None:
        """Request ``RankHello`` from the ranks of a returning worker that have not sent it yet."""
        for rank in self._ranks.of(worker):
            if rank.returns and not rank.hello.done():
                self._ranks.send(rank, Rejoin(self._ranks.new_id()))

    def on_connection_broken(self) -> None:
        self._senders.find_lost()
