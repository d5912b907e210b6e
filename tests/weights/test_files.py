"""New weights from files. Files that do not fit are refused."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import torch
from engine.policies import NORM, PROMPTS, Lab, Policies, until_idle, until_running, without
from safetensors.torch import load_file, save_file

import sglrl
from sglrl.weights.safetensors_files import INDEX

pytestmark = pytest.mark.asyncio(loop_scope="session")

ENDLESS: dict[str, Any] = {"max_new_tokens": 1900, "logprobs": True, "ignore_eos": True}


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def lab(models: Path) -> AsyncIterator[Lab]:
    policies = Policies(models / "policies")
    async with sglrl.launch(policies[0].folder, device="cpu", weight_device="cpu") as client:
        yield Lab(client, policies)


async def test_weights_from_files(lab: Lab) -> None:
    client = lab.client
    for seed in (3, 1):
        policy = lab.policies[seed]
        await until_idle(client)
        call = asyncio.ensure_future(client.generate(input_ids=PROMPTS[0], **ENDLESS))
        await until_running(client, 1)
        report = await client.update_weights_from_disk(policy.folder)
        lab.by_version[report.version] = policy
        assert report.mode == "disk"
        assert report.bytes == sum(t.nbytes for t in policy.model.state_dict().values())
        await lab.check()
        # The call runs before and after the update, however long loading the files takes.
        await client.abort()
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
    # The same weights as tensors.
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


def header(file: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    content = file.read_bytes()
    length = int.from_bytes(content[:8], "little")
    found = json.loads(content[8 : 8 + length])
    change(found)
    new = json.dumps(found).encode()
    file.write_bytes(len(new).to_bytes(8, "little") + new + content[8 + length :])


BAD_FILES: dict[str, tuple[Callable[[Path], Any], type[Exception], str]] = {
    "missing": (Path.unlink, sglrl.ModelError, "holds no"),
    "garbage": (garbage, sglrl.ModelError, "not a safetensors file"),
    "truncated": (truncated, sglrl.ModelError, "not as long as its header says"),
    "a text for a shape": (
        lambda file: header(file, lambda h: h[NORM].update(shape="64")),
        sglrl.ModelError,
        "not a safetensors file",
    ),
    "no offsets": (
        lambda file: header(file, lambda h: h[NORM].pop("data_offsets")),
        sglrl.ModelError,
        "not a safetensors file",
    ),
    "an index of what is not there": (
        lambda file: (file.parent / INDEX).write_text('{"weight_map": {"a": "b.safetensors"}}'),
        sglrl.ModelError,
        r"lacks b\.safetensors",
    ),
    "no index": (
        lambda file: (file.parent / INDEX).write_text("{}"),
        sglrl.ModelError,
        "not an index of safetensors files",
    ),
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


FIRST = "model-00001-of-00002.safetensors"


async def test_files_beside_those_that_the_index_names(models: Path, tmp_path: Path) -> None:
    """Mistral's folders hold all weights a second time, under other names.

    Tensors that the engine does not keep may have any dtype.
    """
    policies = Policies(models / "policies")
    folders = []
    for seed in (0, 1):
        folder = tmp_path / str(seed)
        shutil.copytree(policies[seed].folder, folder)
        whole = load_file(folder / "model.safetensors")
        (folder / "model.safetensors").unlink()
        names = sorted(whole)
        parts = {FIRST: names[::2], FIRST.replace("1", "2", 1): names[1::2]}
        for file, part in parts.items():
            save_file({n: whole[n] for n in part}, folder / file, metadata={"format": "pt"})
        index = {"metadata": {}, "weight_map": {n: f for f, part in parts.items() for n in part}}
        (folder / INDEX).write_text(json.dumps(index))
        save_file({"norm.weight": whole[NORM]}, folder / "consolidated.safetensors")
        folders.append(folder)
    more = load_file(folders[1] / FIRST)
    more["model.rotary_emb.inv_freq"] = torch.arange(4)
    save_file(more, folders[1] / FIRST, metadata={"format": "pt"})
    async with sglrl.launch(folders[0], device="cpu") as client:
        lab = Lab(client, policies)
        assert "norm.weight" not in await client.model_metadata()
        await lab.check(PROMPTS[:1], 4)
        await lab.update(2)
        await lab.check(PROMPTS[:1], 4)
        report = await client.update_weights_from_disk(folders[1])
        lab.by_version[report.version] = policies[1]
        await lab.check(PROMPTS[:1], 4)


async def test_a_folder_that_is_not_there(lab: Lab, tmp_path: Path) -> None:
    with pytest.raises(sglrl.ModelError, match="holds no"):
        await lab.client.update_weights_from_disk(tmp_path / "nowhere")
    file = lab.policies[1].folder / "model.safetensors"
    with pytest.raises(sglrl.ModelError, match="is a file; give the folder"):
        await lab.client.update_weights_from_disk(file)
    await lab.check(PROMPTS[:1], 4)
