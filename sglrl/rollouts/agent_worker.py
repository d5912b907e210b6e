"""A process in which agents of a run play: the actor that ``agent_processes.py`` spawns.

It is a client of the run's pool, as any other process could be one (``sglrl.connect``), so turns
are routed with those of all other clients. What is decided of a run is decided by its driver; here
a sample is played, and ended if it is late or stale.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import logging
import os
from collections import OrderedDict
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any, ClassVar, Final

from ..actors.actor import Actor, endpoint
from ..errors import UsageError
from ..sessions.gate import Gate
from ..sessions.session import Session, session_of_sample
from ..sessions.session_spec import SessionSpec
from ..sessions.trajectory import Trajectory, record_of
from ..wire.codec import Body
from .agent import Agent, NotAsync, as_failure, is_late, made_ready, play, too_late
from .agent_messages import DONE, FAILED, LATE, STALE, Outcome, Settings, body_of, sampling_from
from .dataset import session_arguments
from .task_ending import GRACE_SECONDS, Grace, Limit, end_without, name_of, stack_of

if TYPE_CHECKING:
    from ..remote.client import RemoteClient

logger = logging.getLogger("sglrl.rollout")

_metadata: Final = Body(dict[Any, Any])
_KEPT: Final = 1024
"""Groups whose prompt is kept, for samples of them that come later."""


class _Sample:
    """One that is being played. ``outcome`` is set when the agent has ended, or is not waited for
    any more."""

    __slots__ = ("index", "item", "limit", "outcome", "session", "stale", "task")

    task: asyncio.Task[Outcome]

    def __init__(self, item: int, index: int) -> None:
        self.item = item
        self.index = index
        self.limit: Limit | None = None
        self.session: Session | None = None
        self.stale = False
        self.outcome: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()


class AgentHost(Actor):
    """Subclassed for each run, with its ``settings``."""

    settings: ClassVar[Settings]

    def __init__(self) -> None:
        self._stack = AsyncExitStack()
        self._client: RemoteClient
        self._agent: Agent
        self._gate = Gate()
        self._specs: OrderedDict[tuple[int, int], SessionSpec] = OrderedDict()
        self._samples: set[_Sample] = set()
        self._count = [0, 0, 0, 0]
        """Since the driver was last told: turns, bytes of their prompts, tokens of these that were
        cached, new bytes."""

    async def open(self) -> None:
        # Not above: a client has sessions, which are of this package.
        from ..remote.client import reconnect

        settings = self.settings
        client = reconnect(
            settings.address,
            settings.keys,
            settings.insecure,
            settings.heartbeat_timeout,
            settings.model,
            settings.call_timeout,
            settings.max_message_bytes,
        )
        self._client = await self._stack.enter_async_context(client)
        self._client._pool.weights.on_version.add(self._on_version)
        # What ``rollout`` advises a program to do, which this process can do by itself.
        gc.freeze()
        gc.set_threshold(50_000, 20, 100)
        self._agent = await self._stack.enter_async_context(made_ready(settings.agent))
        _say_it_there(settings.driver)

    async def close(self) -> None:
        await self._stack.aclose()

    @endpoint
    async def run(
        self,
        number: int,
        tries: int,
        index: int,
        seed: int | None,
        version: int,
        item: Any,
        arguments: dict[str, Any] | None,
    ) -> Outcome:
        """One sample.

        Args:
            number: of the item in the data set.
            tries: how often its group was begun before.
            index: of the sample.
            version: of the weights, as the driver has counted with.
            arguments: of the session; None: what they are for the item by themselves.
        """
        sample = _Sample(number, index)
        self._samples.add(sample)
        work = self._play(sample, tries, seed, version, item, arguments)
        sample.task = asyncio.get_running_loop().create_task(work)
        sample.task.add_done_callback(functools.partial(self._ended, sample))
        try:
            await asyncio.wait([sample.outcome])
        except asyncio.CancelledError:
            # By the driver, which does not wait for an answer.
            self._cancel(sample)
            await asyncio.wait([sample.outcome])
            raise
        return sample.outcome.result()

    async def _play(
        self,
        sample: _Sample,
        tries: int,
        seed: int | None,
        version: int,
        item: Any,
        arguments: dict[str, Any] | None,
    ) -> Outcome:
        timeout = self.settings.timeout
        try:
            # What the pool itself says of it may come later than this.
            self._client._pool.heard_of(version)
            spec = self._spec_of(sample.item, tries, item, arguments)
            # A tokenizer that must be loaded first takes nobody's time.
            await spec.ids()
            session = sample.session = session_of_sample(
                spec, self._gate, self._on_turn, seed, sample.item, sample.index
            )
            if timeout is not None:
                late = functools.partial(self._go_on_without, sample)
                session._limit = sample.limit = Limit(timeout, late)
            made = await play(self._agent, session, item, sample.limit)
            _check_metadata(made)
            return self._outcome(DONE, trajectory=record_of(made), oldest=made.oldest_version)
        except GeneratorExit:
            raise
        except BaseException as error:
            # One that the driver has cancelled is not waited for, whatever it comes to.
            if sample.stale:
                return self._outcome(STALE)
            if is_late(sample.limit):
                return self._outcome(LATE, error=body_of(too_late(timeout, error)))
            return self._failure(sample, error)
        finally:
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

    def _spec_of(
        self, number: int, tries: int, item: Any, arguments: dict[str, Any] | None
    ) -> SessionSpec:
        """One for all samples of a group that are played here at about the same time."""
        spec = self._specs.get((number, tries))
        if spec is None:
            settings = self.settings
            found = session_arguments(item) if arguments is None else sampling_from(arguments)
            spec = SessionSpec.of(self._client, found, settings.values, settings.sampling)
            self._specs[number, tries] = spec
            if len(self._specs) > _KEPT:
                self._specs.popitem(last=False)
        return spec

    def _on_turn(self, prompt: int, cached: int, new: int) -> None:
        count = self._count
        count[0] += 1
        count[1] += prompt
        count[2] += cached
        count[3] += new

    def _ended(self, sample: _Sample, task: asyncio.Task[Outcome]) -> None:
        if sample.outcome.done():
            # It was not waited for any more.
            return
        self._samples.discard(sample)
        error = asyncio.CancelledError() if task.cancelled() else task.exception()
        if error is None:
            sample.outcome.set_result(task.result())
        else:
            # It was cancelled before its first step.
            sample.outcome.set_result(self._failure(sample, error))

    def _cancel(self, sample: _Sample) -> None:
        sample.task.cancel()
        Grace(sample.task, functools.partial(self._go_on_without, sample))

    def _go_on_without(self, sample: _Sample) -> None:
        """It was cancelled and has not ended in time."""
        if sample.task.done() or sample.outcome.done():
            return
        self._samples.discard(sample)
        if sample.session is not None:
            sample.session.close()
        stack = stack_of(sample.task)
        if sample.stale:
            outcome = self._outcome(STALE, hangs_at=stack)
        elif is_late(sample.limit):
            error = body_of(too_late(self.settings.timeout, None))
            outcome = self._outcome(LATE, error=error, hangs_at=stack)
        else:
            # The driver has cancelled it, and waits for no answer.
            logger.error(
                "agent %s with sample %d of item %d was cancelled by the run and did not end "
                "within %g s; it is closed where it waits:\n%s",
                name_of(self.settings.agent),
                sample.index,
                sample.item,
                GRACE_SECONDS,
                stack,
            )
            outcome = self._failure(sample, asyncio.CancelledError())
        sample.outcome.set_result(outcome)
        end_without(sample.task)

    def _on_version(self) -> None:
        """Of what is too old by now, no token will be handed out."""
        most = self.settings.max_staleness
        if most is None:
            return
        version = self._client.weight_version
        for sample in self._samples:
            oldest = None if sample.session is None else sample.session.oldest_version
            if oldest is not None and version - oldest > most and not sample.stale:
                sample.stale = True
                self._cancel(sample)

    def _outcome(self, how: str, **more: Any) -> Outcome:
        (turns, prompt, cached, new), self._count = self._count, [0, 0, 0, 0]
        return Outcome(how, turns, prompt, cached, new, **more)

    def _unheard(self, error: Exception) -> Outcome:
        """Of a sample that was cancelled: the driver may not listen any more, and hears of its
        turns with the next one."""
        return Outcome(FAILED, 0, 0, 0, 0, error=body_of(error))

    def _failure(self, sample: _Sample, error: BaseException) -> Outcome:
        if isinstance(error, asyncio.CancelledError):
            return self._unheard(as_failure(error))
        cut_off = not self._client._is_connected
        return self._outcome(
            FAILED,
            error=body_of(as_failure(error)),
            refused=not cut_off and sample.session is not None and sample.session.refused,
            cut_off=cut_off,
            # In the driver's process it would end the run, too.
            fatal=isinstance(error, NotAsync) or not isinstance(error, (Exception, SystemExit)),
        )


def _check_metadata(trajectory: Trajectory) -> None:
    try:
        _metadata.encode(trajectory.metadata)
    except Exception as error:
        # Whatever is in it may raise anything.
        reason = str(error).partition(";")[0]
        raise UsageError(
            f"the metadata of this trajectory cannot be sent to the driver: {reason}; it may hold "
            "what msgpack can, and numpy arrays"
        ) from None


def _say_it_there(driver: int) -> None:
    """What agents print and log goes to the driver's standard files, as if they ran there. (What
    came before is in this process's own log, which is shown if it does not start.)"""
    for fd in (1, 2):
        with contextlib.suppress(OSError):
            theirs = os.open(f"/proc/{driver}/fd/{fd}", os.O_WRONLY | os.O_APPEND)
            os.dup2(theirs, fd)
            os.close(theirs)
