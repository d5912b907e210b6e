"""Adapters on a real engine: every logprob equals PEFT's, in any batch and after any change."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import numpy as np
import pytest
import pytest_asyncio
import torch
from engine.policies import TOLERANCE, Policies, collect, until_running
from engine.reference import Reference

import sglrl
from sglrl.errors import EngineError
from sglrl.gateway.serve import serve
from sglrl.integrations.genlm import AsyncSGLTransformer
from sglrl.rollouts import stack

from .adapters import ALL, PROMPT, PeftAdapter, check, check_history, logprobs, make_adapter

pytestmark = pytest.mark.asyncio(loop_scope="session")

WANTED: dict[str, Any] = {"logprobs": True, "ignore_eos": True}
COUNT = 600
"""Tokens of a request that must still run when something happens to it."""
LONG = {**WANTED, "max_new_tokens": COUNT}


class Lab(NamedTuple):
    client: sglrl.Client
    base: Reference
    a: PeftAdapter
    b: PeftAdapter
    other: PeftAdapter
    """An adapter that is not loaded at the start."""

    async def one(self, lora: str | None, **options: Any) -> sglrl.Completion:
        options = {**WANTED, "max_new_tokens": 12, "input_ids": PROMPT, **options}
        made: sglrl.Completion = await self.client.generate(lora=lora, **options)
        return made

    def begin(self, *loras: str | None, **options: Any) -> list[asyncio.Task[sglrl.Completion]]:
        return [asyncio.ensure_future(self.one(lora, **{**LONG, **options})) for lora in loras]


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def engine(models: Path) -> AsyncIterator[Lab]:
    base = Policies(models / "lora")[0]
    folder = models / "lora"
    a = make_adapter(base, folder / "a", 1)
    # PEFT's adapters often change a part of the modules that engines stack.
    b = make_adapter(base, folder / "b", 2, 8, 3, ["q_proj", "up_proj"], use_rslora=True)
    other = make_adapter(base, folder / "other", 3, 2, 5)
    async with sglrl.launch(
        base.folder,
        device="cpu",
        enable_lora=True,
        max_lora_rank=8,
        lora_target_modules=["all"],
        max_loras_per_batch=3,
        max_loaded_loras=3,
    ) as client:
        yield Lab(client, base, a, b, other)


@pytest_asyncio.fixture(loop_scope="session")
async def lab(engine: Lab) -> AsyncIterator[Lab]:
    """Adapters "a" and "b" are loaded, and no others."""
    client = engine.client
    await client.load_lora("a", engine.a.folder)
    await client.load_lora("b", engine.b.tensors, config=engine.b.config)
    yield engine
    for name in client.loras:
        await client.unload_lora(name)


async def test_adapters_and_the_base_model_in_one_batch(lab: Lab) -> None:
    wanted = [None, "a", "b", "a", None, "b"]
    calls = lab.begin(*wanted, max_new_tokens=40)
    await until_running(lab.client, len(wanted))
    models = {None: lab.base.model, "a": lab.a.model, "b": lab.b.model}
    for lora, completion in zip(wanted, await asyncio.gather(*calls), strict=True):
        assert completion.lora == lora
        check(completion, models[lora])
        assert [span[:2] for span in completion.lora_versions] == ([(0, 40)] if lora else [])
        for model in {*models.values()} - {models[lora]}:
            differs = logprobs(model, PROMPT, completion.output_ids.tolist()) - completion.logprobs
            assert np.abs(differs).max() > 0.5


async def test_more_adapters_than_a_batch_has_places(lab: Lab) -> None:
    """The engine keeps all of them, and changes those in its pool."""
    await lab.client.load_lora("c", lab.other.model)
    wanted = [None, "a", "b", "c"] * 2
    models = {None: lab.base.model, "a": lab.a.model, "b": lab.b.model, "c": lab.other.model}
    for lora, completion in zip(wanted, await asyncio.gather(*lab.begin(*wanted)), strict=True):
        check(completion, models[lora])
    with pytest.raises(sglrl.UsageError, match="3 adapters are loaded, the most allowed"):
        await lab.client.load_lora("d", lab.other.model)


async def test_kv_cache_is_not_shared(lab: Lab) -> None:
    """Neither between adapters nor between versions of one. One adapter finds its own."""
    loras = [None, "a", "b"]
    cached = [(await lab.one(lora)).cached_tokens for lora in loras]
    # The fixture has loaded adapters of these names before. Those had other serial numbers.
    assert cached[1:] == [0, 0]
    assert all([(await lab.one(lora)).cached_tokens > 0 for lora in loras])
    await lab.client.update_weights(lab.other.folder, lora="a")
    again = [await lab.one(lora) for lora in loras]
    assert [completion.cached_tokens > 0 for completion in again] == [True, False, True]
    check(again[1], lab.other.model)


async def test_other_calls(lab: Lab) -> None:
    client = lab.client
    check(await collect(client.stream(input_ids=PROMPT, lora="b", **LONG)), lab.b.model)
    scores = await client.score(PROMPT, lora="a")
    expected = logprobs(lab.a.model, PROMPT[:1], PROMPT[1:])
    np.testing.assert_allclose(np.asarray(scores)[1:], expected, atol=TOLERANCE, rtol=0)
    version = client.loras["a"].version
    assert scores.lora_versions == ((0, len(PROMPT), version),)
    found = await client.next_token_logprobs(PROMPT, lora="a")
    with torch.inference_mode():
        logits = lab.a.model(input_ids=torch.tensor([PROMPT])).logits[0, -1]
    np.testing.assert_allclose(
        found.logprobs, torch.log_softmax(logits, -1).numpy(), atol=TOLERANCE, rtol=0
    )
    assert found.lora_version == version
    genlm = AsyncSGLTransformer(client, cache_size=8)
    for lora, tensor in ((None, lab.base.model), ("a", lab.a.model), ("b", lab.b.model)):
        row = (await genlm.next_token_logprobs(PROMPT, lora_name=lora)).numpy()
        with torch.inference_mode():
            logits = tensor(input_ids=torch.tensor([PROMPT])).logits[0, -1]
        expected = torch.log_softmax(logits, -1).numpy()
        np.testing.assert_allclose(row, expected, atol=TOLERANCE, rtol=0)
    async with client.session(input_ids=PROMPT, lora="a", ignore_eos=True) as session:
        first = await session.generate(max_new_tokens=8)
        session.observe([9, 8, 7])
        second = await session.generate(max_new_tokens=8)
    check(first, lab.a.model)
    check(second, lab.a.model)
    assert second.lora == "a"


@pytest.mark.parametrize("inflight", ["continue", "retract"])
async def test_replacement_while_requests_run(lab: Lab, inflight: str) -> None:
    """Each token has the logprob of the version that the completion names for it."""
    begun = lab.client.loras["a"].version
    calls = lab.begin("a", "b", None, "a")
    await until_running(lab.client, 4)
    report = await lab.client.update_weights(
        lab.other.tensors, lora="a", config=lab.other.config, inflight=inflight
    )
    assert (report.version, report.mode) == (begun + 1, "lora")
    first, b, base, last = await asyncio.gather(*calls)
    models = {begun: lab.a.model, begun + 1: lab.other.model}
    for completion in (first, last):
        assert [span.version for span in completion.lora_versions] == [begun, begun + 1]
        assert completion.versions == ((0, COUNT, lab.client.weight_version),)
        check_history(completion, models, again=inflight == "retract")
    check(b, lab.b.model)
    check(base, lab.base.model)
    check(await lab.one("a"), lab.other.model)
    info = lab.client.loras["a"]
    assert (info.version, info.rank, info.scaling) == (begun + 1, 2, 2.5)


async def test_versions_in_trajectories(lab: Lab) -> None:
    """The adapter of its version in the batch gives each token the logprob that it has there."""
    begun = lab.client.loras["a"].version
    async with lab.client.session(input_ids=PROMPT, lora="a", ignore_eos=True) as session:
        await session.generate(max_new_tokens=8)
        session.observe([9, 8, 7])
        await lab.client.update_weights(lab.other.folder, lora="a")
        await session.generate(max_new_tokens=8)
        trajectory = session.trajectory()
    async with lab.client.session(input_ids=PROMPT) as plain:
        await plain.generate(max_new_tokens=3)
        batch = stack([trajectory, plain.trajectory()])
    versions = [*[begun] * 8, -1, -1, -1, *[begun + 1] * 8]
    assert trajectory.lora_versions.tolist() == versions
    assert batch["lora_versions"][0].tolist() == [*[-1] * len(PROMPT), *versions]
    assert (batch["lora_versions"][1] == -1).all()
    for version, model in ((begun, lab.a.model), (begun + 1, lab.other.model)):
        expected = logprobs(model, PROMPT, trajectory.response_ids.tolist())
        at = trajectory.lora_versions == version
        np.testing.assert_allclose(trajectory.logprobs[at], expected[at], atol=TOLERANCE, rtol=0)


async def test_requests_over_http(lab: Lab) -> None:
    """A batch with several adapters, and "model:adapter", also for the logprobs of the prompt."""
    models = [lab.a.model, lab.base.model, lab.b.model]
    batch = {
        "input_ids": [PROMPT] * 3,
        "lora_path": ["a", None, "b"],
        "return_logprob": True,
        "logprob_start_len": 0,
        "sampling_params": {"max_new_tokens": 6, "ignore_eos": True},
    }
    text = {"model": "tiny:b", "prompt": PROMPT, "max_tokens": 6, "logprobs": 0, "ignore_eos": True}
    async with (
        serve(lab.client, name="tiny") as gateway,
        httpx.AsyncClient(base_url=gateway.url, timeout=300) as http,
    ):
        made, scored, answer = await asyncio.gather(
            http.post("/generate", json=batch),
            http.post("/generate", json={**batch, "sampling_params": {"max_new_tokens": 0}}),
            http.post("/v1/completions", json={**text, "return_token_ids": True}),
        )
    for one, alone in zip(made.json(), scored.json(), strict=True):
        rows = (row["meta_info"]["input_token_logprobs"][1:] for row in (one, alone))
        np.testing.assert_allclose(*([logprob for logprob, *_ in some] for some in rows), atol=1e-4)
    for model, one in zip(models, made.json(), strict=True):
        meta = one["meta_info"]
        for rows, prompt in (
            (meta["input_token_logprobs"][1:], PROMPT[:1]),
            (meta["output_token_logprobs"], PROMPT),
        ):
            found, ids, _ = zip(*rows, strict=True)
            np.testing.assert_allclose(found, logprobs(model, prompt, ids), atol=TOLERANCE, rtol=0)
    (choice,) = answer.json()["choices"]
    expected = logprobs(lab.b.model, PROMPT, choice["token_ids"])
    found = choice["logprobs"]["token_logprobs"]
    np.testing.assert_allclose(found, expected, atol=TOLERANCE, rtol=0)


async def test_replacement_that_aborts(lab: Lab) -> None:
    calls = lab.begin("a", "b")
    await until_running(lab.client, 2)
    await lab.client.update_weights(lab.other.folder, lora="a", inflight="abort")
    a, b = await asyncio.gather(*calls)
    assert (a.finish_reason, b.finish_reason) == ("abort", "length")
    assert 0 < len(a.output_ids) < COUNT
    check(a, lab.a.model)
    check(b, lab.b.model)


async def test_weights_of_the_model_and_adapters(lab: Lab) -> None:
    """An update of the model keeps the adapters. They apply to the new weights."""
    policy = Policies(lab.a.folder.parent)[1]
    changed = make_adapter(policy, lab.a.folder.parent / "new", 1)
    calls = lab.begin("a")
    await until_running(lab.client, 1)
    version = (await lab.client.update_weights(policy.model)).version
    (running,) = await asyncio.gather(*calls)
    now = await lab.one("a")
    await lab.client.update_weights(lab.base.model)
    assert [span.version for span in running.versions] == [version - 1, version]
    assert len(running.lora_versions) == 1
    check(now, changed.model)
    check(await lab.one("a"), lab.a.model)


async def test_unload_while_requests_run(lab: Lab) -> None:
    calls = lab.begin("a", None, "b", "a")
    await until_running(lab.client, 4)
    await lab.client.unload_lora("a")
    a, base, b, last = await asyncio.gather(*calls, return_exceptions=True)
    for error in (a, last):
        assert isinstance(error, sglrl.UnknownAdapter)
        assert str(error) == "the adapter 'a' was unloaded"
    assert isinstance(base, sglrl.Completion)
    assert isinstance(b, sglrl.Completion)
    check(b, lab.b.model)
    with pytest.raises(sglrl.UnknownAdapter, match=r"no adapter 'a' is loaded \(loaded: 'b'\)"):
        await lab.one("a")
    await lab.client.load_lora("a", lab.other.folder)
    check(await lab.one("a"), lab.other.model)


async def test_unload_in_a_paused_engine(lab: Lab) -> None:
    calls = lab.begin("a", "b")
    await until_running(lab.client, 2)
    await lab.client.pause()
    await lab.client.unload_lora("a")
    await lab.client.resume()
    a, b = await asyncio.gather(*calls, return_exceptions=True)
    assert isinstance(a, sglrl.UnknownAdapter)
    assert isinstance(b, sglrl.Completion)
    assert len(b.output_ids) == COUNT


async def test_the_worker_checks_too(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver does not know the shapes of every model."""

    async def unknown(timeout: float | None) -> Any:
        raise EngineError("quantized")

    monkeypatch.setattr(lab.client.pool.weights, "describe", unknown)
    name = "base_model.model.model.layers.0.self_attn.{}.lora_{}.weight"
    wrong = {
        name.format("k_proj", "B"): (lambda t: t[:-1], "k_proj needs"),
        name.format("o_proj", "A"): (lambda t: t[:, :-1], "the model needs"),
    }
    for tensor, (change, text) in wrong.items():
        tensors = lab.a.tensors
        tensors[tensor] = change(tensors[tensor])
        with pytest.raises(sglrl.InvalidAdapter, match=text):
            await lab.client.load_lora("c", tensors, config=lab.a.config)
    tensors = {n.replace("layers.0", "layers.7"): t for n, t in lab.a.tensors.items()}
    with pytest.raises(sglrl.InvalidAdapter, match="the model has no such module"):
        await lab.client.update_weights(tensors, lora="a")
    assert {*lab.client.loras} == {"a", "b"}
    check(await lab.one("a"), lab.a.model)
    assert sorted(lab.client.info.lora_target_modules, key=ALL.index) == ALL


