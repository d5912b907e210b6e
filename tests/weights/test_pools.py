"""Weight updates of several workers: all workers or none, in order, repeatedly.

An update can be cancelled cleanly at any point.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest
import pytest_asyncio
from engine.policies import PROMPTS, Lab, Policies, gated, phase_event, phase_held

import sglrl
from sglrl.core.weight_update import JOIN
from sglrl.weights.update_run import UpdateRun

pytestmark = pytest.mark.asyncio(loop_scope="session")

WANTED = {"max_new_tokens": 24, "logprobs": True, "ignore_eos": True}


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def lab(models: Path) -> AsyncIterator[Lab]:
    """Two workers. Their model is so large that a staging copy would be visible in their memory."""
    policies = Policies(models / "wide", hidden_size=256)
    async with sglrl.launch(policies[0].folder, device="cpu", replicas=2) as client:
        yield Lab(client, policies)


def size(lab: Lab) -> int:
    return sum(t.nbytes for t in lab.policies[0].model.state_dict().values())


# --- reports and modes ----------------------------------------------------------------------------


async def test_the_first_update_forms_the_group(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    assert [w.weight_version for w in lab.client.workers] == [0, 0]
    first = await lab.other()
    assert first.join_ms > 0
    second = await lab.other()
    assert second.join_ms == 0
    joining = phase_event(monkeypatch, lab.client, JOIN)
    await lab.client.connect_weights()
    assert not joining.is_set(), "the group exists already"
    await lab.check(PROMPTS[:1])


@pytest.mark.parametrize("bucket_bytes", [1, 300_000, 1 << 30])
@pytest.mark.parametrize("mode", ["auto", "full", "bucketed"])
async def test_modes_and_buckets(lab: Lab, mode: str, bucket_bytes: int) -> None:
    before = lab.client.weight_version
    report = await lab.other(mode=mode, bucket_bytes=bucket_bytes)
    assert report.version == before + 1
    assert report.workers == [0, 1]
    assert report.bytes == size(lab)
    assert report.mode == ("bucketed" if mode == "bucketed" else "full")
    assert report.attempts == 1
    assert [w.weight_version for w in lab.client.workers] == [before + 1] * 2
    await lab.check(PROMPTS[:1], 4)


async def test_a_worker_pauses_when_one_of_its_ranks_has_no_room(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worker pauses even if its other ranks have room. Other workers continue."""
    mode = UpdateRun._mode
    monkeypatch.setattr(
        UpdateRun, "_mode", lambda run, m: "bucketed" if m[0] == 0 else mode(run, m)
    )
    running = asyncio.gather(
        *(lab.client.generate(input_ids=PROMPTS[0], **WANTED) for _ in range(8))
    )
    report = await lab.other(bucket_bytes=100_000)
    assert report.mode == "bucketed"
    assert len(await running) == 8
    await lab.check(PROMPTS[:1], 4)
    monkeypatch.undo()
    assert (await lab.other(bucket_bytes=100_000)).mode == "full"
    await lab.check(PROMPTS[:1], 4)


@pytest.mark.parametrize("mode", ["full", "bucketed"])
async def test_reports(lab: Lab, mode: str) -> None:
    r = await lab.other(mode=mode)
    for part in (r.prepare_ms, r.broadcast_ms, r.stage_ms, r.commit_ms):
        assert 0 < part < r.total_ms
    assert 0 <= r.gather_ms < r.total_ms
    assert len(r.pause_ms) == 2
    assert all(0 < pause < r.total_ms for pause in r.pause_ms)
    assert r.gb_per_s == pytest.approx(r.bytes / r.total_ms / 1e6)
    text = repr(r)
    assert text == str(r)
    assert "\n" not in text
    for part in (f"v{r.version}", "2 worker", mode, "pause", f"{r.total_ms:.1f} ms"):
        assert part in text


# --- many in a row, under load --------------------------------------------------------------------


