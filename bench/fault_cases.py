"""The cases of ``bench.faults``: a pool, its load and its faults."""

from __future__ import annotations

import random
from typing import Any, NamedTuple

from .cases import CASES as ENGINE_CASES
from .cases import engine_arguments, model_folder
from .fault_load import Prompt
from .fault_schedule import DROP, HANG, KILL, SLOW, STOP, UPDATE


class FaultCase(NamedTuple):
    """A pool, its load and its faults.

    Attributes:
        gap: average seconds between faults.
        shares: relative frequency of each kind of fault.
        tolerance: largest allowed difference of a logprob. It is 0 for the fake engine. A real
            engine computes in another batch and order. None compares only the number of tokens:
            with 16 bits, another batch may choose other tokens.
        wait_target: milliseconds allowed from a SIGKILL to the next token.
        back_target: milliseconds allowed from a SIGKILL to full strength.
    """

    name: str
    replicas: int
    faults: int
    gap: float
    shares: dict[str, float]
    in_flight: int
    hang_timeout: float
    tolerance: float | None
    wait_target: float | None = None
    back_target: float | None = None

    @property
    def on_gpus(self) -> bool:
        return self.name == "8b"

    @property
    def model(self) -> str:
        """The model's folder, made on first use."""
        if self.is_fake:
            return "fake"
        return str(model_folder(ENGINE_CASES["8b" if self.on_gpus else "tiny-cpu"]))

    @property
    def is_fake(self) -> bool:
        return self.name == "fake"

    def prompts(self, seed: int) -> list[Prompt]:
        draw = random.Random(seed)
        longest, new = (48, (40, 160)) if self.is_fake else (96, (24, 120))
        if self.on_gpus:
            longest, new = 512, (256, 512)
        return [
            Prompt(
                # The first token id makes every prompt distinct.
                [i + 3, *(draw.randrange(3, 500) for _ in range(draw.randrange(1, longest)))],
                {
                    "max_new_tokens": draw.randint(*new),
                    "temperature": 0,
                    "ignore_eos": self.on_gpus or draw.random() < 0.5,
                },
            )
            for i in range(4 * self.in_flight)
        ]

    def arguments(self) -> dict[str, Any]:
        """Return arguments for ``launch``.

        A fake step yields four tokens in 10 ms, so calls take 0.1 to 0.4 s.
        """
        if self.is_fake:
            return {"engine": "fake", "tokens_per_step": 4, "step_seconds": 0.01}
        if self.on_gpus:
            return {"device": "cuda"} | engine_arguments(ENGINE_CASES["8b"], {})
        return {"device": "cpu", "max_running_requests": 32}


CASES = {
    case.name: case
    for case in (
        FaultCase(
            "fake",
            replicas=16,
            faults=1000,
            gap=0.25,
            shares={KILL: 60, STOP: 12, HANG: 4, DROP: 12, SLOW: 12},
            in_flight=64,
            hang_timeout=2.0,
            tolerance=0.0,
            wait_target=300.0,
        ),
        FaultCase(
            "sglang-cpu",
            replicas=3,
            faults=60,
            gap=2.0,
            shares={KILL: 50, STOP: 10, DROP: 10, SLOW: 10, UPDATE: 20},
            in_flight=12,
            hang_timeout=30.0,
            tolerance=1e-4,
            back_target=1000.0,
        ),
        # Each replica has its own GPU. SGLang takes 20 s and more to start a replacement.
        FaultCase(
            "8b",
            replicas=2,
            faults=3,
            gap=20.0,
            shares={KILL: 100},
            in_flight=128,
            hang_timeout=60.0,
            tolerance=None,
        ),
    )
}
