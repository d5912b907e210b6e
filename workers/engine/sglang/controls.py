"""The control endpoints of an SGLang engine, for example ``pause``, ``sleep`` and ``stats``."""

from __future__ import annotations

from typing import Any

from sglang.srt.managers.io_struct import FlushCacheReqInput, ProfileReq, ProfileReqOutput

from sglrl.errors import InvalidRequest
from sglrl.wire.engine import EngineStats, TensorValue

from ..protocol import LATER, Later, check_mode, check_sleep
from . import convert, inspection
from .aborts import Aborts
from .commands import PauseCommand, SleepCommand
from .draining import Draining
from .reports import engine_stats
from .request_table import RequestTable


class Controls:
    """Serves the control endpoints that ``Engine.controls`` documents."""

    def __init__(self, table: RequestTable, aborts: Aborts) -> None:
        self._table = table
        self._aborts = aborts
        self._mailbox = table.mailbox
        self.draining = Draining(table, aborts, self.slept, self.paused)
        self._profiling = inspection.Profiling()
        self._flushes: list[int] = []
        """Ids of the calls that wait for an empty prefix cache."""

    def stats(self, id_: int) -> EngineStats:
        return engine_stats(self._table, self.draining.drains)

    def server_info(self, id_: int) -> dict[str, Any]:
        return inspection.server_info(self._table.scheduler)

    def get_weights(self, id_: int, names: list[str]) -> list[TensorValue]:
        scheduler = self._table.scheduler
        if "weights" in scheduler.sglrl_sleep.asleep:
            raise InvalidRequest('the weights are asleep: await client.wake(["weights"]) first')
        if scheduler.sglrl_sleep.empty:
            raise InvalidRequest("the weights were not kept: update them first")
        assert scheduler.sglrl_weights is not None
        values: list[TensorValue] = scheduler.sglrl_weights.live.named(names)
        return values

    def abort(self, id_: int) -> int:
        # In a paused engine no request finishes, so "wait" first retracts the running requests.
        return self._aborts.all("wait")

    def pause(self, id_: int, mode: str) -> Later:
        check_mode(mode)
        if mode == "abort":
            self._aborts.all("back")
            mode = "in_place"
        self.draining.pause(PauseCommand(id_, mode))
        return LATER

    def resume(self, id_: int) -> Later:
        self.draining.pause(PauseCommand(id_, ""))
        return LATER

    def sleep(self, id_: int, asleep: tuple[str, ...], inflight: str, keep_weights: bool) -> Later:
        check_sleep(asleep, inflight)
        self.draining.sleep(SleepCommand(id_, asleep, inflight, keep_weights))
        return LATER

    def flush_cache(self, id_: int) -> Later:
        self._flushes.append(id_)
        return LATER

    def start_profile(
        self,
        id_: int,
        folder: str,
        activities: tuple[str, ...],
        with_stack: bool,
        record_shapes: bool,
    ) -> Later:
        started = self._profiling.start(id_, folder, activities, with_stack, record_shapes)
        self._table.incoming.append(started)
        return LATER

    def stop_profile(self, id_: int) -> Later:
        self._table.incoming.append(self._profiling.stop(id_))
        return LATER

    # --- answers that come later ------------------------------------------------------------------

    @property
    def flushing(self) -> bool:
        """Whether a call waits for an empty prefix cache."""
        return bool(self._flushes)

    def pull_flush(self) -> None:
        """Send a flush to SGLang as a request, so that every rank executes it.

        SGLang keeps an answered request in its batch until the next turn of the loop. The flush
        then waits for this turn.
        """
        if not self._flushes:
            return
        if self._table.requests:
            self.flushed(False)
        elif self._table.scheduler.is_fully_idle():
            self._table.incoming.append(FlushCacheReqInput())
        elif self._table.scheduler.sglrl_paused:
            # The loop of a paused engine has no next turn.
            self.flushed(False)

    def flushed(self, success: bool) -> None:
        """Answer the calls that wait for an empty prefix cache."""
        for id_ in self._flushes:
            self._mailbox.put_value(id_, success)
        self._flushes.clear()

    def profiled(self, request: ProfileReq, output: ProfileReqOutput) -> None:
        """Answer the call that has started or stopped the profiler."""
        id_ = convert.call_id(request.rid)
        try:
            self._mailbox.put_value(id_, self._profiling.answered(request, output))
        except InvalidRequest as error:
            self._mailbox.put_error(id_, "InvalidRequest", error.message)
        self._mailbox.flush()

    def slept(self, command: SleepCommand, error: str) -> None:
        """Answer the call of a sleep command that was executed, or replaced by a later command.

        Args:
            error: the reason why the command failed, or "".
        """
        if error:
            self._mailbox.put_error(command.call, "EngineError", error)
        else:
            self._mailbox.put_value(command.call, None)
        self._mailbox.flush()

    def paused(self, command: PauseCommand) -> None:
        """Answer the call of a pause command that was executed, or replaced by a later command."""
        if command.call >= 0:
            self._mailbox.put_value(command.call, None)
            # The loop may have no other reason to flush.
            self._mailbox.flush()