async def test_fifty_updates_under_load(lab: Lab) -> None:
    client = lab.client
    first = client.weight_version
    stop = False
    completions: list[sglrl.Completion] = []

    async def caller(number: int) -> None:
        turn = 0
        while not stop:
            turn += 1
            prompt = [3 + number, 3 + turn % 500, *PROMPTS[number % 4]]
            completions.append(await client.generate(input_ids=prompt, **WANTED))

    def resident() -> list[int]:
        """Return the bytes of resident memory of the driver and of the workers."""
        pids = [None, *(w.pid for w in client.workers)]
        return [psutil.Process(pid).memory_info().rss for pid in pids]

    callers = [asyncio.ensure_future(caller(i)) for i in range(6)]
    at = 0
    early: list[int] = []
    for turn in range(1, 51):
        # Wait for completions at times, so that requests finish in many versions.
        at = len(completions)
        await lab.update(turn % 3, mode="bucketed" if turn % 5 == 0 else "full")
        while turn % 10 == 0 and len(completions) < at + 2:
            await asyncio.wait(callers, timeout=0.05)
        if turn == 10:
            early = resident()
    late = resident()
    stop = True
    await asyncio.gather(*callers)
    assert client.weight_version == first + 50
    assert [w.state for w in client.workers] == ["ready", "ready"]
    assert len(completions) > 12
    assert {c.resumed for c in completions} == {0}
    for completion in completions:
        assert completion.finish_reason == "length"
        assert len(completion.output_ids) == WANTED["max_new_tokens"]
        lab.check_history(completion)
    assert max(len(c.versions) for c in completions) > 1
    await lab.check()
    grown = [after - before for before, after in zip(early, late, strict=True)]
    assert max(grown) < 10 * size(lab), grown


# --- one after the other --------------------------------------------------------------------------


async def test_updates_wait_for_each_other(lab: Lab) -> None:
    before = lab.client.weight_version
    a, b = await asyncio.gather(lab.update(1), lab.update(2))
    assert (a.version, b.version) == (before + 1, before + 2)
    await lab.check(PROMPTS[:1])


async def test_an_update_may_refuse_to_wait(lab: Lab) -> None:
    before = lab.client.weight_version
    weights, gate = gated(lab.policies[3].model.state_dict())
    running = asyncio.ensure_future(lab.update(3, weights))
    await gate.reached()
    with pytest.raises(sglrl.UpdateInProgress):
        await lab.client.update_weights(lab.policies[1].model, wait=False)
    behind = asyncio.ensure_future(lab.update(1))
    # When this update's turn comes, its version is too low.
    late = asyncio.ensure_future(
        lab.client.update_weights(lab.policies[2].model, version=before + 1)
    )
    # The workers serve old weights meanwhile.
    made = await lab.client.generate(input_ids=PROMPTS[0], **WANTED)
    assert [s.version for s in made.versions] == [before]
    lab.check_history(made)
    gate.open()
    assert (await running).version == before + 1
    assert (await behind).version == before + 2
    with pytest.raises(sglrl.UsageError, match="above"):
        await late
    await lab.check(PROMPTS[:1])


@pytest.mark.parametrize("what", ["refused", "cancelled"])
async def test_one_that_never_begins_does_not_touch_the_one_that_runs(
    lab: Lab, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """The other update stops before the tensors of the running update are read."""
    before = lab.client.weight_version
    with monkeypatch.context() as patch:
        reached, release = phase_held(patch, lab.client, "prepare")
        running = asyncio.ensure_future(lab.update(3))
        await reached.wait()
        other = asyncio.ensure_future(
            lab.client.update_weights(lab.policies[1].model, wait=what == "cancelled")
        )
        if what == "refused":
            with pytest.raises(sglrl.UpdateInProgress):
                await other
        else:
            await asyncio.wait([other], timeout=0.05)
            other.cancel()
            with pytest.raises(asyncio.CancelledError):
                await other
        release()
        assert (await running).version == before + 1
    await lab.check(PROMPTS[:1])


# --- cancelled ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("phase", "mode"),
    [
        ("join", "full"),
        ("prepare", "full"),
        ("prepare", "bucketed"),
        ("stage", "full"),
    ],
)
async def test_a_cancelled_update_leaves_the_old_weights(
    lab: Lab, monkeypatch: pytest.MonkeyPatch, phase: str, mode: str
) -> None:
    client = lab.client
    if phase == "join":
        # Without this the group exists already, and no member has to join.
        await client._control.sender.close()
    before = client.weight_version
    old = lab.current
    call = asyncio.ensure_future(client.generate(input_ids=PROMPTS[1], **WANTED))
    with monkeypatch.context() as patch:
        reached, _ = phase_held(patch, client, phase)
        update = asyncio.ensure_future(lab.other(mode=mode, bucket_bytes=1 << 18))
        await reached.wait()
        update.cancel()
        with pytest.raises(asyncio.CancelledError):
            await update
    assert client.weight_version == before
    assert lab.current is old
    await lab.check(PROMPTS[:1], 4)
    completion = await call
    assert completion.versions == ((0, WANTED["max_new_tokens"], before),)
    lab.check_history(completion)
    # The next update does not wait for the cancelled update.
    await lab.other(timeout=10)
    await lab.check(PROMPTS[:1], 4)
    assert [w.state for w in client.workers] == ["ready", "ready"]


