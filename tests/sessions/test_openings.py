"""Observations before the first turn: an environment that is reset in the agent."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest
import pytest_asyncio

import sglrl

pytestmark = pytest.mark.asyncio(loop_scope="module")
SYSTEM = {"role": "system", "content": "Play."}
BOARD = {"role": "user", "content": "The board is empty."}
MORE = {"role": "user", "content": "You are white."}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client() -> AsyncIterator[sglrl.Client]:
    async with sglrl.launch("tiny", engine="fake") as client:
        yield client


def rendered(client: sglrl.Client, messages: list[Any]) -> list[int]:
    found: list[int] = client.tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_dict=False
    )
    return found


async def first_turn(session: sglrl.Session) -> sglrl.Completion:
    return await session.generate(max_new_tokens=3)


@pytest.mark.parametrize(
    ("given", "observed", "whole"),
    [
        ([SYSTEM], [BOARD], [SYSTEM, BOARD]),
        ([SYSTEM], [BOARD, MORE], [SYSTEM, BOARD, MORE]),
        ([SYSTEM], [[BOARD, MORE]], [SYSTEM, BOARD, MORE]),
        ([SYSTEM, BOARD], [[MORE]], [SYSTEM, BOARD, MORE]),
        (None, [SYSTEM, [BOARD, MORE]], [SYSTEM, BOARD, MORE]),
        (None, [BOARD], [BOARD]),
    ],
)
async def test_messages_join_the_prompt(
    client: sglrl.Client, given: list[Any] | None, observed: list[Any], whole: list[Any]
) -> None:
    async with client.session(messages=given) as session:
        for what in observed:
            session.observe(what)
        turn = await first_turn(session)
        prompt = rendered(client, whole)
        assert turn.prompt_ids.tolist() == prompt
        trajectory = session.trajectory(1.0)
        assert trajectory.prompt_ids.tolist() == prompt
        assert trajectory.loss_mask.tolist() == [True] * 3
        assert trajectory.messages is not None
        assert trajectory.messages[:-1] == whole
        # The conversation continues as one that began with all these messages.
        session.observe(MORE)
        second = await first_turn(session)
    async with client.session(messages=whole) as other:
        await first_turn(other)
        other.observe(MORE)
        assert (await first_turn(other)).prompt_ids.tolist() == second.prompt_ids.tolist()


@pytest.mark.parametrize(
    ("given", "observed", "expected"),
    [
        ({"input_ids": [5, 6]}, [[7], np.array([8])], [5, 6, 7, 8]),
        ({}, [[7], [8]], [7, 8]),
        ({}, [np.array([7, 8], np.int64)], [7, 8]),
        ({"prompt": "a b"}, ["c"], "a b|c"),
        ({}, ["a b", "c"], "a b|c"),
        ({"messages": [BOARD]}, ["c"], None),
    ],
)
async def test_text_and_ids_follow_the_prompt(
    client: sglrl.Client, given: Any, observed: list[Any], expected: Any
) -> None:
    def ids(text: str, special: bool) -> list[int]:
        found: list[int] = client.tokenizer(text, add_special_tokens=special)["input_ids"]
        return found

    if isinstance(expected, str):
        prompt, rest = expected.split("|")
        expected = ids(prompt, True) + ids(rest, False)
    elif expected is None:
        expected = rendered(client, [BOARD]) + ids("c", False)
    async with client.session(**given) as session:
        for what in observed:
            session.observe(what)
        turn = await first_turn(session)
        assert turn.prompt_ids.tolist() == expected
        assert session.trajectory(0).prompt_ids.tolist() == expected


async def test_what_does_not_fit(client: sglrl.Client) -> None:
    async with client.session() as session:
        with pytest.raises(sglrl.InvalidRequest, match=r"no prompt.*session\.observe"):
            await first_turn(session)
        session.observe([5, 6])
        with pytest.raises(sglrl.UsageError, match="observe the messages first"):
            session.observe(BOARD)
        session.unobserve()
        session.observe(BOARD)
        turn = await first_turn(session)
        assert turn.prompt_ids.tolist() == rendered(client, [BOARD])
    async with client.session(input_ids=[5]) as session:
        with pytest.raises(sglrl.UsageError, match="began without messages"):
            session.observe(BOARD)
    async with client.session() as session:
        session.observe([5, 6])
        await first_turn(session)
        with pytest.raises(sglrl.UsageError, match="began without messages"):
            session.observe(BOARD)
    begun = [BOARD, {"role": "assistant", "content": "I pl"}]
    async with client.session(messages=begun, continue_final_message=True) as session:
        with pytest.raises(sglrl.UsageError, match="continue_final_message"):
            session.observe(MORE)


async def test_a_failed_turn_keeps_them(client: sglrl.Client) -> None:
    async with client.session(messages=[SYSTEM], timeout=0.0) as session:
        session.observe(BOARD)
        with pytest.raises(sglrl.DeadlineExceeded):
            await first_turn(session)
        session.observe(MORE)
        session.spec.options = session.spec.options.changed(timeout=30.0)
        turn = await first_turn(session)
        assert turn.prompt_ids.tolist() == rendered(client, [SYSTEM, BOARD, MORE])
    async with client.session(messages=[BOARD]) as session:
        session.observe(MORE)
        session.unobserve()
        assert (await first_turn(session)).prompt_ids.tolist() == rendered(client, [BOARD])


async def test_forks_and_going_back(client: sglrl.Client) -> None:
    """Each attempt may get another hint."""
    async with client.session(messages=[SYSTEM, BOARD]) as session:
        hints = [{"role": "user", "content": f"Hint {i}"} for i in range(4)]
        session.observe(hints[0])
        fork = session.fork()
        fork.observe(hints[1])
        turns = await asyncio.gather(first_turn(session), first_turn(fork))
        assert turns[0].prompt_ids.tolist() == rendered(client, [SYSTEM, BOARD, hints[0]])
        assert turns[1].prompt_ids.tolist() == rendered(client, [SYSTEM, BOARD, *hints[:2]])
        answer = (session.trajectory().leaves[0].messages or [])[-1]
        session.observe(MORE)
        second = await first_turn(session)
        session.go_back()
        # The conversation before the turn ends with MORE, and the first turn keeps its tokens.
        session.observe(hints[2])
        again = await first_turn(session)
        shared = len(turns[0].prompt_ids) + 3
        assert again.prompt_ids[:shared].tolist() == second.prompt_ids[:shared].tolist()
        messages = session.trajectory().messages
        assert messages is not None
        assert messages[:-1] == [SYSTEM, BOARD, hints[0], answer, MORE, hints[2]]
        session.go_back(2)
        session.observe(hints[3])
        last = await first_turn(session)
        assert last.prompt_ids.tolist() == rendered(client, [SYSTEM, BOARD, hints[0], hints[3]])


async def test_messages_during_the_first_turn_come_after_it(client: sglrl.Client) -> None:
    async with client.session(messages=[BOARD]) as session:
        turn = asyncio.create_task(first_turn(session))
        await asyncio.sleep(0)
        session.observe(MORE)
        assert (await turn).prompt_ids.tolist() == rendered(client, [BOARD])
        await first_turn(session)
        assert [m["role"] for m in session.trajectory().messages or []] == [
            *("user", "assistant", "user", "assistant")
        ]


@pytest.mark.parametrize("processes", [None, 1])
async def test_in_a_rollout(client: sglrl.Client, processes: int | None) -> None:
    def play(**values: Any) -> Any:
        async def agent(session: sglrl.Session, item: dict[str, Any]) -> float:
            session.observe({"role": "user", "content": f"Level {item['level']}"})
            await session.generate(max_new_tokens=3)
            return 1.0

        items = [{"level": level} for level in range(3)]
        return sglrl.rollout(client, agent, items, group_size=2, processes=processes, **values)

    for opening, before in (
        (lambda item: {}, []),
        (lambda item: {"messages": [SYSTEM]}, [SYSTEM]),
    ):
        groups = [group async for group in play(open_session=opening)]
        assert len(groups) == 3
        for group in groups:
            whole = [*before, {"role": "user", "content": f"Level {group.index}"}]
            for trajectory in group.trajectories:
                assert trajectory.prompt_ids.tolist() == rendered(client, whole)


async def test_ids_need_no_tokenizer() -> None:
    async def agent(session: sglrl.Session, item: int) -> float:
        session.observe([item, item])
        await session.generate(max_new_tokens=1)
        return 1.0

    async with sglrl.launch("fake", engine="fake") as client:
        for values in ({}, {"timeout": 60.0}, {"processes": 1}):
            run = sglrl.rollout(client, agent, [3, 4], open_session=lambda item: {}, **values)
            found = {g.index: g.trajectories[0].prompt_ids.tolist() async for g in run}
            assert found == {0: [3, 3], 1: [4, 4]}
