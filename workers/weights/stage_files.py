"""Receive an update by reading it from a folder of safetensors files."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import torch

from sglrl.errors import InvalidWeights, WeightUpdateError
from sglrl.weights.finite import FiniteCheck, ToCheck
from sglrl.weights.link import Link
from sglrl.weights.safetensors_files import weight_files

from .current_update import CurrentUpdate
from .side_stream import SideStream
from .staging import Update
from .weight_engine import LiveWeights


class FilesStage:
    """Reads weights from files into spare or staging memory, cast to the dtypes used there."""

    def __init__(self, live: LiveWeights, current: CurrentUpdate, stream: SideStream) -> None:
        self._live = live
        self._current = current
        self._stream = stream

    def read(self, link: Link, update: Update) -> None:
        if update.mode != "full":
            raise InvalidWeights("weights from files need room for all of them")
        views: list[ToCheck] = []
        wanted = {spec.name: index for index, spec in enumerate(update.message.tensors)}
        for path in weight_files(Path(update.message.source)):
            for name, tensor in _tensors(path, wanted):
                view = _view(update, name, wanted.pop(name))
                with self._current.writing(link, update.id):
                    view.copy_(tensor)
                views.append((name, view, view.dtype))
        if wanted:
            raise WeightUpdateError(f"the files no longer hold {', '.join(sorted(wanted)[:8])}")
        if update.message.check_finite:
            check = FiniteCheck()
            check.add(views)
            check.finish()
        update.bind(self._live.bind)
        self._stream.synchronize()


def _tensors(path: Path, wanted: Mapping[str, int]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of a file whose names are in ``wanted``.

    Raises:
        WeightUpdateError: the file cannot be read.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            for name in file.keys():  # noqa: SIM118
                if name in wanted:
                    yield name, file.get_tensor(name)
    except (SafetensorError, OSError) as error:
        raise WeightUpdateError(f"{path} cannot be read: {error}") from None


def _view(update: Update, name: str, index: int) -> torch.Tensor:
    """Return the memory of one tensor of the update."""
    if update.spare is not None:
        return update.spare[name]
    place, spec = update.layout.places[index], update.message.tensors[index]
    flat = update.memory[place.bucket][place.offset : place.offset + place.nbytes]
    return flat.view(getattr(torch, spec.dtype)).view(spec.shape)
