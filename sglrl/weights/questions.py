"""Questions to ranks: messages that each await one answer, outside of updates."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterable
from typing import NamedTuple

import msgspec

from ..core.manifest import merged
from ..core.weight_update import Member
from ..errors import DeadlineExceeded, WorkerLost
from ..wire.weights import (
    Checksums,
    Describe,
    ModelDescription,
    RankAnswer,
    RankSettings,
    Shard,
    ToRank,
)
from .answers import body_of, error_of
from .deadline import Deadline
from .ranks import Rank, Ranks, lost_error

_described = msgspec.msgpack.Decoder(ModelDescription)
_pieces = msgspec.msgpack.Decoder(list[Shard])


class _Question(NamedTuple):
    """A message to a rank that awaits its answer.

    Attributes:
        needs: the rank that must answer, and the rank that needs the answer, if any.
    """

    answer: asyncio.Future[RankAnswer]
    needs: tuple[Rank, ...]


class Questions:
    """The questions that ranks have not answered yet. ``len`` counts them.

    A question fails as soon as a rank that it needs is lost.

    Attributes:
        last_id: the last id that ``new_id`` has returned.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._open: dict[int, _Question] = {}
        self.last_id = 0

    def __len__(self) -> int:
        return len(self._open)

    def new_id(self) -> int:
        """Return an id for a message to ranks. Updates use these ids, too."""
        self.last_id += 1
        return self.last_id

    async def describe(self, deadline: Deadline) -> ModelDescription:
        """Return the tensors of the model. All ranks of one worker describe their part."""
        while True:
            ranks = await self._ranks.greeted(deadline)
            if not ranks:
                continue
            first = [rank for rank in ranks if rank.worker == ranks[0].worker]
            try:
                answers = await asyncio.gather(
                    *(self.ask(rank, Describe, deadline) for rank in first)
                )
            except WorkerLost:
                continue
            return merged([body_of(_described, answer) for answer in answers])

    async def checksums(self, names: list[str], deadline: Deadline) -> dict[Member, list[Shard]]:
        """Return checksums of live tensor shards by rank.

        Raises:
            WorkerLost: no worker is left.
        """
        ranks = await self._ranks.greeted(deadline)
        found: dict[Member, list[Shard]] = {}

        async def ask(rank: Rank) -> None:
            # A lost worker has no weights, so it is left out.
            with contextlib.suppress(WorkerLost):
                answer = await self.ask(rank, lambda id_: Checksums(id_, names), deadline)
                found[rank.member] = body_of(_pieces, answer)

        await asyncio.gather(*map(ask, ranks))
        if not found:
            raise WorkerLost("no worker is left that could be asked")
        return found

    async def settings(self, deadline: Deadline) -> RankSettings:
        """Return the settings of the first rank, which its ``RankHello`` contains."""
        ranks = await self._ranks.greeted(deadline)
        if not ranks:
            raise WorkerLost("no worker is left")
        return ranks[0].settings

    async def ask(
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
        id_ = self.new_id()
        question = _Question(asyncio.get_running_loop().create_future(), needs)
        self._open[id_] = question
        try:
            self._ranks.send(rank, make(id_))
            async with deadline.limit():
                answer = await question.answer
        except TimeoutError:
            raise DeadlineExceeded(
                f"worker {rank.worker} did not answer within {deadline}"
            ) from None
        finally:
            del self._open[id_]
        if answer.error is not None:
            raise error_of(answer.error)
        return answer

    def answered(self, rank: Rank, answer: RankAnswer) -> bool:
        """Handle an answer of a rank. Return False if it does not belong to a question."""
        question = self._open.get(answer.id)
        if question is None or question.needs[0] is not rank:
            return False
        if not question.answer.done():
            question.answer.set_result(answer)
        return True

    def is_late(self, id_: int) -> bool:
        """Return True if a message had this id, and is not an open question."""
        return 0 < id_ <= self.last_id and id_ not in self._open

    def lost(self, ranks: Iterable[Rank]) -> None:
        """Fail every question that needs one of these lost ranks."""
        for rank in ranks:
            for question in self._open.values():
                if rank in question.needs and not question.answer.done():
                    question.answer.set_exception(lost_error(rank.worker))

    def close(self) -> None:
        """Cancel all questions."""
        for question in self._open.values():
            question.answer.cancel()
