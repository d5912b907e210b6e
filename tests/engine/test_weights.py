"""New weights in a running engine: what it answers afterwards is what Hugging Face transformers
says of them, token by token, whatever ran meanwhile."""

from __future__ import annotations

import ast
import asyncio
import re
from collections.abc import AsyncIterator, Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
import torch
from safetensors.torch import load_file, save_file

import sglrl

from .policies import PROMPTS, Lab, Policies, collect, phase_event, until_idle, until_running

pytestmark = pytest.mark.asyncio(loop_scope="session")

LONG: dict[str, Any] = {"max_new_tokens": 200, "logprobs": True, "ignore_eos": True}


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def lab(models: Path) -> AsyncIterator[Lab]:
    """One worker that runs four requests at a time, so that the fifth waits in the engine."""
    policies = Policies(models / "policies")
    async with sglrl.launch(
        policies[0].folder, device="cpu", max_running_requests=4, weight_device="cpu"
    ) as client:
        yield Lab(client, policies)


# --- what may be given ----------------------------------------------------------------------------


FORMS: dict[str, Callable[[torch.nn.Module], Any]] = {
    "module": lambda model: model,
    "mapping": lambda model: model.state_dict(),
    "pairs": lambda model: iter(model.state_dict().items()),
    "float64": lambda model: {n: t.double() for n, t in model.state_dict().items()},
    "transposed": lambda model: {n: t.t().contiguous().t() for n, t in model.named_parameters()},
}
if find_spec("tensordict"):
    from tensordict import TensorDict

    FORMS["tensordict"] = lambda model: TensorDict(model.state_dict()).unflatten_keys(".")


@pytest.mark.parametrize("form", FORMS)
async def test_answers_are_those_of_the_new_weights(lab: Lab, form: str) -> None:
    before = lab.client.weight_version
    seed = 1 + list(FORMS).index(form) % 3
    report = await lab.update(seed, FORMS[form](lab.policies[seed].model))
    assert report.version == before + 1
    await lab.check()


OTHERS = {
    "llama": ({"architecture": "llama"}, "float32"),
    "tied": ({"tied": True}, "float32"),
    "bfloat16": ({"flat": True}, "bfloat16"),
}


@pytest.mark.parametrize("kind", OTHERS)
async def test_other_models(models: Path, kind: str) -> None:
    options, dtype = OTHERS[kind]
    policies = Policies(models / kind, dtype=dtype, **options)
    given = Policies(models / kind, dtype="float32", **options)
    async with sglrl.launch(policies[0].folder, device="cpu", dtype=dtype) as client:
        lab = Lab(client, policies, 3e-2 if dtype == "bfloat16" else 1e-4)
        await lab.check()
        weights = given[1].model.state_dict()
        assert "lm_head.weight" in weights
        assert {t.dtype for t in weights.values()} == {torch.float32}
        await lab.update(1, weights)
        await lab.check()
        metadata = await client.model_metadata()
        assert {m.dtype for m in metadata.values()} == {dtype}
        assert ("lm_head.weight" in metadata) == (kind != "tied")
        # A module gives tied tensors once.
        await lab.update(0, given[0].model)
        await lab.check()


# --- what happens to requests that are running ----------------------------------------------------


async def through_updates(lab: Lab, **options: Any) -> tuple[list[sglrl.Completion], int]:
    """Long generations, the last of them streamed, that three updates come into; and the version
    before."""
    client = lab.client
    first = client.weight_version
    calls = [
        asyncio.ensure_future(client.generate(input_ids=prompt, **LONG)) for prompt in PROMPTS[:3]
    ]
    stream = client.stream(input_ids=PROMPTS[3], **LONG)
    seen = 0
    ids: list[int] = []
    versions: list[int] = []
    async for chunk in stream:
        ids += chunk.output_ids.tolist()
        versions += [chunk.version] * len(chunk.output_ids)
        if len(ids) >= 30 * (seen + 1) and seen < 3:
            seen += 1
            await lab.update(seen, **options)
    streamed = stream.completion
    assert streamed.output_ids.tolist() == ids
    assert [v for s in streamed.versions for v in [s.version] * (s.stop - s.start)] == versions
    return [*await asyncio.gather(*calls), streamed], first