async def test_launch_replacement_and_more_workers(models: Path) -> None:
    """Adapters of ``lora_paths`` are there at once. New workers have the current versions."""
    folder = models / "lora-paths"
    base = Policies(folder)[0]
    a = make_adapter(base, folder / "a", 1, modules=["q_proj", "v_proj"])
    b = make_adapter(base, folder / "b", 2, 8, modules=["o_proj"])
    new = make_adapter(base, folder / "new", 3, modules=["q_proj", "v_proj"])
    async with sglrl.launch(
        base.folder, device="cpu", restarts=9, lora_paths={"a": a.folder, "b": str(b.folder)}
    ) as client:
        lab = Lab(client, base, a, b, new)
        assert client.info.max_lora_rank == 8
        assert client.info.lora_target_modules == ("k_proj", "o_proj", "q_proj", "v_proj")
        check(await lab.one("a"), a.model)
        check(await lab.one("b"), b.model)
        await client.update_weights(new.tensors, lora="a")
        calls = lab.begin("a", "b", None, worker=None)
        await until_running(client, 3)
        os.kill(client.workers[0].pid, signal.SIGKILL)
        for completion, model in zip(
            await asyncio.gather(*calls), (new.model, b.model, base.model), strict=True
        ):
            assert completion.resumed == 1
            check(completion, model)
        assert await client.add_workers(1) == [1]
        check(await lab.one("a", worker=1), new.model)
        check(await lab.one("b", worker=1), b.model)
        assert (await lab.one("a", worker=1)).lora_versions == ((0, 12, 1),)
