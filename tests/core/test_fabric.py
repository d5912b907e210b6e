"""Single guarantees of the fabric. The state machine is too short or too random to show them."""

from __future__ import annotations

from typing import Any

import pytest

from sglrl.config import FabricConfig
from sglrl.core.effects import End, Restart
from sglrl.core.fabric import Fabric
from sglrl.core.invariants import validate
from sglrl.core.members import STALE
from sglrl.errors import Closed, DeadlineExceeded, Overloaded, UsageError, WorkerLost
from sglrl.wire.calls import Item, ItemKind

from .pool import finish, make_call, make_fabric, route, sent, submit, worker_of


def ends(fabric: Fabric) -> list[Any]:
    """Return the ``End`` effects in the outbox."""
    return [effect for effect in fabric.outbox if isinstance(effect, End)]


def last_end(fabric: Fabric) -> Any:
    """Return the last effect in the outbox, which must end a call."""
    assert isinstance(fabric.outbox[-1], End)
    return fabric.outbox[-1]


def test_waiting_calls_go_by_priority_then_age() -> None:
    fabric = make_fabric(1, window=1)
    running = [submit(fabric)]
    for priority in (0, 5, -1, 5, 0):
        submit(fabric, priority=priority)
        submit(fabric, priority=priority)
    sent(fabric)
    order = []
    while running:
        finish(fabric, running.pop())
        running = sent(fabric)
        order += [(-call.priority, call.id) for call in running]
    assert len(order) == 10
    assert order == sorted(order)


def test_a_full_queue_refuses_and_keeps_what_it_has() -> None:
    fabric = make_fabric(1, window=2, max_queue=3)
    for _ in range(5):
        submit(fabric)
    refused = make_call()
    with pytest.raises(Overloaded, match="max_queue=3"):
        fabric.submit(refused, 0.0)
    assert fabric.queue.waiting == 3
    assert refused.id not in fabric.calls
    fabric.cancel(refused, 0.0)
    validate(fabric)
    finish(fabric, fabric.calls[1])
    fabric.submit(make_call(), 0.0)


def test_nothing_is_sent_before_ready() -> None:
    fabric = Fabric()
    fabric.add_member(0)
    call = submit(fabric)
    pinned = submit(fabric, pinned=0)
    assert sent(fabric) == []
    fabric.member_ready(0, 8, 0.0)
    assert sent(fabric) == [pinned, call]


def test_without_a_worker_calls_fail_at_once_whatever_the_queue() -> None:
    fabric = make_fabric(1, max_queue=0)
    fabric.member_lost(0, "it was killed", 0.0)
    with pytest.raises(WorkerLost, match="no worker is left"):
        fabric.submit(make_call(), 0.0)


def test_pinned_to_a_worker_that_never_was() -> None:
    with pytest.raises(UsageError, match=r"no worker 7; workers: \[0, 1\]"):
        make_fabric(2).submit(make_call(pinned=7), 0.0)


@pytest.mark.parametrize("idempotent", [False, True])
@pytest.mark.parametrize("sent_before", [False, True])
def test_a_bound_call_ends_with_its_process(idempotent: bool, sent_before: bool) -> None:
    fabric = make_fabric(2, window=1)
    process = fabric.members[0]
    if not sent_before:
        submit(fabric, pinned=0)
    call = make_call(pinned=0, idempotent=idempotent)
    call.bound_to = process
    fabric.submit(call, 0.0)
    assert (call.worker is process) == sent_before
    fabric.member_lost(0, "it was killed", 1.0, returns=True)
    error = last_end(fabric).outcome
    assert isinstance(error, WorkerLost)
    assert error.state_lost
    for replaced in (False, True):
        if replaced:
            fabric.add_member(0)
            fabric.member_ready(0, 1, 2.0)
        late = make_call(pinned=0, idempotent=idempotent)
        late.bound_to = process
        with pytest.raises(WorkerLost, match="the state of its object"):
            fabric.submit(late, 2.0)
        fabric.cancel(late, 2.0)
    validate(fabric)


