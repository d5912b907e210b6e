"""Nodes on a machine with GPUs, and ``keep_weights="host"``.

Nodes are processes on this machine. ``NCCL_HOSTID`` lets NCCL take them for other machines, so that
it uses sockets between them (https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html).
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from engine.policies import on_phase
from engine.reference import Reference
from hosts.nodes import NodeProcess, hosts_of, nodes

import sglrl
from sglrl.weights import bucket_sender
from sglrl.wire.weights import RankSettings

from .conftest import ARGUMENTS
from .test_weights import PROMPT, check

pytestmark = [pytest.mark.gpu, pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(300)]

SECONDS = 120.0
# Capturing CUDA graphs takes a second for each batch size.
OPTIONS = {**ARGUMENTS, "cuda_graph_max_bs": 4}
needs_two = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs 2 CUDA devices")
needs_four = pytest.mark.skipif(torch.cuda.device_count() < 4, reason="needs 4 CUDA devices")


def policies(
    *folders: Path, device: str = "cuda:1"
) -> list[tuple[Reference, dict[str, torch.Tensor]]]:
    """Return each model as the reference, and its weights on the GPU that sends."""
    made = []
    for folder in folders:
        reference = Reference(folder)
        made.append((reference, {n: p.to(device) for n, p in reference.model.named_parameters()}))
    return made


def from_another_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the ranks take this process for one on another machine."""
    mine = bucket_sender.settings

    def of_another_machine(*arguments: Any) -> RankSettings:
        return msgspec.structs.replace(mine(*arguments), uuid="of another machine")

    monkeypatch.setattr(bucket_sender, "settings", of_another_machine)


@contextmanager
def node(hosts: sglrl.Hosts, name: str, gpus: str) -> Iterator[NodeProcess]:
    options = ("--insecure", "--gpus", gpus)
    environment = {"NCCL_HOSTID": name}
    with nodes(hosts.address, name, options=options, environment=environment) as (made,):
        yield made


