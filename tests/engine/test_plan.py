"""Loaders that do more than copy: an update that only copies would be another one."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
import torch

import sglrl
from sglrl_workers.engine.sglang.plan import checkpoint_folder, make_plan


class Model(torch.nn.Module):
    """With one weight, and what follows from it; ``load`` puts what came there."""

    derived: torch.Tensor

    def __init__(self, load: Callable[[Model, torch.Tensor], None]) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(2, 3))
        self.register_buffer("derived", torch.zeros(2, 3), persistent=False)
        self._load = load

    def load_weights(self, named: Iterable[tuple[str, torch.Tensor]]) -> None:
        for _, tensor in named:
            self._load(self, tensor)


def changed_before(model: Model, tensor: torch.Tensor) -> None:
    tensor += 1
    model.weight.data.copy_(tensor)


def part_changed_before(model: Model, tensor: torch.Tensor) -> None:
    tensor[1:].mul_(2)
    model.weight.data.copy_(tensor)


def computed_of_it(model: Model, tensor: torch.Tensor) -> None:
    model.weight.data.copy_(tensor + 1)


def changed_there(model: Model, tensor: torch.Tensor) -> None:
    model.weight.data.copy_(tensor)
    model.weight.data.mul_(2)


def follows(model: Model, tensor: torch.Tensor) -> None:
    model.weight.data.copy_(tensor)
    torch.add(model.weight.data, 1.0, out=model.derived)


@pytest.mark.parametrize(
    "load", [changed_before, part_changed_before, computed_of_it, changed_there, follows]
)
def test_such_a_model_cannot_be_updated(load: Callable[[Model, torch.Tensor], None]) -> None:
    with pytest.raises(sglrl.EngineError, match="its loader does more than copy"):
        make_plan(Model(load), [("w", (2, 3))], set())


def test_one_that_copies_can() -> None:
    model = Model(lambda model, tensor: model.weight.data.copy_(tensor.view(-1).view(2, 3)))
    plan = make_plan(model, [("w", (2, 3))], set())
    assert [spec.name for spec in plan.description.tensors] == ["w"]


def first_rows(model: Model, tensor: torch.Tensor) -> None:
    model.weight.data[: len(tensor)].copy_(tensor)


def padded(model: Model, tensor: torch.Tensor) -> None:
    first_rows(model, tensor)
    model.weight.data[len(tensor) :].fill_(0)


def test_names_that_are_guessed_must_be_all() -> None:
    """A model that was started without weights has no checkpoint that says what is in it."""
    for load, rows in ((first_rows, 2), (padded, 1)):
        make_plan(Model(load), [("w", (rows, 3))], set(), all_of_it=True)
    for named in ([("w", (1, 3))], [("w", (1, 3)), ("again", (1, 3))], []):
        with pytest.raises(sglrl.EngineError, match="nothing of what is named is its weight"):
            make_plan(Model(first_rows), named, set(), all_of_it=True)
        make_plan(Model(first_rows), named, set())


def test_where_the_files_of_a_model_are(tmp_path: Path) -> None:
    """For a name on the hub, in the cache of what was fetched from there; whatever is in no cache
    has none."""
    name = "some-owner/some-model"
    assert checkpoint_folder(str(tmp_path), None, None) == tmp_path
    assert not checkpoint_folder(name, None, str(tmp_path)).exists()
    kept = tmp_path / "models--some-owner--some-model"
    for revision, commit in (("main", "a" * 40), ("other", "b" * 40)):
        snapshot = kept / "snapshots" / commit
        snapshot.mkdir(parents=True)
        (snapshot / "config.json").touch()
        (kept / "refs").mkdir(exist_ok=True)
        (kept / "refs" / revision).write_text(commit)
        wanted = None if revision == "main" else revision
        assert checkpoint_folder(name, wanted, str(tmp_path)) == snapshot
