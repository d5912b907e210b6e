"""The part of a session that concerns agents that use it over HTTP."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from .. import tracing
from ..errors import UsageError

if TYPE_CHECKING:
    from .shared import NameSession, Shared


class OverHttp:
    """The URL, the API key and the header by which HTTP requests select a session.

    Attributes:
        address: the URL and the API key. None: the session has no gateway, or is a fork.
    """

    _shared: Shared
    address: tuple[str, str] | None

    @property
    def base_url(self) -> str:
        """The base URL of an OpenAI API for agents that use HTTP. See ``rollout(gateway=True)``.

        Raises:
            UsageError: the session has no gateway.
        """
        return self._http()[0]

    @property
    def api_key(self) -> str:
        """The API key for an agent that uses HTTP. It selects this session, as ``base_url`` does.

        Raises:
            UsageError: the session has no gateway.
        """
        return self._http()[1]

    @property
    def headers(self) -> dict[str, str]:
        """The headers ``traceparent`` and ``tracestate`` of W3C for the current span.

        Add them to requests to other servers, so that their spans belong to the trace of the
        sample. Requests to ``base_url`` need no headers. Without tracing, the result is empty.
        """
        return tracing.headers()

    def accept_header(self, session_id: str) -> None:
        """Let HTTP requests with the header ``X-Session-ID: <session_id>`` select this session.

        This is for agents whose requests pass through a relay that has one URL and one key for all
        sessions. A fork may have ids of its own. The URL and the key of a session take precedence
        over the header.

        Args:
            session_id: a text that nobody can guess, because it replaces the API key: printable
                ASCII characters without spaces.

        Raises:
            UsageError: the session has no gateway, another session has this id, or the id cannot be
                the value of a header.
        """
        if not isinstance(session_id, str) or not re.fullmatch(r"[!-~]+", session_id):
            raise UsageError(f"session_id must be ASCII characters, got {session_id!r:.200}")
        if self._shared.name_session is None:
            raise UsageError(_NO_GATEWAY)
        self._shared.name_session(self, session_id)

    def lend(self, address: tuple[str, str] | None, name: NameSession | None) -> None:
        """Set the URL and the API key of this session, and the function that names sessions."""
        self.address = address
        self._shared.name_session = name

    def _http(self) -> tuple[str, str]:
        if self.address is None:
            raise UsageError(_NO_GATEWAY)
        return self.address


_NO_GATEWAY = "this session cannot be used over HTTP: pass gateway=True to rollout"
