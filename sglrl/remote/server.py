"""Serve clients in other processes: the driver's side of ``remote/client.py``.

Calls of remote clients become calls of the driver's own fabric. Routing, back-pressure, deadlines
and the continuation after a lost worker are therefore the same for all calls. Messages of clients
are not trusted. The server repeats the checks of the remote ``Client``, and the driver drops and
counts malformed messages.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import secrets
import traceback
from collections.abc import Coroutine, Sequence
from typing import Any, Final

from ..client.client import Client
from ..control.operations import Operation, operations_of
from ..core.driver_listener import DriverListener
from ..driver.driver import now
from ..driver.pool import Pool
from ..errors import ProtocolError, SglrlError, from_wire
from ..wire.calls import PROTOCOL_VERSION, Cancel, ItemKind
from ..wire.codec import Buffer, decode_from_client, encode
from ..wire.processes import PoolEntry
from ..wire.remote import (
    Answers,
    BytesRead,
    Hello,
    Leave,
    PoolStatus,
    Rejected,
    Request,
    Requests,
    ToClient,
    Welcome,
    WorkerStatus,
)
from .admission import Admission, arguments
from .forwarding import NEWS_SECONDS, Peer, Relay

logger = logging.getLogger("sglrl.remote")

_MAX_PEERS: Final = 1024
"""The maximum number of clients. A client counts until it sends ``Leave`` or is unreachable."""


class PoolServer(DriverListener):
    """Serves remote clients on the event loop of the ``Client`` that owns the pool.

    Args:
        pool: the pool, which must have started.
        client: the client that owns the pool.

    Attributes:
        address: the address for ``sglrl.connect``. It contains a secret.
    """

    def __init__(self, pool: Pool, client: Client) -> None:
        self._client = client
        self._pool = pool
        self._driver = driver = pool.driver
        self._weights = pool.weights
        self._token = secrets.token_hex(16)
        self._peers: dict[bytes, Peer] = {}
        self._relay = Relay(driver, self._news, self._lose)
        self._admission = Admission(
            self._relay,
            driver,
            client.requests,
            operations_of(type(client)),
            self._ask,
        )
        self._watch: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self.address = f"{pool.outer_address}#{self._token}"
        pool.weights.on_version.add(self._tell_all)
        driver.add_listener(self)

    @property
    def entry(self) -> PoolEntry:
        return self._pool.entry(self._token)

    def on_loads(self) -> None:
        # Send the status to clients with long calls, which may get no answers for a long time.
        waiting = [
            peer for peer in self._peers.values() if peer.calls and now() - peer.told > NEWS_SECONDS
        ]
        if waiting:
            answers = Answers([], [], self._news())
            for peer in waiting:
                peer.told = now()
                self._tell(peer, answers)

    async def close(self) -> None:
        """Stop serving. The pool must be closed before, so that all calls have ended."""
        self._driver.remove_listener(self)
        if self._watch is not None:
            self._watch.cancel()
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
        self._peers.clear()

    # --- messages to clients ----------------------------------------------------------------------

    def _tell(self, peer: Peer, message: ToClient) -> None:
        self._relay.send(peer, encode(message))

    def _tell_all(self) -> None:
        if self._peers:
            answers = Answers([], [], self._news())
            for peer in list(self._peers.values()):
                # First send the queued answers, which are older than this status.
                self._relay.flush(peer)
                self._tell(peer, answers)

    def _news(self) -> PoolStatus:
        members = self._driver.fabric.members
        workers = [
            WorkerStatus(
                w.id,
                w.pid,
                w.state,
                w.weight_version,
                w.device,
                w.load,
                w.window,
                members[w.id].reported,
                w.host,
                w.kept_bytes,
            )
            for w in self._client.workers
        ]
        queue = self._driver.fabric.queue
        return PoolStatus(
            self._client.weight_version,
            queue.waiting,
            workers,
            queue.queued_bytes,
            queue.clients,
            dict(self._client.requests.adapters.versions),
        )

    async def _watch_workers(self) -> None:
        while True:
            await self._driver.change()
            self._tell_all()

    def _lose(self, peer: Peer) -> None:
        """Drop a client that is lost or cannot receive messages any more."""
        if calls := len(peer.calls) + len(peer.tasks):
            logger.warning(
                "a client in another process has ended, or reads too slowly to receive more; its "
                "calls (%d) are cancelled",
                calls,
            )
        self._forget(peer)

    def _forget(self, peer: Peer) -> None:
        """Remove a client and cancel its calls."""
        self._peers.pop(peer.identity, None)
        self._relay.forget(peer)

    # --- messages from clients --------------------------------------------------------------------

    def on_connection_broken(self) -> None:
        self._tell_all()

    def on_peer(self, identity: bytes, frames: Sequence[Buffer]) -> bool:
        peer = self._peers.get(identity)
        if peer is None and not self._is_client(identity):
            return False
        try:
            message = decode_from_client(frames[0])
        except ProtocolError as error:
            logger.debug("a message of a client in another process: %s", error)
            return False
        if len(frames) > 1:
            return False
        match message:
            case Hello() if peer is None:
                return self._admit(identity, message)
            case Leave() if peer is None:
                # After a broken connection, a client that was removed may send this late.
                pass
            case _ if peer is None:
                self._dismiss(
                    identity,
                    "it is not known to the pool any more; a client that leaves too many bytes of "
                    "answers unread is dropped: let its event loop run, or launch the pool with a "
                    "larger max_unread_bytes",
                )
                return False
            case Requests(requests=requests):
                return self._admission.begin(peer, requests)
            case Cancel(ids=ids):
                for id_ in ids:
                    self._relay.cancel(peer, id_)
            case BytesRead(bytes=size):
                return self._relay.read_so_far(peer, size)
            case Leave():
                self._forget(peer)
            case _:
                return False
        return True

    def _is_client(self, identity: bytes) -> bool:
        kind, _, rest = identity.partition(b"/")
        token, _, _ = rest.partition(b"/")
        return kind == b"client" and hmac.compare_digest(token, self._token.encode())

    def _dismiss(self, identity: bytes, reason: str) -> None:
        self._driver.send_to_peer(identity, encode(Rejected(reason)))

    def _admit(self, identity: bytes, client: Hello) -> bool:
        if client.protocol != PROTOCOL_VERSION:
            self._dismiss(
                identity,
                f"it speaks version {client.protocol} of the protocol and the pool version "
                f"{PROTOCOL_VERSION}; install the same sglrl on both sides",
            )
            return False
        if len(self._peers) >= _MAX_PEERS:
            # Send a message to all clients, because this removes clients that are unreachable.
            self._tell_all()
        if len(self._peers) >= _MAX_PEERS:
            self._dismiss(identity, f"the pool has {_MAX_PEERS} clients in other processes")
            return False
        most = min(client.max_message_bytes, self._driver.max_message_bytes)
        fabric = self._driver.fabric
        state = fabric.queue.add_client(fabric.config.max_unread_bytes)
        peer = self._peers[identity] = Peer(identity, most, state)
        self._tell(
            peer,
            Welcome(
                PROTOCOL_VERSION,
                self._driver.max_message_bytes,
                self._weights.address,
                self._client.info,
                self._news(),
                self._driver.fabric.config.max_queue,
            ),
        )
        if self._watch is None:
            self._watch = self._run(self._watch_workers())
        return True

    def _ask(self, peer: Peer, request: Request, spec: Operation) -> None:
        """Run an operation for a client.

        Raises:
            InvalidRequest: the arguments are wrong.
        """
        logger.info("a client in another process calls %s", spec.name)
        work = self._ask_pool(peer, request.id, spec, arguments(spec, request))
        peer.tasks[request.id] = self._run(work)

    async def _ask_pool(
        self, peer: Peer, id_: int, spec: Operation, kwargs: dict[str, Any]
    ) -> None:
        try:
            value = await getattr(self._client, spec.name)(**kwargs)
            body, frames = spec.result.encode(value)
        except Exception as error:
            # Without an answer, the client would wait for its deadline.
            if not isinstance(error, SglrlError):
                logger.exception("%s of a client in another process failed", spec.name)
                error = from_wire(type(error).__name__, str(error), traceback.format_exc())
            if peer.tasks.pop(id_, None) is not None:
                self._relay.fail(peer, id_, error)
        else:
            if peer.tasks.pop(id_, None) is not None:
                self._relay.put(peer, (id_, ItemKind.DONE, body, len(frames)), frames)

    def _run(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task
