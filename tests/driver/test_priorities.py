"""More urgent requests run first: at the driver, and at an engine that schedules by priority."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from pathlib import Path
from typing import Any

import pytest
from engine.policies import until_running

import sglrl
from sglrl.core.calls import Call
from sglrl.inference.replies import GenerationReply, NextTokenReply, ScoreReply

pytestmark = pytest.mark.asyncio(loop_scope="session")


@pytest.mark.parametrize(
    "options",
    [{"enable_priority_scheduling": True, "window": 32}, {"window": 1}],
    ids=["engine", "driver"],
)
async def test_the_more_urgent_first(
    qwen: Path, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Answers that arrive together may wake their tasks in another order.
    ended: list[tuple[int, int]] = []
    for kind, reply in enumerate((GenerationReply, ScoreReply, NextTokenReply)):

        def end(self: Any, call: Call, *rest: Any, own: Any = reply.end, kind: int = kind) -> None:
            ended.append((call.priority, kind))
            own(self, call, *rest)

        monkeypatch.setattr(reply, "end", end)
    async with sglrl.launch(
        qwen, device="cpu", max_running_requests=1, timeout=300, **options
    ) as client:

        def calls(priority: int) -> tuple[Awaitable[Any], ...]:
            ids = [5 + priority, 6, 7, 8]
            return (
                client.generate(input_ids=ids, max_new_tokens=2, priority=priority),
                client.score(ids, priority=priority),
                client.next_token_logprobs(ids, priority=priority),
            )

        first = asyncio.ensure_future(
            client.generate(input_ids=[1, 2, 3], max_new_tokens=1900, ignore_eos=True, priority=3)
        )
        await until_running(client, 1)
        others = [asyncio.ensure_future(call) for priority in (0, 2, 1) for call in calls(priority)]
        # All that are not answered at once wait when the first one ends.
        at_driver = options["window"] == 1
        while True:
            waiting = (await client.stats())[0].engine.waiting
            if at_driver:
                waiting = client.queue.calls
            if waiting >= sum(not call.done() for call in others):
                break
        first.cancel()
        await asyncio.gather(*others)
    # The engine answers some next-token logprobs at once, even if more urgent calls wait.
    count = 3 if options["window"] == 1 else 2
    found = [priority for priority, kind in ended if kind < count and priority != 3]
    assert found == [2] * count + [1] * count + [0] * count
