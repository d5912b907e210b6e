"""The values of an update request."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import numpy as np
import pytest

from sglrl.errors import UsageError
from sglrl.weights.update_request import UpdateRequest
from sglrl.wire.codec import encode

from .weight_pool import SPECS


@pytest.mark.parametrize(
    "version", [0, -1, 1 << 31, (1 << 62) + 1, (1 << 64) - 1, 10**30, True, np.True_, 1.0, "7"]
)
def test_versions_that_are_none(version: Any) -> None:
    with pytest.raises(UsageError, match="version must be"):
        UpdateRequest(specs=SPECS, version=version).check(0)


def test_versions_of_other_types() -> None:
    assert UpdateRequest(specs=SPECS, version=np.int64(7)).check(3) == 7


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("version", np.int64(7)),
        ("bucket_bytes", np.uint32(4096)),
        ("timeout", np.float32(2.5)),
        ("timeout", np.float64(2.5)),
        ("drain_timeout", np.float64(2.5)),
    ],
)
def test_numbers_of_numpy_can_be_sent(name: str, value: Any) -> None:
    request = UpdateRequest(specs=SPECS, **{name: value})
    request.check_values()
    assert msgspec.msgpack.decode(encode(getattr(request, name))) == value


@pytest.mark.parametrize(
    "wrong",
    [
        {"inflight": None},
        {"inflight": "later"},
        {"mode": ["full"]},
        {"partial": 1},
        {"same_version": 1},
        {"wait": "no"},
        {"bucket_bytes": 0},
        {"bucket_bytes": 1.5},
        {"bucket_bytes": True},
        {"bucket_bytes": 1 << 70},
        *(
            {name: value}
            for name in ("timeout", "drain_timeout")
            for value in (0, -1, math.nan, math.inf, None, "5", True)
        ),
    ],
)
def test_values_that_no_update_can_have(wrong: dict[str, Any]) -> None:
    (name,) = wrong
    with pytest.raises(UsageError, match=f"^{name} must be"):
        UpdateRequest(specs=SPECS, **wrong).check(0)


def test_a_part_of_the_same_version() -> None:
    part = UpdateRequest(specs=SPECS, partial=True, same_version=True)
    assert part.check(3) == 3
    assert msgspec.structs.replace(part, version=3).check(3) == 3
    for wrong, current, message in (
        ({"partial": False}, 3, "pass partial=True"),
        ({"version": 4}, 3, "keeps the version of the last update, 3, but version is 4"),
        ({}, 0, "Send the first part without same_version"),
    ):
        with pytest.raises(UsageError, match=message):
            msgspec.structs.replace(part, **wrong).check(current)
