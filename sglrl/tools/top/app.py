"""The Textual application of ``sglrl top``."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, ClassVar, Final

from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.screen import ModalScreen
from textual.widgets import DataTable, Footer, Static, TabbedContent, TabPane

from ...client.client import Client
from ...control.snapshot import Snapshot
from ...errors import Closed, SglrlError
from .tables import Table, headline, tables_of

_TITLES: Final = ("Workers", "Weights", "Rollouts", "Gateway", "Hosts")


class Question(ModalScreen[bool]):  # type: ignore[misc]
    """Asks before something ends. ``y`` confirms, and any other key does not."""

    CSS = """
    Question { align: center middle; }
    #question { width: auto; max-width: 90%; padding: 1 2; border: thick $error; }
    """

    def __init__(self, text: str) -> None:
        super().__init__()
        self._text = text

    def compose(self) -> ComposeResult:
        text = f"{self._text}\n\ny: yes    any other key: no"
        yield Static(text, id="question", markup=False)

    def on_key(self, event: Any) -> None:
        event.stop()
        self.dismiss(event.key == "y")


class Text(ModalScreen[None]):  # type: ignore[misc]
    """Shows a long text, which scrolls. Escape closes it."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape,q", "dismiss", "close")]

    def __init__(self, text: str) -> None:
        super().__init__()
        self._text = text

    def compose(self) -> ComposeResult:
        yield VerticalScroll(Static(self._text, markup=False))
        yield Footer()


class Top(App[str]):  # type: ignore[misc]
    """Shows the snapshots of a pool, and acts on its workers.

    The app returns the reason for which it ended, or None if the user has quit.

    Args:
        client: a client of the pool, which is open while the app runs.
        interval: seconds between two snapshots.
    """

    TITLE = "sglrl top"
    ENABLE_COMMAND_PALETTE = False
    CSS = """
    Screen { overflow: hidden; }
    #headline { height: auto; padding: 0 1; }
    TabbedContent, DataTable { height: 1fr; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("q", "quit", "quit"),
        Binding("s", "stacks", "stacks"),
        Binding("d", "drain", "drain"),
        Binding("r", "restart", "restart"),
        Binding("k", "kill", "kill"),
        Binding("p", "pause", "pause"),
        Binding("u", "resume", "resume"),
        Binding("1", "tab(0)", "tabs", key_display="1-5"),
        *(Binding(str(number), f"tab({number - 1})", show=False) for number in range(2, 6)),
    ]

    def __init__(self, client: Client, interval: float) -> None:
        super().__init__()
        self._client = client
        self._interval = interval
        self._pending: set[asyncio.Task[None]] = set()

    def compose(self) -> ComposeResult:
        yield Static("connecting", id="headline", markup=False)
        with TabbedContent():
            for title in _TITLES:
                with TabPane(title, id=title.lower()):
                    yield DataTable(id=f"{title.lower()}-table", cursor_type="row")
        yield Footer()

    def on_mount(self) -> None:
        self.query_one("#workers-table").focus()
        self._run(self._refresh())

    # --- snapshots --------------------------------------------------------------------------------

    async def _refresh(self) -> None:
        """Take snapshots until the app or the pool ends."""
        while True:
            try:
                snapshot = await self._client.snapshot()
            except Closed as error:
                self.exit(error.message)
                return
            except SglrlError as error:
                self.query_one("#headline", Static).update(f"no answer: {error.message}")
            else:
                self.show(snapshot)
            await asyncio.sleep(self._interval)

    def show(self, snapshot: Snapshot) -> None:
        """Show a snapshot in all tables."""
        # A modal screen may be on top of the tables.
        base = self.screen_stack[0]
        base.query_one("#headline", Static).update(headline(snapshot))
        for title, table in tables_of(snapshot).items():
            _fill(base.query_one(f"#{title.lower()}-table", DataTable), table)

    # --- actions ----------------------------------------------------------------------------------

    def action_tab(self, index: int) -> None:
        name = _TITLES[index].lower()
        self.query_one(TabbedContent).active = name
        self.query_one(f"#{name}-table").focus()

    def action_stacks(self) -> None:
        worker = self._chosen()
        if worker is not None:
            self._run(self._show_stacks(worker))

    async def _show_stacks(self, worker: int) -> None:
        text = await self._client.worker_stacks(worker)
        self.push_screen(Text(text or f"worker {worker} writes no stacks: it is stopped"))

    def action_drain(self) -> None:
        self._ask("Let worker {} finish its calls, then remove it?", self._client.remove_worker)

    def action_restart(self) -> None:
        self._ask("Let worker {} finish its calls, then restart it?", self._client.restart_worker)

    def action_kill(self) -> None:
        self._ask(
            "Kill worker {} now? Its calls continue on other workers, and it is replaced.",
            self._client.kill_worker,
        )

    def action_pause(self) -> None:
        self._run(self._client.pause(), "the pool is paused; u resumes it")

    def action_resume(self) -> None:
        self._run(self._client.resume(), "the pool is resumed")

    def _chosen(self) -> int | None:
        """Return the worker under the cursor, if any."""
        table = self.query_one("#workers-table", DataTable)
        if self.query_one(TabbedContent).active != "workers" or not table.row_count:
            self.notify("choose a worker in the tab Workers first", severity="warning")
            return None
        row, _ = table.coordinate_to_cell_key(table.cursor_coordinate)
        return int(row.value or 0)

    def _ask(self, question: str, act: Callable[[int], Awaitable[None]]) -> None:
        worker = self._chosen()
        if worker is None:
            return

        def answered(yes: bool | None) -> None:
            if yes:
                self._run(act(worker), f"done: worker {worker}")

        self.push_screen(Question(question.format(worker)), answered)

    def _run(self, work: Awaitable[None], done: str = "") -> None:
        """Run ``work`` in a task, and show its end."""

        async def run() -> None:
            try:
                await work
            except SglrlError as error:
                self.notify(error.message, severity="error", timeout=10)
            else:
                if done:
                    self.notify(done)

        task = asyncio.create_task(run())
        self._pending.add(task)
        task.add_done_callback(self._pending.discard)

    def on_unmount(self) -> None:
        for task in self._pending:
            task.cancel()


def _fill(widget: DataTable[str], table: Table) -> None:
    """Show a table.

    The cursor stays on its row, if the row still exists. In the first row it stays at the top,
    where the newest rows are.
    """
    rows, keys = list(widget.rows), [str(key.value) for key in widget.rows]
    columns = [str(column.label) for column in widget.columns.values()]
    if columns == [*table.columns] and keys == [*table.keys]:
        for key, cells in zip(rows, table.rows, strict=True):
            for column, cell in zip(widget.columns, cells, strict=True):
                widget.update_cell(key, column, cell, update_width=True)
        return
    at = widget.cursor_row
    chosen = keys[at] if at < len(keys) else ""
    widget.clear(columns=True)
    widget.add_columns(*table.columns)
    for key, cells in zip(table.keys, table.rows, strict=True):
        widget.add_row(*cells, key=key)
    if at and chosen in table.keys:
        widget.move_cursor(row=[*table.keys].index(chosen))
