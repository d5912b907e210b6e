"""Translate calls of the driver to SGLang requests, and SGLang's outputs to results."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from sglang.srt.managers.io_struct import (
    AbortReq,
    BatchTokenIDOutput,
    FlushCacheReqOutput,
    ProfileReqOutput,
    ShutdownReq,
    TokenizedGenerateReqInput,
)

from sglrl.errors import InvalidRequest, UnknownAdapter
from sglrl.inference.routed_experts import NO_EXPERTS, check_begin
from sglrl.wire.calls import ItemKind, Load
from sglrl.wire.engine import (
    EngineInfo,
    GenerateArgs,
    NextTokenArgs,
    ScoreArgs,
    TokenChunk,
)

from ...mailbox import Mailbox
from ..loop import IDLE_WAIT
from ..protocol import check_top
from . import convert
from .aborts import Aborts
from .accelerations.queries import Known
from .commands import Report, Resume
from .controls import Controls
from .lora_calls import LoraArgs, LoraCalls
from .next_token import Rows
from .patches import logit_processors, routed_experts
from .reports import engine_info
from .request_table import RequestTable
from .routed_rows import RoutedRows
from .tracked_request import MASKS_TOO_LARGE, TrackedRequest, Versions

logger = logging.getLogger("sglrl.worker")

_DRAIN_WAIT = 0.05
"""Poll interval in seconds while a weight update or a sleep waits for a paused engine.

