"""Run the kernels that draw tokens on a GPU in Triton's interpreter, and print the results as JSON.

Also runs SGLang's sampler as in a worker that has a GPU. Run it in the folder of tests:
``python -m engine.draw_program``.
"""

from __future__ import annotations

import json
import os
from types import SimpleNamespace
from typing import Any

# Triton reads this variable when a kernel is defined.
os.environ["TRITON_INTERPRET"] = "1"

import torch
from sglang.srt.layers import sampler as theirs
from sglang.srt.layers.sampler import Sampler

from sglrl_workers.engine.sglang.accelerations import gpu_sampling
from sglrl_workers.engine.sglang.patch import Setup, install
from sglrl_workers.engine.sglang.patch_list import PATCHES
from sglrl_workers.engine.sglang.patches import sampling_reports, seeded_sampling
from sglrl_workers.engine.sglang.source import sglang_folder

from .draw_cases import CASES, KEY, LANES, STEP


class Request:
    """A request with a seed."""


def sample(
    logits: torch.Tensor, deterministic: bool = False, target: str | None = None, **changes: Any
) -> tuple[list[int], Any, list[bool], bool]:
    """Sample one step.

    Args:
        deterministic, target: ``enable_deterministic_inference`` and ``rl_on_policy_target``.

    Returns:
        Tokens, logprobs, which rows have no token, and whether the logits are unchanged (SGLang's
        own sampler overwrites them with probabilities).
    """
    info = SimpleNamespace(
        is_all_greedy=False,
        need_top_p_sampling=False,
        need_top_k_sampling=False,
        need_min_p_sampling=False,
        return_sampling_masks=None,
        sampling_mask_batch_indices=None,
        sampling_support_logprobs_capture_indices=None,
        has_custom_logit_processor=False,
        temperatures=torch.full((len(logits), 1), 0.7),
        grammars=None,
        max_top_k=3,
        top_ks=torch.full((len(logits),), 3),
        top_ps=torch.ones(len(logits)),
        min_ps=torch.zeros(len(logits)),
        sampling_seed=None,
        sglrl_reports=None,
        sglrl_raw=None,
        sglrl_limited=None,
    )
    asked = {"return_logprob": True, "top": [0] * len(logits), "token_ids": [None] * len(logits)}
    for name, value in changes.items():
        if name in asked:
            asked[name] = value
        else:
            setattr(info, name, value)
    output = SimpleNamespace(
        next_token_logits=logits.clone(),
        next_token_logprobs=None,
        next_token_token_ids_logprobs_val=[[] for _ in logits],
    )
    positions = torch.zeros(len(logits), dtype=torch.int64)
    sampler = torch.nn.Module.__new__(Sampler)
    torch.nn.Module.__init__(sampler)
    sampler.rl_on_policy_target = target
    sampler.enable_deterministic = deterministic
    sampler.use_log_softmax_logprob = target is not None
    sampler.use_ascend_backend = False
    sampler.output_logprob_processor = SimpleNamespace(compute_logprobs=_no_logprobs)
    ids = sampler(
        output, info, asked["return_logprob"], asked["top"], asked["token_ids"], positions
    )
    logprobs = output.next_token_logprobs
    return (
        ids.tolist(),
        None if logprobs is None else logprobs.tolist(),
        output.sglrl_undrawable.tolist(),
        bool(torch.equal(output.next_token_logits, logits)),
    )


def _no_logprobs(*args: Any) -> Any:
    return SimpleNamespace(write_output_to=lambda output: None)


def fail(*args: Any) -> Any:
    raise RuntimeError("no compiler")


def main() -> None:
    drawn = {}
    for name, (logits, temperatures) in CASES.items():
        given = torch.from_numpy(logits)
        before = given.clone()
        found = gpu_sampling.draw(given, torch.from_numpy(temperatures), KEY, STEP, LANES)
        assert torch.equal(given.nan_to_num(5), before.nan_to_num(5))
        drawn[name] = [values.tolist() for values in found]

    arguments: Any = SimpleNamespace(
        enable_deterministic_inference=False, rl_on_policy_target=None, tp_size=1
    )
    theirs.get_exec = lambda: SimpleNamespace(kernel=SimpleNamespace(sampling_backend="pytorch"))
    samplers = ("gpu_sampling", "seeded_sampling", "sampling_reports", "undrawable_tokens")
    patches = install(
        [patch for patch in PATCHES if patch.name in samplers],
        Setup(server_args=arguments, device="cuda"),
        sglang_folder(),
    )
    gpu_sampling._next_step = lambda device: (KEY, STEP)
    logits = torch.from_numpy(CASES["normal 150"][0])
    bad = logits.clone()
    bad[1, 3] = float("nan")
    scheduler = SimpleNamespace(
        device="cpu",
        model_config=SimpleNamespace(vocab_size=150),
        server_args=SimpleNamespace(tp_size=1),
    )
    sampled = {"too early": sample(logits)}
    kernels, gpu_sampling.draw = gpu_sampling.draw, fail
    patches.finish(scheduler)
    sampled["no kernels"] = sample(logits)
    gpu_sampling.draw = kernels
    patches.finish(scheduler)
    sampled |= {
        "logprobs": sample(logits),
        "tokens alone": sample(logits, return_logprob=False, top=None, token_ids=None),
        "one without": sample(bad),
        "top-k": sample(logits, need_top_k_sampling=True),
        "likeliest tokens": sample(logits, top=[0, 2, 0, 0, 0]),
        "given tokens": sample(logits, token_ids=[None, [3], None, None, None]),
        "reports": sample(
            logits, return_logprob=False, sglrl_reports=sampling_reports.Rows([1], *[[]] * 5)
        ),
        "greedy": sample(logits, is_all_greedy=True),
    }
    seeded = Request()
    seeded_sampling._alive.add(seeded)
    sampled["seeds"] = sample(logits, sampling_seed=torch.tensor([-1, 5, -1, -1, -1]))
    del seeded
    sampled["seeds no more"] = sample(logits, sampling_seed=torch.full((5,), -1))
    print(json.dumps({"drawn": drawn, "sampled": sampled}), flush=True)
    # Nothing is left to do. Ending the interpreter takes seconds on a busy machine.
    os._exit(0)


if __name__ == "__main__":
    main()
