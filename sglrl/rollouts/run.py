"""``rollout``: run an agent over a data set, and deliver groups as they finish."""

from __future__ import annotations

import os
from collections.abc import (
    AsyncGenerator,
    AsyncIterable,
    AsyncIterator,
    Callable,
    Iterable,
    Mapping,
)
from typing import TYPE_CHECKING, Any, Final, NoReturn, Self, Unpack

from ..config import GatewayOptions, check_timeout
from ..core.rollout_metrics import RolloutMetrics
from ..errors import UsageError
from ..inference.sampling import SamplingOptions
from ..sessions.options import RolloutSessionKeywords
from .agent import Agent
from .config import OnError, RolloutConfig
from .dataset import optional_prompt, session_arguments
from .group import Group
from .runner import Runner
from .state_file import load_state, save_state

if TYPE_CHECKING:
    from ..client.client import Client

_MAX_SAMPLES: Final = 100_000
"""The largest ``group_size`` with a fixed ``concurrency``, unless the pool can take more calls.

There is a limit because all samples of a group are created when the group begins.
"""


def rollout(
    client: Client,
    agent: Agent,
    dataset: Iterable[Any] | AsyncIterable[Any],
    *,
    group_size: int = 1,
    concurrency: int | None = None,
    batch_size: int | None = None,
    max_staleness: int | None = None,
    timeout: float | None = None,
    on_error: OnError = "retry",
    retries: int = 2,
    max_failure_rate: float | None = 0.9,
    min_group: int | None = None,
    keep: Callable[[Group], bool] | None = None,
    open_session: Callable[[Any], Mapping[str, Any]] | None = None,
    ahead: int | None = None,
    processes: int | None = None,
    gateway: bool | GatewayOptions = False,
    progress: bool | None = None,
    state: Mapping[str, Any] | str | os.PathLike[str] | None = None,
    seed: int | None = None,
    **session: Unpack[RolloutSessionKeywords],
) -> Rollout:
    """Run ``agent`` over a data set and deliver groups of trajectories as they finish.

    ::

        async def agent(session, item):
            turn = await session.generate(max_new_tokens=64)
            return float(item["answer"] in turn.text)

        async for group in sglrl.rollout(client, agent, items, group_size=8):
            train(group)

    With thousands of samples at a time, Python's cyclic garbage collector takes as long as all
    other work of the run. Call ``gc.freeze(); gc.set_threshold(50_000, 20, 100)`` once, at the
    start of the program. This reduces the collector's time to a fraction (``python -m
    bench.rollout``: 142 to 98 us a turn).

    Args:
        agent: ``await agent(session, item)`` returns the reward, a dict of named rewards, or a
            ``Trajectory``. It may return None if it has called ``session.reward``. If the agent is
            a class, the run makes an instance, and enters it if it is a context manager. With
            ``processes``, each process makes its own instance.
        dataset: the items. Each item becomes one group. A text is a prompt, and a list of messages
            is a conversation. In a mapping, "prompt", "messages" or "input_ids" is used. For other
            items, or more arguments, pass ``open_session``.
        group_size: the number of samples of each item.
        concurrency: the number of samples that run at a time. None: adapt it to the load that the
            engines report (KV cache in use, waiting requests, preempted requests, duration of
            steps), so that the engines are full.
        batch_size: the number of groups that one weight update trains on. ``batches`` yields lists
            of this length.
        max_staleness: the maximum age of delivered tokens, in policy versions. After v training
            steps of the run, at most ``(v + max_staleness + 1) * batch_size`` groups have begun. 0
            is synchronous training: the current policy sampled every token. None: no bound. With
            ``lora``, a token has an age in versions of the model and one in versions of the
            adapter. The larger age counts. A sample that becomes too old runs again, without using
            ``retries``. An item that is too slow three times waits until no other item is left, and
            a warning names the item.
        timeout: seconds that a sample may take, without pauses. After that the sample is cancelled
            and lost. If its agent does not end within 5 s after the cancellation, its coroutine is
            closed, its stack is logged, and the run continues or ends without it.
        on_error: the reaction to an exception of the agent. "retry" runs the sample again, at most
            ``retries`` times, and then drops it. "drop" drops it at once. "raise" raises the
            exception in a loop over the run, and in ``Rollout.take``. A ``UsageError`` is not
            retried. In every mode the run raises if its first 32 samples fail, or all samples if
            there are fewer.
        retries: how often a sample may run again, in total. A group that was given up begins again
            with the samples that have retries left, if these are enough for a group. So no sample
            has more than ``1 + retries`` attempts. Attempts that end because their process is lost
            do not count: see ``processes``.
        max_failure_rate: the run raises ``RolloutFailed`` when more than this share of the latest
            attempts has failed, because the agent raised or was late. The error states the most
            frequent error. The number of latest attempts is 4 times ``concurrency``, but at least
            64. None: no limit.
        min_group: the minimum number of trajectories of a group. A group with fewer samples left is
            given up. Other groups are delivered without their lost samples, so they may have fewer
            than ``group_size`` trajectories. None: 2, or 1 if ``group_size`` is 1.
        keep: returns False to filter out a finished group. Another group takes its place in the
            batch. See ``sglrl.rl.has_signal``.
        open_session: returns the arguments of ``Client.session`` for an item.
        ahead: the maximum number of finished groups that wait to be taken. Running groups count
            too, because all of them may finish before one is taken. A ``take`` of more groups
            raises the limit while it waits. None: no group begins while 64 finished groups wait, or
            two batches if that is more. With None, running groups do not count.
        processes: the number of separate processes that run the agents. Use them for agents that
            compute. None: agents run on this event loop. See below.
        gateway: whether agents may use the session over HTTP. ``session.base_url`` and
            ``session.api_key`` are for clients of OpenAI's and other APIs (extra ``gateway``). All
            HTTP requests become turns of the session. Items need no prompt. ``GatewayOptions`` set
            the handling of tools and system messages that the model cannot be shown. See below.
        progress: whether to show the progress on a terminal or in the log. None: on a terminal
            only.
        state: the ``state_dict`` of an earlier run, or the path of a file that ``Rollout.save``
            wrote. Items that the earlier run had finished are skipped. The state has the length of
            the data set, if it is known, and a fingerprint of the items that were read. If these do
            not match ``dataset``, a ``UsageError`` is raised before any item runs.
        seed: makes the sampling of every turn repeatable. Each turn of each attempt of each sample
            has its own seed, which is derived from this one. The seed may also be given in
            ``sampling``, by ``open_session``, or in ``session.generate``.
        **session: the arguments of ``Client.session`` for all items. ``open_session`` can override
            them. They are ``tools``, ``tool_choice``, ``renderer``, ``reward_weights``, ``lora``,
            ``template``, ``chat_template_kwargs``, ``continue_final_message``, ``allow_rewrite``,
            ``sampling`` and its fields. The agent may pass other sampling parameters for a turn.

    With ``processes``:

    * Turns still go through this process. A thread of this process that computes in Python delays
      them: see ``sys.setswitchinterval``.
    * The processes get the agent by value, with all objects that it refers to, and import modules
      themselves. They get items as msgpack decodes them: tuples and sets become lists, and
      dataclasses become mappings.
    * The output of the agents goes to the output of this process. Their exceptions become
      ``RemoteError`` in this process.
    * A turn is counted in ``metrics`` when a sample of its process ends.
    * A process that dies is replaced, and its samples run again. An item is dropped when one of its
      samples has lost its process four times.
    * A process whose event loop is blocked for too long is killed and handled like a crash. The
      limit is 300 s, or ``timeout`` if that is less, but at least 10 s.
    * ``seed`` applies to the sampling of the engines and not to random numbers of the agents.

    With ``gateway``:

    * Each process that runs agents answers their requests on its own event loop. An agent that
      blocks, as most clients without ``async`` do, must therefore run in a thread: ``await
      asyncio.to_thread(agent, session.base_url, session.api_key)``. With ``processes``, each
      process has enough threads. On this event loop, ``loop.set_default_executor`` sets their
      number.
    * Sampling parameters of the run are the defaults of all requests.
    * After a request has ended, the session continues from its last turn. So ``session.reward``
      and the returned reward apply to this turn.

    Raises:
        UsageError: an argument is wrong.
    """
    config = RolloutConfig(
        agent=agent,
        dataset=dataset,
        group_size=group_size,
        concurrency=concurrency,
        batch_size=batch_size,
        max_staleness=max_staleness,
        timeout=timeout,
        on_error=on_error,
        retries=retries,
        max_failure_rate=max_failure_rate,
        min_group=min_group,
        keep=keep,
        open_session=open_session or (optional_prompt if gateway else session_arguments),
        ahead=ahead,
        processes=processes,
        gateway=gateway,
        progress=progress,
        state=load_state(state) if isinstance(state, (str, os.PathLike)) else state,
        seed=seed,
        session=session,
    )
    return Rollout(client, config)


