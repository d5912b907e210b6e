"""The metrics of a pool for Prometheus: one collector, for ``launch(metrics_port=)`` and gateways.

A metric has the name that SGLang's own server gives it where the meaning is the same. All other
names begin with ``sglrl_``. A metric of an engine has the label "worker".
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any, Final, Protocol

import prometheus_client
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from ..core.members import GONE
from ..errors import SglrlError, UsageError
from .snapshot import Snapshot, WorkerSnapshot

logger = logging.getLogger("sglrl.metrics")

_SECONDS: Final = 5.0
"""Time limit for a snapshot. By default, Prometheus waits 10 s for all metrics."""
_Value = float | None


class _Pool(Protocol):
    async def snapshot(self) -> Snapshot: ...


def families(snapshot: Snapshot) -> Iterator[Any]:
    """Yield the metrics of a snapshot."""
    workers = [one for one in snapshot.workers if one.info.state not in GONE]
    engines = [(str(one.info.id), one.engine) for one in workers if one.engine is not None]
    gauge, counter = GaugeMetricFamily, CounterMetricFamily
    for kind, name, what, attribute in (
        (gauge, "sglang:num_running_reqs", "Requests that an engine runs.", "running"),
        (gauge, "sglang:num_queue_reqs", "Requests that wait at an engine.", "waiting"),
        (gauge, "sglang:token_usage", "Share of the KV cache in use, 0..1.", "kv_usage"),
        (gauge, "sglang:num_used_tokens", "Tokens of requests in the KV cache.", "kv_tokens"),
        (gauge, "sglang:max_total_num_tokens", "Tokens that fit the KV cache.", "kv_capacity"),
        (gauge, "sglang:cache_hit_rate", "Share of cached prompt tokens.", "cache_hit_rate"),
        (gauge, "sglang:gen_throughput", "Sampled tokens per second.", "tokens_per_second"),
        (counter, "sglang:prompt_tokens", "Prompt tokens of an engine.", "prompt_tokens"),
        (counter, "sglang:cached_tokens", "Prompt tokens from the cache.", "cached_tokens"),
        (counter, "sglang:generation_tokens", "Sampled tokens.", "generated_tokens"),
    ):
        values = ((worker, getattr(engine, attribute)) for worker, engine in engines)
        yield _by("worker", kind, name, what, values)
    yield from _of_workers(workers)
    states = Counter(one.info.state for one in snapshot.workers)
    yield _by("state", GaugeMetricFamily, "sglrl_workers", "Workers by state.", states.items())
    queue = snapshot.queue
    yield GaugeMetricFamily("sglrl_queued_calls", "Calls that wait in the driver.", queue.calls)
    yield GaugeMetricFamily("sglrl_queued_bytes", "Bytes of these calls.", queue.bytes)
    yield GaugeMetricFamily(
        "sglrl_weight_version", "Policy version of the pool.", snapshot.weight_version
    )
    yield from _of_last_update(snapshot)
    yield from _of_rollouts(snapshot)


def _of_workers(workers: Iterable[WorkerSnapshot]) -> Iterator[Any]:
    every = [(str(one.info.id), one) for one in workers]
    yield _by(
        "worker",
        GaugeMetricFamily,
        "sglrl_worker_weight_version",
        "Policy version of a worker.",
        ((worker, one.info.weight_version) for worker, one in every),
    )
    yield _by(
        "worker",
        GaugeMetricFamily,
        "sglrl_worker_silence_seconds",
        "Seconds since the last sign of life.",
        ((worker, one.history.silence) for worker, one in every),
    )
    for name, what, attribute in (
        ("sglrl_worker_restarts", "Replacements of a worker.", "restarts"),
        ("sglrl_worker_moved_calls", "Calls that continued on other workers.", "moved_calls"),
        ("sglrl_worker_preempted_requests", "Requests removed from the cache.", "preempted"),
    ):
        values = ((worker, getattr(one.history, attribute)) for worker, one in every)
        yield _by("worker", CounterMetricFamily, name, what, values)


def _of_last_update(snapshot: Snapshot) -> Iterator[Any]:
    if snapshot.updates:
        for name, value in snapshot.updates[-1].flat("").items():
            if name != "version":
                yield GaugeMetricFamily(
                    f"sglrl_update_{name}", f"{name} of the latest weight update.", value
                )


def _of_rollouts(snapshot: Snapshot) -> Iterator[Any]:
    """The metrics of ``RolloutMetrics.flat``, with the number of the rollout as a label."""
    made: dict[str, GaugeMetricFamily] = {}
    for number, rollout in enumerate(snapshot.rollouts):
        for name, value in rollout.metrics.flat("").items():
            # Names of rewards are texts of the program.
            if not math.isnan(value) and not name.startswith("named_rewards/"):
                family = made.setdefault(
                    name,
                    GaugeMetricFamily(
                        f"sglrl_rollout_{name.replace('/', '_')}",
                        f"{name} of RolloutMetrics.",
                        labels=["rollout"],
                    ),
                )
                family.add_metric([str(number)], value)
        for name, value in rollout.metrics.named_rewards.items():
            family = made.setdefault(
                "named reward",
                GaugeMetricFamily(
                    "sglrl_rollout_named_reward", "Mean rewards.", labels=["rollout", "name"]
                ),
            )
            family.add_metric([str(number), name], value)
    yield from made.values()


def _by(
    label: str, kind: Any, name: str, what: str, values: Iterable[tuple[str, _Value]]
) -> GaugeMetricFamily | CounterMetricFamily:
    family = kind(name, what, labels=[label])
    for text, value in values:
        if value is not None:
            family.add_metric([text], value)
    return family


class PoolMetrics(Collector):  # type: ignore[misc]
    """Collects the metrics of one pool from the snapshot that was taken last.

    Args:
        pool: a client of the pool.
    """

    def __init__(self, pool: _Pool) -> None:
        self._pool = pool
        self._snapshot: Snapshot | None = None

    async def take(self) -> None:
        """Take a snapshot. If the pool does not answer in time, there are no metrics of it."""
        self._snapshot = None
        try:
            async with asyncio.timeout(_SECONDS):
                self._snapshot = await self._pool.snapshot()
        except (SglrlError, TimeoutError):
            # The metrics of others are needed most while a pool does not answer.
            return
        except Exception:
            logger.exception("no metrics of the pool, because it could not be described")

    def collect(self) -> Iterator[Any]:
        if self._snapshot is not None:
            yield from families(self._snapshot)


class MetricsServer:
    """Serves the metrics of a pool at ``/metrics``, in a thread of prometheus-client.

    Each request takes one snapshot on the event loop of the pool. Between requests, it does
    nothing.

    Args:
        pool: the client of the pool.
        host, port: the address to listen at.

    Raises:
        UsageError: the address cannot be used.
    """

    def __init__(self, pool: _Pool, host: str, port: int) -> None:
        self._loop = asyncio.get_running_loop()
        self._metrics = PoolMetrics(pool)
        registry = prometheus_client.CollectorRegistry()
        registry.register(_Asking(self._metrics, self._loop))
        try:
            self._server, self._thread = prometheus_client.start_http_server(port, host, registry)
        except OSError as error:
            raise UsageError(f"metrics_port: cannot listen at {host}:{port}: {error}") from None

    async def close(self) -> None:
        # The server may wait for this event loop, so the loop must not wait for the server.
        await asyncio.to_thread(self._server.shutdown)
        self._server.server_close()


class _Asking(Collector):  # type: ignore[misc]
    """Takes a snapshot whenever the thread of the server collects the metrics."""

    def __init__(self, metrics: PoolMetrics, loop: asyncio.AbstractEventLoop) -> None:
        self._metrics = metrics
        self._loop = loop

    def describe(self) -> list[Any]:
        # Without this, the registry would collect the metrics when it is made, on the loop.
        return []

    def collect(self) -> Iterator[Any]:
        taken = asyncio.run_coroutine_threadsafe(self._metrics.take(), self._loop)
        try:
            taken.result(_SECONDS + 1)
        except TimeoutError:
            # The loop is blocked.
            taken.cancel()
            return
        yield from self._metrics.collect()
