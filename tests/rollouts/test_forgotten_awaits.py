"""What a user sees who forgets ``await``, or writes ``for`` or ``with`` without ``async``."""

from __future__ import annotations

import asyncio
import gc
import re
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from actor_classes import Values

import sglrl

from .agents import SOME_ITEMS, one_turn

pytestmark = pytest.mark.timeout(60)


@pytest.fixture(autouse=True)
def unawaited() -> Iterator[None]:
    """Ignore Python's own warning about a coroutine, which comes whenever it is collected."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "coroutine .* was never awaited")
        yield
        gc.collect()


async def uses_coroutine(session: Any, item: Any) -> float:
    turn = session.generate(max_new_tokens=2)
    return float(len(turn.output_ids))


async def adds_to_coroutine(session: Any, item: Any) -> float:
    return session.generate(max_new_tokens=2) + 1.0  # type: ignore[no-any-return]


async def awaits_nothing(session: Any, item: Any) -> float:
    session.generate(max_new_tokens=2)
    return 1.0


async def returns_coroutine(session: Any, item: Any) -> Any:
    await session.generate(max_new_tokens=2)
    return asyncio.sleep(0, 1.0)


async def observes_coroutine(session: Any, item: Any) -> float:
    await session.generate(max_new_tokens=2)
    session.observe(asyncio.sleep(0, "text"))
    return 1.0


async def rewards_coroutine(session: Any, item: Any) -> None:
    await session.generate(max_new_tokens=2)
    session.reward(asyncio.sleep(0, 1.0))


@pytest.mark.parametrize(
    ("agent", "says", "processes"),
    [
        (uses_coroutine, "'await' is missing before the call that returned this coroutine", None),
        (uses_coroutine, "'await' is missing before the call that returned this coroutine", 1),
        (
            adds_to_coroutine,
            "'await' is missing before the call that returned this coroutine",
            None,
        ),
        (awaits_nothing, r"it must await session.generate\(...\)", None),
        (returns_coroutine, "got coroutine: an 'await' is missing", None),
        (observes_coroutine, "got coroutine: an 'await' is missing", None),
        (rewards_coroutine, "got coroutine: an 'await' is missing", None),
    ],
)
async def test_agents(client: sglrl.Client, agent: Any, says: str, processes: int | None) -> None:
    run = sglrl.rollout(client, agent, SOME_ITEMS[:1], on_error="raise", processes=processes)
    with pytest.raises((sglrl.SglrlError, AttributeError, TypeError)) as raised:
        async for _ in run:
            pass
    text = "\n".join([str(raised.value), *getattr(raised.value, "__notes__", [])])
    assert re.search(says, text), text


async def test_loops_and_blocks_without_async(client: sglrl.Client) -> None:
    def enter(made: Any) -> None:
        with made:
            pass

    new: dict[str, Callable[[], Any]] = {
        "stream": lambda: client.stream(input_ids=[1]),
        "run": lambda: sglrl.rollout(client, one_turn, SOME_ITEMS),
        "session": lambda: client.session(input_ids=[1]),
        "client": lambda: sglrl.launch("fake", engine="fake"),
        "actors": lambda: sglrl.spawn(Values),
    }
    for name in ("stream", "run"):
        with pytest.raises(sglrl.UsageError, match="use 'async for'"):
            list(new[name]())
        with pytest.raises(sglrl.UsageError, match="async for"):
            await new[name]()
    for name in ("run", "session", "client", "actors"):
        with pytest.raises(sglrl.UsageError, match="use 'async with'"):
            enter(new[name]())
    for name, call in (
        ("client", lambda made: made.generate(input_ids=[1])),
        ("actors", lambda made: made.add(1)),
    ):
        with pytest.raises(sglrl.Closed, match="use 'async with"):
            await call(new[name]())


async def test_arguments(client: sglrl.Client) -> None:
    prompt: Any = asyncio.sleep(0, "text")
    with pytest.raises(sglrl.InvalidRequest, match="got coroutine: an 'await' is missing"):
        await client.generate(prompt)
    with pytest.raises(sglrl.InvalidRequest, match="got coroutine: an 'await' is missing"):
        await client.generate(input_ids=prompt)
    prompt.close()
