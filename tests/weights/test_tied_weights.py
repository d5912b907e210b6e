"""An engine with tied embeddings keeps one tensor for the embedding and the output layer.

However a trainer sends its weights, an output layer that differs is refused, and an equal one
changes nothing. transformers confirms the live weights.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest
import pytest_asyncio
import torch
from engine.policies import NORM, Lab, Policies, Weights
from gateway.test_trained_weights import Trainer
from safetensors.torch import save_file

import sglrl
from sglrl.gateway.serve import serve
from sglrl.weights import Sender

pytestmark = pytest.mark.asyncio(loop_scope="session")

HEAD, EMBED = "lm_head.weight", "model.embed_tokens.weight"
DIFFERS = r"lm_head\.weight differs from .*model\.embed_tokens\.weight"
Send = Callable[[Weights], Awaitable[Any]]


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def lab(models: Path) -> AsyncIterator[Lab]:
    policies = Policies(models / "tied-heads", dtype="float32", tied=True)
    async with sglrl.launch(
        policies[0].folder, device="cpu", replicas=2, enable_memory_saver=True
    ) as client:
        yield Lab(client, policies)


class Ways(NamedTuple):
    """The ways in which a trainer sends a part of the weights."""

    client: sglrl.Client
    remote: sglrl.Client
    sender: Sender
    trainer: Trainer
    folder: Path

    async def local(self, weights: Weights) -> None:
        await self.client.update_weights(weights, partial=True)

    async def connected(self, weights: Weights) -> None:
        await self.remote.update_weights(weights, partial=True)

    async def sent(self, weights: Weights) -> None:
        await self.sender.update(weights, partial=True)

    async def disk(self, weights: Weights) -> None:
        self.folder.mkdir(exist_ok=True)
        save_file(weights, self.folder / "model.safetensors")
        await self.client.update_weights_from_disk(self.folder, partial=True)

    async def http(self, weights: Weights) -> None:
        answer = await self.trainer.update(weights)
        if answer.status_code != 200:
            raise sglrl.InvalidWeights(answer.text)

    async def http_flat(self, weights: Weights) -> None:
        answer = await self.trainer.update_flat(weights)
        if answer.status_code != 200:
            raise sglrl.InvalidWeights(answer.text)


WAYS = ("local", "connected", "sent", "disk", "http", "http_flat")


@pytest_asyncio.fixture(loop_scope="session")
async def ways(lab: Lab, tmp_path: Path) -> AsyncIterator[Ways]:
    client = lab.client
    async with (
        await Sender.connect(client.weights_address) as sender,
        sglrl.connect(client.address) as remote,
        serve(client, name="policy") as gateway,
        httpx.AsyncClient(base_url=gateway.url, timeout=120) as http,
    ):
        trainer = Trainer(http)
        assert (await trainer.form()).status_code == 200
        yield Ways(client, remote, sender, trainer, tmp_path / "part")
        await trainer.leave()
        trainer.close()


def weights_of(lab: Lab, seed: int) -> Weights:
    return {n: t.clone() for n, t in lab.policies[seed].model.state_dict().items()}


@pytest.mark.parametrize("way", WAYS)
async def test_buckets(lab: Lab, ways: Ways, way: str) -> None:
    """A trainer sends buckets of one or several tensors, with or without the embedding."""
    send: Send = getattr(ways, way)
    client = lab.client
    seed = 1 if lab.current is lab.policies[0] else 0
    new = weights_of(lab, seed)
    assert torch.equal(new[HEAD], new[EMBED])
    before = client.weight_version
    rest = {n: t for n, t in new.items() if n not in (HEAD, EMBED, NORM)}
    for bucket in (
        {EMBED: new[EMBED]},
        # Nothing of this bucket changes anything. It is a new version as every other bucket.
        {HEAD: new[HEAD]},
        {HEAD: new[HEAD], NORM: new[NORM]},
        rest,
    ):
        await send(bucket)
    assert client.weight_version == before + 4
    lab.by_version[client.weight_version] = lab.policies[seed]
    await lab.check()
    new[HEAD][3, 5] += 1
    for bucket in (
        {HEAD: new[HEAD]},
        {HEAD: new[HEAD], NORM: new[NORM] + 1},
        {HEAD: new[HEAD], EMBED: new[EMBED]},
        {EMBED: new[EMBED] + 1, HEAD: new[HEAD] - 1},
    ):
        with pytest.raises(sglrl.InvalidWeights, match=DIFFERS):
            await send(bucket)
    assert client.weight_version == before + 4
    await lab.check()
    assert await client.verify_weights({HEAD: new[HEAD]}) == [HEAD]
    assert await client.verify_weights({HEAD: new[EMBED]}) == []


async def test_whole_models_from_files(lab: Lab, tmp_path: Path) -> None:
    client = lab.client
    new = weights_of(lab, 2)
    save_file(new, tmp_path / "model.safetensors")
    report = await client.update_weights_from_disk(tmp_path)
    lab.by_version[report.version] = lab.policies[2]
    await lab.check()
    new[HEAD][3, 5] += 1
    save_file({HEAD: new.pop(HEAD)}, tmp_path / "head.safetensors")
    save_file(new, tmp_path / "model.safetensors")
    with pytest.raises(sglrl.InvalidWeights, match=rf"{DIFFERS}.* in head\.safetensors"):
        await client.update_weights_from_disk(tmp_path)
    await lab.check()


async def test_buckets_at_the_same_time(lab: Lab) -> None:
    """The output layer is compared with the embedding that is on its way."""
    new = weights_of(lab, 1 if lab.current is not lab.policies[1] else 2)
    await asyncio.gather(
        lab.client.update_weights({EMBED: new[EMBED]}, partial=True),
        lab.client.update_weights({HEAD: new[HEAD]}, partial=True),
    )
    assert await lab.client.verify_weights({HEAD: new[HEAD], EMBED: new[EMBED]}) == []
    await lab.update(0)


async def test_an_empty_update_is_refused(lab: Lab, tmp_path: Path) -> None:
    save_file({}, tmp_path / "model.safetensors")
    async with await Sender.connect(lab.client.weights_address) as sender:
        for call in (
            lab.client.update_weights({}, partial=True),
            sender.update({}, partial=True),
            lab.client.update_weights_from_disk(tmp_path, partial=True),
        ):
            with pytest.raises(sglrl.InvalidWeights, match="no tensors are given"):
                await call


@pytest.mark.parametrize("mode", ["full", "bucketed"])
async def test_a_bucket_of_names_that_the_engine_computes(lab: Lab, mode: str) -> None:
    """Old checkpoints have such tensors. A bucket may have nothing else."""
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    version = lab.client.weight_version
    report = await lab.client.update_weights({name: torch.ones(4)}, partial=True, mode=mode)
    assert (report.version, report.bytes) == (version + 1, 0)
    assert report.broadcast_ms < 60_000
    lab.by_version[report.version] = lab.by_version[version]
    await lab.check()


async def test_a_bucket_for_an_engine_that_sleeps(lab: Lab) -> None:
    head = weights_of(lab, 0)[HEAD]
    await lab.client.sleep(["weights"])
    try:
        with pytest.raises(sglrl.UsageError, match="asleep"):
            await lab.client.update_weights({HEAD: head}, partial=True)
    finally:
        await lab.client.wake()


async def test_names_of_the_files(lab: Lab, tmp_path: Path) -> None:
    """The error names the file of a tensor that does not fit, and a file that cannot be read."""
    new = weights_of(lab, 0)
    save_file({"model.nonsense": torch.zeros(3)}, tmp_path / "b.safetensors")
    save_file(new, tmp_path / "a.safetensors")
    with pytest.raises(sglrl.InvalidWeights, match=r"unknown: model\.nonsense.*/b\.safetensors"):
        await lab.client.update_weights_from_disk(tmp_path)
    save_file({NORM: torch.zeros(3)}, tmp_path / "b.safetensors")
    save_file({n: t for n, t in new.items() if n != NORM}, tmp_path / "a.safetensors")
    with pytest.raises(sglrl.InvalidWeights, match=r"has shape \[3\].*/b\.safetensors"):
        await lab.client.update_weights_from_disk(tmp_path)
    # The header is as long as it says, but describes more elements than the file has.
    save_file({NORM: new[NORM]}, tmp_path / "b.safetensors")
    content = (tmp_path / "b.safetensors").read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    header[NORM]["data_offsets"] = [4, header[NORM]["data_offsets"][1]]
    changed = json.dumps(header).encode().ljust(length)
    damaged = len(changed).to_bytes(8, "little") + changed + content[8 + length :]
    (tmp_path / "b.safetensors").write_bytes(damaged)
    with pytest.raises(sglrl.SglrlError, match=r"/b\.safetensors"):
        await lab.client.update_weights_from_disk(tmp_path)
