"""What ``docs/supported.md`` says is true, as far as a test can see it."""

from __future__ import annotations

import ast
import re
import tomllib
from pathlib import Path
from typing import Any

import httpx
import pytest

import sglrl
from sglrl.launching.argument_table import ARGUMENTS
from sglrl.launching.engine_arguments import check_engine_arguments
from sglrl.tools.doctor import SGLANG_RANGE

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/supported.md").read_text()


def section(title: str) -> list[list[str]]:
    """Return the cells of the rows of a section's table."""
    found = re.search(rf"^## {title}\n(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL)
    assert found is not None, title
    rows = [line.strip("| ").split(" | ") for line in found[1].splitlines() if line[:1] == "|"]
    assert len(rows) > 3
    return rows[2:]


def arguments() -> dict[str, Any]:
    found = {}
    for row in section("Rejected by launch"):
        for name, value in re.findall(r"`(\w+)=([^`]+)`", row[0]):
            found[name] = ast.literal_eval(value)
    assert len(found) > 10
    return found


@pytest.mark.parametrize(("name", "value"), arguments().items(), ids=arguments())
def test_what_the_page_says_is_rejected(name: str, value: object) -> None:
    with pytest.raises(sglrl.UsageError, match=name):
        sglrl.launch("tiny", device="cpu", **{name: value})


@pytest.mark.parametrize(
    ("name", "value"), {"quantization": "fp8", "kv_cache_dtype": "fp8_e4m3"}.items()
)
def test_what_the_page_says_is_passed_on(name: str, value: str) -> None:
    assert f"`{name}=`" in PAGE
    assert ARGUMENTS[name].state in ("passed on", "tested")
    assert check_engine_arguments("sglang", {name: value}) == {name: value}


def test_versions() -> None:
    rows = dict(section("Platforms and versions"))
    first, beyond = (".".join(map(str, version)) for version in SGLANG_RANGE)
    last = f"{beyond.rpartition('.')[0]}.{SGLANG_RANGE[1][2] - 1}"
    assert rows["SGLang"].startswith(f"{first} to {last} ")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    least = project["requires-python"].removeprefix(">=")
    assert rows["Python"].startswith(f"{least} ")


async def test_http_dialects() -> None:
    """The gateway has the endpoints that the page names, and lacks those that it says it lacks."""
    rows = [row for row in section("Trainers and clients") if row[0].startswith("`/")]
    assert len(rows) == 4
    async with (
        sglrl.launch("tiny", engine="fake") as client,
        sglrl.serve(client, name="tiny") as gateway,
        httpx.AsyncClient(base_url=gateway.url, timeout=300) as http,
    ):
        for first, second, *_ in rows:
            for path in re.findall(r"`(/\S+)`", first):
                answer = await http.post(path, json={})
                # The body lacks fields.
                assert answer.status_code == (404 if second == "no" else 400), (path, answer.text)


def test_lora_modules() -> None:
    (row,) = [
        first for first, _ in section("Adapters and sampling") if first.startswith("LoRA on `q")
    ]
    assert row.count("_proj`") == 7
    assert row.removeprefix("LoRA on ") in (ROOT / "docs/lora.md").read_text()
