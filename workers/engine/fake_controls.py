"""The control endpoints of the fake engine, for example ``pause``, ``sleep`` and ``stats``."""

from __future__ import annotations

from collections.abc import Sized
from typing import Any, Protocol

from sglrl.errors import InvalidRequest
from sglrl.wire.engine import EngineStats

from .protocol import check_mode, check_sleep


class FakeState(Protocol):
    """The parts of the fake engine that its controls use. ``FakeEngine`` documents them."""

    model: str
    stopped: bool
    asleep: tuple[str, ...]
    empty: bool

    @property
    def requests(self) -> Sized: ...

    def stats(self) -> EngineStats: ...

    def abort_all(self) -> int: ...

    def go_on(self) -> None: ...


class FakeControls:
    """Serves the control endpoints that ``Engine.controls`` documents."""

    def __init__(self, engine: FakeState) -> None:
        self._engine = engine

    def stats(self, id_: int) -> EngineStats:
        return self._engine.stats()

    def server_info(self, id_: int) -> dict[str, Any]:
        return {"engine": "fake", "model_path": self._engine.model, "version": ""}

    def flush_cache(self, id_: int) -> bool:
        return not self._engine.requests

    def get_weights(self, id_: int, names: list[str]) -> None:
        raise InvalidRequest("engine='fake' keeps checksums of its weights, and no values")

    def start_profile(self, id_: int, **options: Any) -> None:
        raise InvalidRequest("engine='fake' has no profiler")

    def stop_profile(self, id_: int) -> None:
        raise InvalidRequest("engine='fake' has no profiler")

    def abort(self, id_: int) -> int:
        return self._engine.abort_all()

    def pause(self, id_: int, mode: str) -> None:
        check_mode(mode)
        if mode == "drain":
            raise InvalidRequest("engine='fake' does not drain")
        if mode == "abort":
            self._engine.abort_all()
        self._engine.stopped = True

    def resume(self, id_: int) -> None:
        self._engine.stopped = False
        self._engine.go_on()

    def sleep(self, id_: int, asleep: tuple[str, ...], inflight: str, keep_weights: bool) -> None:
        check_sleep(asleep, inflight)
        engine = self._engine
        if inflight == "drain":
            raise InvalidRequest("engine='fake' does not drain")
        if inflight == "abort":
            engine.abort_all()
        if "weights" in set(asleep) - set(engine.asleep):
            engine.empty |= not keep_weights
        engine.asleep = asleep
        engine.go_on()
