"""Let the engines of a pool sleep, which gives their memory to a trainer on the same GPUs."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Collection, Iterable
from typing import Final, Literal, Protocol

from ..actors.actor import EndpointSpec, endpoint, endpoints_of
from ..config import check_timeout
from ..core.driver_listener import DriverListener
from ..core.members import DRAINING, STALE, STARTING, SYNCING
from ..driver.driver import Driver
from ..errors import DeadlineExceeded, UsageError, WeightsLost
from ..weights.channel import WeightChannel
from ..weights.deadline import Deadline, turn
from ..wire.engine import SLEEP_TAGS, EngineInfo
from .client_base import ClientBase
from .engine_calls import ask_all, tell
from .operations import operation

_MODES: Final = ("retract", "drain", "abort")


class SleepEndpoints(Protocol):
    """The endpoint of an engine worker that gives memory back and takes it again.

    The endpoint is not idempotent, so a call is not retried on a replacement worker. A replacement
    starts only when all engines are awake.
    """

    @endpoint
    async def sleep(self, asleep: tuple[str, ...], inflight: str, keep_weights: bool) -> None:
        """Give memory back, or take it again.

        Args:
            asleep: the parts of ``SLEEP_TAGS`` that have no memory from now on. If it is empty, the
                engine makes steps.
            inflight: the treatment of running requests, if the engine was awake before.
            keep_weights: keep the weights in the memory of the host while they are asleep. With
                False, the engine makes steps again only after the next update.
        """
        ...


_SLEEP: Final[EndpointSpec] = endpoints_of(SleepEndpoints)["sleep"]


class SleepMethods(ClientBase):
    """The methods of ``Client`` that give the memory of engines back, and take it again."""

    @operation(urgent=True)
    async def sleep(
        self,
        tags: Collection[str] = ("kv_cache", "weights"),
        *,
        inflight: Literal["retract", "drain", "abort"] = "retract",
        keep_weights: bool = True,
        timeout: float | None = 60.0,
    ) -> None:
        """Let all engines give memory back, for example to a trainer on the same GPUs.

        New calls are accepted and wait for ``wake``. Deadlines keep running. Calling this again
        with other tags gives more memory back. CUDA graphs stay valid. A worker that is lost
        meanwhile is replaced when all engines are awake.

        The engines must be launched with ``enable_memory_saver=True``.

        Args:
            tags: "kv_cache", "weights", or both. Prefix caches are lost with the KV cache.
            inflight: the treatment of running requests.
                "retract": they continue after ``wake``, and their KV cache is recomputed.
                "drain": the engines finish them first.
                "abort": ``generate`` calls return their tokens so far, with finish_reason "abort".
                Other calls are computed after ``wake``.
            keep_weights: keep the weights in the memory of the host. With False they are lost: the
                engines continue after ``wake(["weights"])`` and an update of all weights.
            timeout: seconds from this call until all engines must sleep.

        Raises:
            UsageError: the engines cannot give the memory of a tag back.
            DeadlineExceeded: an engine does not sleep yet. Call ``wake``, or ``sleep`` again.
            UpdateInProgress: an update or copy of the weights was still running. This call has
                changed nothing.
            WeightsLost: a worker waits for the next update, because no process has the current
                weights any more. This call has changed nothing.
            EngineError: a host has too little memory to keep the weights. Call ``wake``.
        """
        sleeping = self._control.part(PoolSleeping)
        await sleeping.sleep(tags, inflight, keep_weights, timeout)

    @operation(urgent=True)
    async def wake(
        self, tags: Collection[str] | None = None, *, timeout: float | None = 60.0
    ) -> None:
        """Let all engines take the memory again that ``sleep`` gave back, and continue.

        To update weights before the KV cache has memory again, wake the weights first::

            await client.wake(["weights"])
            await client.update_weights(model)
            await client.wake(["kv_cache"])

        Args:
            tags: "kv_cache", "weights", or both: the memory to take again. None: both.
            timeout: seconds from this call until all engines must be awake.

        Raises:
            EngineError: a GPU has too little free memory. Its engine stays asleep. ``wake`` may be
                called again.
            DeadlineExceeded: an engine is not awake yet.
        """
        await self._control.part(PoolSleeping).wake(tags, timeout)


class SleepingPool(Protocol):
    """The part of ``driver.pool.Pool`` that ``PoolSleeping`` uses."""

    @property
    def driver(self) -> Driver: ...

    @property
    def engine(self) -> EngineInfo | None: ...

    @property
    def weights(self) -> WeightChannel: ...

    def hold_replacements(self, held: bool) -> None: ...


class PoolSleeping(DriverListener):
    """Lets the engines of this process's pool sleep.

    While the engines sleep, no worker is replaced, because a new worker needs memory that the
    engines have given away.
    """

    def __init__(self, pool: SleepingPool) -> None:
        self._pool = pool
        self._turn = asyncio.Lock()
        """Each ``sleep`` and ``wake`` holds this lock, so that only one of them runs."""
        self._target: set[str] = set()
        """The tags that must be asleep in all engines, as in the last message to the engines."""
        self._asleep: set[str] = set()
        """The tags that may be asleep in some engine. After a failed ``wake``, these are more tags
        than ``_target``."""
        self._idle = False
        """Whether all engines have confirmed that they sleep, so that no request runs."""
        self._kept = True
        """Whether weights that are asleep are kept in the memory of the hosts."""
        self._has_slept = False

    def start(self) -> None:
        self._pool.driver.add_listener(self)
        self._pool.weights.on_version.add(self._hold)

    def _hold(self) -> None:
        """Record why calls wait: the engines sleep, or they wait for weights they gave away."""
        driver = self._pool.driver
        asleep = f"the engines sleep ({', '.join(sorted(self._asleep))}); await client.wake()"
        driver.hold("sleep", asleep if self._asleep else None)
        gone = (
            "the engines gave their weights away (client.sleep(keep_weights=False)) and wait for "
            "all of them; await client.update_weights(...)"
        )
        driver.hold("weights", gone if self._pool.weights.versions.forgotten else None)

    async def sleep(
        self, tags: Iterable[str], inflight: str, keep_weights: bool, timeout: float | None
    ) -> None:
        wanted = self._checked(tags)
        if inflight not in _MODES:
            raise UsageError(f"inflight must be one of {_MODES}, got {inflight!r}")
        deadline = Deadline(check_timeout(timeout))
        if not keep_weights and "weights" in wanted:
            # ``describe`` raises if weights cannot be updated. Such an engine could never get
            # weights again.
            await self._pool.weights.describe(deadline.left)
        async with self._in_turn(deadline):
            self._pool.hold_replacements(True)
            try:
                await self._until_all_serve(deadline)
                # Every sleep frees memory that a running update would use.
                versions = self._pool.weights.versions
                async with turn(versions.lock, deadline):
                    if "weights" in wanted - self._asleep:
                        self._kept = keep_weights
                        versions.sleep(kept=keep_weights)
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
                self._pool.weights.versions.wake()
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
        # The worker may have been disconnected when the others fell asleep or woke up.
        if self._has_slept:
            tell(self._pool.driver, _SLEEP, self._state("retract"), worker)

    def _checked(self, tags: Iterable[str]) -> set[str]:
        """Return the tags as a set.

        Raises:
            UsageError: a tag is unknown, or the engines cannot give its memory back.
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
        """Wait until no worker starts, receives weights, waits for weights or drains.

        A worker in one of these states would keep memory, or take more of it.
        """
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
    """Return the tags as a list. Raise ``UsageError`` if they are a single text."""
    if isinstance(tags, str):
        raise UsageError(f'tags must be a sequence such as ("kv_cache",), got {tags!r}')
    return list(tags)
