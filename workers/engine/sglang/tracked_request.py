"""The adapter's record of a request while SGLang has the request."""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from .routed_rows import RoutedRows

_NOTHING: Final = np.zeros(0, "<i4")
MAX_MASK_IDS: Final = 1 << 24
"""Maximum number of ids in the sampling masks of one call (64 MiB): 4,096 tokens with 4,096 ids."""
MASKS_TOO_LARGE: Final = (
    f"the sampling masks of the first {{}} tokens have more than {MAX_MASK_IDS:,} token ids: use "
    "top_k, or a smaller top_p or temperature"
)
Versions = tuple[int, int]
"""The versions of the weights and of the request's LoRA adapter. 0: it has no LoRA adapter."""


class TrackedRequest:
    """One request while SGLang has it.

    sent: number of tokens reported so far, including the ``resumed`` tokens of another worker.
    version: the versions that compute the token at position ``sent``.
    changes: (position, versions) of each later change of ``version``, in order.
    top: number of likeliest tokens to report at each position.
    score_start: the first position of a scoring request. -1 for other requests.
    prefills: (first position, versions) of each part of the prompt of a scoring request. One pair
        of versions computes one part.
    given: number of token ids whose logprobs are reported at each position.
    hidden: whether the hidden states are reported.
    generates: whether this is a request of ``generate``.
    masks: the tokens that could be drawn at each position that was not reported yet. None if they
        are not reported.
    mask_ids: the number of all ids in the masks so far.
    routed: the routed experts. None if they are not reported.
    lora: SGLang's id of the LoRA adapter, or None.
    unloaded: the error message if the LoRA adapter was unloaded, or "".
    """

    __slots__ = (
        "changes",
        "generates",
        "given",
        "hidden",
        "lora",
        "mask_ids",
        "masks",
        "prefills",
        "resumed",
        "routed",
        "score_start",
        "sent",
        "top",
        "unloaded",
        "version",
    )

    def __init__(
        self,
        version: Versions,
        top: int,
        score_start: int = -1,
        *,
        lora: str | None = None,
        generates: bool = False,
        given: int = 0,
        hidden: bool = False,
    ) -> None:
        self.version = version
        self.top = top
        self.score_start = score_start
        self.generates = generates
        self.given = given
        self.hidden = hidden
        self.lora = lora
        self.unloaded = ""
        self.sent = 0
        self.resumed = 0
        self.changes: list[tuple[int, Versions]] = []
        self.prefills: list[tuple[int, Versions]] = []
        self.masks: dict[int, NDArray[np.int32]] | None = None
        self.mask_ids = 0
        self.routed: RoutedRows | None = None

    def prefilled(self, begin: int, version: Versions) -> None:
        """Record a forward pass of the prompt from position ``begin``.

        A retracted request starts again at 0.
        """
        while self.prefills and self.prefills[-1][0] >= begin:
            self.prefills.pop()
        if not self.prefills or self.prefills[-1][1] != version:
            self.prefills.append((begin, version))

    def changed(self, at: int, version: Versions) -> None:
        """Record that ``version`` computes the tokens from position ``at`` on."""
        if version != (self.changes[-1][1] if self.changes else self.version):
            self.changes.append((at, version))

    def add_mask(self, at: int, ids: NDArray[np.int32]) -> bool:
        """Keep the tokens that could be drawn at an output position, if they are reported.

        Returns:
            True if all masks together are too large.
        """
        if self.masks is None:
            return False
        self.masks[at] = ids
        self.mask_ids += len(ids)
        return self.mask_ids > MAX_MASK_IDS

    def take_masks(self, count: int) -> list[NDArray[np.int32]] | None:
        """Return the masks of the next ``count`` tokens. Call this before ``take``."""
        masks = self.masks
        if masks is None:
            return None
        return [masks.pop(at, _NOTHING) for at in range(self.sent, self.sent + count)]

    def take(self, count: int) -> list[tuple[int, Versions]]:
        """Count ``count`` tokens as sent. Return (tokens, versions) of each part, at least one."""
        if not self.changes:
            self.sent += count
            return [(count, self.version)]
        end = self.sent + count
        parts = []
        while self.changes and self.changes[0][0] <= end:
            at, version = self.changes.pop(0)
            if at > self.sent:
                parts.append((at - self.sent, self.version))
                self.sent = at
            self.version = version
        if end > self.sent or not parts:
            parts.append((end - self.sent, self.version))
            self.sent = end
        return parts
