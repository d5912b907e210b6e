"""``keep_weights="host"``: a single replica continues with its weights after it was killed."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import signal
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from engine.policies import PROMPTS, Lab, Policies

import sglrl
from sglrl.errors import WeightUpdateError
from sglrl.wire.weights import Commit, KeepWeights, Prepare, Stage
from sglrl_workers.weights import kept_weights
from sglrl_workers.weights.kept_weights import _Contents, _Memory, _size

SECONDS = 300.0


def kill(client: sglrl.Client) -> None:
    os.kill(client.workers[0].pid, signal.SIGKILL)


@pytest.mark.asyncio(loop_scope="session")
async def test_a_single_replica(models: Path) -> None:
    policies = Policies(models / "kept")
    async with sglrl.launch(
        policies[0].folder, device="cpu", keep_weights="host", restarts=100
    ) as client:
        lab = Lab(client, policies)
        assert client.workers[0].kept_bytes == 0
        for version in (1, 2):
            await lab.update(version)
            size = sum(t.nbytes for t in policies[0].model.state_dict().values())
            assert size / 2 < client.workers[0].kept_bytes < 2 * size
            async with sglrl.connect(client.address) as remote:
                assert remote.workers[0].kept_bytes == client.workers[0].kept_bytes
            for _ in range(2):
                kill(client)
                # The call waits for the replacement.
                made = await client.generate(
                    input_ids=PROMPTS[0], max_new_tokens=8, temperature=0, ignore_eos=True
                )
                assert made.versions == ((0, 8, version),)
                await lab.check(PROMPTS[:2], 4)


def test_the_memory_holds_every_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    live = {
        "a": torch.arange(7, dtype=torch.bfloat16),
        "transposed": torch.arange(6, dtype=torch.float32).reshape(2, 3).T,
        "empty": torch.empty(0, 3),
        "b": torch.tensor([[-1, 3]], dtype=torch.int8),
    }
    monkeypatch.setattr(kept_weights, "_PIECE_BYTES", 8)
    file = os.memfd_create("test")
    path = f"/proc/self/fd/{file}"
    try:
        memory = _Memory(path, _size(live))
        assert memory.contents() is None
        for place, tensor in memory.places(live):
            place.copy_(tensor)
        memory.say(_Contents(3, "digest"))
        again = _Memory(path, _size(live))
        assert again.contents() == _Contents(3, "digest")
        restored = {name: torch.zeros_like(tensor) for name, tensor in live.items()}
        assert not restored["transposed"].is_contiguous()
        for place, tensor in again.places(restored):
            tensor.copy_(place)
        assert all(torch.equal(restored[name], live[name]) for name in live)
        memory.say(None)
        assert again.contents() is None
        monkeypatch.setattr(kept_weights, "available_memory", lambda: 1_000)
        # It fits, because nothing more is needed.
        _Memory(path, _size(live))
        with pytest.raises(WeightUpdateError, match="takes 100,000 bytes of memory, and the host"):
            _Memory(path, 100_000)
    finally:
        os.close(file)


def test_arguments_that_do_not_fit(qwen: Path) -> None:
    with pytest.raises(sglrl.UsageError, match="must be 'auto', 'host' or None, got True"):
        sglrl.launch(qwen, keep_weights=True)  # type: ignore[arg-type]


@pytest.mark.asyncio(loop_scope="session")
async def test_the_only_worker_dies_during_an_update(models: Path) -> None:
    """With the defaults, the update ends well whenever its worker is killed."""
    policies = Policies(models / "kept")
    moments = ("before", Prepare, Stage, Commit, KeepWeights, "after")
    async with sglrl.launch(policies[0].folder, device="cpu", restarts=100) as client:
        lab = Lab(client, policies)
        for version, moment in enumerate(moments, 1):
            if moment == "before":
                kill(client)
            with struck_at(client, moment) as struck:
                report = await lab.update(1 + version % 2)
            assert struck or not isinstance(moment, type)
            assert report.version == version
            if moment == "after":
                kill(client)
            else:
                assert client.workers[0].state == "ready"
            made = await asyncio.wait_for(
                client.generate(
                    input_ids=PROMPTS[0], max_new_tokens=8, temperature=0, ignore_eos=True
                ),
                SECONDS,
            )
            assert made.versions == ((0, 8, version),), moment
            await lab.check(PROMPTS[:2], 4)


async def agent(session: sglrl.Session, item: dict[str, Any]) -> float:
    for _ in range(3):
        await session.generate(max_new_tokens=10, ignore_eos=True)
        session.observe([7, 8])
    return float(len(session.ids))


@pytest.mark.asyncio(loop_scope="session")
async def test_a_training_loop_whose_only_worker_dies(models: Path) -> None:
    """The loop of the README goes on, whenever the worker is killed in a step."""
    seed = secrets.randbits(32)
    print("seed", seed)
    random = Random(seed)
    policies = Policies(models / "kept")
    items = [{"input_ids": PROMPTS[k % 4]} for k in range(64)]
    async with sglrl.launch(policies[0].folder, device="cpu", restarts=100) as client:
        lab = Lab(client, policies)
        run = sglrl.rollout(client, agent, items, group_size=2, batch_size=2, max_staleness=1)
        loop = asyncio.get_running_loop()
        steps = 0
        async with run, asyncio.timeout(2 * SECONDS):
            async for groups in run.batches():
                assert all(0 <= group.staleness <= 1 for group in groups)
                if steps == 6:
                    break
                if steps:
                    # From before the update to the middle of the next samples.
                    loop.call_later(random.choice((0.0, 0.01, 0.03, 0.1, 0.3)), kill, client)
                await lab.update(1 + steps % 2)
                steps += 1
        await client.wait_until_full(SECONDS)
        await lab.check(PROMPTS[:1], 4)
    assert steps == 6


@pytest.mark.asyncio(loop_scope="session")
async def test_a_training_loop_without_a_copy(models: Path) -> None:
    """The consumer gets an error that tells what to do, and continues afterwards."""
    policies = Policies(models / "kept")
    items = [{"input_ids": PROMPTS[k % 4]} for k in range(64)]
    async with sglrl.launch(policies[0].folder, device="cpu", keep_weights=None) as client:
        lab = Lab(client, policies)
        run = sglrl.rollout(client, agent, items, group_size=2, batch_size=2, max_staleness=1)
        async with run, asyncio.timeout(2 * SECONDS):
            taken = [group.index for group in await run.take(2)]
            await lab.update(1)
            kill(client)
            with pytest.raises(sglrl.WeightsLost, match=r"version 1 any more.*update_weights"):
                async for groups in run.batches():
                    taken += [group.index for group in groups]
            assert client.workers[0].state == "stale"
            with pytest.raises(sglrl.DeadlineExceeded, match="version 1 any more; await"):
                await client.generate(input_ids=[5], max_new_tokens=1, timeout=0.1)
            with pytest.raises(sglrl.WeightsLost):
                await run.pause()
            run.resume()
            await lab.update(2)
            assert client.workers[0].state == "ready"
            async for groups in run.batches():
                taken += [group.index for group in groups]
                break
        assert len(set(taken)) == len(taken) >= 4


@contextlib.contextmanager
def struck_at(client: sglrl.Client, moment: object) -> Iterator[list[object]]:
    """Kill the worker just before a message of this type is sent to it, once."""
    ranks = client.pool.weights._ranks
    send = ranks.send
    struck: list[object] = []

    def strike(rank: object, message: object) -> None:
        if isinstance(moment, type) and isinstance(message, moment) and not struck:
            struck.append(message)
            kill(client)
        send(rank, message)  # type: ignore[arg-type]

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(ranks, "send", strike)
        yield struck
