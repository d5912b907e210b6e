"""``Sender`` sends weights from a trainer that runs in another process than the rollouts."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import time
import weakref
from typing import Any, Self, Unpack

import msgspec

from ..config import HEARTBEAT_TIMEOUT, check_heartbeat
from ..errors import (
    Closed,
    DeadlineExceeded,
    ProtocolError,
    SglrlError,
    UsageError,
    WeightUpdateError,
    WorkerLost,
    from_wire,
)
from ..transport.addresses import check_address
from ..transport.curve_keys import read_client_keys
from ..transport.unclosed import warn_unless_closed
from ..transport.zmq import ZmqDealer
from ..wire.calls import ErrorBody
from ..wire.codec import MALFORMED, Buffer, decode_to_rank, encode
from ..wire.processes import ClientKeys
from ..wire.weights import (
    Abort,
    AskChecksums,
    Join,
    LiveChecksums,
    ModelDescription,
    Propose,
    Proposed,
    RankAnswer,
    RankHello,
    SenderAccepted,
    SenderClosed,
    Shard,
    Stage,
    ToRank,
    Withdraw,
)
from .deadline import Deadline, turn
from .update_report import UpdateReport
from .update_request import UpdateOptions, UpdateRequest

logger = logging.getLogger("sglrl.weights")

_report = msgspec.msgpack.Decoder(UpdateReport)
MIN_SILENCE = 5.0
_OF_THE_CLIENT = {cls.__name__: cls for cls in (Closed, DeadlineExceeded, WorkerLost)}
"""By name, the errors that only the workers' client raises. No worker reports these errors."""


