"""The types of handles of actors. mypy checks this file; nothing runs it."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any, assert_type

import sglrl
from sglrl.actors.handles import UnaryCaller, WorkerHandle


async def leases(worlds: sglrl.ActorHandle) -> None:
    async with worlds.lease() as world:
        assert_type(world, WorkerHandle)
        # The endpoints have the types that they have on the handle itself.
        assert_type(world.step, UnaryCaller)
        assert_type(worlds.step, UnaryCaller)
        assert_type(world.stream.places(4), AsyncGenerator[Any, None])
        assert_type(worlds.stream.places(4), AsyncGenerator[Any, None])
        await world.step(4, timeout=1.0)
    async with worlds.lease(share=2, timeout=None):
        pass
    worlds.lease(2)  # type: ignore[call-arg]
