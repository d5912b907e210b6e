"""Order commands and requests for SGLang, and delay commands until no request runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang.srt.managers.io_struct import TokenizedGenerateReqInput

from .aborts import Aborts
from .commands import ABOUT_REQUESTS, PauseCommand, SleepCommand, WeightCommand
from .request_table import RequestTable
from .weight_commands import WeightCommands


class Draining:
    """Puts commands between requests. True while a command waits or a request is held back.

    Args:
        slept: ``slept(command, "")`` answers the call of a sleep command that was given up.
        paused: answers the call of a pause command that was given up.

    Attributes:
        commands: the commands that the scheduler has not executed.
        waiting: the weight or sleep command that waits until the running requests finish, or None.
            New requests are held back until then.
        pausing: the pause command that waits until the running requests finish, or None. Other
            commands are executed first.
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
        self.waiting: WeightCommand | SleepCommand | None = None
        self.pausing: PauseCommand | None = None
        self._slept = slept
        self._paused = paused
        self._newest: SleepCommand | None = None

    def sleep(self, command: SleepCommand) -> None:
        """Add a sleep command. It replaces an earlier sleep command that still waits."""
        self._newest = command
        self.commands.put(command)

    def pause(self, command: PauseCommand) -> None:
        """Add a command that pauses or resumes. It replaces an earlier pause that still waits."""
        if self.pausing is not None:
            self._paused(self.pausing)
            self.pausing = None
        if command.mode == "drain":
            self.pausing = command
        else:
            self._table.incoming.append(command)

    @property
    def drains(self) -> bool:
        """Whether new requests are held back until the running requests have finished."""
        return self.waiting is not None or self.pausing is not None

    def __bool__(self) -> bool:
        return bool(self.commands) or self.drains or bool(self._table.held_back)

    def ordered(self, incoming: list[Any]) -> list[Any]:
        """Return the requests and commands for SGLang now. Hold other requests back."""
        if self.waiting is not None and self._given_up(self.waiting):
            self.waiting = None
        commands = self._next(incoming) if self.waiting is None and self.commands else []
        if not self.drains:
            return [*self._released(), *incoming, *commands]
        requests = (TokenizedGenerateReqInput, *ABOUT_REQUESTS)
        self._table.held_back += [r for r in incoming if isinstance(r, requests)]
        passed = [*(r for r in incoming if not isinstance(r, requests)), *commands]
        scheduler = self._table.scheduler
        if self.pausing is not None and scheduler.sglrl_paused and not passed:
            # No request finishes in a paused engine, so do not wait.
            return self._pause()
        if passed or not scheduler.is_fully_idle():
            return passed
        if self.waiting is None:
            return self._pause()
        command, self.waiting = self.waiting, None
        # SGLang only queues the requests before the command, so their prefill uses new weights.
        return [*self._released(), command]

    def _next(self, incoming: list[Any]) -> list[Any]:
        """Return the next command's aborts, and the command. Return [] if it waits or is over."""
        command = self.commands.pop()
        if self._given_up(command):
            return []
        if command.inflight == "drain":
            self.waiting = command
            return []
        if command.inflight != "abort":
            return [command]
        unsent = [*self._table.held_back, *incoming]
        fresh = {r.rid for r in unsent if isinstance(r, TokenizedGenerateReqInput)}
        # A scoring request has no partial result, so it is computed again after the command.
        return [*self._aborts.running(fresh, "back"), command]

    def _pause(self) -> list[Any]:
        command, self.pausing = self.pausing, None
        return [*self._released(), command]

    def _released(self) -> list[Any]:
        """Return the requests that were held back, unless another command drains."""
        if self.drains:
            return []
        back, self._table.held_back = self._table.held_back, []
        return back

    def _given_up(self, command: WeightCommand | SleepCommand) -> bool:
        if isinstance(command, SleepCommand):
            if command is self._newest:
                return False
            self._slept(command, "")
            return True
        weights = self._table.scheduler.sglrl_weights
        assert weights is not None
        return bool(weights.given_up(command))
