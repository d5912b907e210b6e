"""Adapters of a pool of fake engines: all workers have them, or none, and new workers too."""

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

import sglrl

pytestmark = pytest.mark.asyncio(loop_scope="module")

CONFIG = {"r": 2, "lora_alpha": 4}
NAME = "base_model.model.model.layers.0.self_attn.q_proj.lora_{}.weight"
IDS = [5, 6, 7]


def tensors(**changes: Any) -> dict[str, torch.Tensor]:
    return {
        NAME.format("A"): torch.ones(2, 8),
        NAME.format("B"): torch.ones(8, 2),
        **{NAME.format(part): tensor for part, tensor in changes.items()},
    }


@pytest_asyncio.fixture(loop_scope="module")
async def client(tmp_path: Path) -> AsyncIterator[sglrl.Client]:
    async with sglrl.launch(
        "fake",
        engine="fake",
        replicas=2,
        restarts=10,
        step_seconds=0.01,
        tokens_per_step=1,
        max_lora_rank=4,
        lora_target_modules=["q_proj", "v_proj"],
        max_loaded_loras=2,
        fail_lora=str(tmp_path / "fail"),
    ) as client:
        yield client


async def versions(client: sglrl.Client, lora: str) -> list[int]:
    """Return the version of the adapter on every worker."""
    made = await asyncio.gather(
        *(
            client.generate(input_ids=IDS, max_new_tokens=1, lora=lora, worker=worker.id)
            for worker in client.workers
        )
    )
    return [completion.lora_versions[0].version for completion in made]


async def test_load_replace_and_unload(client: sglrl.Client) -> None:
    info = await client.load_lora("a", tensors(), config=CONFIG)
    assert info == client.loras["a"]
    assert (info.version, info.rank, info.scaling, info.bytes) == (0, 2, 2.0, 128)
    assert info.target_modules == ("q_proj",)
    assert await versions(client, "a") == [0, 0]
    report = await client.update_weights(tensors(), lora="a")
    assert (report.version, report.workers, report.bytes) == (1, [0, 1], 128)
    assert (await client.update_weights(tensors(), lora="a", version=7)).version == 7
    assert await versions(client, "a") == [7, 7]
    assert client.weight_version == 0
    await client.unload_lora("a")
    assert client.loras == {}
    # A version never means two different adapters of the same name.
    assert (await client.load_lora("a", tensors(), config=CONFIG)).version == 8


@pytest.mark.parametrize("adapter", [5, b"x", None], ids=str)
async def test_what_is_no_adapter(client: sglrl.Client, adapter: Any) -> None:
    with pytest.raises(sglrl.UsageError, match="an adapter is a folder, a PeftModel, or tensors"):
        await client.load_lora("b", adapter, config=CONFIG)


async def test_a_rollout_with_an_adapter(client: sglrl.Client) -> None:
    """All turns of all sessions use it."""
    await client.load_lora("a", tensors(), config=CONFIG)
    seen: list[tuple[str | None, int]] = []

    async def agent(session: sglrl.Session, item: int) -> float:
        for _ in range(2):
            turn = await session.generate(max_new_tokens=3)
            session.observe([5, 6])
            seen.append((turn.lora, turn.lora_versions[0].version))
        return 1.0

    items = [{"input_ids": IDS} for _ in range(2)]
    async with sglrl.rollout(client, agent, items, group_size=2, lora="a") as run:
        groups = [group async for group in run]
    assert len(groups) == 2
    assert seen == [("a", 0)] * 8
    for trajectory in [one for group in groups for one in group.trajectories]:
        assert trajectory.lora_versions.tolist() == [0, 0, 0, -1, -1, 0, 0, 0]
    await client.unload_lora("a")


async def test_a_load_that_fails_on_one_worker(client: sglrl.Client, tmp_path: Path) -> None:
    await client.load_lora("a", tensors(), config=CONFIG)
    for change in (
        client.load_lora("b", tensors(), config=CONFIG),
        client.update_weights(tensors(), lora="a"),
    ):
        (tmp_path / "fail").touch()
        with pytest.raises(sglrl.InvalidAdapter, match="does not fit this worker"):
            await change
        assert not (tmp_path / "fail").exists()
    assert {name: info.version for name, info in client.loras.items()} == {"a": 0}
    assert await versions(client, "a") == [0, 0]
    with pytest.raises(sglrl.UnknownAdapter):
        await client.generate(input_ids=IDS, lora="b")
    assert (await client.load_lora("b", tensors(), config=CONFIG)).version == 0


