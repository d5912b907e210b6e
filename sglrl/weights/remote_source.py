"""The driver's side of senders in other processes: admit them, and run the updates they propose."""

from __future__ import annotations

import asyncio
import hmac
import secrets
import time
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec

from ..config import check_timeout
from ..errors import SglrlError, WeightUpdateError
from ..wire.calls import ErrorBody
from ..wire.codec import encode
from ..wire.weights import (
    AskChecksums,
    LiveChecksums,
    Propose,
    Proposed,
    RankAnswer,
    RankHello,
    RankSettings,
    SenderAccepted,
    SenderClosed,
    TensorSpec,
    ToRank,
    Withdraw,
)
from .deadline import Deadline
from .ranks import DriverPort
from .update_request import UpdateRequest
from .updates import Updates

_MAX_SENDERS = 16
"""The maximum number of senders in other processes.

A sender stays admitted until it reports ``SenderClosed``. A crashed sender never reports it.
"""


class RemoteSource:
    """A sender in another process, and the task that runs its current request.

    Args:
        tell: sends a message to the sender.
    """

    def __init__(
        self,
        updates: Updates,
        tell: Callable[[RemoteSource, ToRank], None],
        identity: bytes,
        settings: RankSettings,
    ) -> None:
        self._updates = updates
        self._tell = tell
        self.identity = identity
        self.settings = settings
        self._task: asyncio.Task[None] | None = None
        self._id = 0
        self._specs: list[TensorSpec] = []
        """The last specs proposed. ``Rank.manifest`` needs the same object for equal specs."""

    def ask(self, message: ToRank) -> None:
        self._tell(self, message)

    @property
    def busy(self) -> bool:
        return self._task is not None and not self._task.done()

    def welcome(self) -> None:
        self._start(self._welcome)

    async def _welcome(self) -> None:
        try:
            description = await self._updates.describe(Deadline(60.0))
        except SglrlError as error:
            self.ask(Proposed(0, ErrorBody(type(error).__name__, error.message)))
            return
        self.ask(
            SenderAccepted(
                self._updates.versions.current,
                description.tensors,
                description.ignored,
                description.tied,
                description.open,
            )
        )

    def receive(self, message: Any) -> bool:
        match message:
            case RankAnswer():
                return self._updates.sender_answered(self, message)
            case Propose(id=id_):
                self._id = id_
                begun = time.perf_counter() - message.waited
                task = self._start(lambda: self._propose(message, begun))
                task.add_done_callback(lambda task: self._withdrawn(task, id_))
            case RankHello():
                # The sender sends this to check that the driver still runs.
                self.ask(SenderAccepted(self._updates.versions.current, [], []))
            case AskChecksums():
                self._start(lambda: self._checksums(message))
            case Withdraw(id=id_):
                # Ignore the withdrawal of an earlier proposal, which has already ended.
                if self._task is not None and id_ == self._id:
                    self._task.cancel()
            case _:
                return False
        return True

    async def _checksums(self, question: AskChecksums) -> None:
        try:
            deadline = Deadline(check_timeout(question.timeout))
            live = await self._updates.checksums(question.names, deadline)
        except SglrlError as error:
            body = ErrorBody(type(error).__name__, error.message)
            self.ask(LiveChecksums(question.id, error=body))
        else:
            shards = [shard for shards in live.values() for shard in shards]
            self.ask(LiveChecksums(question.id, shards))

    def cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()

    def _withdrawn(self, task: asyncio.Task[None], id_: int) -> None:
        """Report to the sender that its update was withdrawn, if the task was cancelled.

        The sender waits for this message before it changes its tensors. The task cannot send it,
        because it may have been cancelled before its first step.
        """
        if task.cancelled():
            error = ErrorBody(WeightUpdateError.__name__, "the update was withdrawn")
            self.ask(Proposed(id_, error))

    def _start(self, work: Callable[[], Awaitable[None]]) -> asyncio.Task[None]:
        """Cancel the current task. Start a task that does ``work`` after the current task's end.

        A sender that proposes again has given up its earlier proposal.
        """
        before = self._task
        self.cancel()
        self._task = asyncio.get_running_loop().create_task(self._after(before, work))
        return self._task

    async def _after(
        self, before: asyncio.Task[None] | None, work: Callable[[], Awaitable[None]]
    ) -> None:
        if before is not None:
            await asyncio.wait([before])
        await work()

    async def _propose(self, proposal: Propose, begun: float) -> None:
        request = UpdateRequest(
            specs=[],
            version=proposal.version,
            inflight=proposal.inflight,
            mode=proposal.mode,
            partial=proposal.partial,
            bucket_bytes=proposal.bucket_bytes,
            timeout=proposal.timeout,
            wait=proposal.wait,
            drain_timeout=proposal.drain_timeout,
            begun=begun,
            same_version=proposal.same_version,
        )
        if proposal.tensors != self._specs:
            self._specs = proposal.tensors
        try:
            report = await self._updates.update(request.with_specs(self._specs), self)
        except SglrlError as error:
            self.ask(Proposed(proposal.id, ErrorBody(type(error).__name__, error.message)))
        else:
            self.ask(Proposed(proposal.id, None, msgspec.Raw(encode(report))))


