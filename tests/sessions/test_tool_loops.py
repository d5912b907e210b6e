"""Two hundred agents with tools, a killed engine, and transformers as the judge of every token."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import xgrammar
from engine.reference import Reference

import sglrl
from sessions.families import FAMILIES, family_tokenizer
from sglrl.launching.tiny_model import make_model

TURNS = 5


async def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: the first number
        b: the second number
    """
    return a + b


async def look_up(word: str) -> str:
    """Look up a word.

    Args:
        word: the word
    """
    return f"{word} is “{word[::-1]}”\n\n<b>"


PATTERN = (
    r"<tool_call>\n\{(\"name\": \"add\", \"arguments\": \{\"a\": [0-9], \"b\": [0-9]\}"
    r"|\"name\": \"look_up\", \"arguments\": \{\"word\": \"[a-z]{2,6}\"\})\}\n</tool_call>"
)


class Grammar:
    """What the engine adds to the model's logits: the bias, and the mask of the pattern."""

    def __init__(
        self, tokenizer: Any, vocab_size: int, bias: dict[int, float], pattern: str = PATTERN
    ) -> None:
        info = xgrammar.TokenizerInfo.from_huggingface(
            tokenizer, vocab_size=vocab_size, stop_token_ids=[tokenizer.eos_token_id]
        )
        self._compiled = xgrammar.GrammarCompiler(info).compile_regex(pattern)
        self._bias = torch.zeros(vocab_size)
        for token, value in bias.items():
            self._bias[token] = value

    def logprobs(self, logits: torch.Tensor, sampled: list[int]) -> list[float]:
        """Return the logprob of each token of a turn. ``logits``: float32 [t, v]."""
        matcher = xgrammar.GrammarMatcher(self._compiled)
        mask = xgrammar.allocate_token_bitmask(1, logits.shape[-1])
        found = []
        for row, token in zip(logits, sampled, strict=True):
            row = (row + self._bias)[None]
            matcher.fill_next_token_bitmask(mask)
            xgrammar.apply_token_bitmask_inplace(row, mask)
            found.append(float(torch.log_softmax(row[0], dim=-1)[token]))
            assert matcher.accept_token(token)
        assert matcher.is_terminated()
        return found


@pytest.mark.asyncio(loop_scope="session")
@pytest.mark.timeout(900)
async def test_every_token_of_agents_with_tools(models: Path) -> None:
    folder = make_model(models / "qwen3-loops")
    tokenizer = family_tokenizer(folder, FAMILIES["qwen3"])
    tags = ["<tool_call>", "</tool_call>", "<|im_end|>"]
    bias = {tokenizer.convert_tokens_to_ids(tag): 30.0 for tag in tags}
    reference = Reference(folder)

    async def agent(session: sglrl.Session, item: dict[str, Any]) -> float:
        turn = await session.run_tools(
            [add, look_up], max_turns=TURNS, regex=PATTERN, logit_bias=bias, max_new_tokens=200
        )
        return float(len(turn.tool_calls))

    items = [
        {"messages": [{"role": "user", "content": f"Question {i}?"}], "index": i} for i in range(50)
    ]
    made: list[sglrl.Trajectory] = []
    async with sglrl.launch(folder, device="cpu", replicas=3) as client:
        run = sglrl.rollout(client, agent, items, group_size=4, tools=[add, look_up])
        async with run:
            async for group in run:
                if not made:
                    os.kill(client.workers[1].pid, signal.SIGKILL)
                made += group.trajectories
        assert len({worker.pid for worker in client.workers}) == 3
    assert len(made) == 200
    assert not any("tool_errors" in trajectory.metadata for trajectory in made)
    assert any(turn.resumed for trajectory in made for turn in trajectory.turns)
    grammar = Grammar(tokenizer, 512, bias)
    await asyncio.to_thread(check, made, reference, grammar, tokenizer)


def check(
    made: list[sglrl.Trajectory], reference: Reference, grammar: Grammar, tokenizer: Any
) -> None:
    for trajectory in made:
        assert trajectory.reward == 1
        assert len(trajectory.turns) == TURNS
        assert trajectory.branches == ()
        assert trajectory.messages is not None
        prompt = len(trajectory.prompt_ids)
        last = prompt + trajectory.turns[-1].start
        assert tokenizer.decode(
            trajectory.input_ids[:last].tolist()
        ) == tokenizer.apply_chat_template(
            trajectory.messages[:-1],
            tools=[add, look_up],
            tokenize=False,
            add_generation_prompt=True,
        )
        logits = reference.logits(trajectory.input_ids)[:-1]
        expected = np.zeros(len(trajectory.response_ids), np.float32)
        for turn in trajectory.turns:
            at = slice(prompt + turn.start - 1, prompt + turn.stop - 1)
            sampled = trajectory.response_ids[turn.start : turn.stop].tolist()
            expected[turn.start : turn.stop] = grammar.logprobs(logits[at], sampled)
        np.testing.assert_allclose(trajectory.logprobs, expected, atol=1e-4, rtol=0)
