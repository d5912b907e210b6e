"""The program of the page about environments, and the recipe, with an engine that runs already."""

from __future__ import annotations

import asyncio
import csv
import re
import threading
from pathlib import Path
from typing import Any

import pytest

import sglrl
from sglrl.integrations.verifiers import VerifiersEnv

pytestmark = pytest.mark.asyncio(loop_scope="session")

ROOT = Path(__file__).parents[2]


async def test_the_program_of_the_page(
    pool: sglrl.Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    page = (ROOT / "docs/environments.md").read_text()
    taskset, program, _ = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    (tmp_path / "spelling.py").write_text(taskset)
    monkeypatch.syspath_prepend(tmp_path)
    launch = 'sglrl.launch("tiny", device="cpu", python="engines/bin/python")'
    assert program.count(launch) == 1
    code = program.replace(launch, f"sglrl.connect({pool.address!r})")
    # The program has an event loop of its own.
    thread = threading.Thread(target=exec, args=(code, {}))
    thread.start()
    await asyncio.to_thread(thread.join)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 4
    for line in lines:
        found = re.fullmatch(
            r"([\d.]+) {'correct': ([01]\.0), 'dashes': ([01]\.0)} {'characters': \d+\.0}", line
        )
        assert found, line
        assert float(found[1]) == pytest.approx(float(found[2]) + 0.1 * float(found[3]))


async def test_the_recipe(
    pool: sglrl.Client, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(ROOT / "examples/recipes")
    import recipe
    import verifiers_env

    env = VerifiersEnv(verifiers_env.ENVIRONMENT)
    tasks = env.tasks()
    heldout = [next(tasks)]
    values = [
        f"--model={model}",
        "--steps=1",
        "--groups=1",
        "--samples=4",
        "--device=cpu",
        "--filter=0",
    ]
    chosen = recipe.options("", [*values, f"--output={tmp_path}"])
    before = pool.weight_version
    limits = {"gateway": True, "max_new_tokens": 8, "concurrency": 4}
    await recipe.train(pool, chosen, env.agent, tasks, heldout, **limits)
    with (tmp_path / "log.csv").open(newline="") as file:
        first, last = csv.DictReader(file)
    assert (first["step"], last["step"]) == ("0", "1")
    assert 0 < float(last["reward"]) <= 1.5
    assert 0 < float(last["heldout"]) <= 1.5
    assert pool.weight_version == before + 1
    # Other tests need the weights of the folder.
    await pool.update_weights_from_disk(model)
