"""``keep_weights="host"``: a single replica continues with its weights after it was killed."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest
import torch

import sglrl
from sglrl.errors import WeightUpdateError
from sglrl.wire.weights import KeepWeights
from sglrl_workers.weights import kept_weights
from sglrl_workers.weights.kept_weights import _Contents, _Memory, _size

from .policies import PROMPTS, Lab, Policies

SECONDS = 60.0


async def kept(client: sglrl.Client) -> None:
    """Wait until the weights of the last update are kept, or could not be."""
    task = client._pool.weights._keeping
    assert task is not None
    await asyncio.wait_for(task, SECONDS)


def kill(client: sglrl.Client) -> None:
    os.kill(client.workers[0].pid, signal.SIGKILL)


async def until(client: sglrl.Client, state: str) -> None:
    async with asyncio.timeout(SECONDS):
        while client.workers[0].state != state:
            await client._pool.driver.change()


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
            await kept(client)
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


@pytest.mark.asyncio(loop_scope="session")
async def test_killed_while_it_keeps_them(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its replacement finds no complete version 2, so it waits for the next update."""
    policies = Policies(models / "kept")
    async with sglrl.launch(
        policies[0].folder, device="cpu", keep_weights="host", restarts=100
    ) as client:
        lab = Lab(client, policies)
        await lab.update(1)
        await kept(client)
        weights = client._pool.weights
        send = weights._ranks.send

        def strike(rank: object, message: object) -> None:
            if isinstance(message, KeepWeights):
                kill(client)
            send(rank, message)  # type: ignore[arg-type]

        with monkeypatch.context() as patched:
            patched.setattr(weights._ranks, "send", strike)
            await lab.update(2)
            await kept(client)
        await until(client, "stale")
        # Even a driver that is mistaken cannot use the memory.
        weights._kept._versions[""] = 2
        kill(client)
        await until(client, "lost")
        await until(client, "stale")
        assert not weights._kept.keeps("", 2)
        await lab.update(3)
        await kept(client)
        kill(client)
        await until(client, "lost")
        await client.wait_until_full(SECONDS)
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
    with pytest.raises(sglrl.UsageError, match="keep_weights must be 'host' or None, got True"):
        sglrl.launch(qwen, keep_weights=True)  # type: ignore[arg-type]
    with pytest.raises(sglrl.UsageError, match="keep_weights="):
        sglrl.launch("fake", engine="fake", keep_weights="host")
