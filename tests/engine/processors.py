"""Logit processors that workers import, and others that they must reject."""

from __future__ import annotations

import contextlib
import math
import os
from pathlib import Path
from typing import Any

import torch
from sglang.srt.sampling.custom_logit_processor import CustomLogitProcessor


class Shift(CustomLogitProcessor):  # type: ignore[misc]
    """Adds ``bias`` to one logit, which the last token and the position determine."""

    def __call__(self, logits: torch.Tensor, params: list[dict[str, Any]]) -> torch.Tensor:
        for row, own in zip(logits, params, strict=True):
            request = own["__req__"]
            ids = [*request.origin_input_ids, *request.output_ids]
            row[(7 * ids[-1] + len(request.output_ids)) % len(row)] += own["bias"]
        return logits


class Waits(Shift):
    """Shifts as ``Shift``. At position ``at``, it waits until a FIFO is opened or removed."""

    def __call__(self, logits: torch.Tensor, params: list[dict[str, Any]]) -> torch.Tensor:
        for own in params:
            if len(own["__req__"].output_ids) == own["at"]:
                with contextlib.suppress(FileNotFoundError):
                    Path(own["fifo"]).open().close()
        return super().__call__(logits, params)


class Ban(CustomLogitProcessor):  # type: ignore[misc]
    """Bans ``tokens`` at every ``every``-th position of the output, from the first on."""

    def __call__(self, logits: torch.Tensor, params: list[dict[str, Any]]) -> torch.Tensor:
        rows = [
            torch.where(
                torch.zeros_like(row).index_fill(
                    0, torch.tensor(own["tokens"], device=row.device), 1
                )
                > 0,
                -math.inf,
                row,
            )
            if len(own["__req__"].output_ids) % own["every"] == 0
            else row
            for row, own in zip(logits, params, strict=True)
        ]
        return torch.stack(rows)


class Fails(CustomLogitProcessor):  # type: ignore[misc]
    """Makes ``token`` the likeliest, and fails at position ``at``, after it has changed logits."""

    def __call__(self, logits: torch.Tensor, params: list[dict[str, Any]]) -> Any:
        logits[:, 0] += 1000
        for own in params:
            if len(own["__req__"].output_ids) == own["at"]:
                match own["how"]:
                    case "raise":
                        raise KeyError("some key")
                    case "shape":
                        return logits[:, :-1]
                    case "none":
                        return None
                    case "exit":
                        os._exit(1)
        logits[:, 0] -= 1000
        for row, own in zip(logits, params, strict=True):
            row[own["token"]] += 500
        return logits


class NoProcessor:
    pass


class Needs(CustomLogitProcessor):  # type: ignore[misc]
    def __init__(self) -> None:
        raise OSError("the table is missing")

    def __call__(self, logits: torch.Tensor, params: list[dict[str, Any]]) -> torch.Tensor:
        return logits
