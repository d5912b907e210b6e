"""Plan updates of a real model, also with a loader that computes in place. Print results as JSON.

Run it in the folder of tests: ``python -m engine.plan_program MODEL``.
"""

from __future__ import annotations

import json
import sys
import tempfile

import torch
from sglang.srt.model_loader.weight_utils import composed_weight_loader, default_weight_loader

from sglrl.errors import EngineError
from sglrl_workers.engine.sglang.model_weights import ModelWeights

from .programs import make_scheduler


def main() -> None:
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        scheduler = make_scheduler(sys.argv[1], f"{folder}/rendezvous")
        model = scheduler.tp_worker.model_runner.model
        norm = model.model.norm.weight
        norm[:3] = torch.tensor([1.0, 2.0, 3.0])
        before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        norm.weight_loader = composed_weight_loader(
            default_weight_loader, lambda x: -torch.exp(x.float())
        )
        refused = ""
        try:
            ModelWeights(scheduler, torch.device("cpu")).describe()
        except EngineError as error:
            refused = str(error)
        del norm.weight_loader
        description = ModelWeights(scheduler, torch.device("cpu")).describe()
        after = model.state_dict()
        found = {
            "refused": refused,
            "norm": norm[:3].tolist(),
            "changed": [name for name in before if not torch.equal(before[name], after[name])],
            "tensors": len(description.tensors),
        }
        print(json.dumps(found))


if __name__ == "__main__":
    main()
