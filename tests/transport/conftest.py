"""Every test of the contract runs over every transport, on asyncio's loop and on uvloop's."""

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
    """Short enough for the path of a unix socket, which pytest's own folders may not be."""
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
    """Make a worker's end; closed, twice, when the test ends."""
    made: list[WorkerTransport] = []

    def dealer(identity: bytes) -> WorkerTransport:
        made.append(link.dealer(identity))
        return made[-1]

    yield dealer
    for end in made:
        end.close()
        end.close()
