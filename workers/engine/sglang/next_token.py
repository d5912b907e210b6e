"""Read the next token's distribution from the logits, right after the forward pass.

SGLang would return the logprobs of a whole vocabulary as Python lists. This module selects the rows
of the requests for next-token logprobs. It normalizes the rows on the device in float32, before
sampling changes the logits in place. It copies the rows to the host while the GPU continues. The
answers are sent directly from this host memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from sglrl.transport.shared_rows import TOGETHER, RowsWriter
from sglrl.wire.calls import ItemKind
from sglrl.wire.engine import TokenChunk

from ...mailbox import ROWS, Mailbox
from . import convert
from .patch import Setup
from .tracked_request import Versions


def install(setup: Setup) -> Callable[[Any], bool] | None:
    """Return a function that wraps the forward pass of the model runner, on rank 0."""
    if setup.adapter is None:
        return None
    next_tokens: NextTokens = setup.adapter.next_tokens

    def finish(scheduler: Any) -> bool:
        next_tokens.wrap(scheduler.tp_worker.model_runner)
        return True

    return finish


class NextTokens:
    """The requests for a next token's distribution on rank 0 of a replica.

    Args:
        mailbox: the mailbox that sends the rows.

    Attributes:
        wanted: the number of likeliest tokens that each request wants, by SGLang's request id. 0
            means all tokens.
        params: the sampling parameters that all of these requests share.
    """

    def __init__(self, mailbox: Mailbox) -> None:
        self._mailbox = mailbox
        self.wanted: dict[str, int] = {}
        # The parameters contain nothing about a single request, so all requests share them.
        self.params = convert.score_params()
        self._expected: list[tuple[int, str, int]] = []
        self._rows: Rows | None = None
        self._stream: Any = None

    def wrap(self, runner: Any) -> None:
        """Wrap this model runner's forward pass."""
        forward = runner.forward

        def with_rows(*args: Any, **kwargs: Any) -> Any:
            output = forward(*args, **kwargs)
            if self._expected:
                expected, self._expected = self._expected, []
                self._rows = self.rows(output.logits_output.next_token_logits, expected)
            return output

        runner.forward = with_rows

    def expect(self, requests: Sequence[Any], unfinished: Any) -> None:
        """Set the requests that the next forward pass computes.

        Args:
            unfinished: a request whose prefill continues after this pass, so it has no row yet. Or
                None.
        """
        if self.wanted:
            self._expected = [
                (i, request.rid, self.wanted[request.rid])
                for i, request in enumerate(requests)
                if request.rid in self.wanted and request is not unfinished
            ]

    def rows(self, logits: torch.Tensor, expected: list[tuple[int, str, int]]) -> Rows:
        """Start the copy of the expected rows of the logits to the host, and return the rows."""
        if logits.is_cuda and self._stream is None:
            self._stream = torch.cuda.Stream(logits.device)
        shared = self._mailbox.rows
        if logits.is_cuda and shared is not None:
            shared.on_piece = _pin
        return Rows(logits, expected, self._stream, shared)

    def take(self) -> Rows | None:
        """Return the rows of the last forward pass, only once. Return None if there are none."""
        rows, self._rows = self._rows, None
        return rows


