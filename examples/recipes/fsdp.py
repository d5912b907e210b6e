"""Recipe 5: recipe 1 with the trainer sharded over two GPUs with FSDP2.

``torchrun --nproc-per-node 2 fsdp.py`` takes the options of ``sums.py``. Rank 0 samples, and sends
each batch to the other ranks. Each rank trains on its share of the rows. For a weight update, the
ranks gather one parameter after the other, and rank 0 sends it to the engines.
"""

import math
import os

import torch
import torch.distributed as dist
from recipe import Policy, learn, options
from sums import agent, split
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import fully_shard
from transformers import AutoConfig, AutoModelForCausalLM

import sglrl
from sglrl.weights import gather


class Sharded(Policy):
    """A policy that is sharded over all ranks. Rank 0 sends each step to the other ranks."""

    def place(self, model):
        for layer in model.model.layers:
            fully_shard(layer)
        return fully_shard(model)

    def take_step(self, batch, advantages, tokens):
        self.tell("step", batch, advantages, tokens)
        return self.take_part(batch, advantages, tokens)

    def take_part(self, batch, advantages, tokens):
        """Take a step on this rank's share of the rows. FSDP averages the gradients of ranks."""
        rank, ranks = dist.get_rank(), dist.get_world_size()
        rows = torch.arange(rank, len(advantages), ranks)
        missing = math.ceil(len(advantages) / ranks) - len(rows)
        # All ranks need the same number of rows. A row that is used again has no gradient.
        rows = torch.cat([rows, rows.new_zeros(missing)])
        advantages = advantages[rows]
        advantages[len(rows) - missing :] = 0
        return super().take_step(batch[rows], advantages, tokens / ranks)

    def save(self, folder, tokenizer):
        self.tell("save", str(folder), tokenizer)
        self.save_whole(str(folder), tokenizer)

    def save_whole(self, folder, tokenizer):
        whole = StateDictOptions(full_state_dict=True, cpu_offload=True)
        weights = get_model_state_dict(self.model, options=whole)
        if dist.get_rank() == 0:
            config = AutoConfig.from_pretrained(tokenizer)
            self.model = AutoModelForCausalLM.from_config(config)
            self.model.load_state_dict(weights)
            super().save(folder, tokenizer)

    def tell(self, *command):
        dist.broadcast_object_list([command], src=0)

    def follow(self):
        """Do on this rank what rank 0 tells, until it has saved the model."""
        while True:
            command = [None]
            dist.broadcast_object_list(command, src=0)
            name, *arguments = command[0]
            if name == "save":
                self.save_whole(*arguments)
                return
            self.take_part(*arguments)
            gather(self.model)


def main():
    chosen = options(__doc__)
    if chosen.device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("cpu:gloo,cuda:nccl" if chosen.device == "cuda" else "gloo")
    policy = Sharded(chosen)
    if dist.get_rank() == 0:
        items, heldout = split(chosen)
        sglrl.run(learn(chosen, agent, items, heldout, policy=policy))
    else:
        policy.follow()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
