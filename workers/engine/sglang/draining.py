"""The order of requests and commands, and commands that wait until no request runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang.srt.managers.io_struct import TokenizedGenerateReqInput

from .aborts import Aborts
from .commands import ABOUT_REQUESTS, PauseCommand, SleepCommand
from .request_table import RequestTable
from .weight_commands import Command, WeightCommands


class Draining:
    """Puts commands between the requests. True while there is a command.

    Args:
        slept: ``slept(command, "")`` answers the call of a sleep command that was given up.
        paused: does so for a pause.

    Attributes:
        commands: the commands that the scheduler has not executed.
        waiting: the command that waits until the running requests have finished, or None. New
            requests are held back until then.
    """

    def __init__(
        self,
        table: RequestTable,
        aborts: Aborts,
        slept: Callable[[SleepCommand, str], None],
        paused: Callable[[PauseCommand], None],
    ) -> None:
        self._table = table
        self._aborts = aborts
        self.commands = WeightCommands(table.mailbox.wake)
        self.waiting: Command | None = None
        self._slept = slept
        self._paused = paused
        self._newest_sleep: SleepCommand | None = None
        self._newest_pause: PauseCommand | None = None

    def sleep(self, command: SleepCommand) -> None:
        """Add a sleep command. An earlier one that waits is given up for it."""
        self._newest_sleep = command
        self.commands.put(command)

    def pause(self, command: PauseCommand) -> None:
        """Add a command that pauses or resumes. An earlier one that waits is given up for it."""
        self._newest_pause = command
        if command.mode == "drain":
            self.commands.put(command)
        else:
            self._table.incoming.append(command)

    def __bool__(self) -> bool:
        return bool(self.commands) or self.waiting is not None

    def ordered(self, incoming: list[Any]) -> list[Any]:
        """Append the next command to the requests, or hold them back."""
        if self.waiting is not None and self._given_up(self.waiting):
            self.waiting = None
            back, self._table.held_back = self._table.held_back, []
            return [*back, *incoming]
        if self.waiting is None:
            command = self.commands.pop()
            if self._given_up(command):
                return incoming
            inflight = self._inflight(command)
            if inflight == "abort":
                fresh = {r.rid for r in incoming if isinstance(r, TokenizedGenerateReqInput)}
                # A score has no partial result. It is computed again; the command does not wait.
                return [*incoming, *self._aborts.running(fresh, "back"), command]
            if inflight != "drain":
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

    def _inflight(self, command: Command) -> str:
        if not isinstance(command, PauseCommand):
            return command.inflight
        # In an engine that is paused, no request finishes.
        return "continue" if self._table.scheduler.sglrl_paused else command.mode

    def _given_up(self, command: Command) -> bool:
        if isinstance(command, SleepCommand):
            if command is self._newest_sleep:
                return False
            self._slept(command, "")
            return True
        if isinstance(command, PauseCommand):
            if command is self._newest_pause:
                return False
            self._paused(command)
            return True
        weights = self._table.scheduler.sglrl_weights
        assert weights is not None
        return bool(weights.given_up(command))
