"""Live weights from one worker to another that is new, rank by rank: the driver's side of
``workers/hand_over.py``."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

import msgspec

from ..core.weights import Member
from ..errors import SglrlError
from ..messages import Give, GiveUp, Offer, RankAnswer, Take, ToRank
from .answers import body_of

Question = Callable[[Member, Callable[[int], ToRank], float], Awaitable[RankAnswer]]

_offer = msgspec.msgpack.Decoder(Offer)


class HandOvers:
    """Those under way. No update may run meanwhile.

    ``ask(member, make, timeout)`` sends a rank what ``make`` makes of the question's number, and
    awaits the answer; ``send(member, message)`` awaits none. ``givers``: by who takes.
    """

    def __init__(self, ask: Question, send: Callable[[Member, ToRank], None]) -> None:
        self._ask = ask
        self._send = send
        self.givers: dict[Member, Member] = {}

    async def to_all(
        self, takers: Sequence[Member], giver: int, version: int, timeout: float
    ) -> SglrlError | None:
        """To all ranks of a worker from those of worker ``giver``. What went wrong, if something
        did: then the worker has weights of no version."""
        # All of them to their end: what one still writes must not mix with the next try.
        ends = await asyncio.gather(
            *(self.to_one(taker, (giver, taker[1]), version, timeout) for taker in takers),
            return_exceptions=True,
        )
        failure: SglrlError | None = None
        for end in ends:
            if isinstance(end, SglrlError):
                failure = end
            elif end is not None:
                raise end
        return failure

    async def to_one(self, taker: Member, giver: Member, version: int, timeout: float) -> None:
        """From one rank to another. Both forget it when either fails."""
        self.givers[taker] = giver
        try:
            answer = await self._ask(giver, lambda id_: Give(id_, timeout), timeout)
            offer = body_of(_offer, answer)
            await self._ask(taker, lambda id_: Take(id_, version, offer, timeout), timeout)
        except BaseException:
            for member in (giver, taker):
                self._send(member, GiveUp())
            raise
        finally:
            del self.givers[taker]
