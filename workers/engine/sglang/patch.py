"""Declare modifications of SGLang, check them against its source, and install them.

``patch_list`` declares every place that replaces, wraps or subclasses SGLang code, and names the
SGLang code. ``known_sources`` has a digest of this code's source in each supported version. If the
installed SGLang has another source, an acceleration stays off, but a correction prevents the start,
because results may be wrong. ``patch_list`` and ``known_sources`` do not import SGLang.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sglrl.config import install as command
from sglrl.errors import EngineError

from .known_sources import KNOWN
from .source import digest

logger = logging.getLogger("sglrl.worker")


@dataclass(frozen=True, kw_only=True)
class Patch:
    """One modification of SGLang.

    Attributes:
        name: the name in logs, in ``sglrl doctor`` and in ``launch(accelerations=)``.
        why: the error or the slowness without the patch.
        module: a module below this package. Its function ``install(setup)`` applies the patch
            before the scheduler is built. It may return a function, which is called with the
            finished scheduler. None: the patch is code that is always in use.
        wraps: the SGLang code that the patch replaces, wraps or overrides, as
            "module:Class.method".
        reads: further SGLang code on whose details the patch relies.
        after: patches that must be installed earlier, because they wrap the same code.
        acceleration: whether the patch only makes SGLang faster and keeps its results.
        exact: whether the patch keeps the kernels and the rounding of SGLang's results.
        device: "cpu" or "cuda" if the patch is for this device only.
        single_rank: whether the patch is for ``tp_size=1`` only.
        several_ranks: whether the patch is for ``tp_size > 1`` only.
        argument: an argument of SGLang. The patch is installed only if the argument is set.
    """

    name: str
    why: str
    module: str | None
    wraps: tuple[str, ...]
    reads: tuple[str, ...] = ()
    after: tuple[str, ...] = ()
    acceleration: bool = False
    exact: bool = True
    device: str = ""
    single_rank: bool = False
    several_ranks: bool = False
    argument: str = ""

    def unknown(self, folder: Path) -> str:
        """Return why the installed SGLang is unknown to the patch, or "" if its source is known.

        Args:
            folder: the folder of the package ``sglang``.
        """
        reasons = []
        for target in (*self.wraps, *self.reads):
            source = digest(target, folder)
            if source not in KNOWN.get(target, {}):
                state = f"has an unknown source (digest {source})" if source else "does not exist"
                reasons.append(f"{target} {state}")
        return ", ".join(reasons)


@dataclass(frozen=True, kw_only=True)
class Setup:
    """The information that ``install`` functions get before the scheduler is built.

    Attributes:
        server_args: SGLang's ``ServerArgs``.
        device: "cpu" or "cuda".
        adapter: the ``Adapter`` of rank 0, or None on other ranks.
        accelerations: the names of the requested accelerations. None requests all.
        allow_unknown: whether to install corrections even if the source is unknown.
        logit_processors: the names of the logit processors to import.
    """

    server_args: Any
    device: str
    adapter: Any = None
    accelerations: Sequence[str] | None = None
    allow_unknown: bool = False
    logit_processors: Sequence[str] = ()

    @property
    def deterministic(self) -> bool:
        """Whether results must not depend on other requests, bit for bit."""
        args = self.server_args
        return bool(args.enable_deterministic_inference or args.rl_on_policy_target)

    def excludes(self, patch: Patch) -> str:
        """Return why this setup excludes a patch, or "" if it includes the patch."""
        if patch.device and patch.device != self.device:
            return f"only for {patch.device}"
        if patch.single_rank and self.server_args.tp_size > 1:
            return "only for tp_size=1"
        if patch.several_ranks and self.server_args.tp_size == 1:
            return "only for tp_size > 1"
        if patch.argument and not getattr(self.server_args, patch.argument):
            return f"only with {patch.argument}"
        if not patch.acceleration:
            return ""
        if self.accelerations is not None and patch.name not in self.accelerations:
            return "not selected"
        if not patch.exact and self.deterministic:
            return "not exact, and deterministic inference is on"
        return ""


Finish = Callable[[Any], bool]
"""A function of the finished scheduler. It returns False if the patch does not fit the model."""


@dataclass
class Installed:
    """The installed patches of this process.

    Attributes:
        accelerations: the names of the accelerations that are on.
    """

    accelerations: list[str] = field(default_factory=list)
    _finish: list[tuple[str, Finish]] = field(default_factory=list)

    def finish(self, scheduler: Any) -> None:
        """Finish the patches. Call this once the scheduler is built."""
        for name, finish in self._finish:
            if not finish(scheduler):
                logger.info("SGLang acceleration %s: off (not for this model)", name)
                self.accelerations.remove(name)


def check_order(patches: Sequence[Patch]) -> None:
    """Raise ``ValueError`` if two patches wrap the same code and declare no order."""
    wrapped: dict[str, list[str]] = {}
    for patch in patches:
        for target in patch.wraps:
            for earlier in wrapped.setdefault(target, []):
                if earlier not in patch.after:
                    raise ValueError(
                        f"{earlier} and {patch.name} both wrap {target}: declare "
                        f"after=({earlier!r},) in {patch.name}"
                    )
            wrapped[target].append(patch.name)


def install(patches: Sequence[Patch], setup: Setup, folder: Path) -> Installed:
    """Install patches in their order, and log one line for each.

    Args:
        folder: the folder of the package ``sglang``.

    Raises:
        EngineError: the source that a correction modifies is unknown.
        ValueError: see ``check_order``.
    """
    check_order(patches)
    installed = Installed()
    for patch in patches:
        kind = "acceleration" if patch.acceleration else "correction"
        if reason := setup.excludes(patch):
            logger.info("SGLang %s %s: off (%s)", kind, patch.name, reason)
            continue
        if reason := patch.unknown(folder):
            if patch.acceleration:
                logger.warning("SGLang %s %s: off (%s)", kind, patch.name, reason)
                continue
            if not setup.allow_unknown:
                raise EngineError(
                    f"this SGLang is not supported: {reason}, and the correction {patch.name!r} "
                    f"depends on it (without the correction, {patch.why}). Install a supported "
                    f"version ({command('sglang')}), or accept the risk of wrong results with "
                    "allow_unknown_sglang=True"
                )
            logger.warning("SGLang %s %s: on, although %s", kind, patch.name, reason)
        if patch.module is not None:
            module = importlib.import_module(f".{patch.module}", __package__)
            finish: Finish | None = module.install(setup)
            if finish is not None:
                installed._finish.append((patch.name, finish))
        if patch.acceleration:
            installed.accelerations.append(patch.name)
        logger.info("SGLang %s %s: on", kind, patch.name)
    return installed