@pytest.mark.parametrize("mode", ["full", "bucketed"])
@pytest.mark.parametrize("inflight", ["continue", "retract"])
async def test_a_generation_through_three_updates(lab: Lab, inflight: str, mode: str) -> None:
    await lab.update(0)
    completions, first = await through_updates(
        lab, inflight=inflight, mode=mode, bucket_bytes=1 << 16
    )
    again = inflight == "retract"
    for completion in completions:
        assert completion.finish_reason == "length"
        assert len(completion.output_ids) == LONG["max_new_tokens"]
        assert [s.version for s in completion.versions] == [first + i for i in range(4)]
        lab.check_history(completion, again=again)
        # The two ways differ, so the right one was found.
        other = np.abs(lab.expected(completion, again=not again) - completion.logprobs)
        assert other[completion.versions[1].start :].max() > 100 * lab.tolerance
    await lab.check()


async def test_abort_returns_what_there_is(lab: Lab) -> None:
    client = lab.client
    old = client.weight_version
    await until_idle(client)
    streamed = asyncio.ensure_future(collect(client.stream(input_ids=PROMPTS[1], **LONG)))
    await until_running(client, 1)
    # Three more run, two wait in the engine.
    calls = [
        asyncio.ensure_future(client.generate(input_ids=[*PROMPTS[2], i], **LONG)) for i in range(5)
    ]
    await until_running(client, 4)
    while (await client.stats())[0].engine.waiting < 2:
        pass
    report = await lab.other(inflight="abort")
    assert report.version == old + 1
    *running, fifth, sixth = [await streamed, *await asyncio.gather(*calls)]
    for completion in running:
        assert completion.finish_reason == "abort"
        assert 0 < len(completion.output_ids) < LONG["max_new_tokens"]
        assert [s.version for s in completion.versions] == [old]
        lab.check_history(completion)
    for completion in (fifth, sixth):
        assert completion.finish_reason == "abort"
        assert len(completion.output_ids) == 0
        assert completion.versions == ()
    await lab.check()


@pytest.mark.parametrize(("mode", "phase"), [("full", "commit"), ("bucketed", "prepare")])
async def test_drain_lets_them_end(
    lab: Lab, monkeypatch: pytest.MonkeyPatch, mode: str, phase: str
) -> None:
    client = lab.client
    old = client.weight_version
    running = [
        asyncio.ensure_future(client.generate(input_ids=prompt, **LONG)) for prompt in PROMPTS[:2]
    ]
    stream = client.stream(input_ids=PROMPTS[2], **LONG)
    draining = phase_event(monkeypatch, client, phase)
    update = meanwhile = cancelled = None
    since = 0
    async for chunk in stream:
        if update is None:
            # Draining has a time-out of its own.
            update = asyncio.ensure_future(lab.other(inflight="drain", mode=mode, timeout=0.4))
        # By then the worker has been told, too.
        if draining.is_set() and (since := since + len(chunk.output_ids)) > 20 and not meanwhile:
            meanwhile = asyncio.ensure_future(
                client.generate(input_ids=PROMPTS[3], max_new_tokens=20, logprobs=True)
            )
            cancelled = asyncio.ensure_future(client.generate(input_ids=PROMPTS[3], **LONG))
        elif cancelled is not None and since > 40:
            cancelled.cancel()
    assert update is not None
    assert meanwhile is not None
    assert cancelled is not None
    with pytest.raises(asyncio.CancelledError):
        await cancelled
    report = await update
    assert report.version == old + 1
    for completion in [*await asyncio.gather(*running), stream.completion]:
        assert completion.finish_reason == "length"
        assert completion.versions == ((0, LONG["max_new_tokens"], old),)
        lab.check_history(completion)
    late = await meanwhile
    assert [s.version for s in late.versions] == [old + 1]
    lab.check_history(late)
    await lab.check()
    assert (await client.stats())[0].engine.running == 0


