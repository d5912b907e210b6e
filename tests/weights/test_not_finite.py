"""Weights that are not finite, as sent or in the engine's dtype, are refused by name.

Every worker keeps its weights and accepts the next good update.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import torch
from engine.policies import PROMPTS, Lab, Policies
from safetensors.torch import load_file, save_file

import sglrl
from sglrl.weights import Sender
from sglrl.weights.finite import FiniteCheck

NORM = "model.norm.weight"
QUERY = "model.layers.1.self_attn.q_proj.weight"
WRONG = {
    "nan": (math.nan, torch.float32, "holds NaN"),
    "inf": (math.inf, torch.float32, "holds an infinite value"),
    "-inf": (-math.inf, torch.bfloat16, "holds an infinite value"),
    "overflow": (-1e300, torch.float64, r"holds 1e\+300 or its negative, which overflows float32"),
}


# --- which tensors are finite ---------------------------------------------------------------------


def wrong_in(tensors: dict[str, torch.Tensor], dtype: torch.dtype) -> str:
    check = FiniteCheck()
    check.add((name, tensor, dtype) for name, tensor in tensors.items())
    try:
        check.finish()
    except sglrl.InvalidWeights as error:
        return error.message
    return ""


LARGEST = {
    torch.float16: 65_519.0,
    torch.bfloat16: 3.394e38,
    torch.float32: 3.4028235e38,
    torch.float8_e4m3fn: 448.0,
    torch.float8_e5m2: 57_344.0,
}
TOO_LARGE = {
    torch.float16: 65_520.0,
    torch.bfloat16: 3.4e38,
    torch.float32: 3.5e38,
    torch.float8_e4m3fn: 1000.0,
    torch.float8_e5m2: 65_536.0,
}


@pytest.mark.parametrize("dtype", LARGEST, ids=str)
@pytest.mark.parametrize("sign", [1, -1])
def test_what_overflows_is_what_the_cast_makes_of_it(dtype: torch.dtype, sign: int) -> None:
    for values, wrong in ((LARGEST, False), (TOO_LARGE, True)):
        tensor = torch.ones(50, 3, dtype=torch.float64)
        tensor[17, 2] = sign * values[dtype]
        assert tensor.to(dtype).double().isfinite().all() == (not wrong)
        found = wrong_in({"good": torch.ones(3), "one": tensor}, dtype)
        assert ("one holds" in found) == wrong
        assert "good" not in found


@pytest.mark.parametrize(
    "dtype",
    [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e5m2],
    ids=str,
)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_one_value_is_found_wherever_it_is(dtype: torch.dtype, value: float) -> None:
    for place in (0, 1, 4_097, 9_999):
        plain = torch.linspace(-3, 3, 10_000)
        plain[place] = value
        for tensor in (plain.to(dtype), plain.to(dtype).view(100, 100).t(), plain.to(dtype)[place]):
            assert "t holds" in wrong_in({"t": tensor}, torch.float32)
    assert not wrong_in({"t": torch.linspace(-3, 3, 10_000).to(dtype)}, torch.float32)


def test_every_wrong_tensor_is_named_up_to_a_number() -> None:
    good = {f"good{i}": torch.zeros(i) for i in range(3)}
    bad = {f"bad{i}": torch.tensor([math.nan]) for i in range(10)}
    found = wrong_in({**good, **bad}, torch.bfloat16)
    assert "good" not in found
    assert all(f"bad{i} holds NaN" in found for i in range(8))
    assert "and 2 more tensors" in found
    assert "check_finite=False" in found


# --- in an engine ---------------------------------------------------------------------------------


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def lab(models: Path) -> AsyncIterator[Lab]:
    policies = Policies(models / "policies")
    async with sglrl.launch(policies[0].folder, device="cpu", weight_device="cpu") as client:
        yield Lab(client, policies)


class Gathered(torch.Tensor):
    """A tensor like a DTensor: its values are available only through ``full_tensor``."""

    def full_tensor(self) -> torch.Tensor:
        return self.as_subclass(torch.Tensor)


def spoilt(lab: Lab, seed: int, kind: str, *names: str) -> dict[str, torch.Tensor]:
    """Return another policy's weights with one value that is not finite in each named tensor."""
    value, dtype, _ = WRONG[kind]
    weights = {n: t.detach().clone() for n, t in lab.policies[seed].model.state_dict().items()}
    for name in names:
        weights[name] = weights[name].to(dtype)
        weights[name].view(-1)[-1] = value
    return weights


