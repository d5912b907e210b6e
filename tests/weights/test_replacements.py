"""A new worker gets the current weights from any available source, and never serves older ones."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from engine.policies import PROMPTS, Lab, Policies, gated, until_running
from processes import strike as stop

import sglrl
from sglrl.weights.catch_up import CatchUp

pytestmark = pytest.mark.asyncio(loop_scope="session")

WANTED = {"max_new_tokens": 150, "logprobs": True, "ignore_eos": True}


@pytest.fixture(autouse=True)
def no_worker_is_left() -> None:
    """Accept other processes after a test: the pool of this module replaces its workers."""


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def lab(models: Path) -> AsyncIterator[Lab]:
    policies = Policies(models / "replaced")
    # Without a copy in the memory of the host, a replacement depends on the other worker.
    async with sglrl.launch(
        policies[0].folder, device="cpu", replicas=2, restarts=100, keep_weights=None
    ) as client:
        yield Lab(client, policies)


def strike(client: sglrl.Client, *indices: int) -> None:
    for index in indices:
        os.kill(client.workers[index].pid, signal.SIGKILL)


async def kill(client: sglrl.Client, *indices: int) -> None:
    """Kill workers and return when the driver has noticed the losses."""
    before = {index: client.workers[index].pid for index in indices}
    strike(client, *indices)
    async with asyncio.timeout(300):
        for index, pid in before.items():
            while client.workers[index].state == "ready" and client.workers[index].pid == pid:
                await client.pool.driver.change()


async def until(client: sglrl.Client, *states: str) -> None:
    async with asyncio.timeout(300):
        while [w.state for w in client.workers][: len(states)] != list(states):
            await client.pool.driver.change()


def begin(lab: Lab, count: int) -> list[asyncio.Task[sglrl.Completion]]:
    return [
        asyncio.ensure_future(lab.client.generate(input_ids=[*PROMPTS[1], i], **WANTED))
        for i in range(count)
    ]


async def finish(lab: Lab, calls: list[asyncio.Task[sglrl.Completion]]) -> None:
    for completion in await asyncio.gather(*calls):
        assert len(completion.output_ids) == WANTED["max_new_tokens"]
        lab.check_history(completion)


async def test_before_any_update(lab: Lab) -> None:
    await kill(lab.client, 0)
    await lab.client.wait_until_full()
    await lab.check(PROMPTS[:2], 4)


async def test_from_the_other_worker_which_goes_on(lab: Lab) -> None:
    await lab.update(1)
    await lab.update(2)
    calls = begin(lab, 8)
    await until_running(lab.client, 2)
    await kill(lab.client, 0)
    await finish(lab, calls)
    await lab.client.wait_until_full()
    await lab.check()
    # The group is formed again: the new worker has the name of a lost member.
    await lab.update(1)
    await lab.check()


async def test_a_loss_in_an_update(lab: Lab) -> None:
    """The update continues without the lost worker, and the replacement waits until it finishes."""
    weights, gate = gated(lab.policies[2].model.state_dict())
    update = asyncio.ensure_future(lab.update(2, weights))
    await gate.reached()
    await kill(lab.client, 1)
    await until(lab.client, "ready", "syncing")
    assert lab.client.workers[1].weight_version == 0
    gate.open()
    assert (await update).workers == [0]
    await lab.client.wait_until_full()
    await lab.check()


async def test_an_added_worker(lab: Lab) -> None:
    await lab.other()
    (added,) = await lab.client.add_workers()
    assert added == 2
    await lab.check()
    await lab.client.remove_worker(added)
    assert [w.state for w in lab.client.workers] == ["ready", "ready", "retired"]


async def test_nobody_has_them(lab: Lab, caplog: pytest.LogCaptureFixture) -> None:
    """Replacements wait for the next update, and calls wait with them."""
    await lab.other()
    await kill(lab.client, 0, 1)
    await until(lab.client, "stale", "stale")
    assert "no other worker holds the current weights" in caplog.text
    call = begin(lab, 1)
    with pytest.raises(sglrl.WeightUpdateError, match=r"no worker has .*send all of them"):
        # A partial update would leave the workers with a part of weights that no worker has.
        name, tensor = next(iter(lab.current.model.state_dict().items()))
        await lab.client.update_weights({name: tensor}, partial=True)
    await lab.other()
    await finish(lab, call)
    await lab.client.wait_until_full()
    await lab.check()


async def test_the_sender_is_lost_too(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    await lab.other()
    copy_worker = CatchUp._copy_worker

    async def observed(
        catch_up: CatchUp, receivers: Any, senders: Any, version: int, deadline: Any
    ) -> bool:
        strike(lab.client, senders[0].worker)
        return await copy_worker(catch_up, receivers, senders, version, deadline)

    monkeypatch.setattr(CatchUp, "_copy_worker", observed)
    await kill(lab.client, 0)
    await until(lab.client, "stale", "stale")
    monkeypatch.undo()
    await lab.other()
    await lab.client.wait_until_full()
    await lab.check()


async def test_the_sender_is_lost_in_the_peer_copy(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The receiver does not wait for the lost sender, but copies from another worker."""
    await lab.other()
    (added,) = await lab.client.add_workers()
    ranks = lab.client.pool.weights._ranks
    send, struck, sender = ranks.send, False, -1

    def observed(rank: Any, message: Any) -> None:
        nonlocal struck, sender
        if type(message).__name__ == "SendPeerCopy":
            sender = rank.worker
        elif type(message).__name__ == "ReceivePeerCopy" and not struck:
            struck = True
            strike(lab.client, sender)
        send(rank, message)

    monkeypatch.setattr(ranks, "send", observed)
    await kill(lab.client, 1)
    async with asyncio.timeout(300):
        await lab.client.wait_until_full()
    assert struck
    await lab.check()
    await lab.client.remove_worker(added)


