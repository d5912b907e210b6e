"""The LoRA adapters of the fake engine, which do not change its output."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sglrl.errors import InvalidAdapter, InvalidRequest, UnknownAdapter
from sglrl.wire.adapters import LoraCommit, LoraKeep, LoraPart, LoraPrepare


class FakeAdapters:
    """The LoRA adapters that are loaded or prepared.

    Args:
        options: the arguments of the engine.

    Attributes:
        max_rank, modules, most: the limits that the engine reports.
        loaded: the loaded adapters by name.
    """

    def __init__(self, options: Mapping[str, Any]) -> None:
        self.max_rank = int(options.get("max_lora_rank", 0))
        self.modules = tuple(options.get("lora_target_modules", ()))
        self.most = int(options.get("max_loaded_loras", 0))
        self.loaded: dict[str, LoraCommit] = {}
        self._prepared: set[int] = set()
        """Serial numbers of adapters that are prepared and not loaded. There is at most one."""
        self._failing = Path(options["fail_lora"]) if "fail_lora" in options else None

    def handle(self, args: LoraPart | LoraPrepare | LoraCommit | LoraKeep) -> float | None:
        """Execute a call that concerns adapters, and return its answer.

        Raises:
            InvalidRequest: the engine accepts no adapters, or another adapter is still prepared.
            InvalidAdapter: the file at ``fail_lora`` existed.
        """
        if not self.max_rank:
            raise InvalidRequest("the engine takes no adapters")
        match args:
            case LoraPrepare():
                if self._failing is not None:
                    # Several workers check for the file. Only the worker that removes it fails.
                    with contextlib.suppress(FileNotFoundError):
                        self._failing.unlink()
                        raise InvalidAdapter("the adapter does not fit this worker")
                if self._prepared - {args.serial}:
                    raise InvalidRequest(f"the adapters {self._prepared} were not given up")
                self._prepared.add(args.serial)
            case LoraCommit():
                self._prepared.remove(args.serial)
                self.loaded[args.name] = args
                return 0.0
            case LoraKeep():
                self._prepared.intersection_update(args.serials)
                for name, one in [*self.loaded.items()]:
                    if one.serial not in args.serials:
                        del self.loaded[name]
        return None

    def check(self, name: str) -> None:
        """Raise ``UnknownAdapter`` unless the adapter is loaded, or ``name`` is empty."""
        if name and name not in self.loaded:
            raise UnknownAdapter(f"no adapter {name!r} is loaded")

    def version(self, name: str) -> int:
        """Return the version of a loaded adapter, or 0 for an empty name."""
        return self.loaded[name].version if name else 0
