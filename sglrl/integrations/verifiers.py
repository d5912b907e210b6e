"""Run environments of verifiers in ``sglrl.rollout``: tasks, harnesses, tools and several seats.

The harness of an environment sends its requests to verifiers' interception server, which relays
them to the gateway of the rollout. The gateway makes each request a token-exact turn. verifiers
gives each trace an id and sends it in the header ``X-Session-ID``, by which the gateway finds the
session. Written for verifiers 0.4 (https://github.com/PrimeIntellect-ai/verifiers).
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator, Mapping
from contextlib import AsyncExitStack
from importlib.util import find_spec
from typing import Any, Final, Self

from ..config import install
from ..errors import SglrlError, UsageError
from ..sessions.session import Session

__all__ = ["EpisodeFailed", "VerifiersAgent", "VerifiersEnv"]

_NO_KEY: Final = "SGLRL_NO_API_KEY"
"""A variable that is not set. verifiers reads the API key of an endpoint from the environment."""


class EpisodeFailed(SglrlError):
    """An episode of verifiers has failed. The message has verifiers' own errors."""


class VerifiersEnv:
    """An environment of verifiers, for ``sglrl.rollout`` with ``gateway=True``.

    ::

        env = VerifiersEnv({"taskset": {"id": "my_tasks"}, "agent": {"harness": {"id": "null"}}})
        run = sglrl.rollout(client, env.agent, env.tasks(), gateway=True, group_size=8)

    Each process that runs agents makes its own ``verifiers.v1.Env``, and holds its resources while
    the run is open.

    Args:
        config: the configuration of the environment, as in the block ``[env]`` of verifiers' files,
            or an ``EnvConfig``.

    Attributes:
        config: the checked configuration, an ``EnvConfig`` of verifiers.
        agent: the agent for ``sglrl.rollout``, which makes a ``VerifiersAgent``.

    Raises:
        UsageError: verifiers 0.4 is not installed, ``retries`` are set, or a seat has a ``model``
            and no ``client``.
        ValueError: verifiers rejects the configuration. It may raise other errors too.
    """

    def __init__(self, config: Any) -> None:
        if find_spec("verifiers") is None or find_spec("verifiers.v1") is None:
            raise UsageError(f"verifiers 0.4 is not installed: {install('verifiers')}")
        import verifiers.v1 as vf

        # verifiers changes mappings when it checks them.
        self.config = vf.resolve_env_config(copy.deepcopy(config))
        seats = {name: one for name, one in self.config if isinstance(one, vf.AgentConfig)}
        for where, retries in [
            ("retries", self.config.retries),
            *[(f"{name}.retries", seat.retries) for name, seat in seats.items()],
        ]:
            if retries.max_retries or retries.rules:
                raise UsageError(f"{where} has no effect: pass retries= to sglrl.rollout instead")
        for name, seat in seats.items():
            if seat.model is not None and seat.client is None:
                raise UsageError(
                    f"{name}.model={seat.model!r} needs {name}.client: without it, the model of "
                    "the rollout plays this seat"
                )
        self.agent = functools.partial(VerifiersAgent, self.config)

    def tasks(self, select: Mapping[str, Any] | None = None) -> Iterator[dict[str, Any]]:
        """Yield the items of the data set: ``{"task": ...}`` with the data of a task, as for JSON.

        Args:
            select: verifiers' ``SelectConfig``, for example ``{"shuffle": True, "limit": 100}``.
                None: all tasks, in their order.
        """
        import verifiers.v1 as vf

        tasks = vf.load_taskset(self.config.taskset)
        for task in tasks.select(vf.SelectConfig.model_validate(dict(select or {}))):
            yield {"task": task.data.model_dump(mode="json")}


