"""A client of two fake engines. After each test, check what remains as in ``leftovers.py``."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from leftovers import no_task_is_left, no_worker_is_left

import sglrl

from .agents import FAKE

__all__ = ["no_task_is_left", "no_worker_is_left"]


@pytest.fixture
async def client() -> AsyncIterator[sglrl.Client]:
    async with sglrl.launch("fake", **FAKE) as client:
        yield client
