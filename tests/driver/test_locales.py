"""Programs under ``LC_ALL=C`` without Python's UTF-8 mode, whose files are UTF-8 all the same."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

LOCALE = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}

MODULE = '''
import os
import sglrl

class Écho(sglrl.Actor):
    """Runs in a worker, which imports it by name."""

    @sglrl.endpoint
    async def echo(self, text: str) -> list[str]:
        with open("ä.txt") as file:  # in this folder, in UTF-8
            return [text, file.read(), os.environ["SET_LATER"]]
'''

PROGRAM = '''
import asyncio
import os
import sys
import sglrl
from module import Écho

class Local(sglrl.Actor):
    """Is sent by value: é."""

    @sglrl.endpoint
    async def echo(self, text: str) -> str:
        return text + "é"

async def agent(session, item):
    await session.generate(max_new_tokens=2)
    return float(len("é"))

async def main():
    os.environ["SET_LATER"] = os.fsdecode("ö".encode())
    async with sglrl.spawn(Écho) as one, sglrl.spawn(Local) as other:
        print(ascii(await one.echo("ü")), ascii(await other.echo("ü")))
    async with (
        sglrl.launch("fake", engine="fake") as client,
        sglrl.rollout(client, agent, [{"input_ids": [1]}] * 2, processes=1) as run,
    ):
        print(sys.flags.utf8_mode, len(await run.take(2)))

asyncio.run(main())
'''


def run(program: str, folder: Path) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-X", "warn_default_encoding", program],
        capture_output=True,
        encoding="utf-8",
        env={**os.environ, **LOCALE},
        cwd=folder,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    ours = [line for line in done.stderr.splitlines() if "EncodingWarning" in line]
    assert not [line for line in ours if "/sglrl/" in line or "/workers/" in line]
    return done.stdout.splitlines()


def test_a_program_in_a_folder_whose_name_is_not_ascii(tmp_path: Path) -> None:
    folder = tmp_path / "ü"
    folder.mkdir()
    (folder / "module.py").write_text(MODULE, encoding="utf-8")
    (folder / "ä.txt").write_text("ß", encoding="utf-8")
    (folder / "program.py").write_text(PROGRAM, encoding="utf-8")
    first, second = run("program.py", folder)
    assert first == ascii(["ü", "ß", "ö"]) + " " + ascii("üé")
    assert second == "0 2"


@pytest.mark.skipif(find_spec("sglang") is None, reason="SGLang is not installed")
def test_the_arguments_of_an_engine_are_checked(tmp_path: Path) -> None:
    """This reads SGLang's source, which is not ASCII."""
    (tmp_path / "program.py").write_text(
        "import sglrl\n"
        "try:\n"
        "    sglrl.launch('tiny', device='cpu', attention_backennd='torch_native')\n"
        "except sglrl.UsageError as error:\n"
        "    print(error)\n",
        encoding="utf-8",
    )
    (said,) = run("program.py", tmp_path)
    assert "attention_backend" in said
