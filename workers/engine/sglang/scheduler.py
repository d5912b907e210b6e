"""A worker that owns an SGLang ``Scheduler``: the fabric's mailbox instead of its ZeroMQ ends.

``init_ipc_channels`` and ``init_request_receiver`` are SGLang's own factory methods; overriding
them leaves its event loop, overlap scheduling included, as it is. Requests come in where SGLang
would have read its tokenizer's socket (``_pull_raw_reqs``); outputs leave where it would have
written to its detokenizer's; when it is idle it blocks in ``maybe_sleep_on_idle``, on our socket.

With ``tp_size > 1`` only rank 0 has a mailbox; SGLang broadcasts what it pulled to the others.
"""

from __future__ import annotations

import collections
import gc
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from sglang.srt.managers.io_struct import (
    AbortReq,
    BatchTokenIDOutput,
    FlushCacheReqInput,
    FlushCacheReqOutput,
    PauseGenerationReqInput,
    ShutdownReq,
    TokenizedGenerateReqInput,
)
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.managers.scheduler_components.request_receiver import SchedulerRequestReceiver
from sglang.srt.server_args import PortArgs, ServerArgs

from sglrl.core.hangs import PAUSED, PREFILL, WEIGHTS
from sglrl.errors import InvalidRequest
from sglrl.wire.calls import Heartbeat, ItemKind
from sglrl.wire.engine import (
    EngineInfo,
    EngineStats,
    GenerateArgs,
    NextTokenArgs,
    ScoreArgs,
    TokenChunk,
)
from sglrl.wire.processes import EngineSpec, WorkerSpec

from ...heartbeat import start_beats
from ...mailbox import Mailbox
from ...weights.rank_channel import RankWeights
from ..loop import IDLE_WAIT
from ..protocol import check_mode, check_top
from . import compat, convert, parameter_arena, resume
from .accelerations import decode_results, short_prefill
from .accelerations.queries import Known, Queries, is_query
from .accelerations.shared_prefix import Alike
from .next_token import NextTokens, Rows
from .no_tokenizer import NoTokenizer, has_tokenizer
from .patches import end_of_output, seeded_sampling, stop_regex, undrawable_tokens
from .patches.undrawable_tokens import end_undrawable
from .resume import Resume
from .weights import SglangWeights, WeightCommand

logger = logging.getLogger("sglrl.worker")

_LONGEST_STEP = 0.1
"""Seconds, as far as waiting for one is concerned: what took longer was an idle time."""
_LAUNCH_SECONDS = 0.0015
"""More than it takes to put a step on the GPU."""
_REST_SECONDS = 0.006
"""So long a GPU may have nothing to do rather than begin a step that new weights would wait for."""
_COMMIT_SECONDS = 0.0015
"""From weights that are all here to the command to use them, and what it may come later."""

_DRAIN_WAIT = 0.05
"""Seconds. Nobody says when an update that waits for a paused engine is given up."""

_REQUESTS = (TokenizedGenerateReqInput, Resume)


@dataclass
class PauseCommand:
    """Travels through SGLang's own broadcast to all ranks of a replica, like a request. ``call``:
    that asked for it, or -1. ``mode``: "in_place", "retract" or "" (go on); or, which pauses
    nothing: "back": who runs gives its place back; "wait": the same, in an engine that is paused by
    then."""

    call: int
    mode: str


