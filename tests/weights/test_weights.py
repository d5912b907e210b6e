"""New weights in every form: the engine's answers equal those of Hugging Face transformers.

Weights that do not fit are refused.
"""

from __future__ import annotations

import ast
import asyncio
import copy
import threading
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import torch
from engine.policies import NORM, PROMPTS, Lab, Policies, Weights, without
from readme import example

import sglrl
from sglrl.weights import Sender

pytestmark = pytest.mark.asyncio(loop_scope="session")


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def lab(models: Path) -> AsyncIterator[Lab]:
    policies = Policies(models / "policies")
    async with sglrl.launch(policies[0].folder, device="cpu", weight_device="cpu") as client:
        yield Lab(client, policies)


# --- forms of weights -----------------------------------------------------------------------------


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
    # This form has all buffers, also those that are in no checkpoint.
    FORMS["tensordict of a module"] = TensorDict.from_module


@pytest.mark.parametrize("form", FORMS)
async def test_answers_are_those_of_the_new_weights(lab: Lab, form: str) -> None:
    before = lab.client.weight_version
    seed = 1 + list(FORMS).index(form) % 3
    report = await lab.update(seed, FORMS[form](lab.policies[seed].model))
    assert report.version == before + 1
    await lab.check()


async def test_one_thread_copies_and_the_programs_threads_keep_theirs(lab: Lab) -> None:
    """Several copying threads would wait for each other, because engines use all cores."""
    seen = []

    class Asking(torch.Tensor):
        def full_tensor(self) -> torch.Tensor:
            seen.append((threading.current_thread().name, torch.get_num_threads()))
            return self.as_subclass(torch.Tensor)

    weights = {n: t.as_subclass(Asking) for n, t in lab.policies[1].model.state_dict().items()}
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        await lab.update(1, weights)
        assert set(seen) == {("sglrl-weights", 1)}
        assert torch.get_num_threads() == 3
        with ThreadPoolExecutor() as pool:
            assert pool.submit(torch.get_num_threads).result() == 3
    finally:
        torch.set_num_threads(before)
    await lab.check()


