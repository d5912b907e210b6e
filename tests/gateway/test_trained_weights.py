"""Trainers that know SGLang's server update the engines over HTTP. transformers confirms them."""

from __future__ import annotations

import asyncio
import itertools
import math
import socket
from collections.abc import AsyncIterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import httpx
import pytest
import pytest_asyncio
import torch
import torch.distributed as dist
from engine.policies import NORM, Lab, Policies, Weights, until_running
from torchrl.weight_update.llm.sglang_nccl import (  # type: ignore[import-not-found]
    _init_custom_process_group,
)

import sglrl
from sglrl.gateway.serve import serve

pytestmark = pytest.mark.asyncio(loop_scope="session")
_T = TypeVar("_T")
_names = itertools.count()


class Trainer:
    """Rank 0 of a group, with the code of TorchRL's client and gloo instead of NCCL."""

    def __init__(self, http: httpx.AsyncClient) -> None:
        self.http = http
        self.name = f"group{next(_names)}"
        self.group: Any = None

    async def post(self, path: str, **body: Any) -> httpx.Response:
        return await self.http.post(path, json=body)

    async def join(self, port: int, **more: Any) -> httpx.Response:
        group = {
            "group_name": self.name,
            "master_address": "127.0.0.1",
            "master_port": port,
            "backend": "gloo",
            "rank_offset": 1,
            "world_size": 2,
        }
        return await self.post("/init_weights_update_group", **(group | more))

    async def form(self) -> httpx.Response:
        store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
        port = store.port
        del store
        made, answer = await asyncio.gather(
            asyncio.to_thread(
                _init_custom_process_group,
                backend="gloo",
                init_method=f"tcp://127.0.0.1:{port}",
                world_size=2,
                rank=0,
                group_name=self.name,
                timeout=timedelta(seconds=60),
            ),
            # AReaL sends text.
            self.join(port, master_port=str(port)),
        )
        self.group = made
        return answer

    async def announce(self, weights: Weights, **more: Any) -> httpx.Response:
        described = {
            "group_name": self.name,
            "names": list(weights),
            "dtypes": [str(tensor.dtype).removeprefix("torch.") for tensor in weights.values()],
            "shapes": [list(tensor.shape) for tensor in weights.values()],
        }
        return await self.post("/update_weights_from_distributed", **(described | more))

    async def update(self, weights: Weights, **more: Any) -> httpx.Response:
        def send() -> None:
            for tensor in weights.values():
                dist.broadcast(tensor.contiguous(), src=0, group=self.group)

        _, answer = await asyncio.gather(asyncio.to_thread(send), self.announce(weights, **more))
        return answer

    async def update_flat(self, weights: Weights, **more: Any) -> httpx.Response:
        parts = [tensor.contiguous().flatten().view(torch.uint8) for tensor in weights.values()]
        data = torch.cat(parts)
        _, answer = await asyncio.gather(
            asyncio.to_thread(dist.broadcast, data, 0, self.group),
            self.announce(weights, load_format="flattened_bucket", **more),
        )
        return answer

    async def leave(self) -> httpx.Response:
        return await self.post("/destroy_weights_update_group", group_name=self.name)

    def close(self) -> None:
        if self.group is not None:
            dist.destroy_process_group(self.group)


@pytest_asyncio.fixture(loop_scope="session")
async def lab(models: Path) -> AsyncIterator[Lab]:
    policies = Policies(models / "policies")
    async with sglrl.launch(policies[0].folder, device="cpu", replicas=2) as client:
        yield Lab(client, policies)


@pytest_asyncio.fixture(loop_scope="session")
async def http(lab: Lab) -> AsyncIterator[httpx.AsyncClient]:
    async with (
        serve(lab.client, name="policy") as gateway,
        httpx.AsyncClient(base_url=gateway.url, timeout=300) as http,
    ):
        yield http


