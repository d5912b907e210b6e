"""Engines that give their memory back and take it again, in SGLang's overlapping loop."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from engine.policies import (
    NORM,
    PROMPTS,
    Lab,
    Policies,
    phase_held,
    until_draining,
    until_idle,
    until_running,
)

import sglrl
from sglrl.core import holds

pytestmark = pytest.mark.asyncio(loop_scope="session")

LONG: dict[str, Any] = {"max_new_tokens": 300, "logprobs": True, "ignore_eos": True}
BOTH = ("kv_cache", "weights")


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def lab(models: Path) -> AsyncIterator[Lab]:
    policies = Policies(models / "sleepers")
    async with sglrl.launch(
        policies[0].folder,
        device="cpu",
        replicas=2,
        weight_device="cpu",
        enable_memory_saver=True,
        disable_overlap_schedule=False,
    ) as client:
        yield Lab(client, policies)


@pytest_asyncio.fixture(autouse=True, loop_scope="session")
async def awake(lab: Lab) -> AsyncIterator[None]:
    """Clean up after each test, so that a failed test leaves no calls for the next one."""
    yield
    await lab.client.wake()
    await lab.client.resume()
    await lab.client.abort()
    await lab.client.wait_until_full()
    await until_idle(lab.client)


def begin(lab: Lab, count: int = 4) -> list[asyncio.Task[sglrl.Completion]]:
    return [
        asyncio.ensure_future(lab.client.generate(input_ids=[*PROMPTS[i % 4], i], **LONG))
        for i in range(count)
    ]


async def check_asleep(lab: Lab, *tags: str) -> None:
    """Check what the engines have given back, and that they answer no call."""
    assert {s.engine.asleep for s in await lab.client.stats()} == {tags}
    for call in (lab.client.generate(input_ids=[5], timeout=0.2), lab.client.score([5, 6])):
        with pytest.raises((sglrl.DeadlineExceeded, TimeoutError)):
            await asyncio.wait_for(call, 1)


@pytest.mark.parametrize("tags", [("kv_cache",), ("weights",), BOTH], ids="+".join)
async def test_running_calls_continue(lab: Lab, tags: tuple[str, ...]) -> None:
    client = lab.client
    calls = begin(lab)
    await until_running(client, 4)
    await client.sleep(tags)
    stats = await client.stats()
    assert [s.engine.running for s in stats] == [0, 0]
    assert sum(s.engine.waiting for s in stats) == 4
    await check_asleep(lab, *tags)
    later = begin(lab, 2)
    await client.sleep(tags)
    await client.sleep()
    await client.wake()
    await client.wake()
    for call in calls + later:
        made = await call
        assert len(made.output_ids) == LONG["max_new_tokens"]
        lab.check_history(made)
    await lab.check()


async def test_prefixes_are_forgotten(lab: Lab) -> None:
    client = lab.client
    assert await client.flush_cache()
    for cached in (False, True, False):
        made = await client.generate(input_ids=PROMPTS[3], max_new_tokens=2, worker=0)
        assert (made.cached_tokens > 0) is cached
        if cached:
            await client.sleep()
            await client.wake()


async def test_drain(lab: Lab) -> None:
    client = lab.client
    calls = begin(lab)
    await until_running(client, 4)
    asleep = asyncio.ensure_future(client.sleep(inflight="drain"))
    await until_draining(client)
    later = begin(lab, 1)
    await asleep
    assert all(call.done() for call in calls)
    assert not later[0].done()
    await client.wake()
    for call in calls + later:
        lab.check_history(await call)


async def test_waking_while_engines_drain(lab: Lab) -> None:
    client = lab.client
    calls = begin(lab)
    await until_running(client, 4)
    await client.pause()
    with pytest.raises(sglrl.DeadlineExceeded):
        await client.sleep(inflight="drain", timeout=0.5)
    await client.wake()
    assert {s.engine.asleep for s in await client.stats()} == {()}
    await client.resume()
    for call in calls:
        lab.check_history(await call)


async def test_abort(lab: Lab) -> None:
    client = lab.client
    calls = begin(lab)
    await until_running(client, 4)
    await client.sleep(inflight="abort")
    for call in calls:
        made = await call
        assert made.finish_reason == "abort"
        if len(made.output_ids):
            lab.check_history(made)
    await client.wake()
    await lab.check()


async def test_lost_weights_come_with_the_next_update(lab: Lab) -> None:
    client = lab.client
    calls = begin(lab)
    await until_running(client, 4)
    policy = lab.policies[1 if lab.current is not lab.policies[1] else 2].model
    await client.sleep(keep_weights=False)
    for refused in (
        client.update_weights(policy),
        client.verify_weights(policy),
        client.get_weights([NORM]),
    ):
        with pytest.raises(sglrl.SglrlError, match="the weights are asleep"):
            await refused
    await client.wake(["weights"])
    await check_asleep(lab, "kv_cache")
    with pytest.raises(sglrl.InvalidRequest, match="the weights were not kept"):
        await client.get_weights([NORM])
    with pytest.raises(sglrl.WeightUpdateError, match="send all of them"):
        await client.update_weights({NORM: policy.state_dict()[NORM]}, partial=True)
    await lab.other()
    await check_asleep(lab, "kv_cache")
    await client.wake()
    for call in calls:
        lab.check_history(await call, again=True)
    await lab.check()
    # The engines wait for the update, also if the KV cache is there before.
    await client.sleep(keep_weights=False)
    await client.wake()
    await check_asleep(lab)
    await lab.other()
    await lab.check()


async def test_calls_report_why_they_wait(
    lab: Lab, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    client = lab.client
    monkeypatch.setattr(holds, "PATIENCE", 0.1)
    monkeypatch.setattr(client.pool.driver.fabric, "holds", holds.Holds())

    async def error() -> str:
        with pytest.raises(sglrl.DeadlineExceeded) as raised:
            await client.generate(input_ids=[5], timeout=0.4)
        return str(raised.value)

    asleep, gone, paused = "await client.wake()", "await client.update_weights", "client.resume()"
    await client.sleep(["kv_cache"])
    assert (await error()).endswith(f": the engines sleep (kv_cache); {asleep}")
    await client.sleep(keep_weights=False)
    assert asleep in (text := await error())
    assert gone in text
    await client.wake()
    await client.pause()
    assert asleep not in (text := await error())
    assert gone in text
    assert paused in text
    await client.resume()
    assert paused not in (text := await error())
    assert text.endswith("wait for all of them; await client.update_weights(...)")
    await lab.other()
    await lab.check()
    # Each reason is logged once.
    logged = [r.getMessage() for r in caplog.records if "calls wait: " in r.getMessage()]
    assert [sum(part in text for text in logged) for part in (asleep, gone, paused)] == [1, 1, 1]
    monkeypatch.undo()
    with pytest.raises(sglrl.DeadlineExceeded) as raised:
        await client.generate(input_ids=PROMPTS[0], timeout=0.2, **LONG)
    assert str(raised.value).endswith("last at a worker)")


async def test_updates_between_two_sleeps(lab: Lab) -> None:
    """The rounds of a trainer on the same GPUs."""
    for keep in (True, False, True, True):
        call = asyncio.ensure_future(lab.client.generate(input_ids=PROMPTS[0], **LONG))
        await until_running(lab.client, 1)
        await lab.client.sleep(keep_weights=keep)
        await lab.client.wake(["weights"])
        await lab.other(mode="bucketed" if keep else "full")
        await lab.client.wake()
        lab.check_history(await call, again=True)
    await lab.check()


async def test_sleep_waits_for_an_update(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    client = lab.client
    held, release = phase_held(monkeypatch, client, "commit")
    update = asyncio.ensure_future(lab.other(mode="full"))
    await held.wait()
    with pytest.raises(sglrl.UpdateInProgress):
        await client.sleep(["kv_cache"], timeout=0.3)
    asleep = asyncio.ensure_future(client.sleep(["kv_cache"]))
    await asyncio.sleep(0)
    with pytest.raises(sglrl.DeadlineExceeded, match="another sleep or wake was still running"):
        await client.wake(timeout=0.3)
    assert {s.engine.asleep for s in await client.stats()} == {()}
    release()
    await update
    await asleep
    await check_asleep(lab, "kv_cache")
    await client.wake()
    await lab.check()


async def test_lost_worker(lab: Lab) -> None:
    """It is replaced when the engines are awake."""
    client = lab.client
    await lab.other()
    await client.sleep()
    calls = begin(lab)
    os.kill(client.workers[0].pid, signal.SIGKILL)
    async with asyncio.timeout(300):
        while client.workers[0].state == "ready":
            await client.pool.driver.change()
    with pytest.raises(sglrl.DeadlineExceeded):
        await client.wait_until_full(1)
    assert client.workers[0].state == "lost"
    with pytest.raises(sglrl.UsageError, match="call wake first"):
        await client.add_workers()
    await client.wake(["kv_cache"])
    assert client.workers[0].state == "lost"
    await client.wake()
    for call in calls:
        lab.check_history(await call)
    await client.wait_until_full()
    await lab.check()


async def test_sleep_while_a_worker_is_replaced(lab: Lab) -> None:
    client = lab.client
    await lab.other()
    os.kill(client.workers[0].pid, signal.SIGKILL)
    async with asyncio.timeout(300):
        while client.workers[0].state == "ready":
            await client.pool.driver.change()
    await client.sleep()
    await check_asleep(lab, *BOTH)
    await client.wake()
    await client.wait_until_full()
    await lab.check()


async def test_pause_and_sleep(lab: Lab) -> None:
    client = lab.client
    await client.pause()
    await client.sleep()
    await client.resume()
    await check_asleep(lab, *BOTH)
    await client.pause()
    await client.wake()
    await check_asleep(lab)
    await client.resume()
    await lab.check()


async def test_arguments(lab: Lab) -> None:
    client = lab.client
    for tags, why in (
        ("weights", "a sequence such as"),
        (["graphs"], "got .'graphs'."),
        ([1], "got .'1'."),
    ):
        with pytest.raises(sglrl.UsageError, match=why):
            await client.sleep(tags)
        with pytest.raises(sglrl.UsageError, match=why):
            await client.wake(tags)
    with pytest.raises(sglrl.UsageError, match="inflight must be one of"):
        await client.sleep(inflight="continue")  # type: ignore[arg-type]
    assert {s.engine.asleep for s in await client.stats()} == {()}
