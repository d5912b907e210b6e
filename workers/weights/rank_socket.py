"""The socket of one rank's weight channel, and the thread that receives its messages."""

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
from sglrl.wire.weights import RankAnswer, RankHello, RankSettings, rank_identity

from ..engine.loop import IDLE_WAIT
from ..liveness import RECONNECT_SECONDS, BreakWatch

logger = logging.getLogger("sglrl.worker")


class RankSocket:
    """Receives messages and sends answers until ``close``.

    Args:
        settings: the settings of the rank, which ``RankHello`` contains.
        handle: handles a message. It is called on the socket's thread.
        give_up: gives up the current update after the connection broke. It returns whether some
            but not all live weights are new. It is called on the socket's thread.
    """

    def __init__(
        self,
        spec: WorkerSpec,
        rank: int,
        settings: RankSettings,
        handle: Callable[[Any], None],
        give_up: Callable[[], bool],
    ) -> None:
        self._spec = spec
        self._identity = rank_identity(spec.identity, rank)
        self._settings = settings
        self._handle = handle
        self._give_up = give_up
        self._connections = 0
        self._broken = False
        self._watch = BreakWatch(spec.returns, self._on_break)
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
        """Stop serving soon. This does not wait for the thread."""
        self._closed = True
        self._wake()

    @property
    def is_this_thread(self) -> bool:
        """True on the socket's thread."""
        return threading.current_thread() is self._thread

    def answer(self, answer: RankAnswer) -> None:
        """Send an answer soon. Any thread may call this."""
        self._answers.append(answer)
        self._wake()

    def answer_now(self, answer: RankAnswer) -> None:
        """Send an answer at once. Only the socket's thread may call this."""
        assert self._dealer is not None
        self._dealer.send([encode(answer)])

    def say_hello(self, *, dirty: bool = False) -> None:
        """Send ``RankHello`` to the driver. Only the socket's thread may call this."""
        assert self._dealer is not None
        self._dealer.send([encode(RankHello(self._settings, self._connections, dirty))])

    def _on_break(self) -> None:
        """Request that the socket's thread replace the socket. Called on another thread."""
        self._broken = True
        self._wake()

    def _reconnect(self, dealer: ZmqPolledDealer) -> None:
        """Replace the connection, and give up the current update, because messages were lost."""
        self._broken = False
        self._watch.handled()
        self._watch = BreakWatch(self._spec.returns, self._on_break)
        dealer.reconnect(self._watch)
        self._answers.clear()
        self._connections += 1
        self.say_hello(dirty=self._give_up())

    def _serve(self) -> None:
        dealer = ZmqPolledDealer(
            self._spec.address,
            self._identity,
            max_message_bytes=self._spec.max_message_bytes,
            keys=self._spec.keys,
            on_break=self._watch,
            heartbeat_timeout=self._spec.heartbeat_timeout,
            reconnect_seconds=RECONNECT_SECONDS,
        )
        self._dealer = dealer
        self.say_hello()
        while not self._closed:
            if self._broken:
                self._reconnect(dealer)
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
        self._watch.handled()
        dealer.close()

    def _wake(self) -> None:
        if self._dealer is not None:
            self._dealer.wake()
