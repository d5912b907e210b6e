"""SGLang's ``Scheduler`` in a worker, with the worker's mailbox in place of ZeroMQ sockets.

``init_ipc_channels`` and ``init_request_receiver`` are SGLang's own factory methods. The subclass
overrides them, so SGLang's event loop stays unchanged, including overlap scheduling. The mailbox
replaces SGLang's sockets in three places:

* ``_pull_raw_reqs`` pulls requests where SGLang reads the socket of its tokenizer.
* Outputs go to the mailbox where SGLang writes to the socket of its detokenizer.
* ``maybe_sleep_on_idle`` blocks on the mailbox's socket while the scheduler is idle.

With ``tp_size > 1`` only rank 0 has a mailbox. SGLang broadcasts the requests that rank 0 pulls to
the other ranks.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from typing import Any

from sglang.srt.managers.io_struct import (
    AbortReq,
    BatchTokenIDOutput,
    PauseGenerationReqInput,
)
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.managers.scheduler_components.request_receiver import SchedulerRequestReceiver
from sglang.srt.server_args import PortArgs

from sglrl.core.hangs import PAUSED, PREFILL, WEIGHTS
from sglrl.errors import EngineError
from sglrl.wire.calls import Heartbeat

from ..loop import IDLE_WAIT
from ..speed import StepClock
from . import compat
from .accelerations.queries import Queries, is_query
from .adapter import Adapter
from .commands import (
    CommitAdapter,
    DropAdapters,
    PauseCommand,
    PrepareAdapter,
    Report,
    Resume,
    SleepCommand,
    WeightCommand,
)
from .no_tokenizer import NoTokenizer
from .patches import logit_processors, routed_experts, sampling_reports, score_temperature
from .patches.undrawable_tokens import end_undrawable
from .resume import Resumes
from .sleep import Sleep
from .weights import SglangWeights

logger = logging.getLogger("sglrl.worker")


def max_tokens(max_req_len: int, kv_cache_tokens: int, page_size: int) -> int:
    """Return the maximum number of tokens of a prompt and its output together.

    SGLang generates up to this length for any length of the prompt (``init_req_max_new_tokens``).
    ``PrefillAdder`` still schedules a request of this length, because its pages and one more page
    are fewer than the pages of the cache.
    """
    return min(max_req_len - 1, kv_cache_tokens - 2 * page_size)


class _Sink:
    """Passes outputs to a function. Replaces SGLang's ZeroMQ sender."""

    def __init__(self, handle: Any) -> None:
        self.handle = handle
        self.socket = None

    def send_output(self, output: Any, recv_obj: Any = None) -> None:
        self.handle(output, recv_obj)


class _Receiver(SchedulerRequestReceiver):  # type: ignore[misc]
    """Pulls requests from the adapter.

    The class has fixed slots, so the existing slot ``recv_from_tokenizer`` holds the adapter.
    """

    __slots__ = ()

    def _pull_raw_reqs(self) -> list[Any]:
        return self.recv_from_tokenizer.pull()  # type: ignore[no-any-return]


