"""Staged weights that swap places with the live weights instead of being copied."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import pytest_asyncio
import torch
from engine.policies import PROMPTS, Lab, Policies

import sglrl
from sglrl.core.manifest import Layout
from sglrl_workers.engine.sglang.accelerations.parameter_arena import move
from sglrl_workers.engine.sglang.weight_plan import Spare, make_plan
from sglrl_workers.weights import double_buffer as pages_module
from sglrl_workers.weights.announcements import Announcements
from sglrl_workers.weights.double_buffer import Pages, make_pages

CPU = torch.device("cpu")


def made(size: int) -> Pages:
    pages = make_pages(size, CPU)
    assert pages is not None
    return pages


def spare_of(pages: Pages) -> torch.Tensor:
    spare = pages.spare()
    assert spare is not None
    return spare


def test_both_pieces_of_memory_change_places() -> None:
    pages = made(10_000)
    live, spare = pages.live, spare_of(pages)
    assert pages.fresh
    assert live.numel() == spare.numel() >= 10_000
    places = live.data_ptr(), spare.data_ptr()
    live.fill_(1)
    spare.fill_(2)
    for value in (2, 1, 2):
        pages.make_live()
        pages.settle()
        assert not pages.fresh
        assert torch.all(live == value)
        assert torch.all(spare_of(pages) == 3 - value)
    live[5] = 7
    assert spare_of(pages)[5] == 1
    assert (pages.live.data_ptr(), spare_of(pages).data_ptr()) == places


@pytest.mark.parametrize("kept", [[], [(0, 10), (5_000, 9_000)], [(0, 12_288)]])
def test_memory_that_is_given_back(kept: list[tuple[int, int]]) -> None:
    pages = made(10_000)
    live, spare = pages.live, spare_of(pages)
    places = live.data_ptr(), spare.data_ptr()
    expected = torch.zeros_like(live)
    for value in (1, 2):
        live.fill_(value)
        spare.fill_(9)
        for begin, end in kept:
            expected[begin:end] = value
        pages.release(kept)
        assert [os.fstat(file).st_blocks for file in pages._files] == [0, 0]  # type: ignore[attr-defined]
        pages.restore()
        assert torch.equal(live, expected)
        assert pages.fresh
        assert (pages.live.data_ptr(), spare_of(pages).data_ptr()) == places
    spare.fill_(3)
    pages.make_live()
    assert torch.all(live == 3)
    pages.drop_spare()
    assert sorted(os.fstat(file).st_blocks > 0 for file in pages._files) == [False, True]  # type: ignore[attr-defined]
    assert torch.all(live == 3)
    assert not spare_of(pages).any()


def test_what_is_being_read_is_copied_to() -> None:
    pages = made(100)
    spare_of(pages).fill_(2)
    with pages.reading():
        with pages.reading():
            pass
        pages.make_live()
    assert torch.all(pages.live == 2)
    pages.live.fill_(3)
    assert torch.all(spare_of(pages) == 2)
    assert pages.fresh
    pages.make_live()
    assert torch.all(pages.live == 2)
    assert torch.all(spare_of(pages) == 3)


class Driver:
    """A fake of the CUDA memory calls that ``pages`` makes.

    Records which memory is mapped where, and fails on operations that the CUDA driver would refuse.
    """

    granularity = 512
    free = 1 << 40

    def __init__(self, device: torch.device) -> None:
        self.handles: dict[int, int] = {}
        self.places: dict[int, int | None] = {}

    def create(self, size: int) -> int:
        self.handles[len(self.handles)] = size
        return len(self.handles) - 1

    def release(self, handle: int) -> None:
        assert handle not in self.places.values()
        del self.handles[handle]

    def reserve(self, size: int) -> int:
        self.places[len(self.places)] = None
        return len(self.places) - 1

    def map(self, place: int, size: int, handle: int) -> None:
        assert self.places[place] is None
        assert self.handles[handle] == size
        self.places[place] = handle

    def unmap(self, place: int, size: int) -> None:
        assert self.places[place] is not None
        self.places[place] = None

    def tensor(self, place: int, size: int) -> torch.Tensor:
        assert self.places[place] is not None
        return torch.empty(size, dtype=torch.uint8)


def test_what_cuda_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages_module, "_CudaMemory", Driver)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (Driver.free, 1 << 40))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 0)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 0)
    pages = make_pages(1000, torch.device("cuda:0"))
    assert pages is not None
    driver = pages._memory  # type: ignore[attr-defined]
    live, other = 0, 1
    assert driver.places == {live: 0}
    memory = spare_of(pages)
    assert pages.fresh
    for turn in range(4):
        pages.make_live()
        if turn % 2:
            pages.settle()
            pages.settle()
        assert spare_of(pages) is memory
        assert driver.places == {live: 1 - turn % 2, other: turn % 2}
        assert not pages.fresh
    # With little free memory for others, the memory of the old weights is released.
    monkeypatch.setattr(Driver, "free", 1 << 31)
    pages.make_live()
    pages.settle()
    assert driver.places == {live: 1, other: None}
    assert driver.handles.keys() == {1}
    driver.handles[0] = -1  # handles are not reused
    assert spare_of(pages) is memory
    assert pages.fresh
    assert driver.places == {live: 1, other: 2}
    pages.make_live()
    pages.settle()
    monkeypatch.setattr(Driver, "free", 1 << 20)
    assert pages.spare() is None
    assert driver.places == {live: 2, other: None}


def test_what_shares_memory_with_others_stays_where_it_is() -> None:
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.own = torch.nn.Linear(4, 4)
            self.tied = torch.nn.Linear(4, 4, bias=False)
            self.tied.weight = self.own.weight
            self.seen = torch.nn.Parameter(torch.randn(6))
            self.view = self.seen.detach().view(2, 3)
            self.turned = torch.nn.Parameter(torch.randn(3, 2).t())
            self.part = torch.nn.Parameter(torch.randn(8)[:4])

    model = Model()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    pages = move(model)
    assert pages is not None
    begin = pages.live.data_ptr()
    inside = {
        name
        for name, p in model.named_parameters()
        if begin <= p.data_ptr() < begin + pages.live.nbytes
    }
    assert inside == {"own.weight", "own.bias"}
    assert model.tied.weight is model.own.weight
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, before[name])
    assert model.view.data_ptr() == model.seen.data_ptr()


class Fused(torch.nn.Module):
    """A model that stores q and k in one tensor and pads its vocabulary.

    Args:
        odd: "twice" copies a part of k to two places, "turned" stores q transposed.
    """

    def __init__(self, *odd: str) -> None:
        super().__init__()
        self.qk = torch.nn.Parameter(torch.zeros(6, 4))
        self.embed = torch.nn.Parameter(torch.full((8, 4), 9.0))
        self.scale = torch.nn.Parameter(torch.ones(3))
        self.odd = odd

    def load_weights(self, named: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in named:
            if name == "q":
                self.qk.data[:4].copy_(tensor.t() if "turned" in self.odd else tensor)
            elif name == "k":
                self.qk.data[4:].copy_(tensor)
            elif name == "embed":
                self.embed.data[:5].copy_(tensor)
                self.embed.data[5:].fill_(0)
            if "twice" in self.odd and name == "k":
                self.qk.data[:2].copy_(tensor)


SHAPES = {"q": (4, 4), "k": (2, 4), "embed": (5, 4)}


def test_everything_lies_in_the_spare_memory_as_in_the_live_one() -> None:
    model = Fused()
    pages = move(model)
    assert pages is not None
    plan = make_plan(model, SHAPES.items(), set())
    places = plan.places(pages.live)
    assert places is not None
    memory = spare_of(pages)
    memory.fill_(255)
    spare = Spare(memory, places, plan.description.tensors)
    for begin, end in spare.gaps:
        memory[begin:end].copy_(pages.live[begin:end])
    sent = {name: torch.randn(shape) for name, shape in SHAPES.items()}
    for name, view in spare.views.items():
        view.copy_(sent[name])
    pages.make_live()
    assert torch.equal(model.qk, torch.cat([sent["q"], sent["k"]]))
    assert torch.equal(model.embed[:5], sent["embed"])
    # Updates do not send these values.
    assert torch.equal(model.embed[5:], torch.full((3, 4), 9.0))
    assert torch.equal(model.scale, torch.ones(3))


@pytest.mark.parametrize("odd", ["twice", "turned"])
def test_weights_that_are_not_kept_as_they_come_are_copied(odd: str) -> None:
    model = Fused(odd)
    pages = move(model)
    assert pages is not None
    plan = make_plan(model, SHAPES.items(), set())
    assert plan.places(pages.live) is None
    assert plan.straight.keys() == SHAPES.keys() - {"k" if odd == "twice" else "q"}


# --- in an engine ---------------------------------------------------------------------------------


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def lab(models: Path) -> AsyncIterator[Lab]:
    policies = Policies(models / "exchanged", hidden_size=256)
    async with sglrl.launch(policies[0].folder, device="cpu") as client:
        yield Lab(client, policies)


def mapped(client: Any) -> dict[str, str]:
    """Return the inode of the weights' memory file at each address range of the worker."""
    (worker,) = client.workers
    lines = Path(f"/proc/{worker.pid}/maps").read_text().splitlines()
    fields = [line.split() for line in lines if "memfd:sglrl-weights" in line]
    return {place: inode for place, _, _, _, inode, *_ in fields}


