"""The cases of ``bench.faults``: a pool, its load with known answers, and its faults."""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import sglrl

from .cases import CASES as ENGINE_CASES
from .fault_load import Answer, Load, Prompt, fault_free
from .fault_schedule import DROP, HANG, KILL, SLOW, STOP, UPDATE


class FaultCase(NamedTuple):
    """A pool, its load and its faults.

    Attributes:
        replicas: number of workers.
        faults: number of faults.
        gap: average seconds between faults.
        shares: relative frequency of each kind of fault.
        in_flight: number of callers.
        hang_timeout: as in ``launch``.
        tolerance: largest allowed difference of a logprob. It is 0 for the fake engine. A real
            engine needs some tolerance, because after a fault it computes a request in another
            batch and order. None: compare only the number of tokens, because with 16 bits another
            batch may choose other tokens.
        wait_target: milliseconds allowed from a SIGKILL to the next token.
        back_target: milliseconds allowed from a SIGKILL until all workers are ready again.
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
        """The folder of the model, which is made on first use."""
        if self.is_fake:
            return "fake"
        return ENGINE_CASES["8b" if self.on_gpus else "tiny-cpu"].folder

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

    def launch(self, model: str | None = None, **more: Any) -> sglrl.Client:
        """Return a pool that replaces lost workers without limit.

        A step of the fake engine yields four tokens in 10 ms, so calls take 0.1 to 0.4 s.
        """
        engine: dict[str, Any] = {"device": "cpu", "max_running_requests": 32}
        if self.is_fake:
            engine = {"engine": "fake", "tokens_per_step": 4, "step_seconds": 0.01}
        elif self.on_gpus:
            engine = {"device": "cuda", **ENGINE_CASES["8b"].arguments}
        given = {"replicas": self.replicas, "hang_timeout": self.hang_timeout, **engine, **more}
        return sglrl.launch(model or self.model, restarts=10**9, **given)

    def update_of(
        self, client: sglrl.Client, model: str | None = None, timeout: float | None = None
    ) -> Callable[[], Awaitable[Any]] | None:
        """Return a function that sends the workers their own weights again as an update.

        Return None if no fault of this case needs an update.
        """
        if not self.shares.get(UPDATE):
            return None
        from safetensors.torch import load_file

        weights: dict[str, Any] = {}
        for file in Path(model or self.model).glob("*.safetensors"):
            weights |= load_file(file)
        return partial(client.update_weights, weights, timeout=timeout)

    async def load(self, client: sglrl.Client, seed: int, pause: float = 0.0) -> Load:
        """Return callers whose prompts have a single right answer: the answer without faults."""
        prompts = self.prompts(seed)
        if self.is_fake:
            answers: list[Answer | None] = [_by_formula(prompt) for prompt in prompts]
        else:
            answers = await fault_free(client, prompts, self.in_flight, self.tolerance)
        pairs = [(p, a) for p, a in zip(prompts, answers, strict=True) if a is not None]
        return Load(
            client,
            [prompt for prompt, _ in pairs],
            [answer for _, answer in pairs],
            in_flight=self.in_flight,
            tolerance=self.tolerance,
            pause=pause,
        )


def _by_formula(prompt: Prompt) -> Answer:
    """Compute the answer of a fake engine, which ``workers/engine/fake.py`` defines."""
    count = prompt.options["max_new_tokens"]
    logprobs = (-(np.arange(count, dtype=np.float32) + 1) / 1024).astype("<f4")
    return Answer(np.resize(np.array(prompt.ids, dtype=np.int32), count), logprobs, "length")


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
