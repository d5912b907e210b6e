"""The driver's record of the sender and the ranks that form a group (``group.py``)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from ..core.manifest import differences
from ..core.weight_update import SENDER, Member
from ..errors import SettingsMismatch
from ..wire.weights import Join, RankSettings
from .ranks import Rank
from .update_request import Source


class SenderGroup:
    """The current group. At most one exists, because a rank that joins a group leaves its old one.

    Args:
        host: ``host(worker)`` returns the name of the worker's host, or "" if the worker runs on
            the driver's machine.

    Attributes:
        source: the sender of the current group, or None if there is no group.
    """

    def __init__(self, host: Callable[[int], str] = lambda worker: "") -> None:
        self._host = host
        self.source: Source | None = None
        self._ranks: frozenset[Rank] = frozenset()
        self._number = 0

    def consists_of(self, source: Source, ranks: Iterable[Rank]) -> bool:
        return self.source is source and self._ranks == frozenset(ranks)

    def formed(self, source: Source, ranks: Iterable[Rank]) -> None:
        """Record that the source and exactly these ranks form the current group."""
        self.source, self._ranks = source, frozenset(ranks)

    def dissolve(self) -> None:
        """Forget the current group."""
        self.source, self._ranks = None, frozenset()

    def forget(self, source: Source) -> None:
        """Dissolve the current group if this source is its sender."""
        if self.source is source:
            self.dissolve()

    def lost(self, ranks: Iterable[Rank]) -> None:
        """Dissolve the current group if it contained one of these lost ranks."""
        if not self._ranks.isdisjoint(ranks):
            self.dissolve()

    def joins(
        self, id_: int, source: Source, ranks: Mapping[Member, Rank], timeout: float
    ) -> dict[Member, Join]:
        """Return the ``Join`` message for each member of a new group, with the member's rank.

        Members on the sender's GPU get no rank, because they read the sender's memory. Of several
        members on another host, only the first gets a rank, and relays the weights to the others.
        """
        ours = source.settings
        self._number += 1
        uuids = {member: ranks[member].settings.uuid for member in sorted(ranks)}
        readers = [m for m, uuid in uuids.items() if uuid and uuid == ours.uuid]
        others = [m for m in uuids if m not in readers]
        hosts: dict[str, list[Member]] = {}
        for member in others:
            hosts.setdefault(self._host(member[0]), []).append(member)
        together = {m: members for host, members in hosts.items() if host for m in members}
        direct = [m for m in others if m == together.get(m, [m])[0]]
        numbers = {member: number for number, member in enumerate([SENDER, *direct])}

        def join(member: Member) -> Join:
            group = together.get(member, [])
            relayed = len(group) > 1
            return Join(
                id_,
                self._number,
                ours.host,
                ours.port,
                numbers.get(member, -1),
                len(numbers),
                readers.index(member) if member in readers else -1,
                len(readers),
                timeout,
                self._host(member[0]) if relayed else "",
                group.index(member) if relayed else -1,
                len(group) if relayed else 0,
            )

        return {member: join(member) for member in (SENDER, *others, *readers)}


def check_settings(ours: RankSettings, ranks: Sequence[Rank]) -> None:
    """Check that a sender with these settings can form a group with the ranks.

    Raises:
        SettingsMismatch: the settings of a rank differ.
    """
    for rank in ranks:
        theirs = rank.settings
        different = differences(
            {"device": ours.device, "torch": ours.torch, "NCCL": ours.nccl} | ours.environment,
            {"device": theirs.device, "torch": theirs.torch, "NCCL": theirs.nccl}
            | theirs.environment,
        )
        if different:
            raise SettingsMismatch(
                f"the sender and worker {rank.worker} cannot form a group: {'; '.join(different)} "
                "(here is the sender, there the worker); set them alike in both"
            )
