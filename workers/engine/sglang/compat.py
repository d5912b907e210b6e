"""The differences between the supported SGLang versions (0.5.17 to 0.5.23)."""

from __future__ import annotations

import os
import signal
from dataclasses import MISSING, fields
from typing import Any

import sglang
from sglang.srt.entrypoints.engine import _set_envs_and_config
from sglang.srt.managers.scheduler_components.ipc_channels import SchedulerIpcChannels
from sglang.srt.plugins import load_plugins
from sglang.srt.runtime_context import publish
from sglang.srt.server_args import PortArgs, ServerArgs
from sglang.srt.utils.numa_utils import numa_bind_to_node

from sglrl.errors import UsageError

VERSION: str = sglang.__version__
_RELEASE = tuple(int(part) for part in VERSION.split(".")[:3] if part.isdigit())
_RANKS_FROM_CONTEXT = _RELEASE >= (0, 5, 21)


def checked_arguments(args: dict[str, Any], gpu_id: int) -> ServerArgs:
    """Return SGLang's arguments after the steps that its own server takes before it starts workers.

    These are SGLang's plugins, environment variables of kernels (and of NCCL, if an argument asks
    for it), limits of the process, and SGLang's checks, which compare arguments with each other.

    Args:
        gpu_id: the index in ``numa_node``, which has one NUMA node for each GPU of the engine.

    Raises:
        UsageError: SGLang rejects the arguments.
    """
    load_plugins()
    sigquit = signal.getsignal(signal.SIGQUIT)
    nccl = {name for name in os.environ if name.startswith("NCCL_")}
    try:
        server_args = ServerArgs(**args)
        # From 0.5.23 on, defaults that depend on other arguments are computed here.
        getattr(server_args, "resolve_once", lambda: None)()
        _set_envs_and_config(server_args)
        server_args.check_server_args()
    except (AssertionError, ValueError, NotImplementedError) as error:
        raise UsageError(f"SGLang rejects its arguments: {error}") from error
    finally:
        # SGLang's handler kills the whole process tree.
        signal.signal(signal.SIGQUIT, sigquit)
    if not (server_args.enable_symm_mem or server_args.enable_nccl_nvls):
        # A trainer that sends weights must have the same settings of NCCL as the workers.
        for name in [name for name in os.environ if name.startswith("NCCL_")]:
            if name not in nccl:
                del os.environ[name]
    if server_args.numa_node is not None:
        numa_bind_to_node(server_args.numa_node[gpu_id])
    return server_args


def publish_arguments(server_args: ServerArgs, rank: int, gpu_id: int) -> None:
    """Publish the arguments in the process-wide context that SGLang's modules read.

    From 0.5.21 on that context also holds the rank.
    """
    try:
        from sglang.srt.runtime_context import SpawnRanks
    except ImportError:
        publish(server_args, role="scheduler")
        return
    publish(
        server_args,
        role="scheduler",
        ranks=SpawnRanks(world_rank=rank, dp_rank=None, gpu_id=gpu_id),
    )


def scheduler_arguments(
    server_args: ServerArgs, port_args: PortArgs, rank: int, gpu_id: int
) -> tuple[Any, ...]:
    """Return the positional arguments of ``Scheduler.__init__``."""
    try:
        from sglang.srt.runtime_context import SpawnRanks  # noqa: F401
    except ImportError:
        # gpu_id, tp_rank, moe_ep_rank, pp_rank, attn_cp_rank, moe_dp_rank, dp_rank
        return (server_args, port_args, gpu_id, rank, 0, 0, 0, 0, None)
    return (server_args, port_args)


def no_ports() -> PortArgs:
    """Return empty ``PortArgs``, for a scheduler that uses our channels.

    ``PortArgs.init_new`` would make files that are never removed.
    """
    given: dict[str, Any] = {f.name: None for f in fields(PortArgs) if f.default is MISSING}
    return PortArgs(**given | {"nccl_port": 0})


def channels(sink: Any, control: Any) -> SchedulerIpcChannels:
    """Return ``SchedulerIpcChannels`` in which only our two sinks are set."""
    known = {
        "send_to_tokenizer": control,
        "send_to_detokenizer": sink,
    }
    return SchedulerIpcChannels(**{f.name: known.get(f.name) for f in fields(SchedulerIpcChannels)})


def field_values(instance: Any) -> dict[str, Any]:
    """Return the fields of a slots dataclass by name, to build a subclass from."""
    return {f.name: getattr(instance, f.name) for f in fields(instance)}


def matched(match: Any) -> int:
    """Return how many tokens on the device ``match_prefix`` has found.

    Version 0.5.23 no longer returns their slots.
    """
    length = getattr(match, "device_prefix_len", None)
    return len(match.device_indices) if length is None else int(length)


def clear_kv_cache(scheduler: Any) -> None:
    """Forget the whole KV cache. No request may hold a part of it."""
    scheduler.tree_cache.reset()
    scheduler.req_to_token_pool.clear()
    scheduler.token_to_kv_pool_allocator.clear()
    if hasattr(scheduler.req_to_token_pool, "reset_aux_cache_allocator"):
        scheduler.req_to_token_pool.reset_aux_cache_allocator()


def pool_index(request: Any) -> int:
    """Return the row of ``req_to_token`` that a running request has."""
    # From 0.5.19 on, ``kv`` has it.
    holder = request if hasattr(request, "req_pool_idx") else request.kv
    return int(holder.req_pool_idx)


def begin_weight_update(runner: Any) -> None:
    """Prepare quantized layers for new weights. Only SGLang 0.5.21 and later need this."""
    updater: Any = getattr(runner, "weight_updater", None)
    if hasattr(updater, "begin_weight_update"):
        updater.begin_weight_update()


def end_weight_update(runner: Any) -> None:
    """Finish the layers after new weights. Only SGLang 0.5.21 and later need this."""
    updater: Any = getattr(runner, "weight_updater", None)
    if hasattr(updater, "end_weight_update"):
        updater.end_weight_update(run_post_load=False)
