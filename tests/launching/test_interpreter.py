"""``launch(python=...)``: workers in the environment of another interpreter.

``tests/separate_driver.py`` checks a driver without SGLang and torch.
"""

from __future__ import annotations

import sys
import sysconfig
import venv
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

import sglrl
from sglrl.driver import fork_server
from sglrl.launching.engine_fields import engine_fields
from sglrl.launching.interpreter import examine


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An interpreter without packages."""
    folder = tmp_path_factory.mktemp("bare")
    venv.create(folder, with_pip=False)
    return folder / "bin" / "python"


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """An interpreter that has this one's packages. Its fork server ends with the module's tests."""
    folder = tmp_path_factory.mktemp("other")
    venv.create(folder, with_pip=False)
    (site,) = folder.glob("lib/python*/site-packages")
    ours = [sysconfig.get_path("purelib"), *sys.path]
    (site / "ours.pth").write_text("".join(f"import site; site.addsitedir({p!r})\n" for p in ours))
    python = folder / "bin" / "python"
    yield python
    server = fork_server._servers.pop(("plain", str(python), frozenset()), None)
    if server is not None:
        server.close()


def says(folder: Path, text: str) -> Path:
    """Return a program that prints ``text``, whatever its arguments are."""
    program = folder / "python"
    program.write_text(f"#!/bin/sh\necho '{text}'\n")
    program.chmod(0o700)
    return program


async def test_workers_run_in_another_interpreter(other: Path) -> None:
    async with sglrl.launch("fake", engine="fake", vocab_size=512, python=other) as client:
        first = client.workers[0].pid
        assert psutil.Process(first).cmdline()[0] == str(other)
        # The replacement comes from the same fork server, and answers the call.
        psutil.Process(first).kill()
        made = await client.generate(input_ids=[1, 2, 3], max_new_tokens=6)
        assert made.output_ids.tolist() == [1, 2, 3, 1, 2, 3]
        assert psutil.Process(client.workers[0].pid).cmdline()[0] == str(other)
        assert client.workers[0].pid != first


def test_an_interpreter_describes_itself(other: Path) -> None:
    found = examine(str(other), needs_sglang=True)
    assert found.python == f"{sys.version_info.major}.{sys.version_info.minor}"
    assert found.sglrl == sglrl.__version__
    assert engine_fields(found.sglang) == engine_fields()


def test_interpreters_that_cannot_be_used(
    bare: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The other interpreter must not find this one's packages.
    monkeypatch.delenv("PYTHONPATH", raising=False)
    other_version = says(tmp_path, '{"python":"3.11","sglrl":"0.0.1","sglang":""}')
    for python, why in (
        (tmp_path / "nothing", "is not a program"),
        (tmp_path, "is not a program"),
        (3, "path of an interpreter"),
        (bare, "has no sglrl: .*/bare.*/bin/python -m pip install"),
        (other_version, f"has sglrl 0.0.1 and this program has {sglrl.__version__}"),
    ):
        with pytest.raises(sglrl.UsageError, match=why):
            sglrl.launch("fake", engine="fake", python=python)  # type: ignore[arg-type]
    no_sglang = says(tmp_path, f'{{"python":"3.11","sglrl":"{sglrl.__version__}","sglang":""}}')
    with pytest.raises(sglrl.UsageError, match=r"has no SGLang: .* -m pip install .*\[sglang\]"):
        sglrl.launch("some/model", python=no_sglang)
    not_json = says(tmp_path, "hello")
    with pytest.raises(sglrl.UsageError, match="cannot import sglrl: no reason given"):
        sglrl.launch("some/model", python=not_json)
