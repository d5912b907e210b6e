"""Engines on a GPU that give their memory back, and take it again."""

from __future__ import annotations

import asyncio
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from engine.reference import Reference

import sglrl

from .conftest import ARGUMENTS, TOLERANCE

pytestmark = [pytest.mark.gpu, pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(300)]

PROMPTS = [[3 + (7 * i + 11 * j * j) % 500 for j in range(3 + 9 * i)] for i in range(6)]
LONG: dict[str, Any] = {"max_new_tokens": 400, "logprobs": True, "ignore_eos": True}


def used() -> int:
    """Return the memory that is in use on this process's first GPU, in MiB."""
    gpu = f"--id=GPU-{torch.cuda.get_device_properties(0).uuid}"
    query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits", gpu]
    return int(subprocess.run(query, capture_output=True, text=True, check=True).stdout)


async def check(client: sglrl.Client, reference: Reference) -> None:
    """Check that greedy answers are those of the reference."""
    made = await client.generate(
        input_ids=PROMPTS, max_new_tokens=24, temperature=0, logprobs=True, ignore_eos=True
    )
    for prompt, completion in zip(PROMPTS, made, strict=True):
        rows = reference.logprobs([*prompt, *completion.output_ids])[len(prompt) - 1 : -1]
        chosen = rows[np.arange(24), completion.output_ids]
        np.testing.assert_allclose(completion.logprobs, chosen, atol=TOLERANCE, rtol=0)
        assert (chosen >= rows.max(axis=1) - 2 * TOLERANCE).all()


async def test_sleep_and_wake(gpu_model: Path, other_gpu_model: Path) -> None:
    first, other = Reference(gpu_model), Reference(other_gpu_model)
    # This process has memory of the GPU from now on, for its updates.
    torch.zeros(1, device="cuda")
    before = used()
    # Each of SGLang's tables of the KV cache has an entry for each token. They stay on the GPU.
    arguments = ARGUMENTS | {"max_total_tokens": 4_000_000}
    async with sglrl.launch(
        gpu_model, device="cuda", enable_memory_saver=True, **arguments
    ) as client:
        awake = used() - before
        await check(client, first)
        left, current = [], first
        for keep in (True, True, False, False) * 2:
            calls = [
                asyncio.ensure_future(client.generate(input_ids=prompt, **LONG))
                for prompt in PROMPTS
            ]
            while not any(s.engine.running for s in await client.stats()):
                pass
            await client.sleep(keep_weights=keep)
            left.append(used() - before)
            assert not any(call.done() for call in calls)
            if not keep:
                await client.wake(["weights"])
                await client.update_weights(other.model)
                current = other
            await client.wake()
            for call in calls:
                made = await call
                assert len(made.output_ids) == 400
                at = 400 if keep else made.versions[-1].start
                ids = [*made.prompt_ids, *made.output_ids]
                rows = other.logprobs(ids)[len(made.prompt_ids) - 1 + at : -1]
                chosen = rows[np.arange(400 - at), made.output_ids[at:]]
                np.testing.assert_allclose(made.logprobs[at:], chosen, atol=TOLERANCE, rtol=0)
            await check(client, current)
        assert await client.verify_weights(other.model) == []
    print(f"awake {awake} MiB, asleep {left} MiB")
    assert awake > 5_000
    assert max(left) < 1_500
    # The first rounds load kernels.
    assert max(left[4:]) - min(left[4:]) < 50