def test_a_bound_call_waits_for_a_process_that_is_away() -> None:
    """The process still has its object, and an idempotent call may run twice in it."""
    fabric = make_fabric(2)
    calls = [make_call(pinned=0, idempotent=idempotent) for idempotent in (True, False, True)]
    for call in calls:
        call.bound_to = fabric.members[0]
    fabric.submit(calls[0], 0.0)
    fabric.submit(calls[1], 0.0)
    fabric.member_away(0, "its connection is gone", 1.0)
    assert [end.call for end in ends(fabric)] == [calls[1]]
    fabric.submit(calls[2], 1.0)
    sent(fabric)
    fabric.member_ready(0, 8, 2.0)
    assert sent(fabric) == [calls[0], calls[2]]
    validate(fabric)


def test_an_idempotent_call_moves_until_its_attempts_are_used_up() -> None:
    fabric = make_fabric(4, max_attempts=3)
    call = submit(fabric, idempotent=True)
    for _ in range(3):
        assert call.worker is not None
        fabric.results(call.worker, [Item(call.id, ItemKind.CHUNK)], 1.0)
        fabric.member_lost(call.worker.index, "it was killed", 2.0)
        if fabric.calls:
            assert call.first_at == 0.0, "the first chunk of a lost attempt does not count"
    kinds = [type(effect) for effect in fabric.outbox]
    assert kinds.count(Restart) == 2
    assert kinds.count(End) == 1
    error = last_end(fabric).outcome
    assert isinstance(error, WorkerLost)
    assert "loss 3" in error.message
    assert error.worker == worker_of(call)


@pytest.mark.parametrize("stream", [False, True])
def test_a_resumable_call_moves_as_long_as_it_comes_forward(stream: bool) -> None:
    fabric = make_fabric(9, max_attempts=2)
    call = submit(fabric, idempotent=True, stream=stream, resumable=True)
    for n in range(7):
        assert call.worker is not None
        fabric.results(call.worker, [Item(call.id, ItemKind.CHUNK)], 1.0 + n)
        fabric.member_lost(call.worker.index, "it was killed", 2.0)
        assert call.first_at == 1.0, "its first chunk is its first chunk"
    assert End not in [type(effect) for effect in fabric.outbox]
    # After two losses in a row, the call may be the reason for the losses.
    assert call.worker is not None
    fabric.member_lost(call.worker.index, "it was killed", 9.0)
    end = last_end(fabric)
    assert end.call is call
    error = end.outcome
    assert isinstance(error, WorkerLost)


def test_broken_connections_do_not_end_a_call() -> None:
    """A call may be the cause of a worker's death, but not of a broken connection."""
    fabric = make_fabric(3, max_attempts=2)
    call = submit(fabric, idempotent=True)
    for n in range(7):
        worker = call.worker
        assert worker is not None
        fabric.member_away(worker.index, "its connection is gone", 1.0 + n)
        assert call.worker is not worker
        fabric.member_ready(worker.index, 8, 1.5 + n)
    assert call.worker is not None
    fabric.member_lost(call.worker.index, "it was killed", 9.0)
    assert End not in [type(effect) for effect in fabric.outbox]
    assert call.worker is not None
    fabric.member_lost(call.worker.index, "it was killed", 10.0)
    assert isinstance(last_end(fabric).outcome, WorkerLost)


def test_a_resumed_call_was_sent_when_its_first_worker_got_it() -> None:
    fabric = make_fabric(2)
    call = submit(fabric, idempotent=True, resumable=True)
    assert call.worker is not None
    fabric.results(call.worker, [Item(call.id, ItemKind.CHUNK)], 1.0)
    fabric.member_lost(call.worker.index, "it was killed", 2.0)
    assert worker_of(call) is not None
    assert (call.sent_at, call.first_at) == (0.0, 1.0)


