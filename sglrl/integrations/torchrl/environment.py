"""Read ``TORCHRL_SGLANG_*``, the environment variables of TorchRL's SGLang classes."""

from __future__ import annotations

import logging
from typing import Final, Literal, cast

from ...config import torchrl_environment
from ...errors import UsageError

logger = logging.getLogger("sglrl.integrations.torchrl")

PauseMode = Literal["abort", "retract", "in_place"]
INFLIGHT: Final = {"abort": "abort", "retract": "retract", "in_place": "continue"}
"""The value of ``inflight`` in ``Client.update_weights`` for each pause mode."""

_PAUSE_MODE: Final = "TORCHRL_SGLANG_PAUSE_GENERATION_MODE"
_WITHOUT_EFFECT: Final = {
    "TORCHRL_SGLANG_GENERATE_RETRIES": "requests of a lost replica continue on another replica",
    "TORCHRL_SGLANG_GENERATE_RETRY_DELAY": "requests of a lost replica continue on another replica",
    "TORCHRL_SGLANG_WEIGHT_SYNC_FLUSH_CACHE": (
        "cached prefixes belong to a policy version, so an update needs no flush"
    ),
}
"""The variables that have no effect in sglrl, each with the reason."""


def pause_mode() -> PauseMode:
    """Return ``$TORCHRL_SGLANG_PAUSE_GENERATION_MODE``, or "retract" if it is not set.

    Raises:
        UsageError: the value of the variable is not a pause mode.
    """
    mode = torchrl_environment().get(_PAUSE_MODE, "retract")
    if mode not in INFLIGHT:
        raise UsageError(f"{_PAUSE_MODE} must be one of {set(INFLIGHT)}, got {mode!r}")
    return cast(PauseMode, mode)


def warn_of_unused() -> None:
    """Log a warning for each variable that is set and has no effect here."""
    for name in torchrl_environment():
        if name != _PAUSE_MODE:
            reason = _WITHOUT_EFFECT.get(name, "sglrl does not know this variable")
            logger.warning("%s has no effect: %s", name, reason)