@pytest.mark.asyncio(loop_scope="session")
async def test_updates_of_all_kinds_one_after_the_other(lab: Lab) -> None:
    (live,) = mapped(lab.client)
    seen = []
    for options in ({}, {}, {"mode": "bucketed"}, {}, {"mode": "full", "bucket_bytes": 1}, {}):
        await lab.other(**options)
        await lab.check(PROMPTS[:2], 4)
        seen.append(mapped(lab.client)[live])
    first, second, bucketed, *others = seen
    assert first != second
    assert bucketed == second
    assert others == [first, second, first]


def test_a_short_update_is_announced_when_it_begins() -> None:
    told: list[tuple[float, bool]] = []
    engine = SimpleNamespace(
        step_seconds=lambda: 0.004, nearly_staged=lambda seconds, live: told.append((seconds, live))
    )
    update: Any = SimpleNamespace(layout=Layout([], [400, 600], 600), drained=False)

    def announced(rate: float) -> bool:
        announcements = Announcements(engine)
        announcements._rate = rate
        return announcements.at_once(update)

    assert not announced(0.0)  # no rate has been measured yet
    assert not announced(1000 / 0.009)
    assert told == []
    assert announced(1000 / 0.007)
    assert told == [(pytest.approx(0.007), True)]
    # A drained engine already waits for the update.
    update.drained = True
    assert announced(1000 / 0.009)
    assert len(told) == 1