async def test_the_receiver_is_lost_in_the_peer_copy(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    await lab.other()
    ranks = lab.client.pool.weights._ranks
    send, struck = ranks.send, False

    def observed(rank: Any, message: Any) -> None:
        nonlocal struck
        send(rank, message)
        if type(message).__name__ == "ReceivePeerCopy" and not struck:
            struck = True
            strike(lab.client, rank.worker)

    monkeypatch.setattr(ranks, "send", observed)
    await kill(lab.client, 1)
    await lab.client.wait_until_full()
    assert struck
    await lab.check()


async def test_from_the_files_of_the_last_update(lab: Lab) -> None:
    seed = 1 if lab.current is not lab.policies[1] else 2
    report = await lab.client.update_weights_from_disk(lab.policies[seed].folder)
    lab.by_version[report.version] = lab.policies[seed]
    await kill(lab.client, 0, 1)
    await lab.client.wait_until_full()
    await lab.check()


@pytest.mark.parametrize("what", ["changed", "gone"])
async def test_the_files_of_the_last_update_are_not_what_they_were(
    lab: Lab, caplog: pytest.LogCaptureFixture, tmp_path: Path, what: str
) -> None:
    """A worker that loads the files again would have weights that belong to no version."""
    seed = 1 if lab.current is not lab.policies[1] else 2
    folder = tmp_path / "checkpoint"
    shutil.copytree(lab.policies[seed].folder, folder)
    report = await lab.client.update_weights_from_disk(folder)
    lab.by_version[report.version] = lab.policies[seed]
    if what == "gone":
        shutil.rmtree(folder)
    else:
        # The next checkpoint replaces the files in the same folder.
        shutil.copytree(lab.policies[3 - seed].folder, folder, dirs_exist_ok=True)
    await kill(lab.client, 0, 1)
    await until(lab.client, "stale", "stale")
    assert f"does not hold the weights of version {report.version} any more" in caplog.text
    await lab.other()
    await lab.client.wait_until_full()
    await lab.check()


async def test_an_update_waits_for_a_worker(lab: Lab) -> None:
    await kill(lab.client, 0, 1)
    report = await lab.other()
    assert report.workers
    await lab.client.wait_until_full()
    await lab.check()


async def on_message(
    lab: Lab, monkeypatch: pytest.MonkeyPatch, kind: str, act: Callable[[], None]
) -> None:
    """Kill worker 1, and call ``act`` at a message of its replacement's copy.

    Calls ``act`` right after the first message of this kind is sent, then returns.
    """
    ranks = lab.client.pool.weights._ranks
    send, sent = ranks.send, asyncio.Event()

    def observed(rank: Any, message: Any) -> None:
        send(rank, message)
        if type(message).__name__ == kind and not sent.is_set():
            sent.set()
            act()

    monkeypatch.setattr(ranks, "send", observed)
    await kill(lab.client, 1)
    async with asyncio.timeout(300):
        await sent.wait()


async def updates_soon(lab: Lab, *workers: int) -> None:
    """Update the given workers and wait until all serve, long before a copy would time out."""
    async with asyncio.timeout(300):
        report = await lab.other(timeout=5.0)
        assert set(workers) <= set(report.workers)
        await lab.client.wait_until_full()
    await lab.check()


async def test_a_replacement_is_lost_before_its_sender_answers(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sender is stopped until the loss has been noticed.

    Nothing waits for messages that can never arrive, and the next replacement does not get the
    messages that were meant for the lost one.
    """
    await lab.other()
    (added,) = await lab.client.add_workers()
    sender, receiver = lab.client.workers[0].pid, -1

    def act() -> None:
        nonlocal receiver
        stop(sender, signal.SIGSTOP)
        receiver = lab.client.workers[1].pid
        strike(lab.client, 1)

    try:
        await on_message(lab, monkeypatch, "SendPeerCopy", act)
        async with asyncio.timeout(300):
            while lab.client.workers[1].pid == receiver and lab.client.workers[1].state != "lost":
                await lab.client.pool.driver.change()
    finally:
        os.kill(sender, signal.SIGCONT)
    await updates_soon(lab, 0, added)
    await lab.client.remove_worker(added)


@pytest.mark.parametrize("kind", ["SendPeerCopy", "ReceivePeerCopy"])
@pytest.mark.parametrize("delay", [0.0, 0.002, 0.008, 0.03])
async def test_a_replacement_is_lost_when_its_copy_has_begun(
    lab: Lab, monkeypatch: pytest.MonkeyPatch, kind: str, delay: float
) -> None:
    """The replacement is lost at any stage of the copy."""
    await lab.other()
    (added,) = await lab.client.add_workers()
    loop = asyncio.get_running_loop()

    def act() -> None:
        # Read the pid now: another process may have taken its place after the delay.
        loop.call_later(delay, kill_quietly, lab.client.workers[1].pid)

    await on_message(lab, monkeypatch, kind, act)
    await updates_soon(lab, 0, added)
    await lab.client.remove_worker(added)


def kill_quietly(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
