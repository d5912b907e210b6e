"""The notebook in ``examples``, and Ctrl-C in a notebook, in one real Jupyter kernel."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from jupyter_client.manager import KernelManager
from processes import descendants, wait_for_end

NOTEBOOK = Path(__file__).parents[2] / "examples/first_call.ipynb"
CELLS: list[dict[str, Any]] = json.loads(NOTEBOOK.read_text())["cells"]
CODES = ["".join(cell["source"]) for cell in CELLS if cell["cell_type"] == "code"]
LAUNCH = 'client = await sglrl.launch("tiny", device="cpu")'


class Notebook:
    """A running kernel."""

    def __init__(self, folder: Path) -> None:
        self.manager = KernelManager(
            transport="ipc", ip=str(folder / "kernel"), connection_file=str(folder / "kernel.json")
        )
        self.manager.start_kernel(env={**os.environ, "IPYTHONDIR": str(folder)})
        self.client = self.manager.client()
        self.client.start_channels()
        self.client.wait_for_ready(timeout=300)
        self.pid: int = self.manager.provisioner.process.pid

    def close(self) -> None:
        if self.manager.has_kernel:
            self.client.stop_channels()
            self.manager.shutdown_kernel()

    def run(self, code: str, interrupt_at: str | None = None) -> Cell:
        """Run a cell. Interrupt the kernel when the output first contains ``interrupt_at``."""
        cell = Cell()

        def on_output(message: dict[str, Any]) -> None:
            nonlocal interrupt_at
            cell.add(message["msg_type"], message["content"])
            if interrupt_at is not None and interrupt_at in cell.stdout + cell.stderr:
                interrupt_at = None
                self.manager.interrupt_kernel()

        reply = self.client.execute_interactive(code, output_hook=on_output, timeout=200)
        cell.error = reply["content"].get("ename", "")
        assert interrupt_at is None, cell.stderr
        return cell


class Cell:
    """The output of a cell, and the name of its error."""

    def __init__(self) -> None:
        self.stdout = self.stderr = self.error = ""
        self.shown: list[dict[str, str]] = []
        """Displayed objects: texts by their MIME type."""

    def add(self, kind: str, content: dict[str, Any]) -> None:
        if kind == "stream":
            setattr(self, content["name"], getattr(self, content["name"]) + content["text"])
        elif kind in ("execute_result", "display_data"):
            self.shown.append(content["data"])


@pytest.fixture(scope="module")
def notebook(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Notebook]:
    notebook = Notebook(tmp_path_factory.mktemp("jupyter"))
    yield notebook
    notebook.close()


def test_an_interrupt_while_workers_start(notebook: Notebook) -> None:
    """First while the fork server imports SGLang, then while a worker loads the model."""
    begin = "sglrl: starting 1 worker of tiny ... "
    cell = notebook.run(f"import sglrl\n{LAUNCH}", interrupt_at="starting")
    assert cell.error == "CancelledError"
    assert cell.stderr == f"{begin}interrupted\n"
    log = "import logging\nlogging.getLogger('sglrl.launch').setLevel(logging.INFO)\n"
    log += "logging.getLogger('sglrl.launch').addHandler(logging.StreamHandler())"
    assert notebook.run(log).error == ""
    cell = notebook.run(LAUNCH, interrupt_at="0 of 1 ready")
    assert cell.error == "CancelledError"
    assert cell.stderr.endswith("interrupted\n")
    # Only the fork server is left, for the next start.
    assert "sglrl worker" not in descendants(notebook.pid).values()
    assert notebook.run("logging.getLogger('sglrl.launch').setLevel(logging.WARNING)").error == ""


def test_the_notebook_runs(notebook: Notebook) -> None:
    assert all(cell.get("outputs", []) == [] for cell in CELLS), "commit it without outputs"
    cells = [notebook.run(code) for code in CODES]
    assert [cell.error for cell in cells] == [""] * 6
    launch, call, stream, samples, rollout, close = cells
    line = r"sglrl: starting 1 worker of tiny \.\.\. ready in [\d.]+ s\n"
    assert re.fullmatch(line, launch.stderr)
    assert launch.shown[0]["text/plain"].startswith("<Client of tiny")
    (shown,) = call.shown
    assert ">2 + 2 =</span>" in shown["text/html"]
    assert "7 prompt + 8 new tokens" in shown["text/plain"]
    assert stream.stdout
    assert len(json.loads(samples.shown[0]["text/plain"])) == 3
    (group,) = rollout.shown
    assert group["text/html"].count(">2 + 2 =</span>") == 2
    assert "2 trajectories, 0 failed" in group["text/plain"]
    assert [cell.stderr for cell in cells[1:]] == [""] * 5
    assert close.shown == []


def test_an_interrupt_of_a_call(notebook: Notebook) -> None:
    assert notebook.run(f"import sglrl\n{LAUNCH}").error == ""
    call = 'client.generate("2 + 2 =", n=32, max_new_tokens=2000, ignore_eos=True)'
    cell = notebook.run(f'print("begin")\nawait {call}', interrupt_at="begin")
    assert cell.error == "CancelledError"
    # The engine has stopped the requests, and the client works.
    assert notebook.run("await client.abort()").shown == [{"text/plain": "0"}]
    cell = notebook.run('await client.generate("2 + 2 =", max_new_tokens=8)')
    assert "8 new tokens" in cell.shown[0]["text/plain"]
    # The kernel ends without ``client.close()``. All its processes end too.
    below = descendants(notebook.pid)
    assert "sglrl worker" in below.values()
    notebook.close()
    assert wait_for_end(list(below), 30) == []