@needs_two
@pytest.mark.parametrize("shape", [{"replicas": 2}, {"tp_size": 2}], ids=["replicas", "tp2"])
async def test_a_relay(
    shape: dict[str, int],
    gpu_model: Path,
    other_gpu_model: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rank 0 on GPU 0 receives from this process on GPU 1, and passes on to the rank on GPU 1."""
    (old, old_weights), (new, new_weights) = policies(gpu_model, other_gpu_model)
    from_another_machine(monkeypatch)
    async with sglrl.Hosts("tcp://127.0.0.1:*", insecure=True) as hosts:
        with node(hosts, "a", "0-1"):
            async with sglrl.launch(
                gpu_model, hosts=hosts, weight_device="cuda:1", keep_weights="host",
                **shape, **OPTIONS,
            ) as client:  # fmt: skip
                assert {worker.host for worker in client.workers} == {"a"}
                await check(client, old)
                everyone = [worker.id for worker in client.workers]
                for policy, weights, mode in (
                    (new, new_weights, "full"),
                    (old, old_weights, "bucketed"),
                    (new, new_weights, "auto"),
                ):
                    report = await client.update_weights(weights, mode=mode)
                    print(shape, report)
                    assert report.workers == everyone
                    await check(client, policy)
                # The replacement copies from the other worker, or from the memory of the host.
                os.kill(client.workers[0].pid, signal.SIGKILL)
                await client.generate(input_ids=PROMPT, max_new_tokens=8)
                await client.wait_until_full(SECONDS)
                assert [worker.weight_version for worker in client.workers] == [3] * len(everyone)
                await check(client, new)
                if "replicas" in shape:
                    await lose_the_relay(client, old, old_weights, monkeypatch)


async def lose_the_relay(
    client: sglrl.Client,
    policy: Reference,
    weights: dict[str, torch.Tensor],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    killed = []

    def strike(phase: str, member: tuple[int, int]) -> None:
        if phase == "stage" and member[0] == 0 and not killed:
            killed.append(member)
            os.kill(client.workers[0].pid, signal.SIGKILL)

    on_phase(monkeypatch, client, strike)
    report = await client.update_weights(weights, timeout=20)
    print(report)
    assert report.workers == [1]
    await client.wait_until_full(SECONDS)
    await check(client, policy)


@needs_two
async def test_two_hosts(gpu_model: Path, other_gpu_model: Path) -> None:
    (old, _), (new, weights) = policies(gpu_model, other_gpu_model)
    async with sglrl.Hosts("tcp://127.0.0.1:*", insecure=True, at_least=2) as hosts:
        with node(hosts, "a", "0"), node(hosts, "b", "1") as second:
            with pytest.raises(sglrl.WorkerStartError, match=r"do not fit: [ab] has 1 GPUs"):
                await sglrl.launch(gpu_model, hosts=hosts, tp_size=2, start_timeout=5, **OPTIONS)
            async with sglrl.launch(
                gpu_model, hosts=hosts, replicas=2, weight_device="cuda:1", **OPTIONS
            ) as client:
                assert hosts_of(client) == ["a", "b"]
                await check(client, old)
                report = await client.update_weights(weights)
                print(report)
                assert report.workers == [0, 1]
                await check(client, new)
                # The replacement copies the weights from the worker on the other host.
                os.kill(client.workers[1].pid, signal.SIGKILL)
                await asyncio.gather(
                    *(client.generate(input_ids=PROMPT, max_new_tokens=100) for _ in range(8))
                )
                await client.wait_until_full(SECONDS)
                assert [worker.weight_version for worker in client.workers] == [1, 1]
                await check(client, new)
                running = [
                    asyncio.ensure_future(
                        client.generate(input_ids=PROMPT, max_new_tokens=500, ignore_eos=True)
                    )
                    for _ in range(8)
                ]
                await client.generate(input_ids=PROMPT, max_new_tokens=1)
                second.strike(signal.SIGTERM)
                for made in await asyncio.gather(*running):
                    assert len(made.output_ids) == 500
                assert second.ends() == 0
                assert hosts_of(client) == ["a"]
                # The hosts are in the order in which they connected, and so are their workers.
                left = [worker.id for worker in client.workers if worker.state == "ready"]
                assert (await client.update_weights(old.model)).workers == left
                await check(client, old)
                with node(hosts, "b", "1"):
                    await client.wait_until_full(SECONDS)
                    assert hosts_of(client) == ["a", "b"]
                    await check(client, old)


@needs_four
async def test_two_hosts_and_the_sender_on_a_third(
    gpu_model: Path, other_gpu_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two workers on a host, one of them its relay, one on another, and four GPUs in all."""
    (old, old_weights), (new, new_weights) = policies(gpu_model, other_gpu_model, device="cuda:3")
    from_another_machine(monkeypatch)
    async with sglrl.Hosts("tcp://127.0.0.1:*", insecure=True, at_least=2) as hosts:
        with node(hosts, "a", "0-1"), node(hosts, "b", "2"):
            async with sglrl.launch(
                gpu_model, hosts=hosts, replicas=3, weight_device="cuda:3", **OPTIONS
            ) as client:
                assert sorted(worker.host for worker in client.workers) == ["a", "a", "b"]
                for policy, weights, mode in (
                    (new, new_weights, "full"),
                    (old, old_weights, "bucketed"),
                    (new, new_weights, "auto"),
                ):
                    report = await client.update_weights(weights, mode=mode)
                    print(report)
                    assert report.workers == [0, 1, 2]
                    await check(client, policy)
                os.kill(client.workers[0].pid, signal.SIGKILL)
                await client.generate(input_ids=PROMPT, max_new_tokens=200, ignore_eos=True)
                await client.wait_until_full(SECONDS)
                assert [worker.weight_version for worker in client.workers] == [3, 3, 3]
                await check(client, new)


@pytest.mark.parametrize("tp_size", [1, 2])
async def test_a_single_replica_keeps_its_weights(
    tp_size: int, gpu_model: Path, other_gpu_model: Path
) -> None:
    if torch.cuda.device_count() < tp_size:
        pytest.skip(f"needs {tp_size} CUDA devices")
    new = Reference(other_gpu_model)
    async with sglrl.launch(
        gpu_model, device="cuda", tp_size=tp_size, keep_weights="host", restarts=9, **OPTIONS
    ) as client:
        await client.update_weights(new.model)
        size = sum(t.nbytes for t in new.model.state_dict().values())
        assert size / 2 < client.workers[0].kept_bytes < 2 * size
        for _ in range(2):
            os.kill(client.workers[0].pid, signal.SIGKILL)
            made = await client.generate(
                input_ids=PROMPT, max_new_tokens=16, temperature=0, ignore_eos=True
            )
            assert made.versions == ((0, 16, 1),)
            await check(client, new)
