"""Start the workers of one pool on hosts."""

from __future__ import annotations

import asyncio
import contextlib
import os
import tempfile
import weakref
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType

import msgspec

from ..core.placement import WorkerPlace
from ..driver.environment import environment
from ..driver.launcher import RANKS, LaunchSpec
from ..driver.temporary_folders import make_folder, remove_folder
from ..driver.worker_info import HostInfo
from ..errors import UsageError, WorkerStartError
from ..transport.system_limits import no_file
from ..wire.codec import encode
from ..wire.nodes import FromNode, FromPool, OpenPool, Output, PoolOpened, ToPool
from ..wire.processes import Dump, EngineSpec, Exited, Fork, Forked, Kill, WorkerSpec
from .hosts import Hosts
from .node_link import NodeLink


class HostLauncher:
    """Starts the processes of one pool on hosts (``driver.launcher.Launcher``).

    Args:
        hosts: the hosts, which other pools may use too.
        kind: "plain" for actors and the fake engine, "sglang" for SGLang.
        device: "cpu", "cuda", or "auto", which means "cuda" if a host has GPUs.
        timeout: maximum seconds to wait for hosts and for their fork servers.
        env: environment variables of the workers. Fork servers use them when they import SGLang.
    """

    def __init__(
        self,
        hosts: Hosts,
        kind: str,
        device: str,
        timeout: float,
        env: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self._hosts = hosts
        self._kind = kind
        self._device = device
        self._timeout = timeout
        self._env = dict(env)
        self._pool = -1
        self._folder: Path | None = None
        self._on_forked: Callable[[int, int], None]
        self._on_exited: Callable[[int, int], None]
        self._places: dict[int, WorkerPlace] = {}
        """The current or last place of each worker, by its index."""
        self._running: dict[int, NodeLink] = {}
        """The node of each process that has not exited, by the key of the process."""
        self._opened: dict[NodeLink, asyncio.Future[PoolOpened]] = {}
        self._logs: dict[int, Path] = {}
        self.lost = ""
        self.missing = ""

    @property
    def elsewhere(self) -> bool:
        return True

    @property
    def driver_ip(self) -> str:
        return self._hosts.own_ip

    @property
    def stage(self) -> str:
        return "waiting for hosts"

    @property
    def leaving(self) -> bool:
        return False

    def start(
        self, on_forked: Callable[[int, int], None], on_exited: Callable[[int, int], None]
    ) -> Path:
        self._on_forked = on_forked
        self._on_exited = on_exited
        try:
            self._folder = make_folder("pool-")
        except OSError as error:
            raise no_file(tempfile.gettempdir(), error) from None
        weakref.finalize(self, remove_folder, self._folder, os.getpid())
        self._pool = self._hosts.add_pool(self)
        return self._folder

    async def prepare(self, launch_specs: Mapping[int, LaunchSpec]) -> None:
        """Find a place for each worker, and wait until the fork server on its host is warm.

        A worker keeps its place until the session of its host ends.

        Raises:
            WorkerStartError: there are too few hosts or GPUs, or a host cannot start workers.
        """
        try:
            async with asyncio.timeout(self._timeout):
                await self._prepare(launch_specs)
        except TimeoutError:
            raise WorkerStartError(
                f"no place for workers within {self._timeout:g} s: {self.missing}"
            ) from None
        self.missing = ""

    async def _prepare(self, launch_specs: Mapping[int, LaunchSpec]) -> None:
        if not self._places:
            while lacking := self._hosts.lacking():
                self.missing = lacking
                await self._hosts.change()
        device = self._chosen_device()
        for index in launch_specs:
            place = self._places.get(index)
            if place is not None and not self._hosts.placement.holds(place):
                # The session of the host has ended. Even if the host has returned since, another
                # worker may have the place.
                del self._places[index]
        missing = [index for index in launch_specs if index not in self._places]
        if missing:
            gpus = len(launch_specs[missing[0]].bodies) if device == "cuda" else 0
            while (places := self._hosts.placement.take(len(missing), gpus)) is None:
                self.missing = self._hosts.too_few(len(missing), gpus)
                await self._hosts.change()
            self._places.update(zip(missing, places, strict=True))
        links = {self._hosts.link(self._places[index].host) for index in launch_specs}
        await asyncio.gather(*(self._open(link, device) for link in links if link is not None))

    def _chosen_device(self) -> str:
        if self._kind == "plain":
            return "cpu"
        if self._device != "auto":
            return self._device
        return "cuda" if any(host.gpus for host in self._hosts.hosts) else "cpu"

    async def _open(self, link: NodeLink, device: str) -> None:
        opened = self._opened.get(link)
        if opened is None:
            opened = self._opened[link] = asyncio.get_running_loop().create_future()
            preload = "sglang-cuda" if device == "cuda" else self._kind
            link.session.send(OpenPool(self._pool, preload, self._env))
            self.missing = f"host {link.name} imports what workers need"
        answer = await asyncio.shield(opened)
        if answer.error:
            del self._opened[link]
            raise WorkerStartError(
                f"host {link.name} cannot start workers: {answer.error}", output=answer.output
            )

    def request(self, key: int, spec: WorkerSpec, env: Mapping[str, str], log: Path) -> bytes:
        """Return the encoded ``Fork`` message of a process.

        The process gets the environment of its node, updated with ``env``.
        """
        place = self._places[key // RANKS]
        self._logs[key] = log
        env = dict(env)
        body = spec.body
        if isinstance(body, EngineSpec):
            here = Counter(other.host for other in self._places.values())[place.host]
            offer = self._hosts.placement.offers[place.host]
            if place.gpus:
                env["CUDA_VISIBLE_DEVICES"] = ",".join(place.gpus)
            body = msgspec.structs.replace(
                body,
                device="cuda" if place.gpus else "cpu",
                threads=max(1, (offer.cores - 1) // (here * body.tp_size)),
                memory_share=1 / (here * body.tp_size),
            )
        elif body.code:
            self._check_python(place.host)
        spec = msgspec.structs.replace(spec, body=body)
        return encode(Fork(key=key, spec=spec, env=env, log="", cwd="", sys_path=None))

    def _check_python(self, host: str) -> None:
        """Raise ``UsageError`` if a class cannot be sent by value to a host.

        The compiled code of a function works only in one minor version of Python.
        """
        link = self._hosts.link(host)
        ours = environment().python
        if link is not None and link.hello.environment.python != ours:
            raise UsageError(
                f"host {host} has Python {link.hello.environment.python} and this program has "
                f"{ours}: a class that is not in an installed package needs the same version"
            )

    def fork(self, key: int, request: bytes) -> None:
        link = self._hosts.link(self._places[key // RANKS].host)
        if link is None:
            asyncio.get_running_loop().call_soon(self._on_exited, key, -9)
            return
        self._running[key] = link
        link.session.send(ToPool(self._pool, msgspec.Raw(request)))  # type: ignore[arg-type]

    def send(self, message: Kill | Dump) -> None:
        link = self._running.get(message.key)
        if link is not None:
            link.session.send(ToPool(self._pool, message))

    def release(self, index: int) -> None:
        """Release the place of a worker that will not be replaced."""
        place = self._places.pop(index, None)
        if place is not None:
            self._hosts.release(place)

    def host(self, index: int) -> str:
        """Return the name of the host of a worker."""
        place = self._places.get(index)
        return "" if place is None else place.host

    def reaches(self, index: int) -> bool:
        """Return whether the host of a worker is connected."""
        link = self._hosts.link(self.host(index))
        return link is not None and link.session.connected

    @property
    def hosts(self) -> list[HostInfo]:
        return self._hosts.hosts

    async def close(self) -> None:
        if self._folder is not None:
            remove_folder(self._folder, os.getpid())
        if self._pool >= 0:
            for index in list(self._places):
                self.release(index)
            number, self._pool = self._pool, -1
            await self._hosts.remove_pool(number)

    # --- events -----------------------------------------------------------------------------------

    def on_node(self, link: NodeLink, message: FromNode) -> None:
        match message:
            case PoolOpened() if link in self._opened:
                opened = self._opened[link]
                if not opened.done():
                    opened.set_result(message)
            case FromPool(message=Forked(key=key, pid=pid)):
                self._on_forked(key, pid)
            case FromPool(message=Exited(key=key, status=status)) if key in self._running:
                del self._running[key]
                self._on_exited(key, status)
            case Output(key=key, text=text) if key in self._logs:
                # If there is no room for the log, the worker still runs.
                with (
                    contextlib.suppress(OSError),
                    self._logs[key].open("a", encoding="utf-8") as file,
                ):
                    file.write(text)

    def on_ended(self, link: NodeLink, reason: str) -> None:
        opened = self._opened.pop(link, None)
        if opened is not None and not opened.done():
            opened.set_result(PoolOpened(self._pool, reason))
        # ``on_exited`` reads this reason.
        self.lost = reason
        for key in [key for key, other in self._running.items() if other is link]:
            del self._running[key]
            self._on_exited(key, -9)
        self.lost = ""
