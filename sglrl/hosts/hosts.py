"""The other machines of a program: admit their nodes, and place workers on the machines."""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import secrets
import weakref
from collections.abc import Iterator, Sequence
from typing import Final, Protocol, Self

import msgspec

from ..config import HEARTBEAT_TIMEOUT, PoolConfig, __version__, check_heartbeat, positive
from ..core.node_session import CHECK_SECONDS, MESSAGE_BYTES, MessageMissing
from ..core.placement import Placement, WorkerPlace
from ..driver.environment import environment, limits
from ..driver.worker_info import HostInfo
from ..errors import ProtocolError, UsageError
from ..transport.addresses import check_address, check_tcp, host_of, is_loopback, is_own
from ..transport.curve_keys import read_driver_keys, read_keys_to_node
from ..transport.zmq import ZmqRouter
from ..wire.calls import PROTOCOL_VERSION
from ..wire.codec import Buffer, decode_from_node, decode_of_connection, encode
from ..wire.nodes import (
    Acknowledge,
    Admit,
    ClosePool,
    FromNode,
    Goodbye,
    NodeHello,
    Numbered,
    Refuse,
)
from .listening import Invitations
from .node_link import NodeLink

logger = logging.getLogger("sglrl.hosts")

_GOODBYE_SECONDS: Final = 2.0
"""Maximum seconds to wait until all nodes have answered ``Goodbye``."""


class PoolOnHosts(Protocol):
    """A pool that has workers on hosts. Its methods are called on the event loop."""

    def on_node(self, link: NodeLink, message: FromNode) -> None:
        """Handle a message of a node about this pool."""
        ...

    def on_ended(self, link: NodeLink, reason: str) -> None:
        """The session of a node has ended, so the workers on its host are lost."""
        ...


