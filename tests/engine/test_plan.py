"""Loaders that do more than copy are refused: an update that only copies would differ."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

import sglrl
from sglrl_workers.engine.sglang.weight_plan import checkpoint_folder, make_plan

from .programs import run_program


class Model(torch.nn.Module):
    """A model with one weight and a tensor derived from it. ``load`` writes a received tensor."""

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
    """The names are guessed for a model that starts without weights: it has no checkpoint."""
    for load, rows in ((first_rows, 2), (padded, 1)):
        make_plan(Model(load), [("w", (rows, 3))], set(), all_of_it=True)
    for named in ([("w", (1, 3))], [("w", (1, 3)), ("again", (1, 3))], []):
        with pytest.raises(sglrl.EngineError, match="no given tensor provides the model's weight"):
            make_plan(Model(first_rows), named, set(), all_of_it=True)
        make_plan(Model(first_rows), named, set())


def test_where_the_files_of_a_model_are(tmp_path: Path) -> None:
    """For a model name on the hub, the folder is in the hub's cache. An uncached name has none."""
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


# --- live weights do not change -------------------------------------------------------------------


class Scaled(torch.nn.Parameter):
    """A parameter with another tensor as an attribute, as some of SGLang's parameters have."""

    scale: torch.Tensor


class Holder(torch.nn.Module):
    """A model with every place in which a loader may find a live tensor."""

    derived: torch.Tensor

    def __init__(self, load: Callable[[Holder, torch.Tensor], object]) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(3, 2, bias=False)
        self.weight = Scaled(torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]))
        self.weight.scale = torch.tensor([7.0, 8.0, 9.0])
        self.register_buffer("derived", torch.full((2, 3), 10.0), persistent=False)
        self.plain = torch.full((2, 3), 11.0)
        self.listed = [torch.full((2, 3), 12.0)]
        self.cached = {"weight": self.weight}
        self.array = self.plain.numpy()
        self.flat = self.weight.data.view(-1)
        self.reached = self.twice
        self._load = load

    def twice(self, tensor: torch.Tensor) -> None:
        self.weight.data.copy_(tensor)
        self.weight.data.mul_(2)

    def load_weights(self, named: Iterable[tuple[str, torch.Tensor]]) -> None:
        for _, tensor in named:
            self._load(self, tensor)

    def live(self) -> list[torch.Tensor]:
        return [
            self.layer.weight,
            self.weight,
            self.weight.scale,
            self.derived,
            self.plain,
            *self.listed,
            self.flat,
        ]


PLACES: dict[str, Callable[[Holder], torch.Tensor]] = {
    "parameter": lambda m: m.weight.data,
    "parameter itself": lambda m: m.weight,
    "parameter of a layer": lambda m: m.layer.weight.data,
    "attribute of a parameter": lambda m: m.weight.scale,
    "buffer": lambda m: m.derived,
    "attribute": lambda m: m.plain,
    "list": lambda m: m.listed[0],
    "dict": lambda m: m.cached["weight"].data,
    "view": lambda m: m.flat,
    "found by name": lambda m: dict(m.named_parameters())["weight"].data,
}


@torch.library.custom_op("sglrl_test::halve", mutates_args={"x"})
def halve(x: torch.Tensor) -> None:
    x.div_(2)


@torch.library.custom_op("sglrl_test::secretly_halve", mutates_args=())
def secretly_halve(x: torch.Tensor) -> torch.Tensor:
    x.div_(2)
    return x.clone()


@secretly_halve.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


def assign_data(x: torch.Tensor) -> None:
    x.data = torch.zeros(5)


def set_first(x: torch.Tensor) -> None:
    x[0] = 5


def through_numpy(x: torch.Tensor) -> None:
    x.detach().numpy()[:] = 5


def through_a_storage(x: torch.Tensor) -> None:
    x.untyped_storage().copy_(torch.ones(64).untyped_storage())


