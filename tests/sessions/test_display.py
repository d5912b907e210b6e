"""Completions, trajectories and groups show their text in ``repr``, in notebooks and as JSON."""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import sglrl
from sglrl.launching.tiny_model import make_tokenizer
from sglrl.rollouts import load, save, to_jsonl

ASK = [{"role": "user", "content": "Add <one> & two."}]


@pytest.fixture
async def client(tmp_path: Path) -> AsyncIterator[sglrl.Client]:
    make_tokenizer(tmp_path, 512)
    async with sglrl.launch(tmp_path, engine="fake", vocab_size=512) as client:
        yield client


async def agent(session: sglrl.Session, item: Any) -> float:
    await session.generate(max_new_tokens=6)
    session.observe({"role": "user", "content": "Sure?"})
    await session.generate(max_new_tokens=4)
    return 0.5


async def test_a_completion_shows_its_text(client: sglrl.Client) -> None:
    completion = await client.generate("a <b> & c " * 20, max_new_tokens=100)
    assert completion.text.startswith("a <b> & c a <b>")
    assert repr(completion).startswith("<Completion 'a <b> & c a <b> & c ")
    assert "...', " in repr(completion)
    assert len(repr(completion)) < 250
    shown = completion._repr_html_()
    assert shown is not None
    assert "a &lt;b&gt; &amp; c" in shown
    assert "<b>" not in shown


async def test_without_a_tokenizer_there_is_no_text() -> None:
    async with sglrl.launch("none", engine="fake") as client:
        completion = await client.generate(input_ids=[1, 2], max_new_tokens=2)
        async with client.session(input_ids=[1, 2]) as session:
            await session.generate(max_new_tokens=2)
            trajectory = session.trajectory(1.0)
    assert repr(completion).startswith("<Completion 2 prompt + 2 new tokens, ")
    assert repr(trajectory).startswith("<Trajectory 2 prompt + 2 response tokens, ")
    assert completion._repr_html_() is trajectory._repr_html_() is None
    assert trajectory.messages is None
    with pytest.raises(sglrl.InvalidRequest, match="no tokenizer"):
        _ = trajectory.text


@pytest.mark.parametrize("processes", [None, 1])
async def test_trajectories_of_a_run(
    client: sglrl.Client, tmp_path: Path, processes: int | None
) -> None:
    run = sglrl.rollout(client, agent, [ASK], group_size=2, processes=processes)
    (group,) = [group async for group in run]
    shown = group._repr_html_()
    for trajectory in group.trajectories:
        decode = client.tokenizer.decode
        assert trajectory.text == decode(trajectory.response_ids.tolist())
        first, second = (
            decode(trajectory.response_ids[turn.start : turn.stop].tolist())
            for turn in trajectory.turns
        )
        assert trajectory.messages == [
            *ASK,
            {"role": "assistant", "content": first},
            {"role": "user", "content": "Sure?"},
            {"role": "assistant", "content": second},
        ]
        assert repr(trajectory.text)[:20] in repr(trajectory)
        assert trajectory._repr_html_() in shown
        copy = pickle.loads(pickle.dumps(trajectory))
        assert copy.messages == trajectory.messages
        assert trajectory.replace(metadata={}).text == trajectory.text
    file = tmp_path / "saved"
    save(file, group.trajectories)
    loaded = load(file)
    with pytest.raises(sglrl.UsageError, match=r"load it with load\(path, tokenizer="):
        _ = loaded[0].text
    assert [t.messages for t in loaded] == [t.messages for t in group.trajectories]
    loaded = load(file, tokenizer=client.tokenizer)
    assert [t.text for t in loaded] == [t.text for t in group.trajectories]


async def test_json_lines(client: sglrl.Client, tmp_path: Path) -> None:
    (group,) = [group async for group in sglrl.rollout(client, agent, [ASK])]
    (trajectory,) = group.trajectories
    unknown = trajectory.replace(
        logprobs=np.where(trajectory.loss_mask, np.nan, 0), metadata={"a": (1, np.int64(2))}
    )
    to_jsonl(tmp_path / "out.jsonl", [trajectory, unknown])
    first, second = map(json.loads, (tmp_path / "out.jsonl").read_text().splitlines())
    assert first["text"] == trajectory.text
    assert first["messages"] == trajectory.messages
    assert first["reward"] == 0.5
    for name in ("prompt_ids", "response_ids", "loss_mask", "logprobs", "versions"):
        assert first[name] == getattr(trajectory, name).tolist()
    assert [turn["stop"] for turn in first["turns"]] == [turn.stop for turn in trajectory.turns]
    assert {*second["logprobs"]} == {0.0, None}
    assert second["metadata"] == {"a": [1, 2]}
    with pytest.raises(sglrl.UsageError, match="metadata of trajectory 1"):
        bad = trajectory.replace(metadata={"a": object()})
        to_jsonl(tmp_path / "out.jsonl", [trajectory, bad])
    assert len((tmp_path / "out.jsonl").read_text().splitlines()) == 2
    assert not [name for name in os.listdir(tmp_path) if name.endswith(".tmp")]
