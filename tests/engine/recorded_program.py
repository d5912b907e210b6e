"""Steps of a real model, recorded and replayed: which kinds are, as JSON. In the folder of tests:
``python -m engine.recorded_program MODEL``.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile

import numpy as np
import torch

from sglrl.messages import NextTokenArgs
from sglrl_workers.engine.sglang import convert
from sglrl_workers.engine.sglang.cpu_queries import CpuQueries

from .programs import make_scheduler


def main() -> None:
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        scheduler = make_scheduler(sys.argv[1], f"{folder}/rendezvous")
        queries = CpuQueries(scheduler, None)
        params = convert.score_params()

        def ask(*prompts: list[int]) -> None:
            requests = [
                convert.next_token_request(
                    i, NextTokenArgs(np.array(prompt, "<i4").tobytes(), 0), params
                )
                for i, prompt in enumerate(prompts)
            ]
            assert not queries.run(requests)

        def ask_all(repetition: int) -> None:
            begin = [repetition, *range(5, 24 + repetition)]
            ask(begin)
            ask([*begin, 1])
            ask([*begin, 2, 3, 4])
            ask(*([*begin, 10 + i] for i in range(3)))
            ask([*begin, 20], [*begin[:9], 21])
            ask(*([*begin, 30 + i, 1, 2] for i in range(3)))

        for repetition in range(20):
            ask_all(repetition)
        assert queries._recorder is not None
        recordings = queries._recorder._recordings
        # New weights are seen: what is replayed is compared with the model again.
        for weights in scheduler.tp_worker.model_runner.model.parameters():
            weights.mul_(0.7)
        for recording in recordings.values():
            if recording is not None:
                recording.rows = range(0)
        for repetition in range(20, 24):
            ask_all(repetition)
        print(json.dumps([[*k, bool(r and r.rows)] for k, r in recordings.items()]))
        sys.stdout.flush()
    # SGLang's threads have nothing left to do.
    os._exit(0)


if __name__ == "__main__":
    main()
