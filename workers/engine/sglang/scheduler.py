"""A worker that owns an SGLang ``Scheduler``: the fabric's mailbox instead of its ZeroMQ ends.

``init_ipc_channels`` and ``init_request_receiver`` are SGLang's own factory methods; overriding
them leaves its event loop, overlap scheduling included, as it is. Requests come in where SGLang
would have read its tokenizer's socket (``_pull_raw_reqs``); outputs leave where it would have
written to its detokenizer's; when it is idle it blocks in ``maybe_sleep_on_idle``, on our socket.

With ``tp_size > 1`` only rank 0 has a mailbox; SGLang broadcasts what it pulled to the others.
"""

from __future__ import annotations

import logging
import os
import time
from typing import Any

from sglang.srt.managers.io_struct import (
    AbortReq,
    BatchTokenIDOutput,
    FlushCacheReqInput,
    FlushCacheReqOutput,
    ShutdownReq,
)
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.managers.scheduler_components.request_receiver import SchedulerRequestReceiver
from sglang.srt.server_args import PortArgs, ServerArgs

from sglrl.errors import InvalidRequest
from sglrl.messages import (
    EngineInfo,
    EngineSpec,
    EngineStats,
    GenerateArgs,
    ItemKind,
    ScoreArgs,
    WorkerSpec,
)

from ...mailbox import Mailbox
from ..loop import IDLE_WAIT
from . import compat, convert, seeds

logger = logging.getLogger("sglrl.worker")


class _Request:
    """What the adapter remembers of a request while SGLang has it."""

    __slots__ = ("score_start", "top", "version")

    def __init__(self, version: int, top: int, score_start: int) -> None:
        self.version = version
        self.top = top
        self.score_start = score_start


