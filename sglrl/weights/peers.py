"""Copy live weights from one worker to a new one: the driver's side of ``workers/peer_copy.py``."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import msgspec

from ..errors import SglrlError
from ..wire.weights import CancelCopy, PeerCopyOffer, ReceivePeerCopy, SendPeerCopy
from .answers import body_of
from .deadline import Deadline
from .questions import Questions
from .ranks import Rank, Ranks

_offer = msgspec.msgpack.Decoder(PeerCopyOffer)


class PeerCopies:
    """Copies weights between workers, rank by rank. The caller holds the lock of updates."""

    def __init__(self, ranks: Ranks, questions: Questions) -> None:
        self._ranks = ranks
        self._questions = questions

    async def copy_worker(
        self, receivers: Sequence[Rank], senders: Sequence[Rank], version: int, deadline: Deadline
    ) -> bool:
        """Copy the weights of all ranks of one worker to the same ranks of another.

        Returns:
            True.

        Raises:
            SglrlError: a rank failed. The receiving worker then has weights of no version.
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
        failed = [end for end in ends if end is not None]
        # An error that is not ours is a defect, which must not be hidden.
        for end in sorted(failed, key=lambda end: isinstance(end, SglrlError)):
            raise end
        return True

    async def copy_rank(
        self, receiver: Rank, sender: Rank, version: int, deadline: Deadline
    ) -> None:
        """Copy the weights of one rank to another. When one of them fails, both stop."""
        try:
            answer = await self._questions.ask(
                sender, lambda id_: SendPeerCopy(id_, deadline.left), deadline, receiver
            )
            offer = body_of(_offer, answer)
            await self._questions.ask(
                receiver,
                lambda id_: ReceivePeerCopy(id_, version, offer, deadline.left),
                deadline,
                sender,
            )
        except BaseException:
            for rank in (sender, receiver):
                self._ranks.send(rank, CancelCopy())
            raise
