"""Two engines with one ``random_seed``: unseeded draws differ, seeded ones agree."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from weights.test_replacements import kill

import sglrl

pytestmark = pytest.mark.asyncio(loop_scope="module")
PROMPT = [5, 6, 7, 8]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(qwen: Path) -> AsyncIterator[sglrl.Client]:
    async with sglrl.launch(qwen, device="cpu", replicas=2, random_seed=0) as client:
        yield client


async def draw(client: sglrl.Client, worker: int, seed: int | None = None) -> list[list[int]]:
    made = await client.generate(
        input_ids=PROMPT, n=2, worker=worker, seed=seed, max_new_tokens=16, ignore_eos=True
    )
    assert {one.worker for one in made} == {worker}
    return [one.output_ids.tolist() for one in made]


async def test_unseeded_draws_differ(client: sglrl.Client) -> None:
    """All draws differ: between workers, after a worker's replacement, and on an added worker."""
    found = await draw(client, 0) + await draw(client, 1)
    await kill(client, 1)
    await client.wait_until_full(120)
    found += await draw(client, 1)
    (added,) = await client.add_workers()
    found += await draw(client, added)
    await client.remove_worker(added)
    assert len({tuple(ids) for ids in found}) == 8


@pytest.mark.parametrize("seed", [0, (1 << 31) - 2, (1 << 62) - 3])
async def test_seeded_draws_agree(client: sglrl.Client, seed: int) -> None:
    first, second = await draw(client, 0, seed), await draw(client, 1, seed)
    assert first == second
    assert first[0] != first[1]
    (next_seed, _) = await draw(client, 1, seed + 1)
    assert next_seed not in first, "seeds that follow each other share no samples"


@pytest.mark.parametrize("seed", [-1, 1 << 32, 1.0, True, "0"])
async def test_seeds_that_sglang_does_not_take(qwen: Path, seed: Any) -> None:
    with pytest.raises(sglrl.UsageError, match=r"random_seed must be None or an integer in 0\.\."):
        sglrl.launch(qwen, device="cpu", random_seed=seed)
