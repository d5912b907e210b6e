"""One of two ranks of a trainer whose weights are sharded between the ranks.

    python sharded_trainer_program.py ADDRESS FOLDER RANK PORT

Rank 0 sends the weights of the folder. Both ranks gather them. Prints the version.
"""

from __future__ import annotations

import asyncio
import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from sglrl.weights import Sender, gather


async def main(address: str, folder: str, rank: int, port: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"tcp://127.0.0.1:{port}",
        rank=rank,
        world_size=2,
        timeout=timedelta(seconds=30),
    )
    mesh = init_device_mesh("cpu", (2,))
    weights = {
        name: distribute_tensor(tensor, mesh, [Shard(0) if tensor.dim() > 1 else Replicate()])
        for name, tensor in load_file(f"{folder}/model.safetensors").items()
    }
    if rank == 0:
        async with await Sender.connect(address) as sender:
            report = await sender.update(weights, bucket_bytes=1 << 16)
        print(report.version, flush=True)
    else:
        gather(weights)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])))
