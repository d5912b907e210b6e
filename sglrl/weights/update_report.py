"""The report of one weight update: its result and the time of each part."""

from __future__ import annotations

import time

import msgspec

from ..core.weight_update import COMMIT, JOIN, PREPARE, STAGE


class UpdateReport(msgspec.Struct, frozen=True, kw_only=True):
    """The report of one finished weight update. Times are in milliseconds.

    Attributes:
        version: the policy version that all of ``workers`` have now.
        bytes: the total size of the tensors that were sent.
        workers: the indices of the workers that took part until the end.
        mode: "full" if the weights were staged while generation continued, "bucketed" if they were
            sent during a pause because a worker had no room for a second copy, "disk" if the
            workers read files, or "lora" for a LoRA adapter.
        join_ms: time to form the group of sender and workers; 0 if the group already existed.
        prepare_ms: time until every rank had checked the manifest and allocated memory.
        gather_ms: time to gather, cast and move the tensors on the sender. This work overlaps with
            the broadcast.
        broadcast_ms: time on the sender from the start of the first bucket's broadcast to the end
            of the last bucket's broadcast.
        stage_ms: time until every rank had received all tensors.
        commit_ms: time until every rank had made the new weights live.
        total_ms: time from the call to its return.
        pause_ms: for each worker, in order, the time during which no decode step could run.
        attempts: the number of attempts. The update is repeated when workers are lost.
        lora: the name of the adapter, if the update replaced an adapter. Else "".
        ended: the time at which the update ended, in seconds as ``time.time`` returns them.
    """

    version: int
    bytes: int
    workers: list[int]
    mode: str
    join_ms: float
    prepare_ms: float
    gather_ms: float
    broadcast_ms: float
    stage_ms: float
    commit_ms: float
    total_ms: float
    pause_ms: list[float]
    attempts: int = 1
    lora: str = ""
    ended: float = 0.0

    @property
    def gb_per_s(self) -> float:
        """Return ``bytes`` divided by ``total_ms``, in units of 1e9 bytes per second."""
        return self.bytes / self.total_ms / 1e6 if self.total_ms else 0.0

    def flat(self, prefix: str = "weights/") -> dict[str, float]:
        """Return all numbers of the report, for loggers such as W&B and TensorBoard.

        The keys are the same in every call. "workers" is the number of workers, and "pause_ms" is
        the longest pause of a worker.
        """
        values = msgspec.structs.asdict(self) | {
            "workers": len(self.workers),
            "pause_ms": max(self.pause_ms, default=0.0),
            "gb_per_s": self.gb_per_s,
        }
        for text in ("mode", "lora", "ended"):
            del values[text]
        return {prefix + name: float(value) for name, value in values.items()}

    def __repr__(self) -> str:
        join = f"join {self.join_ms:.0f} + " if self.join_ms else ""
        again = f", attempt {self.attempts}" if self.attempts > 1 else ""
        pause = max(self.pause_ms, default=0.0)
        return (
            f"weights v{self.version}: {_size(self.bytes)} to {len(self.workers)} worker(s) in "
            f"{self.total_ms:.1f} ms ({self.gb_per_s:.1f} GB/s; {join}prepare "
            f"{self.prepare_ms:.1f} + stage {self.stage_ms:.1f} + commit {self.commit_ms:.1f}), "
            f"pause {pause:.1f} ms, {self.mode}{again}"
        )

    __str__ = __repr__


class PhaseTimes:
    """Measures the phases of one update. A repeated attempt measures its phases again.

    Args:
        begun: the time of the call, on ``time.perf_counter``.
    """

    def __init__(self, begun: float) -> None:
        self._begun = begun
        self._at: dict[str, float] = {}

    def enter(self, phase: str) -> None:
        self._at[phase] = time.perf_counter()

    def ended(self) -> dict[str, float]:
        """End the last phase now, and return the times by their names in ``UpdateReport``."""
        at, end = self._at, time.perf_counter()
        return {
            "join_ms": (at[PREPARE] - at[JOIN]) * 1e3 if JOIN in at else 0.0,
            "prepare_ms": (at[STAGE] - at[PREPARE]) * 1e3,
            "stage_ms": (at[COMMIT] - at[STAGE]) * 1e3,
            "commit_ms": (end - at[COMMIT]) * 1e3,
            "total_ms": (end - self._begun) * 1e3,
        }


def _size(count: int) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count} bytes"
