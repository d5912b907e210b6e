"""The order of requests and commands, and commands that wait until no request runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang.srt.managers.io_struct import TokenizedGenerateReqInput

from .aborts import Aborts
from .commands import ABOUT_REQUESTS, SleepCommand, WeightCommand
from .request_table import RequestTable
from .weight_commands import WeightCommands


class Draining:
    """Puts weight and sleep commands between the requests. True while there is a command.

    Args:
        slept: ``slept(command, "")`` answers the call of a sleep command that was given up.

    Attributes:
        commands: the commands that the scheduler has not executed.
        waiting: the command that waits until the running requests have finished, or None. New
            requests are held back until then.
    """

    def __init__(
        self, table: RequestTable, aborts: Aborts, slept: Callable[[SleepCommand, str], None]
    ) -> None:
        self._table = table
        self._aborts = aborts
        self.commands = WeightCommands(table.mailbox.wake)
        self.waiting: WeightCommand | SleepCommand | None = None
        self._slept = slept
        self._newest: SleepCommand | None = None

    def sleep(self, command: SleepCommand) -> None:
        """Add a sleep command. An earlier one that waits is given up for it."""
        self._newest = command
        self.commands.put(command)

    def __bool__(self) -> bool:
        return bool(self.commands) or self.waiting is not None

    def ordered(self, incoming: list[Any]) -> list[Any]:
        """Append the next weight command to the requests, or hold them back."""
        if self.waiting is not None and self._given_up(self.waiting):
            self.waiting = None
            back, self._table.held_back = self._table.held_back, []
            return [*back, *incoming]
        if self.waiting is None:
            command = self.commands.pop()
            if self._given_up(command):
                return incoming
            if command.inflight == "abort":
                fresh = {r.rid for r in incoming if isinstance(r, TokenizedGenerateReqInput)}
                # A score has no partial result. It is computed again; the command does not wait.
                return [*incoming, *self._aborts.running(fresh, "back"), command]
            if command.inflight != "drain":
                return [*incoming, command]
            self.waiting = command
        requests = (TokenizedGenerateReqInput, *ABOUT_REQUESTS)
        self._table.held_back += [r for r in incoming if isinstance(r, requests)]
        passed = [r for r in incoming if not isinstance(r, requests)]
        if passed or not self._table.scheduler.is_fully_idle():
            return passed
        command, self.waiting = self.waiting, None
        back, self._table.held_back = self._table.held_back, []
        # SGLang only queues these requests before the command. Their prefill uses the new weights.
        return [*back, command]

    def _given_up(self, command: WeightCommand | SleepCommand) -> bool:
        if isinstance(command, SleepCommand):
            if command is self._newest:
                return False
            self._slept(command, "")
            return True
        weights = self._table.scheduler.sglrl_weights
        assert weights is not None
        return bool(weights.given_up(command))
