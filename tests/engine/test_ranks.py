"""Engines of several ranks on a CPU: their tokens, weights, pauses and losses.

The references are transformers and PEFT, as for engines of one rank.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
import torch
from processes import strike
from weights.adapters import PROMPT, check, make_adapter

import sglrl
from sglrl.core.weight_update import COMMIT, STAGE

from . import test_routed_experts as experts
from .policies import NORM, PROMPTS, TOLERANCE, Lab, Policies, on_phase, until_running

pytestmark = pytest.mark.asyncio(loop_scope="session")

LAYOUTS: dict[str, dict[str, Any]] = {"tp2": {"tp_size": 2}}
LONG: dict[str, Any] = {"max_new_tokens": 300, "logprobs": True, "ignore_eos": True}


@pytest.fixture(autouse=True)
def no_worker_is_left() -> None:
    """Accept other processes after a test: the pool of this module replaces its worker."""


@pytest_asyncio.fixture(scope="module", loop_scope="session", params=LAYOUTS)
async def lab(request: pytest.FixtureRequest, models: Path) -> AsyncIterator[Lab]:
    policies = Policies(models / "ranks")
    async with sglrl.launch(
        policies[0].folder,
        device="cpu",
        restarts=100,
        hang_timeout=30,
        enable_memory_saver=True,
        **LAYOUTS[request.param],
    ) as client:
        yield Lab(client, policies)


def ranks(client: sglrl.Client) -> dict[int, int]:
    """Return the process ids of the ranks of the only worker."""
    (worker,) = client.pool._supervisor.workers.values()
    return dict(worker.pids)


async def until_ready(client: sglrl.Client) -> None:
    async with asyncio.timeout(300):
        while client.workers[0].state != "ready":
            await client.pool.driver.change()


def begin(client: sglrl.Client, count: int = 4) -> list[asyncio.Task[sglrl.Completion]]:
    """Start requests that run for some seconds."""
    return [
        asyncio.ensure_future(client.generate(input_ids=PROMPTS[i % len(PROMPTS)], **LONG))
        for i in range(count)
    ]


async def test_tokens_logprobs_and_scores(lab: Lab) -> None:
    client = lab.client
    await lab.check()
    made = await client.generate(input_ids=PROMPTS[1], n=8, seed=3, **LONG | {"max_new_tokens": 40})
    again = await client.generate(
        input_ids=PROMPTS[1], n=8, seed=3, **LONG | {"max_new_tokens": 40}
    )
    assert len({tuple(one.output_ids.tolist()) for one in made}) == 8
    for one, same in zip(made, again, strict=True):
        assert one.output_ids.tolist() == same.output_ids.tolist()
        expected = lab.current.logprobs_of(PROMPTS[1], one.output_ids)
        np.testing.assert_allclose(one.logprobs, expected, atol=TOLERANCE, rtol=0)
        whole = [*PROMPTS[1], *one.output_ids.tolist()]
        scores = await client.score(whole)
        np.testing.assert_allclose(scores[len(PROMPTS[1]) :], expected, atol=TOLERANCE, rtol=0)


async def test_constrained_and_cancelled_requests(lab: Lab) -> None:
    client = lab.client
    one = await client.generate(input_ids=PROMPTS[0], regex="(ab|cd)+ef", max_new_tokens=200)
    assert one.finish_reason in ("stop", "length")
    assert {*one.text} <= {*"abcdef"}
    async with asyncio.timeout(60):
        tasks = begin(client)
        await until_running(client, 4)
        for task in tasks:
            task.cancel()
        while sum(stats.engine.running for stats in await client.stats()):
            pass
    with pytest.raises(sglrl.DeadlineExceeded):
        await client.generate(input_ids=PROMPTS[0], timeout=0.5, **LONG | {"max_new_tokens": 1500})
    await lab.check()


@pytest.mark.parametrize("inflight", ["continue", "retract"])
@pytest.mark.parametrize("mode", ["full", "bucketed"])
async def test_updates_while_decoding(lab: Lab, inflight: str, mode: str) -> None:
    client = lab.client
    tasks = begin(client)
    await until_running(client, 4)
    for _ in range(2):
        await lab.other(mode=mode, inflight=inflight, bucket_bytes=1 << 16)
    weights = {NORM: lab.current.model.get_parameter(NORM).detach()}
    report = await client.update_weights(weights, partial=True, mode=mode)
    lab.by_version[report.version] = lab.by_version[report.version - 1]
    for task in tasks:
        one = await task
        assert len(one.versions) > 1
        lab.check_history(one, again=inflight == "retract")
    await lab.check()
    with pytest.raises(sglrl.InvalidWeights, match="unknown"):
        await client.update_weights({"nothing": torch.zeros(1)}, mode=mode)
    await lab.check()


@pytest.mark.parametrize("mode", ["in_place", "retract", "drain", "abort"])
async def test_pauses(lab: Lab, mode: str) -> None:
    client = lab.client
    tasks = begin(client)
    await until_running(client, 4)
    await client.pause(mode)
    waiting = asyncio.ensure_future(client.generate(input_ids=PROMPTS[0], **LONG))
    if mode in ("in_place", "retract"):
        await lab.other()
    await client.resume()
    for one in await asyncio.gather(*tasks):
        assert (one.finish_reason == "abort") == (mode == "abort")
        if mode != "abort":
            lab.check_history(one, again=mode == "retract")
    lab.check_history(await waiting)
    await lab.check()


@pytest.mark.parametrize("tags", [("weights", "kv_cache"), ("kv_cache",)])
async def test_sleep(lab: Lab, tags: tuple[str, ...]) -> None:
    client = lab.client
    tasks = begin(client)
    await until_running(client, 4)
    await client.sleep(tags=tags)
    await client.wake()
    for task in tasks:
        lab.check_history(await task, again=True)
    await lab.check()


@pytest.mark.parametrize("phase", ["", STAGE, COMMIT])
@pytest.mark.parametrize("rank", [0, -1])
async def test_a_rank_is_killed(
    lab: Lab, rank: int, phase: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its requests continue in the replacement, which gets the current weights."""
    client = lab.client
    tasks = begin(client)
    await until_running(client, 4)
    pids = ranks(client)
    victim = list(pids.values())[rank]
    if phase:
        struck: list[int] = []

        def act(now: str, member: tuple[int, int]) -> None:
            if now == phase and not struck:
                struck.append(victim)
                os.kill(victim, signal.SIGKILL)

        on_phase(monkeypatch, client, act)
        await lab.other(timeout=120)
        assert struck
    else:
        os.kill(victim, signal.SIGKILL)
    for task in tasks:
        one = await task
        assert one.resumed
        lab.check_history(one)
    await until_ready(client)
    assert set(ranks(client).values()).isdisjoint(pids.values())
    await lab.check()


