"""Nodes for tests: the daemon ``sglrl node`` in processes of its own."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence

import sglrl

SECONDS = 300.0


class NodeProcess:
    """A running ``sglrl node``."""

    def __init__(
        self,
        address: str,
        name: str,
        *options: str,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.name = name
        self.process = subprocess.Popen(
            [sys.executable, "-m", "sglrl", "node", address, "--name", name, *options],
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, **(environment or {})},
        )

    def says(self, text: str) -> str:
        """Read the log up to a line with this text, and return the line."""
        assert self.process.stderr is not None
        for line in self.process.stderr:
            if text in line:
                return line.strip()
        raise AssertionError(f"the node ended with {self.process.wait(SECONDS)} before {text!r}")

    def strike(self, number: signal.Signals) -> None:
        os.kill(self.process.pid, number)

    def ends(self) -> int:
        """Wait for the exit and return the status."""
        return self.process.wait(SECONDS)


@contextlib.contextmanager
def nodes(
    address: str,
    *names: str,
    options: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
) -> Iterator[list[NodeProcess]]:
    """Run nodes on this machine for the block. At the end, those that still run are killed.

    Args:
        options: further arguments of ``sglrl node``.
        environment: variables in addition to those of this process.
    """
    made = [NodeProcess(address, name, *options, environment=environment) for name in names]
    try:
        yield made
    finally:
        for node in made:
            node.process.kill()
            with node.process:
                """Closes the pipe and waits."""


def free_addresses(count: int) -> list[str]:
    """Return addresses that no program listens at."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    addresses = [f"tcp://127.0.0.1:{made.getsockname()[1]}" for made in sockets]
    for made in sockets:
        made.close()
    return addresses


async def until_there(hosts: sglrl.Hosts, count: int) -> None:
    async with asyncio.timeout(SECONDS):
        while len(hosts.hosts) < count:
            await hosts.change()


def hosts_of(handle: sglrl.ActorHandle | sglrl.Client) -> list[str]:
    return sorted(worker.host for worker in handle.workers if worker.state == "ready")