def test_a_stream_that_has_begun_is_not_repeated() -> None:
    fabric = make_fabric(2)
    call = submit(fabric, idempotent=True, stream=True)
    assert call.worker is not None
    fabric.results(call.worker, [Item(call.id, ItemKind.CHUNK)], 1.0)
    fabric.member_lost(call.worker.index, "it was killed", 2.0)
    end = last_end(fabric)
    assert end.call is call
    error = end.outcome
    assert "already streamed" in error.message


def test_a_cancelled_call_keeps_its_place_until_it_is_confirmed() -> None:
    fabric = make_fabric(1, window=1)
    first, second = submit(fabric), submit(fabric)
    assert sent(fabric) == [first]
    fabric.cancel(first, 0.0)
    assert sent(fabric) == []
    finish(fabric, first, ItemKind.CANCELLED)
    assert sent(fabric) == [second]


@pytest.mark.parametrize("end", ["drain", "lose"])
def test_calls_that_wait_for_a_worker_that_leaves_end(end: str) -> None:
    fabric = make_fabric(2, window=1)
    submit(fabric, pinned=0)
    waiting = submit(fabric, pinned=0)
    if end == "drain":
        fabric.drain_member(0, 0.0)
    else:
        fabric.member_lost(0, "it was killed", 0.0)
    errors = {end.call: end.outcome for end in ends(fabric)}
    assert isinstance(errors[waiting], WorkerLost)
    assert "pinned to it" in errors[waiting].message
    validate(fabric)


def test_deadline_says_where_the_call_was() -> None:
    fabric = make_fabric(1, window=1)
    submit(fabric, deadline=1.0)
    submit(fabric, deadline=2.0)
    assert fabric.next_deadline() == 1.0
    fabric.tick(2.5)
    errors = [end.outcome for end in ends(fabric)]
    assert [type(e) for e in errors] == [DeadlineExceeded] * 2
    assert errors[0].message.endswith("last at a worker)")
    assert errors[1].message.endswith("last in the queue)")
    assert fabric.next_deadline() is None


def test_a_deadline_says_when_nobody_serves() -> None:
    fabric = make_fabric(1)
    for index in (1, 2):
        fabric.add_member(index)
    fabric.member_arrived(2, 8)
    fabric.members[2].move(STALE)
    submit(fabric, pinned=2, deadline=1.0)
    submit(fabric, pinned=1, deadline=2.0)
    fabric.member_lost(0, "it was killed", 0.0, returns=True)
    submit(fabric, deadline=3.0)
    fabric.tick(4.0)
    said = [end.outcome.message.partition("in the queue: ")[2] for end in ends(fabric)]
    assert said == [
        "worker 2 does not serve (1 stale: until the next weight update))",
        "worker 1 does not serve (1 starting))",
        "no worker serves (1 lost, 1 starting, 1 stale: until the next weight update))",
    ]


def test_nothing_is_accepted_after_close() -> None:
    fabric = make_fabric(1)
    fabric.close()
    with pytest.raises(Closed):
        fabric.submit(make_call(), 0.0)


def test_cancelled_calls_do_not_fill_the_queue() -> None:
    fabric = make_fabric(1, window=1)
    submit(fabric)
    for pinned in (None, 0):
        for _ in range(2000):
            fabric.cancel(submit(fabric, pinned=pinned), 0.0)
    assert fabric.queue.waiting == 0
    assert len(fabric.queue.fresh) <= 65
    assert not fabric.queue.homed
    assert len(fabric.members[0].pinned) <= 65
    validate(fabric)


def test_deadlines_of_ended_calls_are_swept() -> None:
    fabric = make_fabric(1)
    for n in range(2000):
        finish(fabric, submit(fabric, deadline=1e9 + n))
    assert len(fabric._deadlines) <= 67
    assert fabric.next_deadline() is None
    assert len(fabric._deadlines) == 0


def test_what_is_urgent_is_sent_to_a_worker_that_is_full() -> None:
    fabric = make_fabric(1, window=2, max_queue=1)
    running = [submit(fabric) for _ in range(2)]
    waiting = submit(fabric)
    assert sent(fabric) == running
    urgent = [submit(fabric, pinned=0, urgent=True) for _ in range(2)]
    assert sent(fabric) == urgent
    validate(fabric)
    for call in [running[0], *urgent]:
        finish(fabric, call)
        validate(fabric)
    assert sent(fabric) == [waiting]


