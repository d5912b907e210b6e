"""Agents with messages and tools over fake engines, in their own process. See ``parts``.

A fake engine repeats its prompt, so a question that contains a call makes each turn call the tool.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import uvloop

from .parts import Note, serve_part
from .payload import TOKENS
from .rollout_parts import Cost, Tool, cost_of, summary

WAYS = {
    "ids": "token ids",
    "template": "messages",
    "renderer": "messages, calls parsed and run",
}
"""What agents get from their tools: token ids, messages that the chat template renders, or the
results of calls that a renderer parses and ``run_tools`` runs."""
# The first 64 tokens, which the engine repeats, are the call and a part of the other words.
_CALL = '<tool_call>\n{"name": "look_up", "arguments": {"turn": 1}}\n</tool_call>'
_QUESTION = f"{_CALL} {'and some other words ' * 8}"
_RESULT = "the result of a tool"
TOKENS_OF_QWEN3 = "<think> </think> <tool_call> </tool_call> <tool_response> </tool_response>"


def _agents(options: Mapping[str, Any], note: Note) -> dict[str, Any]:
    """Run agents of ``options["turns"]`` turns, all at the same time, in each of ``WAYS``."""
    return uvloop.run(_agents_main(options, note))


async def _agents_main(options: Mapping[str, Any], note: Note) -> dict[str, Any]:
    import sglrl
    from sglrl.api.tiny_model import make_tokenizer

    count, found = options["agents"], {}
    with tempfile.TemporaryDirectory() as folder:
        tokenizer = make_tokenizer(Path(folder), 512)
        tokenizer.add_tokens(TOKENS_OF_QWEN3.split())
        tokenizer.save_pretrained(folder)
        result = tokenizer.encode(_RESULT)
        note("starting workers")
        async with sglrl.launch(
            folder, engine="fake", replicas=options["replicas"], vocab_size=len(tokenizer)
        ) as client:
            for way in WAYS:
                await _measured(client, way, min(count, 200), options, result)
                costs = []
                for repetition in range(options["repeats"]):
                    note(f"{WAYS[way]}: repetition {repetition + 1} of {options['repeats']}")
                    costs.append(await _measured(client, way, count, options, result))
                found[way] = summary(costs)
    return found


async def _measured(
    client: Any, way: str, agents: int, options: Mapping[str, Any], result: list[int]
) -> Cost:
    import sglrl

    turns, tool = options["turns"], Tool(options["tool"])

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


if __name__ == "__main__":
    serve_part({"agents": _agents})
