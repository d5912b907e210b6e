"""Fixtures that run every test of the contract over every transport, on asyncio and on uvloop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import uvloop

from sglrl.transport.base import WorkerTransport

from .links import LINKS, Link

LOOPS: dict[str, Callable[[], asyncio.AbstractEventLoop]] = {
    "asyncio": asyncio.new_event_loop,
    "uvloop": uvloop.new_event_loop,
}


def pytest_asyncio_loop_factories(
    config: pytest.Config, item: pytest.Item
) -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    return LOOPS


@pytest.fixture
def folder() -> Iterator[Path]:
    """Return a folder whose path is short enough for a unix socket. pytest's folders may not be."""
    with TemporaryDirectory() as name:
        yield Path(name)


@pytest.fixture(params=LINKS)
def link(request: pytest.FixtureRequest, folder: Path) -> Iterator[Link]:
    made: Link = LINKS[request.param](folder)
    yield made
    made.router.close()
    made.router.close()


@pytest.fixture
def join(link: Link) -> Iterator[Callable[[bytes], WorkerTransport]]:
    """Return a function that makes worker ends. They are closed, twice, when the test ends."""
    made: list[WorkerTransport] = []

    def dealer(identity: bytes) -> WorkerTransport:
        made.append(link.dealer(identity))
        return made[-1]

    yield dealer
    for end in made:
        end.close()
        end.close()
