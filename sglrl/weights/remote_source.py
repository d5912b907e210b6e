"""The driver's side of a sender in another process."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any, Protocol

import msgspec

from ..errors import SglrlError, WeightUpdateError
from ..wire.calls import ErrorBody
from ..wire.codec import encode
from ..wire.weights import (
    ModelDescription,
    Propose,
    Proposed,
    RankAnswer,
    RankHello,
    RankSettings,
    SenderAccepted,
    TensorSpec,
    ToRank,
    Withdraw,
)
from .update_report import UpdateReport
from .update_request import UpdateRequest


class Channel(Protocol):
    """The parts of ``WeightChannel`` that a remote source uses."""

    version: int

    def tell(self, sender: RemoteSource, message: ToRank) -> None: ...

    async def describe(self, timeout: float | None) -> ModelDescription: ...

    async def update(self, request: UpdateRequest, source: RemoteSource) -> UpdateReport: ...

    def sender_answered(self, source: RemoteSource, answer: RankAnswer) -> bool: ...


class RemoteSource:
    """A sender in another process, and the task of the update that it proposed."""

    def __init__(self, channel: Channel, identity: bytes, settings: RankSettings) -> None:
        self._channel = channel
        self.identity = identity
        self.settings = settings
        self._task: asyncio.Task[None] | None = None
        self._id = 0
        self._specs: list[TensorSpec] = []
        """The specs of the last proposal. An equal proposal keeps this list object."""

    def ask(self, message: ToRank) -> None:
        self._channel.tell(self, message)

    @property
    def busy(self) -> bool:
        return self._task is not None and not self._task.done()

    def welcome(self) -> None:
        self._start(self._welcome)

    async def _welcome(self) -> None:
        try:
            description = await self._channel.describe(60.0)
        except SglrlError as error:
            self.ask(Proposed(0, ErrorBody(type(error).__name__, error.message)))
            return
        self.ask(
            SenderAccepted(
                self._channel.version,
                description.tensors,
                description.ignored,
                description.tied,
            )
        )

    def receive(self, message: Any) -> bool:
        match message:
            case RankAnswer():
                return self._channel.sender_answered(self, message)
            case Propose(id=id_):
                self._id = id_
                begun = time.perf_counter() - message.waited
                task = self._start(lambda: self._propose(message, begun))
                task.add_done_callback(lambda task: self._withdrawn(task, id_))
            case RankHello():
                # The sender checks whether the driver is still there.
                self.ask(SenderAccepted(self._channel.version, [], []))
            case Withdraw() if self._task is not None and message.id == self._id:
                self._task.cancel()
            case _:
                return False
        return True

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
        """Cancel the current task, and start a task that waits for its end and then does ``work``.

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
        )
        if proposal.tensors != self._specs:
            self._specs = proposal.tensors
        try:
            report = await self._channel.update(request.with_specs(self._specs), self)
        except SglrlError as error:
            self.ask(Proposed(proposal.id, ErrorBody(type(error).__name__, error.message)))
        else:
            self.ask(Proposed(proposal.id, None, msgspec.Raw(encode(report))))
