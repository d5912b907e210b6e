"""The client caches a description of a trainer's tensors from one update to the next."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel

import sglrl
from sglrl.weights.tensor_source import Manifest, check_metadata, gather, named_tensors, whole
from sglrl.wire.weights import ModelDescription, TensorSpec

WANTED = ModelDescription(
    [TensorSpec("a", "bfloat16", (2, 3)), TensorSpec("b", "float32", (4,))], ["tied"]
)


def named(**tensors: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
    return list(tensors.items())


def test_the_same_list_comes_for_the_same_names_dtypes_and_shapes() -> None:
    manifest = Manifest()
    first = named(a=torch.zeros(2, 3), tied=torch.zeros(1), b=torch.zeros(4))
    sent = manifest.take(first, WANTED)
    assert [name for name, _ in sent] == ["a", "b"]
    assert manifest.specs == WANTED.tensors
    assert manifest.total == 12 + 16
    specs = manifest.specs
    other = named(a=torch.ones(2, 3), tied=torch.ones(1), b=torch.ones(4))
    sent = manifest.take(other, WANTED)
    assert manifest.specs is specs
    # The tensors are those of the current call.
    assert sent[0][1] is other[0][1]
    assert sent[1][1] is other[2][1]


@pytest.mark.parametrize(
    ("changed", "specs"),
    [
        (named(b=torch.zeros(4), a=torch.zeros(2, 3)), WANTED.tensors[::-1]),
        (
            named(a=torch.zeros(3, 2), b=torch.zeros(4)),
            [TensorSpec("a", "bfloat16", (3, 2)), WANTED.tensors[1]],
        ),
        (named(b=torch.zeros(4)), WANTED.tensors[1:]),
        (
            named(c=torch.zeros(4, dtype=torch.float16), b=torch.zeros(4)),
            [TensorSpec("c", "float16", (4,)), WANTED.tensors[1]],
        ),
    ],
)
def test_what_changes_is_seen(
    changed: list[tuple[str, torch.Tensor]], specs: list[TensorSpec]
) -> None:
    manifest = Manifest()
    manifest.take(named(a=torch.zeros(2, 3), b=torch.zeros(4)), WANTED)
    before = manifest.specs
    assert [name for name, _ in manifest.take(changed, WANTED)] == [spec.name for spec in specs]
    assert manifest.specs == specs
    assert manifest.specs is not before
    manifest.take(named(a=torch.zeros(2, 3), b=torch.zeros(4)), WANTED)
    assert manifest.specs == WANTED.tensors


def test_what_is_refused_is_refused_again_and_forgotten() -> None:
    manifest = Manifest()
    good = named(a=torch.zeros(2, 3))
    manifest.take(good, WANTED)
    strange = named(x=torch.zeros(2).to(torch.float8_e4m3fnuz))
    with pytest.raises(sglrl.InvalidWeights, match="x is float8_e4m3fnuz"):
        manifest.take(strange, WANTED)
    assert manifest.specs == WANTED.tensors[:1]
    for _ in range(2):
        with pytest.raises(sglrl.InvalidWeights, match=r"a holds torch\.int32"):
            manifest.take(named(a=torch.zeros(2, 3, dtype=torch.int32)), WANTED)
    assert manifest.take(good, WANTED) == good


def test_what_is_refused_leaves_how_experts_are_taken_apart() -> None:
    prefix = "mlp.experts"
    names = [f"{prefix}.{i}.{kind}_proj.weight" for i in range(2) for kind in ("gate", "up")]
    wanted = ModelDescription([TensorSpec(name, "float32", (3, 2)) for name in names], [])
    merged = [(f"{prefix}.gate_up_proj", torch.zeros(2, 6, 2))]
    manifest = Manifest()
    manifest.take(merged, wanted)
    with pytest.raises(sglrl.InvalidWeights):
        manifest.take([(names[0], torch.zeros(3, 2, dtype=torch.int32))], wanted)
    assert [name for name, _ in manifest.take(merged, wanted)] == names


def test_another_model_wants_other_dtypes() -> None:
    manifest = Manifest()
    given = named(a=torch.zeros(2, 3))
    manifest.take(given, WANTED)
    manifest.take(given, ModelDescription([TensorSpec("a", "float16", (2, 3))], []))
    assert [spec.dtype for spec in manifest.specs] == ["float16"]


def test_metadata_of_a_module_whose_experts_are_merged() -> None:
    wanted = ModelDescription(
        [TensorSpec(f"m.experts.{i}.down_proj.weight", "float32", (4, 2)) for i in range(3)], []
    )
    check_metadata({"m.experts.down_proj": (torch.bfloat16, (3, 4, 2))}, wanted)
    for name, shape, says in (
        ("m.experts.down_proj", (3, 4, 3), r"experts\.0\.down_proj\.weight has shape \[4, 3\]"),
        ("m.experts.down_proj", (4, 4, 2), "unknown: m.experts.down_proj"),
        ("n.experts.down_proj", (3, 4, 2), "unknown: n.experts.down_proj"),
    ):
        with pytest.raises(sglrl.InvalidWeights, match=says):
            check_metadata({name: (torch.float32, shape)}, wanted)


@pytest.fixture
def group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def wrapped_inside(wrap: Callable[[torch.nn.Module], torch.nn.Module]) -> torch.nn.Module:
    linear = torch.nn.Linear(3, 2)
    linear.register_buffer("kept", torch.ones(2))
    linear.register_buffer("made", torch.ones(2), persistent=False)
    linear.register_buffer("none", None)
    return torch.nn.Sequential(torch.nn.Linear(2, 3), wrap(linear))


# torch warns of its own modules here. Users of a module need not see these warnings.
@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("group")
@pytest.mark.parametrize(
    "made",
    [
        lambda: torch.compile(wrapped_inside(lambda m: m)),
        lambda: wrapped_inside(lambda m: torch.compile(m)),
        lambda: wrapped_inside(checkpoint_wrapper),
        lambda: DistributedDataParallel(wrapped_inside(lambda m: m)),
        lambda: torch.compile(DistributedDataParallel(wrapped_inside(checkpoint_wrapper))),
        lambda: FullyShardedDataParallel(
            wrapped_inside(lambda m: m), device_id=torch.device("cpu"), use_orig_params=True
        ),
    ],
    ids=["compiled", "compiled part", "checkpointed part", "ddp", "compiled ddp", "fsdp"],
)
def test_what_torch_wraps_around_a_module(made: Callable[[], torch.nn.Module]) -> None:
    names = ["0.weight", "0.bias", "1.weight", "1.bias", "1.kept"]
    module = made()
    assert [name for name, _ in named_tensors(module)] == names


class Engine(torch.nn.Module):
    """A wrapper as that of DeepSpeed: it has one child."""

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__()
        self.module = module


def test_wrappers_with_one_child() -> None:
    names = ["0.weight", "0.bias", "1.weight", "1.bias", "1.kept"]
    for module in (
        torch.nn.DataParallel(wrapped_inside(lambda m: m)),
        Engine(wrapped_inside(lambda m: m)),
        Engine(Engine(wrapped_inside(checkpoint_wrapper))),
    ):
        assert [name for name, _ in named_tensors(module)] == names
    # These parts are the model's own.
    model = Engine(torch.nn.Linear(2, 2))
    model.other = torch.nn.Linear(2, 2)
    assert next(name for name, _ in named_tensors(model)) == "module.weight"


def tied_module() -> torch.nn.Module:
    module = torch.nn.ModuleDict({"embed": torch.nn.Embedding(4, 2), "head": torch.nn.Linear(2, 4)})
    module["head"].weight = module["embed"].weight
    return module


def test_the_names_of_tied_parameters() -> None:
    """An engine with two tensors gets both, and an engine with one gets one."""
    named = named_tensors(tied_module())
    specs = {name: TensorSpec(name, "float32", tuple(t.shape)) for name, t in named}
    assert [*specs] == ["embed.weight", "head.weight", "head.bias"]
    manifest = Manifest()
    for known, ignored, tied in (
        ([*specs], [], {}),
        (["embed.weight", "head.bias"], ["head.weight"], {"head.weight": "embed.weight"}),
        (["embed.weight", "head.bias"], [], {}),
        (["head.weight", "head.bias"], [], {}),
    ):
        wanted = ModelDescription([specs[name] for name in known], ignored, tied)
        assert [name for name, _ in manifest.take(named, wanted)] == known
        assert manifest.specs == wanted.tensors
        assert manifest.untied(named) == []
    # Without its twin, an unknown name is an error of the check that follows.
    alone = [pair for pair in named if pair[0] != "head.weight"]
    manifest.take(alone, ModelDescription([specs["head.weight"]], [], {}))
    assert [spec.name for spec in manifest.specs] == ["embed.weight", "head.bias"]


class Sharded(torch.Tensor):
    """A tensor that is sharded over a trainer's ranks: all ranks must join each gathering."""

    asked: list[str]
    called: str
    local: torch.Tensor

    @staticmethod
    def of(name: str, local: torch.Tensor, shape: tuple[int, ...], asked: list[str]) -> Sharded:
        made = torch.Tensor._make_subclass(Sharded, torch.zeros(shape))
        made.called, made.local, made.asked = name, local, asked
        return made

    def to_local(self) -> torch.Tensor:
        return self.local

    def full_tensor(self) -> torch.Tensor:
        self.asked.append(self.called)
        return torch.zeros(self.shape)