class Adapter:
    """Implements ``Engine`` on top of a scheduler. Collects requests for its next pull."""

    def __init__(self, mailbox: Mailbox) -> None:
        self.mailbox = mailbox
        self.scheduler: SglrlScheduler
        self.requests: dict[int, _Request] = {}
        self.incoming: list[Any] = []
        self.begun = time.monotonic()
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self.generated_tokens = 0
        self.cancelled: set[int] = set()
        self.flushes: list[int] = []

    # --- from the driver --------------------------------------------------------------------------

    def generate(self, id_: int, args: GenerateArgs) -> None:
        scheduler = self.scheduler
        params = convert.sampling_params(
            bytes(args.sampling),
            args.stream,
            scheduler.tokenizer,
            scheduler.model_config.vocab_size,
        )
        priority = args.priority if scheduler.enable_priority_scheduling else None
        self.incoming.append(convert.generate_request(id_, args, params, priority))
        self.requests[id_] = _Request(args.version, args.top_logprobs, -1)

    def score(self, id_: int, args: ScoreArgs) -> None:
        count = len(args.input_ids) // 4
        if not 0 <= args.start < count:
            raise InvalidRequest(f"start={args.start} is not within the {count} tokens given")
        params = convert.score_params()
        self.incoming.append(convert.score_request(id_, args, params))
        self.requests[id_] = _Request(args.version, 0, args.start)

    def abort(self, id_: int) -> None:
        if id_ in self.requests:
            self.cancelled.add(id_)
            self.incoming.append(AbortReq(rid=convert.request_id(id_)))

    def flush_cache(self, id_: int) -> None:
        self.flushes.append(id_)

    def stats(self) -> EngineStats:
        scheduler = self.scheduler
        used, capacity = scheduler.kv_tokens()
        uptime = time.monotonic() - self.begun
        return EngineStats(
            running=len(scheduler.running_batch.reqs),
            waiting=len(scheduler.waiting_queue),
            kv_tokens=used,
            kv_capacity=capacity,
            prompt_tokens=self.prompt_tokens,
            cached_tokens=self.cached_tokens,
            generated_tokens=self.generated_tokens,
            uptime=uptime,
            tokens_per_second=self.generated_tokens / uptime if uptime else 0.0,
        )

    def info(self) -> EngineInfo:
        scheduler = self.scheduler
        config = scheduler.model_config
        eos = config.hf_eos_token_id
        eos_ids = sorted(eos) if isinstance(eos, (set, list, tuple)) else [eos] if eos else []
        device = scheduler.device
        return EngineInfo(
            model=scheduler.server_args.model_path,
            architecture=config.hf_config.architectures[0],
            dtype=str(config.dtype).removeprefix("torch."),
            device=device if device == "cpu" else f"{device}:{scheduler.sglrl_gpu}",
            vocab_size=config.vocab_size,
            context_length=config.context_len,
            # SGLang rejects an input of max_req_input_len and clips new tokens to one less than
            # what max_req_len leaves.
            max_prompt_tokens=scheduler.max_req_input_len - 1,
            max_total_tokens=scheduler.max_req_len - 1,
            eos_token_ids=[int(i) for i in eos_ids],
            kv_cache_tokens=scheduler.max_total_num_tokens,
            priority_scheduling=bool(scheduler.enable_priority_scheduling),
            sglang_version=compat.VERSION,
        )

    # --- from the scheduler -----------------------------------------------------------------------

    def pull(self) -> list[Any]:
        """What arrived since the last scheduler step, as SGLang's requests."""
        self.mailbox.receive(self)
        if self.flushes:
            self._pull_flush()
        self.mailbox.flush()
        if self.mailbox.stopped:
            self.incoming.append(ShutdownReq())
        incoming, self.incoming = self.incoming, []
        return incoming

    def _pull_flush(self) -> None:
        """Like any request, so that every rank does it. A request that has just been answered still
        stands in SGLang's batch: then the flush waits for the loop's next turn."""
        if self.requests:
            self._flushed(False)
        elif self.scheduler.is_fully_idle():
            self.incoming.append(FlushCacheReqInput())

    def _flushed(self, success: bool) -> None:
        for id_ in self.flushes:
            self.mailbox.put_value(id_, success)
        self.flushes.clear()

    def tokens(self, output: BatchTokenIDOutput) -> None:
        """One scheduler step's output: one message to the driver."""
        mailbox = self.mailbox
        for i, rid in enumerate(output.rids):
            id_ = convert.call_id(rid)
            request = self.requests.get(id_)
            if request is None:
                continue
            kind, error, text = convert.end_of(output.finished_reasons[i])
            if kind == ItemKind.CHUNK:
                chunk = convert.token_chunk(output, i, request.version, request.top)
                if chunk.ids:
                    mailbox.put(id_, kind, chunk)
                continue
            del self.requests[id_]
            self.prompt_tokens += output.prompt_tokens[i]
            self.cached_tokens += output.cached_tokens[i]
            self.generated_tokens += output.completion_tokens[i]
            if id_ in self.cancelled:
                self.cancelled.discard(id_)
                mailbox.put(id_, ItemKind.CANCELLED)
            elif kind == ItemKind.ERROR:
                mailbox.put_error(id_, error, text)
            elif request.score_start >= 0:
                mailbox.put(id_, kind, convert.score_chunk(output, i, request.score_start))
            else:
                chunk = convert.token_chunk(output, i, request.version, request.top)
                mailbox.put(id_, kind, chunk)
        used, capacity = self.scheduler.kv_tokens()
        mailbox.flush(used / capacity if capacity else -1.0)

    def control(self, output: Any) -> None:
        """What SGLang tells its tokenizer manager: of interest are requests that it aborted, and
        the answer to a flush."""
        if isinstance(output, FlushCacheReqOutput):
            self._flushed(output.success)
            self.mailbox.flush()
        if not isinstance(output, AbortReq) or not output.rid:
            return
        id_ = convert.call_id(output.rid)
        if self.requests.pop(id_, None) is None:
            return
        if id_ in self.cancelled:
            self.cancelled.discard(id_)
            self.mailbox.put(id_, ItemKind.CANCELLED)
        else:
            reason: Any = output.finished_reason or {}
            self.mailbox.put_error(
                id_, "EngineError", str(reason.get("message") or "the engine aborted the request")
            )
        self.mailbox.flush()


class _Sink:
    """Stands where SGLang expects a ZeroMQ sender."""

    def __init__(self, handle: Any) -> None:
        self.handle = handle
        self.socket = None

    def send_output(self, output: Any, recv_obj: Any = None) -> None:
        self.handle(output)