class Hosts:
    """Other machines, on which ``launch(hosts=...)`` and ``spawn(hosts=...)`` start workers.

    On each machine, ``sglrl node ADDRESS --keys DIR`` connects to this program. Several pools may
    share the same hosts.

    Args:
        address: the address at which this program listens for nodes: "tcp://HOST:PORT". HOST is an
            IP address, an interface of this machine, or "0.0.0.0" for all interfaces.
        keys: a folder made with ``sglrl keys``.
        insecure: whether to accept any node, without encryption, instead of using ``keys``.
        at_least: number of hosts to wait for before workers are placed. None: all of ``nodes``, or
            one if ``nodes`` is empty.
        nodes: addresses of nodes that wait for a program (``sglrl node --listen``). This program
            invites each node, and again after the node restarts. With ``keys``, these nodes have
            the key pair "node" of the folder.
        heartbeat_timeout: seconds without data after which a connection to a node or a worker
            counts as broken. None: never.

    Raises:
        UsageError: an argument is wrong.
    """

    def __init__(
        self,
        address: str,
        *,
        keys: str | os.PathLike[str] | None = None,
        insecure: bool = False,
        at_least: int | None = None,
        nodes: Sequence[str] = (),
        heartbeat_timeout: float | None = HEARTBEAT_TIMEOUT,
    ) -> None:
        if not isinstance(address, str) or not address.startswith("tcp://"):
            raise UsageError(f"the address of hosts is tcp://HOST:PORT, got {address!r}")
        check_address(address, keys=keys is not None, insecure=insecure)
        if keys is not None:
            read_driver_keys(keys)
        self.keys = None if keys is None else os.fspath(keys)
        self.insecure = insecure
        self.heartbeat_timeout = check_heartbeat(heartbeat_timeout)
        self.placement = Placement()
        self._nodes = _node_addresses(nodes)
        self._node_keys = read_keys_to_node(keys) if keys is not None and nodes else None
        self._invitations: Invitations | None = None
        self._address = address
        if at_least is None:
            at_least = max(1, len(self._nodes))
        self._at_least = positive("at_least", at_least)
        self._router: ZmqRouter | None = None
        self._links: dict[str, NodeLink] = {}
        """The nodes with a session, by their names."""
        self._peers: dict[bytes, NodeLink] = {}
        """The nodes by the identity of their latest connection."""
        self._pools: weakref.WeakValueDictionary[int, PoolOnHosts] = weakref.WeakValueDictionary()
        """The pools by their numbers. The references are weak, so that a pool that the program
        never closes can be garbage-collected."""
        self._numbers: Iterator[int] = itertools.count()
        self.refused: dict[str, str] = {}
        """The reason for which each refused node was refused, by the node's name."""
        self._known_strangers = 0
        self._users = 0
        self._timer: asyncio.TimerHandle | None = None
        self._news: asyncio.Future[None] | None = None

    @property
    def address(self) -> str:
        """The address to which nodes connect. The port is known when this object is open."""
        return self._address if self._router is None else self._router.outer_address

    def reachable(self, config: PoolConfig) -> PoolConfig:
        """Return the configuration of a pool, changed so that workers on the hosts can connect."""
        return msgspec.structs.replace(
            config,
            address=f"{self._address.rpartition(':')[0]}:*",
            keys=self.keys,
            insecure=self.insecure,
            heartbeat_timeout=self.heartbeat_timeout,
        )

    @property
    def own_ip(self) -> str:
        """The IP address of this machine to which nodes have connected, or "" if there is none.

        A machine may be in several networks, and its nodes are in one of them.
        """
        reached = {link.hello.program for link in self._links.values()} - {""}
        loopback_last = sorted(reached, key=lambda ip: (is_loopback(f"tcp://{ip}:0"), ip))
        return next((ip for ip in loopback_last if is_own(ip)), "")

    @property
    def hosts(self) -> list[HostInfo]:
        """The hosts, in the order in which they connected."""
        return [
            HostInfo(
                name=link.name,
                state="connected" if link.session.connected else "away",
                gpus=link.hello.gpus,
                cores=link.hello.cores,
                python=link.hello.environment.python,
                limits=_limits(link.hello),
            )
            for link in self._links.values()
        ]

    @property
    def strangers(self) -> int:
        """Number of connections that had an unknown key. One peer may try many times."""
        return 0 if self._router is None else self._router.refused

    @property
    def is_open(self) -> bool:
        """Whether this program listens for nodes."""
        return self._router is not None

    # --- open and close ---------------------------------------------------------------------------

    async def __aenter__(self) -> Self:
        self.open()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    def open(self) -> None:
        """Start to listen for nodes, unless the hosts are open. Each ``open`` needs a ``close``."""
        self._users += 1
        if self._router is not None:
            return
        self._router = ZmqRouter(
            self._address,
            max_message_bytes=MESSAGE_BYTES,
            keys=None if self.keys is None else read_driver_keys(self.keys),
            insecure=self.insecure,
            heartbeat_timeout=self.heartbeat_timeout,
        )
        self._router.start(self._on_message)
        self._check()
        if self._nodes:
            # This is the given address, with the port that the system has chosen.
            own = f"{self._address.rpartition(':')[0]}:{self.address.rpartition(':')[2]}"
            self._invitations = Invitations(
                self._nodes, self._node_keys, own, self.heartbeat_timeout
            )

    async def close(self) -> None:
        """Undo one ``open``. Undoing the last one ends the sessions of all nodes.

        The nodes then kill their workers. Nodes that cannot be reached do so after their orphan
        timeout.
        """
        self._users -= 1
        if self._users or self._router is None:
            return
        for link in self._links.values():
            link.say_goodbye()
        try:
            async with asyncio.timeout(_GOODBYE_SECONDS):
                while any(link.session.connected for link in self._links.values()):
                    await self.change()
        except TimeoutError:
            pass
        finally:
            self._shut()

    def _shut(self) -> None:
        if self._users or self._router is None:
            # A pool was opened in the meantime.
            return
        if self._timer is not None:
            self._timer.cancel()
        if self._invitations is not None:
            self._invitations.close()
            self._invitations = None
        for link in list(self._links.values()):
            self._end(link, "the hosts were closed")
        self._router.close()
        self._router = None

    def add_pool(self, pool: PoolOnHosts) -> int:
        """Listen for nodes on behalf of a pool. Return the pool's number in messages."""
        self.open()
        number = next(self._numbers)
        self._pools[number] = pool
        return number

    async def remove_pool(self, number: int) -> None:
        """Kill the workers of a pool on all hosts."""
        self._pools.pop(number, None)
        for link in self._links.values():
            link.session.send(ClosePool(number))
        await self.close()

    # --- places -----------------------------------------------------------------------------------

    def link(self, name: str) -> NodeLink | None:
        """Return the node of a host, or None if its session has ended."""
        return self._links.get(name)

    def lacking(self) -> str:
        """Return a text about missing hosts. Empty if ``at_least`` hosts have connected."""
        if len(self._links) >= self._at_least:
            return ""
        there = ", ".join(self._links) or "none"
        text = (
            f"{len(self._links)} of {self._at_least} hosts (at_least) have connected to "
            f"{self.address}: {there}"
        )
        refused = [f"{name} was refused: {reason}" for name, reason in self.refused.items()]
        if self.strangers:
            refused.append(
                f"{self.strangers} connections had a key that is not in {self.keys}; run 'sglrl "
                "doctor --hosts' on both sides"
            )
        if refused:
            return "; ".join([text, *refused])
        if self._nodes:
            return (
                f"{text}; the others of {', '.join(self._nodes)} do not answer, or have other keys"
            )
        options = " --keys FILE" if self.keys else " --insecure" if self.insecure else ""
        text = f"{text}; start 'sglrl node {self.address}{options}' on the others"
        if is_loopback(self._address):
            return f"{text}, which must be this machine: no other reaches this address"
        if self._address != self.address and host_of(self._address) != host_of(self.address):
            return f"{text}, or with another address of this machine that they reach"
        return text

    def too_few(self, workers: int, gpus: int) -> str:
        """Return a text about workers that do not fit on the hosts, with all offers."""
        what = f"{workers} worker{'s' if workers > 1 else ''} with {gpus} GPUs each"
        offers = "; ".join(
            f"{host} has {len(offer.gpus)} GPUs ({len(self.placement.free(host))} free) and "
            f"{offer.cores} cores"
            for host, offer in self.placement.offers.items()
        )
        return f"{what} do not fit: {offers or 'no host is there'}"

    def release(self, place: WorkerPlace) -> None:
        """Release a place that a worker no longer needs."""
        self.placement.release(place)
        self._changed()

    def change(self) -> asyncio.Future[None]:
        """Return a future that is done at the next change of hosts or places."""
        if self._news is None:
            self._news = asyncio.get_running_loop().create_future()
        return asyncio.shield(self._news)

    def _changed(self) -> None:
        if self._news is not None:
            self._news.set_result(None)
            self._news = None

    # --- messages ---------------------------------------------------------------------------------

    def _on_message(self, identity: bytes, frames: list[Buffer]) -> None:
        link = self._peers.get(identity)
        try:
            message = decode_of_connection(frames[0])
            match message:
                case NodeHello():
                    self._admit(identity, message)
                case Numbered() | Acknowledge() if link is not None and link.session.connected:
                    # Late messages of an old connection are ignored: the node sends them again.
                    if link.session.receive(message):
                        of_pool = decode_from_node(frames[1])
                        pool = self._pools.get(of_pool.pool)
                        if pool is not None:
                            pool.on_node(link, of_pool)
                case Goodbye() if link is not None:
                    link.say_goodbye()
                    self._end(link, "its node ended" if self._users else "the hosts were closed")
        except MessageMissing as error:
            # The node has noticed the broken connection at once, and will soon connect again.
            assert link is not None
            logger.warning("the connection to host %s has lost a message: %s", link.name, error)
            link.lose(self._given_up)
            self._changed()
        except (ProtocolError, IndexError) as error:
            logger.error("a message of a node is dropped: %s", error)
            link = self._peers.get(identity)
            if link is not None:
                self._end(link, f"its node sent a wrong message: {error}")
                self._refuse(identity, f"wrong message: {error}")

    def _refuse(self, identity: bytes, reason: str) -> None:
        assert self._router is not None
        self._router.send(identity, [encode(Refuse(reason))])

    def _admit(self, identity: bytes, hello: NodeHello) -> None:
        assert self._router is not None
        reason = refusal(hello)
        if reason:
            logger.error("%s: %s", hello.name, reason)
            self.refused[hello.name] = reason
            self._refuse(identity, reason)
            return
        if hello.question:
            self._router.send(identity, [encode(Admit("", 0, environment()))])
            return
        known = [link for link in self._links.values() if link.session.id == hello.session]
        if known:
            (link,) = known
            self._peers = {peer: other for peer, other in self._peers.items() if other is not link}
        else:
            self._end_earlier_session(hello)
            link = NodeLink(self._unique(hello.name), hello, secrets.token_hex(8), self._router)
            self._links[link.name] = link
            self.placement.add(link.name, link.offer)
            for limit in _limits(hello):
                logger.warning("host %s has %s", link.name, limit)
        self._peers[identity] = link
        link.admit(identity, hello.received if known else 0)
        logger.info("host %s is %s", link.name, "back" if known else "there")
        self._changed()

    def _end_earlier_session(self, hello: NodeHello) -> None:
        """End the earlier session of a node that has lost this session, or was started again."""
        similar = [link for link in self._links.values() if _is_similar(link.hello, hello)]
        for link in similar:
            if link.hello.process == hello.process:
                self._end(link, "its node has begun a new session")
                return
        # Several similar nodes on one machine cannot be told apart.
        if len(similar) == 1:
            (link,) = similar
            # The earlier node may have died since the last check or while this program was stopped.
            self._check_link(link)
            if not link.session.connected:
                self._end(link, "its node was started again")

    def _unique(self, name: str) -> str:
        if name not in self._links:
            return name
        return next(
            other for n in itertools.count(2) if (other := f"{name}-{n}") not in self._links
        )

    def _check(self) -> None:
        if self.strangers != self._known_strangers:
            self._known_strangers = self.strangers
            self._changed()
        for link in self._links.values():
            self._check_link(link)
        self._timer = asyncio.get_running_loop().call_later(CHECK_SECONDS, self._check)

    def _check_link(self, link: NodeLink) -> None:
        before = link.session.connected
        link.check(self._given_up)
        if before and not link.session.connected:
            logger.warning(
                "the connection to host %s is broken; its workers are lost unless it returns "
                "within %g s (orphan-timeout)",
                link.name,
                link.hello.orphan_timeout,
            )
            self._changed()

    def _given_up(self, link: NodeLink) -> None:
        self._end(link, f"its host was away for more than {link.hello.orphan_timeout:g} s")

    def _end(self, link: NodeLink, reason: str) -> None:
        """End the session of a node. Its workers are lost."""
        del self._links[link.name]
        self._peers = {peer: other for peer, other in self._peers.items() if other is not link}
        link.close()
        self.placement.remove(link.name)
        logger.log(
            logging.ERROR if self._users else logging.DEBUG, "host %s left: %s", link.name, reason
        )
        for pool in list(self._pools.values()):
            pool.on_ended(link, reason)
        if self._invitations is not None and self._users:
            self._invitations.send()
        self._changed()


def _node_addresses(nodes: Sequence[str]) -> tuple[str, ...]:
    if isinstance(nodes, str):
        raise UsageError(f"nodes is a list of addresses, got {nodes!r}")
    for node in nodes:
        check_tcp(node, "a node")
    return tuple(nodes)


def _is_similar(one: NodeHello, other: NodeHello) -> bool:
    """Return True if two messages may come from the same node at different times."""
    return (one.name, one.boot, one.gpus) == (other.name, other.boot, other.gpus)


def _limits(hello: NodeHello) -> list[str]:
    return limits(hello.environment, gpus=bool(hello.gpus))


def refusal(hello: NodeHello) -> str:
    """Return the reason why a node cannot be used, or an empty string."""
    differences = []
    if hello.environment.sglrl != __version__:
        differences.append(f"sglrl {hello.environment.sglrl}, here {__version__}")
    if hello.protocol != PROTOCOL_VERSION:
        differences.append(f"version {hello.protocol} of the protocol, here {PROTOCOL_VERSION}")
    return f"the node has {' and '.join(differences)}" if differences else ""
