"""Functions that hide the differences between the supported SGLang versions (0.5.17 to 0.5.23)."""

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
    """Return SGLang's arguments, and set up the process like SGLang's own server.

    This loads SGLang's plugins, checks the arguments against each other, and sets limits and
    environment variables of the process. It sets NCCL's variables only if an argument requests it.

    Args:
        gpu_id: the index into the argument ``numa_node``, which has one entry for each GPU.

    Raises:
        UsageError: SGLang rejects the arguments.
    """
    load_plugins()
    sigquit = signal.getsignal(signal.SIGQUIT)
    nccl = {name for name in os.environ if name.startswith("NCCL_")}
    try:
        server_args = ServerArgs(**args)
        # From 0.5.23 on, this call computes the defaults that depend on other arguments.
        getattr(server_args, "resolve_once", lambda: None)()
        _set_envs_and_config(server_args)
        server_args.check_server_args()
    except (AssertionError, ValueError, NotImplementedError) as error:
        raise UsageError(f"SGLang rejects its arguments: {error}") from error
    finally:
        # Restore the handler, because SGLang's handler kills the whole process tree.
        signal.signal(signal.SIGQUIT, sigquit)
    if not (server_args.enable_symm_mem or server_args.enable_nccl_nvls):
        # A trainer that sends weights must have the same NCCL settings as the workers.
        for name in [name for name in os.environ if name.startswith("NCCL_")]:
            if name not in nccl:
                del os.environ[name]
    if server_args.numa_node is not None:
        numa_bind_to_node(server_args.numa_node[gpu_id])
    return server_args


def publish_arguments(server_args: ServerArgs, rank: int, gpu_id: int) -> None:
    """Publish the arguments in the process-wide context that SGLang's modules read.

    From 0.5.21 on, this context also holds the rank.
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
    """Return empty ``PortArgs`` for a scheduler that uses our channels.

    ``PortArgs.init_new`` would create files that are never removed.
    """
    given: dict[str, Any] = {f.name: None for f in fields(PortArgs) if f.default is MISSING}
    return PortArgs(**given | {"nccl_port": 0})


def channels(sink: Any, control: Any) -> SchedulerIpcChannels:
    """Return ``SchedulerIpcChannels`` that contain only our two sinks."""
    known = {
        "send_to_tokenizer": control,
        "send_to_detokenizer": sink,
    }
    return SchedulerIpcChannels(**{f.name: known.get(f.name) for f in fields(SchedulerIpcChannels)})


def field_values(instance: Any) -> dict[str, Any]:
    """Return the fields of a slots dataclass by name, as arguments for a subclass."""
    return {f.name: getattr(instance, f.name) for f in fields(instance)}


def matched(match: Any) -> int:
    """Return the number of tokens on the device that ``match_prefix`` has matched.

    Version 0.5.23 no longer returns the slots of these tokens.
    """
    length = getattr(match, "device_prefix_len", None)
    return len(match.device_indices) if length is None else int(length)


def clear_kv_cache(scheduler: Any) -> None:
    """Drop the whole KV cache. No request may hold a part of it."""
    scheduler.tree_cache.reset()
    scheduler.req_to_token_pool.clear()
    scheduler.token_to_kv_pool_allocator.clear()
    if hasattr(scheduler.req_to_token_pool, "reset_aux_cache_allocator"):
        scheduler.req_to_token_pool.reset_aux_cache_allocator()


def pool_index(request: Any) -> int:
    """Return the row of a running request in ``req_to_token``."""
    # From 0.5.19 on, the request's ``kv`` has the row.
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
