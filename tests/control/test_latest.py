"""``Latest``: what is kept while somebody asks."""

from __future__ import annotations

import asyncio
import random

import pytest

from sglrl.control import latest
from sglrl.control.latest import Latest


async def test_nothing_is_made_before_somebody_asks() -> None:
    kept: Latest[int] = Latest(4)
    kept.add(lambda: pytest.fail("nobody asks"))
    assert await kept.after(0, 0.0, 10) == (0, [])
    kept.add(lambda: 7)
    assert await kept.after(0, 0.0, 10) == (1, [7])


async def test_a_question_waits_for_the_next_value() -> None:
    kept: Latest[int] = Latest(4)
    asked = asyncio.create_task(kept.after(0, 60.0, 10))
    await asyncio.sleep(0)
    kept.add(lambda: 1)
    assert await asked == (1, [1])


async def test_values_are_forgotten_when_nobody_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(latest, "WATCHED_SECONDS", 0.0)
    kept: Latest[int] = Latest(4)
    await kept.after(0, 0.0, 10)
    kept.add(lambda: 1)
    forgotten = asyncio.get_running_loop().create_future()
    asyncio.get_running_loop().call_later(0.01, forgotten.set_result, None)
    await forgotten
    kept.add(lambda: pytest.fail("nobody asks any more"))
    assert await kept.after(0, 0.0, 10) == (1, [])


async def test_random_readers_miss_only_what_is_no_longer_kept() -> None:
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    chance = random.Random(seed)
    size = chance.randrange(1, 6)
    kept: Latest[int] = Latest(size)
    await kept.after(0, 0.0, 1)
    everything: list[int] = []
    readers = [0, 0, 0]
    for value in range(200):
        if chance.random() < 0.6:
            kept.add(lambda value=value: value)
            everything.append(value)
            continue
        reader = chance.randrange(len(readers))
        most = chance.randrange(1, 4)
        begin = max(readers[reader], len(everything) - size)
        expected = everything[begin : begin + most]
        readers[reader], found = await kept.after(readers[reader], 0.0, most)
        assert found == expected
        assert readers[reader] == begin + len(expected)
