"""Live weights from one worker to another that is new, rank by rank: the driver's side of
``workers/hand_over.py``."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

import msgspec

from ..errors import SglrlError
from ..wire.weights import (
    CancelPeerCopy,
    PeerCopyOffer,
    RankAnswer,
    ReceivePeerCopy,
    SendPeerCopy,
    ToRank,
)
from .answers import body_of
from .deadline import Deadline
from .ranks import Rank

Question = Callable[[Rank, Callable[[int], ToRank], Deadline, Rank], Awaitable[RankAnswer]]

_offer = msgspec.msgpack.Decoder(PeerCopyOffer)


class HandOvers:
    """Those under way. No update may run meanwhile.

    ``ask(rank, make, deadline, other)`` sends a rank what ``make`` makes of the question's number,
    and awaits the answer; it raises ``WorkerLost`` as soon as this rank or the ``other`` is lost.
    ``send(rank, message)`` awaits none.
    """

    def __init__(self, ask: Question, send: Callable[[Rank, ToRank], None]) -> None:
        self._ask = ask
        self._send = send

    async def to_all(
        self, takers: Sequence[Rank], givers: Sequence[Rank], version: int, deadline: Deadline
    ) -> SglrlError | None:
        """To all ranks of a worker from the same ranks of another one. What went wrong, if
        something did: then the worker has weights of no version."""
        by_rank = {giver.member[1]: giver for giver in givers}
        # All of them to their end: what one still writes must not mix with the next try.
        ends = await asyncio.gather(
            *(self.to_one(taker, by_rank[taker.member[1]], version, deadline) for taker in takers),
            return_exceptions=True,
        )
        failure: SglrlError | None = None
        for end in ends:
            if isinstance(end, SglrlError):
                failure = end
            elif end is not None:
                raise end
        return failure

    async def to_one(self, taker: Rank, giver: Rank, version: int, deadline: Deadline) -> None:
        """From one rank to another. Both forget it when either fails."""
        try:
            answer = await self._ask(
                giver, lambda id_: SendPeerCopy(id_, deadline.left), deadline, taker
            )
            offer = body_of(_offer, answer)
            await self._ask(
                taker,
                lambda id_: ReceivePeerCopy(id_, version, offer, deadline.left),
                deadline,
                giver,
            )
        except BaseException:
            for rank in (giver, taker):
                self._send(rank, CancelPeerCopy())
            raise
