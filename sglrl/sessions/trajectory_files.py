"""Trajectories on disk: msgpack, no pickle, so that reading a file runs no code of it.

::

    8 bytes   "sglrltrj"
    4 bytes   version of the format, little endian, like all that follows
    8 bytes   number of records
    each record:
        8 bytes   its length
        4 bytes   its CRC-32
        the trajectory as a msgpack array (``Record``)
"""

from __future__ import annotations

import os
import secrets
import struct
from collections.abc import Iterable
from pathlib import Path
from typing import Any, BinaryIO, Final
from zlib import crc32

import msgspec
import numpy as np

from ..errors import UsageError
from .trajectory import Record, Trajectory, record_of

_MAGIC: Final = b"sglrltrj"
_VERSION: Final = 1
_HEADER: Final = struct.Struct("<8sIQ")
_FRAME: Final = struct.Struct("<QI")


def save(path: str | os.PathLike[str], trajectories: Iterable[Trajectory]) -> None:
    """Write a file that ``load`` reads. It is written under another name in the same folder and
    renamed when all of it is on disk, so that ``path`` is never half written.

    Metadata may hold what msgpack can; tuples and arrays in it come back as lists, numbers of numpy
    as Python's.

    Raises:
        UsageError: an item is no ``Trajectory``, or its metadata cannot be written.
        OSError: the folder cannot be written to. Nothing has changed.
    """
    path = Path(path)
    unfinished = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        with open(unfinished, "xb") as file:
            file.write(_HEADER.pack(_MAGIC, _VERSION, 0))
            count = 0
            for count, trajectory in enumerate(trajectories, 1):
                record = _encode(trajectory, count - 1)
                file.write(_FRAME.pack(len(record), crc32(record)))
                file.write(record)
            file.seek(0)
            file.write(_HEADER.pack(_MAGIC, _VERSION, count))
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(path)
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise


def load(path: str | os.PathLike[str]) -> list[Trajectory]:
    """The trajectories of a file that ``save`` wrote, in their order.

    Raises:
        UsageError: it is no such file, of a newer version, cut short or damaged.
        OSError: it cannot be read.
    """
    with open(path, "rb") as file:
        left = os.fstat(file.fileno()).st_size
        if file.read(len(_MAGIC)) != _MAGIC:
            raise UsageError(f"{path} is no file of trajectories: it begins with something else")
        if left < _HEADER.size:
            raise UsageError(f"{path} is cut short: it ends in its header")
        file.seek(0)
        _, version, count = _HEADER.unpack(file.read(_HEADER.size))
        if version != _VERSION:
            raise UsageError(
                f"{path} has version {version} of the format, this sglrl reads version {_VERSION}; "
                "read it with the sglrl that wrote it"
            )
        left -= _HEADER.size
        found: list[Trajectory] = []
        for index in range(count):
            where = f"trajectory {index} of {count}"
            record, left = _next_record(file, left, path, where)
            try:
                found.append(_decode(record))
            # All that msgspec (in 0.19 its errors are no ValueErrors) and numpy raise for bytes
            # that are something else.
            except (msgspec.MsgspecError, ValueError, TypeError, RecursionError) as error:
                raise UsageError(f"{path} is damaged: {where}: {error}") from error
        if left:
            raise UsageError(f"{path} is damaged: {left} bytes follow its last trajectory")
    return found


def _next_record(
    file: BinaryIO, left: int, path: str | os.PathLike[str], where: str
) -> tuple[bytes, int]:
    """The next record, and how many bytes are left behind it."""
    left -= _FRAME.size
    if left >= 0:
        length, checksum = _FRAME.unpack(file.read(_FRAME.size))
        left -= length
    if left < 0:
        raise UsageError(f"{path} is cut short: {where} is missing or incomplete")
    record = file.read(length)
    if len(record) != length or crc32(record) != checksum:
        raise UsageError(f"{path} is damaged: {where} is not what was written")
    return record, left


def _plain(value: Any) -> Any:
    if isinstance(value, np.generic | np.ndarray):
        return value.tolist()
    raise TypeError(f"{type(value).__name__} is no type that msgpack can hold")


_encoder = msgspec.msgpack.Encoder(enc_hook=_plain)
_decoder = msgspec.msgpack.Decoder(Record)


def _encode(trajectory: Trajectory, index: int) -> bytes:
    if not isinstance(trajectory, Trajectory):
        raise UsageError(f"item {index} is a {type(trajectory).__name__}, not a Trajectory")
    try:
        return _encoder.encode(record_of(trajectory))
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        # Of all else the constructor has seen that it is what it should be.
        raise UsageError(f"the metadata of trajectory {index} cannot be saved: {error}") from error


def _decode(data: bytes) -> Trajectory:
    record = _decoder.decode(data)
    return Trajectory(
        prompt_ids=np.frombuffer(record.prompt_ids, "<i4"),
        response_ids=np.frombuffer(record.response_ids, "<i4"),
        # As numbers: only then 2 is noticed, which is no bool.
        loss_mask=np.frombuffer(record.loss_mask, np.uint8),
        logprobs=np.frombuffer(record.logprobs, "<f4"),
        versions=np.frombuffer(record.versions, "<i4"),
        turns=record.turns,
        timing=record.timing,
        metadata=record.metadata,
    )
