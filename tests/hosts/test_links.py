"""A link to a host that fails for a short or a long time, for ever, or in one direction.

The test is the driver. One node runs beside it, another node on another host. No call is lost and
none is answered twice.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from at_once import at_once
from namespaces import Host, another_host, need_namespaces
from processes import strike, wait_for_end

import sglrl
from sglrl.driver import supervisor

from .nodes import SECONDS, hosts_of, nodes

IDS = [3, 1, 4, 1, 5]
CALLS = 16
TOKENS = 400
MODULE = Path("-m")


@asynccontextmanager
async def pool(
    here: Host, there: Host, *, heartbeat_timeout: float, orphan_timeout: float
) -> AsyncIterator[tuple[sglrl.Hosts, sglrl.Client]]:
    """Yield a pool with a worker here and a worker on the other host."""
    async with sglrl.Hosts(
        f"tcp://{here.address}:*", insecure=True, at_least=2, heartbeat_timeout=heartbeat_timeout
    ) as hosts:
        timeouts = ["--orphan-timeout", str(orphan_timeout)]
        timeouts += ["--heartbeat-timeout", str(heartbeat_timeout), "--insecure"]
        there.run(MODULE, "sglrl", "node", hosts.address, "--name", "there", *timeouts)
        with nodes(hosts.address, "here", options=timeouts):
            async with sglrl.launch(
                "fake",
                engine="fake",
                hosts=hosts,
                replicas=2,
                tokens_per_step=1,
                step_seconds=0.01,
            ) as client:
                assert hosts_of(client) == ["here", "there"]
                yield hosts, client


class Streams:
    """Streams at both workers."""

    def __init__(self, client: sglrl.Client) -> None:
        self._streams = [
            client.stream(input_ids=[*IDS, n], max_new_tokens=TOKENS) for n in range(CALLS)
        ]
        self._got: list[list[int]] = []

    async def begin(self) -> None:
        self._readers = [aiter(stream) for stream in self._streams]
        self._got = [(await anext(reader)).output_ids.tolist() for reader in self._readers]
        self._tasks = [asyncio.ensure_future(self._read(n)) for n in range(CALLS)]

    async def _read(self, n: int) -> None:
        async for chunk in self._readers[n]:
            self._got[n] += chunk.output_ids.tolist()

    async def some(self, count: int) -> None:
        """Wait until this number of streams have ended."""
        while sum(task.done() for task in self._tasks) < count:
            left = [task for task in self._tasks if not task.done()]
            await asyncio.wait(left, return_when=asyncio.FIRST_COMPLETED)

    async def end(self) -> int:
        """Check the answers. Return how many calls went on at another worker."""
        await asyncio.gather(*self._tasks)
        for n, tokens in enumerate(self._got):
            assert tokens == ([*IDS, n] * TOKENS)[:TOKENS]
        return sum(stream.completion.resumed for stream in self._streams)


async def begin(client: sglrl.Client) -> Streams:
    made = Streams(client)
    await made.begin()
    return made


def worker_there(client: sglrl.Client) -> sglrl.WorkerInfo:
    (found,) = [worker for worker in client.workers if worker.host == "there"]
    return found


async def until(client: sglrl.Client, worker: int, state: str) -> None:
    async with asyncio.timeout(SECONDS):
        while client.workers[worker].state != state:
            await client.pool.driver.change()  # type: ignore[union-attr]


def fail(here: Host, there: Host, how: str, *, fails: bool) -> None:
    """Make the link fail, or restore it."""
    if how == "down":
        there.up = not fails
    if how in ("both", "to the driver"):
        there.loses = fails
    if how in ("both", "from the driver"):
        here.loses = fails


async def test_for_less_than_the_timeout() -> None:
    """Answers arrive late, from the same workers."""
    need_namespaces()
    await at_once(for_less_than_the_timeout, ["down", "both"])


async def for_less_than_the_timeout(how: str) -> None:
    with another_host() as (here, there):
        async with pool(here, there, heartbeat_timeout=120.0, orphan_timeout=120.0) as (
            hosts,
            client,
        ):
            before = [worker.pid for worker in client.workers]
            streams = await begin(client)
            fail(here, there, how, fails=True)
            # Those of the worker here.
            await streams.some(CALLS - worker_there(client).load)
            fail(here, there, how, fails=False)
            assert await streams.end() == 0
            assert [worker.pid for worker in client.workers] == before
            assert [host.state for host in hosts.hosts] == ["connected", "connected"]


async def test_for_longer_than_the_timeout() -> None:
    """Calls go on here. The same worker is used again when its host is back."""
    need_namespaces()
    await at_once(for_longer_than_the_timeout, ["down", "to the driver", "from the driver"])


async def for_longer_than_the_timeout(how: str) -> None:
    with another_host() as (here, there):
        async with pool(here, there, heartbeat_timeout=4.0, orphan_timeout=60.0) as (_, client):
            before = [worker.pid for worker in client.workers]
            streams = await begin(client)
            gone = worker_there(client)
            fail(here, there, how, fails=True)
            await until(client, gone.id, "away")
            assert await streams.end() == gone.load > 0
            fail(here, there, how, fails=False)
            await client.wait_until_full(SECONDS)
            assert [worker.pid for worker in client.workers] == before
            assert await (await begin(client)).end() == 0


async def test_a_worker_that_dies_while_it_is_away(monkeypatch: pytest.MonkeyPatch) -> None:
    """The time for its return ends with it, and does not end its replacement."""
    monkeypatch.setattr(supervisor, "_RETURN_SECONDS", 3.0)
    with another_host() as (here, there):
        async with pool(here, there, heartbeat_timeout=2.0, orphan_timeout=60.0) as (_, client):
            dies = worker_there(client)
            there.up = False
            await until(client, dies.id, "away")
            strike(dies.pid, signal.SIGKILL)
            there.up = True
            async with asyncio.timeout(SECONDS):
                while client.workers[dies.id].pid == dies.pid:
                    await client.pool.driver.change()  # type: ignore[union-attr]
            await client.wait_until_full(SECONDS)
            before = [worker.pid for worker in client.workers]
            await asyncio.sleep(2 * 3.0)
            assert [worker.pid for worker in client.workers] == before


class Counter(sglrl.Actor):
    """Counts its calls."""

    def __init__(self) -> None:
        self.count = 0

    @sglrl.endpoint
    async def next(self) -> int:
        self.count += 1
        return self.count

    @sglrl.endpoint
    async def wait(self) -> None:
        await asyncio.Event().wait()


async def test_an_actor_keeps_its_state() -> None:
    """A call that it holds is lost. Calls that wait for it arrive when it is back."""
    with another_host() as (here, there):
        async with sglrl.Hosts(
            f"tcp://{here.address}:*", insecure=True, heartbeat_timeout=4.0
        ) as hosts:
            there.run(
                MODULE, "sglrl", "node", hosts.address, "--insecure", "--heartbeat-timeout", "4"
            )
            async with sglrl.spawn(Counter, hosts=hosts) as counter:
                held = asyncio.ensure_future(counter.wait())
                assert await counter.next() == 1
                there.up = False
                with pytest.raises(sglrl.WorkerLost, match="its connection is gone"):
                    await held
                assert [worker.state for worker in counter.workers] == ["away"]
                later = [asyncio.ensure_future(made.next()) for made in (counter, counter[0])]
                there.up = True
                assert sorted(await asyncio.gather(*later)) == [2, 3]


async def test_for_ever() -> None:
    """The node kills its workers, and they are replaced here."""
    with another_host() as (here, there):
        async with pool(here, there, heartbeat_timeout=4.0, orphan_timeout=4.0) as (hosts, client):
            streams = await begin(client)
            lost = worker_there(client)
            there.up = False
            assert await streams.end() == lost.load > 0
            assert wait_for_end([lost.pid], SECONDS) == []
            await client.wait_until_full(SECONDS)
            assert hosts_of(client) == ["here", "here"]
            assert [host.name for host in hosts.hosts] == ["here"]
