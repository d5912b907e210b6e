"""When samples ran, and what they did meanwhile, beside the weight updates."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from ...sessions.record import Record
from ...weights.update_report import UpdateReport
from .store import Store

_BESIDE: Final = 40
"""The largest number of samples in a timeline."""


def timeline(store: Store, number: int, updates: Sequence[UpdateReport]) -> dict[str, Any]:
    """Return the sample in a row, those that began at about the same time, and the updates.

    Returns:
        A dict with ``samples``, oldest first, each with its ``row``, ``item``, ``sample``,
        ``reward`` and ``parts``, and with ``updates``. A part is a list of "engine", "tools" or
        "waiting", its begin and its end. Times are seconds as ``time.time`` returns them.
    """
    rows = store.rows.values
    same = np.flatnonzero((rows["source"] == rows[number]["source"]) & ~rows["failed"])
    order = same[np.argsort(rows["started"][same], kind="stable")]
    at = int(np.flatnonzero(order == number)[0]) if number in order else 0
    begin = max(0, min(at - _BESIDE // 2, len(order) - _BESIDE))
    samples = []
    for one in order[begin : begin + _BESIDE].tolist():
        record, row = store.record(one), rows[one]
        if record is not None:
            sample = {"row": one, "item": store.rows.items[row["group"]], "parts": parts(record)}
            sample.update(sample=int(row["sample"]), reward=float(row["reward"]))
            samples.append(sample)
    return {
        "samples": samples,
        "updates": [
            {
                "version": update.version,
                "lora": update.lora,
                "begin": update.ended - update.total_ms / 1000,
                "end": update.ended,
                "pause_ms": max(update.pause_ms, default=0.0),
            }
            for update in updates
        ],
    }


def parts(record: Record) -> list[list[Any]]:
    """Return what a sample did, part after part. The turns of all branches are in order of time."""
    found: list[list[Any]] = []
    for leaf in (*record.branches, record):
        at = leaf.timing.started
        for turn in leaf.turns:
            found += _part("tools", at, turn.seconds_before)
            at += turn.seconds_before
            found += _part("waiting", at, turn.waiting)
            found += _part("engine", at + turn.waiting, turn.seconds - turn.waiting)
            at += turn.seconds
    if not record.branches and "item" in record.metadata:
        # An agent may work after its last turn, for example to compute the reward.
        end = record.timing.started + record.timing.total
        last = found[-1][2] if found else record.timing.started
        found += _part("tools", last, end - last)
    return found


def _part(kind: str, begin: float, seconds: float) -> list[list[Any]]:
    return [[kind, begin, begin + seconds]] if seconds > 1e-4 else []
