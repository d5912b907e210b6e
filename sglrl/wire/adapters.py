"""LoRA adapters: their description, and the calls that bring them to an engine worker.

``control/adapters.py`` makes the calls.
"""

from __future__ import annotations

import msgspec

from .weights import TensorSpec


class LoraInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A loaded LoRA adapter.

    Attributes:
        version: 0 for the first adapter that was loaded under this name. Each replacement and each
            new load has a larger version.
        rank: the rank of its matrices.
        scaling: the factor of its update of a module, ``lora_alpha / r``.
        target_modules: the last parts of the names of the modules that it changes.
        bytes: the size of its tensors.
    """

    name: str
    version: int
    rank: int
    scaling: float
    target_modules: tuple[str, ...]
    bytes: int


class LoraPart(msgspec.Struct, array_like=True, frozen=True):
    """Arguments of ``lora_part``: some tensors of the adapter that upload ``serial`` brings.

    tensors: named as in PEFT's file.
    data: the bytes of the contiguous tensors, one after the other. It is the raw frame of the call,
        so it is empty in the message.
    """

    serial: int
    tensors: list[TensorSpec]
    data: bytes = b""


class LoraPrepare(msgspec.Struct, array_like=True, frozen=True):
    """Arguments of ``lora_prepare``: all tensors have arrived. Check them, and prepare the adapter.

    rank: the rank of the adapter.
    scaling: the factor of its update of a module.
    """

    serial: int
    rank: int
    scaling: float


class LoraCommit(msgspec.Struct, array_like=True, frozen=True):
    """Arguments of ``lora_commit``: make a prepared adapter live, in place of its older version.

    Answered with the milliseconds in which no step could run. Without effect if it is live.

    inflight: "continue", "retract" or "abort"; see ``Client.update_weights``.
    """

    serial: int
    name: str
    version: int
    inflight: str = "continue"


class LoraKeep(msgspec.Struct, array_like=True, frozen=True):
    """Arguments of ``lora_keep``: drop all adapters and uploads but those of ``serials``.

    Requests that use a dropped adapter end with ``UnknownAdapter``.
    """

    serials: list[int]
