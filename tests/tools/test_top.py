"""``sglrl top``: the application with Textual's pilot, and the printed snapshot."""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest_asyncio
import torch
from textual.pilot import Pilot
from textual.widgets import DataTable, Static, TabbedContent

import sglrl
from sglrl.control.snapshot import Snapshot
from sglrl.remote.running_pools import running_pools
from sglrl.tools.top.app import Question, Text, Top
from sglrl.tools.top.tables import Table, fitting, tables_of

SCREENSHOTS = os.environ.get("SGLRL_SCREENSHOTS")
"""The folder for screenshots. The documentation shows those in ``docs``."""
_FONTS = re.compile(r"@font-face \{.*?\}\s*", re.DOTALL)


@pytest_asyncio.fixture
async def client() -> AsyncIterator[sglrl.Client]:
    async with sglrl.launch("tiny", engine="fake", replicas=3) as client:
        yield client


class Watched(Top):  # type: ignore[misc]
    """Lets a test wait for a snapshot of a kind."""

    latest: Snapshot | None = None

    def show(self, snapshot: Snapshot) -> None:
        super().show(snapshot)
        self.latest = snapshot
        self.shown.set()

    def exit(self, *args: Any, **kwargs: Any) -> None:
        super().exit(*args, **kwargs)
        self.ended.set()

    async def until(self, condition: Callable[[Snapshot], bool]) -> Snapshot:
        """Wait until a snapshot is shown for which ``condition`` is true."""
        async with asyncio.timeout(60):
            while self.latest is None or not condition(self.latest):
                await self.shown.wait()
                self.shown.clear()
        return self.latest

    async def until_screen(self, kind: type[Any]) -> Any:
        async with asyncio.timeout(60):
            while not isinstance(self.screen, kind):
                await self.shown.wait()
                self.shown.clear()
        return self.screen


def app_of(client: sglrl.Client) -> Watched:
    app = Watched(client, 0.1)
    app.shown, app.ended = asyncio.Event(), asyncio.Event()
    return app


def screenshot(app: Top, name: str, folder: Path) -> str:
    """Save the screen as an SVG that loads no fonts from other hosts, and return its text."""
    text = _FONTS.sub("", app.export_screenshot())
    Path(SCREENSHOTS or folder, f"{name}.svg").write_text(text, encoding="utf-8")
    assert "url(" not in text.replace("url(#", "")
    return text.replace("&#160;", " ")


async def test_a_worker_is_killed_after_a_question_and_returns(
    client: sglrl.Client, tmp_path: Path
) -> None:
    app = app_of(client)
    async with app.run_test(size=(80, 24)) as pilot:
        await app.until(lambda snapshot: len(snapshot.workers) == 3)
        pid = client.workers[1].pid
        await pilot.press("down", "k")
        assert isinstance(app.screen, Question)
        await pilot.press("n")
        assert not isinstance(app.screen, Question)
        assert client.workers[1].pid == pid
        await pilot.press("k")
        assert "Kill worker 1 now?" in screenshot(app, "top-question", tmp_path)
        await pilot.press("y")
        snapshot = await app.until(
            lambda snapshot: (
                snapshot.workers[1].history.restarts == 1
                and snapshot.workers[1].info.state == "ready"
            )
        )
        assert [one.history.restarts for one in snapshot.workers] == [0, 1, 0]
        assert client.workers[1].pid != pid
        table = app.query_one("#workers-table", DataTable)
        assert table.get_row_at(1)[:2] == ["1", "ready"]
        assert table.cursor_row == 1
        await pilot.press("q")
    assert app.return_value is None


async def test_pause_and_resume_are_shown(client: sglrl.Client) -> None:
    app = app_of(client)
    async with app.run_test(size=(80, 24)) as pilot:
        await pilot.press("p")
        await app.until(lambda snapshot: "paused" in snapshot.held)
        assert "held: generation is paused" in str(app.query_one("#headline", Static).content)
        await pilot.press("u")
        await app.until(lambda snapshot: not snapshot.held)


async def test_drain_and_restart(client: sglrl.Client) -> None:
    app = app_of(client)
    async with app.run_test(size=(80, 24)) as pilot:
        await app.until(lambda snapshot: len(snapshot.workers) == 3)
        await pilot.press("r", "y")
        await app.until(lambda snapshot: snapshot.workers[0].history.restarts == 1)
        await app.until(lambda snapshot: snapshot.workers[0].info.state == "ready")
        await pilot.press("down", "down", "d", "y")
        await app.until(lambda snapshot: snapshot.workers[2].info.state == "retired")
        assert app.query_one("#workers-table", DataTable).row_count == 2


async def test_stacks_are_shown(client: sglrl.Client) -> None:
    app = app_of(client)
    async with app.run_test(size=(80, 24)) as pilot:
        await app.until(lambda snapshot: len(snapshot.workers) == 3)
        await pilot.press("s")
        screen = await app.until_screen(Text)
        assert "most recent call first" in str(screen.query_one(Static).content)
        await pilot.press("escape")
        assert not isinstance(app.screen, Text)


