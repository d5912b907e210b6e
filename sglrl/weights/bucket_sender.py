"""The sending end: gathers, casts and packs tensors into buckets, and broadcasts the buckets.

``SendingEnd`` answers the same messages as a rank of a worker (``Join``, ``Stage``, ``Abort``). The
coordinator therefore treats it as one more member, in this process or in another process. The work
runs on a separate thread and does not block the event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, Final

import msgspec
import torch

from ..core.manifest import Layout, by_bucket, in_pieces, lay_out
from ..core.weight_update import ABORT, JOIN, STAGE
from ..errors import SglrlError, UsageError, WeightUpdateError
from ..wire.calls import ErrorBody
from ..wire.codec import encode
from ..wire.weights import (
    Abort,
    Join,
    RankAnswer,
    RankSettings,
    SentStage,
    Stage,
    TensorSpec,
    ToRank,
)
from .cuda_ipc import SharedSender
from .finite import FiniteCheck
from .group import Group, Store, settings
from .link import Link
from .tensor_source import Named, whole

logger = logging.getLogger("sglrl.weights")

RING: Final = 2
"""The number of buckets in memory. One is packed while the previous bucket is sent."""


class Payload(msgspec.Struct):
    """The tensors that one update sends.

    Attributes:
        tensors: the tensors by name.
        ready: CUDA events to wait for before the tensors are read.
        specs: the specs of the tensors, with the dtypes in which they are sent.
        bucket_bytes: the size of a bucket.
        check_finite: whether to reject NaN and infinite values.
        begun: True once the stage has started, so some tensors may already have been gathered.
    """

    tensors: Named
    ready: list[Any]
    specs: list[TensorSpec]
    bucket_bytes: int
    check_finite: bool
    begun: bool = False

    @property
    def is_gathered(self) -> bool:
        """True if the trainer's other ranks take part in gathering, which they do only once."""
        distributed = torch.distributed
        several = distributed.is_available() and distributed.is_initialized()
        return (
            several
            and distributed.get_world_size() > 1
            and any(hasattr(tensor, "full_tensor") for _, tensor in self.tensors)
        )


class _Packing:
    """The layout of tensors in buckets, with the buckets' memory and views.

    The packing is kept for the next update, because a trainer sends the same names each time, and
    creating a few hundred views takes milliseconds.
    """

    def __init__(self, specs: list[TensorSpec], bucket_bytes: int) -> None:
        self.specs = specs
        self.bucket_bytes = bucket_bytes
        self.layout: Layout = lay_out(specs, bucket_bytes)
        self.buckets = by_bucket(self.layout)
        self.pieces = [in_pieces(self.layout, indices) for indices in self.buckets]
        self.dtypes = [getattr(torch, spec.dtype) for spec in specs]
        self.ring: dict[int, torch.Tensor] = {}
        self._views: dict[int, list[torch.Tensor]] = {}

    def memory(self, bucket: int, device: torch.device) -> torch.Tensor:
        """Return the memory into which the bucket is packed."""
        slot = bucket % RING
        size = self.layout.sizes[bucket]
        memory = self.ring.get(slot)
        if memory is None or memory.numel() < size:
            size = max(size, self.layout.ring_slot)
            memory = self.ring[slot] = torch.empty(size, dtype=torch.uint8, device=device)
            for other in [b for b in self._views if b % RING == slot]:
                del self._views[other]
        return memory[: self.layout.sizes[bucket]]

    def views(self, bucket: int, memory: torch.Tensor) -> list[torch.Tensor]:
        """Return views of the bucket's memory, one for each of its tensors."""
        if bucket not in self._views:
            self._views[bucket] = made = []
            for index in self.buckets[bucket]:
                place, spec = self.layout.places[index], self.specs[index]
                flat = memory[place.offset : place.offset + place.nbytes]
                made.append(flat.view(self.dtypes[index]).view(spec.shape))
        return self._views[bucket]


