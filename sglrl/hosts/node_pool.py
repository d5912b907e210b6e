"""The workers of one pool on a node."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Final

import msgspec

from ..config import LOCAL_MODELS
from ..driver.fork_server import ForkConnection, ForkServer, fork_server, import_variables
from ..errors import SglrlError, WorkerStartError
from ..transport.system_limits import no_file
from ..wire.codec import encode
from ..wire.nodes import FromNode, FromPool, Output, PoolOpened
from ..wire.processes import Dump, EngineSpec, Exited, Fork, Forked, Kill

_START_SECONDS: Final = 600.0
"""Maximum seconds in which the fork server imports its modules."""
_STACKS_SECONDS: Final = 0.5
"""Seconds in which a worker writes its stacks."""
_MAX_OUTPUT: Final = 32_768
"""Maximum number of bytes of a worker's output in one message."""


class NodePool:
    """Starts the workers of one pool on this machine, through a fork server.

    Args:
        number: the number of the pool in messages.
        preload: the kind of fork server, see ``driver.fork_server.fork_server``.
        env: the environment variables of the workers, in addition to this process's variables.
        report: sends a message to the driver.
        outer_address: ``outer_address(address)`` returns the address at which this machine reaches
            the driver's socket with this address.
    """

    def __init__(
        self,
        number: int,
        preload: str,
        env: dict[str, str],
        report: Callable[[FromNode], None],
        outer_address: Callable[[str], str],
    ) -> None:
        self._number = number
        self._preload = preload
        self._env = import_variables(preload, env)
        self._report = report
        self._outer_address = outer_address
        self._folder: Path | None = None
        self._server: ForkServer | None = None
        self._connection: ForkConnection | None = None
        self._running: set[int] = set()
        self._sent: dict[int, int] = {}
        """Number of bytes of each process's log that were sent, by the key of the process."""

    async def open(self) -> None:
        """Connect to the fork server and report ``PoolOpened``."""
        try:
            await self._connect()
        except WorkerStartError as error:
            self._report(PoolOpened(self._number, error.message, error.output))
        except TimeoutError:
            late = f"the fork server was not ready within {_START_SECONDS:g} s"
            self._report(PoolOpened(self._number, late))
        else:
            self._report(PoolOpened(self._number))

    async def _connect(self) -> None:
        self._server = fork_server(self._preload, env=self._env)
        if self._folder is None:
            try:
                self._folder = Path(tempfile.mkdtemp(prefix="pool-", dir=self._server.folder))
            except OSError as error:
                raise no_file(self._server.folder, error) from None
        self._connection = await ForkConnection.open(
            self._server, self._on_forked, self._on_exited, _START_SECONDS
        )

    async def handle(self, message: Fork | Kill | Dump) -> None:
        """Send a message to the fork server. For ``Fork``, first replace a lost fork server."""
        match message:
            case Fork():
                await self._fork(message)
            case Kill() if self._connection is not None:
                self._connection.send(message)
            case Dump() if self._connection is not None:
                self._connection.send(message)
                asyncio.get_running_loop().call_later(
                    _STACKS_SECONDS, self._report_output, message.key
                )

    async def _fork(self, request: Fork) -> None:
        self._sent[request.key] = 0
        self._running.add(request.key)
        assert self._folder is not None
        log = self._log(request.key)
        try:
            log.write_bytes(b"")
            here = os.getcwd()
            if self._connection is None or not self._connection.alive:
                await self._connect()
        except (WorkerStartError, TimeoutError, OSError) as error:
            self._refuse(request.key, f"the host's fork server cannot start it: {error}")
            return
        assert self._connection is not None
        body = request.spec.body
        if isinstance(body, EngineSpec):
            if body.model in LOCAL_MODELS and body.engine != "fake":
                try:
                    folder = await _local_model(body.model)
                    body = msgspec.structs.replace(body, model=folder)
                except SglrlError as error:
                    self._refuse(request.key, error.message)
                    return
            if _is_missing(body):
                self._refuse(
                    request.key,
                    f"this host has no folder {body.model}; give a path that all hosts share, or "
                    "the model's name on the hub",
                )
                return
            rendezvous = str(self._folder / Path(body.rendezvous).name)
            body = msgspec.structs.replace(body, rendezvous=rendezvous)
        address = self._outer_address(request.spec.address)
        spec = msgspec.structs.replace(request.spec, body=body, address=address)
        request = msgspec.structs.replace(request, spec=spec, log=str(log), cwd=here, sys_path=None)
        self._connection.fork(request.key, encode(request))

    def _refuse(self, key: int, why: str) -> None:
        """Report that a process could not be started."""
        self._running.discard(key)
        self._report(Output(self._number, key, f"{why}\n"))
        self._report(FromPool(self._number, Exited(key, 1)))

    def _log(self, key: int) -> Path:
        assert self._folder is not None
        return self._folder / f"{key}.log"

    def _report_output(self, key: int) -> None:
        """Send the output of a process since the last report, or only the end if it is long."""
        if self._folder is None or key not in self._sent:
            return
        with contextlib.suppress(OSError), self._log(key).open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(self._sent[key], size - _MAX_OUTPUT))
            self._sent[key] = size
            text = file.read(_MAX_OUTPUT).decode(errors="replace")
            if text:
                self._report(Output(self._number, key, text))

    def _on_forked(self, key: int, pid: int) -> None:
        self._report(FromPool(self._number, Forked(key, pid)))

    def _on_exited(self, key: int, status: int) -> None:
        if key not in self._running:
            return
        self._running.discard(key)
        self._report_output(key)
        if self._server is not None and self._server.fault:
            self._report(Output(self._number, key, f"{self._server.fault}\n"))
        self._report(FromPool(self._number, Exited(key, status)))

    def close(self) -> None:
        """Kill the workers and remove their logs. Report nothing."""
        self._running.clear()
        if self._connection is not None:
            self._connection.close()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)


async def _local_model(model: str) -> str:
    """Return the folder of a model of ``LOCAL_MODELS``. Another process makes it if needed.

    Raises:
        WorkerStartError: this host cannot make the model.
    """
    made = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "sglrl.launching.local_models",
        model,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    seconds = LOCAL_MODELS[model]
    try:
        async with asyncio.timeout(seconds):
            output, errors = await made.communicate()
    except TimeoutError:
        raise WorkerStartError(
            f"this host did not make the model {model!r} within {seconds:g} s"
        ) from None
    finally:
        if made.returncode is None:
            made.kill()
    if made.returncode:
        *_, last = ["no reason given", *errors.decode(errors="replace").strip().splitlines()]
        raise WorkerStartError(f"this host could not make the model {model!r}: {last}")
    return output.decode().strip().splitlines()[-1]


def _is_missing(body: EngineSpec) -> bool:
    """Return True if the model is the path of a folder that this host does not have."""
    return body.engine != "fake" and os.path.isabs(body.model) and not Path(body.model).exists()
