"""Copy live weights from one worker to a new one: the driver's side of ``workers/peer_copy.py``."""

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

Ask = Callable[[Rank, Callable[[int], ToRank], Deadline, Rank], Awaitable[RankAnswer]]

_offer = msgspec.msgpack.Decoder(PeerCopyOffer)


class PeerCopies:
    """Copies weights between workers, rank by rank. The caller holds the lock of updates.

    Args:
        ask: ``ask(rank, make, deadline, other)`` sends ``make(id)`` to ``rank`` and awaits the
            answer. It raises ``WorkerLost`` as soon as ``rank`` or ``other`` is lost.
        send: sends a rank a message that has no answer.
    """

    def __init__(self, ask: Ask, send: Callable[[Rank, ToRank], None]) -> None:
        self._ask = ask
        self._send = send

    async def copy_worker(
        self, receivers: Sequence[Rank], senders: Sequence[Rank], version: int, deadline: Deadline
    ) -> SglrlError | None:
        """Copy the weights of all ranks of one worker to the same ranks of another.

        Returns:
            The error of a rank that failed. The receiving worker then has weights of no version.
        """
        by_rank = {sender.member[1]: sender for sender in senders}
        # Wait for every rank: a late write must not mix with the next attempt.
        ends = await asyncio.gather(
            *(
                self.copy_rank(receiver, by_rank[receiver.member[1]], version, deadline)
                for receiver in receivers
            ),
            return_exceptions=True,
        )
        failure: SglrlError | None = None
        for end in ends:
            if isinstance(end, SglrlError):
                failure = end
            elif end is not None:
                raise end
        return failure

    async def copy_rank(
        self, receiver: Rank, sender: Rank, version: int, deadline: Deadline
    ) -> None:
        """Copy the weights of one rank to another. When one of them fails, both stop."""
        try:
            answer = await self._ask(
                sender, lambda id_: SendPeerCopy(id_, deadline.left), deadline, receiver
            )
            offer = body_of(_offer, answer)
            await self._ask(
                receiver,
                lambda id_: ReceivePeerCopy(id_, version, offer, deadline.left),
                deadline,
                sender,
            )
        except BaseException:
            for rank in (sender, receiver):
                self._send(rank, CancelPeerCopy())
            raise