OTHERS = {
    "llama": ({"architecture": "llama"}, "float32"),
    "tied": ({"tied": True}, "float32"),
    "bfloat16": ({"flat": True}, "bfloat16"),
    # The MLP is 80 wide. SGLang would make it 96 wide.
    "narrow": ({"hidden_size": 40}, "float32"),
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
        # A module lists tied tensors once.
        await lab.update(0, given[0].model)
        await lab.check()


async def test_what_is_tied_in_the_engine_and_not_in_the_trainer(models: Path) -> None:
    """The engine stores only one of the tensors, so a different second tensor must be refused."""
    policies = Policies(models / "tied", dtype="float32", tied=True)
    async with sglrl.launch(policies[0].folder, device="cpu") as client:
        lab = Lab(client, policies)
        weights = {n: t.clone() for n, t in policies[1].model.state_dict().items()}
        # An equal copy of the tied tensor is accepted.
        await lab.update(1, weights)
        await lab.check()
        weights["lm_head.weight"][3, 5] += 1
        with pytest.raises(
            sglrl.InvalidWeights, match=r"lm_head\.weight differs from model\.embed_tokens\.weight"
        ):
            await client.update_weights(weights)
        assert await client.verify_weights(weights) == ["lm_head.weight"]
        async with await Sender.connect(client.weights_address) as sender:
            with pytest.raises(sglrl.InvalidWeights, match="differs from"):
                await sender.update(weights)
        for wrong, says in ((torch.zeros(3, 3), "shape"), (torch.ones(3).long(), "int64")):
            with pytest.raises(sglrl.InvalidWeights, match=says):
                await client.update_weights({**weights, "lm_head.weight": wrong})
        await lab.check()


# --- refusals -------------------------------------------------------------------------------------

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
    "meta": (
        lambda w: {**w, NORM: torch.empty(64, device="meta")},
        {"mode": "bucketed"},
        sglrl.InvalidWeights,
        r"model\.norm\.weight is on the meta device",
    ),
    "sparse": (
        lambda w: {**w, NORM: w[NORM].to_sparse()},
        {"mode": "bucketed"},
        sglrl.InvalidWeights,
        r"model\.norm\.weight is torch\.sparse_coo",
    ),
    "nothing": (lambda w: {}, {}, sglrl.InvalidWeights, "no tensors"),
    "nothing of a part": (lambda w: {}, {"partial": True}, sglrl.InvalidWeights, "no tensors"),
    "twice": (
        lambda w: [*w.items(), (NORM, w[NORM])],
        {},
        sglrl.InvalidWeights,
        r"model\.norm\.weight is given twice",
    ),
    "no tensor": (
        lambda w: {**w, NORM: 1.0},
        {},
        sglrl.InvalidWeights,
        "is not a tensor but float",
    ),
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
    # The refused weights differ from the current ones, so the test notices if they become live.
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
    # After two updates only the live memory holds the remaining weights.
    await lab.update(2)
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
    # A further part of the same update has the same version. The parts share no KV cache.
    prompt = list(range(5, 40))
    for _ in range(2):
        before = await lab.client.generate(input_ids=prompt, max_new_tokens=1)
    assert before.cached_tokens
    rest = {name: tensor for name, tensor in new.items() if name not in names}
    again = await lab.client.update_weights(rest, partial=True, same_version=True)
    assert again.version == report.version == lab.client.weight_version
    after = await lab.client.generate(input_ids=prompt, max_new_tokens=1)
    assert (after.cached_tokens, after.versions[0].version) == (0, report.version)
    lab.by_version[report.version] = lab.policies[1]
    assert await lab.client.verify_weights(lab.policies[1].model) == []
    await lab.check(PROMPTS[:1])
    await lab.update(0)
    await lab.check(PROMPTS[:1])


async def test_a_tied_module_for_an_engine_that_keeps_both_tensors(lab: Lab) -> None:
    """The engine gets the tensor under both names, also in a part."""
    await lab.update(0)
    module = copy.deepcopy(lab.policies[1].model)
    module.lm_head.weight = module.model.embed_tokens.weight
    for partial in (False, True):
        await lab.client.update_weights(module, partial=partial)
        assert await lab.client.verify_weights(dict(module.state_dict())) == []
        await lab.update(0)
    with pytest.raises(sglrl.InvalidWeights, match="missing: lm_head"):
        await lab.client.update_weights(without(dict(module.state_dict()), "lm_head.weight"))
    await lab.check(PROMPTS[:1])


async def test_what_was_a_part_is_not_taken_for_the_whole(lab: Lab) -> None:
    """This also holds if the same tensors were just accepted as a partial update."""
    part = {NORM: lab.policies[0].model.state_dict()[NORM]}
    await lab.client.update_weights(part, partial=True)
    version = lab.client.weight_version
    with pytest.raises(sglrl.InvalidWeights, match="missing"):
        await lab.client.update_weights(part)
    assert lab.client.weight_version == version
    await lab.update(0)


async def test_a_manifest_is_looked_at_again_when_it_changes(lab: Lab) -> None:
    """A changed order, dtype or shape is checked as in a first update."""
    whole = dict(lab.policies[1].model.state_dict())
    for weights in (
        whole,
        dict(reversed(whole.items())),
        {name: tensor.double() for name, tensor in whole.items()},
        {**whole, NORM: whole[NORM].double()},
        whole,
    ):
        report = await lab.client.update_weights(weights)
        assert report.bytes == sum(tensor.nbytes for tensor in whole.values())
        assert await lab.client.verify_weights(whole) == []
        await lab.update(0)
    with pytest.raises(sglrl.InvalidWeights, match=NORM):
        await lab.client.update_weights({**whole, NORM: whole[NORM][:8]})


async def test_two_updates_at_a_time_keep_their_own_manifests(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    sender = lab.client._control.sender
    ending = sender._ending

    async def later(*args: Any) -> Any:
        await asyncio.sleep(0)
        return await ending(*args)

    monkeypatch.setattr(sender, "_ending", later)
    whole = lab.policies[1].model.state_dict()
    part = {NORM: lab.policies[0].model.state_dict()[NORM]}
    reports = await asyncio.gather(
        lab.client.update_weights(whole), lab.client.update_weights(part, partial=True)
    )
    sizes = [sum(tensor.nbytes for tensor in weights.values()) for weights in (whole, part)]
    assert [report.bytes for report in reports] == sizes
    assert await lab.client.verify_weights({**whole, **part}) == []
    await lab.update(0)


# --- what the engine reports about its weights ----------------------------------------------------


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
    # The smallest change of one value, a swap of two values, and a change of a sign.
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


async def test_a_view_that_negates(lab: Lab) -> None:
    weights = dict(lab.policies[2].model.state_dict())
    weights[NORM] = torch._neg_view(-weights[NORM])
    assert weights[NORM].is_neg()
    await lab.update(2, weights)
    assert await lab.client.verify_weights(weights) == []
    await lab.check(PROMPTS[:1], 4)


@pytest.mark.parametrize("host", ["", 7, "192.0.2.7", "no such host"])
async def test_an_address_that_is_not_here(lab: Lab, host: Any) -> None:
    with pytest.raises(sglrl.UsageError, match="of this machine"):
        await lab.client.update_weights(lab.policies[1].model, host=host)
    await lab.check(PROMPTS[:1], 4)


async def test_what_the_readme_shows(lab: Lab, capsys: pytest.CaptureFixture[str]) -> None:
    code = example("print(report)")
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


async def test_updates_from_several_addresses_take_turns(lab: Lab) -> None:
    """No update closes the connection through which another update is sent."""
    client, policies = lab.client, lab.policies
    async with asyncio.timeout(300):
        reports = await asyncio.gather(
            *(
                client.update_weights(policies[1 + i % 2].model, host=host)
                for i, host in enumerate(["127.0.0.1", "localhost", "127.0.0.1", "localhost"])
            )
        )
        first = client.weight_version - 3
        assert [r.version for r in reports] == [first, first + 1, first + 2, first + 3]
        running = asyncio.ensure_future(client.update_weights(policies[1].model))
        await asyncio.sleep(0)
        with pytest.raises(sglrl.UpdateInProgress):
            await client.update_weights(policies[2].model, host="127.0.0.1", wait=False)
        with pytest.raises(sglrl.UsageError):
            await client.update_weights(policies[2].model, host="no such host")
        for wrong in ("cuda", "nothing"):
            with pytest.raises(sglrl.UsageError):
                await client.update_weights(policies[2].model, device=wrong)
        report = await running
    lab.by_version[report.version] = policies[1]
    await lab.check()
