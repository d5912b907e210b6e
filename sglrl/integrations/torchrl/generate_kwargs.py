"""What TorchRL's ``generate_kwargs`` ask for, in the client's words."""

from __future__ import annotations

from typing import Any

from ...errors import InvalidRequest
from ...sampling import SamplingParams, from_kwargs

_CALL_ARGUMENTS = ("timeout", "priority", "worker")
"""Of ``client.generate``: in ``generate_kwargs`` and as keyword arguments of a call."""
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "do_sample": (True, False),
    "logprobs": (True, False, 0, 1),
    "num_beams": (1,),
    "length_penalty": (1, 0),
    "early_stopping": (False,),
}
"""TorchRL's common names that SGLang has no counterpart of: values that ask for nothing."""


def split(values: dict[str, Any]) -> tuple[dict[str, Any], SamplingParams]:
    """Standardized ``generate_kwargs`` as arguments of ``client.generate`` and sampling values."""
    values = {k: v for k, v in values.items() if v is not None and k != "num_return_sequences"}
    call = {name: values.pop(name) for name in _CALL_ARGUMENTS if name in values}
    for name, neutral in _NEUTRAL.items():
        if name in values and values[name] not in neutral:
            raise InvalidRequest(f"{name}={values[name]!r}: SGLang has nothing of the kind")
    if values.get("do_sample") is False:
        values["temperature"] = 0.0
    for name in _NEUTRAL:
        values.pop(name, None)
    if "stop_sequences" in values:
        values["stop"] = values.pop("stop_sequences")
    return call, from_kwargs(values)
