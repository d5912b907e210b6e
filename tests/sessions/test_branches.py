"""Sessions that go back, compact, begin anew, or whose template rewrites earlier turns."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio

import sglrl
from sglrl.launching.tiny_model import make_tokenizer
from sglrl.rollouts import load, save, stack
from sglrl.sessions.session import Session

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{{ m.content.split('q')[-1] if m.role == 'assistant' and not loop.last else m.content }}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""Omits the text before a "q" in earlier answers, as other templates omit reasoning."""
ASK = [{"role": "user", "content": "One two."}]
MORE = {"role": "user", "content": "Go on."}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[sglrl.Client]:
    """A client whose engine answers with the tokens of the prompt."""
    folder: Path = tmp_path_factory.mktemp("tokenizer")
    tokenizer = make_tokenizer(folder, 512)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    async with sglrl.launch(folder, engine="fake", vocab_size=512) as client:
        yield client


pytestmark = pytest.mark.asyncio(loop_scope="module")
Sampled = tuple[tuple[int, ...], tuple[int, ...]]
"""The tokens before a turn, and those that it sampled."""


def sampled(turn: sglrl.Completion) -> Sampled:
    return tuple(turn.prompt_ids.tolist()), tuple(turn.output_ids.tolist())


def in_the_loss(trajectory: sglrl.Trajectory) -> list[Sampled]:
    """Return the turns of a leaf. Check that nothing else is in its loss."""
    mask = np.zeros(len(trajectory.response_ids), bool)
    found = []
    for turn in trajectory.turns:
        mask[turn.start : turn.stop] = True
        at = len(trajectory.prompt_ids)
        ids = trajectory.input_ids.tolist()
        found.append((tuple(ids[: at + turn.start]), tuple(ids[at + turn.start : at + turn.stop])))
    assert trajectory.loss_mask.tolist() == mask.tolist()
    return found


async def act(chance: random.Random, session: Session) -> None:
    """Do something that an agent may do between two turns."""
    turns = session.turns
    deed = chance.choice(["message", "message", "ids", "back", "compact", "other", "nothing"])
    if deed == "message":
        session.observe([MORE] * chance.randint(1, 2))
    elif deed == "ids":
        session.observe(chance.choices(range(3, 500), k=chance.randint(1, 3)))
    elif deed == "back":
        back = chance.randint(1, 2)
        try:
            session.go_back(back)
        except sglrl.UsageError as error:
            assert "this conversation has 1 turns" in str(error)  # noqa: PT017
    elif deed == "compact":
        conversation = session.trajectory().messages
        assert conversation is not None
        session.rewrite([*conversation[: chance.randint(1, len(conversation))], MORE])
    elif deed == "other":
        session.rewrite([{"role": "user", "content": chance.choice(["queue", "two", "a q b"])}])
    assert session.turns == turns


@pytest.mark.parametrize("seed", range(60))
async def test_each_sampled_token_is_in_the_loss_once(client: sglrl.Client, seed: int) -> None:
    chance = random.Random(seed)
    async with client.session(messages=ASK, seed=seed) as session:
        expected = []
        for number in range(chance.randint(1, 9)):
            turn = await session.generate(max_new_tokens=chance.randint(1, 12))
            expected.append(sampled(turn))
            session.reward(number)
            await act(chance, session)
        whole = session.trajectory()
        leaves = session.trajectories()
    assert [leaf.branches for leaf in leaves] == [()] * len(leaves)
    assert len(leaves) == 1 + len(whole.branches)
    assert [leaf.text for leaf in whole.leaves] == [leaf.text for leaf in leaves]
    found = [turn for leaf in leaves for turn in in_the_loss(leaf)]
    assert Counter(found) == Counter(expected)
    # The conversation that was sampled last is whole: its turns are in no other leaf.
    assert in_the_loss(leaves[-1])[-1] == expected[-1]
    assert in_the_loss(whole) == in_the_loss(leaves[-1])
    assert whole.reward == sum(range(len(expected))) == sum(leaf.reward for leaf in leaves)
    assert whole.sampled_tokens == sum(len(turn) for _, turn in expected)


async def test_a_template_that_rewrites_begins_branches(client: sglrl.Client) -> None:
    async with client.session(messages=[{"role": "user", "content": "a q b"}]) as session:
        first = await session.generate(max_new_tokens=14)
        assert "q" in first.text
        session.observe(MORE)
        second = await session.generate(max_new_tokens=2)
        conversation = session.trajectory().messages
        leaves = session.trajectories()
    assert conversation is not None
    rendered = client.tokenizer.apply_chat_template(
        conversation[:-1], tokenize=False, add_generation_prompt=True
    )
    text = client.tokenizer.decode(second.prompt_ids.tolist(), skip_special_tokens=False)
    assert text == rendered
    assert [in_the_loss(leaf) for leaf in leaves] == [[sampled(first)], [sampled(second)]]
    assert [leaf.messages for leaf in leaves] == [conversation[:2], conversation]


