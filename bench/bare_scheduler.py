"""SGLang's scheduler with nothing around it: the reference speed for ``bench.engine``."""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable
from typing import Any

from sglang.srt.managers.io_struct import (
    BatchTokenIDOutput,
    ShutdownReq,
    TokenizedGenerateReqInput,
)
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.managers.scheduler_components.request_receiver import SchedulerRequestReceiver
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.server_args import PortArgs

from sglrl_workers.engine.sglang import compat

from .cases import Case, prompts
from .repetitions import TEMPERATURE, Repetitions


class Feed:
    """Feeds the scheduler with requests and counts its output tokens.

    The feed keeps ``in_flight`` requests running. After the last repetition of its plan, it asks
    the scheduler to shut down.
    """

    def __init__(self, case: Case) -> None:
        self.error: Exception | None = None
        self._case = case
        self._plan: list[tuple[int, int]] = []
        self._ready: list[Any] = []
        self._running: dict[str, float] = {}
        self._repetition: int | None = None
        self._stopping = False
        self._tokens = 0
        self._latencies: list[float] = []
        self._first = self._last = 0.0

    def begin(self, repetitions: Repetitions, flush: Callable[[], bool]) -> None:
        """Set the plan of repetitions.

        Args:
            repetitions: the plan, which also collects the results.
            flush: empties the prefix cache, and returns False while the scheduler is not idle.
        """
        self._plan = repetitions.plan()
        self._repetitions = repetitions
        self._flush = flush

    def pull(self) -> list[Any]:
        """Return the requests that the scheduler receives before its next step."""
        if self._stopping:
            return []
        try:
            return self._pull()
        except Exception as error:
            self.error = error
            return self._stop()

    def _stop(self) -> list[Any]:
        self._stopping = True
        return [ShutdownReq()]

    def _pull(self) -> list[Any]:
        if not self._ready and not self._running:
            if self._repetition is not None:
                self._repetitions.add(
                    self._repetition, self._tokens, self._last - self._first, self._latencies
                )
                self._repetition = None
            if not self._plan:
                return self._stop()
            if not self._flush():
                # The scheduler still holds its last batch. The loop calls ``pull`` again.
                return []
            repetition, count = self._plan.pop(0)
            samples = self._case.samples
            distinct = prompts(self._case, repetition, count // samples)
            self._ready = [
                self._request(f"{repetition}-{i}.", distinct[i // samples]) for i in range(count)
            ]
            self._ready.reverse()
            self._repetition = repetition
            self._tokens = 0
            self._latencies = []
            self._repetitions.mark()
            self._first = time.perf_counter()
        now = time.perf_counter()
        pulled = []
        while self._ready and len(self._running) < self._case.in_flight:
            request = self._ready.pop()
            self._running[request.rid] = now
            pulled.append(request)
        return pulled

    def _request(self, rid: str, ids: list[int]) -> TokenizedGenerateReqInput:
        params = SamplingParams(
            max_new_tokens=self._case.new, temperature=TEMPERATURE, ignore_eos=True
        )
        params.normalize(None)
        return TokenizedGenerateReqInput(
            rid=rid,
            input_text=None,
            input_ids=array("q", ids),
            input_embeds=None,
            mm_inputs=None,
            token_type_ids=None,
            sampling_params=params,
            return_logprob=True,
            logprob_start_len=-1,
            top_logprobs_num=0,
            token_ids_logprob=None,
            stream=False,
        )

    def send_output(self, output: Any, recv_obj: Any = None) -> None:
        """Count the tokens that the scheduler sends after a step."""
        if not isinstance(output, BatchTokenIDOutput):
            return
        self._last = time.perf_counter()
        for i, rid in enumerate(output.rids):
            # An output may hold only part of a request's tokens. Count tokens that have logprobs.
            self._tokens += min(len(output.output_ids[i]), len(output.output_token_logprobs_val[i]))
            if output.finished_reasons[i] is not None:
                self._latencies.append(self._last - self._running.pop(rid))

    socket = None


class _Receiver(SchedulerRequestReceiver):  # type: ignore[misc]
    __slots__ = ()

    def _pull_raw_reqs(self) -> list[Any]:
        pulled: list[Any] = self.recv_from_tokenizer.pull()
        return pulled


class BareScheduler(Scheduler):  # type: ignore[misc]
    """SGLang's scheduler with its own loop. A ``Feed`` sends requests and receives the output."""

    def __init__(self, feed: Feed, *args: Any) -> None:
        self.bench_feed = feed
        super().__init__(*args)

    def init_ipc_channels(self, port_args: PortArgs) -> None:
        self.ipc_channels = compat.channels(self.bench_feed, self.bench_feed)
        self.recv_from_tokenizer = self.bench_feed
        self.load_snapshot_writer = None

    def init_idle_sleeper(self) -> None:
        self.idle_sleeper = None

    def init_request_receiver(self) -> None:
        super().init_request_receiver()
        theirs: Any = self.request_receiver
        self.request_receiver: Any = _Receiver(**compat.field_values(theirs))
