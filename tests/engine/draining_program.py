"""Any sequence of commands and requests, against a scheduler that only counts steps.

It imports SGLang, so it is a program: ``python -m engine.draining_program``.
"""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any, NamedTuple

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    rule,
    run_state_machine_as_test,
)

from sglrl_workers.engine.sglang import draining
from sglrl_workers.engine.sglang.commands import PauseCommand, SleepCommand, WeightCommand

KINDS = ["continue", "retract", "abort", "drain"]
MAX_TURNS = 200


class Request(NamedTuple):
    """In place of SGLang's request. ``rid`` ends with the number of its steps."""

    rid: str


class Orders(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.running: dict[str, int] = {}
        """Steps that are left, by request."""
        self.sent: set[str] = set()
        self.finished: list[str] = []
        self.paused = False
        self.asleep = False
        self.answers: list[int] = []
        """Calls that were answered."""
        self.calls: list[int] = []
        self.updates: list[int] = []
        self.wanted: list[int] = []
        scheduler = SimpleNamespace(
            is_fully_idle=lambda: not self.running,
            sglrl_weights=SimpleNamespace(given_up=lambda command: False),
        )
        self.table: Any = SimpleNamespace(
            incoming=[],
            held_back=[],
            mailbox=SimpleNamespace(wake=lambda: None),
            scheduler=scheduler,
        )
        self.aborts: Any = SimpleNamespace(running=self.abort)
        self.draining = draining.Draining(
            self.table,
            self.aborts,
            lambda command, error: self.answers.append(command.call),
            lambda command: self.answers.append(command.call),
        )
        self.show()

    def show(self) -> None:
        self.table.scheduler.sglrl_paused = self.paused or self.asleep

    def abort(self, fresh: set[str], before: str) -> list[Any]:
        """Nothing is aborted that the scheduler has not received."""
        assert fresh == self.sent - self.running.keys() - {*self.finished}
        for rid in self.running:
            self.running[rid] = 1
        return []

    def call(self) -> int:
        self.calls.append(len(self.calls))
        return self.calls[-1]

    # --- what callers do --------------------------------------------------------------------------

    @rule(steps=st.integers(1, 6))
    def request(self, steps: int) -> None:
        request = Request(f"{len(self.sent)}-{steps}")
        self.sent.add(request.rid)
        self.table.incoming.append(request)

    @rule(mode=st.sampled_from(["in_place", "retract", "drain", ""]))
    def pause(self, mode: str) -> None:
        self.draining.pause(PauseCommand(self.call(), mode))

    @rule(inflight=st.sampled_from(["retract", "drain"]), tags=st.sampled_from([(), ("kv_cache",)]))
    def sleep(self, inflight: str, tags: tuple[str, ...]) -> None:
        self.draining.sleep(SleepCommand(self.call(), tags, inflight, True))

    @rule(inflight=st.sampled_from(KINDS))
    def update(self, inflight: str) -> None:
        before = [*self.draining.commands._commands, self.draining.waiting]
        queued = any(isinstance(one, SleepCommand) for one in before)
        if inflight == "drain" and (self.asleep or queued):
            # No request would finish, so the update would wait until its drain_timeout.
            return
        self.wanted.append(len(self.wanted))
        command = WeightCommand(self.wanted[-1], self.wanted[-1], inflight, False)
        self.draining.commands.put(command)

    # --- the scheduler ----------------------------------------------------------------------------

    @rule()
    def turn(self) -> None:
        queued = [*self.draining.commands._commands][:1]
        # A pause that waits holds up no update that could be executed.
        due = [
            one.update
            for one in queued
            if isinstance(one, WeightCommand)
            and one.inflight != "drain"
            and self.draining.waiting is None
        ]
        # A pause that waits alone in a paused engine is executed at once.
        stands = self.paused or self.asleep
        alone = stands and not self.table.incoming and not self.draining.commands
        incoming, self.table.incoming = self.table.incoming, []
        if self.draining:
            incoming = self.draining.ordered(incoming)
            held = self.draining.drains
            assert not (held and any(isinstance(one, Request) for one in incoming))
        for one in incoming:
            if isinstance(one, Request):
                assert one.rid in self.sent
                assert one.rid not in self.running
                assert one.rid not in self.finished
                self.running[one.rid] = int(one.rid.partition("-")[2])
            else:
                self.execute(one)
            self.show()
        assert set(due) <= set(self.updates)
        assert self.draining.drains or not self.table.held_back
        if alone:
            assert self.draining.pausing is None
        if self.paused or self.asleep:
            return
        for rid in [*self.running]:
            self.running[rid] -= 1
            if not self.running[rid]:
                del self.running[rid]
                self.finished.append(rid)

    def execute(self, command: Any) -> None:
        ready = not self.started(command) or self.paused or self.asleep
        match command:
            case PauseCommand():
                assert command.mode != "drain" or ready
                self.paused = bool(command.mode)
                self.answers.append(command.call)
            case SleepCommand():
                assert command.inflight != "drain" or not self.started(command)
                self.asleep = bool(command.asleep)
                self.answers.append(command.call)
            case WeightCommand():
                assert command.inflight != "drain" or not self.started(command)
                self.updates.append(command.update)

    def started(self, command: Any) -> list[str]:
        """Return the requests that have made a step. Others are only queued before the command."""
        return [rid for rid, left in self.running.items() if left < int(rid.partition("-")[2])]

    @invariant()
    def each_once_and_in_order(self) -> None:
        assert len(self.answers) == len(set(self.answers))
        assert self.updates == self.wanted[: len(self.updates)]

    def teardown(self) -> None:
        """Everything ends once the engine is awake and not paused."""
        self.sleep("retract", ())
        self.pause("")
        for _ in range(MAX_TURNS):
            self.turn()
        assert sorted(self.finished) == sorted(self.sent)
        assert sorted(self.answers) == self.calls
        assert self.updates == self.wanted
        assert not self.table.held_back
        assert not self.draining


def main() -> None:
    draining.TokenizedGenerateReqInput = Request  # type: ignore[attr-defined]
    limits = settings(max_examples=1000, stateful_step_count=30, deadline=None, database=None)
    run_state_machine_as_test(Orders, settings=limits)
    print(json.dumps("ok"))


if __name__ == "__main__":
    main()