async def test_an_update_is_cancelled_in_the_middle_of_a_broadcast(lab: Lab) -> None:
    client = lab.client
    before = client.weight_version
    weights, gate = gated(lab.policies[3].model.state_dict())
    update = asyncio.ensure_future(client.update_weights(weights, bucket_bytes=1 << 16))
    await gate.reached()
    update.cancel()
    with pytest.raises(asyncio.CancelledError):
        await update
    assert client.weight_version == before
    await lab.check(PROMPTS[:1], 4)
    # The sender's thread still waits for that tensor.
    await lab.other(timeout=10)
    await lab.check(PROMPTS[:1], 4)
    gate.open()


@pytest.mark.parametrize(("phase", "mode"), [("commit", "full"), ("stage", "bucketed")])
async def test_too_late_to_cancel(
    lab: Lab, monkeypatch: pytest.MonkeyPatch, phase: str, mode: str
) -> None:
    """Workers finish overwriting their live weights, so the update takes effect."""
    client = lab.client
    before = client.weight_version
    weights, gate = gated(lab.policies[3].model.state_dict())
    with monkeypatch.context() as patch:
        if phase == "commit":
            reached, release = phase_held(patch, client, phase)
            gate.open()
        else:
            reached, release = phase_event(patch, client, phase), gate.open
        update = asyncio.ensure_future(
            client.update_weights(weights, mode=mode, bucket_bytes=1 << 16)
        )
        await reached.wait()
        await gate.reached()
        update.cancel()
        await asyncio.wait([update], timeout=0.01)
        release()
        with pytest.raises(asyncio.CancelledError):
            await update
    assert client.weight_version == before + 1
    lab.by_version[before + 1] = lab.policies[3]
    await lab.check(PROMPTS[:1], 4)
    await lab.other()
    await lab.check(PROMPTS[:1], 4)


async def test_one_that_waits_can_be_cancelled(lab: Lab) -> None:
    before = lab.client.weight_version
    weights, gate = gated(lab.policies[3].model.state_dict())
    running = asyncio.ensure_future(lab.update(3, weights))
    await gate.reached()
    waiting = asyncio.ensure_future(lab.client.update_weights(lab.policies[1].model))
    await asyncio.wait([waiting], timeout=0.01)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    gate.open()
    assert (await running).version == before + 1
    await lab.check(PROMPTS[:1], 4)


async def test_weights_that_cannot_be_gathered(lab: Lab) -> None:
    """Gathering fails on the sender in the middle of the broadcast."""
    client = lab.client
    before = client.weight_version
    weights, gate = gated(lab.policies[3].model.state_dict())
    gate.fail()
    with pytest.raises(sglrl.WeightUpdateError, match="the trainer's mesh is gone"):
        await client.update_weights(weights, bucket_bytes=1 << 16)
    assert client.weight_version == before
    await lab.check(PROMPTS[:1], 4)
    await lab.other()
    await lab.check(PROMPTS[:1], 4)


# --- settings -------------------------------------------------------------------------------------


async def test_settings_that_differ_are_named(lab: Lab) -> None:
    folder = lab.policies[0].folder
    async with sglrl.launch(folder, device="cpu", env={"NCCL_P2P_DISABLE": "1"}) as client:
        with pytest.raises(sglrl.SettingsMismatch, match="NCCL_P2P_DISABLE is '' here and '1'"):
            await client.update_weights(lab.policies[1].model)
        with pytest.raises(sglrl.SettingsMismatch, match="NCCL_P2P_DISABLE"):
            await client.connect_weights()
        assert client.weight_version == 0
        assert await client.verify_weights(lab.policies[0].model) == []
        # Updates from files need no group.
        await client.update_weights_from_disk(lab.policies[1].folder)
        assert await client.verify_weights(lab.policies[1].model) == []
    with pytest.raises(sglrl.SettingsMismatch):
        async with sglrl.launch(
            folder, device="cpu", env={"NCCL_P2P_DISABLE": "1"}, weight_device="cpu"
        ):
            pytest.fail("it cannot have joined")