async def test_a_drain_that_is_given_up_lets_new_calls_run(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = lab.client
    old = client.weight_version
    stream = client.stream(input_ids=PROMPTS[2], **LONG)
    draining = phase_event(monkeypatch, client, "prepare")
    update = meanwhile = late = None
    since = 0
    async for chunk in stream:
        if update is None:
            update = asyncio.ensure_future(lab.other(inflight="drain", mode="bucketed"))
        if draining.is_set() and (since := since + len(chunk.output_ids)) > 20 and not meanwhile:
            meanwhile = asyncio.ensure_future(
                client.generate(input_ids=PROMPTS[3], max_new_tokens=4, logprobs=True)
            )
        elif since > 40 and late is None:
            assert not meanwhile.done()
            update.cancel()
            late = await asyncio.wait_for(meanwhile, 100)
            # The long one still runs.
            assert (await client.stats())[0].engine.running > 0
    assert update is not None
    with pytest.raises(asyncio.CancelledError):
        await update
    assert late.versions[0].version == old
    lab.check_history(late)
    assert stream.completion.versions == ((0, LONG["max_new_tokens"], old),)
    await lab.other(inflight="drain", mode="bucketed")
    await lab.check()


# --- KV cache -------------------------------------------------------------------------------------


async def test_no_kv_of_other_versions_is_used(lab: Lab) -> None:
    client = lab.client
    prompt = [7 + (3 * i) % 400 for i in range(90)]
    wanted = {"max_new_tokens": 8, "logprobs": True, "temperature": 0, "ignore_eos": True}
    for expected in (0, 1):
        made = await client.generate(input_ids=prompt, **wanted)
        assert (made.cached_tokens > 0) == expected
    for _ in range(2):
        await lab.other()
        for expected in (0, 1):
            made = await client.generate(input_ids=prompt, **wanted)
            assert (made.cached_tokens > 0) == expected
            lab.check_history(made)


@pytest.mark.parametrize("inflight", ["continue", "retract"])
async def test_requests_that_waited_in_the_engine_use_no_old_kv(lab: Lab, inflight: str) -> None:
    client = lab.client
    prompt = [11 + (7 * i) % 300 for i in range(80)]
    old = client.weight_version
    warm = await client.generate(input_ids=prompt, max_new_tokens=4)
    assert warm.versions[0].version == old
    await until_idle(client)
    running = [
        asyncio.ensure_future(client.generate(input_ids=[5, 6, 7, i], **LONG)) for i in range(4)
    ]
    await until_running(client, 4)
    waiting = [
        asyncio.ensure_future(
            client.generate(input_ids=prompt, max_new_tokens=8, logprobs=True, seed=i)
        )
        for i in range(3)
    ]
    while (await client.stats())[0].engine.waiting < 3:
        pass
    await lab.other(inflight=inflight)
    for completion in await asyncio.gather(*running):
        assert [s.version for s in completion.versions] == [old, old + 1]
        lab.check_history(completion, again=inflight == "retract")
    for completion in await asyncio.gather(*waiting):
        assert [s.version for s in completion.versions] == [old + 1]
        lab.check_history(completion)


# --- refusals -------------------------------------------------------------------------------------

Weights = dict[str, torch.Tensor]


def without(weights: Weights, name: str) -> Weights:
    return {n: t for n, t in weights.items() if n != name}


NORM = "model.norm.weight"
REFUSED: dict[str, tuple[Callable[[Weights], Any], dict[str, Any], type[Exception], str]] = {
    "unknown name": (
        lambda w: {**w, "model.nonsense": torch.zeros(3)},
        {},
        sglrl.InvalidWeights,
        r"unknown: model\.nonsense",
    ),
    "missing name": (
        lambda w: without(w, NORM),
        {},
        sglrl.InvalidWeights,
        r"missing: model\.norm\.weight",
    ),
    "shape": (
        lambda w: {**w, NORM: torch.zeros(65)},
        {},
        sglrl.InvalidWeights,
        r"model\.norm\.weight has shape \[65\], the model's is \[64\]",
    ),
    "same size, other shape": (
        lambda w: {**w, NORM: torch.zeros(8, 8)},
        {},
        sglrl.InvalidWeights,
        r"\[8, 8\]",
    ),
    "integers": (
        lambda w: {**w, NORM: torch.ones(64, dtype=torch.int64)},
        {},
        sglrl.InvalidWeights,
        r"model\.norm\.weight holds torch\.int64",
    ),
    "nothing": (lambda w: {}, {}, sglrl.InvalidWeights, "no tensors"),
    "nothing of a part": (lambda w: {}, {"partial": True}, sglrl.InvalidWeights, "no tensors"),
    "twice": (
        lambda w: [*w.items(), (NORM, w[NORM])],
        {},
        sglrl.InvalidWeights,
        r"model\.norm\.weight is given twice",
    ),
    "no tensor": (lambda w: {**w, NORM: 1.0}, {}, sglrl.InvalidWeights, "is no tensor but float"),
    "no pairs": (lambda w: list(w.values()), {}, sglrl.InvalidWeights, "expected"),
    "no name": (lambda w: [(1, w[NORM])], {}, sglrl.InvalidWeights, "a tensor's name is 1"),
    "a number": (lambda w: 7, {}, sglrl.UsageError, "not int"),
    "a path": (lambda w: "weights", {}, sglrl.UsageError, "update_weights_from_disk"),
    "None": (lambda w: None, {}, sglrl.UsageError, "not NoneType"),
    "inflight": (dict, {"inflight": "later"}, sglrl.UsageError, "inflight must be one of continue"),
    "mode": (dict, {"mode": "half"}, sglrl.UsageError, "mode must be one of auto"),
    "timeout": (dict, {"timeout": 0}, sglrl.UsageError, "timeout"),
    "bucket_bytes": (dict, {"bucket_bytes": 0}, sglrl.UsageError, "bucket_bytes"),
    "same version": (dict, {"version": 0}, sglrl.UsageError, "above"),
    "lower version": (dict, {"version": -1}, sglrl.UsageError, "above"),
    "version as text": (dict, {"version": "9999"}, sglrl.UsageError, "integer"),
    "version as bool": (dict, {"version": True}, sglrl.UsageError, "integer"),
    "device": (dict, {"device": "cuda:0"}, sglrl.UsageError, "are on cpu"),
}


@pytest.mark.parametrize("case", REFUSED)
async def test_what_is_refused_changes_nothing(lab: Lab, case: str) -> None:
    client = lab.client
    make, options, error, says = REFUSED[case]
    before = client.weight_version
    if isinstance(options.get("version"), int) and options["version"] is not True:
        options = {"version": before + options["version"]}
    # Not the weights that are there, or it would not be seen if they were taken over.
    new = lab.policies[1 if lab.current is lab.policies[0] else 0].model.state_dict()
    with pytest.raises(error, match=says) as caught:
        await client.update_weights(make(new), **options)
    assert type(caught.value) is error
    assert client.weight_version == before
    assert [w.weight_version for w in client.workers] == [before]
    await lab.check(PROMPTS[:1], 4)


async def test_versions_may_be_given(lab: Lab) -> None:
    version = lab.client.weight_version + 10
    assert (await lab.other(version=version)).version == version
    await lab.check(PROMPTS[:1])
    assert (await lab.other()).version == version + 1


async def test_a_part_of_the_weights(lab: Lab) -> None:
    await lab.update(0)
    new = lab.policies[1].model.state_dict()
    names = [NORM, "model.layers.1.self_attn.k_proj.weight", "model.layers.0.mlp.up_proj.weight"]
    part = {name: new[name] for name in names}
    report = await lab.client.update_weights(part, partial=True)
    lab.by_version[report.version] = lab.policies[0]
    assert report.bytes == sum(t.nbytes for t in part.values())
    assert await lab.client.verify_weights(part) == []
    differing = await lab.client.verify_weights(lab.policies[0].model)
    assert sorted(differing) == sorted(names)
    await lab.update(0)
    await lab.check(PROMPTS[:1])


# --- what the engine says of its weights ----------------------------------------------------------


async def test_metadata_is_that_of_the_checkpoint(lab: Lab) -> None:
    expected = {
        name: ("float32", tuple(tensor.shape))
        for name, tensor in lab.policies[0].model.state_dict().items()
    }
    metadata = await lab.client.model_metadata()
    assert {name: (m.dtype, m.shape) for name, m in metadata.items()} == expected


async def test_verify_names_what_differs(lab: Lab) -> None:
    client = lab.client
    weights = {name: t.clone() for name, t in lab.current.model.state_dict().items()}
    assert await client.verify_weights(weights) == []
    # The smallest change of one value; two values that change places; a sign.
    up = weights["model.layers.0.mlp.up_proj.weight"].view(-1)
    up[5] = torch.nextafter(up[5], torch.tensor(float("inf")))
    v = weights["model.layers.1.self_attn.v_proj.weight"]
    v[0, 0], v[3, 7] = v[3, 7].clone(), v[0, 0].clone()
    weights["lm_head.weight"][511, 63] *= -1
    assert set(await client.verify_weights(weights)) == {
        "model.layers.0.mlp.up_proj.weight",
        "model.layers.1.self_attn.v_proj.weight",
        "lm_head.weight",
    }
    name = "model.layers.1.self_attn.v_proj.weight"
    assert await client.verify_weights({name: weights[name]}) == [name]
    with pytest.raises(sglrl.InvalidWeights, match="unknown: nonsense"):
        await client.verify_weights({"nonsense": torch.zeros(1)})
    with pytest.raises(sglrl.InvalidWeights, match="shape"):
        await client.verify_weights({name: torch.zeros(3)})


# --- files ----------------------------------------------------------------------------------------


async def test_weights_from_files(lab: Lab) -> None:
    client = lab.client
    for seed in (3, 1):
        policy = lab.policies[seed]
        await until_idle(client)
        call = asyncio.ensure_future(client.generate(input_ids=PROMPTS[0], **LONG))
        await until_running(client, 1)
        report = await client.update_weights_from_disk(policy.folder)
        lab.by_version[report.version] = policy
        assert report.mode == "disk"
        assert report.bytes == sum(t.nbytes for t in policy.model.state_dict().values())
        await lab.check()
        completion = await call
        assert len(completion.versions) == 2
        lab.check_history(completion)


async def test_files_in_another_dtype(lab: Lab, models: Path) -> None:
    rounded = Policies(models / "rounded", dtype="float32", saved="bfloat16")[1]
    report = await lab.client.update_weights_from_disk(str(rounded.folder))
    lab.by_version[report.version] = rounded
    await lab.check()
    given = load_file(rounded.folder / "model.safetensors")
    assert {t.dtype for t in given.values()} == {torch.bfloat16}
    await lab.other()
    # The same given as tensors.
    report = await lab.client.update_weights(given)
    lab.by_version[report.version] = rounded
    await lab.check()


def truncated(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1000])


