"""Manifests: the error names everything that does not fit the model; the rest is laid out once."""

from __future__ import annotations

import re
from collections.abc import Callable
from math import prod

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglrl.core.manifest import (
    ALIGNMENT,
    FLOAT_BYTES,
    by_bucket,
    check_manifest,
    default_bucket_bytes,
    differences,
    lay_out,
    merged,
    tensor_bytes,
    total_bytes,
)
from sglrl.errors import InvalidWeights
from sglrl.wire.weights import ModelDescription, TensorSpec

EMBED = TensorSpec("embed", "bfloat16", (8, 4))
NORM = TensorSpec("norm", "float32", (4,))
HEAD = TensorSpec("head", "bfloat16", (8, 4))
MODEL = ModelDescription([EMBED, NORM, HEAD], ["tied"])

dimensions = st.lists(st.integers(0, 40), max_size=3).map(tuple)
specs = st.lists(
    st.builds(TensorSpec, st.text(max_size=3), st.sampled_from(sorted(FLOAT_BYTES)), dimensions),
    max_size=20,
)


# --- does it fit ----------------------------------------------------------------------------------


def refusal(*given_: TensorSpec, partial: bool = False, model: ModelDescription = MODEL) -> str:
    with pytest.raises(InvalidWeights) as caught:
        check_manifest(model, given_, partial=partial)
    beginning, _, problems = str(caught.value).partition(": ")
    assert beginning == "the weights do not fit the model"
    return problems


def test_all_of_it_in_any_order() -> None:
    check_manifest(MODEL, [EMBED, NORM, HEAD])
    check_manifest(MODEL, [HEAD, EMBED, NORM])
    check_manifest(MODEL, [EMBED, NORM, HEAD], partial=True)


def test_a_part_of_it() -> None:
    check_manifest(MODEL, [NORM], partial=True)
    assert refusal(NORM) == "missing: embed, head (partial=True would leave them as they are)"


@pytest.mark.parametrize("partial", [True, False])
def test_nothing(partial: bool) -> None:
    assert refusal(partial=partial).startswith("no tensors are given")
    assert ("missing: embed, norm, head" in refusal(partial=partial)) is not partial


def test_a_model_without_tensors() -> None:
    assert refusal(model=ModelDescription([], [])) == "no tensors are given"


@pytest.mark.parametrize(
    ("wrong", "problem"),
    [
        (TensorSpec("lm_head", "bfloat16", (8, 4)), "unknown: lm_head"),
        (TensorSpec("tied", "bfloat16", (8, 4)), "unknown: tied"),
        (TensorSpec("norm", "float32", (5,)), "norm has shape [5], the model's is [4]"),
        (TensorSpec("norm", "float32", (4, 1)), "norm has shape [4, 1], the model's is [4]"),
        (TensorSpec("norm", "float32", ()), "norm has shape [], the model's is [4]"),
        (TensorSpec("head", "bfloat16", (4, 8)), "head has shape [4, 8], the model's is [8, 4]"),
        (TensorSpec("head", "float16", (8, 4)), "head is float16, the model's is bfloat16"),
        (TensorSpec("head", "int8", (8, 4)), "head is int8, the model's is bfloat16"),
    ],
)
def test_one_thing_is_wrong(wrong: TensorSpec, problem: str) -> None:
    assert refusal(wrong, partial=True) == problem
    others = [spec for spec in MODEL.tensors if spec.name != wrong.name]
    assert refusal(*others, wrong) == problem


def test_given_twice() -> None:
    assert refusal(EMBED, NORM, HEAD, NORM) == "norm is given twice"
    assert refusal(NORM, NORM, partial=True) == "norm is given twice"
    stranger = TensorSpec("x", "float32", ())
    assert refusal(stranger, stranger, partial=True) == "unknown: x, x; x is given twice"


def test_all_that_is_wrong_is_said_at_once() -> None:
    found = refusal(
        TensorSpec("x", "float32", ()),
        TensorSpec("embed", "float32", (8, 4)),
        TensorSpec("norm", "float32", (3,)),
    )
    assert found == (
        "unknown: x; missing: head (partial=True would leave them as they are); "
        "embed is float32, the model's is bfloat16; norm has shape [3], the model's is [4]"
    )


@pytest.mark.parametrize("count", [1, 8, 9, 500])
def test_long_lists_are_shortened(count: int) -> None:
    """Every kind of problem is named, for any number of tensors."""
    tensors = [TensorSpec(f"w{i}", "bfloat16", (2, 2)) for i in range(count)]
    model = ModelDescription(
        [*tensors, *(TensorSpec(f"m{i}", "bfloat16", (2,)) for i in range(count))], []
    )
    found = refusal(
        *(TensorSpec(spec.name, "bfloat16", (2, 3)) for spec in tensors),
        *(TensorSpec(f"u{i}", "bfloat16", (2,)) for i in range(count)),
        model=model,
    )
    assert len(found) < 1200
    for kind in "wmu":
        shown = re.findall(rf"\b{kind}\d+", found)
        assert shown == [f"{kind}{i}" for i in range(min(count, 8))]
    assert found.count(f"and {count - 8} more") == (3 if count > 8 else 0)
    assert found.count("and ") == (3 if count > 8 else 0)


