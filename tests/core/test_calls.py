"""The state table of one call."""

from __future__ import annotations

from itertools import product

import pytest

from sglrl.core.calls import (
    CANCELLING,
    ENDED,
    LEGAL,
    QUEUED,
    RUNNING,
    SENT,
    STATE_NAMES,
)
from sglrl.errors import SglrlError

from .pool import make_call

LIFE = {
    (QUEUED, SENT),
    (QUEUED, ENDED),
    (SENT, RUNNING),
    (SENT, CANCELLING),
    (SENT, QUEUED),
    (SENT, ENDED),
    (RUNNING, CANCELLING),
    (RUNNING, QUEUED),
    (RUNNING, ENDED),
    (CANCELLING, ENDED),
}


def test_the_table_covers_every_state() -> None:
    assert set(LEGAL) == set(range(len(STATE_NAMES)))


@pytest.mark.parametrize(("old", "new"), list(product(range(5), repeat=2)))
def test_transition(old: int, new: int) -> None:
    call = make_call(deadline=12.5)
    call.id, call.attempts, call.submitted_at, call.state = 41, 2, 3.25, old
    if (old, new) in LIFE:
        call.move(new)
        assert call.state == new
        return
    with pytest.raises(SglrlError) as caught:
        call.move(new)
    assert call.state == old, "a refused transition changes nothing"
    text = str(caught.value)
    assert f"{STATE_NAMES[old]} -> {STATE_NAMES[new]} is not legal" in text
    for part in ("Call 41 work", "attempts=2", "submitted=3.25", "deadline=12.5", "worker=None"):
        assert part in text, "the message carries the call's history"