class SendingEnd:
    """The sender's member of the weight channel's groups, always rank 0.

    Args:
        device: the device on which buckets are packed, for example "cuda:0" or "cpu".
        host: an address of this process that the workers can reach.
        answer: receives every ``RankAnswer``. It is called on the event loop.
    """

    def __init__(
        self, device: torch.device, host: str, answer: Callable[[RankAnswer], None]
    ) -> None:
        self.device = device
        self.host = host
        self._answer = answer
        self._loop = asyncio.get_running_loop()
        self._store = Store(host)
        self._link = self._new_link()
        on_gpu = device.type == "cuda"
        self._stream = torch.cuda.Stream(device, priority=-1) if on_gpu else None
        self._check_stream = torch.cuda.Stream(device) if on_gpu else None
        self._payload: Payload | None = None

    @property
    def settings(self) -> RankSettings:
        return settings(self.device, self.host, self._store.port)

    def load(self, payload: Payload) -> None:
        """Set the tensors that the next ``Stage`` sends."""
        self._payload = payload
        # Plan the buckets now, while the workers prepare.
        link = self._link
        link.submit(lambda: self._plan(link, payload))

    def unload(self, payload: Payload) -> None:
        """Release the tensors at the end of their update. Keep the payload of another update."""
        if self._payload is payload:
            self._payload = None

    def ask(self, message: ToRank) -> None:
        """Start the work that the message requests. ``answer`` receives the result later."""
        match message:
            case Join():
                self._link.abandon()
                link = self._link = self._new_link()
                self._run(link, message.id, JOIN, lambda: self._join(link, message))
            case Stage():
                # Read now: another payload may be loaded before the thread runs the job.
                link, payload = self._link, self._payload
                self._run(link, message.id, STAGE, lambda: self._stage(link, message, payload))
            case Abort():
                # Answer at once, even while the thread is in a collective.
                if message.leave:
                    self._link.abandon()
                self._loop.call_soon(self._answer, RankAnswer(message.id, ABORT))

    def close(self) -> None:
        """Leave the group and free all memory, without waiting."""
        self._link.abandon()
        self._link.packing = None
        self._payload = None

    def _new_link(self) -> Link:
        link = Link()
        if self.device.type == "cpu":
            link.submit(_copy_alone)
        return link

    # --- on the link's thread ---------------------------------------------------------------------

    def _run(self, link: Link, id_: int, phase: str, work: Callable[[], Any]) -> None:
        def job() -> None:
            answer = perform(id_, phase, work)
            with contextlib.suppress(RuntimeError):  # the loop is closed: no caller waits
                self._loop.call_soon_threadsafe(self._answer, answer)

        link.submit(job)

    def _join(self, link: Link, join: Join) -> None:
        prefix = f"sglrl/{join.group}"
        # Use a separate connection, because the wait for a missing rank blocks the connection.
        store = self._store.store.clone()
        if join.size > 1:
            link.group = Group(store, prefix, 0, join.size, self.device, self.host, join.timeout)
            link.group.begin()
        if join.readers:
            link.sender = SharedSender(store, prefix, join.readers, RING, join.timeout)
        link.check()

    def _stage(self, link: Link, message: Stage, payload: Payload | None) -> SentStage:
        if payload is None:
            raise WeightUpdateError("the update was withdrawn")
        if payload.begun and payload.is_gathered:
            raise WeightUpdateError(
                "a worker was lost while DTensors were being gathered, in which the trainer's "
                "other ranks take part once (gather); update again on all of them"
            )
        payload.begun = True
        packing = self._packing_for(link, payload)
        with torch.no_grad(), self._on_stream(), _frequent_switches():
            for event in payload.ready:
                if self._stream is None:
                    event.synchronize()
                else:
                    self._stream.wait_event(event)
            check = FiniteCheck() if payload.check_finite else None
            if check is not None:
                self._begin_check(check, payload, packing)
                if message.mode == "bucketed":
                    # Check before sending, because workers write directly into live weights.
                    self._end_check(check)
            sent = self._send(link, message.id, payload, packing, check)
            if check is not None:
                self._end_check(check)
            return sent

    def _begin_check(self, check: FiniteCheck, payload: Payload, packing: _Packing) -> None:
        """Start the check of all tensors that are not gathered.

        Gathered tensors are checked when they are packed. A GPU runs the check while it sends,
        because a broadcast leaves most of the memory bandwidth unused.
        """
        tensors = [
            (name, tensor, dtype)
            for (name, tensor), dtype in zip(payload.tensors, packing.dtypes, strict=True)
            if not hasattr(tensor, "full_tensor")
        ]
        for device in {tensor.device for _, tensor, _ in tensors} - {self.device}:
            if device.type == "cuda":
                for event in payload.ready:
                    torch.cuda.current_stream(device).wait_event(event)
        if self._check_stream is not None and self._stream is not None:
            self._check_stream.wait_stream(self._stream)
        with torch.cuda.stream(self._check_stream):
            check.add(tensors)

    def _end_check(self, check: FiniteCheck) -> None:
        """Wait for the check. Raise ``InvalidWeights`` if a tensor is not finite."""
        if self._check_stream is not None and self._stream is not None:
            self._stream.wait_stream(self._check_stream)
        check.finish()

    def _plan(self, link: Link, payload: Payload) -> None:
        # Ignore errors here, because the stage reports them.
        with contextlib.suppress(SglrlError):
            self._packing_for(link, payload)

    def _packing_for(self, link: Link, payload: Payload) -> _Packing:
        packing: _Packing | None = link.packing
        if (
            packing is None
            or packing.bucket_bytes != payload.bucket_bytes
            or packing.specs != payload.specs
        ):
            packing = link.packing = _Packing(payload.specs, payload.bucket_bytes)
        return packing

    def _send(
        self,
        link: Link,
        update: int,
        payload: Payload,
        packing: _Packing,
        check: FiniteCheck | None,
    ) -> SentStage:
        group, neighbour = link.group, link.sender
        gather = begun = 0.0
        works: list[Any] = []
        if neighbour is not None:
            neighbour.begin(update)
        with group.deadline() if group is not None else contextlib.nullcontext():
            for bucket in range(len(packing.buckets)):
                link.check()
                start = time.perf_counter()
                if group is not None and bucket >= RING:
                    works[bucket - RING].wait()
                if neighbour is not None:
                    neighbour.before(bucket)
                in_pieces = group is not None and group.takes_pieces and packing.pieces[bucket]
                pieces = None
                if in_pieces and neighbour is None:
                    pieces = self._as_they_are(payload, packing, bucket)
                if pieces is None:
                    data = self._packed(payload, packing, bucket, check)
                    pieces = packing.views(bucket, data) if in_pieces else [data]
                now = time.perf_counter()
                gather += now - start
                begun = begun or now
                if group is not None:
                    works.append(group.broadcast(pieces))
                if neighbour is not None:
                    neighbour.send(bucket, data)
            for work in works[-RING:]:
                work.wait()
            if group is not None:
                group.synchronize()
        if neighbour is not None:
            neighbour.finish(len(packing.buckets))
        # An update has no buckets if the engine keeps none of the given tensors.
        took = time.perf_counter() - begun if begun else 0.0
        return SentStage(gather * 1e3, took * 1e3)

    def _as_they_are(
        self, payload: Payload, packing: _Packing, bucket: int
    ) -> list[torch.Tensor] | None:
        """Return the bucket's tensors if they can be sent without packing, otherwise None."""
        pieces = []
        for index in packing.buckets[bucket]:
            tensor = payload.tensors[index][1]
            if tensor.device != self.device or tensor.dtype != packing.dtypes[index]:
                return None
            if hasattr(tensor, "full_tensor") or not tensor.is_contiguous():
                return None
            pieces.append(tensor)
        return pieces

    def _packed(
        self, payload: Payload, packing: _Packing, bucket: int, check: FiniteCheck | None
    ) -> torch.Tensor:
        data = packing.memory(bucket, self.device)
        views = packing.views(bucket, data)
        given = [
            (payload.tensors[index], packing.dtypes[index]) for index in packing.buckets[bucket]
        ]
        tensors = [whole(tensor) for (_, tensor), _ in given]
        if check is not None:
            check.add(
                (name, full, dtype)
                for ((name, tensor), dtype), full in zip(given, tensors, strict=True)
                if hasattr(tensor, "full_tensor")
            )
        if all(t.device == self.device for t in tensors):
            torch._foreach_copy_(views, tensors)
        else:
            for view, tensor in zip(views, tensors, strict=True):
                view.copy_(tensor, non_blocking=True)
        return data

    @contextlib.contextmanager
    def _on_stream(self) -> Iterator[None]:
        if self._stream is None:
            yield
        else:
            with torch.cuda.device(self.device), torch.cuda.stream(self._stream):
                yield