def test_urgent_calls_wait_for_a_worker_and_are_served_first() -> None:
    fabric = Fabric(FabricConfig(max_queue=2))
    fabric.add_member(0)
    others = [submit(fabric, pinned=0, priority=9), submit(fabric)]
    urgent = submit(fabric, pinned=0, urgent=True, priority=10)
    assert sent(fabric) == []
    fabric.member_ready(0, 1, 0.0)
    assert sent(fabric) == [urgent]
    finish(fabric, urgent)
    assert sent(fabric) == others[:1]
    validate(fabric)


def test_waiting_calls_can_be_answered_for_a_worker() -> None:
    fabric = make_fabric(2, window=1)
    running = [submit(fabric, pinned=i) for i in range(2)]
    pinned = submit(fabric, pinned=1)
    free = submit(fabric)
    other = make_call()
    other.endpoint = "score"
    fabric.submit(other, 0.0)
    fabric.outbox.clear()
    assert fabric.answer_waiting("work", b"\x01", 1) == 1
    assert fabric.answer_waiting("work", b"\x02", None) == 1
    answers = [(end.call, end.outcome.kind, end.outcome.body) for end in ends(fabric)]
    assert answers == [(pinned, ItemKind.DONE, b"\x01"), (free, ItemKind.DONE, b"\x02")]
    assert fabric.queue.waiting == 1
    validate(fabric)
    fabric.outbox.clear()
    finish(fabric, running[0])
    assert sent(fabric) == [other]


def test_clients_take_turns_within_a_priority() -> None:
    fabric = make_fabric(1, window=1)
    running = submit(fabric)
    own = [submit(fabric) for _ in range(50)]
    one, two = fabric.queue.add_client(), fabric.queue.add_client()
    first = [submit(fabric, client=one) for _ in range(2)]
    second = [submit(fabric, client=two) for _ in range(3)]
    before = submit(fabric, client=two, priority=1)
    sent(fabric)
    order = []
    for _ in range(9):
        finish(fabric, running)
        (running,) = sent(fabric)
        order.append(running)
    # The client whose call was sent last, with a higher priority, comes last.
    turns = [own[0], first[0], second[0], own[1], first[1], second[1], own[2], second[2]]
    assert order == [before, *turns]
    validate(fabric)


def test_repeated_calls_go_before_younger_ones_of_their_client() -> None:
    fabric = make_fabric(2, window=1)
    client = fabric.queue.add_client()
    lost = submit(fabric, client=client, idempotent=True)
    other = submit(fabric)
    waiting = [submit(fabric, client=client) for _ in range(3)]
    sent(fabric)
    fabric.member_lost(worker_of(lost) or 0, "it was killed", 0.0)
    finish(fabric, other)
    assert sent(fabric) == [lost]
    finish(fabric, lost)
    assert sent(fabric) == waiting[:1]


def test_a_call_of_few_is_passed_by_less_often_than_one_of_many() -> None:
    """A call may be passed for as long as it would wait anyway.

    That is not long for the only call of a client.
    """
    fabric = make_fabric(2, window=1, routing=("requests",))
    client = fabric.queue.add_client()
    slow, quick = (route([n]) for n in range(2))
    slow.extend(slow.tokens, 0)
    quick.extend(quick.tokens, 0)
    submit(fabric, route=slow, client=client)
    running = submit(fabric, route=quick)
    alone = submit(fabric, route=slow, client=client)
    many = [submit(fabric, route=quick) for _ in range(500)]
    passed = 0
    while alone.worker is None:
        finish(fabric, running)
        running = many[passed]
        passed += running.worker is not None
    assert passed == 1 + 64 + 2 * 2, "first it was the turn of the other client"