class Sender:
    """Sends weights to the workers of a client in another process. Use it with ``async with``.

    ::

        # in the process that runs the rollouts: pass client.weights_address to the trainer
        # in the trainer:
        async with await sglrl.weights.Sender.connect(address) as sender:
            sender.register_model(model)
            report = await sender.update()

    In a trainer with several ranks, only one rank sends. The other ranks call
    ``sglrl.weights.gather`` if DTensors must be gathered. The trainer's own process groups are not
    touched.
    """

    def __init__(self, dealer: ZmqDealer, device: Any, host: str) -> None:
        self._dealer = dealer
        self._device = device
        self._host = host
        self._end: Any = None
        self._manifest: Any = None
        self._wanted = ModelDescription([], [])
        self._model: Any = None
        self._next_id = 0
        self._proposal: tuple[int, asyncio.Future[UpdateReport]] | None = None
        self._question: asyncio.Future[LiveChecksums] | None = None
        self._lock = asyncio.Lock()
        self._welcome: asyncio.Future[SenderAccepted] = asyncio.get_running_loop().create_future()
        self._version = 0
        self._lost = ""
        """The reason why this sender can no longer be used, or ""."""
        self._heard = False
        self._unclosed: weakref.finalize[..., Any] | None = None

    @classmethod
    async def connect(
        cls,
        address: str,
        *,
        device: Any = None,
        host: str = "127.0.0.1",
        timeout: float = 60.0,
        max_message_bytes: int = 256 << 20,
        keys: str | os.PathLike[str] | ClientKeys | None = None,
        insecure: bool = False,
        heartbeat_timeout: float | None = HEARTBEAT_TIMEOUT,
    ) -> Self:
        """Connect to a client's ``weights_address``.

        Args:
            device: the GPU (or "cpu") that sends. None selects the current CUDA device, or the CPU
                if there is none.
            host: an address of this process that the workers can reach.
            timeout: the maximum seconds until the client answers.
            keys: a folder with ``driver.public`` and one client's secret key, or the file of a
                secret key. ``sglrl keys`` creates both for the client's ``launch(keys=...)``.
            insecure: whether to connect to another machine without keys.
            heartbeat_timeout: over tcp, the client is treated as lost if nothing arrives from it
                for this many seconds; see ``sglrl.launch``. None turns heartbeats off.
        Raises:
            UsageError: the address is not the address of a weight channel, it needs keys, or
                heartbeat_timeout is not above 0.
            WeightUpdateError: no client answers at the address, or the engines have no weights to
                update.
        """
        url, mark, token = address.partition("#")
        if not mark or not token:
            raise UsageError(
                f"{address!r} is not the address of a weight channel; pass client.weights_address"
            )
        check_address(url, keys=keys is not None, insecure=insecure)
        heartbeat_timeout = check_heartbeat(heartbeat_timeout)
        if keys is not None and not isinstance(keys, ClientKeys):
            keys = read_client_keys(keys)

        import torch

        from .bucket_sender import SendingEnd
        from .tensor_source import Manifest

        if device is None:
            device = "cuda" if torch.cuda.is_available() else "cpu"
        device = torch.device(device)
        if device.type == "cuda" and device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
        identity = f"sender/{token}/{secrets.token_hex(8)}".encode()
        loop = asyncio.get_running_loop()
        broken: asyncio.Future[None] = loop.create_future()

        def on_break() -> None:
            # ZeroMQ reconnects by itself, so this may be called more than once.
            if not broken.done():
                broken.set_result(None)

        def tell() -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(on_break)

        dealer = ZmqDealer(
            url,
            identity,
            max_message_bytes=max_message_bytes,
            keys=keys,
            on_break=tell,
            heartbeat_timeout=heartbeat_timeout,
        )
        sender = cls(dealer, device, host)
        sender._unclosed = warn_unless_closed(sender, f"the Sender connected to {url}")
        # Use a weak reference, because the thread that calls ``tell`` must not keep alive a sender
        # that the user never closes.
        lose = weakref.WeakMethod(sender._lose)
        reason = "the client has ended or cannot be reached"
        broken.add_done_callback(lambda _: (end := lose()) and end(reason))
        sender._end = SendingEnd(device, host, sender._answer)
        sender._manifest = Manifest()
        dealer.start(sender._on_message)
        with contextlib.suppress(Closed):  # refused in the handshake: no answer will come
            sender._send(RankHello(sender._end.settings))
        try:
            async with asyncio.timeout(timeout):
                welcome = await asyncio.shield(sender._welcome)
        except TimeoutError:
            await sender.close()
            hint = "" if keys is None else ", or the driver does not accept this key"
            raise WeightUpdateError(
                f"no answer from {url} within {timeout:g} s: the client has ended, or the part "
                f"after '#' in the address is not its token{hint}; pass the current "
                "client.weights_address"
            ) from None
        except BaseException:
            await sender.close()
            raise
        sender._version = welcome.version
        sender._wanted = ModelDescription(
            welcome.tensors, welcome.ignored, welcome.tied, welcome.open
        )
        return sender

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Leave the group, disconnect and give up a running update. May be called repeatedly."""
        with contextlib.suppress(Closed):
            if self._proposal is not None:
                self._send(Withdraw(self._proposal[0]))
            self._send(SenderClosed())
        for future in self._waiting():
            future.set_exception(Closed("the sender was closed"))
        if not self._welcome.done():
            self._welcome.cancel()
        self._end.close()
        self._dealer.close()
        if self._unclosed is not None:
            self._unclosed.detach()

    @property
    def weight_version(self) -> int:
        """The version of this sender's last update, or the workers' version at ``connect``."""
        return self._version

    @property
    def lost(self) -> bool:
        """True if the client is lost or did not answer. Connect again."""
        return bool(self._lost)

    def register_model(self, model: Any) -> None:
        """Set the model that ``update()`` sends by default.

        Args:
            model: a module, mapping, TensorDict or iterable of pairs. Each update reads it again.
        """
        self._model = model

    async def update(
        self,
        weights: Any = None,
        **options: Unpack[UpdateOptions],
    ) -> UpdateReport:
        """Update the workers' weights, as ``Client.update_weights`` does.

        If the caller is cancelled, the update is given up. The call then returns only after the
        client has reported the end of the update, because the tensors are read until then. If the
        cancellation comes too late, the workers get the new weights.

        Args:
            weights: the weights to send. None sends the registered model.
            **options: the options of ``Client.update_weights``, except the options for the sending
                device, the host and adapters. ``timeout`` includes the wait for another update of
                this sender.

        Raises:
            Closed: this sender is closed.
            WeightUpdateError: the update failed, or the client sent nothing for ``timeout`` seconds
                (for at least five, because the client may be busy). If the client sent nothing,
                this sender can no longer be used.
        """
        return await self.update_as(weights, UpdateRequest.of(options))

    async def update_as(self, weights: Any, request: UpdateRequest) -> UpdateReport:
        """Run ``update`` with a request that was created at the time of the call."""
        from .bucket_sender import Payload
        from .tensor_source import take
        from .verification import check_ties

        if weights is None:
            weights = self._model
            if weights is None:
                raise UsageError("pass weights, or call register_model first")
        request.check_values()
        given = take(weights)
        deadline = Deadline(request.timeout, request.begun)
        async with turn(self._lock, deadline, wait=request.wait):
            if self._dealer.closed:
                raise Closed("the sender is closed")
            if self._lost:
                raise WeightUpdateError(self._lost)
            tensors, specs = self._manifest.take(given.named, self._wanted), self._manifest.specs
            await check_ties(self._manifest, given, self._checksums, self._wanted, deadline)
            request = request.with_specs(specs, self._manifest.total)
            assert request.bucket_bytes is not None
            payload = Payload(
                tensors, given.ready, specs, request.bucket_bytes, request.check_finite
            )
            self._end.load(payload)
            try:
                report = await self._proposed_and_ended(request)
            finally:
                self._end.unload(payload)
            self._version = report.version
            return report

    async def _checksums(self, names: list[str], timeout: float | None) -> dict[int, list[Shard]]:
        """Return checksums of live tensor shards. The client first waits for a running update.

        Raises:
            UpdateInProgress: the running update did not end in time.
            WeightUpdateError: the client did not answer.
        """
        seconds = 60.0 if timeout is None else timeout
        self._next_id += 1
        question = self._question = asyncio.get_running_loop().create_future()
        self._send(AskChecksums(self._next_id, names, seconds))
        try:
            async with asyncio.timeout(seconds + MIN_SILENCE):
                answer = await question
        except TimeoutError:
            self._lose(f"no answer from the client for {seconds + MIN_SILENCE:g} s")
            raise WeightUpdateError(self._lost) from None
        finally:
            self._question = None
        if answer.error is not None:
            raise _error_of(answer.error)
        return {0: answer.shards}

    async def _proposed_and_ended(self, request: UpdateRequest) -> UpdateReport:
        """Propose the update and wait for its end.

        If the caller is cancelled, withdraw the update, and still wait for its end.
        """
        self._next_id += 1
        id_ = self._next_id
        future: asyncio.Future[UpdateReport] = asyncio.get_running_loop().create_future()
        self._proposal = (id_, future)
        cancelled: asyncio.CancelledError | None = None
        silence = max(request.timeout, MIN_SILENCE)
        try:
            self._send(
                Propose(
                    id_,
                    list(request.specs),
                    request.version,
                    request.inflight,
                    request.mode,
                    request.partial,
                    request.bucket_bytes or 0,
                    request.timeout,
                    request.wait,
                    request.drain_timeout,
                    time.perf_counter() - request.begun,
                    request.same_version,
                )
            )
            while not future.done():
                self._heard = False
                # The client answers this message at once, even during a long update.
                self._send(RankHello(self._end.settings))
                try:
                    await asyncio.wait([future], timeout=silence)
                except asyncio.CancelledError as error:
                    cancelled = error
                    self._send(Withdraw(id_))
                    continue
                if not self._heard and not future.done():
                    self._lose(f"no message from the client for {silence:g} s")
            if cancelled is not None:
                # Retrieve the exception, so that asyncio does not log it.
                future.exception()
                raise cancelled
            return future.result()
        finally:
            self._proposal = None

    # --- inside -----------------------------------------------------------------------------------

    def _lose(self, why: str) -> None:
        """Mark the client as lost. Fail the running update, and ignore later messages."""
        if not self._lost:
            self._lost = f"{why}; connect again, to the one that is there"
            self._end.close()
            self._send(SenderClosed())
        for future in self._waiting():
            future.set_exception(WeightUpdateError(self._lost))

    def _waiting(self) -> list[asyncio.Future[Any]]:
        """Return the open futures of the proposal and of the question, if any."""
        proposal = None if self._proposal is None else self._proposal[1]
        return [f for f in (proposal, self._question) if f is not None and not f.done()]

    def _send(self, message: Any) -> None:
        if not self._dealer.closed:
            self._dealer.send([encode(message)])

    def _answer(self, answer: RankAnswer) -> None:
        self._send(answer)

    def _on_message(self, frames: list[Buffer]) -> None:
        try:
            message: ToRank = decode_to_rank(frames[0])
        except (ProtocolError, IndexError) as error:
            logger.warning("dropped a message of the weight channel: %s", error)
            return
        self._heard = True
        match message:
            case SenderAccepted() if not self._welcome.done():
                self._welcome.set_result(message)
            case Proposed():
                self._proposed(message)
            case LiveChecksums() if self._question is not None and not self._question.done():
                if message.id == self._next_id:
                    self._question.set_result(message)
            case Join() | Stage() | Abort() if not self._lost:
                self._end.ask(message)

    def _proposed(self, message: Proposed) -> None:
        failure: SglrlError | None = None
        if message.error is not None:
            failure = _error_of(message.error)
        if not self._welcome.done():
            if failure is not None:
                self._welcome.set_exception(failure)
        elif self._proposal is not None and self._proposal[0] == message.id:
            future = self._proposal[1]
            if future.done():
                return
            if failure is None:
                try:
                    future.set_result(_report.decode(message.report))
                except MALFORMED as error:
                    failure = ProtocolError(f"the client sent a malformed report: {error}")
            if failure is not None:
                future.set_exception(failure)


def _error_of(body: ErrorBody) -> SglrlError:
    """Return the error that the client has reported in an answer."""
    own = _OF_THE_CLIENT.get(body.kind)
    if own is not None:
        return own(body.message)
    return from_wire(body.kind, body.message, body.traceback)
