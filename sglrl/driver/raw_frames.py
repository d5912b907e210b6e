"""The raw frames of results: frames of a message, and rows in memory that a worker shares."""

from __future__ import annotations

import logging

from ..core.members import Member
from ..errors import ProtocolError
from ..transport.shared_rows import RowsReader
from ..wire.calls import Ready, Results
from ..wire.codec import Buffer, split_frames

logger = logging.getLogger("sglrl.driver")


class RawFrames:
    """Finds the raw frames of each item.

    Attributes:
        readers: the shared memory of the workers that share any.
    """

    def __init__(self) -> None:
        self.readers: dict[Member, RowsReader] = {}

    def open(self, member: Member, ready: Ready) -> bool:
        """Open the memory that a worker offers. Return False if there is none."""
        if ready.rows is None:
            return False
        try:
            self.readers[member] = RowsReader(ready.pid, ready.rows)
        except OSError as error:
            logger.debug("worker %d sends rows: %s", member.index, error)
            return False
        return True

    def close(self, member: Member) -> None:
        """Forget the memory of a lost worker. It stays open while rows are held."""
        self.readers.pop(member, None)

    def split(self, member: Member, message: Results, frames: list[Buffer]) -> list[list[Buffer]]:
        """Return the raw frames of each item of a message.

        Args:
            frames: the frames of the message. The first frame is the message itself.

        Raises:
            ProtocolError: the number of raw frames differs from the number in the items.
        """
        if message.slots:
            reader = self.readers.get(member)
            if reader is None:
                raise ProtocolError("it names shared memory that there is none of")
            frames = [*frames, *reader.views(message.slots)]
        return split_frames(message.items, frames)