@pytest.mark.parametrize("tied", [{}, {"head": "embed"}], ids=["both are kept", "one is kept"])
def test_tied_shards_are_gathered_once_on_every_rank(tied: dict[str, str]) -> None:
    shapes = {"embed": (4, 2), "a": (4, 2), "b": (4, 2), "head": (4, 2)}
    kept = [TensorSpec(n, "float32", shape) for n, shape in shapes.items() if n not in tied]
    asked: list[str] = []
    # This rank has no rows of "a" and "b", so both shards are empty. The tensors are not tied.
    locals_ = {"embed": torch.ones(2, 2), "a": torch.ones(0, 2), "b": torch.ones(0, 2)}
    locals_["head"] = locals_["embed"].detach()
    given = [(n, Sharded.of(n, locals_[n], shape, asked)) for n, shape in shapes.items()]
    manifest = Manifest()
    sent = manifest.take(given, ModelDescription(kept, [*tied], tied))
    values = {name: whole(tensor) for name, tensor in sent}
    assert asked == ["embed", "a", "b"]
    assert list(values) == [spec.name for spec in kept]
    assert all(value.shape == (4, 2) for value in values.values())
    if not tied:
        assert values["head"] is values["embed"]
    asked.clear()
    gather(given)
    assert asked == ["embed", "a", "b"]
