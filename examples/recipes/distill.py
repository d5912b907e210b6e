"""Recipe 3: on-policy distillation of the model of recipe 1 into a student of fewer layers.

``python distill.py --teacher runs/sums/model`` takes a few minutes on a GPU. The student samples
answers. A second pool serves the teacher, which returns its 16 likeliest tokens at each position of
these answers. The student learns their probabilities: generalized knowledge distillation with the
forward KL divergence (arXiv:2306.13649).
"""

import numpy as np
import torch
from recipe import Policy, engine_of, learn, options
from sums import agent, exact, split
from transformers import AutoModelForCausalLM, AutoTokenizer

import sglrl
from sglrl.rollouts import stack

LIKELIEST = 16


def make_student(teacher, folder, layers):
    """Save a model with some of the teacher's layers, from the first to the last."""
    model = AutoModelForCausalLM.from_pretrained(teacher, dtype="auto")
    kept = np.linspace(0, len(model.model.layers) - 1, layers).round().astype(int)
    model.model.layers = torch.nn.ModuleList(model.model.layers[i] for i in kept)
    model.config.num_hidden_layers = layers
    if kinds := getattr(model.config, "layer_types", None):
        model.config.layer_types = [kinds[i] for i in kept]
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(teacher).save_pretrained(folder)


class Student(Policy):
    def train(self, groups):
        """Take one step towards the teacher's probabilities. Return numbers for the log."""
        trajectories = [t for group in groups for t in group.trajectories]
        batch = stack(trajectories)
        ids = torch.zeros(*batch["input_ids"].shape, LIKELIEST, dtype=torch.long)
        logprobs = torch.full(ids.shape, -torch.inf)
        for row, trajectory in enumerate(trajectories):
            begin = len(trajectory.prompt_ids)
            top_ids, top_logprobs = map(torch.tensor, trajectory.metadata["teacher"])
            ids[row, begin : begin + len(top_ids)] = top_ids
            logprobs[row, begin : begin + len(top_ids)] = top_logprobs
        tokens, total = batch["loss_mask"].sum(), 0.0
        for rows in self.parts(batch):
            loss = self.divergence(batch[rows], ids[rows], logprobs[rows]) / tokens
            loss.backward()
            total += loss.item()
        return {"loss": total, "norm": self.step()}

    def divergence(self, batch, ids, logprobs):
        """Return the divergence from the teacher, as a sum over all sampled tokens."""
        batch = batch.to(self.device)
        begin, logits = self.logits(batch)
        # Position i has the probabilities of token i + 1.
        wanted = logprobs[:, begin + 1 :].to(self.device)
        ids = ids[:, begin + 1 :].to(self.device)
        own = torch.log_softmax(logits[:, :-1], -1).gather(2, ids)
        mask = batch["loss_mask"][:, begin + 1 :]
        terms = wanted.exp() * (wanted.clamp(min=-100) - own)
        return terms.sum(-1)[mask].sum()


def main():
    chosen = options(
        __doc__,
        model="",
        steps=60,
        groups=64,
        lr=1e-4,
        more={
            "teacher": ("runs/sums/model", "the folder of the model that recipe 1 trained"),
            "layers": (24, "layers of the student"),
        },
    )
    chosen.model = str(chosen.output / "student")
    make_student(chosen.teacher, chosen.model, chosen.layers)
    items, heldout = split(chosen)

    async def distill():
        async with sglrl.launch(chosen.teacher, **engine_of(chosen)) as teacher:

            async def taught(session, item):
                turn = await session.generate(max_new_tokens=8)
                begin = len(session.ids) - len(turn.output_ids)
                scores = await teacher.score(session.ids, start=begin, top_logprobs=LIKELIEST)
                session.metadata["teacher"] = scores.top_ids, scores.top_logprobs
                return exact(item, turn.text)

            await learn(
                chosen,
                taught,
                items,
                heldout,
                policy=Student(chosen),
                judge=agent,
            )

    sglrl.run(distill())


if __name__ == "__main__":
    main()
