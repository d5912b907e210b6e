"""Async-first actors and SGLang workers for reinforcement learning of language models.

::

    async with sglrl.launch("Qwen/Qwen3-8B", replicas=4) as client:
        completion = await client.generate("2+2=", max_new_tokens=8, logprobs=True)

Names are imported when first used, so ``import sglrl`` itself costs next to nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from . import errors as errors
    from .actors.actor import Actor, endpoint
    from .actors.spawning import ActorHandle, spawn
    from .client.client import Client
    from .config import GatewayOptions
    from .config import __version__ as __version__
    from .control.engines import WorkerStats
    from .control.snapshot import (
        GatewaySnapshot,
        RolloutSnapshot,
        SessionSnapshot,
        Snapshot,
        WorkerSnapshot,
    )
    from .core.rollout_metrics import RolloutMetrics
    from .driver.worker_info import HostInfo, QueueInfo, WorkerHistory, WorkerInfo
    from .errors import (
        Closed,
        ContextFull,
        DeadlineExceeded,
        EngineError,
        InvalidAdapter,
        InvalidKeys,
        InvalidRequest,
        InvalidWeights,
        MessageTooLarge,
        ModelError,
        NotEnoughDevices,
        Overloaded,
        ProtocolError,
        RemoteError,
        RolloutFailed,
        SettingsMismatch,
        SglrlError,
        ToolError,
        UnknownAdapter,
        UnknownEndpoint,
        UpdateInProgress,
        UsageError,
        WeightsLost,
        WeightUpdateError,
        WorkerError,
        WorkerLost,
        WorkerStartError,
    )
    from .gateway.serve import Gateway, GatewaySession, serve
    from .hosts.hosts import Hosts
    from .inference.chunk import Chunk
    from .inference.completion import (
        Completion,
        NextTokenLogprobs,
        ScoreLogprobs,
        Scores,
        Timing,
        TopLogprobs,
        VersionSpan,
    )
    from .inference.message import AssistantMessage, ToolCall
    from .inference.sampling import SamplingParams
    from .inference.sampling_mask import SamplingMask
    from .inference.stream import Stream
    from .launching.blocking import BlockingClient, BlockingSession, blocking
    from .launching.blocking_rollout import BlockingRollout
    from .launching.launch import launch
    from .launching.local_models import local_model
    from .launching.running import run
    from .launching.tiny_model import tiny_model
    from .remote.client import connect
    from .rollouts.evaluation import Evaluation, evaluate
    from .rollouts.group import Group
    from .rollouts.run import Rollout, rollout
    from .sessions.rewards import Reward
    from .sessions.session import Session
    from .sessions.trajectory import Trajectory
    from .sessions.turn import TrajectoryTiming, Turn
    from .wire.adapters import LoraInfo
    from .wire.engine import EngineInfo, EngineStats

_HOME = {
    "Actor": "actors.actor",
    "ActorHandle": "actors.spawning",
    "AssistantMessage": "inference.message",
    "BlockingClient": "launching.blocking",
    "BlockingRollout": "launching.blocking_rollout",
    "BlockingSession": "launching.blocking",
    "Chunk": "inference.chunk",
    "Client": "client.client",
    "Closed": "errors",
    "Completion": "inference.completion",
    "ContextFull": "errors",
    "DeadlineExceeded": "errors",
    "EngineError": "errors",
    "EngineInfo": "wire.engine",
    "EngineStats": "wire.engine",
    "Evaluation": "rollouts.evaluation",
    "Gateway": "gateway.serve",
    "GatewayOptions": "config",
    "GatewaySession": "gateway.serve",
    "GatewaySnapshot": "control.snapshot",
    "Group": "rollouts.group",
    "HostInfo": "driver.worker_info",
    "Hosts": "hosts.hosts",
    "InvalidAdapter": "errors",
    "InvalidKeys": "errors",
    "InvalidRequest": "errors",
    "InvalidWeights": "errors",
    "LoraInfo": "wire.adapters",
    "MessageTooLarge": "errors",
    "ModelError": "errors",
    "NextTokenLogprobs": "inference.completion",
    "NotEnoughDevices": "errors",
    "Overloaded": "errors",
    "ProtocolError": "errors",
    "QueueInfo": "driver.worker_info",
    "RemoteError": "errors",
    "Reward": "sessions.rewards",
    "Rollout": "rollouts.run",
    "RolloutFailed": "errors",
    "RolloutMetrics": "core.rollout_metrics",
    "RolloutSnapshot": "control.snapshot",
    "SamplingMask": "inference.sampling_mask",
    "SamplingParams": "inference.sampling",
    "ScoreLogprobs": "inference.completion",
    "Scores": "inference.completion",
    "Session": "sessions.session",
    "SessionSnapshot": "control.snapshot",
    "SettingsMismatch": "errors",
    "SglrlError": "errors",
    "Snapshot": "control.snapshot",
    "Stream": "inference.stream",
    "Timing": "inference.completion",
    "ToolCall": "inference.message",
    "ToolError": "errors",
    "TopLogprobs": "inference.completion",
    "Trajectory": "sessions.trajectory",
    "TrajectoryTiming": "sessions.turn",
    "Turn": "sessions.turn",
    "UnknownAdapter": "errors",
    "UnknownEndpoint": "errors",
    "UpdateInProgress": "errors",
    "UsageError": "errors",
    "VersionSpan": "inference.completion",
    "WeightUpdateError": "errors",
    "WeightsLost": "errors",
    "WorkerError": "errors",
    "WorkerHistory": "driver.worker_info",
    "WorkerInfo": "driver.worker_info",
    "WorkerLost": "errors",
    "WorkerSnapshot": "control.snapshot",
    "WorkerStartError": "errors",
    "WorkerStats": "control.engines",
    "blocking": "launching.blocking",
    "connect": "remote.client",
    "endpoint": "actors.actor",
    "evaluate": "rollouts.evaluation",
    "launch": "launching.launch",
    "local_model": "launching.local_models",
    "rollout": "rollouts.run",
    "run": "launching.running",
    "serve": "gateway.serve",
    "spawn": "actors.spawning",
    "tiny_model": "launching.tiny_model",
    "__version__": "config",
}

__all__ = [
    "Actor",
    "ActorHandle",
    "AssistantMessage",
    "BlockingClient",
    "BlockingRollout",
    "BlockingSession",
    "Chunk",
    "Client",
    "Closed",
    "Completion",
    "ContextFull",
    "DeadlineExceeded",
    "EngineError",
    "EngineInfo",
    "EngineStats",
    "Evaluation",
    "Gateway",
    "GatewayOptions",
    "GatewaySession",
    "GatewaySnapshot",
    "Group",
    "HostInfo",
    "Hosts",
    "InvalidAdapter",
    "InvalidKeys",
    "InvalidRequest",
    "InvalidWeights",
    "LoraInfo",
    "MessageTooLarge",
    "ModelError",
    "NextTokenLogprobs",
    "NotEnoughDevices",
    "Overloaded",
    "ProtocolError",
    "QueueInfo",
    "RemoteError",
    "Reward",
    "Rollout",
    "RolloutFailed",
    "RolloutMetrics",
    "RolloutSnapshot",
    "SamplingMask",
    "SamplingParams",
    "ScoreLogprobs",
    "Scores",
    "Session",
    "SessionSnapshot",
    "SettingsMismatch",
    "SglrlError",
    "Snapshot",
    "Stream",
    "Timing",
    "ToolCall",
    "ToolError",
    "TopLogprobs",
    "Trajectory",
    "TrajectoryTiming",
    "Turn",
    "UnknownAdapter",
    "UnknownEndpoint",
    "UpdateInProgress",
    "UsageError",
    "VersionSpan",
    "WeightUpdateError",
    "WeightsLost",
    "WorkerError",
    "WorkerHistory",
    "WorkerInfo",
    "WorkerLost",
    "WorkerSnapshot",
    "WorkerStartError",
    "WorkerStats",
    "blocking",
    "connect",
    "endpoint",
    "evaluate",
    "launch",
    "local_model",
    "rollout",
    "run",
    "serve",
    "spawn",
    "tiny_model",
]


def __getattr__(name: str) -> Any:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module 'sglrl' has no attribute {name!r}")
    value = getattr(import_module(f".{home}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
