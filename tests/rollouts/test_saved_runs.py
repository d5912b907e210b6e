"""Runs that are saved to a file and resumed from it."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import sglrl
from sglrl.rollouts.fingerprint import Fingerprint

from .agents import ITEMS, one_turn

GROUPS = 7


def save_and_kill(path: Path, where: str) -> None:
    """Kill a process in its second save. It took ``GROUPS`` groups before each save."""
    program = [sys.executable, "-m", "tests.rollouts.saving_program", str(path), str(GROUPS), where]
    root = Path(__file__).parents[2]
    with subprocess.Popen(program, stdout=subprocess.PIPE, text=True, cwd=root) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "saving\n"
        process.kill()


@pytest.mark.parametrize("where", ["fsync", "rename"])
async def test_a_kill_while_saving_keeps_the_older_state(
    client: sglrl.Client, tmp_path: Path, where: str
) -> None:
    path = tmp_path / "run.json"
    save_and_kill(path, where)
    saved = json.loads(path.read_text())["state"]
    unfinished = {*saved["unfinished"], *range(saved["next"], len(ITEMS))}
    assert len(unfinished) == len(ITEMS) - GROUPS, "the state of the first save"

    ran: list[int] = []

    async def agent(session: sglrl.Session, item: dict[str, Any]) -> float:
        ran.append(item["id"])
        return await one_turn(session, item)

    run = sglrl.rollout(client, agent, ITEMS, group_size=2, state=path)
    found = [group.index async for group in run]
    assert sorted(found) == sorted(unfinished)
    assert sorted(ran) == sorted([*unfinished, *unfinished])
    run.save(path)
    none_left = sglrl.rollout(client, agent, ITEMS, state=str(path))
    assert [group async for group in none_left] == []


async def test_a_file_is_the_same_as_its_state(client: sglrl.Client, tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    path.write_text("an older file")
    async with sglrl.rollout(client, one_turn, ITEMS) as run:
        await run.take(5)
        run.save(path)
        state = run.state_dict()
    assert json.loads(path.read_text()) == {
        "format": "sglrl.rollout",
        "version": 1,
        "state": state,
    }
    assert os.listdir(tmp_path) == ["run.json"], "no temporary file is left"
    with pytest.raises(FileNotFoundError):
        run.save(tmp_path / "missing" / "run.json")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "was not written by Rollout.save"),
        (b"\x93NUMPY", "was not written by Rollout.save"),
        (b"[1, 2]", "was not written by Rollout.save"),
        (b'{"next": 1, "unfinished": []}', "was not written by Rollout.save"),
        (b'{"format": "other", "version": 1, "state": {}}', "has the format 'other'"),
        (b'{"format": "sglrl.rollout", "version": 2}', "version 2 of the format"),
        (b'{"format": "sglrl.rollout", "version": 1, "state": {"next": 1}}', "unfinished"),
    ],
)
def test_other_files_are_refused(
    client: sglrl.Client, tmp_path: Path, content: bytes, message: str
) -> None:
    path = tmp_path / "run.json"
    path.write_bytes(content)
    with pytest.raises(sglrl.UsageError, match=message) as raised:
        sglrl.rollout(client, one_turn, ITEMS, state=path)
    assert str(path) in str(raised.value)


def test_a_missing_file_is_refused(client: sglrl.Client, tmp_path: Path) -> None:
    with pytest.raises(sglrl.UsageError, match=r"none\.json.*there is no such file"):
        sglrl.rollout(client, one_turn, ITEMS, state=tmp_path / "none.json")


def generated(items: list[Any]) -> Iterator[Any]:
    yield from items


async def generated_later(items: list[Any]) -> AsyncIterator[Any]:
    for item in items:
        yield item


async def saved(client: sglrl.Client, dataset: Any, groups: int) -> dict[str, Any]:
    async with sglrl.rollout(client, one_turn, dataset, concurrency=4) as run:
        await run.take(groups)
        state: dict[str, Any] = json.loads(json.dumps(run.state_dict()))
        return state


KINDS: dict[str, Any] = {"list": list, "generator": generated, "async": generated_later}


@pytest.mark.parametrize("kind", [*KINDS])
@pytest.mark.parametrize("first", [*KINDS])
@pytest.mark.parametrize(
    "change", ["shorter", "longer", "an early item", "a late item", "order", "a value of an item"]
)
async def test_another_data_set_is_refused(
    client: sglrl.Client, first: str, kind: str, change: str
) -> None:
    """The error comes before any item is run."""
    other: list[Any] = [dict(item) for item in ITEMS]
    match change:
        case "shorter":
            other = other[:6]
        case "longer":
            other = [*other, ITEMS[0]]
        case "order":
            other[3], other[7] = other[7], other[3]
        case "an early item":
            other[0] = {"input_ids": [9], "id": 99}
        case "a late item":
            other[-1] = {"input_ids": [9], "id": 99}
        case "a value of an item":
            other[2]["input_ids"] = [*other[2]["input_ids"][:2], 4]
    state = await saved(client, KINDS[first](ITEMS), 10)
    ran: list[Any] = []

    async def agent(session: sglrl.Session, item: Any) -> float:
        ran.append(item)
        return await one_turn(session, item)

    known = first == kind == "list" and change in ("shorter", "longer")
    # The first run has not read these items.
    unknown = change == "a late item" or (change == "longer" and not known)
    if unknown:
        expected: Any = contextlib.nullcontext()
    else:
        message = "saved over .*this one has" if change in ("shorter", "longer") else "fingerprint"
        expected = pytest.raises(sglrl.UsageError, match=f"another data set: .*{message}")
    with expected:
        async with sglrl.rollout(client, agent, KINDS[kind](other), state=state) as run:
            async for _ in run:
                pass
    assert bool(ran) == unknown


@pytest.mark.parametrize("kind", [*KINDS])
@pytest.mark.parametrize("old", [True, False])
async def test_a_resumed_run_may_be_resumed(client: sglrl.Client, kind: str, old: bool) -> None:
    state = await saved(client, KINDS[kind](ITEMS), 10)
    if old:
        # Older versions have saved only these.
        state = {name: state[name] for name in ("next", "unfinished")}
    left = {*state["unfinished"], *range(state["next"], len(ITEMS))}
    begun = sglrl.rollout(client, one_turn, KINDS[kind](ITEMS), state=state)
    async with begun as run:
        # Nothing is read yet.
        again = run.state_dict()
        found = {group.index for group in await run.take(3)}
        state = run.state_dict()
    assert {*again["unfinished"], *range(again["next"], len(ITEMS))} == left
    resumed = sglrl.rollout(client, one_turn, KINDS[kind](ITEMS), state=state)
    found |= {group.index async for group in resumed}
    assert found == left
    state = resumed.state_dict()
    assert state["length"] == (len(ITEMS) if kind == "list" else None)
    nothing = sglrl.rollout(client, one_turn, KINDS[kind](ITEMS), state=state)
    assert [group async for group in nothing] == []


@pytest.mark.parametrize("kind", [*KINDS])
async def test_an_old_state_of_a_longer_data_set(client: sglrl.Client, kind: str) -> None:
    state = {"next": 30, "unfinished": [3]}
    with pytest.raises(sglrl.UsageError, match=r"at least 30 items, and this one has 20"):
        async for _ in sglrl.rollout(client, one_turn, KINDS[kind](ITEMS[:20]), state=state):
            pass


def test_fingerprints_are_those_of_values() -> None:
    """They are the same in every process, and differ if a value differs."""

    @dataclass
    class Item:
        text: str
        other: object

    values = [
        [], [[]], {}, None, "", b"", 0, 1, True, 1.5, "1", ["a", "b"], ["ab"], {"a": 1}, {"a": "1"},
        {"b": 1}, np.zeros(3), np.zeros((3, 1)), np.zeros(3, np.int8), Item("a", object()),
        Item("b", object()), {"x", "y"}, {"x"}, object(), "\udc80",
    ]  # fmt: skip
    prints = {}
    for value in values:
        made = Fingerprint()
        made.add(value)
        prints[made.text] = value
    assert len(prints) == len(values)
    for one, same in (
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
        ((1, 2), [1, 2]),
        (object(), object()),
        (np.float64(2.5), 2.5),
        ({f"{i}" for i in range(99)}, {f"{i}" for i in reversed(range(99))}),
    ):
        first, second = Fingerprint(), Fingerprint()
        first.add(one)
        second.add(same)
        assert first.text == second.text
