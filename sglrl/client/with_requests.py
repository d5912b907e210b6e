"""The base of the methods of ``Client`` that make calls to engines."""

from __future__ import annotations

from ..control.client_base import ClientBase, not_started
from ..inference.requests import Requests


class WithRequests(ClientBase):
    """A client that has the object which makes its calls."""

    _requests: Requests | None = None

    @property
    def requests(self) -> Requests:
        """The object that makes the calls of this client. Only other parts of sglrl use it.

        Raises:
            Closed: the client has not started.
        """
        if self._requests is None:
            raise not_started()
        return self._requests
