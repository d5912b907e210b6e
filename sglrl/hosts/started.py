"""Hosts whose nodes this program starts itself, through Slurm or Ray."""

from __future__ import annotations

import asyncio
import logging
import os
import weakref
from collections.abc import Callable
from typing import Final, Protocol

from ..driver.temporary_folders import make_folder, remove_folder
from ..errors import SglrlError, UsageError, WorkerStartError
from ..transport.curve_keys import make_keys, read_client_keys
from ..wire.processes import ClientKeys
from .hosts import Hosts
from .ray_nodes import RayNodes
from .slurm_nodes import SlurmNodes

logger = logging.getLogger("sglrl.hosts")

_END_SECONDS: Final = 15.0
"""Maximum seconds in which the nodes end when the hosts are closed."""


class NodeStarter(Protocol):
    """Starts a node on each machine that this program may use.

    Attributes:
        name: the name of the system that starts the nodes, for messages.
    """

    name: str

    def check(self) -> None:
        """Raise ``UsageError`` if this program cannot use the system."""
        ...

    def own_host(self) -> str:
        """Return the IPv4 address at which the nodes reach this machine.

        If the address is not known, return "0.0.0.0". The driver then guesses the address from the
        routes of this machine.
        """
        ...

    async def run(self, address: str, keys: ClientKeys, expect: Callable[[int], None]) -> str:
        """Start the nodes, and end them when this coroutine is cancelled.

        Args:
            address: the address to which the nodes connect.
            keys: the keys of the nodes.
            expect: is called with the number of nodes when it is known.

        Returns:
            The reason why the nodes have ended, if they end by themselves.

        Raises:
            SglrlError: the nodes cannot be started.
        """
        ...


class StartedHosts(Hosts):
    """The hosts of a cluster. Their nodes run only while a pool uses the hosts."""

    def __init__(self, starter: NodeStarter) -> None:
        folder = make_folder("keys-")
        weakref.finalize(self, remove_folder, folder, os.getpid())
        make_keys(folder)
        super().__init__(f"tcp://{starter.own_host()}:*", keys=folder)
        self._starter = starter
        self._keys_of_nodes = read_client_keys(folder)
        self._expected: int | None = None
        self._failure = ""
        self._task: asyncio.Task[None] | None = None

    def open(self) -> None:
        super().open()
        if self._task is None:
            self._expected, self._failure = None, ""
            self._task = asyncio.ensure_future(self._run())

    async def close(self) -> None:
        await super().close()
        if not self.is_open and self._task is not None:
            task, self._task = self._task, None
            task.cancel()
            await asyncio.wait([task], timeout=_END_SECONDS)

    def lacking(self) -> str:
        """Return a text about hosts that have not connected yet. Empty if all have connected.

        Raises:
            WorkerStartError: the nodes could not be started, or have ended.
        """
        name = self._starter.name
        if self._failure:
            raise WorkerStartError(f"hosts={name.lower()!r}: {self._failure}")
        if self._expected is None:
            return f"{name} has not started the nodes yet"
        there = len(self.hosts)
        if there >= self._expected:
            return ""
        return f"{there} of the {self._expected} nodes that {name} starts have connected"

    async def _run(self) -> None:
        try:
            why = await self._starter.run(self.address, self._keys_of_nodes, self._expect)
        except SglrlError as error:
            why = error.message
        except Exception as error:
            # Ray and the system raise errors of other types. ``lacking`` reports them.
            logger.exception("the nodes could not be started")
            why = f"{type(error).__name__}: {error}"
        self._failure = why
        self._changed()

    def _expect(self, count: int) -> None:
        self._expected = count
        self._changed()


_STARTERS: Final[dict[str, type[NodeStarter]]] = {"ray": RayNodes, "slurm": SlurmNodes}
_started: Final[dict[str, StartedHosts]] = {}
"""The hosts for each name. All pools of a program share them."""


def hosts_from(hosts: object) -> Hosts | None:
    """Return the hosts for the argument ``hosts`` of ``launch`` and ``spawn``.

    Raises:
        UsageError: ``hosts`` is not valid, or this program cannot use Ray or Slurm.
    """
    if hosts is None or isinstance(hosts, Hosts):
        return hosts
    if not isinstance(hosts, str) or hosts not in _STARTERS:
        raise UsageError(
            f"hosts must be 'ray', 'slurm' or sglrl.Hosts(address, keys=...), got {hosts!r:.100}"
        )
    if hosts not in _started:
        starter = _STARTERS[hosts]()
        starter.check()
        _started[hosts] = StartedHosts(starter)
    return _started[hosts]
