"""The weight channel: new weights for running engines, from tensors to the last rank.

A trainer in the driver's own process needs only ``client.update_weights(...)``. A trainer in
another process uses ``Sender``. The other modules of this package implement both.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .remote_sender import Sender
    from .tensor_source import gather
    from .update_report import UpdateReport

__all__ = ["Sender", "UpdateReport", "gather"]

_HOME = {"Sender": "remote_sender", "UpdateReport": "update_report", "gather": "tensor_source"}


def __getattr__(name: str) -> Any:
    """Import a name at its first use, because the import of torch takes seconds."""
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{home}", __name__), name)
