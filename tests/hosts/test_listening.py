"""Nodes that wait for programs."""

from __future__ import annotations

import asyncio
import logging
import signal
from pathlib import Path

import pytest
from actor_classes import Values

import sglrl
from sglrl.transport.curve_keys import add_client, make_keys

from .nodes import SECONDS, NodeProcess, free_addresses, hosts_of, until_there

ANY = "tcp://127.0.0.1:*"


def start(address: str, name: str, *options: str) -> NodeProcess:
    return NodeProcess(f"--listen={address}", name, *options)


def end(*nodes: NodeProcess) -> None:
    for node in nodes:
        node.process.kill()
        with node.process:
            """Closes the pipe and waits."""


async def test_programs_are_served_one_after_the_other(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    make_keys(keys)
    with pytest.raises(sglrl.InvalidKeys, match=r"'sglrl keys .* --add node' makes it"):
        sglrl.Hosts(ANY, keys=keys, nodes=["tcp://127.0.0.1:7000"])
    add_client(keys, "node")
    addresses = free_addresses(2)
    own = ("--keys", str(keys / "node.secret"))
    first = start(addresses[0], "a", *own)
    try:
        for _ in range(2):
            hosts = sglrl.Hosts(ANY, keys=keys, nodes=addresses, at_least=2)
            async with hosts:
                # The second node starts later, and again.
                second = start(addresses[1], "b", *own)
                await until_there(hosts, 2)
                async with sglrl.spawn(Values, replicas=2, hosts=hosts) as values:
                    assert hosts_of(values) == ["a", "b"]
                    assert await values.add(1) == 11
                second.strike(signal.SIGTERM)
                assert second.ends() == 0
                end(second)
    finally:
        end(first, second)


class Said(logging.Handler):
    """Sets ``event`` when a text is logged."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self._text = text
        self.event = asyncio.Event()

    def emit(self, record: logging.LogRecord) -> None:
        if self._text in record.getMessage():
            self.event.set()


async def test_a_node_that_serves_another_program() -> None:
    """The program waits until the other one has ended."""
    (address,) = free_addresses(1)
    node = start(address, "a")
    said = Said("it serves another program, at tcp://")
    logging.getLogger("sglrl.node").addHandler(said)
    try:
        second = sglrl.Hosts(ANY, nodes=[address])
        async with sglrl.Hosts(ANY, nodes=[address]) as first:
            await until_there(first, 1)
            second.open()
            await asyncio.wait_for(said.event.wait(), SECONDS)
        await until_there(second, 1)
        await second.close()
    finally:
        logging.getLogger("sglrl.node").removeHandler(said)
        end(node)


def test_addresses_that_are_not_valid() -> None:
    with pytest.raises(sglrl.UsageError, match="nodes is a list"):
        sglrl.Hosts(ANY, nodes="tcp://127.0.0.1:7000")
    for node in ("127.0.0.1:7000", "tcp://127.0.0.1"):
        with pytest.raises(sglrl.UsageError, match="tcp://HOST:PORT"):
            sglrl.Hosts(ANY, nodes=[node])