@pytest_asyncio.fixture(loop_scope="session")
async def trainer(http: httpx.AsyncClient) -> AsyncIterator[Trainer]:
    made = Trainer(http)
    answer = await made.form()
    assert answer.json() == {"success": True, "message": "joined the group as rank 1 of 2"}
    yield made
    made.close()


def weights_of(lab: Lab, seed: int) -> Weights:
    return {name: tensor.clone() for name, tensor in lab.policies[seed].model.state_dict().items()}


def recorded(lab: Lab, seed: int, version: int) -> None:
    assert lab.client.weight_version == version
    lab.by_version[version] = lab.policies[seed]


def halves(weights: Weights) -> Sequence[Weights]:
    names = list(weights)
    middle = len(names) // 2
    return [{name: weights[name] for name in part} for part in (names[:middle], names[middle:])]


async def test_updates_reach_every_worker(lab: Lab, trainer: Trainer) -> None:
    answer = await trainer.update(weights_of(lab, 1))
    assert answer.json() == {"success": True, "message": "the weights are version 1"}
    recorded(lab, 1, 1)
    await lab.check()
    # Other dtypes, as bytes, and with a version.
    narrow = {name: tensor.double() for name, tensor in weights_of(lab, 2).items()}
    answer = await trainer.update_flat(narrow, weight_version="7")
    assert answer.json()["success"], answer.text
    recorded(lab, 2, 7)
    await lab.check()
    answer = await trainer.post("/update_weights_from_disk", model_path=str(lab.policies[0].folder))
    assert answer.json() == {"success": True, "message": "the weights are version 8"}
    recorded(lab, 0, 8)
    await lab.check()


async def test_tensors_of_a_pause_become_live_together(lab: Lab, trainer: Trainer) -> None:
    made = asyncio.ensure_future(
        lab.client.generate(input_ids=[5, 6], max_new_tokens=900, ignore_eos=True, logprobs=True)
    )
    await until_running(lab.client, 1)
    await trainer.post("/pause_generation", mode="retract")
    while any(row["num_running_reqs"] for row in (await trainer.http.get("/get_load")).json()):
        pass  # TorchRL's client waits in the same way.
    for part in halves(weights_of(lab, 1)):
        answer = await trainer.update(part, weight_version="3", flush_cache=False)
        assert answer.json()["message"] == "the weights become live when generation continues"
    assert lab.client.weight_version == 0
    assert (await trainer.post("/continue_generation")).status_code == 200
    recorded(lab, 1, 3)
    completion = await made
    assert [span.version for span in completion.versions] == [0, 3]
    lab.check_history(completion, again=True)
    await lab.check()
    # Without a pause, each request is an update of its own.
    for part in halves(weights_of(lab, 2)):
        assert (await trainer.update(part)).json()["success"]
    recorded(lab, 2, 5)
    await lab.check()


async def test_a_resume_while_a_pause_waits(lab: Lab, trainer: Trainer) -> None:
    """Weights are not held afterwards."""
    client = lab.client
    made = asyncio.ensure_future(
        client.generate(input_ids=[5, 6], max_new_tokens=1900, ignore_eos=True)
    )
    await until_running(client, 1)
    pausing = asyncio.ensure_future(trainer.http.post("/pause?mode=wait"))
    async with asyncio.timeout(300):
        while not any(stats.engine.draining for stats in await client.stats()):
            pass
    assert (await trainer.http.post("/resume")).json() == {"status": "resumed"}
    assert (await pausing).json() == {"status": "paused"}
    await client.abort()
    await made
    answer = await trainer.update(weights_of(lab, 1))
    assert answer.json()["message"] == "the weights are version 1"
    recorded(lab, 1, 1)
    await lab.check()