class _Request:
    """What the adapter remembers of a request while SGLang has it.

    ``sent``: tokens reported so far, the ``resumed`` ones of another worker included. ``version``:
    of the next one. ``changes``: (position, version), in order, where it changes later.
    ``score_start``: of a scoring request; else -1. ``prefills``: of a scoring request, (first
    position, version) of each part of the prompt that one version computes. ``generates``: it is
    one of ``generate``.
    """

    __slots__ = (
        "changes",
        "generates",
        "prefills",
        "resumed",
        "score_start",
        "sent",
        "top",
        "version",
    )

    def __init__(
        self, version: int, top: int, score_start: int = -1, *, generates: bool = False
    ) -> None:
        self.version = version
        self.top = top
        self.score_start = score_start
        self.generates = generates
        self.sent = 0
        self.resumed = 0
        self.changes: list[tuple[int, int]] = []
        self.prefills: list[tuple[int, int]] = []

    def prefilled(self, begin: int, version: int) -> None:
        """A forward pass of the prompt from this position on was launched. A request that was
        retracted begins again."""
        while self.prefills and self.prefills[-1][0] >= begin:
            self.prefills.pop()
        if not self.prefills or self.prefills[-1][1] != version:
            self.prefills.append((begin, version))

    def take(self, count: int) -> list[tuple[int, int]]:
        """The next ``count`` tokens as (number, version), never empty."""
        if not self.changes:
            self.sent += count
            return [(count, self.version)]
        end = self.sent + count
        parts = []
        while self.changes and self.changes[0][0] <= end:
            at, version = self.changes.pop(0)
            if at > self.sent:
                parts.append((at - self.sent, self.version))
                self.sent = at
            self.version = version
        if end > self.sent or not parts:
            parts.append((end - self.sent, self.version))
            self.sent = end
        return parts


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
        self.returned: set[int] = set()
        self.flushes: list[int] = []
        self.commands: collections.deque[WeightCommand] = collections.deque()
        self.expected = threading.Event()
        self.arrived = threading.Event()
        self.due: float | None = None
        """When the command that is expected will come."""
        self.draining: WeightCommand | None = None
        """That has been asked for, and waits until nothing runs."""
        self.held_back: list[Any] = []
        self.next_tokens = NextTokens(mailbox)
        self.rows: Rows | None = None
        """Of the batch whose results are being processed."""
        self.result_version = 0
        """Of the weights that it was run with."""

    # --- from the driver --------------------------------------------------------------------------

    def generate(self, id_: int, args: GenerateArgs) -> None:
        scheduler = self.scheduler
        check_top(args.top_logprobs, scheduler.model_config.vocab_size)
        params = self.samplings.get(bytes(args.sampling), args.stream)
        begun = convert.token_array(args.resume)
        asked = convert.generate_request(id_, args, params, self._priority(args))
        if begun:
            self.incoming.append(Resume(convert.request_id(id_), begun))
        self.incoming.append(asked)
        request = _Request(scheduler.sglrl_version, args.top_logprobs, generates=True)
        request.sent = request.resumed = len(begun)
        self.requests[id_] = request

    @cached_property
    def samplings(self) -> convert.Samplings:
        scheduler = self.scheduler
        return convert.Samplings(scheduler.tokenizer, scheduler.model_config.vocab_size)

    def score(self, id_: int, args: ScoreArgs) -> None:
        count = len(args.input_ids) // 4
        if not 0 <= args.start < count:
            raise InvalidRequest(f"start={args.start} is not within the {count} tokens given")
        check_top(args.top_logprobs, self.scheduler.model_config.vocab_size)
        params = convert.score_params()
        self.incoming.append(convert.score_request(id_, args, params, self._priority(args)))
        self.requests[id_] = _Request(self.scheduler.sglrl_version, args.top_logprobs, args.start)

    def next_token_logprobs(self, id_: int, args: NextTokenArgs) -> None:
        if len(args.input_ids) < 4:
            raise InvalidRequest("there is no token given")
        check_top(args.top_k, self.scheduler.model_config.vocab_size)
        params, priority = self.next_tokens.params, self._priority(args)
        self.incoming.append(convert.next_token_request(id_, args, params, priority))
        self.requests[id_] = _Request(self.scheduler.sglrl_version, args.top_k)
        self.next_tokens.wanted[convert.request_id(id_)] = args.top_k

    def _priority(self, args: GenerateArgs | ScoreArgs | NextTokenArgs) -> int | None:
        return args.priority if self.scheduler.enable_priority_scheduling else None

    def abort(self, id_: int) -> None:
        if id_ not in self.requests:
            return
        rid = convert.request_id(id_)
        for unsent in (self.incoming, self.held_back):
            # Ahead of a request that is kept back, SGLang would not know what this is about.
            others = [r for r in unsent if not (isinstance(r, _REQUESTS) and r.rid == rid)]
            if len(others) < len(unsent):
                unsent[:] = others
                del self.requests[id_]
                self.next_tokens.wanted.pop(rid, None)
                self.mailbox.put(id_, ItemKind.CANCELLED)
                return
        self.cancelled.add(id_)
        self.incoming.append(AbortReq(rid=rid))

    def abort_all(self) -> int:
        # In a paused engine nothing ends that runs: there it is made to wait first.
        return self._abort_all("wait")

    def _abort_all(self, before: str) -> int:
        ended: set[str] = set()
        self.incoming = self._return_unsent(self.incoming, ended)
        self.held_back = self._return_unsent(self.held_back, ended)
        aborts = self._aborts(set(), before)
        self.incoming += aborts
        return len(ended) + sum(isinstance(request, AbortReq) for request in aborts)

    def _return_unsent(self, requests: list[Any], ended: set[str]) -> list[Any]:
        """Answer those ``generate`` requests that SGLang has not been given yet. The others."""
        others = []
        for asked in requests:
            if isinstance(asked, _REQUESTS):
                id_ = convert.call_id(asked.rid)
                request = self.requests.get(id_)
                if request is not None and request.generates and id_ not in self.cancelled:
                    del self.requests[id_]
                    ended.add(asked.rid)
                    chunk = TokenChunk(b"", finish="abort", version=request.version)
                    self.mailbox.put(id_, ItemKind.DONE, chunk)
                if asked.rid in ended:
                    continue
            others.append(asked)
        return others

    def pause(self, id_: int, mode: str) -> None:
        check_mode(mode)
        if mode == "abort":
            self._abort_all("back")
        self.incoming.append(PauseCommand(id_, "retract" if mode == "retract" else "in_place"))

    def resume(self, id_: int) -> None:
        self.incoming.append(PauseCommand(id_, ""))

    def paused(self, command: PauseCommand) -> None:
        """It has been executed."""
        if command.call >= 0:
            self.mailbox.put_value(command.call, None)
            # The loop may have nothing else to do.
            self.mailbox.flush()

    def _aborts(self, except_for: set[str], before: str) -> list[Any]:
        """What makes SGLang return the ``generate`` requests that it has, with what they have:
        those that wait at once, those that run in the next step that continues requests, which
        comes when no other waits to be begun. ``before``: the mode of a ``PauseCommand`` that makes
        them wait."""
        aborts: list[Any] = [PauseCommand(-1, before)]
        for id_, request in self.requests.items():
            rid = convert.request_id(id_)
            known = id_ in self.cancelled or id_ in self.returned
            if request.generates and not known and rid not in except_for:
                self.returned.add(id_)
                aborts.append(AbortReq(rid=rid))
        return aborts

    def flush_cache(self, id_: int) -> None:
        self.flushes.append(id_)

    def stats(self) -> EngineStats:
        scheduler = self.scheduler
        used, capacity = scheduler.kv_tokens()
        uptime = time.monotonic() - self.begun
        return EngineStats(
            running=scheduler.sglrl_running(),
            waiting=scheduler.sglrl_waiting(),
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
            # SGLang rejects an input of max_req_input_len.
            max_prompt_tokens=scheduler.max_req_input_len - 2,
            max_total_tokens=scheduler.max_req_input_len - 1,
            eos_token_ids=[int(i) for i in eos_ids],
            kv_cache_tokens=scheduler.max_total_num_tokens,
            priority_scheduling=bool(scheduler.enable_priority_scheduling),
            sglang_version=compat.VERSION,
            tp_size=scheduler.server_args.tp_size,
        )

    # --- from the scheduler -----------------------------------------------------------------------

    def pull(self) -> list[Any]:
        """What arrived since the last scheduler step, as SGLang's requests."""
        if self.expected.is_set():
            self._linger()
        if self.scheduler.sglrl_paused and not (self.flushes or self.commands):
            # SGLang's loop would turn as fast as it can.
            self.mailbox.flush()
            self.mailbox.wait(IDLE_WAIT if self.draining is None else _DRAIN_WAIT)
        self.mailbox.receive(self)
        if self.flushes:
            self._pull_flush()
        if self.requests and self.mailbox.report_is_due:
            self._flush()
        else:
            self.mailbox.flush()
        incoming, self.incoming = self.incoming, []
        if self.commands or self.draining is not None:
            incoming = self._with_commands(incoming)
        version = str(self.scheduler.sglrl_version)
        for request in incoming:
            if isinstance(request, TokenizedGenerateReqInput):
                # KV computed under one policy version is never reused under another.
                request.extra_key = version
        if self.mailbox.stopped:
            incoming.append(ShutdownReq())
        return incoming

    def weight_command(self, command: WeightCommand) -> None:
        """Between the next two steps, or when what runs has ended. From any thread."""
        self.commands.append(command)
        self.arrived.set()
        self.mailbox.wake()

    def expect_command(self, seconds: float | None) -> None:
        """One will come within about a step. From any thread.

        Args:
            seconds: after which the weights are all here, if they are live at once then.
        """
        self.arrived.clear()
        self.due = None if seconds is None else time.monotonic() + seconds + _COMMIT_SECONDS
        self.expected.set()

    def _linger(self) -> None:
        """With overlap the scheduler launches a step while the GPU is still at the one before, and
        new weights can only come after what was launched. So while an update is about to come,
        the next step is launched as late as the GPU allows; or not before the update, once, if it
        comes so soon after that and costs the GPU no time of its own."""
        scheduler = self.scheduler
        if scheduler.enable_overlap and scheduler.last_batch is not None:
            self.arrived.wait(max(0.0, scheduler.sglrl_step_seconds - _LAUNCH_SECONDS))
            due, now = self.due, time.monotonic()
            if due is not None and due - now < _REST_SECONDS and not self.arrived.is_set():
                self.due = None
                assert scheduler.sglrl_weights is not None
                scheduler.sglrl_weights.rest()
                self.arrived.wait(max(0.0, due - now) + _COMMIT_SECONDS)
        if self.arrived.is_set():
            self.expected.clear()

    @property
    def pending(self) -> bool:
        """There is something to do also when nothing runs."""
        return bool(self.flushes or self.commands or self.draining is not None)

    def _with_commands(self, incoming: list[Any]) -> list[Any]:
        """Put the next command behind the requests, at once or when what runs has ended: then new
        requests are kept back until it is done."""
        if self.draining is not None and self._given_up(self.draining):
            self.draining = None
            back, self.held_back = self.held_back, []
            return [*back, *incoming]
        if self.draining is None:
            command = self.commands.popleft()
            if self._given_up(command):
                return incoming
            if command.inflight == "abort":
                fresh = {r.rid for r in incoming if isinstance(r, TokenizedGenerateReqInput)}
                # What returns nothing, a score, is computed again: nobody waits for it here.
                return [*incoming, *self._aborts(fresh, "back"), command]
            if command.inflight != "drain":
                return [*incoming, command]
            self.draining = command
        self.held_back += [r for r in incoming if isinstance(r, _REQUESTS)]
        passed = [r for r in incoming if not isinstance(r, _REQUESTS)]
        if passed or not self.scheduler.is_fully_idle():
            return passed
        command, self.draining = self.draining, None
        back, self.held_back = self.held_back, []
        # Behind the command they are prefilled with the new weights.
        return [*back, command]

    def _given_up(self, command: WeightCommand) -> bool:
        assert self.scheduler.sglrl_weights is not None
        return self.scheduler.sglrl_weights.given_up(command)

    def _pull_flush(self) -> None:
        """Like any request, so that every rank does it. A request that has just been answered still
        stands in SGLang's batch: then the flush waits for the loop's next turn."""
        if self.requests:
            self._flushed(False)
        elif self.scheduler.is_fully_idle():
            self.incoming.append(FlushCacheReqInput())
        elif self.scheduler.sglrl_paused:
            # There is no next turn.
            self._flushed(False)

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
            count = len(output.output_ids[i])
            if kind == ItemKind.CHUNK:
                if count:
                    parts = request.take(count)
                    for chunk in convert.token_chunks(output, i, request.top, parts):
                        mailbox.put(id_, kind, chunk)
                continue
            if id_ in self.returned:
                self.returned.discard(id_)
                kind = ItemKind.DONE
            del self.requests[id_]
            next_token = self.next_tokens.wanted.pop(rid, None) is not None
            self.prompt_tokens += output.prompt_tokens[i]
            self.cached_tokens += convert.cached_tokens(output, i)
            self.generated_tokens += output.completion_tokens[i] - request.resumed
            if id_ in self.cancelled:
                self.cancelled.discard(id_)
                mailbox.put(id_, ItemKind.CANCELLED)
            elif kind == ItemKind.ERROR:
                mailbox.put_error(id_, error, text)
            elif request.score_start >= 0:
                chunk = convert.score_chunk(
                    output, i, request.score_start, request.top, request.prefills
                )
                mailbox.put(id_, kind, chunk)
            elif next_token:
                assert self.rows is not None
                self.rows.put(mailbox, id_, rid, output.cached_tokens[i], self.result_version)
            else:
                self._return(id_, request, output, i)
        self._flush()

    def launched(self, batch: Any) -> None:
        """A prefill, with the scheduler's version."""
        for request, begin in zip(batch.reqs, batch.prefix_lens, strict=True):
            if request.return_logprob:
                known = self.requests.get(convert.call_id(request.rid))
                if known is not None and known.score_start >= 0:
                    known.prefilled(begin, self.scheduler.sglrl_version)

    def answer(
        self, queries: Sequence[Known], logits: torch.Tensor, at: Sequence[int]
    ) -> Callable[[], None]:
        """Queries for the next token that SGLang has not been given."""
        expected = [
            (row, query.request.rid, self.next_tokens.wanted.pop(query.request.rid))
            for row, query in zip(at, queries, strict=True)
        ]
        rows = self.next_tokens.rows(logits, expected)
        version = self.scheduler.sglrl_version

        def send() -> None:
            for query in queries:
                rid = query.request.rid
                id_ = convert.call_id(rid)
                del self.requests[id_]
                self.prompt_tokens += query.cached + query.new
                self.cached_tokens += query.cached
                if id_ in self.cancelled:
                    self.cancelled.discard(id_)
                    self.mailbox.put(id_, ItemKind.CANCELLED)
                else:
                    rows.put(self.mailbox, id_, rid, query.cached, version)
            self.mailbox.progress += 1
            self._flush()

        return send

    def _flush(self) -> None:
        used, capacity = self.scheduler.kv_tokens()
        usage = used / capacity if capacity else -1.0
        waiting = self.scheduler.sglrl_waiting()
        self.mailbox.flush(usage, waiting, self.scheduler.sglrl_preempted)

    def _return(self, id_: int, request: _Request, output: Any, i: int) -> None:
        """The last tokens of a request."""
        parts = request.take(len(output.output_ids[i]))
        *chunks, last = convert.token_chunks(output, i, request.top, parts)
        for chunk in chunks:
            self.mailbox.put(id_, ItemKind.CHUNK, chunk)
        self.mailbox.put(id_, ItemKind.DONE, last)

    def version_changed(self, version: int, produced: dict[str, int]) -> None:
        """The next result is the first of ``version``. ``produced``: tokens that each request
        has."""
        for id_, request in self.requests.items():
            at = produced.get(convert.request_id(id_), 0)
            request.changes.append((at, version))

    def control(self, output: Any, about: Any) -> None:
        """What SGLang tells its tokenizer manager: of interest are requests that it aborted (they
        are ``about`` themselves), and the answer to a flush."""
        if isinstance(output, FlushCacheReqOutput):
            self._flushed(output.success)
            self.mailbox.flush()
        if not isinstance(output, AbortReq) or not output.rid:
            return
        id_ = convert.call_id(output.rid)
        request = self.requests.pop(id_, None)
        if request is None:
            return
        self.next_tokens.wanted.pop(output.rid, None)
        returned = id_ in self.returned
        self.returned.discard(id_)
        if id_ in self.cancelled:
            self.cancelled.discard(id_)
            self.mailbox.put(id_, ItemKind.CANCELLED)
        elif returned:
            self._return(id_, request, convert.rest_of(about, request.sent), 0)
        else:
            reason: Any = output.finished_reason or {}
            self.mailbox.put_error(
                id_, "EngineError", str(reason.get("message") or "the engine aborted the request")
            )
        self.mailbox.flush()


