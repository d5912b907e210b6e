"""A process in which agents of a run play: the actor that ``processes.py`` spawns.

It is a client of the run's pool, as any other process could be one (``sglrl.connect``), so turns
are routed with those of all other clients. What is decided of a run is decided by its driver; here
a sample is played, and ended if it is late or stale.
"""

from __future__ import annotations

import asyncio
import gc
from collections import OrderedDict
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any, ClassVar, Final

from ..actor import Actor, endpoint
from ..codec import Body
from ..errors import UsageError
from ..sampling import own_names
from .gate import Gate
from .outcome import DONE, FAILED, LATE, STALE, Outcome, Settings, body_of
from .play import Agent, NotAsync, as_failure, made_ready, play, too_late
from .session import Opening, Session
from .trajectory import Trajectory, record_of

if TYPE_CHECKING:
    from ..client import Client

_metadata: Final = Body(dict[Any, Any])
_KEPT: Final = 1024
"""Groups whose prompt is kept, for samples of them that come later."""


class _Sample:
    """One that is being played. Its turns are counted."""

    __slots__ = ("cached", "new", "prompt", "session", "stale", "task", "turns")

    def __init__(self, task: asyncio.Task[Any]) -> None:
        self.task = task
        self.session: Session | None = None
        self.stale = False
        self.turns = self.prompt = self.cached = self.new = 0

    def count(self, prompt: int, cached: int, new: int) -> None:
        self.turns += 1
        self.prompt += prompt
        self.cached += cached
        self.new += new

    def outcome(self, how: str, **more: Any) -> Outcome:
        return Outcome(how, self.turns, self.prompt, self.cached, self.new, **more)


class AgentHost(Actor):
    """Subclassed for each run, with its ``settings``."""

    settings: ClassVar[Settings]

    def __init__(self) -> None:
        self._stack = AsyncExitStack()
        self._starting = asyncio.Lock()
        self._client: Client | None = None
        self._agent: Agent | None = None
        self._gate = Gate()
        self._openings: OrderedDict[int, Opening] = OrderedDict()
        self._samples: set[_Sample] = set()

    async def close(self) -> None:
        await self._stack.aclose()

    @endpoint
    async def begin(self) -> None:
        """Connect, and make the agent. A replacement does so with its first sample."""
        async with self._starting:
            if self._agent is not None:
                return
            settings = self.settings
            if self._client is None:
                # Not above: a client has sessions, which are of this package.
                from ..remote import reconnect

                client = reconnect(
                    settings.address,
                    settings.keys,
                    settings.insecure,
                    settings.model,
                    settings.call_timeout,
                )
                self._client = await self._stack.enter_async_context(client)
                client._pool.weights.on_version.add(self._on_version)
            # What ``rollout`` advises a program to do, which this process can do by itself.
            gc.freeze()
            gc.set_threshold(50_000, 20, 100)
            self._agent = await self._stack.enter_async_context(made_ready(settings.agent))

    @endpoint
    async def run(self, number: int, index: int, seed: int | None, item: Any) -> Outcome:
        """One sample. ``number``: of the item in the data set. ``index``: of the sample."""
        task = asyncio.current_task()
        assert task is not None
        sample = _Sample(task)
        self._samples.add(sample)
        settings = self.settings
        limit = None if settings.timeout is None else asyncio.timeout(settings.timeout)
        try:
            if self._agent is None:
                await self.begin()
            assert self._agent is not None
            session = Session(self._opening(number, item), self._gate, sample.count, seed)
            session.metadata.setdefault("item", number)
            session.metadata.setdefault("sample", index)
            session._limit = limit
            sample.session = session
            made = await play(self._agent, session, item, limit)
            _check_metadata(made)
            return sample.outcome(DONE, trajectory=record_of(made), oldest=made.oldest_version)
        except (asyncio.CancelledError, SystemExit, Exception) as error:
            if sample.stale:
                return sample.outcome(STALE)
            if limit is not None and limit.expired():
                late = too_late(settings.timeout, error)
                return sample.outcome(LATE, error=body_of(late))
            if isinstance(error, asyncio.CancelledError) and task.cancelling():
                raise
            return self._failure(sample, as_failure(error))
        finally:
            self._samples.discard(sample)
            if sample.session is not None:
                sample.session.close()

    @endpoint
    async def pause(self) -> bool:
        """Begin no further turn, and wait until none runs; False if it was resumed before that."""
        self._gate.close()
        return await self._gate.empty()

    @endpoint
    async def resume(self) -> None:
        self._gate.open()

    # --- inside -----------------------------------------------------------------------------------

    def _opening(self, number: int, item: Any) -> Opening:
        """One for all samples of a group that are played here at about the same time."""
        opening = self._openings.get(number)
        if opening is None:
            assert self._client is not None
            arguments = {**self.settings.values, **own_names(self.settings.open_session(item))}
            arguments.setdefault("sampling", self.settings.sampling)
            opening = self._openings[number] = Opening(self._client, **arguments)
            if len(self._openings) > _KEPT:
                self._openings.popitem(last=False)
        return opening

    def _on_version(self) -> None:
        """Of what is too old by now, no token will be handed out."""
        most = self.settings.max_staleness
        if most is None:
            return
        assert self._client is not None
        version = self._client.weight_version
        for sample in self._samples:
            oldest = None if sample.session is None else sample.session.oldest_version
            if oldest is not None and version - oldest > most and not sample.stale:
                sample.stale = True
                sample.task.cancel()

    def _failure(self, sample: _Sample, error: Exception) -> Outcome:
        session, client = sample.session, self._client
        refused = (session is not None and session.refused) or (
            client is not None and not client._is_alive
        )
        return sample.outcome(
            FAILED,
            error=body_of(error),
            refused=refused,
            hopeless=isinstance(error, NotAsync),
        )


def _check_metadata(trajectory: Trajectory) -> None:
    try:
        _metadata.encode(trajectory.metadata)
    except (TypeError, ValueError, OverflowError) as error:
        raise UsageError(
            f"the metadata of this trajectory cannot be sent to the driver: {error}"
        ) from None