class Rows:
    """Rows of one forward pass that are copied to the host.

    Args:
        logits: the logits, shape [requests, vocabulary].
        expected: (row, request id, number of likeliest tokens) of each row. 0 means all tokens.
        stream: the CUDA stream that copies. None on a CPU.
        shared: memory shared with the driver for whole rows, used if it has room.
    """

    def __init__(
        self,
        logits: torch.Tensor,
        expected: list[tuple[int, str, int]],
        stream: Any,
        shared: RowsWriter | None,
    ) -> None:
        self._place = {rid: at for at, (_, rid, _) in enumerate(expected)}
        self._top = [top for *_, top in expected]
        self._done: Any = None
        self._shared = shared
        self._slots: list[int] = []
        if len(expected) != len(logits):
            index = torch.tensor([row for row, *_ in expected])
            if stream is not None:
                index = index.pin_memory().to(logits.device, non_blocking=True)
            logits = logits.index_select(0, index)
        whole, most = not all(self._top), max(self._top)
        if whole and shared is not None and logits.shape[-1] == shared.rows.shape[-1]:
            self._slots = shared.take(len(logits))
        self._full_rows: Any = None
        self._top_rows: list[Any] = []
        if self._slots and stream is None and not most:
            for rows, target in self._targets():
                torch.log_softmax(logits[rows], dim=-1, dtype=torch.float32, out=target)
            return
        logprobs = torch.log_softmax(logits, dim=-1, dtype=torch.float32)
        tensors: list[Any] = []
        if whole and not self._slots:
            tensors.append(logprobs)
        if most:
            values, ids = logprobs.topk(most)
            tensors += [values, ids.to(torch.int32)]
        if stream is not None:
            stream.wait_stream(torch.cuda.current_stream(logits.device))
            with torch.cuda.stream(stream):
                for rows, target in self._targets():
                    target.copy_(logprobs[rows], non_blocking=True)
                tensors = [_to_host(tensor, stream) for tensor in tensors]
                logprobs.record_stream(stream)
                self._done = torch.cuda.Event()
                self._done.record()
        else:
            for rows, target in self._targets():
                target.copy_(logprobs[rows])
        if most:
            self._top_rows = tensors[-2:]
        if whole and not self._slots:
            self._full_rows = tensors[0]

    def _targets(self) -> Iterator[tuple[slice, torch.Tensor]]:
        """Yield slices of the rows, each with its target in the shared memory."""
        begin = 0
        for slots in _runs(self._slots):
            assert self._shared is not None
            piece, row = divmod(slots[0], TOGETHER)
            end = begin + len(slots)
            yield (
                slice(begin, end),
                torch.from_numpy(self._shared.rows[piece, row : row + len(slots)]),
            )
            begin = end

    def __del__(self) -> None:
        # Return the slots of cancelled calls.
        left = [slot for slot in self._slots if slot >= 0]
        if left and self._shared is not None:
            if self._done is not None:
                self._done.synchronize()
            self._shared.give_back(left)

    def put(
        self, mailbox: Mailbox, id_: int, rid: str, cached_tokens: int, versions: Versions
    ) -> None:
        """Wait until the rows are on the host, then answer a call with its row."""
        if self._done is not None:
            self._done.synchronize()
            self._done = None
        version, lora_version = versions
        at = self._place[rid]
        top = self._top[at]
        if not top:
            chunk = TokenChunk(b"", b"", "stop", cached_tokens, version, lora_version=lora_version)
            if self._slots:
                mailbox.put_slot(id_, chunk, self._slots[at])
                self._slots[at] = -1
                return
            assert self._full_rows is not None
            mailbox.put_row(id_, chunk, memoryview(self._full_rows[at].numpy()).cast("B"))
            return
        values, ids = (tensor[at][:top].numpy().tobytes() for tensor in self._top_rows)
        chunk = TokenChunk(
            b"", b"", "stop", cached_tokens, version, ids, values, lora_version=lora_version
        )
        mailbox.put(id_, ItemKind.DONE, chunk)


def _runs(slots: Sequence[int]) -> list[list[int]]:
    """Group the slots into runs of consecutive slots in the same piece of memory."""
    groups: list[list[int]] = []
    for slot in slots:
        if groups and groups[-1][-1] + 1 == slot and slot % TOGETHER:
            groups[-1].append(slot)
        else:
            groups.append([slot])
    return groups


def _pin(piece: NDArray[np.float32]) -> None:
    """Pin this memory, so that a GPU copies into it without the CPU."""
    register = torch.cuda.cudart().cudaHostRegister
    torch.cuda.check_error(register(piece.ctypes.data, piece.nbytes, 0))


def _to_host(tensor: torch.Tensor, stream: Any) -> list[torch.Tensor]:
    """Start the copy of a tensor to pinned memory, and return its rows there.

    Each piece of memory holds ``ROWS`` rows, which are sent in one message. All pieces have the
    same size, so that torch reuses them: an allocation of pinned memory takes milliseconds.
    """
    rows: list[torch.Tensor] = []
    for part in tensor.split(ROWS):
        target = torch.empty((ROWS, *tensor.shape[1:]), dtype=tensor.dtype, pin_memory=True)
        target = target[: len(part)]
        target.copy_(part, non_blocking=True)
        rows += target
    # Keep torch from reusing the tensor's memory before the copy is done.
    tensor.record_stream(stream)
    return rows
