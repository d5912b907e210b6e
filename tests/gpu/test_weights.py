"""Weight updates between CUDA devices: by NCCL, from a process on the same GPU, or both.

The tests run on one GPU or two.
"""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from engine.reference import Reference

import sglrl
from sglrl.core.weight_update import STAGE
from sglrl.weights.update_run import UpdateRun

from .conftest import ARGUMENTS, TOLERANCE

pytestmark = [pytest.mark.gpu, pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(300)]

PROMPT = [5, 6, 7, 8, 9, 10]
LAYOUTS: dict[str, dict[str, Any]] = {
    "neighbour": {"gpus": [0]},
    "nccl": {"gpus": [1]},
    "both": {"gpus": [0, 1], "replicas": 2},
    "tp2": {"gpus": [1, 2], "tp_size": 2},
}


async def check(client: sglrl.Client, reference: Reference) -> None:
    """Check that every worker has the reference's weights and generates with them."""
    assert await client.verify_weights(reference.model) == []
    for worker in client.workers:
        if worker.state != "ready":
            continue
        made = await client.generate(
            input_ids=PROMPT, max_new_tokens=16, temperature=0, logprobs=True, worker=worker.id
        )
        expected = reference.logprobs_of(PROMPT, made.output_ids)
        np.testing.assert_allclose(made.logprobs, expected, atol=TOLERANCE, rtol=0)
        assert {span.version for span in made.versions} == {client.weight_version}


@pytest.mark.parametrize("layout", LAYOUTS)
async def test_updates(layout: str, gpu_model: Path, other_gpu_model: Path) -> None:
    options = LAYOUTS[layout]
    if torch.cuda.device_count() <= max(options["gpus"]):
        pytest.skip(f"needs {max(options['gpus']) + 1} CUDA devices")
    old, new = Reference(gpu_model), Reference(other_gpu_model)
    async with sglrl.launch(
        gpu_model, device="cuda", weight_device="cuda:0", **options, **ARGUMENTS
    ) as client:
        await check(client, old)
        on_gpu = {n: p.to("cuda:0") for n, p in new.model.named_parameters()}
        running = asyncio.ensure_future(
            client.generate(
                input_ids=PROMPT, max_new_tokens=1500, ignore_eos=True, n=8, logprobs=True
            )
        )
        await client.generate(input_ids=PROMPT, max_new_tokens=50, ignore_eos=True)
        for weights, mode, inflight, bucket in (
            (on_gpu, "full", "continue", 256 << 20),
            (old.model, "full", "retract", 1 << 20),
            (on_gpu, "bucketed", "continue", 1 << 19),
            (old.model, "bucketed", "retract", 1 << 20),
            (on_gpu, "auto", "continue", 1 << 18),
        ):
            report = await client.update_weights(
                weights, mode=mode, inflight=inflight, bucket_bytes=bucket
            )
            print(layout, inflight, report)
            assert report.workers == [w.id for w in client.workers]
            await check(client, old if weights is old.model else new)
        for completion in await running:
            spans = completion.versions
            assert [s.start for s in spans[1:]] == [s.stop for s in spans[:-1]]
            assert (spans[0].start, spans[-1].stop) == (0, 1500)
            assert len(spans) > 1
        with pytest.raises(sglrl.InvalidWeights, match="unknown"):
            await client.update_weights({"nothing": torch.zeros(1)})
        await check(client, new)
        name = next(iter(on_gpu))
        bad = {**on_gpu, name: on_gpu[name].detach() * float("nan")}
        for mode in ("full", "bucketed"):
            with pytest.raises(sglrl.InvalidWeights, match=f"{name} holds NaN"):
                await client.update_weights(bad, mode=mode)
            assert [w.state for w in client.workers] == ["ready"] * len(client.workers)
            await check(client, new)
        if layout == "both":
            await lose_a_worker(client, old)


async def lose_a_worker(client: sglrl.Client, reference: Reference) -> None:
    """Kill a worker while it receives. This update and the next one succeed without it."""
    ask = UpdateRun._ask

    def killing(run: UpdateRun, phase: str, member: tuple[int, int]) -> None:
        if phase == STAGE and member[0] == 1:
            os.kill(client.workers[1].pid, signal.SIGKILL)
        ask(run, phase, member)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(UpdateRun, "_ask", killing)
        report = await client.update_weights(reference.model, timeout=20)
    print(report)
    assert report.workers == [0]
    assert report.attempts == 2
    await check(client, reference)
    assert (await client.update_weights(reference.model)).workers == [0]