async def test_a_rank_hangs(lab: Lab) -> None:
    client = lab.client
    tasks = begin(client)
    await until_running(client, 4)
    # A worker may take longer while it prefills. This request begins after the others.
    chunks = aiter(client.stream(input_ids=PROMPTS[0], **LONG))
    for _ in range(3):
        await anext(chunks)
    strike(list(ranks(client).values())[-1], signal.SIGSTOP)
    for task in tasks:
        lab.check_history(await task)
    async for _ in chunks:
        pass
    await until_ready(client)
    await lab.check()


async def test_random_sequences(lab: Lab) -> None:
    """Requests run through random updates, pauses, sleeps and kills, and none is lost."""
    client = lab.client
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    choose = random.Random(seed)
    tasks = begin(client, 6)
    for _ in range(12):
        await until_ready(client)
        match choose.choice(("update", "files", "pause", "sleep", "kill")):
            case "update":
                mode = choose.choice(("full", "bucketed", "auto"))
                await lab.other(mode=mode, bucket_bytes=1 << 16, timeout=120)
            case "files":
                policy = lab.policies[1 if lab.current is not lab.policies[1] else 2]
                report = await client.update_weights_from_disk(policy.folder)
                lab.by_version[report.version] = policy
            case "pause":
                await client.pause(choose.choice(("in_place", "retract")))
                await lab.other()
                await client.resume()
            case "sleep":
                await client.sleep()
                await client.wake()
            case "kill":
                os.kill(choose.choice(list(ranks(client).values())), signal.SIGKILL)
                await client.pool.driver.change()
        tasks += begin(client, 1)
    for one in await asyncio.gather(*tasks):
        assert len(one.output_ids) == LONG["max_new_tokens"]
        assert one.versions[-1].stop == len(one.output_ids)
    await until_ready(client)
    await lab.check()


