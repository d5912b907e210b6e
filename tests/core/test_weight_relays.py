"""Which ranks receive from the sender, and which from the relay of their host."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from sglrl.core.weight_update import SENDER
from sglrl.weights.sender_group import SenderGroup
from sglrl.wire.weights import Join

from .weight_pool import SETTINGS

LOCAL = ""


class Played:
    """A rank or a sender with this GPU."""

    def __init__(self, uuid: str) -> None:
        self.settings = msgspec.structs.replace(SETTINGS, uuid=uuid)


def joins(
    host: Callable[[int], str], uuids: dict[tuple[int, int], str], own: str = ""
) -> dict[tuple[int, int], Join]:
    ranks: Any = {member: Played(uuid) for member, uuid in uuids.items()}
    return SenderGroup(host).joins(7, cast(Any, Played(own)), ranks, 1.0)


def test_one_relay_for_each_host() -> None:
    """Worker 0 has two ranks on host a, workers 1 and 2 are on host b, worker 3 alone on c."""
    members = [(0, 0), (0, 1), (1, 0), (2, 0), (3, 0)]
    found = joins(["a", "b", "b", "c"].__getitem__, dict.fromkeys(members, ""))
    place = {m: (j.rank, j.local_group, j.local_rank) for m, j in found.items()}
    assert place == {
        SENDER: (0, "", -1),
        (0, 0): (1, "a", 0),
        (0, 1): (-1, "a", 1),
        (1, 0): (2, "b", 0),
        (2, 0): (-1, "b", 1),
        (3, 0): (3, "", -1),
    }
    assert {join.size for join in found.values()} == {4}
    assert {join.local_size for join in found.values()} == {0, 2}


@given(
    workers=st.lists(
        st.tuples(st.sampled_from([LOCAL, "a", "b", "c"]), st.integers(1, 3)), min_size=1
    ),
    own=st.integers(-1, 5),
)
def test_everyone_gets_the_weights_once(workers: list[tuple[str, int]], own: int) -> None:
    members = [(w, r) for w, (_, ranks) in enumerate(workers) for r in range(ranks)]
    uuids = {member: f"GPU-{n}" for n, member in enumerate(members)}
    found = joins(lambda worker: workers[worker][0], uuids, f"GPU-{own}")
    assert found.keys() == {SENDER, *members}
    readers = {member for member in members if uuids[member] == f"GPU-{own}"}
    assert {member for member in members if found[member].reader >= 0} == readers
    direct = {member: join.rank for member, join in found.items() if join.rank >= 0}
    assert sorted(direct.values()) == list(range(found[SENDER].size))
    assert direct[SENDER] == 0
    for host in (LOCAL, "a", "b", "c"):
        here = [m for m in members if workers[m[0]][0] == host and m not in readers]
        if host == LOCAL or len(here) < 2:
            assert all(m in direct and found[m].local_rank < 0 for m in here)
            continue
        (relay,) = [m for m in here if m in direct]
        assert found[relay].local_rank == 0
        assert sorted(found[m].local_rank for m in here) == list(range(len(here)))
        assert {(found[m].local_group, found[m].local_size) for m in here} == {(host, len(here))}