def test_a_client_may_have_so_many_calls_wait() -> None:
    fabric = make_fabric(1, window=1, max_queue=5, max_calls_per_client=3)
    client = fabric.queue.add_client()
    running = [submit(fabric, client=client) for _ in range(4)]
    with pytest.raises(Overloaded, match=r"^3 calls of this client .*\(max_calls_per_client=3\)"):
        fabric.submit(make_call(client=client), 0.0)
    for _ in range(2):
        submit(fabric)
    with pytest.raises(Overloaded, match=r"^5 calls already .*\(max_queue=5\)"):
        fabric.submit(make_call(), 0.0)
    finish(fabric, running[0])
    submit(fabric, client=client, urgent=True, pinned=0)
    validate(fabric)


def test_calls_that_wait_may_have_so_many_bytes() -> None:
    fabric = make_fabric(1, window=1, max_queue_bytes=1000)
    running = submit(fabric, frames=[bytes(5000)])
    assert fabric.queue.queued_bytes == 0
    prompt = route([1] * 100)
    samples = [submit(fabric, route=prompt, priority=n) for n in range(3)]
    assert fabric.queue.queued_bytes == 400 + 3, "they share the prompt"
    refused = make_call(frames=[bytes(500), memoryview(bytes(200))])
    with pytest.raises(Overloaded) as full:
        fabric.submit(refused, 0.0)
    assert full.value.message == (
        "this call has 701 bytes, and the 3 calls that already wait for a worker have 403, of at "
        "most 1,000 (max_queue_bytes); await some of them before you submit more"
    )
    submit(fabric, frames=[bytes(500)])
    urgent = submit(fabric, frames=[bytes(700)], urgent=True, pinned=0)
    validate(fabric)
    assert fabric.queue.queued_bytes == 904
    fabric.cancel(samples[0], 0.0)
    assert fabric.queue.queued_bytes == 903
    for call in (running, urgent, samples[2]):
        finish(fabric, call)
    assert fabric.queue.queued_bytes == 501
    fabric.close()
    assert fabric.queue.queued_bytes == 0


def test_a_client_that_does_not_read_gets_no_more() -> None:
    fabric = make_fabric(2, window=2)
    client = fabric.queue.add_client(100)
    calls = []
    for _ in range(4):
        call = make_call(client=client)
        call.answer_bytes = 60
        fabric.submit(call, 0.0)
        calls.append(call)
    pinned = submit(fabric, client=client, pinned=1)
    assert sent(fabric) == calls[:2], "two answers are all that it may leave unread"
    client.unread += 60
    finish(fabric, calls[0])
    validate(fabric)
    other = submit(fabric)
    assert sent(fabric) == [other], "others have the room that it leaves"
    fabric.read_by_client(client, 20, 0.0)
    assert sent(fabric) == []
    fabric.read_by_client(client, 10, 0.0)
    assert sent(fabric) == [calls[2]]
    assert client.unread == 30 + 2 * 60
    fabric.read_by_client(client, 30, 0.0)
    assert sent(fabric) == []
    finish(fabric, calls[1])
    assert sent(fabric) == [pinned, calls[3]]
    client.unread += 30
    late = submit(fabric, client=client, deadline=5.0)
    fabric.tick(6.0)
    assert last_end(fabric).call is late
    assert last_end(fabric).outcome.message.endswith(
        "in the queue: 150 bytes of answers to its client are unread)"
    )
    validate(fabric)


def test_a_client_that_left_stands_in_no_queue() -> None:
    fabric = make_fabric(2, window=1, routing=("requests",))
    client = fabric.queue.add_client()
    talk = route([1])
    talk.extend(talk.tokens, 0)
    calls = [submit(fabric, route=talk, client=client) for _ in range(3)]
    calls.append(submit(fabric, route=route([2]), client=client))
    finish(fabric, calls[0])
    for call in calls:
        fabric.cancel(call, 0.0)
    fabric.queue.drop(client)
    queues = [fabric.queue.fresh, fabric.queue.homed]
    for member in fabric.members.values():
        queues += [member.returning, member.pinned]
    assert not any(queues)
    validate(fabric)