@given(specs=specs)
def test_a_model_fits_itself(specs: list[TensorSpec]) -> None:
    unique = list({spec.name: spec for spec in specs}.values())
    model = ModelDescription(unique, [])
    if unique:
        check_manifest(model, unique)
    for spec in unique:
        check_manifest(model, [spec], partial=True)
        wider = TensorSpec(spec.name, spec.dtype, (*spec.shape, 2))
        with pytest.raises(InvalidWeights):
            check_manifest(model, [*(s for s in unique if s is not spec), wider])


# --- how large it is ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "shape", "nbytes"),
    [
        ("float64", (3, 5), 120),
        ("float32", (3, 5), 60),
        ("float16", (3, 5), 30),
        ("bfloat16", (3, 5), 30),
        ("float8_e4m3fn", (3, 5), 15),
        ("float8_e5m2", (3, 5), 15),
        ("float32", (), 4),
        ("float32", (7, 0), 0),
        ("bfloat16", (1 << 20, 1 << 20), 1 << 41),
    ],
)
def test_bytes_of_a_tensor(dtype: str, shape: tuple[int, ...], nbytes: int) -> None:
    assert tensor_bytes(TensorSpec("w", dtype, shape)) == nbytes


@pytest.mark.parametrize("dtype", ["int8", "bool", "torch.float32", "Float32", ""])
def test_weights_are_floats(dtype: str) -> None:
    wrong = TensorSpec("layers.0.scale", dtype, (2,))
    for refused in (
        lambda: tensor_bytes(wrong),
        lambda: total_bytes([NORM, wrong]),
        lambda: lay_out([NORM, wrong], 1024),
    ):
        with pytest.raises(InvalidWeights, match=rf"layers.0.scale is {dtype}; weights are one of"):
            refused()


# --- how it is cut into buckets -------------------------------------------------------------------


@given(specs=specs, bucket_bytes=st.integers(1, 20_000))
def test_every_tensor_has_a_place_of_its_own(specs: list[TensorSpec], bucket_bytes: int) -> None:
    layout = lay_out(specs, bucket_bytes)
    places = layout.places
    assert len(places) == len(specs)
    assert [p.nbytes for p in places] == [prod(s.shape) * FLOAT_BYTES[s.dtype] for s in specs]
    assert total_bytes(specs) == sum(p.nbytes for p in places)
    # Places follow each other in order, so no two overlap.
    bucket, end = 0, 0
    for place in places:
        if place.bucket != bucket:
            assert place.bucket == bucket + 1, "no bucket is left out"
            assert place.offset == 0, "the first of its bucket is at its beginning"
            bucket, end = place.bucket, 0
        assert place.offset % ALIGNMENT == 0
        assert end <= place.offset < end + ALIGNMENT, "no more between two than alignment wants"
        # An empty tensor has a place too.
        end = place.offset + max(1, place.nbytes)
        assert end <= layout.sizes[bucket]
    assert len(layout.sizes) == (places[-1].bucket + 1 if places else 0)


