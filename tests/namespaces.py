"""Two hosts with a link that tests can break: network namespaces joined by a veth pair.

::

    with two_hosts() as (one, two):
        server = two.run(PROGRAM, "serve", two.address)
        client = one.run(PROGRAM, "connect", two.address)
        assert client.says() == {"connected": True}
        two.loses = True   # packets that ``two`` sends are lost; it still receives
        one.up = False     # the interface is down: nothing arrives in either direction

``another_host`` joins one namespace to the test's own, so that the test itself can be one end.

Programs and the test exchange JSON, one object a line, over the program's standard input and
output. At the end, the block kills the programs and removes the namespaces.

This needs root. Without it the test is skipped. With the environment variable CI set it fails
instead.
"""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, TypeVar

import pytest

T = TypeVar("T")

_NOBODY = "02:00:00:00:00:01"
"""A hardware address that neither interface has."""
_END_SECONDS = 30.0


class Program:
    """A Python program on a host."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process

    def says(self) -> dict[str, Any]:
        """Return the next line that the program prints."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, f"the program ended with status {self.process.wait(_END_SECONDS)}"
        return json.loads(line)  # type: ignore[no-any-return]

    def ask(self, **command: Any) -> dict[str, Any]:
        """Send a command and return the answer."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(command) + "\n")
        self.process.stdin.flush()
        return self.says()

    def leave(self) -> None:
        """Close the program's standard input, and wait until the program exits."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        assert self.process.wait(_END_SECONDS) == 0

    def kill(self) -> None:
        self.process.kill()
        with self.process:
            """Closes the pipes and waits."""


class Host:
    """One network namespace.

    Args:
        namespace: the name of the namespace; None for the namespace of the test.
        name: the name of the interface.
        address: the IPv4 address on the link.
        other: the IPv4 address of the other host.
    """

    def __init__(
        self, namespace: str | None, name: str, address: str, other: str, stack: ExitStack
    ) -> None:
        self.address = address
        self._namespace = namespace
        self._name = name
        self._other = other
        self._stack = stack
        # This thread enters the namespace. Processes that it starts are in the namespace, too.
        self._thread = stack.enter_context(ThreadPoolExecutor(1))
        self._netlink = self._do(self._enter)
        stack.callback(self._do, self._netlink.close)
        self._loses = False
        self._up = False

    def _do(self, work: Callable[[], T]) -> T:
        return self._thread.submit(work).result()

    def _enter(self) -> Any:
        from pyroute2 import IPRoute, netns

        if self._namespace is not None:
            netns.setns(self._namespace)
        return IPRoute()

    def _index(self) -> int:
        found: int = self._netlink.link_lookup(ifname=self._name)[0]
        return found

    def join(self, other: Host) -> None:
        """Create the link."""

        def make() -> None:
            peer = {"ifname": other._name, "net_ns_fd": other._namespace}
            self._netlink.link("add", ifname=self._name, kind="veth", peer=peer)

        self._do(make)
        for host in (self, other):
            host._do(host._configure)
            host.up = True

    def _configure(self) -> None:
        if self._namespace is not None:
            loopback = self._netlink.link_lookup(ifname="lo")[0]
            self._netlink.link("set", index=loopback, state="up")
        self._netlink.addr("add", index=self._index(), address=self.address, prefixlen=24)

    @property
    def up(self) -> bool:
        """Whether this host's end of the link is up."""
        return self._up

    @up.setter
    def up(self, up: bool) -> None:
        state = "up" if up else "down"
        self._do(lambda: self._netlink.link("set", index=self._index(), state=state))
        self._up = up

    @property
    def loses(self) -> bool:
        """Whether the packets that this host sends are lost, without an error."""
        return self._loses

    @loses.setter
    def loses(self, loses: bool) -> None:
        def change() -> None:
            neighbour = {"ifindex": self._index(), "dst": self._other}
            if loses:
                self._netlink.neigh("replace", **neighbour, lladdr=_NOBODY, state="permanent")
            else:
                self._netlink.neigh("del", **neighbour)

        self._do(change)
        self._loses = loses

    def run(self, program: Path, *args: str) -> Program:
        """Start a Python program on this host."""

        def start() -> subprocess.Popen[str]:
            return subprocess.Popen(
                [sys.executable, str(program), *args],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )

        made = Program(self._do(start))
        self._stack.callback(made.kill)
        return made


@contextmanager
def two_hosts() -> Iterator[tuple[Host, Host]]:
    """Yield two namespaces that are joined to each other, and to nothing else."""
    with _joined(2) as hosts:
        yield hosts


@contextmanager
def another_host() -> Iterator[tuple[Host, Host]]:
    """Yield the test's own namespace, and another one that is joined to it."""
    with _joined(1) as hosts:
        yield hosts


@contextmanager
def _joined(count: int) -> Iterator[tuple[Host, Host]]:
    if os.geteuid() != 0:
        reason = "network namespaces need root"
        if os.environ.get("CI"):
            pytest.fail(reason)
        pytest.skip(reason)
    from pyroute2 import netns

    # Tests that run at the same time create namespaces in the same system.
    tag = secrets.token_hex(4)
    net = f"10.77.{secrets.randbelow(256)}"
    with ExitStack() as stack:
        made = [f"sglrl-{tag}-{n}" for n in range(count)]
        for namespace in made:
            netns.create(namespace)
            stack.callback(netns.remove, namespace)
        one, two = [None, *made][-2:]
        here = Host(one, f"sg{tag}a", f"{net}.1", f"{net}.2", stack)
        there = Host(two, f"sg{tag}b", f"{net}.2", f"{net}.1", stack)
        here.join(there)
        yield here, there
