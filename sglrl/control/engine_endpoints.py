"""All control endpoints of an engine worker, by name.

``workers/mailbox.py`` passes each call of a control endpoint to the engine's method of this name.
"""

from __future__ import annotations

from typing import Final

from ..actors.actor import EndpointSpec, endpoints_of
from .engines import EngineEndpoints
from .pausing import PauseEndpoints
from .sleeping import SleepEndpoints

ENGINE_ENDPOINTS: Final[dict[str, EndpointSpec]] = {
    name: spec
    for declared in (EngineEndpoints, PauseEndpoints, SleepEndpoints)
    for name, spec in endpoints_of(declared).items()
}
