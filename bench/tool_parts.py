"""The run of ``bench.rollout`` with agents that use messages and tools, over fake engines.

A fake engine repeats its prompt. If the question contains a tool call, each turn therefore calls
the tool.
"""

from __future__ import annotations

import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import sglrl

from .load import Window, rate_summary
from .parts import Note
from .payload import TOKENS
from .rollout_parts import Tool, cost_of

WAYS = {
    "ids": "token ids",
    "template": "messages",
    "renderer": "messages, calls parsed and run",
}
"""The forms of a tool's result, with their titles: token ids, a message that the chat template
renders, or the result of a tool call that a renderer parses and ``run_tools`` runs."""
# The engine repeats the first 64 tokens, which are the call and a part of the other words.
_CALL = '<tool_call>\n{"name": "look_up", "arguments": {"turn": 1}}\n</tool_call>'
_QUESTION = f"{_CALL} {'and some other words ' * 8}"
_RESULT = "the result of a tool"
_TOKENS_OF_QWEN3 = "<think> </think> <tool_call> </tool_call> <tool_response> </tool_response>"


@asynccontextmanager
async def pool_with_tokenizer(
    **arguments: Any,
) -> AsyncIterator[tuple[sglrl.Client, Any]]:
    """Run fake engines with a small tokenizer, which has the special tokens of Qwen3's calls."""
    from sglrl.launching.tiny_model import make_tokenizer

    with tempfile.TemporaryDirectory() as folder:
        tokenizer = make_tokenizer(Path(folder), 512)
        tokenizer.add_tokens(_TOKENS_OF_QWEN3.split())
        tokenizer.save_pretrained(folder)
        async with sglrl.launch(
            folder, engine="fake", vocab_size=len(tokenizer), **arguments
        ) as client:
            yield client, tokenizer


async def agents(
    note: Note, *, agents: int, turns: int, tool: Sequence[float], replicas: int, repeats: int
) -> dict[str, Any]:
    """Run agents of ``turns`` turns, all at the same time, in each of ``WAYS``."""
    costs = {}
    note("starting workers")
    async with pool_with_tokenizer(replicas=replicas) as (client, tokenizer):
        result = tokenizer.encode(_RESULT)
        for way in WAYS:
            await _measured(client, way, min(agents, 200), turns, tool, result)
            windows = []
            for repetition in range(repeats):
                note(f"{WAYS[way]}: repetition {repetition + 1} of {repeats}")
                windows.append(await _measured(client, way, agents, turns, tool, result))
            costs[way] = rate_summary(windows)
    return costs


async def _measured(
    client: sglrl.Client,
    way: str,
    agents: int,
    turns: int,
    seconds: Sequence[float],
    result: list[int],
) -> Window:
    tool = Tool(seconds)

    async def agent(session: sglrl.Session, item: Mapping[str, Any]) -> float:
        calls = 0

        async def look_up(turn: int) -> str:
            nonlocal calls
            calls += 1
            await tool(item["number"], calls)
            return _RESULT

        if way == "renderer":
            await session.run_tools([look_up], max_turns=turns)
            assert calls == turns - 1
            return 1.0
        for turn in range(turns):
            if turn:
                text = await look_up(turn)
                session.observe(result if way == "ids" else {"role": "tool", "content": text})
            await session.generate()
        return 1.0

    items = [
        {"messages": [{"role": "user", "content": f"{i}: {_QUESTION}"}], "number": i}
        for i in range(agents)
    ]
    run = sglrl.rollout(
        client,
        agent,
        items,
        concurrency=agents,
        max_new_tokens=TOKENS,
        renderer="qwen3" if way == "renderer" else "template",
    )

    async def all_of_it() -> None:
        async for group in run:
            (trajectory,) = group.trajectories
            assert len(trajectory.turns) == turns
            assert not trajectory.branches

    async with run:
        return await cost_of(agents * turns, all_of_it())
