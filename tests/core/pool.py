"""A fabric with ready members, and calls for it."""

from __future__ import annotations

from typing import Any

import numpy as np
from msgspec import Raw

from sglrl.config import FabricConfig
from sglrl.core.calls import Call
from sglrl.core.effects import Send
from sglrl.core.fabric import Fabric
from sglrl.core.prefixes import Route
from sglrl.wire.calls import Item, ItemKind


def make_call(**settings: Any) -> Call:
    return Call("work", Raw(b"\x90"), None, **settings)


def make_fabric(members: int, window: int = 1000, **settings: Any) -> Fabric:
    fabric = Fabric(FabricConfig(**settings))
    for index in range(members):
        fabric.add_member(index)
        fabric.member_ready(index, window, 0.0)
    return fabric


def route(tokens: list[int], version: int = 0, session: str | None = None) -> Route:
    return Route(np.array(tokens, dtype="<i4").tobytes(), version, session)


def submit(fabric: Fabric, **settings: Any) -> Call:
    call = make_call(**settings)
    fabric.submit(call, 0.0)
    return call


def worker_of(call: Call) -> int | None:
    return None if call.worker is None else call.worker.index


def finish(fabric: Fabric, call: Call, kind: int = ItemKind.DONE) -> None:
    assert call.worker is not None
    fabric.results(call.worker, [Item(call.id, kind)], 1.0)


def sent(fabric: Fabric) -> list[Call]:
    """Return the calls sent since the last call of this function, in order."""
    effects, fabric.outbox = fabric.outbox, []
    return [effect.call for effect in effects if isinstance(effect, Send)]