def garbage(file: Path) -> None:
    file.write_bytes(b"\xff" * 3000)


def reshaped(file: Path) -> None:
    weights = load_file(file)
    weights[NORM] = torch.zeros(3)
    save_file(weights, file, metadata={"format": "pt"})


def lacking(file: Path) -> None:
    save_file(without(load_file(file), NORM), file, metadata={"format": "pt"})


def integers(file: Path) -> None:
    weights = load_file(file)
    weights[NORM] = torch.ones(64, dtype=torch.int32)
    save_file(weights, file, metadata={"format": "pt"})


BAD_FILES: dict[str, tuple[Callable[[Path], Any], type[Exception], str]] = {
    "missing": (Path.unlink, sglrl.ModelError, "holds no"),
    "garbage": (garbage, sglrl.ModelError, "no safetensors file"),
    "truncated": (truncated, sglrl.WeightUpdateError, "given up"),
    "shape": (reshaped, sglrl.InvalidWeights, r"\[3\]"),
    "lacking": (lacking, sglrl.InvalidWeights, "missing"),
    "integers": (integers, sglrl.InvalidWeights, "I32"),
}


@pytest.mark.parametrize("case", BAD_FILES)
async def test_files_that_are_refused(lab: Lab, case: str, tmp_path: Path) -> None:
    client = lab.client
    spoil, error, says = BAD_FILES[case]
    other = lab.policies[1 if lab.current is lab.policies[0] else 0]
    weights = load_file(other.folder / "model.safetensors")
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    spoil(tmp_path / "model.safetensors")
    before = client.weight_version
    with pytest.raises(error, match=says):
        await client.update_weights_from_disk(tmp_path)
    assert client.weight_version == before
    await lab.check(PROMPTS[:1], 4)


async def test_a_folder_that_is_not_there(lab: Lab, tmp_path: Path) -> None:
    with pytest.raises(sglrl.ModelError, match="holds no"):
        await lab.client.update_weights_from_disk(tmp_path / "nowhere")
    await lab.check(PROMPTS[:1], 4)


async def test_what_the_readme_shows(lab: Lab, capsys: pytest.CaptureFixture[str]) -> None:
    readme = Path(__file__).parents[2] / "README.md"
    _, code = re.findall(r"```python\n(.*?)```", readme.read_text(), re.DOTALL)
    policy = lab.policies[2 if lab.current is not lab.policies[2] else 1]
    names: dict[str, Any] = {
        "client": lab.client,
        "model": policy.model,
        "messages": [{"role": "user", "content": "2 + 2?"}],
    }
    await eval(compile(code, "README.md", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT), names)
    version = lab.client.weight_version
    lab.by_version[version] = policy
    assert f"weights v{version}: " in capsys.readouterr().out
    assert [span.version for span in names["completion"].versions] == [version]
    await lab.check(PROMPTS[:1], 4)
