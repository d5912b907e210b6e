"""Watching a session of a real engine shows every token, and changes none."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

import sglrl

PROMPT = "Count slowly: one two three"


@pytest.mark.asyncio(loop_scope="session")
async def test_a_watched_turn_has_the_same_tokens(client: sglrl.Client) -> None:
    async def sample(watched: bool) -> tuple[sglrl.Trajectory, list[bytes]]:
        seen: list[bytes] = []
        async with client.session(PROMPT, seed=3, ignore_eos=True) as session:
            await session.generate(max_new_tokens=3)
            if watched:
                await client.live_state(session.live_id)
            turn = asyncio.create_task(session.generate(max_new_tokens=100))
            turns, tokens = 1, 3
            while watched and turns == 1:
                state = await client.live_state(session.live_id, turns, tokens)
                assert state is not None
                turns, tokens = state.sample.turns, state.sample.tokens
                seen += [running.ids for running in state.running]
            await turn
            return session.trajectory(), seen

    alone, _ = await sample(watched=False)
    watched, seen = await sample(watched=True)
    np.testing.assert_array_equal(watched.response_ids, alone.response_ids)
    np.testing.assert_allclose(watched.logprobs, alone.logprobs, atol=1e-4)
    turn = watched.response_ids[watched.turns[1].start :].tobytes()
    # Without streaming, SGLang reports after every 64 tokens.
    assert len(set(seen)) > 20
    assert all(turn.startswith(part) for part in seen)
    assert watched.turns[1].waiting >= 0
