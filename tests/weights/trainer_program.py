"""A trainer in its own process. It sends the weights of folders named on its standard input.

    python trainer_program.py ADDRESS [HOST HEARTBEAT_TIMEOUT]

HOST is an address of the trainer that workers on another host can reach.
Every input line is a command in JSON, and every output line is the result of one:

* ``{"update": folder}``, with options of ``Sender.update``, sends an update.
* ``{"block": folder}`` sends an update whose last tensor never becomes available. The result is
  "blocked" when all other tensors are on their way.
* ``{"group": 0}`` uses the process's own default group.
"""

from __future__ import annotations

import asyncio
import json
import sys
import threading
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file

import sglrl
from sglrl.weights import Sender


def say(**result: Any) -> None:
    print(json.dumps(result), flush=True)


class Blocked(torch.Tensor):
    def full_tensor(self) -> torch.Tensor:
        say(result="blocked")
        threading.Event().wait()
        raise AssertionError


class Trainer(torch.nn.Module):
    """A module whose parameters have a checkpoint's names."""

    def __init__(self, weights: dict[str, torch.Tensor]) -> None:
        super().__init__()
        for name, tensor in weights.items():
            *path, last = name.split(".")
            module: torch.nn.Module = self
            for part in path:
                if not hasattr(module, part):
                    module.add_module(part, torch.nn.Module())
                module = getattr(module, part)
            module.register_parameter(last, torch.nn.Parameter(tensor))


async def perform(sender: Sender, command: dict[str, Any]) -> None:
    if "group" in command:
        ones = torch.ones(3)
        dist.all_reduce(ones)
        say(result="group", ranks=dist.get_world_size(), total=int(ones.sum()))
    elif "block" in command:
        weights = load_file(command["block"] + "/model.safetensors")
        *_, last = sorted(weights)
        weights = {name: weights[name] for name in sorted(weights)}
        weights[last] = torch.Tensor._make_subclass(Blocked, weights[last])
        await sender.update(weights, bucket_bytes=1 << 14)
    else:
        sender.register_model(Trainer(load_file(command.pop("update") + "/model.safetensors")))
        try:
            report = await sender.update(**command)
        except sglrl.SglrlError as error:
            say(result="error", error=type(error).__name__, says=str(error))
        else:
            say(
                result="updated",
                version=report.version,
                workers=report.workers,
                repr=repr(report),
                known=sender.weight_version,
            )


async def main(address: str, *way: str) -> None:
    torch.set_num_threads(1)
    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1, timeout=timedelta(seconds=9))
    loop = asyncio.get_running_loop()
    options: dict[str, Any] = {}
    if way:
        options = {"host": way[0], "heartbeat_timeout": float(way[1]), "insecure": True}
    async with await Sender.connect(address, **options) as sender:
        say(result="connected", version=sender.weight_version)
        while line := await loop.run_in_executor(None, sys.stdin.readline):
            await perform(sender, json.loads(line))
    dist.destroy_process_group()
    say(result="closed")


if __name__ == "__main__":
    assert Path(sys.argv[0]).name == "trainer_program.py"
    asyncio.run(main(*sys.argv[1:]))
