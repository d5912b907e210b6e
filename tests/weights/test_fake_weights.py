"""Weight updates of the fake engine: a training loop without SGLang."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import torch
from engine.policies import until_idle, until_running
from readme import example
from rollouts.agents import until
from safetensors.torch import save_file

import sglrl
from sglrl.inference.completion import VersionSpan
from sglrl.weights import Sender

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(180)]
IDS = [1, 2, 3]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client() -> AsyncIterator[sglrl.Client]:
    """Two replicas with the weights of version 1."""
    async with sglrl.launch(
        "tiny", engine="fake", replicas=2, tokens_per_step=1, step_seconds=0.002
    ) as client:
        assert await client.model_metadata() == {}, "nothing is known before the first update"
        report = await client.update_weights(model())
        assert report.version == 1
        assert report.workers == [0, 1]
        yield client


def model() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(3, 2).to(torch.bfloat16))


async def test_the_loop_of_the_readme(client: sglrl.Client) -> None:
    code = example("run.batches")
    sizes = "group_size=8, batch_size=16"
    assert code.count(sizes) == 1
    assert "4 times: 16 groups of 8 trajectories" in code
    code = code.replace(sizes, "group_size=2, batch_size=16")
    policy = model()
    batches: list[list[sglrl.Group]] = []

    def step(model: torch.nn.Module, groups: list[sglrl.Group]) -> None:
        batches.append(groups)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(1)

    names: dict[str, Any] = {"asyncio": asyncio, "sglrl": sglrl}
    exec(compile(code, "README.md", "exec"), names)
    before = client.weight_version
    await names["train"](client, policy, step)
    assert [len(groups) for groups in batches] == [16] * 4
    assert client.weight_version == before + 4
    assert await client.verify_weights(policy) == []
    versions = [
        {int(v) for g in groups for t in g.trajectories for v in t.versions[t.loss_mask]}
        for groups in batches
    ]
    assert len(versions) == 4
    for number, found in enumerate(versions):
        assert found <= {before + number - 1, before + number}


@pytest.mark.parametrize("mode", ["full", "bucketed"])
async def test_tokens_have_the_version_that_sampled_them(client: sglrl.Client, mode: str) -> None:
    before = client.weight_version
    running = asyncio.create_task(client.generate(input_ids=IDS, max_new_tokens=3_000, worker=1))
    await until_running(client, 1)
    await client.update_weights(model(), mode=mode)
    await client.update_weights(model(), mode=mode, inflight="retract")
    await client.update_weights(model(), mode=mode, inflight="abort")
    made = await running
    assert made.finish_reason == "abort"
    assert [span.version for span in made.versions] == [before, before + 1, before + 2]
    assert made.output_ids.tolist() == (IDS * 1_000)[: len(made.output_ids)]
    again = await client.generate(input_ids=IDS, max_new_tokens=4)
    assert again.versions == (VersionSpan(0, 4, before + 3),)
    assert (await client.next_token_logprobs(IDS)).version == before + 3
    assert (await client.score(IDS)).version == before + 3


async def test_an_update_that_drains(client: sglrl.Client) -> None:
    before = client.weight_version
    first = asyncio.create_task(client.generate(input_ids=IDS, max_new_tokens=2_000, worker=0))
    await until_running(client, 1)
    update = asyncio.create_task(client.update_weights(model(), inflight="drain"))
    with pytest.raises(sglrl.DeadlineExceeded):
        # Once the worker has begun the update, new requests wait until it has finished.
        while not update.done():
            await client.generate(input_ids=IDS, max_new_tokens=1, worker=0, timeout=0.2)
    assert not update.done()
    last = await client.generate(input_ids=IDS, max_new_tokens=1, worker=0)
    assert (await update).version == before + 1
    assert [span.version for span in (await first).versions] == [before]
    assert last.versions[0].version == before + 1


async def test_what_is_given_up_changes_nothing(client: sglrl.Client) -> None:
    live = model()
    await client.update_weights(live)
    before = client.weight_version
    long = asyncio.create_task(client.generate(input_ids=IDS, max_new_tokens=3_000))
    await until_running(client, 1)
    with pytest.raises(sglrl.WeightUpdateError, match="drain"):
        await client.update_weights(model(), inflight="drain", drain_timeout=0.2)
    cancelled = asyncio.create_task(client.update_weights(model(), inflight="drain"))
    await asyncio.sleep(0)
    queued = asyncio.create_task(client.generate(input_ids=IDS, max_new_tokens=1))
    cancelled.cancel()
    with pytest.raises(asyncio.CancelledError):
        await cancelled
    # The request that may have waited for the update runs.
    assert (await queued).versions[0].version == before
    long.cancel()
    broken = model()
    with torch.no_grad():
        next(broken.parameters())[0] = float("nan")
    with pytest.raises(sglrl.InvalidWeights, match=r"0\.weight holds NaN"):
        await client.update_weights(broken)
    assert client.weight_version == before
    assert await client.verify_weights(live) == []
    await until_idle(client)


async def test_names_and_shapes_must_stay(client: sglrl.Client) -> None:
    live = dict(model().state_dict())
    await client.update_weights(live)
    assert (await client.model_metadata())["1.weight"].dtype == "bfloat16"
    part = {"0.bias": torch.ones(3)}
    before = client.weight_version
    await client.update_weights(part, partial=True)
    assert client.weight_version == before + 1
    assert await client.verify_weights({**live, **part}) == []
    assert await client.verify_weights(live) == ["0.bias"]
    # Another dtype is cast, as for every engine.
    await client.update_weights({**live, "0.bias": live["0.bias"].double()})
    assert await client.verify_weights(live) == []
    for wrong, says in (
        (part, "missing: 0.weight"),
        ({**live, "2.bias": torch.ones(3)}, "unknown: 2.bias"),
        ({**live, "0.bias": torch.ones(4)}, r"0.bias has shape \[4\], the model's is \[3\]"),
        ({}, "no tensors"),
    ):
        with pytest.raises(sglrl.InvalidWeights, match=says):
            await client.update_weights(wrong)


async def test_other_ways_to_send(client: sglrl.Client, tmp_path: Path) -> None:
    live = dict(model().state_dict())
    before = client.weight_version
    save_file(live, tmp_path / "model.safetensors")
    assert (await client.update_weights_from_disk(tmp_path)).mode == "disk"
    assert await client.verify_weights(live) == []
    async with await Sender.connect(client.weights_address) as sender:
        other = dict(model().state_dict())
        await sender.update(other)
    assert client.weight_version == before + 2
    assert await client.verify_weights(other) == []
    async with sglrl.connect(client.address) as remote:
        assert await remote.verify_weights(other) == []
        assert (await remote.model_metadata()).keys() == live.keys()


async def test_replacements_get_the_weights() -> None:
    """A replacement gets its weights from the other worker, or from the memory of its host."""
    live = model()
    async with sglrl.launch("fake", engine="fake", replicas=2, keep_weights="host") as client:
        version = (await client.update_weights(live)).version
        for lost in ([0], [0, 1]):
            await until(lambda: any(worker.kept_bytes for worker in client.workers))
            pids = [worker.pid for worker in client.workers]
            for worker in lost:
                os.kill(pids[worker], signal.SIGKILL)
            for worker in (0, 1):
                made = await client.generate(input_ids=IDS, max_new_tokens=2, worker=worker)
                assert made.versions == (VersionSpan(0, 2, version),)
            now = [worker.pid for worker in client.workers]
            assert {i for i in (0, 1) if now[i] != pids[i]} == {*lost}
        assert await client.verify_weights(live) == []


async def test_sleep(client: sglrl.Client) -> None:
    live = model()
    await client.update_weights(live)
    await client.sleep()
    await client.wake()
    assert await client.verify_weights(live) == []
    await client.sleep(keep_weights=False)
    waiting = asyncio.create_task(client.generate(input_ids=IDS, max_new_tokens=2))
    await client.wake()
    assert not waiting.done()
    await client.update_weights(live)
    assert (await waiting).versions[0].version == client.weight_version


async def test_parts_before_the_whole() -> None:
    """Trainers may send one bucket after the other."""
    async with sglrl.launch("fake", engine="fake") as client:
        for name in ("a", "b"):
            await client.update_weights({name: torch.ones(2)}, partial=True)
        with pytest.raises(sglrl.InvalidWeights, match="received no weights of the names c"):
            await client.verify_weights({"c": torch.ones(2)})
        assert await client.verify_weights({"a": torch.ones(2), "b": torch.zeros(2)}) == ["b"]
        await client.update_weights({"a": torch.ones(2), "b": torch.ones(2)})
        with pytest.raises(sglrl.InvalidWeights, match="unknown: c"):
            await client.update_weights({"c": torch.ones(2)}, partial=True)


async def test_a_peft_model_needs_the_name_of_an_adapter(client: sglrl.Client) -> None:
    import peft

    both = [
        peft.LoraConfig(target_modules=["0"]),
        peft.IA3Config(target_modules=["0"], feedforward_modules=[]),
    ]
    for config in both:
        made = peft.get_peft_model(model(), config)  # type: ignore[arg-type]
        for weights, partial in ((made, False), (made, True), (torch.nn.DataParallel(made), False)):
            with pytest.raises(sglrl.InvalidWeights, match=r"a PeftModel: .*lora=name.*merge_and"):
                await client.update_weights(weights, partial=partial)
        with pytest.raises(sglrl.InvalidWeights, match=r"a PeftModel: .*lora=name.*merge_and"):
            await client.update_weights(made.state_dict())
        await client.update_weights(made.merge_and_unload())


async def test_options_of_an_update() -> None:
    async with sglrl.launch("fake", engine="fake") as client:
        with pytest.raises(TypeError, match=r"no argument 'inflght'; did you mean 'inflight'\?"):
            await client.update_weights({}, inflght="drain")  # type: ignore[call-arg]
        for inner in ("folder", "begun", "total"):
            with pytest.raises(TypeError, match=f"no argument '{inner}'"):
                await client.update_weights({}, **{inner: 1})
