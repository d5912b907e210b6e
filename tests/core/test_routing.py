"""Each routing strategy, compared with the simplest description of its result."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglrl.config import ROUTING_STRATEGIES, FabricConfig
from sglrl.core.calls import SENT, Call
from sglrl.core.fabric import Fabric
from sglrl.core.invariants import validate
from sglrl.core.members import Member
from sglrl.core.prefixes import PrefixIndex, Route
from sglrl.errors import UsageError
from sglrl.wire.calls import Load

from .pool import finish, make_fabric, route, submit, worker_of

BLOCK = 2
prompts = st.lists(st.integers(0, 2), min_size=1, max_size=9)
asks = st.lists(st.tuples(prompts, st.integers(0, 1)), min_size=1, max_size=30)


def shared(a: list[int], b: list[int]) -> int:
    """Return the tokens that the index should find in common.

    That is a number of whole blocks, or the whole prompt if both are equal.
    """
    if a == b:
        return len(a)
    same = 0
    while same < min(len(a), len(b)) and a[same] == b[same]:
        same += 1
    return same - same % BLOCK


@given(asks=asks, lost=st.none() | st.integers(0, 29))
@settings(deadline=None)
def test_prefix_aware_prefers_the_longest_prefix_of_this_version(
    asks: list[tuple[list[int], int]], lost: int | None
) -> None:
    """A known prefix sends the call to one of its holders. No worker is overloaded here."""
    fabric = make_fabric(
        4, routing=("prefix-aware", "round-robin"), prefix_block=BLOCK, overload_slack=10_000
    )
    seen: list[tuple[list[int], int, int]] = []
    for n, (tokens, version) in enumerate(asks):
        if n == lost:
            fabric.member_lost(0, "it was killed", 0.0)
        worker = worker_of(submit(fabric, route=route(tokens, version)))
        known = {
            (shared(tokens, old), holder)
            for old, old_version, holder in seen
            if old_version == version and fabric.members[holder].state == "ready"
        }
        longest = max((length for length, _ in known), default=0)
        if longest:
            assert worker in {holder for length, holder in known if length == longest}
        assert worker is not None
        seen.append((tokens, version, worker))


def test_among_holders_of_a_prefix_the_least_loaded() -> None:
    fabric = make_fabric(3, routing=("prefix-aware",), prefix_block=BLOCK, overload_slack=100)
    index = fabric.router.prefixes
    for holder in (1, 2):
        index.record(route([1, 2]).prefix_keys(BLOCK), fabric.members[holder])
    for _ in range(3):
        submit(fabric, pinned=1)
    submit(fabric, pinned=2)
    got = [worker_of(submit(fabric, route=route([1, 2, n]))) for n in range(4)]
    assert got == [2, 2, 1, 2] or got == [2, 2, 2, 1]
    assert 0 not in got


def test_all_holders_of_a_prefix_have_their_turn() -> None:
    """All holders get calls, although there are many and the router considers few at a time."""
    fabric = make_fabric(41, routing=("prefix-aware",), prefix_block=BLOCK, overload_slack=100)
    for holder in range(40):
        fabric.router.prefixes.record(route([1, 2]).prefix_keys(BLOCK), fabric.members[holder])
        submit(fabric, pinned=holder)
    got = Counter(worker_of(submit(fabric, route=route([1, 2, n]))) for n in range(80))
    assert got == Counter([*range(40)] * 2)


def test_prefixes_of_different_versions_are_never_shared() -> None:
    fabric = make_fabric(2, routing=("prefix-aware", "round-robin"), prefix_block=BLOCK)
    first, *others = (worker_of(submit(fabric, route=route([1, 2, 3], v))) for v in (0, 1, 0, 1))
    assert others == [1 - (first or 0), first, 1 - (first or 0)]


def test_a_lost_worker_does_not_hide_shorter_prefixes_elsewhere() -> None:
    fabric = make_fabric(3, routing=("prefix-aware", "round-robin"), prefix_block=BLOCK)
    prefixes = fabric.router.prefixes
    prefixes.record(route([1, 2, 3, 4]).prefix_keys(BLOCK), fabric.members[0])
    prefixes.record(route([1, 2]).prefix_keys(BLOCK), fabric.members[2])
    fabric.member_lost(0, "it was killed", 0.0)
    workers = [worker_of(submit(fabric, route=route([1, 2, 3, 4, n]))) for n in range(3)]
    assert workers == [2, 2, 2]


def test_samples_of_one_prompt_share_a_worker() -> None:
    fabric = make_fabric(8, routing=("prefix-aware", "requests"), overload_slack=4)
    one = route(list(range(100)))
    assert len({worker_of(submit(fabric, route=one)) for _ in range(4)}) == 1


def test_an_overloaded_worker_gives_way() -> None:
    """Affinity never exceeds ``overload`` times the mean load plus ``overload_slack``."""
    fabric = make_fabric(4, routing=("prefix-aware", "requests"), overload=1.5, overload_slack=2)
    one = route(list(range(100)), session="chat")
    for _ in range(200):
        mean = fabric.loads.total / 4
        least = min(m.load for m in fabric.members.values())
        worker = worker_of(submit(fabric, route=one))
        assert worker is not None
        load = fabric.members[worker].load - 1
        assert load <= 1.5 * mean + 2 or load == least
    used = [m for m in fabric.members.values() if m.load]
    assert len(used) >= 3, "at most 1.5 times the mean, so at least 4 / 1.5 workers share the work"


def test_who_has_the_least_calls_is_not_overloaded() -> None:
    """The worker may even have more than the mean, because the others have small, full windows."""
    fabric = make_fabric(0, routing=("prefix-aware", "round-robin"), overload=1.5, overload_slack=0)
    for index, window in enumerate((1, 1, 1, 100, 100)):
        fabric.add_member(index)
        fabric.member_ready(index, window, 0.0)
    one = route([1] * 64)
    assert worker_of(submit(fabric, route=one, pinned=4)) == 4
    for index, load in enumerate((1, 1, 1, 21, 19)):
        for _ in range(load):
            submit(fabric, pinned=index)
    fabric.router.given(next(iter(fabric.members[4].calls.values())), fabric.members[4])
    assert [m.load for m in fabric.members.values()] == [1, 1, 1, 21, 20]
    assert fabric.router.overloaded(fabric.members[4])
    assert worker_of(submit(fabric, route=one)) == 4


def test_a_full_worker_gives_way() -> None:
    fabric = make_fabric(2, window=3, routing=("prefix-aware", "requests"), overload_slack=100)
    one = route([1] * 64)
    workers = Counter(worker_of(submit(fabric, route=one)) for _ in range(6))
    assert sorted(workers.values()) == [3, 3]
    assert worker_of(submit(fabric, route=one)) is None


@pytest.mark.parametrize("strategy", ROUTING_STRATEGIES)
def test_turns_of_a_session_stay_with_their_worker(strategy: str) -> None:
    fabric = make_fabric(8, routing=(strategy,))
    homes: dict[str, int | None] = {}
    for turn in range(5):
        for session in ("a", "b", "c"):
            prompt = route([turn] * 40, session=session)
            call = submit(fabric, route=prompt)
            assert homes.setdefault(session, worker_of(call)) == worker_of(call)
            finish(fabric, call)


def test_a_session_moves_when_its_worker_is_gone() -> None:
    fabric = make_fabric(3, routing=("requests",))
    home = worker_of(submit(fabric, route=route([1], session="a")))
    assert home is not None
    fabric.drain_member(home, 0.0)
    new = worker_of(submit(fabric, route=route([1], session="a")))
    assert new != home
    assert worker_of(submit(fabric, route=route([2], session="a"))) == new


@pytest.mark.parametrize("strategy", ROUTING_STRATEGIES)
def test_a_conversation_stays_with_its_worker_until_that_is_gone(strategy: str) -> None:
    fabric = make_fabric(8, routing=(strategy,))
    routes = [route([n] * 40) for n in range(3)]
    homes: dict[int, int | None] = {}
    for turn in range(1, 6):
        for n, one in enumerate(routes):
            one.extend(route([n] * 40 * turn).tokens, 0)
            call = submit(fabric, route=one)
            assert homes.setdefault(n, worker_of(call)) == worker_of(call)
            finish(fabric, call)
    fabric.member_lost(homes[0] or 0, "it was killed", 0.0)
    assert worker_of(submit(fabric, route=routes[0])) != homes[0]


@given(
    parts=st.lists(st.tuples(prompts, st.integers(0, 1)), min_size=1, max_size=8),
    members=st.lists(st.integers(0, 1), min_size=8, max_size=8),
)
@settings(deadline=None)
def test_an_extended_route_is_known_as_a_new_one_would_be(
    parts: list[tuple[list[int], int]], members: list[int]
) -> None:
    plain, extended = PrefixIndex(10_000), PrefixIndex(10_000)
    both = [Member(0), Member(1)]
    one, tokens = route([]), []
    for (more, version), index in zip(parts, members, strict=False):
        tokens += more
        new = route(tokens, version)
        one.extend(new.tokens, version)
        keys = new.prefix_keys(BLOCK)
        # The key of the whole prompt comes last. A conversation with a worker needs no such key.
        assert one.prefix_keys(BLOCK) in (keys, keys[:-1])
        assert set(plain.holders(one.prefix_keys(BLOCK))) == set(
            extended.holders(new.prefix_keys(BLOCK))
        )
        new.record(plain, both[index], BLOCK)
        one.record(extended, both[index], BLOCK)
    for member in both:
        plain.forget(member)
        extended.forget(member)
        found = [set(i.holders(one.prefix_keys(BLOCK))) for i in (plain, extended)]
        assert found[0] == found[1]
        assert member not in found[0]


def test_who_goes_on_from_a_conversation_goes_to_its_worker() -> None:
    """All conversations start with the same prompt, and each continues with its own turns."""
    index, prompt = PrefixIndex(10_000), [7] * 10
    members = [Member(n) for n in range(3)]
    for n, member in enumerate(members):
        one = route(prompt)
        for turn in range(60):
            one.extend(route(prompt + [n] * (turn * 5)).tokens, 0)
            one.record(index, member, BLOCK)
    assert list(index.holders(route([*prompt, 9, 9, 9]).prefix_keys(BLOCK))) == members
    for n, member in enumerate(members):
        for turns in (3, 20, 60):
            fork = route(prompt + [n] * (turns * 5) + [9] * 7)
            assert list(index.holders(fork.prefix_keys(BLOCK))) == [member]


@given(size=st.integers(1, 3000), less=st.floats(0, 1), tails=st.tuples(*[st.integers(0, 99)] * 3))
@settings(deadline=None)
def test_of_a_prefix_at_most_an_eighth_or_a_block_goes_unnoticed(
    size: int, less: float, tails: tuple[int, int, int]
) -> None:
    """A worker that holds this much more of the prefix than another gets the call."""
    index, (more, fewer) = PrefixIndex(10_000), (Member(0), Member(1))
    short = size - max(BLOCK, -(-size // 8))
    tokens = [n % 5 for n in range(size)]
    index.record(route([*tokens, *[5] * tails[0]]).prefix_keys(BLOCK), more)
    if short > 0:
        other = tokens[: round(less * short)]
        index.record(route([*other, *[6] * (tails[1] + 1)]).prefix_keys(BLOCK), fewer)
    if size >= BLOCK:
        asked = route([*tokens, *[7] * tails[2]]).prefix_keys(BLOCK)
        assert list(index.holders(asked)) == [more]


def test_a_long_prompt_has_few_keys() -> None:
    assert [len(route([1] * n).prefix_keys(32)) for n in (512, 1024, 32_768)] == [16, 24, 64]


@given(ends=st.lists(st.integers(0, 1 << 16), max_size=60), members=st.integers(2, 6))
@settings(deadline=None)
def test_requests_takes_the_member_with_the_fewest_calls(ends: list[int], members: int) -> None:
    fabric = make_fabric(members, window=4, routing=("requests",))
    running = []
    for n in ends:
        if n % 3 == 0 and running:
            finish(fabric, running.pop(n % len(running)))
        elif len(running) < members * 4:
            least = min(m.load for m in fabric.members.values())
            call = submit(fabric)
            assert call.worker is not None
            assert call.worker.load == least + 1
            running.append(call)


def test_kv_cache_takes_the_emptiest_cache() -> None:
    fabric = make_fabric(4, window=2, routing=("kv-cache", "requests"))
    for member, usage in zip(fabric.members.values(), (0.9, 0.301, 0.304, -1.0), strict=True):
        member.reported = Load(usage)
    # A worker without a report has just arrived. 0.301 and 0.304 count as equal, so the load
    # decides.
    assert [worker_of(submit(fabric)) for _ in range(8)] == [3, 3, 1, 2, 1, 2, 0, 0]


def test_kv_cache_without_reports_passes_to_the_next_strategy() -> None:
    fabric = make_fabric(3, routing=("kv-cache", "round-robin"))
    assert {worker_of(submit(fabric)) for _ in range(3)} == {0, 1, 2}


def test_round_robin_skips_who_is_full_or_gone() -> None:
    fabric = make_fabric(3, window=4, routing=("round-robin",))
    turn = [worker_of(submit(fabric)) for _ in range(6)]
    assert turn[:3] == turn[3:]
    assert set(turn) == {0, 1, 2}
    for _ in range(2):
        submit(fabric, pinned=1)
    assert {worker_of(submit(fabric)) for _ in range(2)} == {0, 2}
    fabric.member_lost(0, "it was killed", 0.0)
    assert worker_of(submit(fabric)) == 2


@pytest.mark.parametrize("strategy", ROUTING_STRATEGIES)
def test_a_thousand_members_share_the_work(strategy: str) -> None:
    fabric = make_fabric(1000, window=8, routing=(strategy,))
    for member in fabric.members.values():
        member.reported = Load(0.5)
    calls = [submit(fabric, route=route([n] * 32)) for n in range(2000)]
    assert set(Counter(map(worker_of, calls)).values()) == {2}
    validate(fabric)


@given(asks=st.lists(prompts, max_size=60), entries=st.integers(2, 12))
@settings(deadline=None)
def test_prefix_index_is_bounded_and_remembers_the_recent(
    asks: list[list[int]], entries: int
) -> None:
    index, member = PrefixIndex(entries), Member(0)
    member.state = "ready"
    for tokens in asks:
        keys = route(tokens).prefix_keys(BLOCK)
        index.record(keys, member)
        assert len(index) <= entries + 2 * 5, "at most one long prompt beyond each half"
        assert list(index.holders(keys)) == [member]


def test_prefix_index_forgets_the_least_recently_used() -> None:
    index, member = PrefixIndex(20), Member(0)
    member.state = "ready"
    kept, dropped = (route([n] * BLOCK).prefix_keys(BLOCK) for n in (1, 2))
    index.record(dropped, member)
    for n in range(100, 150):
        index.record(kept, member)
        index.record(route([n] * BLOCK).prefix_keys(BLOCK), member)
    assert list(index.holders(kept)) == [member]
    assert list(index.holders(dropped)) == []


def converse(fabric: Fabric, one: Route) -> Call:
    """Submit the next turn of a conversation."""
    one.extend(one.tokens + route([1] * BLOCK).tokens, 0)
    return submit(fabric, route=one)


@pytest.mark.parametrize("strategy", ROUTING_STRATEGIES)
def test_turns_that_wait_return_to_their_workers(strategy: str) -> None:
    """This holds for any number of waiting turns, and for any order in which workers get room."""
    fabric = make_fabric(3, window=2, routing=(strategy,), prefix_block=BLOCK)
    talks = [route([n]) for n in range(30)]
    running = [converse(fabric, one) for one in talks]
    homes: dict[int, int | None] = {}
    order = random.Random(0)
    for _ in range(600):
        n = order.choice([n for n, call in enumerate(running) if call.worker is not None])
        assert homes.setdefault(n, worker_of(running[n])) == worker_of(running[n])
        finish(fabric, running[n])
        running[n] = converse(fabric, talks[n])
    assert len(homes) == 30


def test_a_waiting_prompt_goes_to_the_only_holder_of_its_prefix() -> None:
    fabric = make_fabric(2, window=1, routing=("prefix-aware",), prefix_block=BLOCK)
    first = [submit(fabric, route=route([n] * BLOCK)) for n in range(2)]
    assert [worker_of(call) for call in first] == [0, 1]
    later = [submit(fabric, route=route([n] * 2 * BLOCK)) for n in range(2)]
    finish(fabric, first[1])
    assert [worker_of(call) for call in later] == [None, 1]
    finish(fabric, first[0])
    assert [worker_of(call) for call in later] == [0, 1]


def test_samples_of_one_prompt_that_wait_share_a_worker() -> None:
    """No worker holds the prefix at first, and only one worker at a time has room."""
    fabric = make_fabric(4, window=3, routing=("prefix-aware",), prefix_block=BLOCK)
    before = [submit(fabric) for _ in range(12)]
    groups = [[submit(fabric, route=route([n] * 9)) for _ in range(5)] for n in range(12)]
    order, waiting = random.Random(0), before
    while waiting := [call for call in waiting if call.worker is not None]:
        finish(fabric, waiting.pop(order.randrange(len(waiting))))
        waiting += [c for g in groups for c in g if c.state == SENT and c not in waiting]
    workers = [len({worker_of(call) for call in group}) for group in groups]
    assert sum(workers) <= 15, "at the end, who has nothing else takes some"


def test_a_call_for_a_full_worker_is_not_overtaken_for_ever() -> None:
    fabric = make_fabric(2, window=1, routing=("requests",))
    slow, quick = (route([n]) for n in range(2))
    converse(fabric, slow)
    running = converse(fabric, quick)
    waiting = converse(fabric, slow)
    passed = 0
    while waiting.worker is None:
        following = converse(fabric, quick)
        finish(fabric, running)
        running = following
        passed += following.worker is not None
    assert worker_of(waiting) == 1
    assert passed == 64 + 2 * 2, "with two that wait, twice that, and 64"


def test_a_higher_priority_comes_before_what_returns() -> None:
    fabric = make_fabric(2, window=1, routing=("requests",))
    talks = [route([n]) for n in range(2)]
    running = [converse(fabric, one) for one in talks]
    converse(fabric, talks[0])
    urgent = submit(fabric, priority=1)
    finish(fabric, running[0])
    assert worker_of(urgent) == 0


def test_what_waited_for_a_worker_that_is_gone_goes_to_another() -> None:
    fabric = make_fabric(2, window=1, routing=("requests",))
    talks = [route([n]) for n in range(2)]
    running = [converse(fabric, one) for one in talks]
    waiting = converse(fabric, talks[0])
    fabric.drain_member(0, 0.0)
    finish(fabric, running[1])
    assert worker_of(waiting) == 1


def test_turns_that_are_cancelled_while_they_wait_are_let_go() -> None:
    fabric = make_fabric(2, window=1, routing=("requests",))
    talks = [route([n]) for n in range(2)]
    for one in talks:
        converse(fabric, one)
    waiting = [converse(fabric, one) for one in talks for _ in range(500)]
    for call in waiting:
        fabric.cancel(call, 0.0)
    assert not any(member.returning for member in fabric.members.values())


def test_sessions_are_bounded() -> None:
    fabric = make_fabric(2, routing=("requests",), prefix_entries=10)
    for n in range(100):
        finish(fabric, submit(fabric, route=route([1], session=str(n))))
    assert list(fabric.router.sessions) == [str(n) for n in range(90, 100)]


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"routing": ()}, "at least one strategy"),
        ({"routing": ("fastest",)}, "unknown routing strategy 'fastest'; known: prefix-aware"),
        ({"max_queue": -1}, "max_queue must be at least 0"),
        ({"max_queue_bytes": -1}, "max_queue_bytes must be an integer of at least 0, got -1"),
        ({"max_queue_bytes": 1e9}, "max_queue_bytes must be an integer of at least 0"),
        ({"max_calls_per_client": 0}, "max_calls_per_client must be an integer of at least 1"),
        ({"max_unread_bytes": 1 << 20}, "max_unread_bytes must be an integer of at least 4,194"),
        ({"max_attempts": 0}, "max_attempts must be at least 1"),
        ({"prefix_block": 0}, "prefix_block must be at least 1"),
        ({"prefix_entries": 0}, "prefix_entries must be at least 1"),
        ({"overload": float("nan")}, "overload must be at least 0"),
    ],
)
def test_settings_out_of_range(settings: dict[str, object], text: str) -> None:
    with pytest.raises(UsageError, match=text):
        FabricConfig(**settings)  # type: ignore[arg-type]