async def test_going_back(client: sglrl.Client) -> None:
    async with client.session(messages=ASK) as session:
        first = await session.generate(max_new_tokens=3)
        session.observe(MORE)
        second = await session.generate(max_new_tokens=3)
        session.observe(MORE)
        session.go_back()
        assert session.ids.tolist() == second.prompt_ids.tolist()
        again = await session.generate(max_new_tokens=5)
        assert again.prompt_ids.tolist() == second.prompt_ids.tolist()
        leaves = session.trajectories()
        assert [in_the_loss(leaf) for leaf in leaves] == [
            [sampled(second)],
            [sampled(first), sampled(again)],
        ]
        session.go_back(2)
        assert session.ids.tolist() == first.prompt_ids.tolist()
        for wrong in (0, 1, True, "1"):
            with pytest.raises(sglrl.UsageError, match="this conversation has 0 turns"):
                session.go_back(wrong)  # type: ignore[arg-type]
        with pytest.raises(sglrl.UsageError, match="that could be rewarded"):
            session.reward(1)


async def test_messages_that_are_known_keep_their_tokens(client: sglrl.Client) -> None:
    async with client.session(messages=ASK) as session:
        first = await session.generate(max_new_tokens=3)
        # These tokens are not what the tokenizer makes of their text.
        session.observe([5, 6, 7])
        await session.generate(max_new_tokens=3)
        ids = session.ids.tolist()
        conversation = session.trajectory().messages
        assert conversation is not None
        session.observe(MORE)
        await session.generate(max_new_tokens=3)
        session.rewrite([*conversation, {"role": "user", "content": "Otherwise?"}])
        turn = await session.generate(max_new_tokens=3)
        assert turn.prompt_ids[: len(ids)].tolist() == ids
        assert ids[: len(first.prompt_ids)] == first.prompt_ids.tolist()
        rest = client.tokenizer.decode(turn.prompt_ids[len(ids) :].tolist())
        assert "Otherwise?" in rest
        # The end of a turn that the model did not end itself comes from the template.
        assert rest.startswith("<|im_end|>\n<|im_start|>user")
        assert len(session.trajectories()) == 2
    async with client.session(input_ids=[5, 6]) as session:
        with pytest.raises(sglrl.UsageError, match="began without messages"):
            session.rewrite(ASK)


async def test_not_while_a_turn_is_sampled(client: sglrl.Client) -> None:
    async with client.session(messages=ASK) as session:
        turn = session.generate(max_new_tokens=3)
        waiting = turn.send(None)
        assert waiting is not None
        for change in (session.go_back, lambda: session.rewrite(ASK)):
            with pytest.raises(sglrl.UsageError, match="await it before"):
                change()
        turn.close()


@pytest.mark.parametrize("processes", [None, 1])
async def test_a_rollout_with_branches(
    client: sglrl.Client, tmp_path: Path, processes: int | None
) -> None:
    async def agent(session: sglrl.Session, item: dict[str, Any]) -> float:
        for _ in range(item["turns"]):
            await session.generate(max_new_tokens=14)
            session.observe(MORE)
        return float(item["turns"])

    items = [{"messages": [{"role": "user", "content": "a q b"}], "turns": n} for n in (1, 2, 3)]
    async with sglrl.rollout(client, agent, items, group_size=2, processes=processes) as run:
        groups = [group async for group in run]
        branches = run.metrics.branches
    groups.sort(key=lambda group: int(group.index))
    trajectories = [t for group in groups for t in group.trajectories]
    assert [len(t.branches) for t in trajectories] == [0, 0, 1, 1, 2, 2]
    assert branches == 6
    assert [group.rewards.tolist() for group in groups] == [[1, 1], [2, 2], [3, 3]]
    assert [group.tokens for group in groups] == [28, 56, 84]
    batch = stack(trajectories)
    assert batch["sample"].tolist() == [0, 1, 2, 2, 3, 3, 4, 4, 4, 5, 5, 5]
    assert batch["reward"].tolist() == [1, 1, 2, 2, 2, 2, 3, 3, 3, 3, 3, 3]
    assert batch["loss_mask"].sum(1).tolist() == [14] * 12
    with pytest.raises(sglrl.UsageError, match="a trajectory with branches has several rows"):
        trajectories[-1].to_tensordict()
    save(tmp_path / "t", trajectories)
    for saved, one in zip(load(tmp_path / "t"), trajectories, strict=True):
        assert len(saved.branches) == len(one.branches)
        for here, there in zip(saved.leaves, one.leaves, strict=True):
            assert here.input_ids.tolist() == there.input_ids.tolist()
            assert in_the_loss(here) == in_the_loss(there)
            assert here.messages == there.messages
