"""Several hosts on one machine: network namespaces, with links that a program can break.

``pair`` joins two namespaces by a veth pair. ``star`` joins several namespaces to the program's own
namespace and to each other. It joins them by a bridge, or by a program that delays and loses frames
(``bench.switch``)::

    with star(3, delay=0.05) as (here, others):
        others[0].loses = True   # packets from this host to ``here`` are lost; it still receives
        others[1].up = False     # this host's interface is down, so nothing arrives or leaves

A program on a host exchanges JSON with the process that started it: one object a line, over the
program's standard input and output. At the end of the block, the programs are killed and the
namespaces are removed. Network namespaces need root.
"""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")

_NOBODY = "02:00:00:00:00:01"
"""A hardware address that no interface has. Packets to it are lost."""
_END_SECONDS = 30.0
_CREATE_TAP, _TAP, _PLAIN_FRAMES = 0x400454CA, 0x0002, 0x1000
"""The values of TUNSETIFF, IFF_TAP and IFF_NO_PI in linux/if_tun.h."""


def may_make_namespaces() -> bool:
    """Return whether this process may make network namespaces."""
    return os.geteuid() == 0


class Program:
    """A Python program on a host."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process

    def says(self) -> dict[str, Any]:
        """Return the object in the next line that the program prints."""
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
            """Leaving the block closes the pipes and waits for the process."""


class Host:
    """One network namespace.

    Args:
        namespace: the name of the namespace. None: the namespace of this process.
        name: the name of the host's interface.
        address: the IPv4 address of the host on the link.
        other: the IPv4 address of the host at the other end of the link.
        stack: removes the host at its end.
    """

    def __init__(
        self, namespace: str | None, name: str, address: str, other: str, stack: ExitStack
    ) -> None:
        self.address = address
        self.namespace = namespace
        self._name = name
        self._other = other
        self._stack = stack
        # This thread enters the namespace. Processes that it starts are in the namespace too.
        self._thread = stack.enter_context(ThreadPoolExecutor(1))
        self._netlink = self._do(self._enter)
        stack.callback(self._do, self._netlink.close)
        self._loses = False
        self._up = False

    def _do(self, work: Callable[[], T]) -> T:
        return self._thread.submit(work).result()

    def _enter(self) -> Any:
        from pyroute2 import IPRoute, netns

        if self.namespace is not None:
            netns.setns(self.namespace)
        return IPRoute()

    def _index(self) -> int:
        index: int = self._netlink.link_lookup(ifname=self._name)[0]
        return index

    def join(self, other: Host) -> None:
        """Create a link between this host and another."""

        def make() -> None:
            peer = {"ifname": other._name, "net_ns_fd": other.namespace}
            self._netlink.link("add", ifname=self._name, kind="veth", peer=peer)

        self._do(make)
        for host in (self, other):
            host._do(host._configure)
            host.up = True

    def make_bridge(self) -> None:
        """Create a bridge, to which ``plug_in`` joins other hosts."""

        def make() -> None:
            self._netlink.link("add", ifname=self._name, kind="bridge")
            self._configure()

        self._stack.callback(self._do, lambda: self._netlink.link("del", index=self._index()))
        self._do(make)
        self.up = True

    def plug_in(self, other: Host, port: str) -> None:
        """Join another host to the bridge of this one, through an interface named ``port``."""

        def make() -> None:
            peer = {"ifname": other._name, "net_ns_fd": other.namespace}
            self._netlink.link("add", ifname=port, kind="veth", peer=peer)
            index = self._netlink.link_lookup(ifname=port)[0]
            self._netlink.link("set", index=index, master=self._index(), state="up")

        self._do(make)
        other._do(other._configure)
        other.up = True

    def make_tap(self) -> int:
        """Create an interface whose frames a program reads and writes. Return its descriptor."""

        def make() -> int:
            file = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
            # https://docs.kernel.org/networking/tuntap.html
            request = struct.pack("16sH22x", self._name.encode(), _TAP | _PLAIN_FRAMES)
            try:
                fcntl.ioctl(file, _CREATE_TAP, request)
                self._configure()
            except BaseException:
                os.close(file)
                raise
            return file

        file = self._do(make)
        self.up = True
        return file

    def _configure(self) -> None:
        if self.namespace is not None:
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
    def sent_bytes(self) -> int:
        """Number of bytes that this host has sent, including the headers of all layers."""

        def read() -> int:
            (link,) = self._netlink.get_links(self._index())
            return int(link.get_attr("IFLA_STATS64")["tx_bytes"])

        return self._do(read)

    @property
    def loses(self) -> bool:
        """Whether packets that this host sends to the other end of the link are lost silently."""
        return self._loses

    @loses.setter
    def loses(self, loses: bool) -> None:
        self._lose(self._other, loses)
        self._loses = loses

    def lose_towards(self, other: Host, loses: bool) -> None:
        """Set whether packets that this host sends to one other host are lost."""
        self._lose(other.address, loses)

    def _lose(self, address: str, loses: bool) -> None:
        def change() -> None:
            neighbour = {"ifindex": self._index(), "dst": address}
            if loses:
                self._netlink.neigh("replace", **neighbour, lladdr=_NOBODY, state="permanent")
            else:
                self._netlink.neigh("del", **neighbour)

        self._do(change)

    def run(self, program: Path, *args: str) -> Program:
        """Start a Python program on this host."""

        def start() -> subprocess.Popen[str]:
            return subprocess.Popen(
                [sys.executable, str(program), *args],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                encoding="utf-8",
            )

        made = Program(self._do(start))
        self._stack.callback(made.kill)
        return made


@contextmanager
def pair(namespaces: int) -> Iterator[tuple[Host, Host]]:
    """Yield two joined hosts.

    Args:
        namespaces: number of new namespaces. With 1, the first host is this process's own
            namespace. With 2, both hosts are new namespaces.
    """
    with ExitStack() as stack:
        tag, net, made = _namespaces(namespaces, stack)
        one, two = [None, *made][-2:]
        here = Host(one, f"sg{tag}a", f"{net}.1", f"{net}.2", stack)
        there = Host(two, f"sg{tag}b", f"{net}.2", f"{net}.1", stack)
        here.join(there)
        yield here, there


@contextmanager
def star(count: int, *, delay: float = 0.0, loss: float = 0.0) -> Iterator[tuple[Host, list[Host]]]:
    """Yield this process's own namespace, and others that are joined to it and to each other.

    Args:
        count: number of other namespaces.
        delay: the additional delay of each packet, in seconds.
        loss: the share of the packets that are lost, 0 to 1.
    """
    with ExitStack() as stack:
        tag, net, made = _namespaces(count, stack)
        here = Host(None, f"sg{tag}", f"{net}.1", f"{net}.2", stack)
        others = [
            Host(namespace, f"sg{tag}a{n}", f"{net}.{n + 2}", f"{net}.1", stack)
            for n, namespace in enumerate(made)
        ]
        if delay or loss:
            stack.enter_context(_switch([here, *others], delay, loss))
        else:
            here.make_bridge()
            for n, other in enumerate(others):
                here.plug_in(other, f"sg{tag}b{n}")
        yield here, others


@contextmanager
def _switch(hosts: Sequence[Host], delay: float, loss: float) -> Iterator[None]:
    """Join hosts by a program that delays and loses frames."""
    files: list[int] = []
    try:
        files.extend(host.make_tap() for host in hosts)
        command = [sys.executable, "-m", "bench.switch", str(delay), str(loss), *map(str, files)]
        process = subprocess.Popen(command, pass_fds=files, cwd=Path(__file__).parents[1])
    finally:
        for file in files:
            os.close(file)
    with process:
        try:
            yield
        finally:
            process.kill()


def _namespaces(count: int, stack: ExitStack) -> tuple[str, str, list[str]]:
    """Create namespaces. Return a tag for names of interfaces, a network, and the namespaces.

    The tag and the network are random, because other programs may create namespaces on the same
    machine at the same time.
    """
    from pyroute2 import netns

    tag = secrets.token_hex(4)
    net = f"10.{64 + secrets.randbelow(64)}.{secrets.randbelow(256)}"
    made = [f"sglrl-{tag}-{n}" for n in range(count)]
    for namespace in made:
        netns.create(namespace)
        stack.callback(netns.remove, namespace)
    return tag, net, made
