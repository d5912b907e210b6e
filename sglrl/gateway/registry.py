"""The open sessions of a gateway: opens sessions, finds them by id or key, and ends them."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Mapping
from typing import Any

from .. import tracing
from ..client.client import Client
from ..control.snapshot import SessionSnapshot
from ..errors import UsageError
from ..sessions.options import SessionOptions
from ..sessions.session import Session
from ..sessions.session_spec import SessionSpec
from .conversations import Conversations
from .store import Store

logger = logging.getLogger("sglrl.gateway")

KEY_PREFIX = "sk-sglrl-"
"""The start of each session's key. It also identifies the keys of ended sessions."""
_MIN_SECONDS, _MAX_SECONDS = 1.0, 3600.0
"""Minimum and maximum time between two checks for unused sessions."""


class OpenSession:
    """A session that agents use.

    Attributes:
        id: the id of the session, which is part of its URL. It begins with the number of the
            session's process.
        key: the API key that selects the session. After ``KEY_PREFIX``, it also has the number of
            the session's process.
        header: the value of the header ``X-Session-ID`` that selects the session, or "".
        conversations: the conversations of the session's agents.
        used: the time of the last request, on the loop's clock.
        requests: number of requests that are running.
        store: the conversations that requests may continue by id.
        trace: the context in which the session was opened, which requests without the header
            ``traceparent`` belong to. None: tracing is off.
    """

    __slots__ = ("conversations", "header", "id", "key", "requests", "store", "trace", "used")

    def __init__(
        self, conversations: Conversations, used: float, process: int, header: str
    ) -> None:
        self.id = f"{process}-{secrets.token_urlsafe(12)}"
        self.key = f"{KEY_PREFIX}{process}-{secrets.token_urlsafe(24)}"
        self.header = header
        self.conversations = conversations
        self.used = used
        self.requests = 0
        self.store = Store()
        self.trace = tracing.context()


class Registry:
    """All open sessions.

    Args:
        client: the client of the pool.
        expire_after: seconds without a request after which a session ends.
        most: maximum number of open sessions.
        process: the number of this process among the processes of the gateway.
    """

    def __init__(self, client: Client, *, expire_after: float, most: int, process: int = 0) -> None:
        self._client = client
        self._expire_after = expire_after
        self._most = most
        self._process = process
        self._by_id: dict[str, OpenSession] = {}
        self._by_key: dict[str, OpenSession] = {}
        self._by_header: dict[str, OpenSession] = {}
        self._expiring: asyncio.TimerHandle | None = None
        self._ending: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        return len(self._by_id)

    def open(
        self,
        metadata: Mapping[str, Any] | None = None,
        reward_weights: Mapping[str, float] | None = None,
    ) -> OpenSession:
        """Open a session.

        Raises:
            UsageError: too many sessions are open.
        """
        if len(self._by_id) >= self._most:
            raise UsageError(f"{self._most} sessions are open; end some, or raise max_sessions")
        options = SessionOptions.of({"metadata": metadata, "reward_weights": reward_weights})
        return self.add(Session(SessionSpec(self._client.requests, options)))

    def add(self, session: Session, header: str = "") -> OpenSession:
        """Return a new ``OpenSession`` whose turns belong to ``session``.

        Args:
            header: the value of the header ``X-Session-ID`` that selects the session. "": none.

        Raises:
            UsageError: another session has this value.
        """
        if header in self._by_header:
            raise UsageError(f"another session has the id {header!r:.200}")
        made = OpenSession(Conversations(session), self._now(), self._process, header)
        if header:
            self._by_header[header] = made
        self._by_id[made.id] = self._by_key[made.key] = made
        if self._expiring is None:
            self._schedule_expiry(self._expire_after)
        return made

    def snapshots(self) -> list[SessionSnapshot]:
        """Return the state of every open session, for ``Client.snapshot``."""
        now = self._now()
        return [
            SessionSnapshot(
                id=one.id,
                running=one.requests,
                turns=one.conversations.turns,
                idle=now - one.used,
            )
            for one in self._by_id.values()
        ]

    def by_id(self, id_: str) -> OpenSession | None:
        return self._by_id.get(id_)

    def by_key(self, key: str) -> OpenSession | None:
        return self._by_key.get(key)

    def by_header(self, header: str) -> OpenSession | None:
        return self._by_header.get(header)

    async def end(self, session: OpenSession) -> None:
        """End a session and its running turns. The session's trajectory is then complete."""
        self._by_id.pop(session.id, None)
        self._by_key.pop(session.key, None)
        self._by_header.pop(session.header, None)
        await session.conversations.close()

    async def close(self) -> None:
        """End all sessions."""
        if self._expiring is not None:
            self._expiring.cancel()
        for session in list(self._by_id.values()):
            await self.end(session)
        await asyncio.gather(*self._ending)

    def _now(self) -> float:
        return asyncio.get_running_loop().time()

    def _schedule_expiry(self, seconds: float) -> None:
        self._expiring = asyncio.get_running_loop().call_later(
            min(seconds, _MAX_SECONDS), self._expire
        )

    def _expire(self) -> None:
        """End unused sessions. Schedule the next check for when another session may expire."""
        self._expiring = None
        now, due = self._now(), []
        for session in list(self._by_id.values()):
            left = session.used + self._expire_after - now
            if left > 0 or session.requests:
                due.append(max(left, _MIN_SECONDS))
                continue
            logger.warning(
                "session %s had no request for %g s: ended", session.id, self._expire_after
            )
            task = asyncio.ensure_future(self.end(session))
            self._ending.add(task)
            task.add_done_callback(self._ending.discard)
        if due:
            self._schedule_expiry(min(due))
