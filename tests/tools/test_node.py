"""The GPUs that ``sglrl node --gpus`` offers. ``tests/hosts`` tests running nodes."""

from __future__ import annotations

import pytest

from sglrl.errors import UsageError
from sglrl.tools.node import _chosen

VISIBLE = ["4", "5", "6", "GPU-ab"]


@pytest.mark.parametrize(
    ("gpus", "offered"),
    [
        (None, ("4", "5", "6", "GPU-ab")),
        ("0", ("4",)),
        ("3,1", ("GPU-ab", "5")),
        ("0-2", ("4", "5", "6")),
        ("0, 2-3", ("4", "6", "GPU-ab")),
        ("", ()),
    ],
)
def test_gpus_are_indices_of_the_visible_ones(gpus: str | None, offered: tuple[str, ...]) -> None:
    assert _chosen(gpus, VISIBLE) == offered


@pytest.mark.parametrize("gpus", ["4", "0-4", "1,1", "-1", "0-", "2-1", "all", "0;1"])
def test_other_gpus_are_refused(gpus: str) -> None:
    with pytest.raises(UsageError, match="--gpus"):
        _chosen(gpus, VISIBLE)
