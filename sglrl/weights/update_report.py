"""What one update did, and how long each part of it took."""

from __future__ import annotations

import msgspec


class UpdateReport(msgspec.Struct, frozen=True, kw_only=True):
    """One finished weight update. Times are milliseconds.

    Attributes:
        version: the policy version that all of ``workers`` have now.
        bytes: of the tensors sent.
        workers: indices of the workers that took part to the end.
        mode: "full" (staged while generation goes on), "bucketed" (under a pause, where some worker
            had no room for a second copy), or "disk".
        join_ms: forming the group of sender and workers; 0 when it was there already.
        prepare_ms: until every rank had checked the manifest and made room.
        gather_ms: gathering, casting and moving the tensors, on the sender; it goes on at the same
            time as the broadcast.
        broadcast_ms: from the first bucket's broadcast to the end of the last, on the sender.
        stage_ms: until every rank had everything.
        commit_ms: until every rank had made it live.
        total_ms: from the call to its return.
        pause_ms: of each worker, in order: for how long no decode step could run.
        attempts: more than 1 if workers were lost on the way and it was done again without them.
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

    @property
    def gb_per_s(self) -> float:
        """Bytes over the whole time, in 1e9 bytes a second."""
        return self.bytes / self.total_ms / 1e6 if self.total_ms else 0.0

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


def _size(count: int) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count} bytes"