def save(weights: dict[str, torch.Tensor], lab: Lab, folder: Path) -> Path:
    shutil.copytree(lab.policies[0].folder, folder)
    file = folder / "model.safetensors"
    names = load_file(file).keys()
    save_file({name: weights[name].contiguous() for name in names}, file, {"format": "pt"})
    return folder


SendWeights = Callable[[Lab, dict[str, torch.Tensor], Path, dict[str, Any]], Awaitable[Any]]


async def by_the_client(lab: Lab, weights: Any, folder: Path, options: dict[str, Any]) -> Any:
    return await lab.client.update_weights(weights, **options)


async def in_place(lab: Lab, weights: Any, folder: Path, options: dict[str, Any]) -> Any:
    return await lab.client.update_weights(
        weights, mode="bucketed", bucket_bytes=1 << 16, **options
    )


async def in_part(lab: Lab, weights: Any, folder: Path, options: dict[str, Any]) -> Any:
    part = {name: weights[name] for name in (NORM, QUERY)}
    return await lab.client.update_weights(part, partial=True, **options)


async def gathered(lab: Lab, weights: Any, folder: Path, options: dict[str, Any]) -> Any:
    weights = {name: tensor.as_subclass(Gathered) for name, tensor in weights.items()}
    return await lab.client.update_weights(weights, **options)


async def by_a_sender(lab: Lab, weights: Any, folder: Path, options: dict[str, Any]) -> Any:
    async with await Sender.connect(lab.client.weights_address, device="cpu") as sender:
        return await sender.update(weights, **options)


async def by_another_client(lab: Lab, weights: Any, folder: Path, options: dict[str, Any]) -> Any:
    async with sglrl.connect(lab.client.address) as other:
        return await other.update_weights(weights, **options)


async def from_disk(lab: Lab, weights: Any, folder: Path, options: dict[str, Any]) -> Any:
    saved = save(weights, lab, folder)
    return await lab.client.update_weights_from_disk(saved, **options)


async def from_disk_by_another(
    lab: Lab, weights: Any, folder: Path, options: dict[str, Any]
) -> Any:
    saved = save(weights, lab, folder)
    async with sglrl.connect(lab.client.address) as other:
        return await other.update_weights_from_disk(saved, **options)


WAYS: dict[str, SendWeights] = {
    way.__name__: way
    for way in (
        by_the_client,
        in_place,
        in_part,
        gathered,
        by_a_sender,
        by_another_client,
        from_disk,
        from_disk_by_another,
    )
}


@pytest.mark.asyncio(loop_scope="session")
@pytest.mark.parametrize("way", WAYS)
async def test_weights_that_are_not_finite_are_refused(lab: Lab, way: str, tmp_path: Path) -> None:
    client = lab.client
    seed = 1 if lab.current is not lab.policies[1] else 2
    before, pids = client.weight_version, [w.pid for w in client.workers]
    for kind, (_, _, says) in WRONG.items():
        weights = spoilt(lab, seed, kind, NORM, QUERY)
        with pytest.raises(sglrl.InvalidWeights, match=f"{NORM} holds") as caught:
            await WAYS[way](lab, weights, tmp_path / kind, {})
        if kind != "overflow" or "disk" not in way:
            caught.match(f"{QUERY} {says}")
        assert "lm_head" not in str(caught.value)
        assert client.weight_version == before
        await lab.check(PROMPTS[:1], 4)
    assert [w.pid for w in client.workers] == pids
    await lab.update(seed)
    await lab.check(PROMPTS[:1], 4)


@pytest.mark.asyncio(loop_scope="session")
@pytest.mark.parametrize("way", WAYS)
async def test_the_check_can_be_turned_off(lab: Lab, way: str, tmp_path: Path) -> None:
    before = lab.client.weight_version
    weights = spoilt(lab, 1, "nan", NORM)
    report = await WAYS[way](lab, weights, tmp_path / "folder", {"check_finite": False})
    assert report.version == before + 1 == lab.client.weight_version
    assert await lab.client.verify_weights({NORM: weights[NORM]}) == []
    await lab.update(2)
    await lab.check(PROMPTS[:1], 4)


@pytest.mark.asyncio(loop_scope="session")
async def test_the_check_is_on_or_off(lab: Lab) -> None:
    for wrong in (None, 1, "no"):
        with pytest.raises(sglrl.UsageError, match="check_finite must be True or False"):
            await lab.client.update_weights({}, check_finite=wrong)  # type: ignore[arg-type]