@pytest.mark.parametrize("abort", [False, True])
async def test_running_requests(lab: Lab, trainer: Trainer, abort: bool) -> None:
    # The update must come before the end of a request that it aborts.
    options = {"max_new_tokens": 1900 if abort else 200, "ignore_eos": True, "logprobs": True}
    made = asyncio.ensure_future(lab.client.generate(input_ids=[5, 6], **options))
    await until_running(lab.client, 1)
    answer = await trainer.update(weights_of(lab, 1), abort_all_requests=abort)
    assert answer.json()["success"], answer.text
    recorded(lab, 1, 1)
    completion = await made
    assert completion.finish_reason == ("abort" if abort else "length")
    assert completion.versions == ((0, len(completion.output_ids), 0),)
    lab.check_history(completion)
    await lab.check()


async def test_wrong_updates_change_nothing(lab: Lab, trainer: Trainer) -> None:
    good = weights_of(lab, 1)
    for update, why in (
        (trainer.update({**good, "extra": torch.zeros(3)}), "extra"),
        (trainer.update({**good, NORM: torch.zeros(3)}), NORM),
        (trainer.update({**good, NORM: good[NORM] * math.nan}), f"{NORM} holds NaN"),
        (trainer.update(good, weight_version="0"), "version must be an integer above 0"),
        (trainer.announce(good, weight_version="new"), "weight_version must be a number"),
        (trainer.announce(good, load_format="sharded"), "load_format"),
        (trainer.announce(good, group_name="x"), "there is no group 'x'"),
        (trainer.announce(good, dtypes=["float31"] * len(good)), "torch has no dtype 'float31'"),
        (trainer.announce(good, shapes=[]), "must have the same length"),
        (trainer.announce(good, shapes=[[-1]] * len(good)), "must not be negative"),
        (trainer.announce(good, shapes=[[1 << 61]] * len(good)), "no memory for these tensors"),
        (trainer.announce(good, shapes=[[1 << 62, 4]] * len(good)), "no memory for these tensors"),
        (trainer.announce(good, load_fast=True), "load_fast"),
        (trainer.join(1, group_name="y", backend="mpi"), "backend must be nccl or gloo"),
        (trainer.join(1, group_name="y", rank_offset=2), "rank_offset must be in 1..1, got 2"),
        (trainer.post("/update_weights_from_disk", model_path="/nope"), "/nope"),
        (trainer.post("/update_weight_version", new_version="2"), "every update has a version"),
    ):
        answer = await update
        assert answer.status_code == 400, answer.text
        assert why in answer.text
    await lab.check()
    # The group still works, and the trainer gets the error of held weights when it continues.
    await trainer.post("/pause_generation")
    assert (await trainer.update({"extra": torch.zeros(3)})).json()["success"]
    answer = await trainer.post("/continue_generation")
    assert answer.status_code == 400
    assert "extra" in answer.text
    assert (await trainer.post("/continue_generation")).status_code == 200
    await lab.check()
    assert (await trainer.update(good)).json()["success"]
    recorded(lab, 1, 1)
    await lab.check()


async def test_a_trainer_that_does_not_answer(lab: Lab, trainer: Trainer) -> None:
    """Other groups do not wait for it."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        joining = asyncio.ensure_future(trainer.join(port, group_name="silent"))
        assert (await trainer.update(weights_of(lab, 1))).json()["success"]
        assert not joining.done()
        joining.cancel()
    recorded(lab, 1, 1)
    await lab.check()


async def test_a_trainer_that_dies(lab: Lab, trainer: Trainer) -> None:
    running = asyncio.ensure_future(trainer.announce(weights_of(lab, 1)))
    await asyncio.sleep(0.2)
    trainer.close()
    trainer.group = None
    answer = await running
    assert answer.status_code == 503
    assert "the trainer's weights did not arrive" in answer.json()["message"]
    await lab.check()
    again = Trainer(trainer.http)
    await again.form()
    try:
        assert (await again.update(weights_of(lab, 1))).json()["success"]
        assert (await again.leave()).json()["success"]
        assert "there is no group" in (await again.announce(weights_of(lab, 1))).text
    finally:
        again.close()
    recorded(lab, 1, 1)
    await lab.check()