@pytest.mark.parametrize("layout", LAYOUTS)
async def test_a_replacement_copies_from_a_peer(layout: str, models: Path) -> None:
    """Each rank copies the weights of the same rank of the other worker."""
    policies = Policies(models / "ranks")
    async with sglrl.launch(
        policies[0].folder,
        device="cpu",
        replicas=2,
        restarts=100,
        keep_weights=None,
        **LAYOUTS[layout],
    ) as client:
        lab = Lab(client, policies)
        for victim in (0, 1, 0):
            await lab.other()
            tasks = begin(client)
            os.kill(client.workers[victim].pid, signal.SIGKILL)
            for task in tasks:
                lab.check_history(await task)
            async with asyncio.timeout(100):
                await client.wait_until_full()
            await lab.check()


@pytest.mark.parametrize("layout", LAYOUTS)
async def test_adapters(layout: str, models: Path) -> None:
    base = Policies(models / "ranks")[0]
    first = make_adapter(base, models / f"ranks-{layout}-a", 1)
    second = make_adapter(base, models / f"ranks-{layout}-b", 2)
    async with sglrl.launch(
        base.folder,
        device="cpu",
        enable_lora=True,
        max_lora_rank=8,
        lora_target_modules=["all"],
        **LAYOUTS[layout],
    ) as client:
        await client.load_lora("a", first.folder)
        wanted = {"max_new_tokens": 12, "logprobs": True, "ignore_eos": True}
        check(await client.generate(input_ids=PROMPT, lora="a", **wanted), first.model)
        running = client.stream(input_ids=PROMPT, lora="a", **LONG)
        chunks = aiter(running)
        await anext(chunks)
        await client.update_weights(second.tensors, lora="a", config=second.config)
        async for _ in chunks:
            pass
        assert len(running.completion.versions) >= 1
        check(await client.generate(input_ids=PROMPT, lora="a", **wanted), second.model)


@pytest.mark.parametrize("options", [{}, {"ep_size": 2}], ids=["tp", "ep"])
async def test_a_mixture_of_experts(options: dict[str, Any], tmp_path: Path) -> None:
    """Rank 0 returns the routed experts, although it may have only half of the experts."""
    folders = [experts.make(tmp_path / str(seed), seed) for seed in range(2)]
    routers = [experts.Router(folder) for folder in folders]
    async with sglrl.launch(
        folders[0],
        device="cpu",
        tp_size=2,
        enable_return_routed_experts=True,
        chunked_prefill_size=32,
        **options,
    ) as client:
        for router in routers:
            if router is not routers[0]:
                await client.update_weights(router.model)
            assert await client.verify_weights(router.model) == []
            made = await client.generate(
                input_ids=experts.PROMPTS, max_new_tokens=20, logprobs=True, **experts.WANTED
            )
            for prompt, one in zip(experts.PROMPTS, made, strict=True):
                ids = experts.whole(prompt, one)
                experts.same(one.routed_experts, router.rows(ids)[:-1])
                with torch.inference_mode():
                    logits = router.model(torch.from_numpy(ids)[None].long()).logits[0]
                rows = torch.log_softmax(logits, dim=-1).numpy()[len(prompt) - 1 : -1]
                chosen = rows[np.arange(len(one.output_ids)), one.output_ids]
                np.testing.assert_allclose(one.logprobs, chosen, atol=TOLERANCE, rtol=0)
