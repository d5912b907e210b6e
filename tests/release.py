"""Check a built package, installed, outside the repository; ``tox run -m release`` runs this.

A wheel has the files of both packages, and an sdist those that git tracks. The version is that of
the changelog, and the engine answers.
"""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import tarfile
import zipfile
from importlib.util import find_spec
from pathlib import Path

import sglrl

ROOT = Path(__file__).parents[1]


class Judge(sglrl.Actor):
    @sglrl.endpoint
    async def score(self, length: int) -> float:
        return length / 2


def tracked() -> set[str]:
    """Return the files that git tracks, except hidden files, which only a clone needs."""
    listed = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.splitlines()
    return {name for name in listed if not name.startswith(".")}


def compare(found: set[str], expected: set[str]) -> None:
    missing, extra = sorted(expected - found), sorted(found - expected)
    assert found == expected, f"missing: {missing}, not expected: {extra}"


def check_sdist(file: Path) -> None:
    with tarfile.open(file) as archive:
        members = [member.name for member in archive if member.isfile()]
    assert {name.split("/")[0] for name in members} == {f"sglrl-{sglrl.__version__}"}
    names = {name.split("/", 1)[1] for name in members}
    made = {name for name in names if name.startswith("sglrl.egg-info/")}
    compare(names - made - {"PKG-INFO", "setup.cfg"}, tracked())


def check_wheel(file: Path) -> None:
    assert file.name == f"sglrl-{sglrl.__version__}-py3-none-any.whl"
    names = {name for name in zipfile.ZipFile(file).namelist() if ".dist-info/" not in name}
    sources = {
        path.relative_to(ROOT).as_posix()
        for folder in ("sglrl", "workers")
        for path in (ROOT / folder).rglob("*.*")
        if path.is_file() and path.suffix not in {".pyc", ".pyo"}
    }
    compare(names, {re.sub("^workers/", "sglrl_workers/", name) for name in sources})


async def check_engine() -> None:
    """Call SGLang if it is installed, and otherwise the fake engine, and an actor."""
    real = find_spec("sglang") is not None
    settings = {} if real else {"engine": "fake", "vocab_size": 512}
    async with (
        sglrl.launch("tiny" if real else "fake", device="cpu", **settings) as client,
        sglrl.spawn(Judge) as judges,
    ):
        completion = await client.generate(
            input_ids=[1, 2, 3], max_new_tokens=8, ignore_eos=True, logprobs=True
        )
        assert len(completion.output_ids) == len(completion.logprobs) == 8
        assert await judges.score(8) == 4.0


file = Path(os.environ["TOX_PACKAGE"])
assert not Path(sglrl.__file__).is_relative_to(ROOT / "sglrl")
assert f"\n## {sglrl.__version__} (" in (ROOT / "CHANGELOG.md").read_text()
(check_wheel if file.suffix == ".whl" else check_sdist)(file)
asyncio.run(check_engine())
