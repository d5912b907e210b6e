"""Places of workers: ranks stay together, workers are spread, and no GPU is used twice."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from sglrl.core.placement import Offer, Placement, WorkerPlace


def hosts(*gpus: int, cores: int = 8) -> Placement:
    placement = Placement()
    for n, count in enumerate(gpus):
        offered = tuple(str(gpu) for gpu in range(count))
        placement.add(f"host{n}", Offer(gpus=offered, cores=cores))
    return placement


def test_replicas_are_spread() -> None:
    places = hosts(4, 4, 4).take(3, 2)
    assert places == [WorkerPlace(host=f"host{n}", gpus=("0", "1")) for n in range(3)]


def test_a_group_is_not_divided() -> None:
    """There are four free GPUs, but no two of them are on one host."""
    placement = hosts(1, 1, 1, 1)
    assert placement.take(1, 2) is None
    assert placement.take(4, 1) is not None


def test_without_enough_gpus_none_is_taken() -> None:
    placement = hosts(2, 2)
    assert placement.take(3, 2) is None
    assert placement.free("host0") == ("0", "1")
    assert Placement().take(1, 0) is None


def test_workers_on_cpu_are_spread_by_cores() -> None:
    placement = Placement()
    placement.add("small", Offer(gpus=(), cores=2))
    placement.add("large", Offer(gpus=(), cores=6))
    places = placement.take(8, 0)
    assert places is not None
    assert Counter(place.host for place in places) == {"small": 2, "large": 6}


def test_a_host_that_leaves_and_returns() -> None:
    placement = hosts(1, 1)
    first, second = placement.take(2, 1) or []
    placement.remove(first.host)
    placement.release(first)
    assert placement.take(1, 1) is None
    placement.add(first.host, Offer(gpus=("0",), cores=8))
    assert placement.take(1, 1) == [first]
    # Late, and not for the place that was taken since.
    placement.release(first)
    assert placement.free(first.host) == ()
    assert not placement.holds(first)
    placement.release(second)
    assert placement.free(second.host) == ("0",)


@given(
    offered=st.lists(st.integers(0, 8), min_size=1, max_size=5),
    wanted=st.lists(st.tuples(st.integers(1, 6), st.integers(1, 4)), max_size=6),
    data=st.data(),
)
def test_places_fit_their_hosts(
    offered: list[int], wanted: list[tuple[int, int]], data: st.DataObject
) -> None:
    placement = hosts(*offered)
    taken: list[WorkerPlace] = []
    for workers, gpus in wanted:
        room = sum(len(placement.free(host)) // gpus for host in placement.offers)
        places = placement.take(workers, gpus)
        # Groups of one size fit whenever there is room for them.
        assert (places is None) == (room < workers)
        taken += places or []
        if taken and data.draw(st.booleans()):
            placement.release(taken.pop(data.draw(st.integers(0, len(taken) - 1))))
        used = Counter((place.host, gpu) for place in taken for gpu in place.gpus)
        assert not used or max(used.values()) == 1
        for host in placement.offers:
            free = set(placement.free(host))
            assert not free & {gpu for place in taken if place.host == host for gpu in place.gpus}


@given(
    offered=st.lists(st.integers(0, 4), min_size=1, max_size=3),
    steps=st.lists(
        st.tuples(
            st.sampled_from(["take", "release", "leave", "come"]),
            st.integers(0, 20),
            st.integers(0, 2),
        ),
        max_size=30,
    ),
)
def test_hosts_come_and_go(offered: list[int], steps: list[tuple[str, int, int]]) -> None:
    """Only live places count. Dead ones may be given back at any time."""
    placement = hosts(*offered)
    names = list(placement.offers)
    offers = dict(placement.offers)
    taken: list[WorkerPlace] = []
    live: list[WorkerPlace] = []
    for step, n, gpus in steps:
        host = names[n % len(names)]
        if step == "take":
            places = placement.take(1, gpus) or []
            taken += places
            live += places
        elif step == "release" and taken:
            place = taken.pop(n % len(taken))
            placement.release(place)
            live = [other for other in live if other is not place]
        elif step == "leave" and host in placement.offers:
            placement.remove(host)
            live = [place for place in live if place.host != host]
        elif step == "come" and host not in placement.offers:
            placement.add(host, offers[host])
        assert [place for place in taken if placement.holds(place)] == live
        for host, offer in placement.offers.items():
            used = [gpu for place in live if place.host == host for gpu in place.gpus]
            assert sorted([*used, *placement.free(host)]) == sorted(offer.gpus)
            loads = {name: placement._load(name) for name in placement.offers}
            count = sum(place.host == host for place in live)
            assert loads[host] == count / offer.cores