class _Receiver(SchedulerRequestReceiver):  # type: ignore[misc]
    """Pulls from the adapter. ``recv_from_tokenizer`` carries it: the class has frozen slots."""

    __slots__ = ()

    def _pull_raw_reqs(self) -> list[Any]:
        return self.recv_from_tokenizer.pull()  # type: ignore[no-any-return]


class SglrlScheduler(Scheduler):  # type: ignore[misc]
    """SGLang's scheduler between our mailbox and our GPU (rank 0), or a follower rank."""

    def __init__(self, adapter: Adapter | None, gpu_id: int, *args: Any) -> None:
        self.sglrl_adapter = adapter
        self.sglrl_gpu = gpu_id
        super().__init__(*args)

    def init_ipc_channels(self, port_args: PortArgs) -> None:
        adapter = self.sglrl_adapter
        ignore = _Sink(lambda output: None)
        self.ipc_channels = compat.channels(
            _Sink(self._on_output) if adapter else ignore,
            _Sink(adapter.control) if adapter else ignore,
        )
        self.recv_from_tokenizer = adapter
        self.load_snapshot_writer = None

    def init_idle_sleeper(self) -> None:
        self.idle_sleeper = None

    def init_request_receiver(self) -> None:
        super().init_request_receiver()
        if self.sglrl_adapter is not None:
            self.request_receiver: Any = _Receiver(**compat.field_values(self.request_receiver))

    def _on_output(self, output: Any) -> None:
        if isinstance(output, BatchTokenIDOutput) and self.sglrl_adapter is not None:
            self.sglrl_adapter.tokens(output)

    def maybe_sleep_on_idle(self) -> None:
        """Called when nothing is running or waiting, in every turn of the loop."""
        if self.sglrl_adapter is not None and not self.sglrl_adapter.flushes:
            self.sglrl_adapter.mailbox.wait(IDLE_WAIT)

    def kv_tokens(self) -> tuple[int, int]:
        """Tokens of KV cache held by running requests, and capacity. What the prefix cache could
        give back at once counts as free, as in SGLang's own ``token_usage``."""
        stats = self.pool_stats_observer.get_pool_stats()
        return int(stats.get_kv_token_stats()[0]), int(self.max_total_num_tokens)


def _server_args(body: EngineSpec) -> ServerArgs:
    args: dict[str, Any] = {
        "model_path": body.model,
        "device": body.device,
        "tp_size": body.tp_size,
        "log_level": "warning",
        "dist_init_addr": f"127.0.0.1:{body.dist_port}",
        "base_gpu_id": body.gpu_id - body.rank,
        "trust_remote_code": False,
    }
    if body.device == "cpu":
        from . import cpu

        cpu.prepare(body.threads)
        args |= cpu.engine_arguments(body.memory_share)
    args |= body.args
    return ServerArgs(**args)


def run_scheduler(spec: WorkerSpec, body: EngineSpec) -> None:
    """Build the scheduler, say ``Ready``, and live in its event loop until ``Shutdown``."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    mailbox = Mailbox(spec) if body.rank == 0 else None
    if mailbox is not None:
        mailbox.starting("loading the model")
    server_args = _server_args(body)
    port_args = PortArgs.init_new(server_args)
    port_args.nccl_port = body.dist_port
    seeds.install(server_args)
    adapter = Adapter(mailbox) if mailbox is not None else None
    compat.publish_arguments(server_args, body.rank, body.gpu_id)
    scheduler = SglrlScheduler(
        adapter,
        body.gpu_id,
        *compat.scheduler_arguments(server_args, port_args, body.rank, body.gpu_id),
    )
    if adapter is not None and mailbox is not None:
        adapter.scheduler = scheduler
        adapter.begun = time.monotonic()
        window = body.window or max(64, 2 * int(scheduler.max_running_requests))
        mailbox.ready(window, adapter.info())
    scheduler.run_event_loop()
    if mailbox is not None:
        mailbox.close()
    # SGLang's threads and CUDA teardown can take seconds and have nothing left to save.
    os._exit(0)
