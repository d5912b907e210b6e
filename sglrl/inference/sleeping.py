"""Let the engines of a pool sleep, which gives their memory to a trainer on the same GPUs."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterable
from typing import Final, Protocol

from ..actors.actor import Actor as _Actor
from ..actors.actor import EndpointSpec, endpoint, endpoints_of
from ..config import check_timeout
from ..core.driver_listener import DriverListener
from ..core.members import DRAINING, STALE, STARTING, SYNCING
from ..driver.driver import Driver
from ..errors import DeadlineExceeded, UsageError, WeightsLost
from ..weights.channel import WeightChannel
from ..weights.deadline import Deadline
from ..wire.engine import SLEEP_TAGS, EngineInfo
from .engine_controls import ask_all, tell

_MODES: Final = ("retract", "drain", "abort")


class _Sleeper(_Actor):
    """The endpoint of an engine worker.

    It is not idempotent, so a call is not retried on a replacement worker, which starts only when
    all engines are awake.
    """

    @endpoint
    async def sleep(self, asleep: tuple[str, ...], inflight: str, keep_weights: bool) -> None:
        raise NotImplementedError  # served by workers/mailbox.py


_SLEEP: Final[EndpointSpec] = endpoints_of(_Sleeper)["sleep"]


class Sleeping(Protocol):
    """Lets engines sleep. ``Client`` documents methods of the same names.

    ``PoolSleeping`` implements it for a local pool, ``remote.client`` for a remote pool.
    """

    def start(self) -> None:
        """The pool has started."""
        ...

    async def sleep(
        self, tags: Iterable[str], inflight: str, keep_weights: bool, timeout: float | None
    ) -> None: ...

    async def wake(self, tags: Iterable[str] | None, timeout: float | None) -> None: ...


class SleepingPool(Protocol):
    """What ``PoolSleeping`` needs of ``driver.pool.Pool``."""

    @property
    def driver(self) -> Driver: ...

    @property
    def engine(self) -> EngineInfo | None: ...

    @property
    def weights(self) -> WeightChannel: ...

    def hold_replacements(self, held: bool) -> None: ...


class PoolSleeping(DriverListener):
    """Lets the engines of this process's pool sleep.

    While they do, no worker is replaced: a new worker needs memory that the engines have given
    away.
    """

    def __init__(self, pool: SleepingPool) -> None:
        self._pool = pool
        self._turn = asyncio.Lock()
        """Held by each ``sleep`` and ``wake``."""
        self._target: set[str] = set()
        """What engines shall have given back: the state that was sent last."""
        self._asleep: set[str] = set()
        """What an engine may have given back. Larger than ``_target`` if a ``wake`` has failed."""
        self._idle = False
        """Whether all engines have confirmed that they sleep, so that no request runs."""
        self._kept = True
        """Whether weights that are asleep are kept."""
        self._has_slept = False

    def start(self) -> None:
        self._pool.driver.add_listener(self)
        self._pool.weights.on_version.add(self._hold)

    def _hold(self) -> None:
        """Record why calls wait: the engines sleep, or wait for weights that they gave away."""
        driver, weights = self._pool.driver, self._pool.weights
        asleep = f"the engines sleep ({', '.join(sorted(self._asleep))}); await client.wake()"
        driver.hold("sleep", asleep if self._asleep else None)
        gone = (
            "the engines gave their weights away (client.sleep(keep_weights=False)) and wait for "
            "all of them; await client.update_weights(...)"
        )
        driver.hold("weights", gone if weights.forgotten else None)

    async def sleep(
        self, tags: Iterable[str], inflight: str, keep_weights: bool, timeout: float | None
    ) -> None:
        wanted = self._checked(tags)
        if inflight not in _MODES:
            raise UsageError(f"inflight must be one of {_MODES}, got {inflight!r}")
        deadline = Deadline(check_timeout(timeout))
        if not keep_weights and "weights" in wanted:
            # Weights that cannot be updated would never return.
            await self._pool.weights.describe(deadline.left)
        async with self._in_turn(deadline):
            self._pool.hold_replacements(True)
            try:
                await self._until_all_serve(deadline)
                # An update uses memory that every sleep frees.
                async with self._pool.weights.at_rest(deadline):
                    if "weights" in wanted - self._asleep:
                        self._kept = keep_weights
                        self._pool.weights.sleep(kept=keep_weights)
                    self._target |= wanted
                    self._asleep |= wanted
                    self._has_slept = True
                    self._hold()
                    # Engines that sleep hold back all requests, so they cannot drain.
                    await self._tell_all("retract" if self._idle else inflight, deadline)
                self._idle = True
            finally:
                if not self._asleep:
                    self._pool.hold_replacements(False)

    async def wake(self, tags: Iterable[str] | None, timeout: float | None) -> None:
        wanted = set(SLEEP_TAGS) if tags is None else self._checked(tags)
        deadline = Deadline(check_timeout(timeout))
        async with self._in_turn(deadline):
            self._target -= wanted
            await self._tell_all("retract", deadline)
            self._asleep = set(self._target)
            if "weights" not in self._asleep:
                self._pool.weights.wake()
            self._hold()
            if not self._asleep:
                self._idle = False
                self._pool.hold_replacements(False)

    @contextlib.asynccontextmanager
    async def _in_turn(self, deadline: Deadline) -> AsyncIterator[None]:
        try:
            async with deadline.limit():
                await self._turn.acquire()
        except TimeoutError:
            raise DeadlineExceeded(
                f"another sleep or wake was still running after {deadline}; nothing has changed"
            ) from None
        try:
            yield
        finally:
            self._turn.release()

    def before_serving(self, worker: int) -> None:
        # This wakes a worker, too: it may have been away when the others woke up.
        if self._has_slept:
            tell(self._pool.driver, _SLEEP, self._state("retract"), worker)

    def _checked(self, tags: Iterable[str]) -> set[str]:
        """Return the tags as a set.

        Raises:
            UsageError: the engines cannot give this back.
        """
        wanted = set(tag_list(tags))
        if unknown := sorted(map(str, wanted - set(SLEEP_TAGS))):
            raise UsageError(f"tags must be of {SLEEP_TAGS}, got {unknown}")
        engine = self._pool.engine
        assert engine is not None
        if not engine.sleep_tags:
            raise UsageError("engines sleep only after launch(enable_memory_saver=True)")
        if missing := sorted(wanted - set(engine.sleep_tags)):
            raise UsageError(
                f"these engines cannot give back {missing}: their weights are quantized, or the "
                'acceleration "parameter_arena" is off'
            )
        return wanted

    def _state(self, inflight: str) -> tuple[tuple[str, ...], str, bool]:
        return tuple(sorted(self._target)), inflight, self._kept

    async def _tell_all(self, inflight: str, deadline: Deadline) -> None:
        limit = None if deadline.seconds == float("inf") else deadline.left
        await ask_all(self._pool.driver, _SLEEP, self._state(inflight), timeout=limit)

    async def _until_all_serve(self, deadline: Deadline) -> None:
        """Wait until no worker is in another state: it would keep memory, or take some."""
        driver = self._pool.driver
        try:
            async with deadline.limit():
                while others := {
                    m.index: m.state
                    for m in driver.fabric.members.values()
                    if m.state in (STARTING, SYNCING, STALE, DRAINING)
                }:
                    if set(others.values()) == {STALE}:
                        raise WeightsLost(
                            f"workers {[*others]} wait for weights that no process has any more; "
                            "call update_weights with all weights, then sleep; nothing has changed"
                        )
                    await driver.change()
        except TimeoutError:
            waiting = ", ".join(f"{index} is {state}" for index, state in others.items())
            raise DeadlineExceeded(
                f"not every worker can sleep after {deadline}: {waiting}; nothing has changed"
            ) from None


def tag_list(tags: Iterable[str]) -> list[str]:
    """Return the tags as a list. Raise ``UsageError`` for a text."""
    if isinstance(tags, str):
        raise UsageError(f'tags must be a sequence such as ("kv_cache",), got {tags!r}')
    return list(tags)
