"""Save and load trajectories. The format is msgpack, not pickle, so loading a file runs no code.

::

    8 bytes   "sglrltrj"
    4 bytes   version of the format, little endian, like all later numbers
    8 bytes   number of records
    each record:
        8 bytes   length of the trajectory in bytes
        4 bytes   CRC-32 of the trajectory
        the trajectory as a msgpack array (``Record``)
"""

from __future__ import annotations

import contextlib
import os
import struct
from collections.abc import Generator, Iterator, Sequence
from typing import Any, BinaryIO, Final
from zlib import crc32

import msgspec
import numpy as np

from ..errors import UsageError
from ..inference.sampling_mask import mask_from
from ..wire.codec import malformed
from .atomic_file import new_content
from .record import Record, rows_of
from .trajectory import Trajectory, record_of
from .turn import Turn
from .whole_groups import Given, each_trajectory

_MAGIC: Final = b"sglrltrj"
_VERSION: Final = 1
_HEADER: Final = struct.Struct("<8sIQ")
_FRAME: Final = struct.Struct("<QI")
_ARRAYS: Final = ("prompt_ids", "response_ids", "loss_mask", "logprobs", "versions")


def save(path: str | os.PathLike[str], trajectories: Given[Trajectory]) -> None:
    """Write trajectories, or the trajectories of groups, to a file that ``load`` reads.

    The file is written under a temporary name in the same folder, and renamed when all of its
    content is on disk. So ``path`` never has an incomplete file.

    Metadata may contain any values that msgpack can encode. After loading, tuples and arrays in it
    are lists, and numpy numbers are Python numbers.

    Raises:
        UsageError: an item is not a ``Trajectory`` or a ``Group``, or metadata cannot be encoded.
        OSError: the folder is not writable. ``path`` is unchanged.
    """
    with new_content(path) as file:
        file.write(_HEADER.pack(_MAGIC, _VERSION, 0))
        count = 0
        for index, trajectory in numbered(trajectories):
            record = _encode(trajectory, index)
            file.write(_FRAME.pack(len(record), crc32(record)))
            file.write(record)
            count = index + 1
        file.seek(0)
        file.write(_HEADER.pack(_MAGIC, _VERSION, count))


def load(path: str | os.PathLike[str], *, tokenizer: Any = None) -> list[Trajectory]:
    """Return the trajectories of a file that ``save`` wrote, in order.

    Args:
        tokenizer: a Hugging Face tokenizer for ``Trajectory.text``, for example
            ``client.tokenizer``.

    Raises:
        UsageError: the file has another format or version, is truncated, or is damaged.
        OSError: the file cannot be read.
    """
    return list(iter_load(path, tokenizer=tokenizer))


def iter_load(
    path: str | os.PathLike[str], *, tokenizer: Any = None
) -> Generator[Trajectory, None, None]:
    """Yield the trajectories of a file that ``save`` wrote, one at a time.

    ::

        for trajectory in sglrl.rollouts.iter_load("step_7.traj"):
            ...

    Memory does not grow with the size of the file. The file is opened for the first trajectory. It
    is closed after the last one, and when the generator is closed. A ``for`` loop that ends early
    closes a generator that nothing else refers to. If you keep the generator in a variable, call
    its ``close`` method.

    Arguments and errors are those of ``load``. An error is raised when the loop reaches the damaged
    place. So the trajectories before it are yielded.
    """
    decode = None
    if tokenizer is not None:

        def decode(ids: Sequence[int], skip_special_tokens: bool) -> str:
            text: str = tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)
            return text

    with open(path, "rb") as file:
        for where, data, _ in _frames(file, path):
            try:
                trajectory = _decode(data)
            # msgspec and numpy raise these errors for malformed bytes. In msgspec 0.19,
            # MsgspecError is not a ValueError.
            except (msgspec.MsgspecError, ValueError, TypeError, RecursionError) as error:
                raise _damaged(path, where, error, data) from error
            yield trajectory if decode is None else trajectory.with_decode(decode)


def iter_records(path: str | os.PathLike[str]) -> Generator[tuple[int, int, Record], None, None]:
    """Yield the place of each trajectory in a file, and its record, whose content is not checked.

    The place is an offset and a size in bytes. ``record_from`` decodes what is there. This is much
    faster than ``iter_load``, whose errors it raises.
    """
    with open(path, "rb") as file:
        for where, data, offset in _frames(file, path):
            try:
                record = _decoder.decode(data)
            except (msgspec.MsgspecError, ValueError, TypeError, RecursionError) as error:
                raise _damaged(path, where, error, data) from error
            yield offset, len(data), record


def record_to(record: Record) -> bytes:
    """Encode a record, as in a file."""
    return _encoder.encode(record)


def record_from(data: bytes) -> Record:
    """Decode what ``record_to`` has encoded."""
    return _decoder.decode(data)


def to_jsonl(path: str | os.PathLike[str], trajectories: Given[Trajectory]) -> None:
    """Write trajectories or groups as JSON Lines: one JSON object for each trajectory.

    The files of ``save`` are smaller and faster to read. An object has the fields of
    ``Trajectory``, and ``reward``, ``finish_reason``, ``oldest_version``, ``oldest_versions`` and
    ``text`` (null without a tokenizer). A NaN in ``logprobs`` is null. ``sampling_mask`` is null,
    or a list of token ids for each position. ``lora_versions`` is null without an adapter.
    ``routed_experts`` is left out.

    Raises:
        UsageError: an item is not a ``Trajectory`` or a ``Group``, or metadata cannot be encoded.
        OSError: the file cannot be written.
    """
    with new_content(path) as file:
        for index, trajectory in numbered(trajectories):
            with metadata_errors(index):
                file.write(json_of(fields_of(trajectory)) + b"\n")