IN_PLACE: dict[str, tuple[Any, ...]] = {
    "abs_": (), "add_": (1,), "addcmul_": (torch.ones(1), torch.ones(1)), "bernoulli_": (),
    "ceil_": (), "clamp_": (3, 4), "copy_": (torch.ones(1),), "copysign_": (-1,), "cumsum_": (0,),
    "div_": (2,), "erfinv_": (), "exp_": (), "exponential_": (), "fill_": (torch.tensor(3.0),),
    "floor_": (), "index_fill_": (0, torch.tensor([0]), 0.0), "lerp_": (torch.ones(1), 0.5),
    "log_": (), "masked_fill_": (torch.tensor([True]), 0.0), "mul_": (2,), "neg_": (),
    "normal_": (), "pow_": (2,), "random_": (), "reciprocal_": (), "remainder_": (2,),
    "resize_": (1,), "round_": (), "set_": (torch.zeros(5),), "sigmoid_": (), "sub_": (1,),
    "tanh_": (), "tril_": (), "uniform_": (),
}  # fmt: skip
CHANGES: dict[str, Callable[[torch.Tensor], object]] = {
    **{
        name: (lambda x, name=name, args=args: getattr(x, name)(*args))
        for name, args in IN_PLACE.items()
    },
    "exp of it": lambda x: x.copy_(-torch.exp(x.float())),
    "out": lambda x: torch.add(torch.ones(1), 1, out=x),
    "foreach": lambda x: torch._foreach_mul_([torch.ones(1), x], 3.0),
    "foreach copy": lambda x: torch._foreach_copy_([x], [torch.ones_like(x)]),
    "set an item": set_first,
    "assign data": assign_data,
    "numpy": through_numpy,
    "storage": through_a_storage,
    "resize a storage": lambda x: x.untyped_storage().resize_(0),
    "custom operator": halve,
    "custom operator that hides it": secretly_halve,
    "init": lambda x: torch.nn.init.ones_(x) + torch.nn.init.normal_(x),
}


def bits(model: Holder) -> list[bytes]:
    return [t.detach().clone().contiguous().numpy().tobytes() for t in model.live()]


def places(model: Holder) -> list[tuple[int, object, object]]:
    return [(t.data_ptr(), t.shape, t.dtype) for t in model.live()]


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("place", PLACES)
def test_no_operation_of_a_loader_reaches_a_live_tensor(place: str, change: str) -> None:
    def load(model: Holder, tensor: torch.Tensor) -> None:
        model.weight.data.copy_(tensor)
        CHANGES[change](PLACES[place](model))

    model = Holder(load)
    before, held = bits(model), places(model)
    with pytest.raises(sglrl.EngineError):
        make_plan(model, [("w", (2, 3))], set())
    assert bits(model) == before
    assert places(model) == held


FILLS: dict[str, Callable[[torch.Tensor], object]] = {
    "fill_": lambda x: x.fill_(3),
    "zero_": lambda x: x.zero_(),
    "fill_diagonal_": lambda x: x.view(-1)[:1].view(1, 1).fill_diagonal_(3),
    "storage": lambda x: x.untyped_storage().fill_(3),
}


@pytest.mark.parametrize("fill", FILLS)
@pytest.mark.parametrize("place", PLACES)
def test_padding_is_not_written_either(place: str, fill: str) -> None:
    """A constant that a loader writes is treated as padding, which an update does not change."""
    model = Holder(lambda model, tensor: FILLS[fill](PLACES[place](model)))
    before, held = bits(model), places(model)
    make_plan(model, [("w", (2, 3))], set())
    assert (bits(model), places(model)) == (before, held)


def swaps_two_tensors(model: Holder, tensor: torch.Tensor) -> None:
    torch.utils.swap_tensors(model.plain, torch.zeros(5))


def replaces_a_parameter(model: Holder, tensor: torch.Tensor) -> None:
    model.weight = torch.nn.Parameter(torch.empty(2, 3))  # type: ignore[assignment]


def sets_an_attribute(model: Holder, tensor: torch.Tensor) -> None:
    model.weight.data.copy_(tensor)
    model.made = tensor + 1