def most_tokens(max_req_len: int, kv_cache_tokens: int, page_size: int) -> int:
    """Of a prompt and what is generated behind it: as many as SGLang generates whatever the
    prompt's part is (``init_req_max_new_tokens``), and one of that length is still scheduled
    (``PrefillAdder``: its pages and one more are less than the cache)."""
    return min(max_req_len - 1, kv_cache_tokens - 2 * page_size)


class _Sink:
    """Stands where SGLang expects a ZeroMQ sender."""

    def __init__(self, handle: Any) -> None:
        self.handle = handle
        self.socket = None

    def send_output(self, output: Any, recv_obj: Any = None) -> None:
        self.handle(output, recv_obj)


class _Receiver(SchedulerRequestReceiver):  # type: ignore[misc]
    """Pulls from the adapter. ``recv_from_tokenizer`` carries it: the class has frozen slots."""

    __slots__ = ()

    def _pull_raw_reqs(self) -> list[Any]:
        return self.recv_from_tokenizer.pull()  # type: ignore[no-any-return]


class SglrlScheduler(Scheduler):  # type: ignore[misc]
    """SGLang's scheduler between our mailbox and our GPU (rank 0), or a follower rank."""

    waiting_queue: list[Any]

    def __init__(self, adapter: Adapter | None, gpu_id: int, *args: Any) -> None:
        self.sglrl_adapter = adapter
        self.sglrl_gpu = gpu_id
        self.sglrl_weights: SglangWeights | None = None
        self.sglrl_queries: Queries | None = None
        self.sglrl_version = 0
        self.sglrl_step_seconds = 0.0
        """What a decode step takes: the shorter one of the last two, of which one may have been a
        prefill. Weights that are received make steps half as long again."""
        self._sglrl_last_step = 0.0
        self._sglrl_launched = 0.0
        self._sglrl_processed = 0
        self.sglrl_preempted = 0
        self._sglrl_launches = 0
        self._sglrl_last_prefill = 0
        self._sglrl_last_ended = 0
        """Of launches, by number: the last one that prefills, and the last one processed."""
        self._sglrl_updating = False
        self._sglrl_resumes: dict[str, Resume] = {}
        self._sglrl_entering: set[str] = set()
        super().__init__(*args)
        self._sglrl_alike = Alike(self)
        # Of its own it takes five tokens less than it can generate behind a shorter prompt, and
        # then nobody could score these; and does not ask whether there are the pages for them.
        self.max_req_input_len = 1 + most_tokens(
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

    def init_batch_result_processor(self) -> None:
        super().init_batch_result_processor()
        decode_results.install(self)

    def _on_output(self, output: Any, about: Any) -> None:
        if isinstance(output, BatchTokenIDOutput) and self.sglrl_adapter is not None:
            self.sglrl_adapter.tokens(output)

    def maybe_sleep_on_idle(self) -> None:
        """Called when nothing is running or waiting, in every turn of the loop."""
        if self.sglrl_adapter is not None and not self.sglrl_adapter.pending:
            self.sglrl_adapter.mailbox.wait(IDLE_WAIT)

    def process_input_requests(self, recv_reqs: list[Any]) -> None:
        theirs: list[Any] = []
        for request in recv_reqs:
            match request:
                case Resume():
                    self._sglrl_resumes[request.rid] = request
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
                case _:
                    theirs.append(request)
        queries = [request for request in theirs if is_query(request)]
        if queries and not self.sglrl_paused:
            assert self.sglrl_queries is not None
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
        self._engine_paused = bool(command.mode)
        if self.sglrl_adapter is not None:
            self.sglrl_adapter.paused(command)

    def sglrl_retract(self) -> None:
        """Running requests go back to the queue. Paused, or not, the engine stays as it was."""
        paused = self._engine_paused
        self.pause_generation(PauseGenerationReqInput(mode="retract"))
        self._engine_paused = paused

    @property
    def sglrl_paused(self) -> bool:
        """Its loop makes no steps."""
        return bool(self._engine_paused)

    def abort_request(self, recv_req: AbortReq) -> None:
        queue = self.grammar_manager.grammar_queue
        for request in [r for r in queue if r.rid == recv_req.rid]:
            # It waits for its grammar. SGLang would prefill another prompt in its place, and return
            # what is sampled behind that.
            queue.remove(request)
            request.grammar.cancel()
            self._sglrl_entering.discard(request.rid)
            self.ipc_channels.send_to_tokenizer.send_output(AbortReq(rid=request.rid), request)
        super().abort_request(recv_req)

    def init_req_max_new_tokens(self, req: Any) -> None:
        super().init_req_max_new_tokens(req)
        # SGLang calls this for every request that it takes, before anything looks at its output.
        begun = self._sglrl_resumes.pop(req.rid, None)
        if begun is not None:
            resume.begin(req, begun.ids)
            self._sglrl_entering.add(req.rid)

    def _add_request_to_queue(self, req: Any, is_retracted: bool = False, **kwargs: Any) -> None:
        if is_retracted:
            self.sglrl_preempted += 1
        if req.rid in self._sglrl_entering:
            self._sglrl_entering.discard(req.rid)
            if not req.finished():
                resume.enter(req)
        super()._add_request_to_queue(req, is_retracted, **kwargs)

    def get_new_batch_prefill(self, running_batch: Any) -> Any:
        if (running_batch.batch_is_full or not self.waiting_queue) and self.chunked_req is None:
            # SGLang looks no further, but for grammars and whom it might preempt.
            return super().get_new_batch_prefill(running_batch)
        waiting: list[Any] = self.waiting_queue
        later = self._sglrl_alike.later(waiting, self._sglrl_last_ended)
        if not later:
            return super().get_new_batch_prefill(running_batch)
        self.waiting_queue = [request for request in waiting if request not in later]
        plan = super().get_new_batch_prefill(running_batch)
        left, before = set(self.waiting_queue), set(waiting)
        come = [request for request in self.waiting_queue if request not in before]
        self.waiting_queue = [r for r in waiting if r in later or r in left] + come
        return plan

    def run_batch(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        now = time.monotonic()
        took = min(now - self._sglrl_launched, _LONGEST_STEP)
        self._sglrl_launched = now
        self.sglrl_step_seconds = min(took, self._sglrl_last_step)
        self._sglrl_last_step = took
        self._sglrl_launches += 1
        if self.sglrl_weights is not None:
            self.sglrl_weights.go_on()
        if self._sglrl_launches == 1 and self.device == "cpu":
            from . import cpu

            cpu.give_way()
        if batch.forward_mode.is_extend():
            self._sglrl_last_prefill = self._sglrl_launches
            self._sglrl_alike.launched(self._sglrl_launches, batch.reqs)
            if self.sglrl_adapter is not None:
                # A prompt that is prefilled in parts has its next token after the last one.
                self.sglrl_adapter.next_tokens.expect(batch.reqs, self.chunked_req)
                self.sglrl_adapter.launched(batch)
        result = super().run_batch(batch, *args, **kwargs)
        result.sglrl_version = self.sglrl_version
        result.sglrl_launch = self._sglrl_launches
        result.sglrl_rows = self.sglrl_adapter and self.sglrl_adapter.next_tokens.take()
        return result

    def process_batch_result(self, batch: Any, result: Any, *args: Any, **kwargs: Any) -> Any:
        version = result.sglrl_version
        if version != self._sglrl_processed:
            # Results are processed in the order in which their batches were launched.
            self._sglrl_processed = version
            if self.sglrl_adapter is not None:
                live = [*batch.reqs, *self.running_batch.reqs, *self.waiting_queue]
                if self.chunked_req is not None:
                    live.append(self.chunked_req)
                self.sglrl_adapter.version_changed(
                    version, {r.rid: len(r.output_ids) for r in live}
                )
        if self.sglrl_adapter is not None:
            self.sglrl_adapter.rows = result.sglrl_rows
            self.sglrl_adapter.result_version = version
        end_undrawable(batch, result, version)
        returned = super().process_batch_result(batch, result, *args, **kwargs)
        if self.sglrl_adapter is not None:
            # First: a beat must not say that a prefill is over without the progress made in it.
            self.sglrl_adapter.mailbox.progress += 1
        self._sglrl_last_ended = result.sglrl_launch
        return returned

    def sglrl_beat(self) -> Heartbeat:
        """From any thread."""
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
        """Requests that wait for room, or for their grammar."""
        return len(self.waiting_queue) + len(self.grammar_manager.grammar_queue)

    def sglrl_running(self) -> int:
        """Requests in any batch, also one that is being prefilled, without those that have ended:
        the last ones stand in the batch until another step is made."""
        requests = [] if self.chunked_req is None else [self.chunked_req]
        for batch in (self.running_batch, self.last_batch):
            if batch is not None:
                requests += batch.reqs
        return len({request.rid for request in requests if not request.finished()})

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
        "base_gpu_id": body.gpu_id - body.rank,
        "trust_remote_code": False,
        # SGLang's own watchdog ends the parent process of a scheduler that takes long: here that is
        # the fork server, and with it every worker. The driver watches, and ends the one.
        "watchdog_timeout": 1e9,
        "skip_tokenizer_init": not has_tokenizer(body.model),
    }
    if body.device == "cpu":
        from . import cpu
        from .accelerations import cpu_attention

        cpu.prepare(body.threads)
        cpu_attention.install()
        # The thread that gives a replacement its weights waits so long for the one that decodes,
        # whenever it has waited for anything else.
        sys.setswitchinterval(0.0005)
        args |= cpu.engine_arguments(body.memory_share)
    args |= body.args
    return ServerArgs(**args)


def _memory(body: EngineSpec) -> AbstractContextManager[Any]:
    if body.device != "cpu":
        return nullcontext()
    from . import cpu

    return cpu.UntouchedZeros()


def install_samplers(server_args: ServerArgs, device: str) -> None:
    """What stands in for parts of SGLang's sampler. The order matters: ``draw`` reads what SGLang's
    says, ``finite`` sees what all others make."""
    if device == "cuda":
        # Its kernels need Triton.
        from .accelerations import gpu_sampling

        gpu_sampling.install(server_args)
    seeded_sampling.install(server_args)
    undrawable_tokens.install()


def run_scheduler(spec: WorkerSpec, body: EngineSpec) -> None:
    """Build the scheduler, say ``Ready``, and live in its event loop until ``Shutdown``."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    mailbox = Mailbox(spec) if body.rank == 0 else None
    if mailbox is not None:
        mailbox.starting("loading the model")
    server_args = _server_args(body)
    # Where the ranks meet, in place of a port.
    os.environ["SGLANG_DISTRIBUTED_INIT_METHOD_OVERRIDE"] = f"file://{body.rendezvous}"
    port_args = compat.no_ports()
    install_samplers(server_args, body.device)
    end_of_output.install()
    if server_args.tp_size == 1:
        stop_regex.install()
    resume.install()
    parameter_arena.install()
    adapter = Adapter(mailbox) if mailbox is not None else None
    compat.publish_arguments(server_args, body.rank, body.gpu_id)
    with _memory(body):
        scheduler = SglrlScheduler(
            adapter,
            body.gpu_id,
            *compat.scheduler_arguments(server_args, port_args, body.rank, body.gpu_id),
        )
    device = (
        torch.device(body.device, torch.cuda.current_device())
        if body.device == "cuda"
        else torch.device("cpu")
    )
    if body.device == "cpu":
        from . import cpu

        cpu.check(scheduler.tp_worker.model_runner.model)
    if body.device == "cuda":
        from .accelerations import gpu_sampling

        gpu_sampling.begin(scheduler, device)
    weights = scheduler.sglrl_weights = SglangWeights(scheduler, device, body.rank)
    weights.channel = RankWeights(spec, body.rank, weights)
    short_prefill.install(scheduler.tp_worker.model_runner)
    scheduler.sglrl_queries = Queries(scheduler, None if adapter is None else adapter.answer)
    if adapter is not None and mailbox is not None:
        adapter.scheduler = scheduler
        adapter.begun = time.monotonic()
        adapter.next_tokens.install(scheduler.tp_worker.model_runner)
        window = body.window or max(64, 2 * int(scheduler.max_running_requests))
        start_beats(spec, scheduler.sglrl_beat)
        mailbox.ready(window, adapter.info())
    # What the model and SGLang brought stays: Python's garbage collector need not walk it between
    # two steps.
    gc.freeze()
    scheduler.run_event_loop()
    if mailbox is not None:
        mailbox.close()
    # SGLang's threads and CUDA teardown can take seconds and have nothing left to save.
    os._exit(0)
