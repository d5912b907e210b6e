"""The request of one weight update, and the source of its tensors."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from difflib import get_close_matches
from operator import index
from typing import Any, Protocol, TypedDict

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
"""The largest version, because trajectories store versions as int32."""


class Source(Protocol):
    """The sender of an update's tensors, which is rank 0 of the group."""

    @property
    def settings(self) -> RankSettings: ...

    def ask(self, message: ToRank) -> None:
        """Start the work that the message requests.

        The source passes its ``RankAnswer`` to ``Updates.sender_answered`` later.
        """


class UpdateOptions(TypedDict, total=False):
    """The keyword arguments that ``Client.update_weights`` and ``Sender.update`` have in common."""

    version: int | None
    inflight: str
    mode: str
    partial: bool
    same_version: bool
    bucket_bytes: int | None
    timeout: float
    drain_timeout: float
    wait: bool
    check_finite: bool


class UpdateRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One weight update as its caller requests it.

    Attributes:
        same_version: whether this is a further part of the last update, so the version stays.
        bucket_bytes: the size of a bucket. None selects a size that suits the model.
        folder: the folder from which the workers read the weights themselves, or "".
        seen: the ``fingerprint`` of the files in the folder.
        begun: the time of the call, on ``time.perf_counter``.
    """

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
    same_version: bool = False
    begun: float = msgspec.field(default_factory=time.perf_counter)

    def __post_init__(self) -> None:
        """Replace numpy numbers by Python numbers, because numpy numbers cannot be encoded.

        ``check_values`` rejects values that are not numbers.
        """
        for name, kind, own in (
            ("version", np.integer, int),
            ("bucket_bytes", np.integer, int),
            ("timeout", np.floating, float),
            ("drain_timeout", np.floating, float),
        ):
            if isinstance(value := getattr(self, name), kind):
                force_setattr(self, name, own(value))

    @classmethod
    def of(cls, options: UpdateOptions) -> UpdateRequest:
        """Return the request of an update whose tensors are not known yet.

        Raises:
            TypeError: an update has no option with one of these names.
        """
        known = UpdateOptions.__annotations__
        for name in options.keys() - known.keys():
            near = get_close_matches(name, known, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise TypeError(f"an update has no argument {name!r}{hint}")
        return cls(specs=[], **options)

    def with_specs(self, specs: Sequence[TensorSpec], total: int | None = None) -> UpdateRequest:
        """Return this request for other tensors, with a bucket size that suits them.

        Args:
            total: the total size of the tensors in bytes. None computes the size from ``specs``.

        Raises:
            InvalidWeights: a tensor's dtype is not a float.
        """
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
        """Check the request and return the new version.

        Args:
            current: the current version of the workers.

        Raises:
            UsageError: a value is wrong, the version is not above ``current``, or ``same_version``
                does not fit.
        """
        self.check_values()
        if self.same_version:
            return self._check_same(current)
        version = current + 1 if self.version is None else index(self.version)
        if version <= current:
            raise UsageError(
                f"version must be an integer above {current}, the one that the workers have; "
                f"got {version!r}"
            )
        return version

    def _check_same(self, current: int) -> int:
        if not self.partial:
            raise UsageError(
                "same_version=True is for a further part of an update: pass partial=True, or leave "
                "same_version out if these are all weights"
            )
        if self.version not in (None, current):
            raise UsageError(
                f"same_version=True keeps the version of the last update, {current}, but version "
                f"is {self.version!r}: pass one of them"
            )
        if not current:
            raise UsageError(
                "same_version=True needs an update before: the workers have the weights of the "
                "start, version 0. Send the first part without same_version"
            )
        return current

    def check_values(self) -> None:
        """Check the values that do not depend on the current version of the workers.

        Raises:
            UsageError: a value is wrong.
        """
        for name, value, known in (
            ("inflight", self.inflight, INFLIGHT),
            ("mode", self.mode, MODES),
        ):
            if not isinstance(value, str) or value not in known:
                raise UsageError(f"{name} must be one of {', '.join(known)}, got {value!r}")
        for name, switch in (
            ("partial", self.partial),
            ("same_version", self.same_version),
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
        # "not <=" also rejects NaN.
        if not self.begun <= time.perf_counter():
            raise UsageError("the time at which the update was called for is not in the past")
        _integer("bucket_bytes", self.bucket_bytes, 1, _LARGEST_BUCKET)
        _integer("version", self.version, 0, _LARGEST_VERSION)


def _integer(name: str, value: Any, least: int, most: int) -> None:
    """Check that ``value`` is None or an integer in ``least..most``. A numpy integer is allowed.

    Raises:
        UsageError: the value is neither None nor an integer in this range.
    """
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
