"""The sending end: gathers, casts and packs tensors into buckets, and broadcasts them.

``SendingEnd`` answers the same messages as a worker's rank does (``Join``, ``Stage``, ``Abort``),
so the coordinator treats it as one more member, in this process or in another. Its work is done on
one thread of its own; the event loop goes on.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Iterator
from typing import Any, Final

import msgspec
import torch

from ..codec import encode
from ..core.manifest import Layout, by_bucket, lay_out
from ..core.weights import ABORT, JOIN, STAGE
from ..errors import SglrlError, UsageError, WeightUpdateError
from ..messages import (
    Abort,
    ErrorBody,
    Join,
    RankAnswer,
    RankSettings,
    SentStage,
    Stage,
    TensorSpec,
    ToRank,
)
from .group import Group, Store, settings
from .link import Link
from .shared import SharedSender
from .source import Named, whole

logger = logging.getLogger("sglrl.weights")

RING: Final = 3
"""Buckets in the making, on their way, and about to be free again."""


class Cargo(msgspec.Struct, frozen=True):
    """What one update sends: tensors with their specs, which say the dtype they are sent in."""

    tensors: Named
    specs: list[TensorSpec]
    bucket_bytes: int


class SendingEnd:
    """Rank 0 of the weight channel's groups.

    Args:
        device: where buckets are packed: "cuda:0", "cpu", ...
        host: address of this process that the workers can reach.
        answer: called on the event loop with every ``RankAnswer``.
    """

    def __init__(
        self, device: torch.device, host: str, answer: Callable[[RankAnswer], None]
    ) -> None:
        self.device = device
        self.host = host
        self._answer = answer
        self._loop = asyncio.get_running_loop()
        self._store = Store(host)
        self._link = Link()
        self._stream = torch.cuda.Stream(device, priority=-1) if device.type == "cuda" else None
        self._cargo: Cargo | None = None
        self._ready: torch.cuda.Event | None = None

    @property
    def settings(self) -> RankSettings:
        return settings(self.device, self.host, self._store.port)

    def load(self, cargo: Cargo) -> None:
        """What the next ``Stage`` sends. Call it on the thread and stream that made the tensors:
        what that stream holds is awaited before they are read."""
        self._cargo = cargo
        if self.device.type == "cuda":
            self._ready = torch.cuda.Event()
            self._ready.record(torch.cuda.current_stream(self.device))

    def unload(self) -> None:
        """The update has ended: the tensors are the caller's again."""
        self._cargo = None

    def ask(self, message: ToRank) -> None:
        """Begin what the message wants; the answer comes later."""
        match message:
            case Join():
                self._link.abandon()
                link = self._link = Link()
                self._run(link, message.id, JOIN, lambda: self._join(link, message))
            case Stage():
                link = self._link
                self._run(link, message.id, STAGE, lambda: self._stage(link, message.id))
            case Abort():
                # Answered at once, also when the thread is in a collective.
                if message.leave:
                    self._link.abandon()
                self._loop.call_soon(self._answer, RankAnswer(message.id, ABORT))

    def close(self) -> None:
        """Leave the group and free everything, without waiting."""
        self._link.abandon()
        self._link.ring = {}
        self._cargo = None

    # --- on the link's thread ---------------------------------------------------------------------

    def _run(self, link: Link, id_: int, phase: str, work: Callable[[], Any]) -> None:
        def job() -> None:
            answer = perform(id_, phase, work)
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits
                self._loop.call_soon_threadsafe(self._answer, answer)

        link.submit(job)

    def _join(self, link: Link, join: Join) -> None:
        prefix = f"sglrl/{join.group}"
        # A connection of its own: one that waits for a rank that does not come is held meanwhile.
        store = self._store.store.clone()
        if join.size > 1:
            link.group = Group(store, prefix, 0, join.size, self.device, self.host, join.timeout)
            link.group.begin()
        if join.readers:
            link.sender = SharedSender(store, prefix, join.readers, RING, join.timeout)
        link.check()

    def _stage(self, link: Link, update: int) -> SentStage:
        cargo = self._cargo
        if cargo is None:
            raise WeightUpdateError("the update was withdrawn")
        layout = lay_out(cargo.specs, cargo.bucket_bytes)
        with self._on_stream():
            if self._ready is not None:
                torch.cuda.current_stream(self.device).wait_event(self._ready)
            return self._send(link, update, cargo, layout)

    def _send(self, link: Link, update: int, cargo: Cargo, layout: Layout) -> SentStage:
        group, neighbour = link.group, link.sender
        gather = begun = 0.0
        works: list[Any] = []
        if neighbour is not None:
            neighbour.begin(update)
        with group.deadline() if group is not None else contextlib.nullcontext():
            for bucket, indices in enumerate(by_bucket(layout)):
                link.check()
                start = time.perf_counter()
                if group is not None and bucket >= RING:
                    works[bucket - RING].wait()
                if neighbour is not None:
                    neighbour.before(bucket)
                data = self._pack(link, cargo, layout, bucket, indices, neighbour is not None)
                now = time.perf_counter()
                gather += now - start
                begun = begun or now
                if group is not None:
                    works.append(group.broadcast(data))
                if neighbour is not None:
                    neighbour.send(bucket, data)
            for work in works[-RING:]:
                work.wait()
            if group is not None:
                group.synchronize()
        if neighbour is not None:
            neighbour.finish(len(layout.sizes))
        return SentStage(gather * 1e3, (time.perf_counter() - begun) * 1e3)

    def _pack(
        self,
        link: Link,
        cargo: Cargo,
        layout: Layout,
        bucket: int,
        indices: list[int],
        copy: bool,
    ) -> torch.Tensor:
        """The bucket's bytes: a copy in the ring, or a single tensor itself where it can be sent as
        it is."""
        if len(indices) == 1 and not copy:
            (index,) = indices
            tensor = whole(cargo.tensors[index][1])
            place = layout.places[index]
            fits = place.nbytes == layout.sizes[bucket] and tensor.is_contiguous()
            if fits and tensor.device == self.device and _name(tensor) == cargo.specs[index].dtype:
                return tensor.view(-1).view(torch.uint8)
        data = self._slot(link, bucket, layout)[: layout.sizes[bucket]]
        views = []
        tensors = []
        for index in indices:
            place, spec = layout.places[index], cargo.specs[index]
            flat = data[place.offset : place.offset + place.nbytes]
            views.append(flat.view(getattr(torch, spec.dtype)).view(spec.shape))
            tensors.append(whole(cargo.tensors[index][1]))
        with torch.no_grad():
            if all(t.device == self.device for t in tensors):
                torch._foreach_copy_(views, tensors)
            else:
                for view, tensor in zip(views, tensors, strict=True):
                    view.copy_(tensor, non_blocking=True)
        return data

    def _slot(self, link: Link, bucket: int, layout: Layout) -> torch.Tensor:
        memory: torch.Tensor | None = link.ring.get(bucket % RING)
        if memory is None or memory.numel() < max(layout.sizes):
            memory = torch.empty(max(layout.sizes), dtype=torch.uint8, device=self.device)
            link.ring[bucket % RING] = memory
        return memory

    @contextlib.contextmanager
    def _on_stream(self) -> Iterator[None]:
        if self._stream is None:
            yield
        else:
            with torch.cuda.device(self.device), torch.cuda.stream(self._stream):
                yield


def sending_device(wanted: str | torch.device | None, tensors: Named, backend: str) -> torch.device:
    """Where to pack for workers on ``backend``: as asked, else where the tensors are."""
    if wanted is not None:
        device = torch.device(wanted)
    elif backend == "cpu":
        device = torch.device("cpu")
    else:
        found = next((t.device for _, t in tensors if t.device.type == "cuda"), None)
        device = found or torch.device("cuda", torch.cuda.current_device())
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    if device.type != backend:
        raise UsageError(
            f"the workers are on {backend} and the sender is to be on {device}; weights are sent "
            f"from a {backend} device (device={backend!r})"
        )
    return device


def _name(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def perform(id_: int, phase: str, work: Callable[[], Any]) -> RankAnswer:
    """Do it, and answer: with what it returns, or with what went wrong."""
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
