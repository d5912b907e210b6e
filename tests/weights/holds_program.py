"""Hold and release an engine's weights as the weight channel does.

The scheduler is otherwise idle. Prints the results as JSON. Run it in the folder of tests:
``python -m weights.holds_program``.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from sglrl_workers.engine.sglang.commands import WeightCommand

COPY, UPDATE, NEXT = 7, 8, 9
SECONDS = 300.0
FOUND: dict[str, Any] = {}
OLD, NEW = 1.0, 2.0


class Rank:
    """An engine's weights, with a scheduler that only executes commands, in its own threads.

    Attributes:
        committed: the error of each update, "" when the update is live.
        retracted: how often running requests were retracted.
    """

    def __init__(self) -> None:
        from sglrl_workers.engine.sglang.weights import SglangWeights

        self.live = torch.full((4,), OLD)
        self.commands: list[WeightCommand] = []
        self.committed: dict[int, str] = {}
        self.retracted = 0
        self.scheduler: Any = SimpleNamespace(
            sglrl_adapter=SimpleNamespace(
                draining=SimpleNamespace(
                    commands=SimpleNamespace(put=self.commands.append, expect_none=lambda: None)
                )
            ),
            tp_worker=SimpleNamespace(model_runner=SimpleNamespace(sglrl_pages=None)),
            sglrl_version=1,
            sglrl_weight_changes=1,
            sglrl_new_keys=lambda: None,
            sglrl_filled=lambda: None,
            sglrl_retract=self._retract,
        )
        self.engine = SglangWeights(self.scheduler, torch.device("cpu"))
        self.engine.channel = SimpleNamespace(committed=self._committed)  # type: ignore[assignment]
        self._threads: list[threading.Thread] = []

    def _committed(self, update: int, pause: Callable[[], float], error: str = "") -> None:
        self.committed[update] = error

    def stage(self, update: int) -> None:
        self.engine.staged(update, [(self.live, torch.full((4,), NEW))])

    def _retract(self) -> None:
        self.retracted += 1

    def execute(self) -> None:
        """Execute the only pending command in a scheduler thread."""
        (command,) = self.commands
        self.commands.clear()
        thread = threading.Thread(target=self.engine.execute, args=(command,), daemon=True)
        thread.start()
        self._threads.append(thread)

    def finish(self) -> None:
        """Wait until the scheduler has executed all commands."""
        for thread in self._threads:
            thread.join(SECONDS)
            assert not thread.is_alive()

    @property
    def state(self) -> tuple[float, int]:
        """The value of all weights, and the version that the scheduler reports for them."""
        (value,) = set(self.live.tolist())
        return value, self.scheduler.sglrl_version


def copy_ends_after_staging() -> list[Any]:
    """Commit an update that is staged before the scheduler notices the end of a peer copy."""
    rank = Rank()
    rank.engine.hold(COPY, "continue")
    rank.execute()
    assert rank.engine.held(COPY, SECONDS)
    rank.stage(UPDATE)
    rank.engine.release(COPY, 5)
    rank.finish()
    after_copy = [rank.state, dict(rank.committed)]
    rank.engine.commit(UPDATE, 6, "continue")
    rank.execute()
    rank.finish()
    return [after_copy, [rank.state, rank.committed]]


def drained() -> list[Any]:
    rank = Rank()
    rank.engine.hold(UPDATE, "drain")
    rank.execute()
    assert rank.engine.held(UPDATE, SECONDS)
    rank.stage(UPDATE)
    rank.engine.release(UPDATE, 6, staged=True)
    rank.finish()
    return [rank.state, rank.committed]


def drained_without_its_weights() -> list[Any]:
    """Release a drained update while only the weights of another update are staged."""
    rank = Rank()
    rank.engine.hold(UPDATE, "drain")
    rank.execute()
    assert rank.engine.held(UPDATE, SECONDS)
    rank.stage(NEXT)
    rank.engine.release(UPDATE, 6, staged=True)
    rank.finish()
    after_release = [rank.state, dict(rank.committed)]
    rank.engine.commit(NEXT, 7, "continue")
    rank.execute()
    rank.finish()
    return [after_release, [rank.state, rank.committed]]


def held_for_which() -> dict[str, bool]:
    rank = Rank()
    found = {}
    rank.engine.hold(COPY, "continue")
    rank.execute()
    found["copy"] = rank.engine.held(COPY, SECONDS)
    found["update, while held for the copy"] = rank.engine.held(UPDATE, 0.0)
    rank.engine.release(COPY, None)
    rank.finish()
    found["copy, when it is over"] = rank.engine.held(COPY, 0.0)
    # The update is cancelled before the scheduler executes its hold, so nothing is held for it.
    rank.engine.release(UPDATE, None)
    rank.engine.hold(UPDATE, "continue")
    found["update, given up before"] = rank.engine.held(UPDATE, 0.0)
    rank.execute()
    rank.finish()
    rank.engine.hold(NEXT, "continue")
    rank.execute()
    found["next"] = rank.engine.held(NEXT, SECONDS)
    # An older update that is cancelled does not end the hold of a newer one.
    rank.engine.release(COPY, 4)
    found["next, when an older one is released"] = rank.engine.held(NEXT, 0.0)
    rank.engine.release(NEXT, 9)
    rank.finish()
    found["version is that of next"] = rank.state == (OLD, 9)
    return found


def cancelled() -> dict[str, Any]:
    """Cancel an update before the scheduler executes its hold, which every rank has received."""
    rank = Rank()
    rank.engine.hold(UPDATE, "retract")
    found: list[bool] = []
    waits = threading.Thread(
        target=lambda: found.append(rank.engine.held(UPDATE, SECONDS)), daemon=True
    )
    waits.start()
    rank.engine.release(UPDATE, None)
    waits.join(SECONDS / 2)
    rank.execute()
    rank.finish()
    return {"held": found, "retracted": rank.retracted, "state": rank.state}


def main() -> None:
    for scenario in (
        copy_ends_after_staging,
        drained,
        drained_without_its_weights,
        held_for_which,
        cancelled,
    ):
        FOUND[scenario.__name__] = scenario()
    print(json.dumps(FOUND))


if __name__ == "__main__":
    main()
