"""Read checkpoints in folders of safetensors files (https://github.com/huggingface/safetensors)."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from ..errors import ModelError
from ..wire.codec import malformed
from ..wire.weights import TensorSpec

_SHOWN = 8
INDEX = "model.safetensors.index.json"
_DTYPES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
}


class _Entry(msgspec.Struct):
    """The header entry of one tensor in a file."""

    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


class _Index(msgspec.Struct):
    """The index of a checkpoint.

    Attributes:
        weight_map: the file name of each tensor, by tensor name.
    """

    weight_map: dict[str, str]


def weight_files(folder: Path) -> list[Path]:
    """Return the files that hold the model's tensors, sorted.

    If the folder has an index, return the files in the index, because other files may hold the same
    tensors in another form. Otherwise return all safetensors files.

    Raises:
        ModelError: there are no files, a file of the index is missing, the index is malformed, or
            ``folder`` is a file.
    """
    if folder.is_file():
        raise ModelError(f"{folder} is a file; give the folder that it is in")
    index = folder / INDEX
    if not index.is_file():
        files = sorted(file for file in folder.glob("*.safetensors") if file.is_file())
    else:
        try:
            content = index.read_bytes()
            named = msgspec.json.decode(content, type=_Index).weight_map.values()
        except OSError as error:
            raise ModelError(f"{index} cannot be read: {error}") from None
        except msgspec.DecodeError as error:
            why = malformed(error, content)
            raise ModelError(f"{index} is not an index of safetensors files: {why}") from None
        files = sorted({folder / name for name in named})
        missing = [file.name for file in files if not file.is_file()]
        if missing:
            raise ModelError(f"{folder} lacks {', '.join(missing[:4])}, which its index names")
    if not files:
        raise ModelError(f"{folder} holds no *.safetensors files")
    return files


def fingerprint(files: list[Path]) -> list[tuple[str, int, int, int]]:
    """Return values that change when one of the files changes.

    Returns:
        For each file: its name, size in bytes, time of the last change in ns, and inode.

    Raises:
        OSError: a file does not exist, or its status cannot be read.
    """
    stats = [(file.name, os.stat(file)) for file in files]
    return [(name, s.st_size, s.st_mtime_ns, s.st_ino) for name, s in stats]


class Checkpoint(NamedTuple):
    """The tensors in the safetensors files of a folder.

    Attributes:
        specs: the specs in the headers of the files, in order.
        file_of: the file of each tensor, by the tensor's name.
    """

    files: list[Path]
    specs: list[TensorSpec]
    file_of: dict[str, Path]

    def naming_files(self, message: str) -> str:
        """Append to a message about tensors the names of the tensors' files."""
        words = dict.fromkeys(re.split(r"[\s,;:]+", message))
        named = [word for word in words if word in self.file_of]
        if len({self.file_of[name] for name in named}) == 1:
            return f"{message} (in {self.file_of[named[0]]})"
        places = [f"{name} in {self.file_of[name].name}" for name in named[:_SHOWN]]
        return message + (f" ({', '.join(places)})" if places else "")

    def read(self, name: str) -> Any:
        """Read a tensor from its file."""
        from safetensors import safe_open

        with safe_open(self.file_of[name], framework="pt", device="cpu") as file:
            return file.get_tensor(name)


def read_checkpoint(path: Any) -> Checkpoint:
    """Read the headers of the safetensors files in a folder.

    If weights cannot have the dtype in a header, the spec has the header's name for this dtype.

    A file starts with the length of the header, in eight bytes. The header follows as JSON, then
    the data.

    Raises:
        ModelError: the folder does not exist, or one of its files is not a safetensors file.
    """
    files = weight_files(Path(path).expanduser().resolve())
    specs = []
    file_of = {}
    for shard in files:
        try:
            with shard.open("rb") as file:
                length = int.from_bytes(file.read(8), "little")
                if length > shard.stat().st_size:
                    raise ValueError("its header is longer than the file")
                head = file.read(length)
            try:
                header = msgspec.json.decode(head, type=dict[str, msgspec.Raw])
            except msgspec.DecodeError as error:
                raise ValueError(f"its header is not JSON: {malformed(error, head)}") from None
            header.pop("__metadata__", None)
            end = 0
            for name, raw in header.items():
                entry = msgspec.json.decode(raw, type=_Entry)
                end = max(end, entry.data_offsets[1])
                file_of[name] = shard
                specs.append(TensorSpec(name, _DTYPES.get(entry.dtype, entry.dtype), entry.shape))
            if 8 + length + end != shard.stat().st_size:
                raise ValueError("it is not as long as its header says")
        except (ValueError, OSError) as error:
            raise ModelError(f"{shard} is not a safetensors file: {error}") from None
    return Checkpoint(files, specs, file_of)
