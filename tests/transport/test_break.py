"""A worker's end is notified when its connection breaks, but not when it closes itself."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest

from sglrl.transport.zmq import ZmqDealer, ZmqPolledDealer, ZmqRouter

from .links import Inbox

SMALL = 1 << 20


def watchers() -> list[threading.Thread]:
    return [t for t in threading.enumerate() if t.name == "sglrl-connection"]


@pytest.mark.parametrize("kind", [ZmqDealer, ZmqPolledDealer])
@pytest.mark.parametrize("address", ["ipc", "tcp"])
async def test_a_broken_connection_is_told(folder: Path, address: str, kind: Any) -> None:
    router = ZmqRouter(
        f"ipc://{folder}/s" if address == "ipc" else "tcp://127.0.0.1:*", max_message_bytes=SMALL
    )
    inbox = Inbox()
    router.start(inbox)
    told, untold = threading.Event(), threading.Event()
    ends = [
        kind(router.address, name, max_message_bytes=SMALL, on_break=event.set)
        for name, event in ((b"stays", told), (b"leaves", untold))
    ]
    for end in ends:
        end.send([b"hello"])
    await inbox.reach(2)
    assert len(watchers()) == 2
    ends[1].close()
    router.close()
    assert await asyncio.to_thread(told.wait, 20)
    ends[0].close()
    for thread in watchers():
        await asyncio.to_thread(thread.join, 20)
    assert not watchers()
    assert not untold.is_set()