The engine polls, because no message reports that the driver has given up the update.
"""

Tokens = GenerateArgs | ScoreArgs | NextTokenArgs


class Adapter(RequestTable):
    """Implements ``Engine`` on top of SGLang's scheduler.

    The adapter collects requests until the scheduler pulls them.
    """

    def __init__(self, mailbox: Mailbox) -> None:
        super().__init__(mailbox)
        self.accelerations: tuple[str, ...] = ()
        """The names of the accelerations of SGLang that are on."""
        self.aborts = Aborts(self)
        self.controls = Controls(self, self.aborts)
        self.draining = self.controls.draining
        self.lora = LoraCalls(self, self.aborts)
        self.rows: Rows | None = None
        """Next-token logprobs of the batch whose results are processed now."""
        self.result_version = 0
        """The version of the weights with which the batch of ``rows`` ran."""
        self.result_loras: Mapping[str, int] = {}
        """The versions of the LoRA adapters with which this batch ran, by SGLang's ids."""

    # --- calls of the driver ----------------------------------------------------------------------

    def generate(self, id_: int, args: GenerateArgs) -> None:
        scheduler = self.scheduler
        check_top(args.top_logprobs, scheduler.model_config.vocab_size)
        params, wanted = self.samplings.get(bytes(args.sampling), args.stream)
        if wanted.experts and routed_experts.shape() is None:
            raise InvalidRequest(NO_EXPERTS)
        check_begin(args)
        begun = convert.token_array(args.resume)
        asked = convert.generate_request(id_, args, params, self._priority(args), wanted)
        more = {"given": len(wanted.token_ids), "hidden": wanted.hidden}
        request = self._track(asked, args, args.top_logprobs, generates=True, **more)
        if begun:
            self.incoming.append(Resume(convert.request_id(id_), begun))
        if wanted.report:
            self.incoming.append(Report(convert.request_id(id_), wanted.logprobs_mode, wanted.mask))
        self.incoming.append(asked)
        request.sent = request.resumed = len(begun)
        if wanted.mask:
            request.masks = {}
        if wanted.experts:
            begin, prompt = args.routed_from + args.resume_rows, len(args.input_ids) // 4
            request.routed = RoutedRows(begin, prompt)
        self.requests[id_] = request

    def _track(self, asked: Any, args: Tokens, top: int, **values: Any) -> TrackedRequest:
        """Set the LoRA adapter of SGLang's request, and return our record of the request.

        Raises:
            UnknownAdapter: the LoRA adapter is not loaded.
        """
        version = self.scheduler.sglrl_version
        if not args.lora:
            return TrackedRequest((version, 0), top, **values)
        uid = asked.lora_id = self.lora.uid(args.lora)
        return TrackedRequest((version, self.lora.version(uid)), top, lora=uid, **values)

    @cached_property
    def samplings(self) -> convert.Samplings:
        scheduler, args = self.scheduler, self.scheduler.server_args
        spaces = not args.constrained_json_disable_any_whitespace
        return convert.Samplings(
            scheduler.tokenizer,
            scheduler.model_config.vocab_size,
            args.stream_interval,
            logit_processors.names(),
            spaces if args.grammar_backend == "xgrammar" else None,
        )

    def score(self, id_: int, args: ScoreArgs) -> None:
        count = len(args.input_ids) // 4
        if not 0 <= args.start < count:
            raise InvalidRequest(f"start={args.start} is not within the {count} tokens given")
        check_top(args.top_logprobs, self.scheduler.model_config.vocab_size)
        params = convert.score_params()
        asked = convert.score_request(id_, args, params, self._priority(args))
        self.requests[id_] = self._track(asked, args, args.top_logprobs, score_start=args.start)
        if args.temperature != 1:
            self.incoming.append(Report(asked.rid, temperature=args.temperature))
        self.incoming.append(asked)

    def next_token_logprobs(self, id_: int, args: NextTokenArgs) -> None:
        if len(args.input_ids) < 4:
            raise InvalidRequest("there is no token given")
        check_top(args.top_k, self.scheduler.model_config.vocab_size)
        params, priority = self.next_tokens.params, self._priority(args)
        asked = convert.next_token_request(id_, args, params, priority)
        self.requests[id_] = self._track(asked, args, args.top_k)
        self.incoming.append(asked)
        self.next_tokens.wanted[convert.request_id(id_)] = args.top_k

    def _priority(self, args: Tokens) -> int | None:
        return args.priority if self.scheduler.enable_priority_scheduling else None

    def adapters(self, id_: int, args: LoraArgs) -> None:
        self.lora.receive(id_, args)

    def abort(self, id_: int) -> None:
        if id_ not in self.requests:
            return
        if self.aborts.take_unsent(id_):
            self.mailbox.put(id_, ItemKind.CANCELLED)
            return
        self.cancelled.add(id_)
        self.incoming.append(AbortReq(rid=convert.request_id(id_)))

    def info(self) -> EngineInfo:
        return engine_info(self.scheduler, self.accelerations, self.lora.limits)

    # --- calls of the scheduler -------------------------------------------------------------------

    def pull(self) -> list[Any]:
        """Return the requests that arrived since the last scheduler step, as SGLang's types."""
        commands = self.draining.commands
        commands.await_expected(self.scheduler)
        if self.scheduler.sglrl_paused and not (
            self.controls.flushing or commands or self.draining.pausing
        ):
            # Without this wait SGLang's loop would spin.
            self.mailbox.flush()
            self.mailbox.wait(IDLE_WAIT if self.draining.waiting is None else _DRAIN_WAIT)
        self.mailbox.receive(self)
        self.lora.turn()
        self.controls.pull_flush()
        if self.requests and self.mailbox.report_is_due:
            self._flush()
        else:
            self.mailbox.flush()
        incoming, self.incoming = self.incoming, []
        if self.draining:
            incoming = self.draining.ordered(incoming)
        weights = str(self.scheduler.sglrl_weight_changes)
        for request in incoming:
            if isinstance(request, TokenizedGenerateReqInput):
                # KV that was computed with one version of the weights is never reused with another.
                request.extra_key = weights + self.lora.cache_key(request.lora_id)
        if self.mailbox.stopped:
            incoming.append(ShutdownReq())
        return incoming

    @property
    def pending(self) -> bool:
        """Whether a call waits for an empty prefix cache, or ``draining`` has work."""
        return self.controls.flushing or bool(self.draining)

    def tokens(self, output: BatchTokenIDOutput) -> None:
        """Send the output of one scheduler step to the driver, in one message."""
        mailbox, now = self.mailbox, time.monotonic()
        for i, rid in enumerate(output.rids):
            id_ = convert.call_id(rid)
            request = self.requests.get(id_)
            if request is None:
                continue
            kind, error, text = convert.end_of(output.finished_reasons[i])
            if kind == ItemKind.CHUNK and not len(output.output_ids[i]):
                continue
            self.rate.add(max(0, output.completion_tokens[i] - request.sent), now)
            if kind == ItemKind.CHUNK:
                self._return(id_, request, output, i, kind)
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
            elif request.unloaded:
                mailbox.put_error(id_, UnknownAdapter.__name__, request.unloaded)
            elif kind == ItemKind.ERROR:
                mailbox.put_error(id_, error, text)
            elif request.score_start >= 0:
                chunk = convert.score_chunk(
                    output, i, request.score_start, request.top, request.prefills
                )
                mailbox.put(id_, kind, chunk)
            elif next_token:
                assert self.rows is not None
                versions = self._versions(request, self.result_version, self.result_loras)
                self.rows.put(mailbox, id_, rid, output.cached_tokens[i], versions)
            else:
                self._return(id_, request, output, i)
        self._flush()

    def _versions(
        self, request: TrackedRequest, version: int, loras: Mapping[str, int]
    ) -> Versions:
        return version, 0 if request.lora is None else loras.get(request.lora, 0)

    def launched(self, batch: Any) -> None:
        """Record the versions of the weights and LoRA adapters that a launched prefill uses.

        Only scoring requests need these versions.
        """
        scheduler = self.scheduler
        for request, begin in zip(batch.reqs, batch.prefix_lens, strict=True):
            if request.return_logprob:
                known = self.requests.get(convert.call_id(request.rid))
                if known is not None and known.score_start >= 0:
                    known.prefilled(
                        begin,
                        self._versions(known, scheduler.sglrl_version, scheduler.sglrl_loras),
                    )

    def answer(
        self, queries: Sequence[Known], logits: torch.Tensor, at: Sequence[int]
    ) -> Callable[[], None]:
        """Prepare the answers to next-token queries that never entered SGLang's queue.

        Returns:
            A function that sends the answers.
        """
        expected = [
            (row, query.request.rid, self.next_tokens.wanted.pop(query.request.rid))
            for row, query in zip(at, queries, strict=True)
        ]
        rows = self.next_tokens.rows(logits, expected)
        # These queries are off in an engine with LoRA adapters, so the LoRA version is 0.
        versions = self.scheduler.sglrl_version, 0

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
                    rows.put(self.mailbox, id_, rid, query.cached, versions)
            self.mailbox.progress += 1
            self.scheduler.sglrl_request_steps += len(queries)
            self._flush()

        return send

    def _flush(self) -> None:
        scheduler, steps = self.scheduler, self.scheduler.sglrl_steps
        used, capacity = scheduler.kv_tokens()
        self.mailbox.flush(
            Load(
                kv_usage=used / capacity if capacity else 0.0,
                waiting=scheduler.sglrl_waiting(),
                preempted=scheduler.sglrl_preempted,
                step_seconds=steps.mean,
                shortest_step=steps.shortest,
                request_steps=scheduler.sglrl_request_steps,
            )
        )

    def _return(
        self,
        id_: int,
        request: TrackedRequest,
        output: Any,
        i: int,
        kind: int = ItemKind.DONE,
    ) -> None:
        """Send the new tokens of a request. They are the last tokens unless ``kind`` is CHUNK."""
        *chunks, last = self._chunks(request, output, i)
        for chunk in chunks:
            self.mailbox.put(id_, ItemKind.CHUNK, chunk)
        rows = None if request.routed is None else request.routed.take(request.sent)
        self.mailbox.put(id_, kind, last, rows)

    def routed(self, request: Any, at: int, rows: NDArray[Any]) -> None:
        """Keep the routed experts of consecutive tokens of a request.

        Args:
            at: the position of the token of the first row.
        """
        known = self.requests.get(convert.call_id(request.rid))
        if known is not None and known.routed is not None:
            known.routed.add(at, rows, partial(routed_experts.cached, self.scheduler, request))

    @staticmethod
    def _chunks(request: TrackedRequest, output: Any, i: int) -> list[TokenChunk]:
        """Convert the new output of a request, and count it as sent."""
        count = len(output.output_ids[i])
        masks, parts = request.take_masks(count), request.take(count)
        states = convert.take_states(output, i) if request.hidden else None
        return convert.token_chunks(output, i, request.top, parts, masks, request.given, states)

    def drawable(self, rid: str, at: int, ids: NDArray[np.int32]) -> None:
        """Record the tokens that could be drawn at an output position.

        A position is reported again if its token was discarded.
        """
        id_ = convert.call_id(rid)
        request = self.requests.get(id_)
        if request is None or not request.add_mask(at, ids) or id_ in self.cancelled:
            return
        del self.requests[id_]
        self.returned.discard(id_)
        self.incoming.append(AbortReq(rid=rid))
        self.mailbox.put_error(id_, "InvalidRequest", MASKS_TOO_LARGE.format(at + 1))

    def version_changed(
        self, version: int, loras: Mapping[str, int], produced: dict[str, int]
    ) -> None:
        """Record that tokens come from these versions from the next result on.

        Args:
            version: the version of the weights.
            loras: the versions of the LoRA adapters, by SGLang's ids.
            produced: the number of output tokens so far, by SGLang's request id.
        """
        for id_, request in self.requests.items():
            at = produced.get(convert.request_id(id_), 0)
            request.changed(at, self._versions(request, version, loras))

    def control(self, output: Any, about: Any) -> None:
        """Handle a message from SGLang to its tokenizer manager.

        Three kinds of messages matter: answers to a flush, answers to a request of the profiler,
        and the abort of a request.

        Args:
            about: the ``ProfileReq`` that is answered, or SGLang's request that was aborted.
        """
        if isinstance(output, FlushCacheReqOutput):
            self.controls.flushed(output.success)
            self.mailbox.flush()
        if isinstance(output, ProfileReqOutput):
            self.controls.profiled(about, output)
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
        elif request.unloaded:
            self.mailbox.put_error(id_, UnknownAdapter.__name__, request.unloaded)
        elif returned:
            self._return(id_, request, convert.rest_of(about, request.sent), 0)
        else:
            reason: Any = output.finished_reason or {}
            self.mailbox.put_error(
                id_, "EngineError", str(reason.get("message") or "the engine aborted the request")
            )
        self.mailbox.flush()
