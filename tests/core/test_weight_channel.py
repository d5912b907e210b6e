"""The coordinator of weight updates. The test itself plays the ranks and the senders."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
import pytest

from sglrl.core.weight_update import COMMIT, JOIN, PREPARE, STAGE
from sglrl.errors import (
    DeadlineExceeded,
    InvalidWeights,
    ProtocolError,
    UsageError,
    WeightUpdateError,
    WorkerLost,
)
from sglrl.weights.deadline import Deadline
from sglrl.weights.update_request import UpdateRequest
from sglrl.weights.update_run import MIN_COMMIT_SECONDS
from sglrl.wire.calls import ErrorBody
from sglrl.wire.codec import encode
from sglrl.wire.weights import (
    Abort,
    Checksums,
    Commit,
    Committed,
    Describe,
    Join,
    ModelDescription,
    Prepare,
    Propose,
    RankAnswer,
    RankHello,
    SenderAccepted,
    Stage,
    TensorSpec,
    ToRank,
    rank_identity,
)

from .weight_pool import NO, SETTINGS, SPECS, Pool, Sender, answer, raw


def played(test: Callable[[Pool], Awaitable[None]]) -> Callable[[], None]:
    async def play() -> None:
        pool = Pool(2)
        await test(pool)
        assert pool.asked.empty()
        await pool.channel.close()

    def run() -> None:
        asyncio.run(play())

    run.__name__ = test.__name__
    run.__doc__ = test.__doc__
    return run


@played
async def test_late_answers_are_not_those_of_the_next_attempt(pool: Pool) -> None:
    sender = Sender(pool, "a")
    update = asyncio.create_task(pool.channel.updates.update(UpdateRequest(specs=SPECS), sender))
    await pool.describes_itself()
    await pool.goes_well(sender, [0, 1], Join, Prepare)
    stages = [await pool.next(who, Stage) for who in (0, 1, "a")]
    pool.on_lost(1)
    (abort,) = await pool.goes_well(sender, [0], Abort)
    assert abort.leave
    assert abort.id == stages[0].id

    joins = [await pool.next(who, Join) for who in (0, "a")]
    assert joins[0].id == joins[1].id != abort.id
    assert joins[0].size == 2
    # Late answers from threads that were still in the old group.
    late = RankAnswer(abort.id, JOIN, NO)
    pool.say(0, late)
    pool.say("a", late, sender)
    pool.say("a", answer(joins[1]), sender)
    pool.say(0, answer(joins[0]))
    await pool.goes_well(sender, [0], Prepare)
    for who in (0, "a"):
        message = await pool.next(who, Stage)
        pool.say(who, RankAnswer(abort.id, STAGE), sender if who == "a" else None)
    assert pool.asked.empty(), "nobody has staged in this attempt"
    pool.say("a", answer(message), sender)
    pool.say(0, answer(message))
    await pool.goes_well(sender, [0], Commit)
    report = await update
    assert report.attempts == 2
    assert report.workers == [0]
    assert pool.channel.version == 1


@played
async def test_a_short_time_out_ends_nobody_who_commits(pool: Pool) -> None:
    """The timeout may only abort an update. In the commit it is too late for that."""
    first = asyncio.create_task(pool.channel.describe(60.0))
    await pool.describes_itself()
    await first
    sender = Sender(pool, "a")
    begun = time.monotonic()
    request = UpdateRequest(specs=SPECS, timeout=0.05)
    update = asyncio.create_task(pool.channel.updates.update(request, sender))
    await pool.goes_well(sender, [0, 1], Join, Prepare, Stage)
    commits = [await pool.next(who, Commit) for who in (0, 1)]
    run = pool.channel.updates.run
    assert run is not None
    # The timeout has passed.
    run.machine.tick(begun + 0.9 * MIN_COMMIT_SECONDS)
    assert not run.machine.outbox
    for who, message in enumerate(commits):
        pool.say(who, answer(message))
    assert (await update).workers == [0, 1]
    assert not pool.expelled


@played
async def test_what_cannot_be_asked_ends_the_update(pool: Pool) -> None:
    """All receivers are told to abort, and no caller waits for a timeout."""

    class Broken(Sender):
        def ask(self, message: ToRank) -> None:
            if isinstance(message, Stage):
                raise RuntimeError("no")
            super().ask(message)

    sender = Broken(pool, "a")
    update = asyncio.create_task(pool.channel.updates.update(UpdateRequest(specs=SPECS), sender))
    await pool.describes_itself()
    await pool.goes_well(sender, [0, 1], Join, Prepare)
    for who in (0, 1):
        await pool.next(who, Stage)
    await pool.goes_well(sender, [0, 1], Abort)
    with pytest.raises(WeightUpdateError, match="stage could not be asked: RuntimeError"):
        await update
    assert not pool.expelled
    assert pool.channel.version == 0


@played
async def test_a_group_is_used_again(pool: Pool) -> None:
    sender = Sender(pool, "a")
    join = asyncio.create_task(pool.channel.updates.join(sender, Deadline(5.0)))
    await pool.goes_well(sender, [0, 1], Join)
    await join
    await pool.channel.updates.join(sender, Deadline(5.0))
    for version in (1, 2):
        update = asyncio.create_task(
            pool.channel.updates.update(UpdateRequest(specs=SPECS), sender)
        )
        if version == 1:
            await pool.describes_itself()
        await pool.goes_well(sender, [0, 1], Prepare, Stage, Commit)
        assert (await update).version == version


@played
async def test_a_manifest_that_a_rank_has_is_not_sent_again(pool: Pool) -> None:
    sender = Sender(pool, "a")
    same, other = UpdateRequest(specs=SPECS), UpdateRequest(specs=[*SPECS])

    async def begin(request: UpdateRequest) -> tuple[asyncio.Task[Any], list[Prepare]]:
        update = asyncio.create_task(pool.channel.updates.update(request, sender))
        if pool.channel.updates._description is None:
            await pool.describes_itself()
            await pool.goes_well(sender, [0, 1], Join)
        return update, [await pool.next(who, Prepare) for who in (0, 1)]

    async def goes_on(update: asyncio.Task[Any], asked: list[Prepare]) -> None:
        for who, message in enumerate(asked):
            pool.say(who, answer(message))
        await pool.goes_well(sender, [0, 1], Stage, Commit)
        await update

    update, first = await begin(same)
    assert [(m.tensors, m.like) for m in first] == [(SPECS, 0)] * 2
    await goes_on(update, first)
    update, second = await begin(same)
    assert [(m.tensors, m.like) for m in second] == [([], first[0].id)] * 2
    # Only worker 0 confirms this update's manifest.
    pool.say(0, answer(second[0]))
    pool.say(1, answer(second[1], NO))
    for who in (0, 1, "a"):
        message = await pool.next(who, Abort)
        pool.say(who, answer(message), sender if who == "a" else None)
    with pytest.raises(WeightUpdateError, match="worker 1: no"):
        await update
    update, third = await begin(same)
    assert [(m.tensors, m.like) for m in third] == [([], second[0].id), (SPECS, 0)]
    await goes_on(update, third)
    update, fourth = await begin(other)
    assert [(m.tensors, m.like) for m in fourth] == [(SPECS, 0)] * 2
    await goes_on(update, fourth)
    # The last update had another manifest.
    update, fifth = await begin(same)
    assert [(m.tensors, m.like) for m in fifth] == [(SPECS, 0)] * 2
    await goes_on(update, fifth)
    # A new process with the index of a lost worker has received no manifest.
    pool.on_lost(1)
    identity = rank_identity(b"again", 0)
    pool.identities[identity] = 1
    pool.channel.add_rank(1, 0, identity)
    pool.on_peer(identity, encode(RankHello(SETTINGS)))
    update = asyncio.create_task(pool.channel.updates.update(same, sender))
    for who, kind in ((0, Join), (1, Join), ("a", Join), (0, Prepare), (1, Prepare)):
        message = await pool.next(who, kind)
        if kind is Join and who == 1:
            pool.on_peer(identity, encode(answer(message)))
        elif kind is Join:
            pool.say(who, answer(message), sender if who == "a" else None)
        else:
            assert message.like == (fifth[0].id if who == 0 else 0)
    update.cancel()
    for who in (0, 1, "a"):
        message = await pool.next(who, Abort)
        if who == 1:
            pool.on_peer(identity, encode(answer(message)))
        else:
            pool.say(who, answer(message), sender if who == "a" else None)
    with pytest.raises(asyncio.CancelledError):
        await update


@played
async def test_late_answers_to_a_cancelled_update_are_expected(pool: Pool) -> None:
    """They are not reported as messages of a stranger. Other answers are."""
    sender = Sender(pool, "a")
    identity = rank_identity(b"w0", 0)
    update = asyncio.create_task(pool.channel.updates.update(UpdateRequest(specs=SPECS), sender))
    await pool.describes_itself()
    await pool.goes_well(sender, [0, 1], Join, Prepare)
    stages = [await pool.next(who, Stage) for who in (0, 1, "a")]
    update.cancel()
    await pool.goes_well(sender, [0, 1], Abort)
    with pytest.raises(asyncio.CancelledError):
        await update
    # The ranks and the sender were in a broadcast, which ends now.
    for late in (answer(stages[0]), answer(stages[0], NO)):
        assert pool.on_peer(identity, encode(late))
        assert pool.channel.updates.sender_answered(sender, late)
    question = asyncio.create_task(pool.channel.checksums(["w"], 0.001))
    asked = await pool.next(0, Checksums)
    await pool.next(1, Checksums)
    with pytest.raises(DeadlineExceeded):
        await question
    shards = RankAnswer(asked.id, "checksums", None, raw([]))
    assert pool.on_peer(identity, encode(shards))
    for never in (asked.id + 99, 0, -1):
        assert not pool.on_peer(identity, encode(RankAnswer(never, STAGE)))
        assert not pool.channel.updates.sender_answered(sender, RankAnswer(never, STAGE))
    # Messages of a process that was killed may still be in the socket.
    pool.on_lost(0)
    assert pool.on_peer(identity, encode(answer(stages[0])))


@played
async def test_what_gives_all_weights_is_no_part(pool: Pool) -> None:
    """An update of all weights needs no worker with current weights, even if called partial."""
    other = TensorSpec("other", "float32", (1,))
    pool.channel.updates._description = ModelDescription([*SPECS, other], [])
    sender = Sender(pool, "a")
    whole = UpdateRequest(specs=[*SPECS, other], partial=True)
    first = asyncio.create_task(pool.channel.updates.update(whole, sender))
    await pool.goes_well(sender, [0, 1], Join, Prepare, Stage, Commit)
    await first
    for worker in (0, 1):
        pool.on_lost(worker)
    pool.come()
    part = UpdateRequest(specs=SPECS, partial=True)
    with pytest.raises(WeightUpdateError, match="no worker has the weights of version 1"):
        await pool.channel.updates.update(part, sender)
    again = asyncio.create_task(pool.channel.updates.update(whole, sender))
    await pool.goes_well(sender, [0, 1], Join, Prepare, Stage, Commit)
    assert (await again).version == 2
    assert pool.channel.versions.of == {0: 2, 1: 2}


@played
async def test_a_worker_that_missed_a_part_is_not_current(pool: Pool) -> None:
    """All parts have one version. The parts of a lost worker count for none of its successors."""
    other = TensorSpec("other", "float32", (1,))
    pool.channel.updates._description = ModelDescription([*SPECS, other], [])
    sender = Sender(pool, "a")
    told: list[int] = []
    pool.channel.on_version.add(lambda: told.append(pool.channel.version))
    part = UpdateRequest(specs=SPECS, partial=True)
    part_of_it = msgspec.structs.replace(part, same_version=True)
    more = UpdateRequest(specs=[other], partial=True, same_version=True)
    with pytest.raises(UsageError, match="first part without same_version"):
        await pool.channel.updates.update(more, sender)
    first = asyncio.create_task(pool.channel.updates.update(part, sender))
    await pool.goes_well(sender, [0, 1], Join, Prepare, Stage, Commit)
    assert (await first).version == 1
    pool.starting.add(1)
    second = asyncio.create_task(pool.channel.updates.update(more, sender))
    await pool.goes_well(sender, [0], Join, Prepare, Stage, Commit)
    assert (await second).version == pool.channel.version == 1
    assert pool.channel.versions.of == {0: 1, 1: -1}
    assert pool.channel.must_sync(1)
    assert told == [1, 1]
    # Nor does it get a third part, which would not be enough.
    pool.starting.clear()
    third = asyncio.create_task(pool.channel.updates.update(part_of_it, sender))
    await pool.goes_well(sender, [0], Prepare, Stage, Commit)
    await third
    assert pool.channel.versions.of == {0: 1, 1: -1}


@played
async def test_listeners_are_told_when_all_workers_have_their_version(pool: Pool) -> None:
    told: list[dict[int, int]] = []
    pool.channel.on_version.add(lambda: told.append(dict(pool.channel.versions.of)))
    sender = Sender(pool, "a")
    update = asyncio.create_task(pool.channel.updates.update(UpdateRequest(specs=SPECS), sender))
    await pool.describes_itself()
    await pool.goes_well(sender, [0, 1], Join, Prepare, Stage, Commit)
    await update
    assert told == [{0: 1, 1: 1}]


@played
async def test_an_update_that_is_cancelled_too_late_is_one(pool: Pool) -> None:
    """The pool is notified of the update, once."""
    told: list[int] = []
    pool.channel.versions.on_updated = lambda: told.append(pool.channel.version)
    sender = Sender(pool, "a")
    update = asyncio.create_task(pool.channel.updates.update(UpdateRequest(specs=SPECS), sender))
    await pool.describes_itself()
    await pool.goes_well(sender, [0, 1], Join, Prepare, Stage)
    commits = [await pool.next(who, Commit) for who in (0, 1)]
    update.cancel()
    await asyncio.sleep(0)
    for who, message in enumerate(commits):
        pool.say(who, answer(message))
    with pytest.raises(asyncio.CancelledError):
        await update
    assert told == [1]


@played
async def test_joining_another_sender_ends_the_group_before(pool: Pool) -> None:
    """The old group also ends if the new join fails, because the ranks have left it."""
    first, second = Sender(pool, "a"), Sender(pool, "b")
    join = asyncio.create_task(pool.channel.updates.join(first, Deadline(5.0)))
    await pool.goes_well(first, [0, 1], Join)
    await join
    join = asyncio.create_task(pool.channel.updates.join(second, Deadline(5.0)))
    for who in (0, 1, "b"):
        message = await pool.next(who, Join)
    pool.say(1, answer(message, NO))
    await pool.goes_well(second, [0, 1], Abort)
    with pytest.raises(WeightUpdateError, match="worker 1: no"):
        await join
    join = asyncio.create_task(pool.channel.updates.join(first, Deadline(5.0)))
    await pool.goes_well(first, [0, 1], Join)
    await join


@played
async def test_a_group_that_lost_a_member_is_formed_again(pool: Pool) -> None:
    sender = Sender(pool, "a")
    join = asyncio.create_task(pool.channel.updates.join(sender, Deadline(5.0)))
    await pool.goes_well(sender, [0, 1], Join)
    await join
    update = asyncio.create_task(pool.channel.updates.update(UpdateRequest(specs=SPECS), sender))
    await pool.describes_itself()
    for who in (0, 1):
        message = await pool.next(who, Prepare)
        pool.say(who, answer(message, ErrorBody("InvalidWeights", "no room")))
    for who in (0, 1, "a"):
        message = await pool.next(who, Abort)
        assert not message.leave
    pool.say("a", answer(message), sender)
    pool.say(0, answer(message))
    pool.on_lost(1)
    with pytest.raises(InvalidWeights, match="worker 0: no room"):
        await update
    update = asyncio.create_task(pool.channel.updates.update(UpdateRequest(specs=SPECS), sender))
    await pool.goes_well(sender, [0], Join, Prepare, Stage, Commit)
    assert (await update).version == 1
    assert pool.expelled == []


@played
async def test_answers_that_were_not_asked_for_change_nothing(pool: Pool) -> None:
    sender = Sender(pool, "a")
    update = asyncio.create_task(pool.channel.updates.update(UpdateRequest(specs=SPECS), sender))
    await pool.describes_itself()
    await pool.goes_well(sender, [0, 1], Join)
    prepare = await pool.next(0, Prepare)
    await pool.next(1, Prepare)
    nonsense = [
        RankAnswer(prepare.id, phase, error, raw(body))
        for phase in (COMMIT, STAGE, JOIN, "abort", "", "describe")
        for error, body in ((None, Committed(1.0)), (NO, None), (None, True))
    ]
    identity = rank_identity(b"w0", 0)
    for message in (*nonsense, RankAnswer(prepare.id + 1, PREPARE), RankHello(SETTINGS)):
        assert not pool.on_peer(identity, encode(message))
    assert not pool.channel.updates.sender_answered(Sender(pool, "b"), answer(prepare))
    assert not pool.channel.updates.sender_answered(sender, answer(prepare))
    for who in (0, 1):
        assert pool.on_peer(rank_identity(b"w%d" % who, 0), encode(answer(prepare)))
    # The rank has answered already. A second or different answer is too late.
    changed = RankAnswer(prepare.id, PREPARE, None, raw("nonsense"))
    assert not pool.on_peer(identity, encode(changed))
    await pool.goes_well(sender, [0, 1], Stage, Commit)
    report = await update
    assert (report.workers, report.mode) == ([0, 1], "full")
    # After the end it is late, and has no effect.
    assert pool.on_peer(identity, encode(RankAnswer(prepare.id, COMMIT)))
    assert pool.asked.empty()


@pytest.mark.parametrize(
    ("phase", "kinds"),
    [(PREPARE, (Join,)), (STAGE, (Join, Prepare)), (COMMIT, (Join, Prepare, Stage))],
)
def test_a_malformed_answer_is_a_no(phase: str, kinds: tuple[type[Any], ...]) -> None:
    """A malformed answer to PREPARE or from the sender ends the update.

    A worker that sends a malformed answer to COMMIT is expelled.
    """

    @played
    async def play(pool: Pool) -> None:
        sender = Sender(pool, "a")
        update = asyncio.create_task(
            pool.channel.updates.update(UpdateRequest(specs=SPECS), sender)
        )
        await pool.describes_itself()
        await pool.goes_well(sender, [0, 1], *kinds)
        kind = {PREPARE: Prepare, STAGE: Stage, COMMIT: Commit}[phase]
        asked: list[int | str] = [0, 1, "a"] if phase == STAGE else [0, 1]
        for who in asked:
            message = await pool.next(who, kind)
        liar = asked.pop(-1 if phase == STAGE else 0)
        wrong = RankAnswer(message.id, phase, None, raw(["what?"]))
        pool.say(liar, wrong, sender if liar == "a" else None)
        for who in asked:
            pool.say(who, answer(message))
        if phase == COMMIT:
            assert (await update).workers == [1]
            assert pool.expelled == [0]
            return
        await pool.goes_well(sender, [0, 1], Abort)
        with pytest.raises((WeightUpdateError, ProtocolError), match=f"answer to '{phase}'"):
            await update
        assert pool.expelled == []
        assert pool.channel.version == 0

    play()


@played
async def test_a_description_that_is_none(pool: Pool) -> None:
    update = asyncio.create_task(
        pool.channel.updates.update(UpdateRequest(specs=SPECS), Sender(pool, "a"))
    )
    message = await pool.next(0, Describe)
    pool.say(0, RankAnswer(message.id, "describe", None, raw(7)))
    with pytest.raises(ProtocolError, match="malformed answer to 'describe'"):
        await update


@played
async def test_settings_when_the_last_worker_is_lost_before_hello(pool: Pool) -> None:
    pool.on_lost(0)
    pool.on_lost(1)
    pool.channel.add_rank(0, 0, rank_identity(b"w0", 0))
    asked = asyncio.create_task(pool.channel.updates.settings(Deadline(5.0)))
    await asyncio.sleep(0)
    pool.on_lost(0)
    with pytest.raises(WorkerLost, match="no worker is left"):
        await asked


@played
async def test_a_sender_that_is_gone_ends_nobody_elses_update(pool: Pool) -> None:
    token = pool.channel.address.partition("#")[2].encode()
    gone = b"sender/%s/gone" % token
    sent = pool.send_to_peer
    pool.send_to_peer = lambda identity, frame: identity != gone and sent(identity, frame)  # type: ignore[method-assign]
    sender = Sender(pool, "a")
    update = asyncio.create_task(pool.channel.updates.update(UpdateRequest(specs=SPECS), sender))
    await pool.describes_itself()
    await pool.goes_well(sender, [0, 1], Join)
    # The coordinator's welcome does not reach the sender.
    assert pool.on_peer(gone, encode(RankHello(SETTINGS)))
    await pool.goes_well(sender, [0, 1], Prepare, Stage, Commit)
    assert (await update).version == 1
    assert len(pool.channel._senders) == 0


@played
async def test_a_remote_sender_that_is_lost_ends_its_update(pool: Pool) -> None:
    """The driver finds out when it sends the sender a message, and gives up at once."""
    identity = b"sender/%s/a" % pool.channel.address.partition("#")[2].encode()
    pool.identities[identity] = "a"  # type: ignore[assignment]
    assert pool.on_peer(identity, encode(RankHello(SETTINGS)))
    await pool.describes_itself()
    await pool.next("a", SenderAccepted)
    proposal = Propose(1, SPECS, None, "continue", "auto", False, 1, 60.0, True)
    assert pool.on_peer(identity, encode(proposal))
    for who in (0, 1, "a"):
        await pool.next(who, Join)
    sent = pool.send_to_peer
    pool.send_to_peer = lambda to, frame: to != identity and sent(to, frame)  # type: ignore[method-assign]
    pool.channel.on_connection_broken()
    async with asyncio.timeout(10.0):
        for who in (0, 1):
            pool.say(who, answer(await pool.next(who, Abort)))
        async with pool.channel.versions.lock:
            pass
    assert pool.channel.version == 0
    assert pool.expelled == []


@played
async def test_senders_are_remembered_in_bounds(pool: Pool) -> None:
    token = pool.channel.address.partition("#")[2].encode()
    pool.send_to_peer = lambda identity, frame: True  # type: ignore[method-assign]
    pool.channel.updates._description = ModelDescription(SPECS, [])
    for n in range(100):
        identity = b"sender/%s/%d" % (token, n)
        assert pool.on_peer(identity, encode(RankHello(SETTINGS)))
        # The sender asks again whether the coordinator is there.
        assert pool.on_peer(identity, encode(RankHello(SETTINGS)))
        await asyncio.sleep(0)
    assert len(pool.channel._senders) == 16
    assert not pool.on_peer(b"sender/%s/x" % token[:-1], encode(RankHello(SETTINGS)))
