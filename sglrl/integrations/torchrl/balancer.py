"""``LoadBalancer``: selects replicas of a pool, like TorchRL's load balancer for ``AsyncVLLM``.

A pool already routes all calls of all clients itself. This class is for programs that choose the
replica of each call.
"""

from __future__ import annotations

import asyncio
import random
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, Protocol

import numpy as np

from ...core.seeds import MAX_SEED, derived_seed
from ...errors import InvalidRequest, UsageError
from ...inference.number_checks import check_integer
from ...inference.sampling import SamplingParams, own_names
from .sglang_format import plain_prompts

STRATEGIES: Final = ("prefix-aware", "requests", "kv-cache", "round-robin")


class Service(Protocol):
    """The parts of ``AsyncSGLang`` that the balancer uses."""

    client: Any
    num_replicas: int


class LoadBalancer:
    """Selects a replica for a prompt. Among equally good replicas, it selects one at random.

    Args:
        service: an ``AsyncSGLang``. A list of actors, as for TorchRL's class, is not accepted.
        strategy: one strategy, or several in order of preference. "prefix-aware" selects the same
            replica for prompts with the same prefix. If this replica is overloaded, "requests"
            applies. Without a prompt, the next strategy applies. "requests" selects the replica
            with the fewest unfinished requests. "kv-cache" selects the replica with the lowest use
            of the KV cache. "round-robin" selects the replicas in turn. None: "prefix-aware", then
            "requests".
        prefix_length: the length of the prefix in tokens, or in words if the prompt is a text.
        overload_threshold: a replica with several unfinished requests is overloaded if their
            number exceeds this factor times the mean of all replicas.

    Raises:
        ValueError: ``service`` is not an ``AsyncSGLang``, a strategy is unknown, or no strategy is
            given.
    """

    def __init__(
        self,
        service: Service,
        strategy: str | Sequence[str] | None = None,
        prefix_length: int = 8,
        overload_threshold: float = 1.5,
    ) -> None:
        if not hasattr(type(service), "num_replicas"):
            raise UsageError(
                f"LoadBalancer needs an AsyncSGLang of sglrl.integrations.torchrl, got {service!r}"
            )
        if strategy is None:
            strategy = ("prefix-aware", "requests")
        self.strategies = [strategy] if isinstance(strategy, str) else list(strategy)
        for name in self.strategies:
            if name not in STRATEGIES:
                raise ValueError(f"Invalid strategy '{name}'. Must be one of {set(STRATEGIES)}")
        if not self.strategies:
            raise ValueError("At least one strategy must be provided")
        self.strategy = self.strategies[0]
        self.prefix_length = prefix_length
        self.overload_threshold = overload_threshold
        self._service = service
        self._turn = 0

    def select_actor(self, prompt: Any = None, request_context: Any = None) -> int:
        """Return the index of a replica.

        Args:
            prompt: a text, token ids, vLLM's ``TextPrompt`` or ``TokensPrompt``, or None.
            request_context: unused, here and in TorchRL.
        """
        return self.select_actors([prompt])[0]

    def select_actors(self, prompts: Sequence[Any]) -> list[int]:
        """Return a replica index for each prompt of a batch that is sent at once.

        Each prompt counts as a pending request of its replica.
        """
        stats = {replica.worker: replica.engine for replica in self._service.client.stats()}
        if not stats:
            raise ValueError("No actors available for selection")
        pending = {w: stats[w].running + stats[w].waiting for w in sorted(stats)}
        usage = {w: stats[w].kv_usage for w in sorted(stats)}
        chosen = []
        for prompt in prompts:
            worker = self._select(plain_prompts(prompt), pending, usage)
            pending[worker] += 1
            chosen.append(worker)
        return chosen

    def generate(self, what: str, inputs: Sequence[Any], arguments: Mapping[str, Any]) -> list[Any]:
        """Call ``client.generate`` for each input at the same time, on the selected replica.

        Args:
            what: the name of the argument that the inputs are for: "prompt" or "input_ids".
            arguments: the other arguments of ``client.generate``.
        """
        client = self._service.client
        workers = self.select_actors(inputs)

        async def all_of_them() -> list[Any]:
            tasks = [
                asyncio.ensure_future(
                    client.source.generate(
                        **{what: given}, worker=worker, **_with_seed(arguments, number)
                    )
                )
                for number, (given, worker) in enumerate(zip(inputs, workers, strict=True))
            ]
            try:
                return list(await asyncio.gather(*tasks))
            finally:
                for task in tasks:
                    task.cancel()

        results: list[Any] = client.wait(all_of_them())
        return results

    def _select(self, prompt: Any, pending: dict[int, int], usage: dict[int, float]) -> int:
        for strategy in self.strategies:
            if strategy == "requests":
                break
            if strategy == "kv-cache":
                return _lowest(pending, lambda worker: (usage[worker], pending[worker]))
            if strategy == "round-robin":
                workers = sorted(pending)
                worker = workers[self._turn % len(workers)]
                self._turn = (self._turn + 1) % len(workers)
                return worker
            prefix = b"" if prompt is None else self._prefix(prompt)
            if prefix:
                workers = sorted(pending)
                worker = workers[zlib.crc32(prefix) % len(workers)]
                mean = sum(pending.values()) / len(pending)
                if pending[worker] <= max(1.0, mean * self.overload_threshold):
                    return worker
                break
        return _lowest(pending, lambda worker: (pending[worker],))

    def _prefix(self, prompt: Any) -> bytes:
        if isinstance(prompt, str):
            return " ".join(prompt.split()[: self.prefix_length]).encode(errors="replace")
        try:
            return np.asarray(prompt[: self.prefix_length], dtype="<i4").tobytes()
        except OverflowError as error:
            raise InvalidRequest(f"a token id is outside of every vocabulary: {error}") from None

    def get_stats(self) -> dict[str, Any]:
        """Return the settings, and the unfinished requests and cache use of every replica."""
        return {
            "strategies": self.strategies,
            "primary_strategy": self.strategy,
            "num_actors": self._service.num_replicas,
            "prefix_length": self.prefix_length,
            "overload_threshold": self.overload_threshold,
            "round_robin_index": self._turn,
            "actor_stats": [
                {
                    "actor_index": replica.worker,
                    "pending_requests": replica.engine.running + replica.engine.waiting,
                    "cache_usage": replica.engine.kv_usage,
                }
                for replica in self._service.client.stats()
            ],
        }


def _with_seed(arguments: Mapping[str, Any], number: int) -> dict[str, Any]:
    """Return the arguments for prompt ``number`` of a batch. Each prompt has its own seed."""
    values = own_names(arguments)
    sampling = values.get("sampling")
    seed = values.get("seed")
    if seed is None and isinstance(sampling, SamplingParams):
        seed = sampling.seed
    if number and seed is not None:
        check_integer("seed", seed, 0, MAX_SEED)
        values["seed"] = derived_seed(seed, "prompt", number)
    return values


def _lowest(workers: Iterable[int], load: Callable[[int], tuple[float, ...]]) -> int:
    """Return the worker with the lowest load. Among equal loads, select a worker at random."""
    loads = {worker: load(worker) for worker in workers}
    lowest = min(loads.values())
    return random.choice([worker for worker, one in loads.items() if one == lowest])
