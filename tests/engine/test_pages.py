"""Weights that exchange places with the live ones instead of being copied there."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import torch

import sglrl
from sglrl_workers.engine.sglang.arena import move
from sglrl_workers.engine.sglang.plan import Spare, make_plan
from sglrl_workers.pages import Pages, make_pages

from .policies import PROMPTS, Lab, Policies

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
    """Keeps q and k in one, and its vocabulary padded; ``twice`` in two places, ``turned``
    transposed."""

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
    # What no update brings.
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
    """Which file in memory is behind which addresses of the worker."""
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
