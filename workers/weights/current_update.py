"""The update that a rank receives, from its PREPARE to its COMMIT or ABORT."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

from sglrl.errors import WeightUpdateError
from sglrl.weights.link import Link

from .staging import Update


class CurrentUpdate:
    """The current update of a rank. An abort ends it, even while other threads work on it.

    Attributes:
        dirty: whether some live weights are new and some are old.
    """

    def __init__(self) -> None:
        self.dirty = False
        self._update: Update | None = None
        self._given_up = 0
        """The id of the latest aborted update. Updates with smaller ids count as aborted, too."""
        self._lock = threading.Lock()
        """A lock for writes to memory that the next update or the engine also uses."""

    def begin(self, update: Update) -> None:
        with self._lock:
            self.check(update.id)
            self._update = update

    def find(self, id_: int) -> Update | None:
        """Return the current update if it has this id."""
        update = self._update
        return None if update is None or update.id != id_ else update

    def end(self, id_: int) -> Update | None:
        """End the current update if it has this id, and return it."""
        update = self.find(id_)
        if update is not None:
            self._update = None
        return update

    def check(self, id_: int) -> None:
        """Raise ``WeightUpdateError`` if this update was aborted."""
        if id_ <= self._given_up:
            raise WeightUpdateError("the update was given up")

    @contextlib.contextmanager
    def writing(self, link: Link, id_: int) -> Iterator[None]:
        """Delay an abort until the block has finished its writes for this update.

        Raises:
            WeightUpdateError: the update was aborted.
        """
        with self._lock:
            link.check()
            self.check(id_)
            yield

    def abort(self, id_: int, link: Link | None) -> Update | None:
        """Abort all updates up to the id ``id_``, and drop the current update.

        Args:
            link: the link to abandon, or None.

        Returns:
            The current update, if there was one.
        """
        with self._lock:
            if link is not None:
                link.abandon()
            self._given_up = id_
            update, self._update = self._update, None
        return update
