"""Inflict faults on the hosts of a running pool, and on their links."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import sglrl

from . import fault_schedule
from .fault_schedule import DRIVER, INWARD, OUTWARD, TWO, Fault
from .network import Host, Program

HEARTBEAT_SECONDS = 3.0
ORPHAN_SECONDS = 15.0
_POLL = 0.05
"""Seconds between checks of the hosts."""
_PATIENCE = 180.0
"""Seconds to wait until a fault can begin. At the end, hosts and workers have the same time until
all of them are ready."""
_DRAIN_SECONDS = 2.0
"""Seconds that a removed worker has to finish its calls. Unfinished calls continue on other
workers."""

_STOPPER = """
import os, signal, sys, time
pid, seconds = int(sys.argv[1]), float(sys.argv[2])
os.kill(pid, signal.SIGSTOP)
time.sleep(seconds)
os.kill(pid, signal.SIGCONT)
"""


class Machine:
    """A host and the ``sglrl node`` that runs on it."""

    def __init__(self, host: Host, name: str, address: str) -> None:
        self.host = host
        self.name = name
        self._address = address
        self.node: Program
        self.start()

    def start(self) -> None:
        options = ["--name", self.name, "--insecure"]
        options += ["--heartbeat-timeout", str(HEARTBEAT_SECONDS)]
        options += ["--orphan-timeout", str(ORPHAN_SECONDS)]
        self.node = self.host.run(Path("-m"), "sglrl", "node", self._address, *options)


class HostStriker:
    """Carries out faults, each in its own task, so that they overlap on different hosts.

    At any time, at least one host has no fault.

    Args:
        client: the client of the pool.
        hosts: the hosts of the pool.
        here: the host of this program.
        machines: the hosts that may be struck.
    """

    def __init__(
        self, client: sglrl.Client, hosts: sglrl.Hosts, here: Host, machines: Sequence[Machine]
    ) -> None:
        self.faults: Counter[str] = Counter()
        self._client = client
        self._hosts = hosts
        self._here = here
        self._machines = machines
        self._struck: set[str] = set()
        """The names of the hosts with a fault."""

    async def run(self, faults: Sequence[Fault]) -> list[str]:
        """Carry out all faults, and wait until all hosts and workers are ready.

        Returns:
            A description of each host and worker that is not ready after ``_PATIENCE`` seconds.
        """
        async with asyncio.TaskGroup() as group:
            for fault in faults:
                await asyncio.sleep(fault.gap)
                try:
                    machines = await self._targets(fault)
                except TimeoutError:
                    raise RuntimeError(f"no fault can begin: {self._described()}") from None
                self.faults[fault.kind] += 1
                group.create_task(self._strike(fault, machines))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_PATIENCE):
                await self._client.wait_until_full()
                while not self._all_connected():
                    await self._hosts.change()
                    await self._client.wait_until_full()
        states = [
            f"worker {w.id} is {w.state}"
            for w in self._client.workers
            if w.state not in ("ready", "retired")
        ]
        there = [host.name for host in self._hosts.hosts if host.state == "connected"]
        return states + [
            f"host {m.name} is not there" for m in self._machines if m.name not in there
        ]

    def _all_connected(self) -> bool:
        states = [host.state for host in self._hosts.hosts]
        return states.count("connected") == len(states) >= len(self._machines)

    def _described(self) -> str:
        workers = [f"{w.id} {w.state} on {w.host}" for w in self._client.workers]
        workers = [text for text in workers if "retired" not in text]
        hosts = [f"{host.name} {host.state}" for host in self._hosts.hosts]
        return f"workers {workers}, hosts {hosts}, hosts with a fault {sorted(self._struck)}"

    async def _targets(self, fault: Fault) -> list[Machine]:
        """Wait until enough hosts have no fault, and return the hosts to strike."""
        wanted = {DRIVER: 0, TWO: 2}.get(fault.kind, 1)
        async with asyncio.timeout(_PATIENCE):
            while True:
                await self._spread()
                serving = {w.host for w in self._client.workers if w.state == "ready"}
                free = [m for m in self._machines if m.name not in self._struck]
                first = fault.target % len(free) if free else 0
                targets = [*free[first:], *free[:first]][:wanted]
                rest = [m.name for m in free if m not in targets and m.name in serving]
                if len(targets) == wanted and rest:
                    self._struck |= {m.name for m in targets}
                    return targets
                await asyncio.sleep(_POLL)

    async def _spread(self) -> None:
        """Move a worker to a host that has returned without a worker, as a user would."""
        states = {host.name: host.state for host in self._hosts.hosts}
        workers = [w for w in self._client.workers if w.state not in ("draining", "retired")]
        counts = Counter({name: 0 for name, state in states.items() if state == "connected"})
        counts.update(w.host for w in workers if w.host)
        empty = [name for name in counts if not counts[name] and name not in self._struck]
        full, most = max(counts.items(), key=lambda item: item[1], default=("", 0))
        crowd = [w.id for w in workers if w.host == full and w.state == "ready"]
        if not empty or most < 2 or not crowd:
            return
        # A fault may make these calls fail.
        with contextlib.suppress(sglrl.SglrlError):
            await self._client.add_workers(1)
            await self._client.remove_worker(crowd[0], timeout=_DRAIN_SECONDS)

    async def _strike(self, fault: Fault, machines: list[Machine]) -> None:
        try:
            match fault.kind:
                case fault_schedule.DRIVER:
                    command = [sys.executable, "-c", _STOPPER, str(os.getpid()), str(fault.seconds)]
                    stopper = subprocess.Popen(command)
                    await asyncio.to_thread(stopper.wait)
                case fault_schedule.WORKER:
                    pids = [w.pid for w in self._client.workers if w.host == machines[0].name]
                    for pid in pids[:1]:
                        with contextlib.suppress(ProcessLookupError):
                            os.kill(pid, signal.SIGKILL)
                case fault_schedule.NODE | fault_schedule.TWO:
                    for machine in machines:
                        machine.node.kill()
                    await asyncio.sleep(fault.seconds)
                    for machine in machines:
                        machine.start()
                case _:
                    with self._broken(fault.kind, machines[0].host):
                        await asyncio.sleep(fault.seconds)
        finally:
            self._struck -= {machine.name for machine in machines}

    @contextlib.contextmanager
    def _broken(self, kind: str, host: Host) -> Iterator[None]:
        """Break the link of a host while the block runs."""

        def set_fault(fails: bool) -> None:
            if kind == INWARD:
                self._here.lose_towards(host, fails)
            elif kind == OUTWARD:
                host.loses = fails
            else:
                host.up = not fails

        set_fault(True)
        try:
            yield
        finally:
            set_fault(False)
