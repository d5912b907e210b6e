"""The description of a LoRA adapter, and the calls that upload adapters to an engine worker.

``control/adapters.py`` makes the calls.
"""

from __future__ import annotations

import msgspec

from .weights import TensorSpec


class LoraInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A loaded LoRA adapter.

    Attributes:
        name: the name under which the adapter was loaded.
        version: the version of the adapter. It is 0 for the first adapter under this name. Each
            replacement and each new load has a larger version.
        rank: the rank of the adapter's matrices.
        scaling: the factor of the adapter's change to a module, ``lora_alpha / r``.
        target_modules: the last parts of the names of the modules that the adapter changes.
        bytes: the size of the adapter's tensors.
    """

    name: str
    version: int
    rank: int
    scaling: float
    target_modules: tuple[str, ...]
    bytes: int


class LoraPart(msgspec.Struct, array_like=True, frozen=True):
    """Arguments of ``lora_part``: some tensors of an adapter.

    serial: the serial number of the upload.
    tensors: the names in PEFT's file, the dtypes and the shapes of the tensors.
    data: the bytes of the contiguous tensors, one after the other. They are sent as a raw frame, so
        the field is empty in the message.
    """

    serial: int
    tensors: list[TensorSpec]
    data: bytes = b""


class LoraPrepare(msgspec.Struct, array_like=True, frozen=True):
    """Arguments of ``lora_prepare``: check the tensors of a complete upload, prepare the adapter.

    serial: the serial number of the upload.
    rank: the rank of the adapter.
    scaling: the factor of the adapter's change to a module.
    """

    serial: int
    rank: int
    scaling: float


class LoraCommit(msgspec.Struct, array_like=True, frozen=True):
    """Arguments of ``lora_commit``: make a prepared adapter live, in place of its older version.

    The answer is the number of milliseconds in which no step could run. If the adapter is already
    live, the call has no effect.

    inflight: "continue", "retract" or "abort"; see ``Client.update_weights``.
    """

    serial: int
    name: str
    version: int
    inflight: str = "continue"


class LoraKeep(msgspec.Struct, array_like=True, frozen=True):
    """Arguments of ``lora_keep``: drop all uploads and their adapters, except the ``serials``.

    Requests that use a dropped adapter end with ``UnknownAdapter``.
    """

    serials: list[int]
