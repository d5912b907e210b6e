"""The program of the page about environments, and the recipe, with an engine that runs already."""

from __future__ import annotations

import asyncio
import json
import re
import threading
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM

import sglrl

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
    import verifiers_env as recipe

    file = tmp_path / "lines.jsonl"
    trained = AutoModelForCausalLM.from_pretrained(model, dtype="auto")
    monkeypatch.setattr(recipe, "GROUPS", 1)
    before = pool.weight_version
    await recipe.learn(pool, trained, recipe.options(["--steps", "1", "--output", str(file)]))
    (line,) = [json.loads(line) for line in file.read_text().splitlines()]
    assert line["step"] == 0
    assert 0 < line["reward"] <= 1.5
    assert line["characters"] > 0
    assert pool.weight_version == before + 1
    # Other tests need the weights of the folder.
    await pool.update_weights_from_disk(model)
