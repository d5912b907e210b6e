"""Recorded steps say what the model says, or are not used."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglrl.demo.tiny import make_model
from sglrl_workers.engine.sglang.ragged import Call
from sglrl_workers.engine.sglang.recorded import Inputs, Recorder

from .programs import run_program

VOCABULARY, SIZE, SLOTS = 11, 4, 64


@dataclass
class Batch:
    """What ``Recorder`` knows of SGLang's."""

    input_ids: torch.Tensor
    positions: torch.Tensor
    out_cache_loc: torch.Tensor


class Model(torch.nn.Module):
    """Its tokens' values in a cache, and the mean over a context."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Parameter(torch.randn(VOCABULARY, SIZE), requires_grad=False)
        self.register_buffer("cache", torch.zeros(SLOTS, SIZE))
        self.call: Any = None
        self.runs = 0

    def attend_to(self, call: Call) -> None:
        self.call = call

    def forward(self, tokens: torch.Tensor, positions: torch.Tensor, batch: Batch) -> Any:
        self.runs += 1
        x = self.embedding[tokens] * (1 + positions[:, None])
        self.cache[batch.out_cache_loc] = x
        n, _, s = self.call.shape
        attended = self.cache.index_select(0, self.call.slots).view(n, s, -1).mean(1)
        return SimpleNamespace(next_token_logits=self.more(x + attended) @ self.embedding.T)

    def more(self, x: torch.Tensor) -> torch.Tensor:
        return x


class Steps:
    """Decode steps of one model, every one compared with what Python says."""

    def __init__(self, model: Model) -> None:
        self.model = model
        runner = SimpleNamespace(model=model, forward=self._forward)
        state = [*model.parameters(), *model.buffers()]
        self.recorder = Recorder(runner, model.attend_to, state)
        self._step = 0

    def _forward(self, batch: Batch) -> Any:
        found = self.model.forward(batch.input_ids, batch.positions, batch)
        return SimpleNamespace(logits_output=found)

    def run(self, rows: int, context: int) -> int:
        """How often the model's Python ran for it."""
        self._step += 1
        torch.manual_seed(self._step)
        slots = torch.randperm(SLOTS)[: rows * context].view(rows, context)
        call = Call(None, slots.flatten(), None, (rows, 1, context))
        tokens = torch.randint(VOCABULARY, (rows,))
        positions = torch.full((rows,), context - 1)
        batch = Batch(tokens, positions, slots[:, -1].contiguous())
        inputs = Inputs(tokens, positions, batch.out_cache_loc, None, call)
        self.model.runs = 0
        self.model.attend_to(call)
        found = self.recorder.logits(inputs, lambda: batch)
        runs = self.model.runs
        self.model.attend_to(call)
        expected = self.model.forward(tokens, positions, batch).next_token_logits
        torch.testing.assert_close(found, expected)
        return runs


def test_the_model_is_asked_for_more_rows_or_fewer_than_before() -> None:
    steps = Steps(Model())
    for _ in range(12):
        steps.run(3, 5)
    assert steps.run(3, 5) == 0
    # Another length, of which nobody was told.
    assert steps.run(3, 9) == 0
    assert [steps.run(rows, 7) for rows in (2, 5, 2, 5, 4, 6)] == [1, 1, 0, 0, 0, 1]


def test_one_row_is_recorded_by_itself() -> None:
    steps = Steps(Model())
    for _ in range(12):
        steps.run(1, 5)
    assert steps.run(1, 5) == 0
    for _ in range(12):
        steps.run(4, 5)
    assert [steps.run(rows, 7) for rows in (1, 4, 1)] == [0, 0, 0]


def test_new_weights_are_seen() -> None:
    steps = Steps(Model())
    for _ in range(12):
        steps.run(3, 5)
    steps.model.embedding.copy_(torch.randn(VOCABULARY, SIZE))
    assert steps.run(3, 5) == 0
    steps.model.embedding.data = torch.randn(VOCABULARY, SIZE)
    assert steps.run(3, 5) == 0


class Branches(Model):
    def more(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2 if x.shape[0] > 3 else x


class Counts(Model):
    def more(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.ones(len(x), 1)


class Refuses(Model):
    def more(self, x: torch.Tensor) -> torch.Tensor:
        if torch._C._get_tracing_state():
            raise ValueError("not me")
        return x


@pytest.mark.parametrize("model", [Branches, Counts, Refuses])
def test_what_cannot_be_recorded_is_computed(model: Callable[[], Model]) -> None:
    steps = Steps(model())
    for _ in range(12):
        steps.run(3, 5)
    # Here a recording shows that it is wrong, and none is used any more.
    assert steps.run(5, 5) >= 1
    assert [steps.run(rows, 5) for rows in (3, 5, 3, 5)] == [1, 1, 1, 1]


@pytest.mark.parametrize("architecture", ["qwen3", "llama"])
def test_all_kinds_of_steps_of_real_models(architecture: str, tmp_path: Path) -> None:
    model = make_model(tmp_path / "model", architecture=architecture)
    kinds = run_program("recorded_program", model)
    assert sorted(kinds) == sorted(
        [
            # decodes, all tokens, unmasked, causal, alone; used
            [True, True, True, False, True, True],
            [True, True, True, False, False, True],
            [True, True, False, False, False, True],
            [False, False, True, True, True, True],
            [False, False, False, False, True, True],
            [False, False, False, False, False, True],
        ]
    )
