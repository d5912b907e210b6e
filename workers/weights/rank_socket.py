"""The socket of one rank's weight channel, with the thread that receives its messages."""

from __future__ import annotations

import collections
import logging
import threading
from collections.abc import Callable
from typing import Any

from sglrl.errors import ProtocolError
from sglrl.transport.dropped import Dropped
from sglrl.transport.zmq import ZmqPolledDealer
from sglrl.wire.codec import decode_to_rank, encode
from sglrl.wire.processes import WorkerSpec
from sglrl.wire.weights import RankAnswer, RankHello, rank_identity

from ..engine.loop import IDLE_WAIT
from ..exit_on_disconnect import leave

logger = logging.getLogger("sglrl.worker")


class RankSocket:
    """Receives messages and sends answers until ``close``.

    Args:
        hello: the first message.
        handle: called on the socket's thread with every message.
    """

    def __init__(
        self, spec: WorkerSpec, rank: int, hello: RankHello, handle: Callable[[Any], None]
    ) -> None:
        self._spec = spec
        self._identity = rank_identity(spec.identity, rank)
        self._hello = hello
        self._handle = handle
        self._answers: collections.deque[RankAnswer] = collections.deque()
        self._dealer: ZmqPolledDealer | None = None
        self._dropped = Dropped(logger)
        self._closed = False
        self._thread = threading.Thread(
            target=self._serve, name="sglrl-weight-channel", daemon=True
        )

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Stop serving. Does not wait for the thread."""
        self._closed = True
        self._wake()

    @property
    def is_this_thread(self) -> bool:
        """True on the socket's thread."""
        return threading.current_thread() is self._thread

    def answer(self, answer: RankAnswer) -> None:
        """Send an answer soon. Can be called from any thread."""
        self._answers.append(answer)
        self._wake()

    def answer_now(self, answer: RankAnswer) -> None:
        """Send an answer at once. Only on the socket's thread."""
        assert self._dealer is not None
        self._dealer.send([encode(answer)])

    def _serve(self) -> None:
        dealer = ZmqPolledDealer(
            self._spec.address,
            self._identity,
            max_message_bytes=self._spec.max_message_bytes,
            keys=self._spec.keys,
            on_break=leave,
            heartbeat_timeout=self._spec.heartbeat_timeout,
        )
        self._dealer = dealer
        dealer.send([encode(self._hello)])
        while not self._closed:
            while self._answers:
                self.answer_now(self._answers.popleft())
            frames = dealer.receive()
            if frames is None:
                dealer.wait(IDLE_WAIT)
                continue
            try:
                self._handle(decode_to_rank(frames[0]))
            except ProtocolError as error:
                self._dropped("a message of the weight channel: %s", error)
            except Exception:
                logger.exception("a message of the weight channel failed")
        dealer.close()

    def _wake(self) -> None:
        if self._dealer is not None:
            self._dealer.wake()