def numbered(given: Given[Trajectory]) -> Iterator[tuple[int, Trajectory]]:
    """Yield each of the given trajectories, and of the groups' trajectories, with its index.

    Raises:
        UsageError: an item is not a ``Trajectory`` or a ``Group``.
    """
    for index, trajectory in enumerate(each_trajectory(given)):
        if not isinstance(trajectory, Trajectory):
            kind = type(trajectory).__name__
            raise UsageError(f"item {index} is a {kind}, not a Trajectory or a Group")
        yield index, trajectory


@contextlib.contextmanager
def metadata_errors(index: int) -> Iterator[None]:
    """Raise ``UsageError`` if the block cannot encode trajectory ``index``.

    The constructor has checked all other fields, so the metadata or the messages are the cause.
    """
    try:
        yield
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise UsageError(f"the metadata of trajectory {index} cannot be saved: {error}") from error


def json_of(value: Any) -> bytes:
    """Return a value as JSON. Arrays become lists, and NaN becomes null."""
    return msgspec.json.encode(value, enc_hook=_plain)


def fields_of(trajectory: Trajectory) -> dict[str, Any]:
    """Return the fields of a trajectory that other programs get, by name.

    Arrays stay arrays. Turns and branches are dicts.
    """
    text = None
    with contextlib.suppress(UsageError):
        text = trajectory.text
    mask = trajectory.sampling_mask
    return {
        "text": text,
        "messages": trajectory.messages,
        "reward": trajectory.reward,
        "finish_reason": trajectory.finish_reason,
        "oldest_version": trajectory.oldest_version,
        "oldest_versions": trajectory.oldest_versions,
        **{name: getattr(trajectory, name) for name in _ARRAYS},
        "sampling_mask": None if mask is None else mask.sets(),
        "lora_versions": trajectory.lora_versions,
        "turns": [_turn_fields(turn) for turn in trajectory.turns],
        "timing": trajectory.timing._asdict(),
        "metadata": trajectory.metadata,
        "branches": [fields_of(branch) for branch in trajectory.branches],
    }


def _turn_fields(turn: Turn) -> dict[str, Any]:
    rewards = [msgspec.structs.asdict(reward) for reward in turn.rewards]
    return {**msgspec.structs.asdict(turn), "rewards": rewards}


def _frames(file: BinaryIO, path: str | os.PathLike[str]) -> Iterator[tuple[str, bytes, int]]:
    """Yield the name of each record, for errors, its bytes, and their offset."""
    count, left = _read_header(file, path)
    offset = _HEADER.size
    for index in range(count):
        where = f"trajectory {index} of {count}"
        record, left = _next_record(file, left, path, where)
        offset += _FRAME.size
        yield where, record, offset
        offset += len(record)
    if left:
        raise UsageError(f"{path} is damaged: {left} bytes follow its last trajectory")


def _damaged(
    path: str | os.PathLike[str], where: str, error: Exception, record: bytes
) -> UsageError:
    return UsageError(f"{path} is damaged: {where}: {malformed(error, record)}")


def _read_header(file: BinaryIO, path: str | os.PathLike[str]) -> tuple[int, int]:
    """Return the number of records, and the number of bytes after the header."""
    size = os.fstat(file.fileno()).st_size
    if file.read(len(_MAGIC)) != _MAGIC:
        why = "its first bytes are wrong" if size else "it is empty"
        raise UsageError(
            f"{path} is not a file of trajectories: {why}; sglrl.rollouts.save writes such files"
        )
    if size < _HEADER.size:
        raise UsageError(f"{path} is cut short: it ends in its header")
    file.seek(0)
    _, version, count = _HEADER.unpack(file.read(_HEADER.size))
    if version != _VERSION:
        raise UsageError(
            f"{path} has version {version} of the format, this sglrl reads version {_VERSION}; "
            "read it with the sglrl that wrote it"
        )
    return count, size - _HEADER.size


def _next_record(
    file: BinaryIO, left: int, path: str | os.PathLike[str], where: str
) -> tuple[bytes, int]:
    """Return the next record, and the number of bytes after it."""
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
    raise TypeError(f"{type(value).__name__} is not a type that msgpack can hold")


_encoder = msgspec.msgpack.Encoder(enc_hook=_plain)
_decoder = msgspec.msgpack.Decoder(Record)


def _encode(trajectory: Trajectory, index: int) -> bytes:
    with metadata_errors(index):
        return _encoder.encode(record_of(trajectory))


def _decode(data: bytes) -> Trajectory:
    return _trajectory(_decoder.decode(data))


def _trajectory(record: Record) -> Trajectory:
    return Trajectory(
        prompt_ids=np.frombuffer(record.prompt_ids, "<i4"),
        response_ids=np.frombuffer(record.response_ids, "<i4"),
        # Read the mask as numbers, so that the constructor rejects bytes other than 0 and 1.
        loss_mask=np.frombuffer(record.loss_mask, np.uint8),
        logprobs=np.frombuffer(record.logprobs, "<f4"),
        versions=np.frombuffer(record.versions, "<i4"),
        turns=record.turns,
        timing=record.timing,
        metadata=record.metadata,
        messages=record.messages,
        branches=tuple(map(_trajectory, record.branches)),
        sampling_mask=(
            None if record.mask_lengths is None else mask_from(record.mask_ids, record.mask_lengths)
        ),
        lora_versions=(
            None if record.lora_versions is None else np.frombuffer(record.lora_versions, "<i4")
        ),
        routed_experts=rows_of(record),
    )
