"""Weight updates, faults and calls in random order on real engines: see ``storm.py``.

The environment variables ``SGLRL_STORM_SEED`` and ``SGLRL_STORM_SECONDS`` select another sequence
of operations and another length.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from engine.policies import Policies

from .storm import SEEDS, storm

SEED = int(os.environ.get("SGLRL_STORM_SEED", "1"))
SECONDS = float(os.environ.get("SGLRL_STORM_SECONDS", "90"))


@pytest.mark.timeout(SECONDS + 600)
async def test_all_workers_agree_after_random_updates_and_faults(tmp_path: Path) -> None:
    policies = Policies(tmp_path)
    for seed in range(SEEDS):
        assert policies[seed].model is not None
    found = await storm(policies, SEED, SECONDS)
    print(f"seed {SEED}:", *found.events, dict(found.counts), sep="\n")
    assert found.counts["updated"]
    assert found.counts["compared with transformers"]
