"""Weight updates through a folder of memory-mapped tensordicts."""

from __future__ import annotations

import os
import secrets
import shutil
from pathlib import Path
from typing import Any, Final

import msgspec
from tensordict import TensorDict

from .tensor_names import Metadata, flat

_LATEST: Final = "latest"


class _Latest(msgspec.Struct):
    """The content of the file ``latest``.

    Attributes:
        number: the number of the last update, or 0 without updates.
        tensors: for each tensor name, the number of the update that contains the current value.
        series: the id of the series of updates. It changes when the folder is created again.
    """

    number: int
    tensors: dict[str, int]
    series: str = ""


class FolderTransport:
    """Sends weights as memory-mapped tensordicts in a folder.

    Update n is in folder ``n``. The JSON file ``latest`` contains the number of the last update.
    For every tensor, it also contains the number of the update with the tensor's current value.

    The file is replaced when an update is complete, so a reader never sees half an update. A reader
    that skipped updates finds the current values of all tensors, even if each update contains only
    some tensors. The folder of an update is kept while the current or the previous ``latest``
    refers to it.
    """

    def __init__(self, folder: str | os.PathLike[str], num_threads: int = 1) -> None:
        self.folder = Path(folder)
        self.num_threads = num_threads
        self.read = 0
        """The number of the last update that this object has received."""
        self._series = ""
        """The id of the series of the last update that this object has received."""

    def init_all_workers_group(self, model_metadata: Metadata | None = None) -> None:
        """Do nothing, because this transport has no group."""

    def send_weights(
        self, model_id: str, weights: Any, *, partial: bool = False, version: int | None = None
    ) -> None:
        """Write an update. The receiver keeps the values of tensors that are not in the update."""
        self.folder.mkdir(parents=True, exist_ok=True)
        before = self._latest()
        number = before.number + 1
        target = self.folder / str(number)
        shutil.rmtree(target, ignore_errors=True)
        tensors = {name: tensor.detach().cpu() for name, tensor in flat(weights).items()}
        whole = TensorDict(tensors, batch_size=[]).unflatten_keys(".")
        whole.memmap(str(target), copy_existing=True, num_threads=self.num_threads)
        now = _Latest(
            number,
            (before.tensors if partial else {}) | dict.fromkeys(tensors, number),
            before.series or secrets.token_hex(8),
        )
        marker = self.folder / f"{_LATEST}.new"
        marker.write_bytes(msgspec.json.encode(now))
        marker.replace(self.folder / _LATEST)
        kept = {*now.tensors.values(), *before.tensors.values()}
        for folder in self.folder.iterdir():
            if folder.name.isdecimal() and int(folder.name) not in kept:
                shutil.rmtree(folder, ignore_errors=True)

    def receive_weights(self, timeout: float | None = None, **kwargs: Any) -> Any:
        """Return the tensors of new updates by flat name. None: there is no new update."""
        latest = self._latest()
        while (latest.series, latest.number) != (self._series, self.read):
            if latest.series != self._series:
                self._series, self.read = latest.series, 0
            since = {n for n in latest.tensors.values() if n > self.read}
            try:
                folders = {
                    n: TensorDict.load_memmap(str(self.folder / str(n))).flatten_keys(".")
                    for n in since
                }
                tensors = {
                    name: folders[n][name] for name, n in latest.tensors.items() if n in since
                }
            except (OSError, RuntimeError):
                # The folders are gone, because two updates were written meanwhile. Read again.
                again = self._latest()
                if again.number == latest.number:
                    raise
                latest = again
                continue
            self.read = latest.number
            return tensors
        return None

    def _latest(self) -> _Latest:
        try:
            return msgspec.json.decode((self.folder / _LATEST).read_bytes(), type=_Latest)
        except FileNotFoundError:
            return _Latest(0, {})

    def check_connection(self) -> bool:
        return True

    def shutdown(self) -> None:
        """Do nothing, because no resource is open."""
