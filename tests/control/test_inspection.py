"""Look into running engines: arguments, weights, traces of the profiler."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from engine.reference import Reference

import sglrl

pytestmark = pytest.mark.asyncio(loop_scope="session")


def trace(path: str) -> list[dict[str, Any]]:
    events: list[dict[str, Any]] = json.loads(gzip.decompress(Path(path).read_bytes()))[
        "traceEvents"
    ]
    return events


async def test_server_info(client: sglrl.Client) -> None:
    (info,) = await client.server_info()
    assert info["model_path"] == client.model
    assert info["attention_backend"] == "torch_native"
    assert info["constrained_json_disable_any_whitespace"] is True
    assert info["version"] == client.info.sglang_version
    assert len(info) > 400
    # A default that SGLang computes.
    assert isinstance(info["random_seed"], int)
    json.dumps(info)


async def test_weights(qwen: Path, reference: Reference) -> None:
    """Parts of fused parameters, before and after an update."""
    state = {name: value.clone() for name, value in reference.model.state_dict().items()}
    async with sglrl.launch(qwen, device="cpu", replicas=2) as client:
        names = list(await client.model_metadata())
        found = await client.get_weights(names, worker=1)
        assert found.keys() == set(names)
        for name in names:
            assert found[name].dtype == torch.float32
            torch.testing.assert_close(found[name], state[name], rtol=0, atol=0)
        name = "model.layers.1.self_attn.k_proj.weight"
        await client.update_weights({**state, name: state[name] + 1})
        (changed,) = (await client.get_weights([name])).values()
        torch.testing.assert_close(changed, state[name] + 1, rtol=0, atol=0)
        with pytest.raises(sglrl.InvalidWeights, match=r"no tensor 'x'"):
            await client.get_weights(["x"])
        with pytest.raises(sglrl.UsageError, match="worker"):
            await client.get_weights([name], worker=7)


async def test_profile(client: sglrl.Client, tmp_path: Path) -> None:
    pid = client.workers[0].pid
    with pytest.raises(sglrl.InvalidRequest):
        await client.stop_profile()
    await client.start_profile(tmp_path, activities=["CPU"], record_shapes=True)
    with pytest.raises(sglrl.InvalidRequest):
        await client.start_profile(tmp_path)
    await client.generate(input_ids=[5, 6, 7], max_new_tokens=4)
    (path,) = await client.stop_profile()
    assert Path(path).parent == tmp_path
    assert str(client.workers[0].pid) in Path(path).name
    assert "aten::linear" in {event["name"] for event in trace(path)}
    with pytest.raises(sglrl.UsageError, match="activities must be of"):
        await client.start_profile(tmp_path, activities=["TPU"])
    wrong: Any
    for wrong in (5, ""):
        with pytest.raises(sglrl.UsageError, match="folder must be a path"):
            await client.start_profile(wrong)
    (tmp_path / "file").touch()
    with pytest.raises(sglrl.InvalidRequest, match=r"cannot be made: \[Errno 20\] Not a directory"):
        await client.start_profile(tmp_path / "file" / "folder")
    # The failed start has left no profile.
    with pytest.raises(sglrl.InvalidRequest, match="not running"):
        await client.stop_profile()
    assert client.workers[0].pid == pid


async def test_the_fake_engine_has_none_of_them(tmp_path: Path) -> None:
    async with sglrl.launch("fake", engine="fake") as client:
        assert (await client.server_info())[0]["engine"] == "fake"
        with pytest.raises(sglrl.InvalidRequest, match="profiler"):
            await client.start_profile(tmp_path)
