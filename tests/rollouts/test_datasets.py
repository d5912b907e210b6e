"""Data sets of every kind: their items, errors and ends."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

import sglrl
from sglrl.rollouts import session_arguments
from sglrl.rollouts.dataset import optional_prompt

from .agents import (
    ITEMS,
    of_now,
    one_turn,
    two_turns,
)


@pytest.mark.parametrize("kind", ["plain", "async"])
async def test_a_data_set_that_breaks_off(client: sglrl.Client, kind: str) -> None:
    """Items that were read before the error are still returned."""

    def plain() -> Iterator[dict[str, Any]]:
        yield from ITEMS[:5]
        raise OSError("the disk is gone")

    async def in_time() -> AsyncIterator[dict[str, Any]]:
        for item in plain():
            yield item

    taken = []
    with pytest.raises(OSError, match="the disk is gone"):
        async for group in sglrl.rollout(
            client, two_turns, plain() if kind == "plain" else in_time(), concurrency=2
        ):
            taken.append(group.index)
    assert sorted(taken) == [0, 1, 2, 3, 4]


async def test_data_sets_as_torch_has_them(client: sglrl.Client) -> None:
    class Mapped:
        def __len__(self) -> int:
            return 6

        def __getitem__(self, index: int) -> dict[str, Any]:
            return dict(ITEMS)[index] if index > 5 else ITEMS[index]  # type: ignore[arg-type]

    class Endless:
        def __len__(self) -> int:
            raise TypeError("it has no length")

        def __iter__(self) -> Iterator[dict[str, Any]]:
            return iter(ITEMS[:6])

    for dataset in (Mapped(), Endless()):
        groups = [g async for g in sglrl.rollout(client, two_turns, dataset)]  # type: ignore[arg-type]
        assert sorted(g.index for g in groups) == [*range(6)]


@pytest.mark.parametrize("staleness", [0, 1])
@pytest.mark.parametrize("kind", ["plain", "async"])
async def test_the_end_is_seen_without_new_weights(
    client: sglrl.Client, staleness: int, kind: str
) -> None:
    """The run notices the end of the data set, although no further group may begin."""

    async def in_time() -> AsyncIterator[dict[str, Any]]:
        for item in ITEMS[:8]:
            await asyncio.sleep(0)
            yield item

    dataset = ITEMS[:8] if kind == "plain" else in_time()
    async with sglrl.rollout(
        client, of_now, dataset, batch_size=8 // (staleness + 1), max_staleness=staleness
    ) as run:
        groups = []
        async with asyncio.timeout(300):
            async for group in run:
                groups.append(group.index)
    assert sorted(groups) == [*range(8)]


async def test_an_item_that_was_read_and_not_begun_is_not_done(client: sglrl.Client) -> None:
    state = {"next": 10, "unfinished": [3, 5, 7]}
    arguments: dict[str, Any] = {"state": state, "batch_size": 1, "max_staleness": 0}
    async with sglrl.rollout(client, one_turn, ITEMS[:12], **arguments) as run:
        (first,) = await run.take(1)
        # No more groups may begin, and the run has already read the next item.
        while run.state_dict()["read"] < 6:  # noqa: ASYNC110
            await asyncio.sleep(0)
        found = run.state_dict()
    assert first.index == 3
    assert (found["next"], found["unfinished"]) == (10, [5, 7])
    rest = [g.index async for g in sglrl.rollout(client, one_turn, ITEMS[:12], state=found)]
    assert sorted(rest) == [5, 7, 10, 11]


@pytest.mark.parametrize("waits", [False, True])
async def test_a_data_set_that_is_cancelled_from_within(client: sglrl.Client, waits: bool) -> None:
    both_taken = asyncio.Event()

    async def data() -> AsyncIterator[Any]:
        for item in ITEMS[:2]:
            yield item
        if waits:
            await both_taken.wait()
        inner = asyncio.create_task(asyncio.Event().wait())
        inner.cancel()
        await inner
        yield ITEMS[2]

    taken = []
    with pytest.raises(sglrl.SglrlError, match="data set was cancelled"):
        async for group in sglrl.rollout(client, one_turn, data()):
            taken.append(group.index)
            if len(taken) == 2:
                both_taken.set()
    assert sorted(taken) == [0, 1]


@pytest.mark.parametrize("processes", [None, 2])
async def test_columns_that_are_none_are_not_there(
    client: sglrl.Client, processes: int | None
) -> None:
    items = [
        {"messages": None, "prompt": None, "input_ids": [5, 6, 7], "id": 0},
        {"messages": [{"role": "user", "content": "Hi"}], "prompt": None, "input_ids": None},
    ]
    assert session_arguments(items[1]) == {"messages": items[1]["messages"]}
    run = sglrl.rollout(client, two_turns_of_one_item, items[:1], processes=processes)
    async with run:
        (group,) = await run.take()
    assert group.trajectories[0].prompt_ids.tolist() == [5, 6, 7]
    for item in ({"prompt": None}, {"messages": None, "answer": "4"}, {}):
        with pytest.raises(sglrl.UsageError, match="has no prompt"):
            session_arguments(item)


async def two_turns_of_one_item(session: sglrl.Session, item: dict[str, Any]) -> float:
    return await two_turns(session, item)


@pytest.mark.parametrize(
    "item",
    [
        {"prompt": "a", "messages": [{"role": "user", "content": "b"}]},
        {"prompt": "a", "input_ids": [1], "messages": None},
        {"prompt": "", "input_ids": []},
    ],
    ids=str,
)
@pytest.mark.parametrize("prompt_of", [session_arguments, optional_prompt])
def test_an_item_with_several_prompts(item: dict[str, Any], prompt_of: Any) -> None:
    names = [
        repr(name) for name in ("prompt", "messages", "input_ids") if item.get(name) is not None
    ]
    with pytest.raises(sglrl.UsageError, match=f"several prompts: {' and '.join(names)}"):
        prompt_of(item)
