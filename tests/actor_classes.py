"""Actors for the tests. The workers import this module by name."""

from __future__ import annotations

import asyncio
import itertools
import os
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass

import msgspec
import numpy as np
from numpy.typing import NDArray

import sglrl


@dataclass
class Point:
    x: int
    y: float = 0.5


@dataclass
class Picky:
    """Raises ``LookupError`` when a received value is decoded, which msgspec does not expect."""

    n: int

    def __post_init__(self) -> None:
        if self.n < 0:
            raise LookupError(f"nothing is {self.n}")

    @classmethod
    def changed(cls, n: int) -> Picky:
        made = cls(0)
        made.n = n
        return made


class Textless(Exception):
    def __str__(self) -> str:
        raise LookupError("there is no text")


class Panic(BaseException):
    """An exception that is not an ``Exception``, like the panic of an extension module."""


class Label(msgspec.Struct):
    name: str
    points: list[Point]


class Values(sglrl.Actor):
    """Returns values computed from its arguments, and counts calls of ``add``."""

    def __init__(self, factor: int = 1) -> None:
        self.factor = factor
        self.seen = 0

    @sglrl.endpoint(idempotent=True)
    async def add(self, a: int, b: int = 10) -> int:
        self.seen += 1
        return self.factor * (a + b)

    @sglrl.endpoint
    async def calls_seen(self) -> int:
        return self.seen

    @sglrl.endpoint
    async def pid(self) -> int:
        return os.getpid()

    @sglrl.endpoint
    async def label(self, point: Point, label: Label) -> Label:
        return Label(label.name.upper(), [*label.points, point])

    @sglrl.endpoint
    async def scale(self, values: NDArray[np.float32], by: float) -> NDArray[np.float32]:
        return values * np.float32(by)

    @sglrl.endpoint
    async def reverse(self, data: bytes) -> bytes:
        return data[::-1]

    @sglrl.endpoint
    async def view(self, data: bytes, floats: bool) -> bytes:
        """Return every other byte, or every other float."""
        view = memoryview(data)
        return (view.cast("d") if floats else view)[::2]  # type: ignore[return-value]

    @sglrl.endpoint
    async def rush(self) -> AsyncIterator[int]:
        """Yield numbers without ever awaiting."""
        for i in itertools.count():
            yield i

    @sglrl.endpoint
    async def count(self, to: int) -> AsyncIterator[int]:
        for i in range(to):
            yield i
            await asyncio.sleep(0)

    @sglrl.endpoint
    async def arrays(self, n: int) -> AsyncIterator[NDArray[np.int64]]:
        for i in range(n):
            yield np.full((2, i), i)

    @sglrl.endpoint
    async def fail(self, text: str) -> int:
        raise KeyError(text)

    @sglrl.endpoint
    async def fail_later(self, after: int) -> AsyncIterator[int]:
        for i in range(after):
            yield i
        raise LookupError("the stream broke")

    @sglrl.endpoint
    async def lie(self) -> int:
        return "no number"  # type: ignore[return-value]

    @sglrl.endpoint
    async def picky(self, n: int) -> Picky:
        return Picky.changed(n)

    @sglrl.endpoint
    async def pick(self, picky: Picky) -> int:
        return picky.n

    @sglrl.endpoint
    async def environment(self, name: str) -> str | None:
        return os.environ.get(name)


class Gate(sglrl.Actor):
    """Calls that wait until ``open`` is called. Counts the calls that begin and are cancelled."""

    def __init__(self) -> None:
        self.running = 0
        self.most = 0
        self.begun = 0
        self.cancelled = 0
        self.opened = asyncio.Event()
        self.changed = asyncio.Condition()

    async def _note(self) -> None:
        async with self.changed:
            self.changed.notify_all()

    async def _pass(self) -> int:
        self.begun += 1
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            await self._note()
            await self.opened.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            self.running -= 1
            # The notification runs in the next turn of the loop, so waiters see the updated count.
            asyncio.get_running_loop().call_soon(lambda: self._tasks.add(self._later()))
        return os.getpid()

    def _later(self) -> asyncio.Task[None]:
        return asyncio.ensure_future(self._note())

    _tasks: set[asyncio.Task[None]] = set()

    @sglrl.endpoint
    async def enter(self) -> int:
        return await self._pass()

    @sglrl.endpoint(idempotent=True)
    async def enter_again(self) -> int:
        return await self._pass()

    @sglrl.endpoint(timeout=0.05)
    async def enter_shortly(self) -> int:
        return await self._pass()

    @sglrl.endpoint
    async def trickle(self) -> AsyncIterator[int]:
        yield 0
        yield await self._pass()

    @sglrl.endpoint(idempotent=True)
    async def trickle_again(self) -> AsyncIterator[int]:
        yield await self._pass()

    @sglrl.endpoint
    async def trickle_lies(self) -> AsyncIterator[int]:
        yield "no number"  # type: ignore[misc]
        yield await self._pass()

    @sglrl.endpoint
    async def fail(self, kind: str) -> None:
        raise {"Textless": Textless, "Panic": Panic}[kind]

    @sglrl.endpoint
    async def open(self) -> None:
        self.opened.set()

    @sglrl.endpoint
    async def until_begun(self, count: int) -> int:
        async with self.changed:
            await self.changed.wait_for(lambda: self.begun >= count)
        return self.running

    @sglrl.endpoint
    async def until_cancelled(self, count: int) -> int:
        async with self.changed:
            await self.changed.wait_for(lambda: self.cancelled >= count)
        return self.running

    @sglrl.endpoint
    async def turn(self) -> None:
        """Run for a few turns of the loop, then return."""
        self.running += 1
        self.most = max(self.most, self.running)
        for _ in range(3):
            await asyncio.sleep(0)
        self.running -= 1

    @sglrl.endpoint
    async def begun_so_far(self) -> int:
        return self.begun

    @sglrl.endpoint
    async def most_at_once(self) -> int:
        return self.most


class World(sglrl.Actor):
    """An environment: its state is the number of steps since it was reset."""

    def __init__(self) -> None:
        self.steps_made = 0

    @sglrl.endpoint
    async def reset(self) -> int:
        self.steps_made = 0
        return self.steps_made

    @sglrl.endpoint
    async def step(self) -> int:
        self.steps_made += 1
        return self.steps_made

    @sglrl.endpoint
    async def steps(self, count: int) -> AsyncIterator[int]:
        for _ in range(count):
            yield await self.step()

    @sglrl.endpoint(idempotent=True)
    async def steps_so_far(self) -> int:
        return self.steps_made

    @sglrl.endpoint
    async def pid(self) -> int:
        return os.getpid()


class Blocks(sglrl.Actor):
    @sglrl.endpoint
    async def block(self) -> None:
        """Block the event loop forever."""
        print("about to block", flush=True)
        while True:
            time.sleep(3600.0)  # noqa: ASYNC251

    @sglrl.endpoint
    async def wait(self) -> None:
        await asyncio.Event().wait()


class Refuses(sglrl.Actor):
    def __init__(self, how: str) -> None:
        print("about to refuse", flush=True)
        if how == "raise":
            raise ValueError("no such rubric")
        if how == "exit":
            print("leaving the hard way", file=sys.stderr, flush=True)
            os._exit(7)

    @sglrl.endpoint
    async def nothing(self) -> None: ...
