"""``serve``: run an HTTP gateway to a pool in one or several processes of its own."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from contextlib import AsyncExitStack
from typing import Any, Self

import msgspec

from ..actors.handles import WorkerHandle
from ..actors.spawning import ActorHandle, launch_spec_of
from ..client.client import Client
from ..config import FabricConfig, GatewayOptions, PoolConfig, check_gateway_packages, positive
from ..control.snapshot import GatewaySnapshot
from ..driver.launcher import LocalLauncher
from ..driver.pool import Pool
from ..driver.temporary_folders import make_folder, remove_folder
from ..errors import Closed, RemoteError, SglrlError, UsageError
from ..inference.prompts import load_tokenizer
from ..inference.slow_stage import shown_if_slow
from ..sessions.rewards import RewardValue
from ..sessions.trajectory import Trajectory
from .settings import ProcessPlace, Settings, names_of

logger = logging.getLogger("sglrl.gateway")

_START_SECONDS = 120.0
_WINDOW = 256


class GatewaySession:
    """A session for one run of an agent: an async context manager, from ``Gateway.session``.

    The agent needs only ``base_url`` and ``api_key``. Either of them selects the session, so an
    agent that lets users set only one of them works too.

    Attributes:
        base_url: the base URL of OpenAI's API: ``http://.../sessions/<id>/v1``.
        api_key: the API key for the agent's client.
        trajectory: the trajectory of all turns, once the block has ended. None: no turn was
            sampled. Turns that still run at the end of the block are aborted.
    """

    base_url: str
    api_key: str

    def __init__(
        self,
        gateway: Gateway,
        metadata: Mapping[str, Any],
        reward_weights: Mapping[str, float] | None,
    ) -> None:
        self._gateway = gateway
        self._metadata = dict(metadata)
        self._weights = None if reward_weights is None else dict(reward_weights)
        self._id = ""
        self._process: WorkerHandle
        self.trajectory: Trajectory | None = None

    async def __aenter__(self) -> Self:
        opened = await self._gateway._processes.open_session(self._metadata, self._weights)
        self._id = opened.id
        # The id of a session begins with the number of the process that has the session.
        self._process = self._gateway._processes[int(opened.id.partition("-")[0])]
        self.base_url = f"{self._gateway.url}/sessions/{opened.id}/v1"
        self.api_key = opened.key
        return self

    async def __aexit__(self, kind: object, *exc: object) -> None:
        try:
            record = await self._process.end_session(self._id)
        except SglrlError as error:
            if kind is None:
                raise Closed(f"the session was lost: {error}") from error
            logger.warning("the session of an agent that raised was lost: %s", error)
            return
        if record is not None:
            decode = self._gateway._client.requests.decode
            self.trajectory = Trajectory.from_record(record).with_decode(decode)

    async def reward(self, value: RewardValue, name: str = "", *, call: str | None = None) -> None:
        """Add to the reward of the last turn, or of the turn that has the tool call ``call``.

        See ``Session.reward``.

        Raises:
            UsageError: no turn was sampled, no turn has this tool call, or a value is not finite.
        """
        try:
            await self._process.reward(self._id, value, name, call)
        except RemoteError as error:
            raise UsageError(str(error)) from error


class Gateway:
    """A running gateway: an async context manager, from ``serve``.

    Attributes:
        url: ``http://host:port``, or https, without the ``/v1`` of OpenAI's API.
    """

    def __init__(self, client: Client, settings: Settings, processes: int) -> None:
        self._client = client
        self._settings = settings
        self._count = processes
        self._processes: ActorHandle
        self._stack = AsyncExitStack()
        self.url = ""

    async def __aenter__(self) -> Self:
        from ..transport.http_listeners import reserved
        from .process import GatewayProcess

        client, settings = self._client, self._settings
        # Check here that the tokenizer can be loaded. The same error in a process of the gateway
        # would come with a remote traceback.
        await load_tokenizer(client.requests.box)
        async with AsyncExitStack() as stack:
            # The port stays reserved, so that a process that replaces another can listen at it.
            port = stack.enter_context(reserved(settings.host, settings.port)).getsockname()[1]
            sockets: tuple[str, ...] = ()
            if self._count > 1:
                folder = make_folder("gateway-")
                stack.callback(remove_folder, folder, os.getpid())
                sockets = tuple(os.path.join(folder, str(i)) for i in range(self._count))
            host = client.pool.weights.host
            settings = msgspec.structs.replace(settings, port=port, weights_host=host)
            of_client = client.entry, client.model, client.timeout
            places = [ProcessPlace(i, sockets) for i in range(self._count)]
            arguments = [(settings, *of_client, place) for place in places]
            launch_specs = [
                launch_spec_of(GatewayProcess, a, replicas=1, window=_WINDOW) for a in arguments
            ]
            pool = Pool(
                launch_specs,
                more=lambda n, present: launch_specs[:n],
                name="the gateway",
                # The fork server imports the tokenizer's library, once for all gateways.
                launcher=LocalLauncher("tokenizer", None, _START_SECONDS),
                fabric=FabricConfig(),
                config=PoolConfig(start_timeout=_START_SECONDS),
            )
            self._processes = ActorHandle(GatewayProcess, pool)
            async with shown_if_slow("starting the gateway", shown=client.requests.box.shown):
                await stack.enter_async_context(self._processes)
            self.url = settings.url(port)
            gateways = client.observed.gateways
            gateways.append(self.snapshot)
            stack.callback(gateways.remove, self.snapshot)
            self._stack = stack.pop_all()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._stack.aclose()

    async def snapshot(self) -> GatewaySnapshot:
        """Return the requests and sessions of all processes of the gateway."""
        parts: list[GatewaySnapshot] = await self._processes.broadcast.snapshot()
        return GatewaySnapshot(
            url=self.url,
            running=sum(part.running for part in parts),
            sessions=[session for part in parts for session in part.sessions],
        )

    def session(
        self,
        metadata: Mapping[str, Any] | None = None,
        *,
        reward_weights: Mapping[str, float] | None = None,
    ) -> GatewaySession:
        """Return a session for one run of an agent: ``async with gateway.session() as session``.

        Args:
            metadata: values to store in the trajectory.
            reward_weights: the weights of rewards, by the name of the reward
                (``GatewaySession.reward``). All other rewards have the weight 1.
        """
        return GatewaySession(self, metadata or {}, reward_weights)


def serve(
    client: Client,
    *,
    host: str = "127.0.0.1",
    port: int = 0,
    name: str | tuple[str, ...] = (),
    api_key: str = "",
    tls_cert: str | os.PathLike[str] = "",
    tls_key: str | os.PathLike[str] = "",
    keep_disconnected: bool = True,
    expire_after: float = 3600.0,
    max_sessions: int = 100_000,
    max_body_bytes: int = 16 << 20,
    processes: int = 1,
    weight_device: str = "cuda:0",
    unsupported_tools: str = "reject",
    later_system: str = "keep",
) -> Gateway:
    """Return an HTTP gateway to a pool: ``async with sglrl.serve(client) as gateway``.

    Clients of OpenAI's chat completions use ``gateway.url + "/v1"``. The gateway runs in processes
    of its own, so HTTP, JSON, rendering and parsing do not delay this process.

    Args:
        client: the client of the pool. It must be open while the gateway runs.
        host: the address to listen at.
        port: the port to listen at. 0: any free port.
        name: the name of the model for clients, or several. (): the model's name on the hub, or the
            name of its folder.
        api_key: the key that clients must send, unless they send the key of a session. "": any key
            is accepted. An address that other machines can reach needs a key.
        tls_cert, tls_key: files of a certificate and its key in PEM format, for https.
        keep_disconnected: if a client disconnects, sample its turn to the end, and keep the turn in
            the session's trajectory. If the client sends the request again, it receives this turn.
            False: abort the turn.
        expire_after: seconds without a request after which a session ends.
        max_sessions: maximum number of open sessions in each process.
        max_body_bytes: maximum size of a request's body.
        processes: number of processes that share the port.
        weight_device: the GPU on which the gateway receives the weights of trainers that use the
            requests of SGLang's server. This process must see the GPU. The trainer must use another
            GPU, because NCCL does not let two ranks use the same one.
        unsupported_tools, later_system: see ``GatewayOptions``.

    Raises:
        UsageError: an argument is wrong, or a package is missing. When the gateway is entered: the
            address cannot be used, or the model has no usable tokenizer.
        Closed: when a session is left, if it has expired or the gateway's process has died.
    """
    check_gateway_packages()
    names = tuple(name) if isinstance(name, (tuple, list)) else (name,)
    return Gateway(
        client,
        Settings(
            names=names or names_of(client.model),
            host=host,
            port=port,
            api_key=api_key,
            tls_cert=_absolute(tls_cert),
            tls_key=_absolute(tls_key),
            keep_disconnected=keep_disconnected,
            expire_after=expire_after,
            max_sessions=max_sessions,
            max_body_bytes=max_body_bytes,
            weight_device=weight_device,
            options=GatewayOptions(unsupported_tools=unsupported_tools, later_system=later_system),
        ),
        positive("processes", processes),
    )


def _absolute(file: str | os.PathLike[str]) -> str:
    """Return the absolute path of a file, because another process may have another folder."""
    path = os.fspath(file)
    return os.path.abspath(path) if path else ""
