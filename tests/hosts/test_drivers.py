"""A node whose driver is killed or stopped, and which nodes a driver accepts."""

from __future__ import annotations

import asyncio
import itertools
import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from actor_classes import Values
from processes import strike, wait_for_end

import sglrl
from sglrl.driver.environment import environment
from sglrl.hosts.hosts import refusal
from sglrl.hosts.node import Node, NodeSettings
from sglrl.transport.curve_keys import add_client, make_keys
from sglrl.transport.zmq import ZmqDealer
from sglrl.wire.calls import PROTOCOL_VERSION
from sglrl.wire.codec import Buffer, decode_of_connection, encode
from sglrl.wire.nodes import Acknowledge, Admit, NodeHello, Numbered, OpenPool, PoolOpened

from .nodes import SECONDS, free_addresses, nodes

PROGRAM = Path(__file__).with_name("driver_program.py")


class Driver:
    """The driver program."""

    def __init__(self, address: str, heartbeat_timeout: float) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(PROGRAM), address, str(heartbeat_timeout)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def says(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, f"the driver ended with status {self.process.wait(SECONDS)}"
        return json.loads(line)  # type: ignore[no-any-return]

    def pids(self) -> list[int]:
        return [pid for _, pid, _ in self.says()["workers"]]

    def ask(self) -> dict[str, Any]:
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        return self.says()


@contextmanager
def driver(address: str, heartbeat_timeout: float) -> Iterator[Driver]:
    made = Driver(address, heartbeat_timeout)
    try:
        yield made
    finally:
        made.process.kill()
        with made.process:
            """Closes the pipes and waits."""


def test_a_driver_that_is_killed() -> None:
    """The node kills its workers after the orphan timeout, and then serves the next driver."""
    address = free_addresses(1)[0]
    with nodes(address, "a", options=("--orphan-timeout", "2")) as (node,):
        with driver(address, 5.0) as first:
            pids = first.pids()
            strike(first.process.pid, signal.SIGKILL)
            node.says("the driver has not returned")
            assert wait_for_end(pids, SECONDS) == []
        with driver(address, 5.0) as second:
            assert set(second.pids()).isdisjoint(pids)
            assert second.ask()["right"]


def test_a_driver_that_is_stopped_for_a_while() -> None:
    """Its connections break. It goes on with the same workers when it continues."""
    address = free_addresses(1)[0]
    options = ("--heartbeat-timeout", "4", "--orphan-timeout", "60")
    with nodes(address, "a", options=options) as (node,), driver(address, 4.0) as program:
        pids = program.pids()
        strike(program.process.pid, signal.SIGSTOP)
        node.says("is broken")
        program.process.send_signal(signal.SIGCONT)
        node.says("again")
        answer = program.ask()
        assert answer["right"]
        assert answer["workers"] == [["a", pid, "ready"] for pid in pids]


def test_a_node_that_is_stopped_for_a_while() -> None:
    """It is used again when it continues."""
    address = free_addresses(1)[0]
    options = ("--heartbeat-timeout", "4", "--orphan-timeout", "60")
    with nodes(address, "a", options=options) as (node,), driver(address, 4.0) as program:
        pids = program.pids()
        strike(node.process.pid, signal.SIGSTOP)
        # The workers are not stopped. They serve calls meanwhile.
        assert program.ask()["right"]
        node.strike(signal.SIGCONT)
        answer = program.ask()
        assert answer["right"]
        assert [pid for _, pid, _ in answer["workers"]] == pids


async def test_keys(tmp_path: Path) -> None:
    """A node with a key that the driver does not have is not used."""
    keys, other = tmp_path / "keys", tmp_path / "other"
    make_keys(keys)
    add_client(keys, "node")
    make_keys(other)
    async with sglrl.Hosts("tcp://127.0.0.1:*", keys=keys) as hosts:
        with (
            nodes(hosts.address, "stranger", options=("--keys", str(other))) as (stranger,),
            nodes(hosts.address, "a", options=("--keys", str(keys / "node.secret"))),
        ):
            async with sglrl.spawn(Values, replicas=2, hosts=hosts) as values:
                assert await values.add(1) == 11
                assert [worker.host for worker in values.workers] == ["a", "a"]
            stranger.strike(signal.SIGTERM)
            assert stranger.ends() == 0


def hello(**changes: Any) -> NodeHello:
    made = NodeHello(
        protocol=PROTOCOL_VERSION,
        name="a",
        environment=environment(),
        gpus=(),
        cores=1,
        orphan_timeout=1.0,
    )
    return msgspec.structs.replace(made, **changes)


async def test_a_message_that_is_missing() -> None:
    """The node is not refused: it goes on with its session on a new connection."""
    answers: asyncio.Queue[list[Buffer]] = asyncio.Queue()
    body = encode(PoolOpened(7))

    def connect(session: str, number: int) -> ZmqDealer:
        dealer = ZmqDealer(hosts.address, b"node/%d" % number, max_message_bytes=1 << 20)
        dealer.start(answers.put_nowait)
        dealer.send([encode(hello(session=session, orphan_timeout=SECONDS))])
        return dealer

    async with sglrl.Hosts("tcp://127.0.0.1:*") as hosts, asyncio.timeout(SECONDS):
        first = connect("", 1)
        admit = decode_of_connection((await answers.get())[0])
        assert isinstance(admit, Admit)
        first.send([encode(Numbered(1, 0)), body])
        first.send([encode(Numbered(3, 0)), body])
        while [host.state for host in hosts.hosts] != ["away"]:
            await hosts.change()
        second = connect(admit.session, 2)
        again = decode_of_connection((await answers.get())[0])
        assert again == Admit(admit.session, 1)
        second.send([encode(Numbered(2, 0)), body])
        second.send([encode(Numbered(3, 0)), body])
        while (answer := decode_of_connection((await answers.get())[0])) != Acknowledge(3):
            assert isinstance(answer, Acknowledge)
        assert [host.state for host in hosts.hosts] == ["connected"]
        for dealer in (first, second):
            dealer.close()


async def test_a_node_that_gives_up_keeps_its_name() -> None:
    """Its new session can arrive before the driver notices that its old connection is closed."""
    answers: asyncio.Queue[list[Buffer]] = asyncio.Queue()

    async def connect(process: str) -> ZmqDealer:
        identity = f"node/{next(numbers)}".encode()
        dealer = ZmqDealer(hosts.address, identity, max_message_bytes=1 << 20)
        dealer.start(answers.put_nowait)
        dealer.send([encode(hello(process=process, orphan_timeout=SECONDS))])
        while not isinstance(decode_of_connection((await answers.get())[0]), Admit):
            """An acknowledgement for another node."""
        return dealer

    numbers = itertools.count()
    async with sglrl.Hosts("tcp://127.0.0.1:*") as hosts, asyncio.timeout(SECONDS):
        dealers = [await connect("first"), await connect("second")]
        assert [host.name for host in hosts.hosts] == ["a", "a-2"]
        dealers.append(await connect("first"))
        assert [host.name for host in hosts.hosts] == ["a-2", "a"]
        dealers.append(await connect("second"))
        assert [host.name for host in hosts.hosts] == ["a", "a-2"]
        # It is not known which of the two was started again, and both may return.
        for dealer in dealers:
            dealer.close()
        while {host.state for host in hosts.hosts} != {"away"}:
            await hosts.change()
        dealers.append(await connect("third"))
        assert [host.name for host in hosts.hosts] == ["a", "a-2", "a-3"]
        for dealer in dealers:
            dealer.close()


def test_a_node_of_another_version_is_refused() -> None:
    assert refusal(hello()) == ""
    old = msgspec.structs.replace(environment(), sglrl="0.0.1")
    why = refusal(hello(environment=old, protocol=1))
    assert f"sglrl 0.0.1, here {sglrl.__version__}" in why
    assert f"version 1 of the protocol, here {PROTOCOL_VERSION}" in why


async def test_a_class_does_not_travel_to_another_python(monkeypatch: pytest.MonkeyPatch) -> None:
    here = msgspec.structs.replace(environment(), python="3.0")
    monkeypatch.setattr("sglrl.hosts.launcher.environment", lambda: here)
    async with sglrl.Hosts("tcp://127.0.0.1:*") as hosts:
        with (
            nodes(hosts.address, "a"),
            pytest.raises(sglrl.UsageError, match=r"host a has Python 3\.1\d and this program"),
        ):
            await sglrl.spawn(Values, hosts=hosts)


async def test_a_refused_node_says_why_and_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sglrl.hosts.hosts.__version__", "9.9.9")
    async with sglrl.Hosts("tcp://127.0.0.1:*") as hosts:
        with nodes(hosts.address, "a") as (node,):
            with pytest.raises(sglrl.WorkerStartError, match=r"0 of 1 hosts \(at_least\)"):
                await sglrl.spawn(Values, hosts=hosts, start_timeout=4.0)
            assert "here 9.9.9" in node.says("refused by the driver")
            assert node.ends() == 1


async def test_an_error_that_nothing_expects_ends_the_node() -> None:
    """The node does not go on with an order that it has dropped: its driver would wait for it."""

    async def order() -> None:
        raise LookupError("unexpected")

    settings = NodeSettings(
        address=free_addresses(1)[0],
        keys=None,
        name="a",
        gpus=(),
        cores=1,
        orphan_timeout=1.0,
        heartbeat_timeout=None,
    )
    node = Node(settings, environment())
    running = asyncio.ensure_future(node.run())
    await asyncio.sleep(0)
    node._handle(OpenPool(1, "plain"))
    node._pools[1].put(order())
    with pytest.raises(LookupError, match="unexpected"):
        await running