@contextlib.contextmanager
def _frequent_switches() -> Iterator[None]:
    """Shorten the interval at which Python switches between threads within the block.

    The default is five milliseconds, in which a whole small model can be sent. With the shorter
    interval, the event loop's thread releases the GIL to the sending thread sooner.
    """
    before = sys.getswitchinterval()
    sys.setswitchinterval(min(before, 5e-4))
    try:
        yield
    finally:
        sys.setswitchinterval(before)


def _copy_alone() -> None:
    """Make torch's copies on this thread use only this thread.

    The engines need the same cores. A copy by several threads ends only when every one of these
    threads has been scheduled on a core.
    """
    # torch sets the number of threads of a thread at its first use. This call is the first use, so
    # that torch does not overwrite the limit later.
    torch.get_num_threads()
    try:
        _thread_pools().limit(limits=1, user_api="openmp")
    except Exception:  # an unknown library must not prevent sending
        logger.debug("copies of weights keep their threads", exc_info=True)


@functools.cache
def _thread_pools() -> Any:
    """Return a controller of the thread pools of all loaded libraries. The search takes 20 ms."""
    # Imported here, because a sender on a GPU does not need it.
    from threadpoolctl import ThreadpoolController

    return ThreadpoolController()


def sending_device(wanted: str | torch.device | None, tensors: Named, backend: str) -> torch.device:
    """Return the device on which buckets are packed for workers on ``backend``.

    Args:
        wanted: the device that the caller requests. None selects the device of the tensors.
        backend: the kind of the workers' devices, "cpu" or "cuda".

    Raises:
        UsageError: torch does not know the device, or it is not a ``backend`` device.
    """
    if wanted is not None:
        try:
            device = torch.device(wanted)
        except (RuntimeError, TypeError):
            raise UsageError(f"device={wanted!r} is not a device that torch knows") from None
    elif backend == "cpu":
        device = torch.device("cpu")
    else:
        of_tensors = next((t.device for _, t in tensors if t.device.type == "cuda"), None)
        device = of_tensors or torch.device("cuda", torch.cuda.current_device())
    if device.type != backend:
        raise UsageError(
            f"the workers are on {backend} and the sender is to be on {device}; weights are sent "
            f"from a {backend} device (device={backend!r})"
        )
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    return device


def _name(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def perform(id_: int, phase: str, work: Callable[[], Any]) -> RankAnswer:
    """Call ``work``, and return an answer with its result or with the error that it raises."""
    try:
        result = work()
    except SglrlError as failure:
        return RankAnswer(id_, phase, ErrorBody(type(failure).__name__, failure.message))
    except Exception as failure:
        logger.debug("%s of a weight update failed", phase, exc_info=True)
        text = str(failure) or type(failure).__name__
        text = text if len(text) < 600 else text[:600] + " ..."
        return RankAnswer(id_, phase, ErrorBody("WeightUpdateError", f"{phase} failed: {text}"))
    body = msgspec.Raw(encode(result))
    return RankAnswer(id_, phase, None, body)