class VerifiersAgent:
    """Plays one episode of a verifiers environment for each sample. Made by ``VerifiersEnv.agent``.

    A trace whose seat is trainable becomes a conversation of the session. Its rewards, with their
    weights, are rewards of its last turn. Turns of other seats are in no trajectory. All traces are
    listed in ``metadata["traces"]``.

    Args:
        config: the checked ``EnvConfig``.
    """

    def __init__(self, config: Any) -> None:
        import verifiers.v1 as vf

        self._env = vf.load_environment(config)
        self._stack = AsyncExitStack()
        self._model = ""

    async def __aenter__(self) -> Self:
        await self._stack.enter_async_context(self._env.serving())
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._stack.aclose()

    async def __call__(self, session: Session, item: Mapping[str, Any]) -> float | None:
        """Play an episode.

        Returns:
            None, because the rewards are those of turns, or 0.0 if the environment has no rewards.

        Raises:
            EpisodeFailed: the episode or a trace has errors, or a trainable seat sampled no turn.
            UsageError: the item is not one of ``VerifiersEnv.tasks``, or the run has no gateway.
        """
        import verifiers.v1 as vf

        root = session.base_url.partition("/sessions/")[0] + "/v1"
        # One endpoint for all samples, because verifiers keeps a client for each endpoint.
        endpoint = vf.EvalClientConfig(base_url=root, api_key_var=_NO_KEY)
        self._model = self._model or await _model_at(root)
        forks: dict[str, Session] = {}

        def on_trace(trace: Any) -> None:
            if trace.agent.trainable and trace.agent.config.client == endpoint:
                forks[trace.id] = session.fork()
                forks[trace.id].accept_header(trace.id)

        # verifiers would impose its sampling parameters on the requests. There are none, so those
        # of the run apply, unless a seat or a harness has its own.
        context = vf.ModelContext(model=self._model, client=endpoint)
        episode = await self._env.run_episode(self._task(item), context, on_trace=on_trace)
        if not self._env.complete(episode):
            raise EpisodeFailed(_reason(episode))
        if not forks:
            raise EpisodeFailed("the rollout's model has played no trainable seat of the episode")
        session.metadata["traces"] = [_record(trace) for trace in episode.traces]
        for trace in episode.traces:
            if trace.id in forks:
                _reward(forks[trace.id], trace)
        return None if session.rewarded else 0.0

    def _task(self, item: Mapping[str, Any]) -> Any:
        """Return the task of an item, made as verifiers' own server makes it."""
        if not isinstance(item, Mapping) or not isinstance(item.get("task"), Mapping):
            raise UsageError(f"the items must be those of VerifiersEnv.tasks, got {item!r:.200}")
        kind = type(self._env.taskset).task_type()
        data = kind.data_type().model_validate(item["task"])
        return kind(data, self._env.config.taskset.task)


async def _model_at(root: str) -> str:
    """Return the name of the gateway's model. Compacting harnesses compare it."""
    import httpx

    async with httpx.AsyncClient() as client:
        answer = await client.get(f"{root}/models", timeout=60)
    return str(answer.raise_for_status().json()["data"][0]["id"])


def _reward(fork: Session, trace: Any) -> None:
    """Add the rewards of a trace to its last turn. ``reward_weights`` of the run take precedence.

    Raises:
        EpisodeFailed: the trace has no turn.
    """
    if fork.position.last < 0:
        raise EpisodeFailed(f"the seat {trace.agent.name!r} has sampled no turn")
    weights = fork.spec.options.reward_weights
    for name, reward in trace.rewards.items():
        if reward is not None:
            fork.reward(reward.score, name, weight=None if name in weights else reward.weight)


def _record(trace: Any) -> dict[str, Any]:
    """Return what ``metadata["traces"]`` has of a trace."""
    rewards = {name: one for name, one in trace.rewards.items() if one is not None}
    return {
        "seat": trace.agent.name,
        "trainable": trace.agent.trainable,
        "reward": trace.reward,
        "rewards": {name: {"score": r.score, "weight": r.weight} for name, r in rewards.items()},
        "metrics": {name: one for name, one in trace.metrics.items() if one is not None},
        "turns": trace.num_turns,
        "truncated": trace.is_truncated,
        "stop_condition": trace.stop_condition,
    }


def _reason(episode: Any) -> str:
    """Return the errors of an episode and its traces as one message."""
    found = [("the episode", error) for error in episode.errors]
    found += [(f"the seat {t.agent.name!r}", error) for t in episode.traces for error in t.errors]
    texts = [f"{where} has failed: {error.type}: {error.message}" for where, error in found]
    return "; ".join(texts) or "verifiers reports that the episode is not complete"
