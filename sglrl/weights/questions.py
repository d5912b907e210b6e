"""Questions to ranks: messages outside of updates that each expect one answer."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterable
from typing import NamedTuple, TypeVar

import msgspec

from ..core.manifest import merged
from ..core.weight_update import SENDER, Member
from ..errors import DeadlineExceeded, ProtocolError, SglrlError, WorkerLost, from_wire
from ..wire.calls import ErrorBody
from ..wire.codec import MALFORMED
from ..wire.weights import (
    CancelCopy,
    Checksums,
    Describe,
    ModelDescription,
    RankAnswer,
    Shard,
    ToRank,
)
from .deadline import Deadline
from .ranks import Rank, Ranks, lost_error

T = TypeVar("T")

_described = msgspec.msgpack.Decoder(ModelDescription)
_shards = msgspec.msgpack.Decoder(list[Shard])


class _Question(NamedTuple):
    """A message to a rank that has not been answered yet.

    Attributes:
        needs: the rank that must answer, then the rank that needs the answer, if any.
    """

    answer: asyncio.Future[RankAnswer]
    needs: tuple[Rank, ...]


class Questions:
    """The questions that ranks have not answered yet. ``len`` counts them.

    A question fails as soon as a rank that it needs is lost.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._open: dict[tuple[Rank, int], _Question] = {}
        """The open questions, by the rank that must answer and the id of the message."""

    def __len__(self) -> int:
        return len(self._open)

    async def describe(self, deadline: Deadline) -> ModelDescription:
        """Return the tensors of the model, as described by all ranks of one worker together."""
        while True:
            ranks = await self._ranks.greeted(deadline)
            if not ranks:
                continue
            first = [rank for rank in ranks if rank.worker == ranks[0].worker]
            try:
                parts = await asyncio.gather(
                    *(self.ask(rank, Describe, _described, deadline) for rank in first)
                )
            except WorkerLost:
                continue
            return merged(parts)

    async def checksums(self, names: list[str], deadline: Deadline) -> dict[Member, list[Shard]]:
        """Return checksums of live tensor shards by rank.

        Raises:
            WorkerLost: no worker is left.
        """
        ranks = await self._ranks.greeted(deadline)
        shards: dict[Member, list[Shard]] = {}

        async def ask(rank: Rank) -> None:
            # A lost worker has no weights, so leave it out.
            with contextlib.suppress(WorkerLost):
                shards[rank.member] = await self.ask(
                    rank, lambda id_: Checksums(id_, names), _shards, deadline
                )

        await asyncio.gather(*map(ask, ranks))
        if not shards:
            raise WorkerLost("no worker is left that could be asked")
        return shards

    async def ask(
        self,
        rank: Rank,
        make: Callable[[int], ToRank],
        decoder: msgspec.msgpack.Decoder[T],
        deadline: Deadline,
        other: Rank | None = None,
        id_: int = 0,
    ) -> T:
        """Send a message to ``rank`` and return the body of the answer.

        Args:
            make: returns the message for a given id.
            decoder: decodes the body of the answer.
            other: the rank that needs the answer, or None.
            id_: the id of the message, if several ranks get messages with one id. See ``new_id``.

        Raises:
            WorkerLost: ``rank`` or ``other`` is lost before the answer arrives.
            DeadlineExceeded: no answer arrived in time.
            SglrlError: the error that the rank reported.
        """
        needs = (rank,) if other is None else (rank, other)
        for needed in needs:
            needed.check()
        id_ = id_ or self.new_id()
        question = _Question(asyncio.get_running_loop().create_future(), needs)
        self._open[rank, id_] = question
        try:
            self._ranks.send(rank, make(id_))
            async with deadline.limit():
                answer = await question.answer
        except TimeoutError:
            raise DeadlineExceeded(
                f"worker {rank.worker} did not answer within {deadline}"
            ) from None
        finally:
            del self._open[rank, id_]
        if answer.error is not None:
            raise error_of(answer.error)
        return body_of(decoder, answer)

    def new_id(self) -> int:
        """Return an id for the messages that request one copy from all ranks of a worker.

        A copy holds the engine. Rank 0 broadcasts the id of its hold to the other ranks, so all
        ranks of a worker must use the same id.
        """
        return self._ranks.new_id()

    def cancel_copies(self, *ranks: Rank) -> None:
        """Stop the copies of weights that these ranks send or receive."""
        for rank in ranks:
            self._ranks.send(rank, CancelCopy())

    def answered(self, rank: Rank, answer: RankAnswer) -> bool:
        """Handle an answer of a rank. Return False if the answer belongs to no open question."""
        question = self._open.get((rank, answer.id))
        if question is None:
            return False
        if not question.answer.done():
            question.answer.set_result(answer)
        return True

    def is_late(self, id_: int) -> bool:
        """Return True if a message of the past had this id.

        The caller has checked that ``answered`` returns False and that no update has this id.
        """
        return 0 < id_ <= self._ranks.last_id

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


def body_of(decoder: msgspec.msgpack.Decoder[T], answer: RankAnswer) -> T:
    """Return the decoded body of an answer.

    Raises:
        ProtocolError: the body does not have the decoder's type.
    """
    try:
        return decoder.decode(answer.body)
    except MALFORMED as error:
        raise ProtocolError(f"a malformed answer to {answer.phase!r}: {error}") from None


def error_of(body: ErrorBody, member: Member | None = None) -> SglrlError:
    """Return the error that an answer reports. Its message names the worker of ``member``."""
    who = f"worker {member[0]}: " if member is not None and member != SENDER else ""
    return from_wire(body.kind, who + body.message, body.traceback)
