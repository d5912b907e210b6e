"""Print, as JSON, the lengths for which SGLang's limits differ from ours.

Run it in the folder of tests: ``python -m engine.lengths_program MODEL``.
"""

from __future__ import annotations

import itertools
import json
import sys
import tempfile
from collections.abc import Iterator
from types import SimpleNamespace

from sglrl_workers.engine.sglang.scheduler import SglrlScheduler, max_tokens

from .programs import make_scheduler


def is_made(scheduler: SglrlScheduler, prompt: int, wanted: int) -> bool:
    """Return whether an idle SGLang generates ``wanted`` tokens after a prompt of this length.

    SGLang reduces the number of tokens to what it can schedule.
    """
    request = SimpleNamespace(
        rid="",
        origin_input_ids=[0] * prompt,
        sampling_params=SimpleNamespace(
            max_new_tokens=wanted, min_new_tokens=0, custom_params=None
        ),
    )
    scheduler.init_req_max_new_tokens(request)
    return bool(request.sampling_params.max_new_tokens == wanted)


def wrong(scheduler: SglrlScheduler) -> Iterator[tuple[str, int, int, int]]:
    for context, pages, page in itertools.product((60, 255, 256), (4, 5, 30), (1, 16, 64)):
        cache = pages * page
        scheduler.max_req_len = context
        scheduler.max_total_num_tokens = cache
        scheduler.page_size = page
        # SGLang 0.5.18 and later read the page size from the allocator.
        scheduler.token_to_kv_pool_allocator.page_size = page
        most = max_tokens(context, cache, page)
        if not all(is_made(scheduler, p, most - p) for p in range(1, most)):
            yield "too many", context, cache, page
        if all(is_made(scheduler, p, most + 1 - p) for p in range(1, most + 1)):
            yield "too few", context, cache, page


with tempfile.TemporaryDirectory() as folder:
    scheduler = make_scheduler(sys.argv[1], f"{folder}/rendezvous")
    print(json.dumps([*wrong(scheduler)]))
