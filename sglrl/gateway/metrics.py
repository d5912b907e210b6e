"""The metrics of a gateway and of its pool, for Prometheus."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from typing import Final

import prometheus_client as prometheus
from prometheus_client.exposition import choose_encoder
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from ..client.client import Client
from ..control.prometheus import PoolMetrics
from ..driver.driver import now
from ..inference.completion import Completion
from .answers import token_counts
from .dialect import TurnRequest

METRICS: Final = "/metrics"
_PREFIX: Final = "sglrl_gateway_"
_FIRST_TOKEN_SECONDS: Final = (
    0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0,
)  # fmt: skip
_TURN_SECONDS: Final = (
    0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0,
)  # fmt: skip
"""Upper bounds of the buckets of both histograms, in seconds. A turn may take minutes."""


class Metrics:
    """Counts the requests and turns of one gateway, in a Prometheus registry of its own.

    Args:
        client: the client of the pool.
    """

    def __init__(self, client: Client) -> None:
        self._registry = prometheus.CollectorRegistry()
        self._requests = self._counter("requests", "HTTP requests.", "endpoint", "status")
        self._choices = self._counter("choices", "Sampled choices.", "finish_reason")
        self._prompt = self._counter("prompt_tokens", "Prompt tokens of finished turns.")
        self._cached = self._counter("cached_tokens", "Prompt tokens from the prefix cache.")
        self._generated = self._counter("generation_tokens", "Sampled tokens of finished turns.")
        self._first = self._histogram(
            "time_to_first_token_seconds",
            "From the request to the first token, of streams.",
            _FIRST_TOKEN_SECONDS,
        )
        self._seconds = self._histogram(
            "e2e_request_latency_seconds", "From the request to the last token.", _TURN_SECONDS
        )
        self._running = self._gauge("running_requests", "Requests that are being sampled.")
        self._sessions = self._gauge("open_sessions", "Open sessions.")
        self._pool = PoolMetrics(client)
        self._registry.register(self._pool)

    def answered(self, endpoint: str, status: int) -> None:
        """Count a request.

        Args:
            endpoint: the path of the endpoint, without a session and without ids.
            status: the HTTP status. The status of a stream is known when the stream begins.
        """
        self._requests.labels(endpoint, str(status)).inc()

    def turn_ended(
        self, requests: Sequence[TurnRequest], began: float, task: asyncio.Task[list[Completion]]
    ) -> None:
        """Count the choices of a turn.

        Args:
            requests: the requests of the turn, one for each prompt.
            began: the time at which the HTTP request was read, on the driver's clock.
            task: the finished task, which returns the choices.
        """
        if task.cancelled() or task.exception() is not None:
            reason = "cancelled" if task.cancelled() else "error"
            self._choices.labels(reason).inc(sum(one.choices for one in requests))
            return
        completions = task.result()
        start = 0
        for request in requests:
            choices = completions[start : start + request.choices]
            start += request.choices
            prompt, generated, cached = token_counts(choices)
            self._prompt.inc(prompt)
            self._generated.inc(generated)
            self._cached.inc(cached)
        for one in completions:
            self._choices.labels(one.finish_reason).inc()
        self._seconds.observe(now() - began)
        # Without a stream, workers report several tokens at a time, so the time of the first token
        # is not known.
        if requests[0].stream and (first := [one.first_at for one in completions if one.first_at]):
            self._first.observe(min(first) - began)

    async def exposition(self, accept: str, running: int, sessions: int) -> tuple[bytes, str]:
        """Return all metrics as text, and the media type of the text.

        Args:
            accept: the header "accept" of the request.
            running: number of turns that are running.
            sessions: number of open sessions.
        """
        await self._pool.take()
        self._running.set(running)
        self._sessions.set(sessions)
        encode, media_type = choose_encoder(accept)
        return encode(self._registry), media_type

    def _counter(self, name: str, what: str, *labels: str) -> prometheus.Counter:
        return prometheus.Counter(_PREFIX + name, what, labels, registry=self._registry)

    def _gauge(self, name: str, what: str, *labels: str) -> prometheus.Gauge:
        return prometheus.Gauge(_PREFIX + name, what, labels, registry=self._registry)

    def _histogram(self, name: str, what: str, buckets: Sequence[float]) -> prometheus.Histogram:
        return prometheus.Histogram(_PREFIX + name, what, buckets=buckets, registry=self._registry)


def merged(texts: Sequence[str]) -> bytes:
    """Return the metrics of several processes as one text, with the process number as a label.

    Args:
        texts: the metrics of each process, in the order of the process numbers.
    """
    registry = prometheus.CollectorRegistry()
    registry.register(_Merged(texts))
    return bytes(prometheus.generate_latest(registry))


class _Merged(Collector):  # type: ignore[misc]
    def __init__(self, texts: Sequence[str]) -> None:
        self._texts = texts

    def collect(self) -> Iterable[prometheus.Metric]:
        merged: dict[str, prometheus.Metric] = {}
        for process, text in enumerate(self._texts):
            for family in text_string_to_metric_families(text):
                made = prometheus.Metric(family.name, family.documentation, family.type)
                samples = merged.setdefault(family.name, made).samples
                for sample in family.samples:
                    labels = {**sample.labels, "process": str(process)}
                    samples.append(sample._replace(labels=labels))
        return merged.values()