class Rollout:
    """A run of an agent over a data set; see ``rollout``.

    A loop ``async for group in run`` starts the run and is enough for most programs. ``async with
    run`` also ends the remaining work when the block is left early. If several consumers wait at
    the same time, they are served in order.
    """

    def __init__(self, client: Client, config: RolloutConfig) -> None:
        _check_pool(client, config)
        self.batch_size = config.batch_size
        self._runner = Runner(client, config)
        self.errors = self._runner.failures.errors
        """The latest failures: exceptions of the agent, and ``DeadlineExceeded`` of late agents."""
        self._entered = False
        self._closed = False
        self._looped = False
        """Whether a loop over the run, without ``async with``, has started it."""

    def __repr__(self) -> str:
        begun = "running" if self._runner.begun else "not begun"
        state = "closed" if self._closed else begun
        metrics = self.metrics
        return (
            f"<Rollout, {state}: {metrics.groups_taken} groups taken, "
            f"{metrics.groups_ready} ready, {metrics.samples_running} samples running>"
        )

    # --- start and end ----------------------------------------------------------------------------

    async def __aenter__(self) -> Self:
        if self._closed or self._entered:
            raise UsageError("a run is begun once; make another one")
        self._entered = True
        try:
            await self._runner.start()
        except BaseException:
            self._closed = True
            raise
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Cancel running samples and discard ready groups. Safe to call again."""
        self._closed = True
        self._runner.delivery.close()
        try:
            await self._runner.stop()
        finally:
            self._runner.delivery.notify()

    def __enter__(self) -> NoReturn:
        raise UsageError("use 'async with', or the rollout of a client from sglrl.blocking")

    def __exit__(self, *exc: object) -> None: ...

    def __await__(self) -> NoReturn:
        raise UsageError("use 'async with sglrl.rollout(...) as run', or 'async for' over the run")

    # --- delivery of groups -----------------------------------------------------------------------

    def __iter__(self) -> NoReturn:
        raise UsageError("use 'async for', or the rollout of a client from sglrl.blocking")

    def __aiter__(self) -> AsyncIterator[Group]:
        if self._closed or self._looped:
            raise UsageError(
                "this run has ended; to go on after leaving a loop over it, enter it with 'async "
                "with', or make another run with state=run.state_dict()"
            )
        return self if self._runner.begun else self._groups()

    async def _groups(self) -> AsyncGenerator[Group, None]:
        self._looped = True
        async with self:
            while groups := await self.take(1):
                yield groups[0]

    async def __anext__(self) -> Group:
        groups = await self.take(1)
        if not groups:
            raise StopAsyncIteration
        return groups[0]

    async def batches(self) -> AsyncGenerator[list[Group], None]:
        """Yield lists of ``batch_size`` groups. The last list may be shorter.

        Raises:
            WeightsLost: see ``take``. Another ``batches()`` continues where this one ended.
            UsageError: the run has no ``batch_size``, or was not entered with ``async with``.
        """
        if self.batch_size is None:
            raise UsageError("batches() needs rollout(..., batch_size=)")
        while batch := await self.take(self.batch_size):
            yield batch

    async def take(self, n: int = 1, *, timeout: float | None = None) -> list[Group]:
        """Return the next ``n`` groups.

        The list is shorter at the end of the data set, and empty when there are no more groups. The
        ready group with the oldest tokens comes first. A cancelled or late call loses nothing: the
        next call returns its groups. Calls that wait at the same time, including calls by
        ``batches``, are served one after the other.

        Raises:
            DeadlineExceeded: fewer than ``n`` groups were ready within ``timeout`` seconds. With
                ``max_staleness``, new groups need new weights now and then.
            WeightsLost: every process that had the current weights was lost. The run continues
                after an update of all weights.
            Exception: an exception of the agent ended the run, for example with on_error="raise".
            UsageError: the run has not begun.
        """
        if type(n) is not int or n < 1:
            raise UsageError(f"take at least 1 group, got {n!r}")
        check_timeout(timeout)
        if not self._runner.begun:
            raise UsageError(
                "the run has not begun; use 'async with run' ('with run', of a blocking client)"
            )
        return await self._runner.delivery.take(n, timeout)

    # --- pause, state, metrics --------------------------------------------------------------------

    async def pause(self, *, timeout: float | None = None) -> None:
        """Let no further turn begin, and wait until all running turns have ended.

        The engines then have no work for the sessions of this run. Agents wait at their next turn.
        Tools continue, and so do calls that agents make without their session.

        Raises:
            DeadlineExceeded: turns still run after ``timeout`` seconds. The run stays paused.
            WeightsLost: turns still run, and every process that had the current weights was lost.
                The run stays paused.
            UsageError: ``resume`` was called before the turns had ended.
        """
        check_timeout(timeout)
        await self._runner.pause(timeout)

    def resume(self) -> None:
        """Continue after ``pause``."""
        self._runner.resume()

    def state_dict(self) -> dict[str, Any]:
        """Return which items are finished, for ``rollout(..., state=)`` over the same data set.

        An item is finished when its group was taken, filtered out or dropped. All samples of other
        items run again in the later run. The state also has the length and a fingerprint of the
        data set.
        """
        return self._runner.state_dict()

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write ``state_dict()`` to a file, for ``rollout(..., state=path)`` in a later run.

        Save after the trainer has used all groups that it took, because these count as finished.
        The file is replaced in one step, so a crash leaves the old or the new state.

        Raises:
            OSError: the folder is not writable. The file is unchanged.
        """
        save_state(path, self.state_dict())

    @property
    def concurrency(self) -> int:
        """The current maximum of samples that run at a time."""
        return self._runner.limit.value

    @property
    def metrics(self) -> RolloutMetrics:
        """A snapshot of the run's metrics."""
        return self._runner.metrics.snapshot()


def _check_pool(client: Client, config: RolloutConfig) -> None:
    """Check the arguments that depend on the pool.

    Raises:
        InvalidRequest: a sampling parameter is wrong, so every sample would fail.
        UsageError: a group has more samples than can run.
    """
    requests = client.requests
    given = config.session
    values = {k: v for k, v in given.items() if k in SamplingOptions.__annotations__}
    requests.samplings.prepare(given.get("sampling"), values)
    most = sum(requests.driver.capacity(None))
    if config.concurrency is not None:
        # With a fixed concurrency, the samples of a group need not all run at the same time.
        most = max(most, _MAX_SAMPLES)
    if config.group_size > most:
        raise UsageError(
            f"group_size={config.group_size:,} is too large: at most {most:,} samples of an item "
            "can run. Give concurrency= if there are fewer calls that the pool can take (the "
            "workers' windows and max_queue), or sample the item in several groups"
        )