async def agent(session: Any, item: Any) -> float:
    await session.generate(max_new_tokens=8)
    return float(item["reward"])


async def test_all_tabs_show_a_running_pool(client: sglrl.Client, tmp_path: Path) -> None:
    items = [{"prompt": f"{i}", "reward": i % 2} for i in range(50)]
    run = sglrl.rollout(client, agent, items, group_size=4, batch_size=4, max_staleness=1)
    app = app_of(client)
    async with run, sglrl.serve(client) as gateway, gateway.session():
        await run.take(4)
        await client.update_weights({"w": torch.zeros(100, 100)})
        async with app.run_test(size=(100, 30)) as pilot:
            await app.until(lambda snapshot: bool(snapshot.gateways and snapshot.rollouts))
            shown = {}
            for tab in ("workers", "weights", "rollouts", "gateway", "hosts"):
                app.query_one(TabbedContent).active = tab
                await until_shown(pilot)
                shown[tab] = screenshot(app, f"top-{tab}", tmp_path)
    assert "3 ready" in shown["workers"]
    assert "worker 0" in shown["weights"]
    assert "groups by staleness" in shown["rollouts"]
    assert "4 of 50" in shown["rollouts"]
    assert gateway.url in shown["gateway"]
    assert "all workers run on the machine of the pool" in shown["hosts"]


async def until_shown(pilot: Pilot[Any]) -> None:
    await pilot.pause()
    await pilot.app.animator.wait_until_complete()
    await pilot.pause()


async def test_the_end_of_the_pool_ends_the_application() -> None:
    async with sglrl.launch("tiny", engine="fake") as pool:
        client = await sglrl.connect(pool.address)
        app = app_of(client)
        async with app.run_test(size=(80, 24)):
            await app.until(lambda snapshot: True)
            await pool.close()
            async with asyncio.timeout(60):
                await app.ended.wait()
        assert "closed" in app.return_value
        await client.close()


def run_top(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "sglrl", "top", *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "COLUMNS": "80", **environment},
    )


async def test_a_snapshot_is_printed_in_80_columns_or_as_json(client: sglrl.Client) -> None:
    # Another test may use another pool of this process.
    (name,) = [one.name for one in running_pools() if one.entry.address in client.address]
    printed = await asyncio.to_thread(run_top, "--once", name)
    assert printed.returncode == 0, printed.stderr
    assert "3 ready" in printed.stdout
    assert max(map(len, printed.stdout.splitlines())) <= 80
    # The address has a secret, so it may be in the environment.
    as_json = await asyncio.to_thread(run_top, "--once", "--json", SGLRL_POOL=client.address)
    assert as_json.returncode == 0, as_json.stderr
    assert [one["info"]["state"] for one in json.loads(as_json.stdout)["workers"]] == ["ready"] * 3


def test_without_a_pool_the_error_says_what_to_do(tmp_path: Path) -> None:
    ended = run_top("--once", TMPDIR=str(tmp_path))
    assert ended.returncode == 2
    assert "no pool of this user runs on this machine; pass client.address" in ended.stderr
    for wrong, why in (
        (("--json",), "--json needs --once"),
        (("--web", "--once"), "give one of them"),
        (("1.7",), "'1.7' is neither an address nor a pool of this user"),
        (("--keys", "keys"), "--keys needs the address"),
    ):
        ended = run_top(*wrong)
        assert ended.returncode == 2
        assert why in ended.stderr


async def test_several_pools_of_a_program_have_names(client: sglrl.Client) -> None:
    async with sglrl.launch("tiny", engine="fake") as second:
        names = {one.entry.address: one.name for one in running_pools()}
        refused = await asyncio.to_thread(run_top, "--once")
        assert refused.returncode == 2
        assert "several pools run on this machine; choose one:" in refused.stderr
        for chosen, ready in ((client, 3), (second, 1)):
            name = next(name for address, name in names.items() if address in chosen.address)
            assert f"\n  {name}  " in refused.stderr
            shown = await asyncio.to_thread(run_top, "--once", name)
            assert f"{ready} ready" in shown.stdout


def test_columns_that_fit() -> None:
    table = Table(("id", "state", "what"), [["1", "ready", "x" * 30]], ["1"])
    assert fitting(table, 80) == table
    assert fitting(table, 20).columns == ("id", "state")
    assert fitting(table, 1).columns == ("id", "state")


async def test_numbers_in_the_tables(client: sglrl.Client) -> None:
    await client.update_weights({"w": torch.zeros(100, 100)})
    snapshot = await client.snapshot()
    tables = tables_of(snapshot)
    (row,) = tables["Weights"].rows
    assert row[0] == "1"
    assert row[2] == "40 kB"
    assert row[3] == f"{snapshot.updates[0].total_ms:.1f}"
    pauses = snapshot.updates[0].pause_ms
    assert row[6] == f"worker {pauses.index(max(pauses))}"
    assert len(tables["Workers"].rows[0]) == len(tables["Workers"].columns)
