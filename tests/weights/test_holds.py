"""A scheduler is held for an update or for a copy of a peer's weights.

When the hold ends, exactly the weights of that update become live.
"""

from __future__ import annotations

from typing import Any

import pytest
from engine.programs import run_program

from .holds_program import NEW, NEXT, OLD, UPDATE


@pytest.fixture(scope="module")
def found() -> Any:
    return run_program("weights.holds_program")


def test_the_end_of_a_peer_copy_leaves_a_staged_update_staged(found: Any) -> None:
    after_copy, after_commit = found["copy_ends_after_staging"]
    assert after_copy == [[OLD, 5], {}]
    assert after_commit == [[NEW, 6], {str(UPDATE): ""}]


def test_a_drained_update_is_live_when_its_hold_ends(found: Any) -> None:
    assert found["drained"] == [[NEW, 6], {str(UPDATE): ""}]


def test_a_drained_update_without_staged_weights_is_not_live(found: Any) -> None:
    nothing = {str(UPDATE): "nothing is staged for this update"}
    after_release, after_commit = found["drained_without_its_weights"]
    assert after_release == [[OLD, 1], nothing]
    assert after_commit == [[NEW, 7], {**nothing, str(NEXT): ""}]


def test_the_hold_of_one_update_is_not_that_of_another(found: Any) -> None:
    assert found["held_for_which"] == {
        "copy": True,
        "update, while held for the copy": False,
        "copy, when it is over": False,
        "update, given up before": False,
        "next": True,
        "next, when an older one is released": True,
        "version is that of next": True,
    }


def test_a_cancelled_update_ends_the_wait_and_still_retracts(found: Any) -> None:
    """Another rank may execute its hold before the cancellation, and retracts the same requests."""
    assert found["cancelled"] == {"held": [False], "retracted": 1, "state": [OLD, 1]}
