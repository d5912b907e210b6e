"""Runs that are saved to a file and resumed from it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import sglrl

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
