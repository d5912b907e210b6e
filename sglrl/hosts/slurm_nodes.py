"""Start nodes with ``srun``, one on each machine of a Slurm allocation."""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import socket
import sys
from collections import deque
from collections.abc import Callable
from ipaddress import ip_address
from typing import Final

import msgspec

from ..errors import UsageError
from ..wire.processes import ClientKeys

logger = logging.getLogger("sglrl.hosts")

_END_SECONDS: Final = 10.0
"""Maximum seconds in which ``srun`` ends its tasks."""
_LAST_LINES: Final = 10
"""Maximum lines of srun's output in an error."""


class SlurmNodes:
    """Starts a node on each machine of the allocation (``hosts.started.NodeStarter``)."""

    name = "Slurm"

    def check(self) -> None:
        if "SLURM_JOB_ID" not in os.environ:
            raise UsageError(
                "hosts='slurm' needs an allocation: run this program with sbatch, or after salloc"
            )
        if shutil.which("srun") is None:
            raise UsageError("hosts='slurm' needs the command srun, which is not in PATH")

    def own_host(self) -> str:
        # The machines of a cluster can resolve each other's names, but may have no default route.
        name = os.environ.get("SLURMD_NODENAME") or socket.gethostname()
        try:
            ip = socket.gethostbyname(name)
        except OSError:
            return "0.0.0.0"
        # Debian gives a machine's own name the address 127.0.1.1.
        return "0.0.0.0" if ip_address(ip).is_loopback else ip

    async def run(self, address: str, keys: ClientKeys, expect: Callable[[int], None]) -> str:
        count = int(os.environ.get("SLURM_JOB_NUM_NODES", "1"))
        expect(count)
        process = await asyncio.create_subprocess_exec(
            *command(count, address),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
            # Ctrl-C must not reach ``srun``. This program handles it, and then ends the nodes.
            start_new_session=True,
        )
        assert process.stdin is not None
        assert process.stderr is not None
        last: deque[str] = deque(maxlen=_LAST_LINES)
        try:
            # Other users could read keys in a command line or in a shared file.
            process.stdin.write(msgspec.json.encode(keys) + b"\n")
            process.stdin.close()
            async for line in process.stderr:
                last.append(line.decode(errors="replace").rstrip())
                logger.debug("srun: %s", last[-1])
            return f"srun ended with status {await process.wait()}:\n" + "\n".join(last)
        finally:
            if process.returncode is None:
                process.terminate()
                try:
                    await asyncio.wait_for(process.wait(), _END_SECONDS)
                except TimeoutError:
                    process.kill()


def command(count: int, address: str) -> list[str]:
    """Return the command line that starts ``count`` nodes (https://slurm.schedmd.com/srun.html)."""
    return [
        "srun",
        f"--nodes={count}",
        f"--ntasks={count}",
        "--ntasks-per-node=1",
        # Use all resources of the allocation on each machine, even while other steps run.
        "--overlap",
        "--mem=0",
        "--cpu-bind=none",
        # When one node ends, the other nodes keep running.
        "--kill-on-bad-exit=0",
        "--wait=0",
        "--label",
        sys.executable,
        "-m",
        "sglrl",
        "node",
        address,
        "--keys",
        "-",
    ]