def writes_to_an_array(model: Holder, tensor: torch.Tensor) -> None:
    model.array[:] = 5


def in_a_thread(model: Holder, tensor: torch.Tensor) -> None:
    with ThreadPoolExecutor() as pool:
        pool.submit(model.weight.data.copy_, tensor).result()


def part_in_a_thread(model: Holder, tensor: torch.Tensor) -> None:
    with ThreadPoolExecutor() as pool:
        pool.submit(model.weight.data[:1].copy_, tensor[:1]).result()


def as_other_numbers(model: Holder, tensor: torch.Tensor) -> None:
    model.weight.data.view(torch.uint8).copy_(tensor.view(torch.uint8))


@pytest.mark.parametrize(
    "load",
    [
        swaps_two_tensors,
        replaces_a_parameter,
        sets_an_attribute,
        writes_to_an_array,
        in_a_thread,
        part_in_a_thread,
        as_other_numbers,
        lambda model, tensor: model.reached(tensor),
    ],
)
def test_other_things_that_a_loader_does_are_refused(
    load: Callable[[Holder, torch.Tensor], object],
) -> None:
    model = Holder(load)
    before, held, names = bits(model), places(model), set(model.__dict__)
    with pytest.raises(sglrl.EngineError):
        make_plan(model, [("w", (2, 3))], set())
    assert (bits(model), places(model), set(model.__dict__)) == (before, held, names)


def test_a_live_tensor_that_the_loader_has_kept_is_not_changed() -> None:
    """The loader reaches the model through its own variable, not through its parameters."""
    kept: list[Holder] = []
    for change in (
        lambda: kept[0].weight.data.mul_(2),
        lambda: kept[0].weight.data[0].zero_(),
        lambda: torch._foreach_add_([kept[0].derived], 1.0),
        lambda: torch.add(kept[0].derived, 1.0, out=kept[0].plain),
        lambda: halve(kept[0].weight.data),
        lambda: secretly_halve(kept[0].weight.data.view(-1)),
    ):
        model = Holder(lambda _, tensor, change=change: change())
        kept[:] = [model]
        before = bits(model)
        with pytest.raises(sglrl.EngineError, match="its loader does more than copy"):
            make_plan(model, [("w", (2, 3))], set())
        assert bits(model) == before


def test_the_plan_of_a_model_points_to_its_live_memory() -> None:
    """This also holds for views with offsets and strides in a storage that parameters share."""
    memory = torch.arange(24.0)

    class Shared(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one = torch.nn.Parameter(memory[4:10].view(2, 3))
            self.two = torch.nn.Parameter(memory[12:24].view(3, 4).t())

        def load_weights(self, named: Iterable[tuple[str, torch.Tensor]]) -> None:
            given = dict(named)
            self.one.data[1:].copy_(given["a"])
            self.two.data.narrow(1, 1, 2).copy_(given["b"].t())

    model = Shared()
    plan = make_plan(model, [("a", (1, 3)), ("b", (2, 4)), ("skipped", (2,))], set())
    assert plan.description.ignored == ["skipped"]
    with torch.no_grad():
        for name, value in (("a", torch.full((1, 3), -1.0)), ("b", torch.full((2, 4), -2.0))):
            (copy,) = plan.copies[name]
            copy.target.copy_(value.as_strided(copy.size, copy.stride, copy.offset))
    assert model.one.tolist() == [[4, 5, 6], [-1, -1, -1]]
    assert memory[12:24].view(3, 4).tolist() == [[12, 13, 14, 15], [-2] * 4, [-2] * 4]


def test_a_loader_that_computes_in_place_changes_no_live_weight(qwen: Path) -> None:
    """Plan a real model in which one parameter has the loader of Mamba2's ``A``."""
    found = run_program("engine.plan_program", qwen)
    assert "its loader does more than copy" in found["refused"]
    assert found["norm"] == [1.0, 2.0, 3.0]
    assert found["changed"] == []
    # Without that parameter's loader the same model can be updated.
    assert found["tensors"] > 10
