"""Print, as JSON, the tokens that a deterministic engine draws.

Run it in the folder of tests: ``python -m engine.deterministic_program TARGET``. TARGET is
``rl_on_policy_target``, or "none".
"""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.layers import sampler as theirs

from sglrl_workers.engine.sglang.patch import Setup, install
from sglrl_workers.engine.sglang.patch_list import PATCHES
from sglrl_workers.engine.sglang.patches import sampling_reports, seeded_sampling
from sglrl_workers.engine.sglang.source import sglang_folder

from . import draw_program
from .draw_program import Request, sample

SAMPLERS = ("seeded_sampling", "sampling_reports", "undrawable_tokens")
LIMITS = {"need_top_p_sampling": True, "top_ks": torch.full((400,), 1 << 30)}


def with_logprobs(logprobs: torch.Tensor, top: Any, given: Any, ids: torch.Tensor) -> Any:
    """Return what writes logprobs of SGLang's dtype, as its own processor does."""
    drawn = logprobs.gather(1, ids.long()[:, None])[:, 0]
    return SimpleNamespace(
        write_output_to=lambda output: setattr(output, "next_token_logprobs", drawn)
    )


def main() -> None:
    target = None if sys.argv[1] == "none" else sys.argv[1]
    arguments: Any = SimpleNamespace(
        enable_deterministic_inference=True, rl_on_policy_target=target, tp_size=1
    )
    theirs.get_exec = lambda: SimpleNamespace(kernel=SimpleNamespace(sampling_backend="pytorch"))
    install(
        [patch for patch in PATCHES if patch.name in SAMPLERS],
        Setup(server_args=arguments, device="cpu"),
        sglang_folder(),
    )
    blocks = []
    limited = seeded_sampling.limited
    seeded_sampling.limited = lambda probs, *limits: (
        blocks.append(len(probs)) or limited(probs, *limits)
    )
    logits = torch.randn(1, 50, generator=torch.Generator().manual_seed(0)).expand(400, 50)
    request = Request()
    seeded_sampling._alive.add(request)
    seeds = torch.where(torch.arange(400) < 200, torch.arange(400), seeded_sampling.NO_SEED)
    values: dict[str, Any] = {"deterministic": True, "target": target, "sampling_seed": seeds}
    draw_program._no_logprobs = with_logprobs
    rows = [*range(400)]
    processed = sampling_reports.Rows([], rows, [], [], rows, rows)
    limits = {**LIMITS, "top_ps": torch.full((400,), 0.8)}
    _, logprobs, *_ = sample(logits.contiguous(), **values, **limits, sglrl_reports=processed)
    found = {
        "processed": logprobs,
        "all": [sample(logits, **values)[0] for _ in range(2)],
        "limited": sample(logits, **values, **LIMITS, top_ps=torch.full((400,), 0.8))[0],
        "blocks": sorted(set(blocks)),
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
