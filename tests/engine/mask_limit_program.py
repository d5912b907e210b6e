"""Print, as JSON, what an adapter does with sampling masks that it cannot return.

Run it in the folder of tests: ``python -m engine.mask_limit_program``.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np

from sglrl_workers.engine.sglang import tracked_request
from sglrl_workers.engine.sglang.adapter import Adapter
from sglrl_workers.engine.sglang.convert import request_id
from sglrl_workers.engine.sglang.tracked_request import TrackedRequest


class Box:
    """Records errors, in the place of a mailbox."""

    def __init__(self) -> None:
        self.errors: list[tuple[int, str, str]] = []

    def wake(self) -> None:
        pass

    def put_error(self, *error: Any) -> None:
        self.errors.append(error)


tracked_request.MAX_MASK_IDS = 10  # type: ignore[misc]
box = Box()
adapter = Adapter(box)  # type: ignore[arg-type]
ids = np.arange(6, dtype="<i4")
for call in range(3):
    adapter.requests[call] = TrackedRequest(0, 0, generates=True)
    if call:
        adapter.requests[call].masks = {}
# Call 0 wants no masks, and call 2 is being cancelled.
adapter.cancelled.add(2)
for position in range(3):
    for call in range(3):
        adapter.drawable(request_id(call), position, ids)
print(
    json.dumps(
        {
            "errors": box.errors,
            "left": sorted(adapter.requests),
            "aborted": [request.rid for request in adapter.incoming],
        }
    )
)
