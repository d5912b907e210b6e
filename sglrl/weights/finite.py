"""Check that weights are finite, before and after the cast to the engine's dtype."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch

from ..errors import InvalidWeights

_SHOWN = 8

ToCheck = tuple[str, torch.Tensor, torch.dtype]
"""The name of a tensor, the tensor, and the dtype to which it is cast."""


class FiniteCheck:
    """Collects the largest magnitude of each tensor. Raises an error if a magnitude is not finite.

    ``add`` reads every tensor once and does not wait for a GPU. ``finish`` waits once for all
    tensors. A cast keeps the order of numbers, so the largest magnitude shows whether any value
    overflows.
    """

    def __init__(self) -> None:
        self._results: list[tuple[list[str], torch.dtype, torch.Tensor]] = []
        """One entry per group of tensors: their names, the dtype to which they are cast, and their
        largest magnitudes before and after the cast, as float64 of shape (2, number of names)."""

    def add(self, tensors: Iterable[ToCheck]) -> None:
        """Start the check of these tensors, on the current stream of their device."""
        groups: dict[tuple[torch.device, torch.dtype, torch.dtype], list[ToCheck]] = {}
        for one in tensors:
            _, tensor, dtype = one
            if tensor.numel():
                groups.setdefault((tensor.device, tensor.dtype, dtype), []).append(one)
        for (_, _, dtype), group in groups.items():
            given = torch.stack(_largest([tensor for _, tensor, _ in group]))
            both = torch.stack((given.double(), given.to(dtype).double()))
            self._results.append(([name for name, _, _ in group], dtype, both))

    def finish(self) -> None:
        """Wait for the checks of all added tensors.

        Raises:
            InvalidWeights: a tensor is not finite.
        """
        results, self._results = self._results, []
        wrong = []
        for names, dtype, both in results:
            for name, given, sent in zip(names, *both.tolist(), strict=True):
                if not math.isfinite(sent):
                    wrong.append(f"{name} holds {_kind(given, dtype)}")
        if wrong:
            more = f"; and {len(wrong) - _SHOWN} more tensors" if len(wrong) > _SHOWN else ""
            raise InvalidWeights(
                f"the weights are not finite: {'; '.join(wrong[:_SHOWN])}{more}. Send finite ones, "
                "or pass check_finite=False to commit them as they are"
            )


def _kind(largest: float, dtype: torch.dtype) -> str:
    if math.isnan(largest):
        return "NaN"
    if math.isinf(largest):
        return "an infinite value"
    return f"{largest:g} or its negative, which overflows {str(dtype).removeprefix('torch.')}"


def _largest(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return the largest magnitude of each tensor, or NaN if the tensor holds NaN.

    All tensors have the same device and dtype. No tensor is empty.
    """
    first = tensors[0]
    if first.element_size() == 1:
        # torch has no reductions for 8-bit floats. float16 can represent all of their values.
        return [_largest([tensor.to(torch.float16)])[0] for tensor in tensors]
    if first.device.type == "cuda":
        # Use few kernels, because launching one kernel for each tensor takes longer than its work.
        return list(torch._foreach_norm(tensors, math.inf))
    # On a CPU, aminmax is several times as fast as a norm.
    ends = [torch.aminmax(tensor) for tensor in tensors]
    return [torch.maximum(-least, most) for least, most in ends]