async def test_new_workers_have_all_adapters(client: sglrl.Client) -> None:
    await client.load_lora("a", tensors(), config=CONFIG)
    await client.load_lora("b", tensors(), config=CONFIG)
    await client.update_weights(tensors(), lora="a")
    running = [
        asyncio.ensure_future(client.generate(input_ids=IDS, max_new_tokens=200, lora="a"))
        for _ in range(4)
    ]
    await client.add_workers(1)
    os.kill(client.workers[0].pid, signal.SIGKILL)
    for completion in await asyncio.gather(*running):
        assert completion.lora_versions == ((0, 200, 1),)
    await client.wait_until_full()
    assert await versions(client, "a") == [1, 1, 1]
    assert await versions(client, "b") == [0, 0, 0]


async def test_a_worker_that_is_lost_during_a_load(
    client: sglrl.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The load ends on the other workers, and the replacement gets the adapter."""
    driver = client.pool.driver
    submit = driver.submit

    def kill_first(call: Any) -> None:
        submit(call)
        if call.endpoint == "lora_prepare" and call.pinned == 0:
            monkeypatch.undo()
            os.kill(client.workers[0].pid, signal.SIGKILL)

    monkeypatch.setattr(driver, "submit", kill_first)
    await client.load_lora("a", tensors(), config=CONFIG)
    await client.wait_until_full()
    assert await versions(client, "a") == [0, 0]


async def test_workers_that_start_during_a_load(
    client: sglrl.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One is new. The other one replaces a worker that had prepared the adapter."""
    adapters: Any = client._control.adapters
    submit = adapters._submit

    async def late(calls: Any) -> Any:
        monkeypatch.undo()
        answers = await submit(calls)
        os.kill(client.workers[0].pid, signal.SIGKILL)
        await client.add_workers(1)
        await client.wait_until_full()
        return answers

    await client.load_lora("a", tensors(), config=CONFIG)
    monkeypatch.setattr(adapters, "_submit", late)
    report = await client.update_weights(tensors(), lora="a")
    assert report.workers == [0, 1, 2]
    assert await versions(client, "a") == [1, 1, 1]


async def test_a_worker_that_cannot_commit_is_replaced(
    client: sglrl.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = client.pool.driver
    submit = driver.submit

    def spoil(call: Any) -> None:
        if call.endpoint == "lora_commit" and call.pinned == 0:
            monkeypatch.undo()
            call.endpoint = "unknown"
        submit(call)

    monkeypatch.setattr(driver, "submit", spoil)
    pid = client.workers[0].pid
    report = await client.load_lora("a", tensors(), config=CONFIG)
    assert report.version == 0
    await client.wait_until_full()
    assert client.workers[0].pid != pid
    assert await versions(client, "a") == [0, 0]


async def test_unload_ends_running_calls(client: sglrl.Client) -> None:
    await client.load_lora("a", tensors(), config=CONFIG)
    stream = client.stream(input_ids=IDS, max_new_tokens=10_000, lora="a")
    first = await anext(aiter(stream))
    assert first.lora_version == 0
    await client.unload_lora("a")
    with pytest.raises(sglrl.UnknownAdapter, match="the adapter 'a' was unloaded"):
        async for _ in stream:
            pass
    for call in (
        client.generate(input_ids=IDS, lora="a"),
        client.score(IDS, lora="a"),
        client.next_token_logprobs(IDS, lora="a"),
        client.unload_lora("a"),
        client.update_weights(tensors(), lora="a"),
    ):
        with pytest.raises(sglrl.UnknownAdapter, match=r"no adapter 'a' is loaded \(loaded: none"):
            await call
    with pytest.raises(sglrl.UnknownAdapter):
        client.session(input_ids=IDS, lora="a")


async def test_a_client_in_another_process(client: sglrl.Client) -> None:
    await client.load_lora("a", tensors(), config=CONFIG)
    await client.update_weights(tensors(), lora="a")
    async with sglrl.connect(client.address) as remote:
        made = await remote.generate(input_ids=IDS, max_new_tokens=2, lora="a")
        assert made.lora_versions == ((0, 2, 1),)
        with pytest.raises(sglrl.UnknownAdapter, match="no adapter 'b' is loaded"):
            await remote.generate(input_ids=IDS, lora="b")
        with pytest.raises(sglrl.UsageError, match="adapter= must be a folder"):
            await remote.load_lora("b", tensors(), config=CONFIG)


WRONG: dict[str, tuple[dict[str, Any], Any, str]] = {
    "no config": ({}, None, "config= is missing"),
    "config type": ({}, [2], "config must be PEFT's LoraConfig or a mapping"),
    "no rank": ({}, {"lora_alpha": 1}, "r of the adapter must be an integer"),
    "no alpha": ({}, {"r": 2}, "lora_alpha of the adapter must be a number"),
    "not LoRA": ({}, {**CONFIG, "peft_type": "IA3"}, "peft_type is 'IA3'"),
    "DoRA": ({}, {**CONFIG, "use_dora": True}, "use_dora=True of the adapter is not supported"),
    "bias": ({}, {**CONFIG, "bias": "all"}, "bias='all' of the adapter is not supported"),
    "rank above": (
        {},
        {"r": 5, "lora_alpha": 4},
        "has rank 5; the engine was launched for at most 4",
    ),
    "other rank": ({}, {"r": 3, "lora_alpha": 4}, r"which is not \[rank, in\] of rank 3"),
    "no B": (
        {"B": None},
        CONFIG,
        "without base_model.model.model.layers.0.self_attn.q_proj.lora_B",
    ),
    "dtype": ({"A": torch.ones(2, 8, dtype=torch.int32)}, CONFIG, "holds int32"),
    "not finite": ({"A": torch.full((2, 8), float("nan"))}, CONFIG, "not finite"),
    "dimensions": ({"A": torch.ones(2, 8, 1)}, CONFIG, r"\[2, 8, 1\], which is not \[rank, in\]"),
}


@pytest.mark.parametrize("case", WRONG)
async def test_wrong_adapters(client: sglrl.Client, case: str) -> None:
    changes, config, text = WRONG[case]
    given = {name: t for name, t in tensors(**changes).items() if t is not None}
    with pytest.raises(sglrl.UsageError, match=text):
        await client.load_lora("a", given, config=config)
    assert client.loras == {}


async def test_wrong_names(client: sglrl.Client, tmp_path: Path) -> None:
    other = NAME.replace("q_proj", "o_proj")
    for given, text in (
        ({"lora_A": torch.ones(2, 8)}, "'lora_A' is not a tensor of a LoRA adapter"),
        ({other.format("A"): torch.ones(2, 8)}, "changes the modules o_proj; the engine was laun"),
        ({}, "the adapter has no tensors"),
        (tmp_path, "has no adapter_config.json"),
    ):
        with pytest.raises(sglrl.InvalidAdapter, match=text):
            await client.load_lora("a", given, config=None if given is tmp_path else CONFIG)
    (tmp_path / "adapter_config.json").write_text("{")
    with pytest.raises(sglrl.InvalidAdapter, match="cannot be read"):
        await client.load_lora("a", tmp_path)
    (tmp_path / "adapter_config.json").write_text('{"r": 2, "lora_alpha": 4}')
    with pytest.raises(sglrl.InvalidAdapter, match=r"has no adapter_model.safetensors"):
        await client.load_lora("a", tmp_path)
    await client.load_lora("a", tensors(), config=CONFIG)
    for call, text in (
        (client.load_lora("", tensors(), config=CONFIG), "the name of an adapter is text"),
        (client.load_lora("a", tensors(), config=CONFIG), "an adapter 'a' is loaded"),
        (client.update_weights(tensors(), lora="a", mode="full"), "are not for lora="),
        (client.update_weights(tensors(), lora="a", inflight="drain"), "inflight must be one of"),
        (client.update_weights(tensors(), config=CONFIG), "config= is for an adapter"),
        (client.update_weights(tensors(), lora="a", version=0), "version must be an integer above"),
    ):
        with pytest.raises(sglrl.UsageError, match=text):
            await call
    await client.load_lora("b", tensors(), config=CONFIG)
    with pytest.raises(sglrl.UsageError, match="2 adapters are loaded"):
        await client.load_lora("c", tensors(), config=CONFIG)


async def test_an_engine_without_adapters() -> None:
    async with sglrl.launch("fake", engine="fake") as client:
        with pytest.raises(sglrl.UsageError, match="launch it with enable_lora=True"):
            await client.load_lora("a", tensors(), config=CONFIG)
        with pytest.raises(sglrl.UnknownAdapter):
            await client.generate(input_ids=IDS, lora="a")