class RemoteSenders:
    """The admitted senders in other processes. ``len`` counts them."""

    def __init__(self, updates: Updates) -> None:
        self._updates = updates
        self._driver: DriverPort | None = None
        self._address = ""
        self._token = secrets.token_hex(16)
        self._admitted: dict[bytes, RemoteSource] = {}

    def __len__(self) -> int:
        return len(self._admitted)

    def attach(self, driver: DriverPort, address: str) -> None:
        self._driver = driver
        self._address = address

    def close(self) -> None:
        """Dismiss all senders and cancel the updates that they proposed."""
        admitted, self._admitted = self._admitted, {}
        for sender in admitted.values():
            sender.cancel()

    @property
    def address(self) -> str:
        """Return the address for ``sglrl.weights.Sender.connect``. It contains a secret."""
        return f"{self._address}#{self._token}"

    def knows(self, identity: bytes) -> bool:
        """Return True if the sender with this identity is admitted or knows the secret."""
        kind, _, rest = identity.partition(b"/")
        token, _, _ = rest.partition(b"/")
        return identity in self._admitted or (
            kind == b"sender" and hmac.compare_digest(token, self._token.encode())
        )

    def receive(self, identity: bytes, message: Any) -> bool:
        """Handle a message of a sender. Return False if the message was not expected."""
        sender = self._admitted.get(identity)
        match message:
            case RankHello(settings=settings) if sender is None:
                return self._admit(identity, settings)
            case SenderClosed() if sender is not None:
                self._dismiss(sender)
                return True
            case _:
                return sender is not None and sender.receive(message)

    def find_lost(self) -> None:
        """Send every sender a message, because sending detects lost senders."""
        for sender in list(self._admitted.values()):
            # The message has no effect, because the ids of proposals start at 1.
            self._tell(sender, Proposed(0, None))

    def _tell(self, sender: RemoteSource, message: ToRank) -> None:
        """Send a message to a sender. If the sender is lost, end its update instead."""
        if self._driver is not None and self._driver.send_to_peer(sender.identity, encode(message)):
            return
        self._admitted.pop(sender.identity, None)
        self._updates.sender_lost(sender)

    def _admit(self, identity: bytes, settings: RankSettings) -> bool:
        """Admit a sender. Return False if there are too many senders that cannot be dismissed.

        The sender of the current group and busy senders are not dismissed for another sender.
        """
        if len(self._admitted) >= _MAX_SENDERS:
            others = (
                sender
                for sender in self._admitted.values()
                if sender is not self._updates.group.source and not sender.busy
            )
            idle = next(others, None)
            if idle is None:
                return False
            self._dismiss(idle)
        sender = RemoteSource(self._updates, self._tell, identity, settings)
        self._admitted[identity] = sender
        sender.welcome()
        return True

    def _dismiss(self, sender: RemoteSource) -> None:
        sender.cancel()
        self._updates.group.forget(sender)
        self._admitted.pop(sender.identity, None)