class SglrlScheduler(Scheduler):  # type: ignore[misc]
    """SGLang's scheduler in a worker. Rank 0 has a mailbox; the other ranks follow rank 0."""

    waiting_queue: list[Any]

    def __init__(self, adapter: Adapter | None, gpu_id: int, *args: Any) -> None:
        self.sglrl_adapter = adapter
        self.sglrl_gpu = gpu_id
        self.sglrl_weights: SglangWeights | None = None
        self.sglrl_sleep: Sleep | None = None
        self._sglrl_pause_wanted = False
        """Whether a ``PauseCommand`` has paused the engine, and none has resumed it."""
        self.sglrl_queries: Queries | None = None
        """Answers next-token queries. None if this acceleration is off."""
        self.sglrl_version = 0
        self.sglrl_weight_changes = 0
        """The number of weight changes, for cache keys. Two changes may have the same version."""
        self.sglrl_adapters: Any = None
        """The ``lora.Adapters`` of this rank. None if the engine accepts no LoRA adapters."""
        self.sglrl_steps = StepClock()
        """Measures all steps, including prefills, except the time in which the engine is idle."""
        self.sglrl_request_steps = 0
        self._sglrl_processed: tuple[int, Mapping[str, int]] = 0, {}
        """The versions of the weights and LoRA adapters in the last processed results."""
        self.sglrl_preempted = 0
        self._sglrl_launches = 0
        self._sglrl_last_prefill = 0
        """The launch number of the last step that was a prefill."""
        self._sglrl_prefilled: list[Any] = []
        """The requests of the last prefill."""
        self._sglrl_last_ended = 0
        """The launch number of the last step whose results were processed."""
        self._sglrl_updating = False
        self._sglrl_resumes = Resumes()
        self._sglrl_reports: dict[str, Report] = {}
        super().__init__(*args)
        # SGLang's own limit is five tokens less than the length that it can generate, so outputs of
        # full length could not be scored. That limit also ignores the number of pages.
        self.max_req_input_len = 1 + max_tokens(
            self.max_req_len, self.max_total_num_tokens, self.page_size
        )

    def init_ipc_channels(self, port_args: PortArgs) -> None:
        adapter = self.sglrl_adapter
        ignore = _Sink(lambda output, about: None)
        self.ipc_channels = compat.channels(
            _Sink(self._on_output) if adapter else ignore,
            _Sink(adapter.control) if adapter else ignore,
        )
        self.recv_from_tokenizer = adapter
        self.load_snapshot_writer = None

    def init_tokenizer(self) -> None:
        super().init_tokenizer()
        if self.server_args.skip_tokenizer_init:
            self.tokenizer: Any = NoTokenizer(self.model_config.hf_eos_token_id)

    def init_idle_sleeper(self) -> None:
        self.idle_sleeper = None

    def init_request_receiver(self) -> None:
        super().init_request_receiver()
        if self.sglrl_adapter is not None:
            self.request_receiver: Any = _Receiver(**compat.field_values(self.request_receiver))

    def _on_output(self, output: Any, about: Any) -> None:
        if isinstance(output, BatchTokenIDOutput) and self.sglrl_adapter is not None:
            self.sglrl_adapter.tokens(output)

    def maybe_sleep_on_idle(self) -> None:
        """Block on the mailbox.

        SGLang calls this in every turn of its loop without a running or waiting request.
        """
        if self.sglrl_adapter is not None and not self.sglrl_adapter.pending:
            self.sglrl_adapter.mailbox.wait(IDLE_WAIT)
            self.sglrl_steps.idle()

    def process_input_requests(self, recv_reqs: list[Any]) -> None:
        theirs: list[Any] = []
        for request in recv_reqs:
            match request:
                case Resume():
                    self._sglrl_resumes.announce(request)
                case Report():
                    self._sglrl_reports[request.rid] = request
                case WeightCommand():
                    super().process_input_requests(theirs)
                    theirs = []
                    assert self.sglrl_weights is not None
                    self._sglrl_updating = True
                    self.sglrl_weights.execute(request)
                    self._sglrl_updating = False
                case PauseCommand():
                    super().process_input_requests(theirs)
                    theirs = []
                    self._sglrl_pause(request)
                case SleepCommand():
                    super().process_input_requests(theirs)
                    theirs = []
                    self._sglrl_change_sleep(request)
                case PrepareAdapter() | CommitAdapter() | DropAdapters():
                    super().process_input_requests(theirs)
                    theirs = []
                    took = self.sglrl_adapters.execute(request)
                    adapter = self.sglrl_adapter
                    if adapter is not None and not isinstance(request, PrepareAdapter):
                        adapter.lora.executed(request, took)
                case _:
                    theirs.append(request)
        if self.sglrl_queries is not None and not self.sglrl_paused:
            queries = [request for request in theirs if is_query(request)]
            if queries:
                theirs = [request for request in theirs if not is_query(request)]
                theirs += self.sglrl_queries.run(queries)
        super().process_input_requests(theirs)

    def _sglrl_pause(self, command: PauseCommand) -> None:
        if command.mode in ("back", "wait"):
            if command.mode == "back" or self.sglrl_paused:
                self.sglrl_retract()
            return
        if command.mode == "retract":
            self.sglrl_retract()
        self._sglrl_pause_wanted = bool(command.mode)
        self._sglrl_stop_or_go()
        if self.sglrl_adapter is not None:
            self.sglrl_adapter.controls.paused(command)

    def _sglrl_stop_or_go(self) -> None:
        """Stop the steps if the engine is paused or asleep, or continue them if it is not."""
        assert self.sglrl_sleep is not None
        self._engine_paused = self._sglrl_pause_wanted or self.sglrl_sleep.stops

    def _sglrl_change_sleep(self, command: SleepCommand) -> None:
        assert self.sglrl_sleep is not None
        error = ""
        if command.asleep:
            self.sglrl_retract()
        self._sglrl_updating = True
        try:
            self.sglrl_sleep.change(command)
        except (EngineError, RuntimeError, OSError) as raised:
            if self.server_args.tp_size > 1:
                # The other ranks may have succeeded.
                raise
            error = str(raised)
        self._sglrl_updating = False
        self._sglrl_stop_or_go()
        if self.sglrl_adapter is not None:
            self.sglrl_adapter.controls.slept(command, error)

    def sglrl_filled(self) -> None:
        """Continue after a sleep without kept weights, because an update of all weights is live."""
        if self.sglrl_sleep is not None and self.sglrl_sleep.empty:
            self.sglrl_sleep.empty = False
            self._sglrl_stop_or_go()

    def sglrl_retract(self) -> None:
        """Return running requests to the queue. Keep the engine paused or running, as it is."""
        paused = self._engine_paused
        self.pause_generation(PauseGenerationReqInput(mode="retract"))
        self._engine_paused = paused

    @property
    def sglrl_loras(self) -> Mapping[str, int]:
        """The versions of the LoRA adapters that the next step uses, by SGLang's ids."""
        return {} if self.sglrl_adapters is None else self.sglrl_adapters.versions

    def sglrl_used_adapters(self) -> set[str | None]:
        """Return SGLang's ids of the LoRA adapters of all requests that SGLang holds."""
        requests = [*self.waiting_queue, *self.grammar_manager.grammar_queue]
        requests += [] if self.chunked_req is None else [self.chunked_req]
        for batch in (self.running_batch, self.last_batch):
            if batch is not None:
                requests += batch.reqs
        return {request.lora_id for request in requests if not request.finished()}

    def sglrl_new_keys(self) -> None:
        """Give waiting requests the cache keys of the current weights and LoRA adapters.

        Their prefills thus do not reuse KV of older versions.
        """
        for request in (*self.waiting_queue, *self.grammar_manager.grammar_queue):
            request.extra_key = str(self.sglrl_weight_changes)
            if request.lora_id is not None:
                request.extra_key += self.sglrl_adapters.cache_key(request.lora_id)
                # SGLang itself adds this id to the keys of new requests.
                request.extra_key += request.lora_id

    @property
    def sglrl_paused(self) -> bool:
        """Whether the engine is paused, so that its loop makes no steps."""
        return bool(self._engine_paused)

    def abort_request(self, recv_req: AbortReq) -> None:
        queue = self.grammar_manager.grammar_queue
        for request in [r for r in queue if r.rid == recv_req.rid]:
            # The request waits for its grammar. SGLang would prefill another prompt in its place,
            # and return the tokens that it samples after that prompt, so end the request here.
            queue.remove(request)
            request.grammar.cancel()
            self._sglrl_resumes.discard(request.rid)
            self.ipc_channels.send_to_tokenizer.send_output(AbortReq(rid=request.rid), request)
        super().abort_request(recv_req)

    def init_req_max_new_tokens(self, req: Any) -> None:
        super().init_req_max_new_tokens(req)
        # SGLang calls this for every request that it accepts, before any code reads the output.
        logit_processors.attach(req)
        report = self._sglrl_reports.pop(req.rid, None)
        if report is not None:
            sampling_reports.ask(req, report)
        self._sglrl_resumes.begin(req)

    def _add_request_to_queue(self, req: Any, is_retracted: bool = False, **kwargs: Any) -> None:
        if is_retracted:
            self.sglrl_preempted += 1
        self._sglrl_resumes.enter(req)
        super()._add_request_to_queue(req, is_retracted, **kwargs)

    def run_batch(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        self.sglrl_steps.launch(time.monotonic())
        self._sglrl_launches += 1
        self.sglrl_request_steps += len(batch.reqs)
        if self.sglrl_weights is not None:
            self.sglrl_weights.go_on()
        if self._sglrl_launches == 1 and self.device == "cpu":
            from . import cpu

            cpu.give_way()
        if batch.forward_mode.is_extend():
            self._sglrl_last_prefill = self._sglrl_launches
            self._sglrl_prefilled = list(batch.reqs)
            if self.sglrl_adapter is not None:
                # A prompt that is prefilled in parts gets its next token after the last part.
                self.sglrl_adapter.next_tokens.expect(batch.reqs, self.chunked_req)
                self.sglrl_adapter.launched(batch)
            score_temperature.attach(batch.reqs if sampling_reports.any_alive() else ())
        sampling_reports.attach(batch)
        result = super().run_batch(batch, *args, **kwargs)
        result.sglrl_version = self.sglrl_version
        result.sglrl_loras = self.sglrl_loras
        result.sglrl_launch = self._sglrl_launches
        result.sglrl_rows = self.sglrl_adapter and self.sglrl_adapter.next_tokens.take()
        routed_experts.attach(batch, result)
        return result

    def process_batch_result(self, batch: Any, result: Any, *args: Any, **kwargs: Any) -> Any:
        version, loras = result.sglrl_version, result.sglrl_loras
        if (version, loras) != self._sglrl_processed:
            # Results are processed in the order in which their steps were launched.
            self._sglrl_processed = version, loras
            if self.sglrl_adapter is not None:
                live = [*batch.reqs, *self.running_batch.reqs, *self.waiting_queue]
                if self.chunked_req is not None:
                    live.append(self.chunked_req)
                self.sglrl_adapter.version_changed(
                    version, loras, {r.rid: len(r.output_ids) for r in live}
                )
        if self.sglrl_adapter is not None:
            self.sglrl_adapter.rows = result.sglrl_rows
            self.sglrl_adapter.result_version = version
            self.sglrl_adapter.result_loras = loras
        end_undrawable(batch, result, version)
        if self.sglrl_adapter is not None:
            sampling_reports.collect(batch, result, self.sglrl_adapter)
        routed_experts.collect(self, batch, result)
        returned = super().process_batch_result(batch, result, *args, **kwargs)
        if self.sglrl_adapter is not None:
            # Count progress first: no heartbeat may report a prefill's end without the progress.
            self.sglrl_adapter.mailbox.progress += 1
        self._sglrl_last_ended = result.sglrl_launch
        return returned

    @property
    def sglrl_prefilling(self) -> list[Any]:
        """The requests of a prefill whose results were not processed yet, or []."""
        return self._sglrl_prefilled if self._sglrl_last_prefill > self._sglrl_last_ended else []

    def sglrl_heartbeat(self) -> Heartbeat:
        """Return the progress and the phase of the loop. Any thread may call this."""
        phase = ""
        if self._sglrl_updating:
            phase = WEIGHTS
        elif self.sglrl_paused:
            phase = PAUSED
        elif self._sglrl_last_prefill > self._sglrl_last_ended:
            phase = PREFILL
        assert self.sglrl_adapter is not None
        return Heartbeat(self.sglrl_adapter.mailbox.progress, phase)

    def sglrl_waiting(self) -> int:
        """Return the number of requests that wait for memory or for their grammar."""
        return len(self.waiting_queue) + len(self.grammar_manager.grammar_queue)

    def sglrl_running(self) -> int:
        """Return the number of unfinished requests in all batches, including a prefill.

        Finished requests stay in the batch until the next step, so they are not counted.
        """
        requests = [] if self.chunked_req is None else [self.chunked_req]
        for batch in (self.running_batch, self.last_batch):
            if batch is not None:
                requests += batch.reqs
        return len({request.rid for request in requests if not request.finished()})

    def kv_tokens(self) -> tuple[int, int]:
        """Return the number of KV cache tokens that running requests hold, and the capacity.

        Tokens that the prefix cache can free at once count as free, as in SGLang's ``token_usage``.
        """
        stats = self.pool_stats_observer.get_pool_stats()
        return int(stats.get_kv_token_stats()[0]), int(self.max_total_num_tokens)
