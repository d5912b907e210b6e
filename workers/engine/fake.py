"""A deterministic engine without torch, for tests and benchmarks.

The output is the prompt, repeated up to ``max_new_tokens``. The logprob of output position i is
``-(i + 1) / 1024``. In the distribution of the next token, the last token of the prompt is the
likeliest. Each following id is less likely by a factor of e, and 0 follows the largest id. The
likeliest tokens of every output position are 0, 1, ..., with the same falling logprobs. All values
of ``logprobs_mode`` give the same logprobs. A score at temperature t divides all logprobs by t. The
sampling mask of output position i has the token of this position and the i % 3 ids after it. At
output position i, id x of ``token_ids_logprob`` has the logprob ``-x / 1024 - i``, and value j of
the hidden state is ``i + j / 1024``. With ``enable_return_routed_experts=True``, choice j of layer
l at position p of prompt and output is expert (p + l + j) % n, of n experts.

Weights do not change the output, but they have versions. The first update of all tensors may have
any names, shapes and dtypes. Later updates must have the same names, shapes and dtypes. The engine
keeps only checksums of the tensors (see ``fake_weights``). The first message of the weight channel
imports torch.

Engine arguments:

* ``tokens_per_step`` (default: all at once): new tokens of each running request per step.
* ``step_seconds`` (default 0): the fixed part of a step's duration.
* ``request_seconds`` (default 0): time that each running request adds to the duration of a step.
* ``max_running_requests`` (default: no limit): the other requests wait, in the order of arrival.
* ``vocab_size``, ``context_length``: the limits that the engine reports.
* ``hidden_size`` (default 0, for no hidden states): number of values in a hidden state.
* ``fail_start``: the start raises ``RuntimeError`` with this text.
* ``max_lora_rank`` (default 0: no LoRA adapters), ``lora_target_modules``, ``max_loaded_loras``:
  the limits for LoRA adapters, which do not change the output.
* ``fail_lora``: a path. If a file is there when a worker prepares a LoRA adapter, the worker
  removes the file and fails.
* ``routed_experts`` (default (2, 2, 8)): number of layers, of choices per token, and of experts n.
* ``answers``: lists of token ids. Each request outputs the next list in place of the repeated
  prompt, up to ``max_new_tokens`` or to the first of ``stop_token_ids``. Requests after the last
  list repeat the prompt.
* ``hang_file``: a path. If a file is there during a step, the worker removes the file and hangs. If
  the file contains a number, the worker first continues until a request has that many new tokens.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from sglrl.core.hangs import PAUSED, WEIGHTS
from sglrl.errors import InvalidRequest, UnknownAdapter
from sglrl.inference.logit_processors import check_declared
from sglrl.inference.routed_experts import NO_EXPERTS, check_begin
from sglrl.inference.sampling import SentSampling
from sglrl.wire.adapters import LoraCommit, LoraKeep, LoraPart, LoraPrepare
from sglrl.wire.calls import ItemKind
from sglrl.wire.engine import (
    SLEEP_TAGS,
    EngineInfo,
    EngineStats,
    GenerateArgs,
    NextTokenArgs,
    RoutedShape,
    ScoreArgs,
    TokenChunk,
)
from sglrl.wire.processes import EngineSpec, WorkerSpec

from ..mailbox import Mailbox
from .fake_adapters import FakeAdapters
from .fake_controls import FakeControls
from .fake_request import Order, Running
from .protocol import check_given, check_top
from .speed import TokenRate

if TYPE_CHECKING:
    from ..weights.rank_channel import RankWeights
    from ..weights.rank_socket import RankSocket
    from .fake_weights import FakeWeights

_SAMPLINGS = 1024


class FakeEngine:
    """Implements ``SteppingEngine`` as the module's docstring describes."""

    mailbox: Mailbox

    def __init__(self, spec: EngineSpec) -> None:
        options: dict[str, Any] = dict(spec.args)
        if "fail_start" in options:
            raise RuntimeError(str(options["fail_start"]))
        self.model = spec.model
        self.tokens_per_step = int(options.get("tokens_per_step", 1 << 30))
        self.step_seconds = float(options.get("step_seconds", 0.0))
        self.request_seconds = float(options.get("request_seconds", 0.0))
        self.max_running = int(options.get("max_running_requests", 1 << 30))
        self.vocab_size = int(options.get("vocab_size", 1 << 17))
        self.context_length = int(options.get("context_length", 32_768))
        self.hidden_size = int(options.get("hidden_size", 0))
        self.answers = deque(np.array(ids, "<i4").tobytes() for ids in options.get("answers", ()))
        self.hang_file = Path(options["hang_file"]) if "hang_file" in options else None
        self.loras = FakeAdapters(options)
        self.routed: RoutedShape | None = None
        if options.get("enable_return_routed_experts"):
            layers, k, experts = options.get("routed_experts", (2, 2, 8))
            self.routed = RoutedShape(layers, k, "|u1" if experts <= 256 else "<i2")
            at = np.arange(self.context_length)[:, None, None]
            layer, choice = np.arange(layers)[:, None], np.arange(k)
            self.rows = ((at + layer + choice) % experts).astype(self.routed.dtype)
        self.weights: FakeWeights | None = None
        """The weights, or None before the first message of the weight channel imports torch."""
        self.version = 0
        self.empty = False
        """Whether a sleep has dropped the weights, and no update has sent new ones since."""
        self.orders: deque[Order] = deque()
        """Work that other threads have requested, to be done between two steps."""
        self.held_back: dict[int, Running] | None = None
        """New requests that wait until earlier requests end. None if no order has "drain"."""
        self.updating = False
        self.requests: dict[int, Running] = {}
        self.controls = FakeControls(self)
        self.stopped = False
        """Whether the engine was paused and not resumed since."""
        self.asleep: tuple[str, ...] = ()
        self.later: dict[int, Callable[[], None]] = {}
        """By call id: sends the answer of a call that needs no step and arrived during a pause."""
        self.generated = 0
        self.prompted = 0
        self.request_steps = 0
        self.begun = time.monotonic()
        self.rate = TokenRate(self.begun)
        table = -(np.arange(self.context_length, dtype=np.float32) + 1) / 1024
        self.table = table.astype("<f4").tobytes()
        falling = -np.arange(self.vocab_size, dtype=np.float64)
        falling -= np.log(np.exp(falling).sum())
        self.falling = falling.astype("<f4")
        self.sampling = msgspec.msgpack.Decoder(SentSampling)
        self.samplings: dict[bytes, SentSampling] = {}

    @property
    def paused(self) -> bool:
        return self.stopped or self.empty or bool(self.asleep)

    @property
    def phase(self) -> str:
        if self.updating:
            return WEIGHTS
        return PAUSED if self.paused else ""

    @property
    def busy(self) -> bool:
        return bool(self.requests) and not self.paused

    def generate(self, id_: int, args: GenerateArgs) -> None:
        raw = bytes(args.sampling)
        sampling = self.samplings.get(raw)
        if sampling is None:
            sampling = self.sampling.decode(raw)
            if len(self.samplings) >= _SAMPLINGS:
                self.samplings.clear()
            self.samplings[raw] = sampling
        count, odd = divmod(len(args.input_ids), 4)
        done = len(args.resume) // 4
        if odd or not count or not done <= sampling.max_new_tokens <= self.context_length - count:
            raise InvalidRequest(
                f"{count} tokens and {sampling.max_new_tokens} new ones do not fit a context of "
                f"{self.context_length}"
            )
        check_top(args.top_logprobs, self.vocab_size)
        check_given(sampling.token_ids_logprob, self.vocab_size)
        if sampling.return_routed_experts and self.routed is None:
            raise InvalidRequest(NO_EXPERTS)
        check_declared(sampling.logit_processor, ())
        check_begin(args)
        self.loras.check(args.lora)
        self.prompted += count
        to = self.requests if self.held_back is None else self.held_back
        made = to[id_] = Running(
            args.input_ids,
            args.input_ids,
            sampling.max_new_tokens,
            args.logprobs,
            args.stream,
            args.top_logprobs,
            sampling.return_sampling_mask,
            tuple(sampling.token_ids_logprob),
            sampling.return_hidden_states,
            args.routed_from + args.resume_rows if sampling.return_routed_experts else -1,
            done,
            done,
            args.lora,
        )
        if self.answers and not done:
            made.answer_with(self.answers.popleft(), tuple(sampling.stop_token_ids))

    def score(self, id_: int, args: ScoreArgs) -> None:
        count = len(args.input_ids) // 4
        if not 0 <= args.start < count:
            raise InvalidRequest(f"start={args.start} is not within the {count} tokens given")
        check_top(args.top_logprobs, self.vocab_size)
        self.loras.check(args.lora)
        count -= args.start
        top = args.top_logprobs
        falling = self.falling[:top] / np.float32(args.temperature)
        chunk = TokenChunk(
            b"",
            (np.frombuffer(self.table, "<f4", count) / np.float32(args.temperature)).tobytes(),
            "stop",
            top_ids=np.tile(np.arange(top, dtype="<i4"), count).tobytes(),
            top_logprobs=np.tile(falling, count).tobytes(),
            lora_version=self.loras.version(args.lora),
        )
        self._when_running(id_, partial(self._answer, id_, chunk))

    def next_token_logprobs(self, id_: int, args: NextTokenArgs) -> None:
        if len(args.input_ids) < 4:
            raise InvalidRequest("there is no token given")
        check_top(args.top_k, self.vocab_size)
        self.loras.check(args.lora)
        last = int.from_bytes(args.input_ids[-4:], "little")
        if args.top_k:
            ids = (np.arange(args.top_k, dtype="<i4") + last) % self.vocab_size
            chunk = TokenChunk(
                b"", top_ids=ids.tobytes(), top_logprobs=self.falling[: args.top_k].tobytes()
            )
            self._when_running(id_, partial(self._answer, id_, chunk))
        else:
            row = np.roll(self.falling, last).tobytes()
            self._when_running(id_, partial(self._answer, id_, TokenChunk(b""), row))

    def _answer(self, id_: int, chunk: TokenChunk, row: bytes | None = None) -> None:
        """Answer a request that needs no step, with the current version of the weights."""
        chunk = msgspec.structs.replace(chunk, version=self.version)
        if row is None:
            self.mailbox.put(id_, ItemKind.DONE, chunk)
        else:
            self.mailbox.put_row(id_, chunk, row)

    def adapters(self, id_: int, args: LoraPart | LoraPrepare | LoraCommit | LoraKeep) -> None:
        answer = self.loras.handle(args)
        for request, running in [*self.requests.items()]:
            if running.lora and running.lora not in self.loras.loaded:
                del self.requests[request]
                error = f"the adapter {running.lora!r} was unloaded"
                self.mailbox.put_error(request, UnknownAdapter.__name__, error)
        self.mailbox.put_value(id_, answer)

    def _when_running(self, id_: int, answer: Callable[[], None]) -> None:
        self.request_steps += 1
        if self.paused:
            self.later[id_] = answer
        else:
            answer()

    def abort(self, id_: int) -> None:
        held_back = self.held_back or {}
        request = self.requests.pop(id_, None) or held_back.pop(id_, None)
        if request or self.later.pop(id_, None):
            self.mailbox.put(id_, ItemKind.CANCELLED)

    def abort_all(self) -> int:
        requests = {**self.requests, **(self.held_back or {})}
        self.requests = {}
        if self.held_back is not None:
            self.held_back = {}
        for id_, request in requests.items():
            self._emit(id_, request, "abort")
        return len(requests)

    # --- weights ----------------------------------------------------------------------------------

    def make_weights(self, spec: WorkerSpec, socket: RankSocket) -> RankWeights:
        """Return the weight channel. Called on the socket's thread."""
        import torch

        from ..weights.rank_channel import RankWeights
        from .fake_weights import FakeWeights

        torch.set_num_threads(1)
        self.weights = FakeWeights(self)
        self.weights.channel = RankWeights(spec, 0, self.weights, socket)
        return self.weights.channel

    def order(self, work: Callable[[], None], inflight: str, is_over: Callable[[], bool]) -> None:
        """Queue work to be done between two steps. Called on the threads of the weight channel.

        Args:
            inflight: "drain": running requests finish before the work. "abort": they are aborted.
                Other values: they continue after the work.
            is_over: returns True if the work is no longer wanted.
        """
        self.orders.append(Order(work, inflight, is_over))
        self.wake()

    def wake(self) -> None:
        """End the wait of an idle engine. Called on the threads of the weight channel."""
        self.mailbox.wake()

    def switch(self, version: int) -> None:
        """Use this version of the weights from the next step on."""
        self._report_all()
        self.version = version
        if self.empty:
            self.empty = False
            self.go_on()

    def between_steps(self) -> None:
        while self.orders:
            order = self.orders[0]
            if order.inflight == "drain" and self.requests and not order.is_over():
                self.held_back = self.held_back or {}
                return
            self.orders.popleft()
            if not order.is_over():
                if order.inflight == "abort":
                    self.abort_all()
                self.updating = True
                order.work()
                self.updating = False
            if self.held_back is not None:
                self.requests |= self.held_back
                self.held_back = None

    def _report_all(self) -> None:
        """Report all tokens so far, because later tokens will have another version."""
        for id_, request in self.requests.items():
            if request.done > request.sent:
                self._emit(id_, request, "")

    # --- pausing ----------------------------------------------------------------------------------

    def go_on(self) -> None:
        """Send the answers in ``later``, unless the engine is still paused."""
        if self.paused:
            return
        later, self.later = self.later, {}
        for answer in later.values():
            answer()

    def step(self) -> None:
        running = min(len(self.requests), self.max_running)
        self.request_steps += running
        if seconds := self.step_seconds + running * self.request_seconds:
            time.sleep(seconds)
        if self.hang_file is not None:
            self._hang_if_told(self.hang_file)
        finished, now = [], time.monotonic()
        for id_, request in islice(self.requests.items(), self.max_running):
            new = min(self.tokens_per_step, request.limit - request.done)
            request.done += new
            self.generated += new
            self.rate.add(new, now)
            last = request.done == request.limit
            if last or request.stream or request.done - request.sent >= 16:
                self._emit(id_, request, request.finish if last else "")
            if last:
                finished.append(id_)
        for id_ in finished:
            del self.requests[id_]

    def _hang_if_told(self, file: Path) -> None:
        with contextlib.suppress(FileNotFoundError):
            tokens = int(file.read_text(encoding="utf-8") or 0)
            if any(request.done >= tokens for request in self.requests.values()):
                file.unlink()
                while True:
                    time.sleep(3600.0)

    def _emit(self, id_: int, request: Running, finish: str) -> None:
        answer, begin, end = request.answer, request.sent * 4, request.done * 4
        ids = (answer * (end // len(answer) + 1))[begin:end]
        chunk = TokenChunk(
            ids,
            self.table[begin:end] if request.logprobs else b"",
            finish,
            version=self.version,
            stop_match=request.stop_match if finish == "stop" else None,
            lora_version=self.loras.version(request.lora),
        )
        if top := request.top:
            count = request.done - request.sent
            chunk = msgspec.structs.replace(
                chunk,
                top_ids=np.tile(np.arange(top, dtype="<i4"), count).tobytes(),
                top_logprobs=np.tile(self.falling[:top], count).tobytes(),
            )
        if request.given:
            at = np.arange(request.sent, request.done, dtype="<f4")[:, None]
            rows = -np.array(request.given, "<f4") / 1024 - at
            chunk = msgspec.structs.replace(chunk, given_logprobs=rows.tobytes())
        if request.hidden:
            at = np.arange(request.sent, request.done, dtype="<f4")[:, None]
            states = at + np.arange(self.hidden_size, dtype="<f4") / 1024
            chunk = msgspec.structs.replace(chunk, hidden_states=states.tobytes())
        if request.mask:
            chunk = self._with_mask(chunk, request.sent)
        request.sent = request.done
        routed = None
        if request.routed >= 0:
            # The last token has not been the input of a step, so it has no row.
            routed = self.rows[request.routed : len(request.prompt) // 4 + request.done - 1]
            request.routed += len(routed)
        self.mailbox.put(id_, ItemKind.DONE if finish else ItemKind.CHUNK, chunk, routed)

    def _with_mask(self, chunk: TokenChunk, begin: int) -> TokenChunk:
        """Add the sampling masks of the tokens in ``chunk``, which start at position ``begin``."""
        sets = [
            sorted((token + more) % self.vocab_size for more in range(1 + at % 3))
            for at, token in enumerate(np.frombuffer(chunk.ids, "<i4").tolist(), begin)
        ]
        return msgspec.structs.replace(
            chunk,
            mask_ids=np.array([id_ for one in sets for id_ in one], "<i4").tobytes(),
            mask_lengths=np.array([len(one) for one in sets], "<i4").tobytes(),
        )

    def stats(self) -> EngineStats:
        now = time.monotonic()
        held = sum(r.done for r in self.requests.values()) if len(self.requests) < 64 else 0
        running = min(len(self.requests), self.max_running)
        return EngineStats(
            running=running,
            waiting=len(self.requests) - running,
            kv_tokens=held,
            kv_capacity=1 << 20,
            prompt_tokens=self.prompted,
            cached_tokens=0,
            generated_tokens=self.generated,
            uptime=now - self.begun,
            tokens_per_second=self.rate.per_second(now),
            asleep=self.asleep,
        )

    def info(self) -> EngineInfo:
        return EngineInfo(
            model=self.model,
            architecture="FakeEngine",
            dtype="float32",
            device="cpu",
            vocab_size=self.vocab_size,
            context_length=self.context_length,
            max_prompt_tokens=self.context_length - 1,
            max_total_tokens=self.context_length,
            eos_token_ids=[],
            kv_cache_tokens=1 << 20,
            max_lora_rank=self.loras.max_rank,
            lora_target_modules=self.loras.modules,
            max_loaded_loras=self.loras.most,
            sleep_tags=SLEEP_TAGS,
            hidden_size=self.hidden_size,
            routed_experts=self.routed,
        )
