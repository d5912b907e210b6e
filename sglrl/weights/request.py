"""What is asked for when weights are to be updated, and where they come from."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Protocol

import msgspec

from ..core.manifest import default_bucket_bytes, total_bytes
from ..errors import UsageError
from ..messages import RankSettings, TensorSpec, ToRank

INFLIGHT = ("continue", "retract", "abort", "drain")
MODES = ("auto", "full", "bucketed")

_LARGEST_VERSION = 1 << 62


class Source(Protocol):
    """Where the tensors of an update come from: the sender, rank 0 of the group."""

    @property
    def settings(self) -> RankSettings: ...

    def ask(self, message: ToRank) -> None:
        """Begin; a ``RankAnswer`` comes to ``WeightChannel.sender_answered``."""


class UpdateRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One update as its caller wants it. ``bucket_bytes``: None for a size that suits the model.
    ``folder``: read from there by the workers themselves. ``begun``: when it was called for, on
    ``time.perf_counter``."""

    specs: Sequence[TensorSpec]
    version: int | None = None
    inflight: str = "continue"
    mode: str = "auto"
    partial: bool = False
    total: int = 0
    bucket_bytes: int | None = None
    timeout: float = 60.0
    drain_timeout: float = 600.0
    wait: bool = True
    folder: str = ""
    begun: float = msgspec.field(default_factory=time.perf_counter)

    def with_specs(self, specs: Sequence[TensorSpec], total: int | None = None) -> UpdateRequest:
        """Of these tensors, of ``total`` bytes, in buckets that suit them. ``InvalidWeights`` if
        they are no floats."""
        if total is None:
            total = total_bytes(specs)
        return msgspec.structs.replace(
            self,
            specs=specs,
            total=total,
            bucket_bytes=self.bucket_bytes or default_bucket_bytes(total),
        )

    def check(self, current: int) -> int:
        """The new version. Raises ``UsageError`` for what can be seen to be wrong from here."""
        for name, value, known in (
            ("inflight", self.inflight, INFLIGHT),
            ("mode", self.mode, MODES),
        ):
            if value not in known:
                raise UsageError(f"{name} must be one of {', '.join(known)}, got {value!r}")
        if not self.timeout > 0:
            raise UsageError(f"timeout must be more than 0 seconds, got {self.timeout}")
        if self.bucket_bytes is not None and self.bucket_bytes < 1:
            raise UsageError(f"bucket_bytes must be at least 1, got {self.bucket_bytes}")
        version = current + 1 if self.version is None else self.version
        if isinstance(version, bool) or not isinstance(version, int) or version <= current:
            raise UsageError(
                f"version must be an integer above {current}, the one that the workers have; "
                f"got {version!r}"
            )
        if version > _LARGEST_VERSION:
            raise UsageError(f"version must be at most {_LARGEST_VERSION}, got {version}")
        return version
