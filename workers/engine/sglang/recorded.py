"""Steps on a CPU that are recorded once, as the calls of PyTorch that they are made of, and then
replayed without Python: with a small model Python takes most of a step.

What CUDA graphs are on a GPU, but one recording is good for every number of rows and length of
context: the sizes are read from what it is given. Whether a model's code keeps to that is seen,
not assumed: a step of more rows than any before, or of fewer, is computed both ways, and a
recording that does not say the same is thrown away. (Between the two it is assumed: the code of
these models tells numbers of rows apart by no more than a bound.) It reads weights and KV cache
where the model does, so it knows new ones.
"""

from __future__ import annotations

import dataclasses
import logging
import warnings
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from .ragged import Call

logger = logging.getLogger("sglrl.worker")

MODELS = {"LlamaForCausalLM", "Qwen3ForCausalLM"}
"""Whose code makes the same calls whatever the values of its tensors are: one that looks up which
experts a token has, say, does not."""

_WORTH = 8
"""Steps of a kind after which it is recorded, which takes as long as many of them."""

_ALONE = 1 << 24
"""Multiplications. A step of so many is done by one thread before others have woken up, and leaves
their cores to who asked."""

Tensors = tuple[torch.Tensor, ...]


class Kind(NamedTuple):
    """``alone``: one request. PyTorch's calls are not the same for what has one row."""

    decodes: bool
    all_tokens: bool
    unmasked: bool
    causal: bool
    alone: bool


class Inputs(NamedTuple):
    """Of a step. ``counts``: new tokens of each request, int32; None: it is a decode step.
    ``call``: what all layers attend to."""

    tokens: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    counts: torch.Tensor | None
    call: Call

    @property
    def kind(self) -> Kind:
        """Steps of one kind have the same tensors, and make the same calls."""
        call = self.call
        return Kind(
            self.counts is None,
            call.tokens is None,
            call.mask is None,
            call.causal,
            call.shape[0] == 1,
        )

    def tensors(self) -> Tensors:
        """Those that there are."""
        call = self.call
        n, q, s = call.shape
        given = [self.tokens, self.positions, self.slots, call.slots.view(n, s)]
        if self.counts is not None:
            given.append(self.counts)
        if call.tokens is not None:
            given.append(call.tokens.view(n, q))
        if call.mask is not None:
            given.append(call.mask)
        return tuple(given)


def inputs_of(kind: Kind, tensors: Tensors) -> Inputs:
    """From what ``tensors`` returned."""
    tokens, positions, slots, context, *rest = tensors
    counts = None if kind.decodes else rest.pop(0)
    asked = None if kind.all_tokens else rest.pop(0)
    mask = None if kind.unmasked else rest.pop(0)
    n, s = context.shape
    shape = n, 1 if asked is None else asked.shape[1], s
    flat = None if asked is None else asked.flatten()
    return Inputs(
        tokens, positions, slots, counts, Call(flat, context.flatten(), mask, shape, kind.causal)
    )


class _Recording:
    def __init__(self, play: Callable[..., torch.Tensor], state: list[torch.Tensor]) -> None:
        self._play = play
        self._state = state
        self._weights = sum(tensor.numel() for tensor in state if tensor.dim() == 2)
        self.rows = range(0)
        """That it is right for."""

    def logits(self, inputs: Inputs) -> torch.Tensor:
        threads = torch.get_num_threads()
        if len(inputs.tokens) * self._weights < _ALONE:
            torch.set_num_threads(1)
        try:
            # What PyTorch's optimizer would gain is less than what it takes, again for each shape.
            with torch.inference_mode(), torch.jit.optimized_execution(False):
                return self._play(*inputs.tensors(), self._state)
        finally:
            torch.set_num_threads(threads)


class Recorder:
    """Of one model runner. ``attend_to``: makes its layers attend to this call, whatever the batch
    says. ``state``: tensors that a step reads and writes, beside its inputs."""

    def __init__(
        self, runner: Any, attend_to: Callable[[Call], None], state: list[torch.Tensor]
    ) -> None:
        self._runner = runner
        self._attend_to = attend_to
        self._state = state
        self._seen: Counter[Any] = Counter()
        self._recordings: dict[Any, _Recording | None] = {}
        """By kind of step; None: it cannot be recorded."""

    def logits(self, inputs: Inputs, batch: Callable[[], Any]) -> torch.Tensor:
        """Of this step, which is also SGLang's ``batch``."""
        kind = inputs.kind
        recording = self._recordings.get(kind)
        rows = len(inputs.tokens)
        if recording is not None and rows in recording.rows:
            return recording.logits(inputs)
        logits: torch.Tensor = self._runner.forward(batch()).logits_output.next_token_logits
        if recording is not None:
            self._check(recording, inputs, logits)
        elif kind not in self._recordings:
            self._seen[kind] += 1
            if self._seen[kind] >= _WORTH:
                self._recordings[kind] = self._record(inputs, batch())
        return logits

    def _check(self, recording: _Recording, inputs: Inputs, expected: torch.Tensor) -> None:
        # Not bit by bit: MKL's sums depend on where in memory its arguments lie.
        far = torch.finfo(expected.dtype).eps ** 0.5 * float(expected.abs().max())
        try:
            found = recording.logits(inputs)
            right = found.shape == expected.shape and torch.allclose(found, expected, 0.0, far)
        except RuntimeError:
            # A size was written down.
            right = False
        if right:
            known, rows = recording.rows, len(inputs.tokens)
            recording.rows = range(min(known.start or rows, rows), max(known.stop, rows + 1))
        else:
            logger.info("a recorded step of %d rows differs", len(inputs.tokens))
            self._recordings[inputs.kind] = None

    def _record(self, inputs: Inputs, batch: Any) -> _Recording | None:
        """While SGLang runs the batch, so that the model finds everything as it always does."""
        model = self._runner.model
        forward = model.forward
        kind = inputs.kind
        made: list[Callable[..., torch.Tensor]] = []

        def recorded(
            tokens: torch.Tensor, positions: torch.Tensor, batch: Any, **kwargs: Any
        ) -> Any:
            def step(*given: Any) -> torch.Tensor:
                # The state is given too so that it is read and written when this is replayed:
                # what a trace has not been given it takes for constant.
                inputs = inputs_of(kind, given[:-1])
                self._attend_to(inputs.call)
                changes: dict[str, Any] = {
                    "input_ids": inputs.tokens,
                    "positions": inputs.positions,
                    "out_cache_loc": inputs.slots,
                }
                if inputs.counts is not None:
                    changes["extend_seq_lens"] = inputs.counts
                output = forward(
                    inputs.tokens,
                    inputs.positions,
                    dataclasses.replace(batch, **changes),
                    **kwargs,
                )
                return output.next_token_logits

            with warnings.catch_warnings():
                # That sizes were compared; and that it is deprecated in favour of compilers.
                warnings.simplefilter("ignore")
                given = (*inputs.tensors(), self._state)
                made.append(torch.jit.trace(step, given, check_trace=False))
            return forward(tokens, positions, batch, **kwargs)

        model.forward = recorded
        try:
            self._runner.forward(batch)
        except Exception as error:
            logger.info("a step cannot be recorded: %r", error)
            return None
        finally:
            del model.forward
        return _Recording(made[0], self._state)
