"""Run one rank of an engine worker: build its scheduler and run the scheduler's event loop."""

from __future__ import annotations

import gc
import logging
import os
import sys
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from sglang.srt.server_args import ServerArgs

from sglrl.errors import SglrlError
from sglrl.inference.hub_errors import unfetched
from sglrl.wire.processes import EngineSpec, WorkerSpec

from ...liveness import start_heartbeats
from ...mailbox import Mailbox
from ...weights.rank_channel import RankWeights
from . import compat
from .adapter import Adapter
from .no_tokenizer import has_tokenizer
from .patch import Setup, install
from .patch_list import PATCHES
from .scheduler import SglrlScheduler
from .sleep import Sleep, enable_memory_saver
from .source import sglang_folder
from .weights import SglangWeights

logger = logging.getLogger("sglrl.worker")


def _server_args(body: EngineSpec) -> ServerArgs:
    args: dict[str, Any] = {
        "model_path": body.model,
        "device": body.device,
        "tp_size": body.tp_size,
        "log_level": "warning",
        "base_gpu_id": body.gpu_id - body.rank,
        # SGLang's check rejects a name with a colon, and the default is the model's path.
        "served_model_name": "sglrl",
        "trust_remote_code": False,
        # SGLang's own watchdog kills the parent process of a scheduler that takes too long. Here
        # the parent is the fork server, whose exit would end every worker. Instead, the driver
        # detects workers that hang, and kills only them.
        "watchdog_timeout": 1e9,
        "skip_tokenizer_init": not has_tokenizer(
            str(body.args.get("tokenizer_path") or body.model)
        ),
    }
    if body.device == "cpu":
        from . import cpu

        torch.set_num_threads(body.threads)
        # Whenever the thread that sends weights to a replacement needs the GIL, it may wait for the
        # decoding thread for one switch interval.
        sys.setswitchinterval(0.0005)
        args |= cpu.engine_arguments(body.memory_share)
    args |= body.args
    if _saves_memory(body):
        if body.device == "cpu":
            # torch_memory_saver supports only GPUs. ``Sleep`` frees the memory of a CPU itself.
            del args["enable_memory_saver"]
        else:
            enable_memory_saver()
    return compat.checked_arguments(args, body.gpu_id)


def _saves_memory(body: EngineSpec) -> bool:
    return bool(body.args.get("enable_memory_saver"))


def _memory(body: EngineSpec) -> AbstractContextManager[Any]:
    if body.device != "cpu":
        return nullcontext()
    from . import cpu

    return cpu.UntouchedZeros()


def build(body: EngineSpec, adapter: Adapter | None) -> SglrlScheduler:
    """Install the patches of SGLang and build a scheduler.

    Args:
        adapter: the ``Adapter`` of rank 0. None on other ranks.
    """
    server_args = _server_args(body)
    # The ranks find each other through this file, not through a port.
    os.environ["SGLANG_DISTRIBUTED_INIT_METHOD_OVERRIDE"] = f"file://{body.rendezvous}"
    setup = Setup(
        server_args=server_args,
        device=body.device,
        adapter=adapter,
        accelerations=body.accelerations,
        allow_unknown=body.allow_unknown_sglang,
        logit_processors=body.logit_processors,
    )
    patches = install(PATCHES, setup, sglang_folder())
    compat.publish_arguments(server_args, body.rank, body.gpu_id)
    arguments = compat.scheduler_arguments(server_args, compat.no_ports(), body.rank, body.gpu_id)
    with _memory(body):
        scheduler = SglrlScheduler(adapter, body.gpu_id, *arguments)
    if body.device == "cpu":
        from . import cpu

        cpu.check(scheduler.tp_worker.model_runner.model)
    if adapter is not None:
        adapter.scheduler = scheduler
    patches.finish(scheduler)
    if adapter is not None:
        adapter.accelerations = tuple(patches.accelerations)
    return scheduler


@contextmanager
def _explained(model: str) -> Iterator[None]:
    """Exit with an explanation after an error of sglrl, or a failed download from the hub.

    The explanation is the last output of the process. Other errors propagate unchanged.
    """
    try:
        yield
    except Exception as error:
        text = str(error) if isinstance(error, SglrlError) else unfetched(model, error)
        if text is None:
            raise
        sys.stderr.write(f"{text}\n")
        sys.stderr.flush()
        os._exit(1)


def run_scheduler(spec: WorkerSpec, body: EngineSpec) -> None:
    """Build the scheduler, send ``Ready``, and run the event loop until ``Shutdown``."""
    with _explained(body.model):
        _run(spec, body)


def _run(spec: WorkerSpec, body: EngineSpec) -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    logging.basicConfig(
        level=str(body.args.get("log_level", "warning")).upper(),
        format=f"worker {spec.index}: %(levelname)s %(name)s: %(message)s",
        # Some versions of SGLang have already set handlers.
        force=True,
    )
    mailbox = Mailbox(spec) if body.rank == 0 else None
    if mailbox is not None:
        mailbox.starting("loading the model")
    adapter = Adapter(mailbox) if mailbox is not None else None
    scheduler = build(body, adapter)
    device = (
        torch.device(body.device, torch.cuda.current_device())
        if body.device == "cuda"
        else torch.device("cpu")
    )
    weights = scheduler.sglrl_weights = SglangWeights(scheduler, device)
    scheduler.sglrl_sleep = Sleep(scheduler, weights.live, enabled=_saves_memory(body))
    weights.channel = RankWeights(spec, body.rank, weights)
    if adapter is not None and mailbox is not None:
        adapter.begun = time.monotonic()
        window = body.window or max(64, 2 * int(scheduler.max_running_requests))
        start_heartbeats(spec, scheduler.sglrl_heartbeat)
        mailbox.ready(window, adapter.info())
    # The objects of the model and of SGLang stay alive, so the garbage collector need not visit
    # them between steps.
    gc.freeze()
    scheduler.run_event_loop()
    if mailbox is not None:
        mailbox.close()
    # The teardown of SGLang's threads and of CUDA can take seconds, and has no state to save.
    os._exit(0)
