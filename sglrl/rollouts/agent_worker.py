"""The actor that runs agents in a separate process. ``agent_processes.py`` spawns it.

The process is a client of the run's pool, like any other process that calls ``sglrl.connect``. So
its turns are routed together with the turns of all other clients. The driver decides which samples
run. This process runs them, and ends samples that are late or stale.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import logging
import os
import time
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any, ClassVar, Final

from .. import tracing
from ..actors.actor import Actor, endpoint
from ..core.policy_versions import MODEL, age
from ..errors import UsageError
from ..sessions.gate import Gate
from ..sessions.live import LiveSample, LiveState, live_samples, live_state
from ..sessions.session import Session
from ..sessions.session_spec import SessionSpec
from ..sessions.trajectory import Trajectory, record_of
from ..wire.codec import Body
from .agent import (
    Agent,
    Gateway,
    NotAsync,
    as_failure,
    is_late,
    load,
    made_ready,
    play,
    session_of_sample,
    too_late,
)
from .agent_messages import DONE, FAILED, LATE, STALE, Outcome, Settings, body_of, sampling_from
from .blocked_loop import LoopWatch
from .dataset import session_arguments
from .sample_span import end_sample_span, sample_span
from .task_ending import GRACE_SECONDS, Grace, Limit, end_without, stack_of, title_of

if TYPE_CHECKING:
    from ..client.client import Client
    from ..remote.pool import RemotePool

logger = logging.getLogger("sglrl.rollout")

_metadata: Final = Body(dict[Any, Any])
_MAX_THREADS: Final = 4096
_KEPT: Final = 1024
"""The maximum number of groups whose spec, with the encoded prompt, is kept for later samples."""


class _Sample:
    """A sample that is running.

    Attributes:
        outcome: the future of the outcome. It is done when the agent has ended, or when this
            process stops waiting for the agent.
        span: the span of the sample. None: tracing is off, or the task has not begun.
    """

    __slots__ = ("index", "item", "limit", "outcome", "session", "span", "stale", "task")

    task: asyncio.Task[Outcome]

    def __init__(self, item: int, index: int) -> None:
        self.item = item
        self.index = index
        self.limit: Limit | None = None
        self.session: Session | None = None
        self.span: Any = None
        self.stale = False
        self.outcome: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()


class AgentWorker(Actor):
    """Runs agents in its process. Each run makes a subclass with its own ``settings``."""

    settings: ClassVar[Settings]

    def __init__(self) -> None:
        self._stack = AsyncExitStack()
        self._client: Client
        self._pool: RemotePool
        self._agent: Agent
        self._gate = Gate()
        self._gateway: Gateway | None = None
        self._specs: OrderedDict[tuple[int, int], SessionSpec] = OrderedDict()
        self._samples: set[_Sample] = set()
        self._count = [0, 0, 0, 0]
        """Statistics of the turns since the last report to the driver.

        The items: the number of turns, the bytes of their prompts, the number of cached prompt
        tokens, and the bytes of their new tokens.
        """

    async def open(self) -> None:
        # Imported here to avoid an import cycle between clients, sessions and runs.
        from ..remote.client import client_of
        from ..remote.pool import RemotePool

        settings = self.settings
        self._pool = RemotePool(settings.entry)
        client = client_of(self._pool, model=settings.model, timeout=settings.call_timeout)
        self._client = await self._stack.enter_async_context(client)
        self._pool.weights.on_version.add(self._on_version)
        # Reduce the time of the garbage collector, as the docstring of ``rollout`` recommends.
        gc.freeze()
        gc.set_threshold(50_000, 20, 100)
        if settings.gateway:
            # Imported here because it needs the extra "gateway".
            from ..gateway.local import local_gateway

            self._gateway = await self._stack.enter_async_context(
                local_gateway(self._client, settings.gateway)
            )
            # With a gateway, agents that block run in the threads of this executor.
            threads = ThreadPoolExecutor(_MAX_THREADS, "agent")
            asyncio.get_running_loop().set_default_executor(threads)
        self._agent = await self._stack.enter_async_context(made_ready(settings.agent))
        # An agent class may have set the provider of this process.
        tracing.look_up()
        _say_it_there(settings.driver)
        watch = LoopWatch(lambda: bool(self._samples))
        self._stack.callback(watch.close)

    async def close(self) -> None:
        await self._stack.aclose()

    @endpoint
    async def run(
        self,
        number: int,
        tries: int,
        index: int,
        attempts: int,
        versions: dict[str, int],
        item: Any,
        arguments: dict[str, Any] | None,
    ) -> Outcome:
        """Run one sample.

        Args:
            number: the index of the item in the data set.
            tries: the number of earlier attempts of the group.
            index: the index of the sample in its group.
            attempts: the number of earlier attempts of the sample.
            versions: the policy versions that the driver has used for its plan.
            item: the item of the data set.
            arguments: the arguments of the session. None: derive them from the item.
        """
        sample = _Sample(number, index)
        self._samples.add(sample)
        # The pool's own message about these versions may arrive after this call.
        loras = {name: version for name, version in versions.items() if name != MODEL}
        self._pool.weights.set_version(versions[MODEL], loras)
        work = self._traced(sample, tries, attempts, item, arguments)
        sample.task = asyncio.get_running_loop().create_task(work)
        sample.task.add_done_callback(functools.partial(self._ended, sample))
        try:
            await asyncio.wait([sample.outcome])
        except asyncio.CancelledError:
            # The driver has cancelled the call and does not wait for an answer.
            self._cancel(sample)
            await asyncio.wait([sample.outcome])
            raise
        return sample.outcome.result()

    async def _traced(self, sample: _Sample, tries: int, attempts: int, *of: Any) -> Outcome:
        numbers = sample.item, sample.index, attempts
        with sample_span(self.settings.agent, *numbers) as sample.span:
            return await self._play(sample, tries, attempts, *of)

    async def _play(
        self,
        sample: _Sample,
        tries: int,
        attempts: int,
        item: Any,
        arguments: dict[str, Any] | None,
    ) -> Outcome:
        timeout = self.settings.timeout
        try:
            spec = self._spec_of(sample.item, tries, item, arguments)
            # Load the tokenizer before the time limit starts.
            await load(spec, sample.item, must=True)
            session = sample.session = session_of_sample(
                spec, self._gate, self._on_turn, sample.item, sample.index, attempts
            )
            if timeout is not None:
                late = functools.partial(self._go_on_without, sample)
                session.sampler.limit = sample.limit = Limit(timeout, late)
            made = await play(self._agent, session, item, sample.limit, self._gateway)
            _check_metadata(made)
            record, oldest = record_of(made), made.oldest_versions
            end_sample_span(sample.span, "done", reward=made.reward)
            return self._outcome(DONE, trajectory=record, oldest=oldest)
        except GeneratorExit:
            raise
        except BaseException as error:
            # The driver ignores the outcome of a sample that it has cancelled.
            if sample.stale:
                return self._outcome_of_stale(sample)
            if is_late(sample.limit):
                return self._outcome_of_late(sample, error)
            return self._failure(sample, error)
        finally:
            if sample.session is not None:
                sample.session.close()

    @endpoint
    async def pause(self) -> bool:
        """Let no turn begin, and wait until no turn runs.

        Return False if the run was resumed before all turns had ended.
        """
        self._gate.close()
        return await self._gate.empty()

    @endpoint
    async def resume(self) -> None:
        self._gate.open()

    @endpoint
    async def live_samples(self) -> list[LiveSample]:
        """See ``Client.live_samples``."""
        return live_samples(self._client.requests.sessions, time.time())

    @endpoint
    async def live_state(
        self, id_: str, turns: int, tokens: int, seconds: float
    ) -> LiveState | None:
        """See ``Client.live_state``."""
        sessions = self._client.requests.sessions
        return await live_state(sessions, id_, turns, tokens, seconds, time.time())

    # --- internals --------------------------------------------------------------------------------

    def _spec_of(
        self, number: int, tries: int, item: Any, arguments: dict[str, Any] | None
    ) -> SessionSpec:
        """Return the spec of a group, which the samples of the group in this process share."""
        spec = self._specs.get((number, tries))
        if spec is None:
            own = session_arguments(item) if arguments is None else sampling_from(arguments)
            spec = SessionSpec.of(self._client.requests, self.settings.session, own)
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
            # This process has stopped waiting for the sample.
            return
        self._samples.discard(sample)
        error = asyncio.CancelledError() if task.cancelled() else task.exception()
        if error is None:
            sample.outcome.set_result(task.result())
        else:
            # The task was cancelled before its first step.
            sample.outcome.set_result(self._failure(sample, error))

    def _cancel(self, sample: _Sample) -> None:
        sample.task.cancel()
        Grace(sample.task, functools.partial(self._go_on_without, sample))

    def _go_on_without(self, sample: _Sample) -> None:
        """Finish a cancelled sample whose agent has not ended in time."""
        if sample.task.done() or sample.outcome.done():
            return
        self._samples.discard(sample)
        if sample.session is not None:
            sample.session.close()
        stack = stack_of(sample.task)
        if sample.stale:
            outcome = self._outcome_of_stale(sample, stack)
        elif is_late(sample.limit):
            outcome = self._outcome_of_late(sample, None, stack)
        else:
            # The driver has cancelled the sample and waits for no answer.
            logger.error(
                "%s was cancelled by the run and did not end within %g s; it is closed where it "
                "waits:\n%s",
                title_of(self.settings.agent, sample.index, sample.item),
                GRACE_SECONDS,
                stack,
            )
            outcome = self._failure(sample, asyncio.CancelledError())
        sample.outcome.set_result(outcome)
        end_without(sample.task)

    def _on_version(self) -> None:
        """Cancel the samples that are too old after a weight update. They are never delivered."""
        most = self.settings.max_staleness
        if most is None:
            return
        versions = self._client.policy_versions
        for sample in self._samples:
            oldest = {} if sample.session is None else sample.session.oldest_versions
            if age(versions, oldest) > most and not sample.stale:
                sample.stale = True
                self._cancel(sample)

    def _outcome(self, how: str, **more: Any) -> Outcome:
        (turns, prompt, cached, new), self._count = self._count, [0, 0, 0, 0]
        return Outcome(how, turns, prompt, cached, new, **more)

    def _outcome_of_stale(self, sample: _Sample, hangs_at: str = "") -> Outcome:
        end_sample_span(sample.span, "given up", reason=STALE)
        return self._outcome(STALE, hangs_at=hangs_at)

    def _outcome_of_late(
        self, sample: _Sample, error: BaseException | None, hangs_at: str = ""
    ) -> Outcome:
        late = too_late(self.settings.timeout, error)
        end_sample_span(sample.span, "late", error=late)
        return self._outcome(LATE, error=body_of(late), hangs_at=hangs_at)

    def _unheard(self, error: Exception) -> Outcome:
        """Return the outcome of a cancelled sample, without statistics.

        The driver may ignore this outcome, so the next outcome reports the statistics.
        """
        return Outcome(FAILED, 0, 0, 0, 0, error=body_of(error))

    def _failure(self, sample: _Sample, error: BaseException) -> Outcome:
        if sample.task.cancelling():
            end_sample_span(sample.span, "given up", reason="cancelled by the run")
        else:
            end_sample_span(sample.span, "failed", error=as_failure(error))
        if isinstance(error, asyncio.CancelledError):
            return self._unheard(as_failure(error))
        cut_off = not self._client.is_open
        return self._outcome(
            FAILED,
            error=body_of(as_failure(error)),
            refused=not cut_off and sample.session is not None and sample.session.refused,
            cut_off=cut_off,
            # The same exceptions end the run if the agent runs in the driver's process.
            fatal=isinstance(error, NotAsync) or not isinstance(error, (Exception, SystemExit)),
        )


def _check_metadata(trajectory: Trajectory) -> None:
    try:
        _metadata.encode(trajectory.metadata)
    except Exception as error:
        # Objects in the metadata may raise any exception.
        reason = str(error).partition(";")[0]
        raise UsageError(
            f"the metadata of this trajectory cannot be sent to the driver: {reason}; it may "
            "contain values that msgpack can encode, and numpy arrays"
        ) from None


def _say_it_there(driver: int) -> None:
    """Write this process's output and logs to the driver's standard files from now on.

    Output from before this call is in the process's own log, which is shown if the start fails.
    """
    for fd in (1, 2):
        with contextlib.suppress(OSError):
            theirs = os.open(f"/proc/{driver}/fd/{fd}", os.O_WRONLY | os.O_APPEND)
            os.dup2(theirs, fd)
            os.close(theirs)
