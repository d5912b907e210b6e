"""Check and complete the arguments of ``launch`` for LoRA adapters."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from ..core.adapters import MODULES, leaf_of
from ..errors import UsageError
from ..weights.adapter_config import checked_config, saved_config, weights_file
from ..weights.safetensors_files import read_checkpoint

_ARGUMENTS: Final = {
    "max_lora_rank": None,
    "lora_target_modules": None,
    "max_loaded_loras": None,
    "max_loras_per_batch": 8,
    "lora_eviction_policy": "lru",
    "lora_backend": "csgmv",
    "max_lora_chunk_size": 16,
    "lora_drain_wait_threshold": 0.0,
}
"""The arguments that need ``enable_lora``, with SGLang's defaults."""
_ALL: Final = ({"all"}, {"all-linear"})


def take_adapters(args: dict[str, Any]) -> dict[str, Path]:
    """Check the arguments for adapters, and complete them in place.

    ``lora_paths`` is removed, because the driver loads these adapters when the workers have
    started.

    Returns:
        The folders of ``lora_paths`` by name.

    Raises:
        UsageError: an argument is missing or wrong.
        InvalidAdapter: an adapter in ``lora_paths`` cannot be loaded.
    """
    folders = _folders(args.pop("lora_paths", None))
    enabled = args.get("enable_lora")
    if not enabled:
        if folders and enabled is not None:
            raise UsageError("lora_paths needs adapters, and enable_lora is False")
        for name, default in _ARGUMENTS.items():
            if not folders and args.get(name, default) not in (None, default):
                raise UsageError(f"{name}={args[name]!r:.100} needs enable_lora=True")
        if not folders:
            return {}
        args["enable_lora"] = True
    rank, modules = args.get("max_lora_rank"), args.get("lora_target_modules")
    if folders and (rank is None or modules is None):
        ranks, changed = _needs(folders)
        rank = ranks if rank is None else rank
        modules = changed if modules is None else modules
    if rank is None or not modules:
        raise UsageError(
            "enable_lora needs max_lora_rank= and lora_target_modules=, or lora_paths= with "
            "adapters that have them"
        )
    if rank < 1:
        raise UsageError(f"max_lora_rank must be at least 1, got {rank}")
    args["max_lora_rank"], args["lora_target_modules"] = rank, _modules(modules)
    _check_counts(args, len(folders))
    return folders


def _folders(given: Any) -> dict[str, Path]:
    """Return the folders of ``lora_paths`` by name. ``given`` has any form that SGLang accepts."""
    folders: dict[str, Path] = {}
    pairs: list[tuple[Any, Any]] = []
    if isinstance(given, Mapping):
        pairs = [*given.items()]
    elif isinstance(given, (list, tuple)):
        for item in given:
            if isinstance(item, Mapping) and {*item} <= {"lora_name", "lora_path", "pinned"}:
                if item.get("pinned"):
                    raise UsageError("lora_paths: no adapter can be pinned")
                pairs.append((item.get("lora_name"), item.get("lora_path")))
            elif isinstance(item, str):
                name, equals, path = item.partition("=")
                pairs.append((name, path if equals else name))
            else:
                pairs.append((None, item))
    elif given is not None:
        pairs.append((None, given))
    for name, path in pairs:
        if not isinstance(name, str) or not name or not isinstance(path, (str, os.PathLike)):
            raise UsageError(
                f"lora_paths must map names to folders, as {{'name': 'folder'}}; got {given!r:.200}"
            )
        if name in folders:
            raise UsageError(f"lora_paths has the name {name!r} twice")
        folders[name] = Path(path).expanduser()
    return folders


def _needs(folders: Mapping[str, Path]) -> tuple[int, set[str]]:
    """Return the largest rank of the adapters, and the modules that they change."""
    rank, modules = 1, set()
    for folder in folders.values():
        rank = max(rank, checked_config(saved_config(folder)).rank)
        weights_file(folder)
        modules |= {leaf_of(spec.name) for spec in read_checkpoint(folder).specs}
    return rank, modules


def _modules(given: Any) -> list[str]:
    modules = set(given)
    if modules in _ALL:
        return [*MODULES]
    if unknown := sorted(modules - {*MODULES}):
        raise UsageError(
            f"lora_target_modules has {', '.join(unknown)}; adapters can change "
            f"{', '.join(MODULES)}, or ['all'] of these"
        )
    return sorted(modules)


def _check_counts(args: Mapping[str, Any], folders: int) -> None:
    batch, loaded = args.get("max_loras_per_batch", 8), args.get("max_loaded_loras")
    if batch < 1:
        raise UsageError(f"max_loras_per_batch must be at least 1, got {batch}")
    if loaded is None:
        return
    if loaded < batch:
        raise UsageError(
            f"max_loaded_loras={loaded} is less than max_loras_per_batch={batch}, the adapters of "
            "one batch"
        )
    if loaded < folders:
        raise UsageError(f"lora_paths has {folders} adapters, and max_loaded_loras is {loaded}")
