"""The next token's distribution, read where the model has just computed its logits.

SGLang would pass a whole vocabulary of logprobs on as Python lists. Here the rows of the requests
that asked for them are normalized on the device in float32, before sampling changes the logits in
place, copied to the host beside whatever runs next, and sent from where they land.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from sglrl.transport.shared_rows import TOGETHER, RowsWriter
from sglrl.wire.calls import ItemKind
from sglrl.wire.engine import TokenChunk

from ...mailbox import ROWS, Mailbox
from . import convert


class NextTokens:
    """What rank 0 of a replica is asked for. ``wanted``: by request id, how many of the likeliest
    tokens; 0: all. ``mailbox``: that the rows leave by."""

    def __init__(self, mailbox: Mailbox) -> None:
        self._mailbox = mailbox
        self.wanted: dict[str, int] = {}
        # Shared by all: nothing in it is about one request.
        self.params = convert.score_params()
        self._expected: list[tuple[int, str, int]] = []
        self._rows: Rows | None = None
        self._stream: Any = None

    def install(self, runner: Any) -> None:
        """Look at what this model runner's forward pass returns. Call once it is built."""
        forward = runner.forward

        def with_rows(*args: Any, **kwargs: Any) -> Any:
            output = forward(*args, **kwargs)
            if self._expected:
                expected, self._expected = self._expected, []
                self._rows = self.rows(output.logits_output.next_token_logits, expected)
            return output

        runner.forward = with_rows

    def expect(self, requests: Sequence[Any], unfinished: Any) -> None:
        """The next forward pass is of these requests; of ``unfinished`` it is not the last."""
        if self.wanted:
            self._expected = [
                (i, request.rid, self.wanted[request.rid])
                for i, request in enumerate(requests)
                if request.rid in self.wanted and request is not unfinished
            ]

    def rows(self, logits: torch.Tensor, expected: list[tuple[int, str, int]]) -> Rows:
        """These of these logits, on their way: see ``Rows``."""
        if logits.is_cuda and self._stream is None:
            self._stream = torch.cuda.Stream(logits.device)
        shared = self._mailbox.rows
        if logits.is_cuda and shared is not None:
            shared.on_piece = _pin
        return Rows(logits, expected, self._stream, shared)

    def take(self) -> Rows | None:
        """Of the forward pass that has been launched."""
        rows, self._rows = self._rows, None
        return rows


class Rows:
    """Rows of one forward pass, on their way to the host. ``logits``: [requests, vocabulary].
    ``expected``: (row, request id, how many of the likeliest; 0: all). ``stream``: that copies;
    None on CPU. ``shared``: where whole rows go, if there is room."""

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
        found: list[Any] = []
        if whole and not self._slots:
            found.append(logprobs)
        if most:
            values, ids = logprobs.topk(most)
            found += [values, ids.to(torch.int32)]
        if stream is not None:
            stream.wait_stream(torch.cuda.current_stream(logits.device))
            with torch.cuda.stream(stream):
                for rows, target in self._targets():
                    target.copy_(logprobs[rows], non_blocking=True)
                found = [_to_host(tensor, stream) for tensor in found]
                logprobs.record_stream(stream)
                self._done = torch.cuda.Event()
                self._done.record()
        else:
            for rows, target in self._targets():
                target.copy_(logprobs[rows])
        if most:
            self._top_rows = found[-2:]
        if whole and not self._slots:
            self._full_rows = found[0]

    def _targets(self) -> Iterator[tuple[slice, torch.Tensor]]:
        """Rows, and the shared memory where they go."""
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
        # Of calls that were cancelled.
        left = [slot for slot in self._slots if slot >= 0]
        if left and self._shared is not None:
            if self._done is not None:
                self._done.synchronize()
            self._shared.give_back(left)

    def put(self, mailbox: Mailbox, id_: int, rid: str, cached_tokens: int, version: int) -> None:
        """Answer the call."""
        if self._done is not None:
            self._done.synchronize()
            self._done = None
        at = self._place[rid]
        top = self._top[at]
        if not top:
            chunk = TokenChunk(b"", b"", "stop", cached_tokens, version)
            if self._slots:
                mailbox.put_slot(id_, chunk, self._slots[at])
                self._slots[at] = -1
                return
            assert self._full_rows is not None
            mailbox.put_row(id_, chunk, memoryview(self._full_rows[at].numpy()).cast("B"))
            return
        values, ids = (tensor[at][:top].numpy().tobytes() for tensor in self._top_rows)
        chunk = TokenChunk(b"", b"", "stop", cached_tokens, version, ids, values)
        mailbox.put(id_, ItemKind.DONE, chunk)


def _runs(slots: Sequence[int]) -> list[list[int]]:
    """Cut into runs of neighbours in one piece of memory."""
    found: list[list[int]] = []
    for slot in slots:
        if found and found[-1][-1] + 1 == slot and slot % TOGETHER:
            found[-1].append(slot)
        else:
            found.append([slot])
    return found


def _pin(piece: NDArray[np.float32]) -> None:
    """So that GPUs copy into it without the CPU."""
    register = torch.cuda.cudart().cudaHostRegister
    torch.cuda.check_error(register(piece.ctypes.data, piece.nbytes, 0))


def _to_host(tensor: torch.Tensor, stream: Any) -> list[torch.Tensor]:
    """Its rows. As many as are sent together lie in a piece of memory, and all pieces are of one
    size: torch keeps them for the next ones, and a new one of this kind takes milliseconds."""
    rows: list[torch.Tensor] = []
    for part in tensor.split(ROWS):
        target = torch.empty((ROWS, *tensor.shape[1:]), dtype=tensor.dtype, pin_memory=True)
        target = target[: len(part)]
        target.copy_(part, non_blocking=True)
        rows += target
    # The memory must not be used again before the copy has been made.
    tensor.record_stream(stream)
    return rows