@given(specs=specs, bucket_bytes=st.integers(1, 20_000))
def test_buckets_are_full_and_not_too_large(specs: list[TensorSpec], bucket_bytes: int) -> None:
    layout = lay_out(specs, bucket_bytes)
    within = by_bucket(layout)
    assert layout.total == sum(layout.sizes)
    room = [-(-max(1, place.nbytes) // ALIGNMENT) * ALIGNMENT for place in layout.places]
    for bucket, size in enumerate(layout.sizes):
        assert size == sum(room[index] for index in within[bucket])
        several = sum(room[index] > 0 for index in within[bucket]) > 1
        assert size <= bucket_bytes or not several, "a bucket of several is no larger than wanted"
        if bucket:
            first = within[bucket][0]
            assert layout.sizes[bucket - 1] + room[first] > bucket_bytes, "it would have fitted"


@given(specs=specs, bucket_bytes=st.integers(1, 20_000))
def test_buckets_hold_each_tensor_once(specs: list[TensorSpec], bucket_bytes: int) -> None:
    layout = lay_out(specs, bucket_bytes)
    within = by_bucket(layout)
    assert [index for indices in within for index in indices] == list(range(len(specs)))
    assert len(within) == len(layout.sizes)
    assert all(within), "no bucket is empty"
    for bucket, indices in enumerate(within):
        assert {layout.places[index].bucket for index in indices} == {bucket}


def test_a_layout() -> None:
    floats = [TensorSpec(name, "float32", (n,)) for name, n in [("a", 1), ("b", 64), ("c", 65)]]
    layout = lay_out([*floats, TensorSpec("d", "float32", (1000,)), floats[0]], 1024)
    assert layout.places == [(0, 0, 4), (0, 256, 256), (0, 512, 260), (1, 0, 4000), (2, 0, 4)]
    assert layout.sizes == [1024, 4096, 256]
    assert layout.total == 5376
    assert by_bucket(layout) == [[0, 1, 2], [3], [4]]


@given(specs=specs, bucket_bytes=st.integers(1, 20_000))
def test_a_slot_holds_every_bucket_that_is_not_too_large(
    specs: list[TensorSpec], bucket_bytes: int
) -> None:
    layout = lay_out(specs, bucket_bytes)
    small = [size for size in layout.sizes if size <= bucket_bytes]
    assert layout.ring_slot == max(small or layout.sizes or [0])
    assert 0 not in layout.sizes


@given(total=st.integers(0, 1 << 40))
def test_buckets_grow_with_the_model(total: int) -> None:
    size = default_bucket_bytes(total)
    assert 256 << 20 <= size <= 1 << 30
    assert size in (256 << 20, 1 << 30) or size == total // 16


def test_nothing_to_lay_out() -> None:
    layout = lay_out([], 1024)
    assert (layout.places, layout.sizes, layout.total) == ([], [], 0)
    assert by_bucket(layout) == []


def test_what_ranks_take_together() -> None:
    """Each rank has its own experts, and lists the experts of the other ranks as ignored."""
    first, second = (
        ModelDescription(
            [NORM, TensorSpec(f"expert.{mine}", "float32", (4, 2))],
            ["lm_head", f"expert.{1 - mine}"],
            {"lm_head": "norm"},
        )
        for mine in (0, 1)
    )
    both = merged([first, second])
    assert [spec.name for spec in both.tensors] == ["norm", "expert.0", "expert.1"]
    assert (both.ignored, both.tied) == (["lm_head"], {"lm_head": "norm"})
    assert merged([both]) == both


# --- what differs ---------------------------------------------------------------------------------


def test_differences() -> None:
    ours = {"torch": "2.9", "NCCL_P2P_DISABLE": "1", "device": "cuda", "empty": ""}
    theirs = {"torch": "2.8", "NCCL_CUMEM_ENABLE": "0", "device": "cuda"}
    assert differences(ours, theirs) == [
        "NCCL_CUMEM_ENABLE is '' here and '0' there",
        "NCCL_P2P_DISABLE is '1' here and '' there",
        "torch is '2.9' here and '2.8' there",
    ]


settings_ = st.dictionaries(st.sampled_from("abcd"), st.sampled_from(["", "0", "1"]))


@given(ours=settings_, theirs=settings_)
def test_differences_from_either_side(ours: dict[str, str], theirs: dict[str, str]) -> None:
    assert differences(ours, ours) == []
    found = differences(ours, theirs)
    names = {name for name in "abcd" if ours.get(name, "") != theirs.get(name, "")}
    assert [line.split()[0] for line in found] == sorted(names)
    assert len(differences(theirs, ours)) == len(found)


@pytest.mark.parametrize(
    ("change", "hint"),
    [
        (lambda name: f"module.{name}", "remove the prefix 'module' and its dot"),
        (lambda name: f"module.model.{name}", "remove the prefix 'module.model' and its dot"),
        (
            lambda name: name.replace(".", "._fsdp_wrapped_module.", 1),
            "remove '_fsdp_wrapped_module' and its dot",
        ),
        (lambda name: name.removeprefix("model."), "put 'model.' before the names"),
        (
            lambda name: name.replace("weight", "base_layer.weight"),
            r"send its adapter, .*lora=name",
        ),
        (lambda name: name.replace("weight", "lora_A.default.weight"), "merge_and_unload"),
        (lambda name: "nonsense", ""),
    ],
)
@pytest.mark.parametrize("partial", [False, True])
def test_a_hint_for_unknown_names(change: Callable[[str], str], hint: str, partial: bool) -> None:
    names = ["model.embed.weight", "model.layers.0.norm.weight", "model.layers.10.norm.weight"]
    model = ModelDescription([TensorSpec(name, "float32", (4,)) for name in names], [])
    given_ = [TensorSpec(change(name), "float32", (4,)) for name in names]
    with pytest.raises(InvalidWeights, match=f"model: .*{hint}.*unknown: ") as raised:
        check_manifest(model, given_, partial=partial)
    if not hint:
        assert "names" not in str(raised.value)
