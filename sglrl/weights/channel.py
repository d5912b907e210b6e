"""The driver's side of weight updates. Each pool has one ``WeightChannel``.

Every rank has a separate socket for the channel's messages, so neither a full window nor a long
decode step delays them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any

from ..config import check_timeout
from ..core.driver_listener import DriverListener
from ..core.weight_update import Member
from ..errors import ProtocolError, WeightUpdateError
from ..wire.calls import Ready
from ..wire.codec import Buffer, decode_from_rank
from ..wire.weights import (
    ModelDescription,
    RankAnswer,
    RankHello,
    RankSettings,
    Rejoin,
    Shard,
)
from .deadline import Deadline, turn
from .kept import Kept
from .questions import Questions
from .ranks import (
    DriverPort,
    Rank,
    Ranks,
    check_alive,
    lost_error,
)
from .remote_source import RemoteSenders
from .safekeeping import KeepMode, Safekeeping
from .update_report import UpdateReport
from .update_request import Source, UpdateRequest
from .updates import Updates
from .versions import UNKNOWN, Versions

logger = logging.getLogger("sglrl.weights")


class WeightChannel(DriverListener):
    """Weight updates of one pool.

    Args:
        expel: ``expel(worker, reason)`` kills a worker's processes.
        is_up: ``is_up(worker)`` returns True if the worker has reported ready and is not lost.
        host: ``host(worker)`` returns the name of the worker's host.
        keep: which hosts keep the current weights in memory: see ``Safekeeping``.

    Attributes:
        on_updated: called after every update, and when sleeping weights are back. Workers that
            have the current weights now may serve at once.
        on_version: called when ``version``, or the version of an adapter, has changed.
        host: the address at which workers reach a sender in this process.
        workers_return: a rank whose connection breaks connects again, and says hello again.
    """

    def __init__(
        self,
        expel: Callable[[int, str], None],
        is_up: Callable[[int], bool] = lambda worker: True,
        *,
        host: Callable[[int], str] = lambda worker: "",
        keep: KeepMode = None,
    ) -> None:
        self._expel = expel
        self.on_updated: Callable[[], None] = lambda: None
        self.on_version: set[Callable[[], None]] = set()
        self.host = "127.0.0.1"
        self.workers_return = False
        self._ranks = Ranks(is_up)
        self._questions = Questions(self._ranks)
        self._versions = Versions(self._ranks)
        self._kept = Kept(self._ranks, self._questions, host)
        self._safekeeping = Safekeeping(keep, self._kept, self._versions)
        self._updates = Updates(
            self._versions,
            self._ranks,
            self._questions,
            self._kept,
            self._safekeeping,
            host=host,
            expel=expel,
            on_done=self._on_done,
        )
        self._senders = RemoteSenders(self, self._updates.group)

    # --- for the pool -----------------------------------------------------------------------------

    def attach(self, driver: DriverPort, address: str) -> None:
        self._ranks.attach(driver)
        self._senders.attach(driver, address)
        driver.add_listener(self)

    def add_rank(self, worker: int, rank: int, identity: bytes) -> None:
        self._ranks.add((worker, rank), identity)
        self._versions.of[worker] = 0

    async def close(self) -> None:
        """Give up the running update and cancel all waits."""
        self._senders.close()
        self._safekeeping.interrupt()
        if self._updates.run is not None:
            self._updates.run.close()
        self._questions.close()
        self._ranks.close()

    @property
    def address(self) -> str:
        """Return the address for ``sglrl.weights.Sender.connect``. It contains a secret."""
        return self._senders.address

    @property
    def version(self) -> int:
        """Return the version of the last update."""
        return self._versions.current

    @property
    def versions(self) -> dict[int, int]:
        """Return the version of every worker, by index."""
        return self._versions.of

    @property
    def forgotten(self) -> bool:
        """Return whether the engines gave their weights away, and no update has followed."""
        return self._versions.forgotten

    # --- questions --------------------------------------------------------------------------------

    async def describe(self, timeout: float | None) -> ModelDescription:
        """Return the tensors of the model. Engines are asked once; see ``known_after``."""
        return await self._updates.describe(_deadline(timeout))

    async def checksums(self, names: list[str], timeout: float | None) -> dict[Member, list[Shard]]:
        """Return checksums of live tensor shards by rank. Waits for a running update.

        Raises:
            UpdateInProgress: the running update does not end in time.
            WorkerLost: no worker is left.
        """
        deadline = _deadline(timeout)
        async with turn(self._versions.lock, deadline):
            self._versions.check_awake()
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
        """Run one update; see ``Updates.update``."""
        return await self._updates.update(request, source, load)

    async def join(self, source: Source, deadline: Deadline) -> float:
        """Form the group with ``source`` before the first update; see ``Updates.join``."""
        return await self._updates.join(source, deadline)

    def _on_done(self) -> None:
        for listener in self.on_version:
            listener()
        self.on_updated()

    def forget(self, source: Source) -> None:
        """Forget the group of a source that is closed."""
        self._updates.group.forget(source)

    # --- kept weights -----------------------------------------------------------------------------

    def kept_bytes(self, worker: int) -> int:
        """Return the bytes of its host's memory in which a worker keeps its weights."""
        return self._kept.sizes.get(worker, 0)

    # --- sleep ------------------------------------------------------------------------------------

    def at_rest(self, deadline: Deadline) -> AbstractAsyncContextManager[None]:
        """Return a context in which no update, copy or request for checksums runs: see ``turn``."""
        return turn(self._versions.lock, deadline)

    def sleep(self, *, kept: bool) -> None:
        """The engines give the memory of their weights away. Call this ``at_rest``.

        Args:
            kept: ``wake`` brings the weights back. Otherwise the next update must have all of them.
        """
        self._versions.asleep = True
        if not kept:
            self._versions.forgotten = True
            self._versions.of = dict.fromkeys(self._versions.of, UNKNOWN)

    def wake(self) -> None:
        """The engines have the memory of their weights again."""
        if self._versions.asleep:
            self._versions.asleep = False
            self.on_updated()

    # --- new workers ------------------------------------------------------------------------------

    def is_current(self, worker: int) -> bool:
        """Return whether a worker has the weights of the last update."""
        return self._versions.is_current(worker)

    def must_sync(self, worker: int) -> bool:
        """Return True if a worker that is up must not serve before ``sync``."""
        if worker not in self._versions.of:
            return False
        return not self.is_current(worker) or self._versions.lock.locked()

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
        async with self._versions.lock:
            check_alive(mine)
            if not self.is_current(worker):
                if self._versions.asleep:
                    return False
                deadline = Deadline(timeout)
                try:
                    async with deadline.limit() as limit:
                        if not await self._updates.bring(mine, deadline):
                            return False
                except TimeoutError:
                    if not limit.expired():
                        raise
                    raise WeightUpdateError(
                        f"worker {worker} did not get the weights within {deadline}"
                    ) from None
            serve()
            self._safekeeping.begin()
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
                run = self._updates.run
                return (
                    self._questions.answered(rank, message)
                    or (run is not None and run.rank_answered(rank, message))
                    or self._is_late(message)
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
        elif self._versions.lock.locked():
            self._expel(rank.worker, "its connection broke during a weight update")
        else:
            # Its worker serves calls, on another connection.
            self._return(rank.worker)
        return True

    def on_lost(self, worker: int) -> None:
        self._lose(worker)

    def _lose(self, worker: int) -> list[Rank]:
        lost = self._ranks.lose(worker)
        self._updates.group.lost(lost)
        self._questions.lost(lost)
        if self._updates.run is not None:
            self._updates.run.lost(worker, lost)
        # Perhaps only one worker has the current weights now.
        self._safekeeping.begin()
        return lost

    def on_away(self, worker: int) -> None:
        for rank in self._lose(worker):
            self._ranks.add(rank.member, rank.identity, returns=True)
            if self._versions.lock.locked():
                # An update may have become live there, or not.
                self._versions.of[worker] = UNKNOWN

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
        run = self._updates.run
        in_run = run is not None and run.sender_answered(source, answer)
        return in_run or self._is_late(answer)

    def _is_late(self, answer: RankAnswer) -> bool:
        """Return True for an answer to a request that has ended, as after a cancelled update."""
        run = self._updates.run
        current = run is not None and answer.id == run.id
        return not current and self._questions.is_late(answer.id)

    def sender_lost(self, source: Source) -> None:
        """Handle the loss of a source in another process."""
        if self._updates.run is not None:
            self._updates.run.sender_lost(source)


def _deadline(timeout: Any) -> Deadline:
    """Return the deadline of a timeout. Raises ``UsageError`` if the timeout is not valid."""
    return Deadline(check_timeout(timeout))
