"""What is asked for when weights are to be updated, and where they come from."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from operator import index
from typing import Any, Protocol

import msgspec
import numpy as np
from msgspec.structs import force_setattr

from ..core.manifest import default_bucket_bytes, total_bytes
from ..errors import UsageError
from ..wire.weights import RankSettings, TensorSpec, ToRank

INFLIGHT = ("continue", "retract", "abort", "drain")
MODES = ("auto", "full", "bucketed")

_LARGEST_BUCKET = 1 << 62
_LARGEST_VERSION = (1 << 31) - 1
"""Trajectories have versions as int32."""


class Source(Protocol):
    """Where the tensors of an update come from: the sender, rank 0 of the group."""

    @property
    def settings(self) -> RankSettings: ...

    def ask(self, message: ToRank) -> None:
        """Begin; a ``RankAnswer`` comes to ``WeightChannel.sender_answered``."""


class UpdateRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One update as its caller wants it. ``bucket_bytes``: None for a size that suits the model.
    ``folder``: read from there by the workers themselves. ``seen``: its files' ``fingerprint``.
    ``begun``: when it was called for, on ``time.perf_counter``."""

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
    check_finite: bool = True
    folder: str = ""
    seen: list[tuple[str, int, int, int]] = []
    begun: float = msgspec.field(default_factory=time.perf_counter)

    def __post_init__(self) -> None:
        """Python's own numbers in the place of numpy's, which have no encoding. What is none is
        found by ``check_values``."""
        for name, kind, own in (
            ("version", np.integer, int),
            ("bucket_bytes", np.integer, int),
            ("timeout", np.floating, float),
            ("drain_timeout", np.floating, float),
        ):
            if isinstance(value := getattr(self, name), kind):
                force_setattr(self, name, own(value))

    def with_specs(self, specs: Sequence[TensorSpec], total: int | None = None) -> UpdateRequest:
        """Of these tensors, of ``total`` bytes, in buckets that suit them. ``InvalidWeights`` if
        they are no floats."""
        if total is None:
            total = total_bytes(specs)
        wanted = self.bucket_bytes
        return msgspec.structs.replace(
            self,
            specs=specs,
            total=total,
            bucket_bytes=default_bucket_bytes(total) if wanted is None else index(wanted),
        )

    def check(self, current: int) -> int:
        """The new version. Raises ``UsageError`` for what can be seen to be wrong from here."""
        self.check_values()
        version = current + 1 if self.version is None else index(self.version)
        if version <= current:
            raise UsageError(
                f"version must be an integer above {current}, the one that the workers have; "
                f"got {version!r}"
            )
        return version

    def check_values(self) -> None:
        """The same, as far as it does not depend on the version that the workers have."""
        for name, value, known in (
            ("inflight", self.inflight, INFLIGHT),
            ("mode", self.mode, MODES),
        ):
            if not isinstance(value, str) or value not in known:
                raise UsageError(f"{name} must be one of {', '.join(known)}, got {value!r}")
        for name, switch in (
            ("partial", self.partial),
            ("wait", self.wait),
            ("check_finite", self.check_finite),
        ):
            if not isinstance(switch, bool):
                raise UsageError(f"{name} must be True or False, got {switch!r}")
        for name, seconds in (("timeout", self.timeout), ("drain_timeout", self.drain_timeout)):
            number = isinstance(seconds, (int, float)) and not isinstance(seconds, bool)
            if not (number and 0 < seconds < math.inf):
                raise UsageError(
                    f"{name} must be a finite number of more than 0 seconds, got {seconds!r}"
                )
        # Of NaN this is not true either.
        if not self.begun <= time.perf_counter():
            raise UsageError("the time at which the update was called for is not in the past")
        _integer("bucket_bytes", self.bucket_bytes, 1, _LARGEST_BUCKET)
        _integer("version", self.version, 0, _LARGEST_VERSION)


def _integer(name: str, value: Any, least: int, most: int) -> None:
    """Raise ``UsageError`` unless it is one (numpy's, too), or None."""
    if value is None:
        return
    try:
        number = index(value)
    except TypeError:
        number = None
    if number is None or isinstance(value, (bool, np.bool_)):
        raise UsageError(f"{name} must be an integer, got {value!r}")
    if not least <= number <= most:
        raise UsageError(f"{name} must be in {least}..{most}, got {value}")
