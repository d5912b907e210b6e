"""Convert our messages to SGLang's requests, and SGLang's outputs to our messages."""

from __future__ import annotations

import copy
import re
from array import array
from collections.abc import Collection, Mapping
from types import SimpleNamespace
from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray
from sglang.srt.managers.io_struct import BatchTokenIDOutput, TokenizedGenerateReqInput
from sglang.srt.sampling.sampling_params import SamplingParams

from sglrl.errors import InvalidRequest
from sglrl.inference.engine_grammar import engine_grammar
from sglrl.inference.logit_processors import check_declared
from sglrl.inference.sampling import SCALED_LOGPROBS, SentSampling
from sglrl.wire.calls import ItemKind
from sglrl.wire.engine import GenerateArgs, NextTokenArgs, ScoreArgs, TokenChunk

from ..protocol import check_given
from .no_tokenizer import NoTokenizer
from .tracked_request import Versions

_sampling = msgspec.msgpack.Decoder(SentSampling)
_SAMPLINGS = 256
_MAX_BYTES = 4
"""Maximum number of bytes of a UTF-8 character."""
_XGRAMMAR_PLACE = re.compile(r"\[\d\d:\d\d:\d\d\] \S+:\d+: ")
"""The time and the C++ source line that xgrammar writes before its errors."""
PROGRESS_TOKENS = 64
"""Tokens between two reports of a call that is not streamed.

When a worker is lost, each of its calls loses at most this many tokens. One report costs the
scheduler's thread as much time as several tokens.
"""


def request_id(id_: int) -> str:
    """Return SGLang's id of a call.

    The id ends in a dot because SGLang aborts by prefix: "1" would also abort "12".
    """
    return f"{id_}."


def call_id(rid: str) -> int:
    """Return the id of the call for one of SGLang's request ids."""
    return int(rid[:-1])


def token_array(ids: bytes) -> array[int]:
    """Convert int32 bytes to the int64 array that SGLang stores."""
    tokens = array("q")
    tokens.frombytes(np.frombuffer(ids, dtype="<i4").astype(np.int64).tobytes())
    return tokens


class Wanted(NamedTuple):
    """The reports of a request beside its tokens and logprobs, and its logit processor.

    Attributes:
        logprobs_mode, mask: the fields of ``commands.Report``.
        token_ids: the tokens whose logprobs are reported at each position.
        hidden: whether the hidden states are reported.
        experts: whether the routed experts are reported.
        processor: the name of the request's logit processor, or "".
    """

    logprobs_mode: str = SCALED_LOGPROBS
    mask: bool = False
    token_ids: tuple[int, ...] = ()
    hidden: bool = False
    experts: bool = False
    processor: str = ""

    @property
    def report(self) -> bool:
        """Whether the request needs a ``Report`` command, beside SGLang's own results."""
        return self.mask or self.logprobs_mode != SCALED_LOGPROBS


class Samplings:
    """A cache of SGLang's sampling parameters, with one entry for each distinct value.

    Args:
        stream_interval: the number of tokens in each report of a streamed request.
        processors: the names of the logit processors that requests may use.
        spaces: whether JSON may contain any white space. None if the engine does not use XGrammar
            and receives grammars unchanged.
    """

    def __init__(
        self,
        tokenizer: Any,
        vocab_size: int,
        stream_interval: int = 1,
        processors: Collection[str] = (),
        spaces: bool | None = True,
    ) -> None:
        self._spaces = spaces
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._stream_interval = stream_interval
        self._processors = processors
        self._known: dict[tuple[bytes, bool], tuple[SamplingParams, Wanted]] = {}

    def get(self, raw: bytes, stream: bool) -> tuple[SamplingParams, Wanted]:
        """Return the sampling parameters of one request, and its reports.

        Raises:
            InvalidRequest: the values are wrong, or SGLang rejects them.
        """
        entry = self._known.get((raw, stream))
        if entry is None:
            s = _sampling.decode(raw)
            interval = self._stream_interval if stream else PROGRESS_TOKENS
            grammar = _engine_grammar(s, self._spaces)
            params = sampling_params(s, grammar, interval, self._tokenizer, self._vocab_size)
            check_given(s.token_ids_logprob, self._vocab_size)
            check_declared(s.logit_processor, self._processors)
            entry = params, _wanted(s)
            if len(self._known) >= _SAMPLINGS:
                self._known.clear()
            self._known[raw, stream] = entry
        # Copy, because SGLang changes some parameters for one request.
        return copy.copy(entry[0]), entry[1]


def _engine_grammar(s: SentSampling, spaces: bool | None) -> dict[str, str]:
    """Return the grammars for SGLang, by the names of SGLang's parameters."""
    if spaces is None:
        return {name: getattr(s, name) for name in s.grammars}
    return dict(engine_grammar(name, getattr(s, name), spaces) for name in s.grammars)


def _wanted(s: SentSampling) -> Wanted:
    return Wanted(
        s.logprobs_mode,
        s.return_sampling_mask,
        tuple(s.token_ids_logprob),
        s.return_hidden_states,
        s.return_routed_experts,
        s.logit_processor or "",
    )


def sampling_params(
    s: SentSampling, grammar: Mapping[str, str], interval: int, tokenizer: Any, vocab_size: int
) -> SamplingParams:
    """Convert our sampling parameters to SGLang's.

    Args:
        grammar: the grammars for SGLang, by the names of SGLang's parameters.
        interval: the number of tokens in each report.

    Raises:
        InvalidRequest: SGLang rejects the values, or they need a tokenizer that the model lacks.
    """
    if isinstance(tokenizer, NoTokenizer):
        if s.stop or s.stop_regex:
            raise InvalidRequest(
                "stop and stop_regex need a tokenizer and this model has none; use stop_token_ids"
            )
        if s.grammars:
            raise InvalidRequest("a grammar needs a tokenizer, and this model has none")
    params = SamplingParams(
        max_new_tokens=s.max_new_tokens,
        stop=list(s.stop_strings) or None,
        stop_token_ids=set(s.stop_token_ids) or None,
        stop_regex=list(s.stop_regex) or None,
        temperature=s.temperature,
        top_p=s.top_p,
        top_k=s.top_k,
        min_p=s.min_p,
        frequency_penalty=s.frequency_penalty,
        presence_penalty=s.presence_penalty,
        repetition_penalty=s.repetition_penalty,
        min_new_tokens=s.min_new_tokens,
        **grammar,
        logit_bias={str(token): bias for token, bias in (s.logit_bias or {}).items()} or None,
        ignore_eos=s.ignore_eos,
        skip_special_tokens=s.skip_special_tokens,
        sampling_seed=s.seed,
        stream_interval=interval,
        # SGLang adds the request to this dict, even if the dict is empty.
        custom_params=(s.custom_params or {}) if s.logit_processor else None,
    )
    try:
        params.normalize(tokenizer)
        params.verify(vocab_size)
        # SGLang searches a limited number of last tokens for a stop. SGLang's limits count the
        # tokens that the tokenizer makes of the text, and one token for each character of a regular
        # expression. But a model may produce the same text with one token for each byte.
        params.stop_str_max_len = max((len(text.encode()) for text in s.stop_strings), default=0)
        params.stop_regex_max_len *= _MAX_BYTES
    except (ValueError, re.error, OverflowError, RecursionError) as error:
        raise InvalidRequest(str(error)) from None
    return params


def score_params() -> SamplingParams:
    """Return the sampling parameters of a prefill that generates no token."""
    params = SamplingParams(max_new_tokens=0, temperature=1.0)
    params.normalize(None)
    return params


def generate_request(
    id_: int,
    args: GenerateArgs,
    params: SamplingParams,
    priority: int | None,
    wanted: Wanted | None = None,
) -> TokenizedGenerateReqInput:
    """Return a request for new tokens."""
    token_ids = () if wanted is None else wanted.token_ids
    return _request(
        id_,
        args,
        params,
        return_logprob=args.logprobs or args.top_logprobs > 0 or len(token_ids) > 0,
        # With -1, SGLang would also compute the logprobs of ``token_ids`` for the prompt.
        logprob_start_len=len(args.input_ids) // 4 if token_ids else -1,
        top_logprobs_num=args.top_logprobs,
        token_ids_logprob=list(token_ids) or None,
        return_hidden_states=wanted is not None and wanted.hidden,
        custom_logit_processor=(wanted and wanted.processor) or None,
        # With stream=True, SGLang reports after every ``stream_interval`` tokens.
        stream=True,
        priority=priority,
    )


def score_request(
    id_: int, args: ScoreArgs, params: SamplingParams, priority: int | None = None
) -> TokenizedGenerateReqInput:
    """Return a prefill request for the logprobs of the prompt's own tokens."""
    return _request(
        id_,
        args,
        params,
        return_logprob=True,
        # SGLang omits the logprob of the first position, so start one position earlier.
        logprob_start_len=max(0, args.start - 1),
        top_logprobs_num=args.top_logprobs,
        token_ids_logprob=None,
        stream=False,
        priority=priority,
    )


def next_token_request(
    id_: int, args: NextTokenArgs, params: SamplingParams, priority: int | None = None
) -> TokenizedGenerateReqInput:
    """Return a prefill request. ``next_token.py`` reads the logits after the forward pass."""
    return _request(
        id_,
        args,
        params,
        return_logprob=False,
        logprob_start_len=-1,
        top_logprobs_num=0,
        token_ids_logprob=None,
        stream=False,
        priority=priority,
    )


def _request(
    id_: int,
    args: GenerateArgs | ScoreArgs | NextTokenArgs,
    params: SamplingParams,
    **fields: Any,
) -> TokenizedGenerateReqInput:
    return TokenizedGenerateReqInput(
        rid=request_id(id_),
        input_text=None,
        input_ids=token_array(args.input_ids),
        input_embeds=None,
        mm_inputs=None,
        token_type_ids=None,
        sampling_params=params,
        **fields,
    )


def _matrix(rows: list[Any], k: int, dtype: str) -> bytes:
    """Cut each of t rows to its first k values, and return the bytes of the [t, k] array."""
    return np.array([row[:k] for row in rows], dtype=dtype).tobytes()


def cached_tokens(output: BatchTokenIDOutput | SimpleNamespace, i: int) -> int:
    """Return the number of cached prompt tokens of request ``i``.

    SGLang's count may include cached output tokens of a resumed request.
    """
    return min(int(output.cached_tokens[i]), int(output.prompt_tokens[i]))


def token_chunks(
    output: BatchTokenIDOutput | SimpleNamespace,
    i: int,
    top: int,
    parts: list[tuple[int, Versions]],
    masks: list[NDArray[np.int32]] | None = None,
    given: int = 0,
    states: NDArray[np.float32] | None = None,
) -> list[TokenChunk]:
    """Convert the output of request ``i`` in one step.

    Args:
        top: the number of top logprobs that the request reports.
        parts: (number of tokens, versions) of each part of the output, in order. The last part
            contains all remaining tokens.
        masks: for each token, the tokens that could be drawn. None if they are not reported.
        given: the number of token ids whose logprobs the request reports.
        states: the hidden states, float32 [t, hidden size]. None if they are not reported.

    Returns:
        One chunk for each part.
    """
    finished = output.finished_reasons[i]
    ids = np.asarray(output.output_ids[i], dtype="<i4")
    logprobs = output.output_token_logprobs_val
    values = np.array(logprobs[i], dtype="<f4") if logprobs and logprobs[i] else None
    chunks = []
    at = 0
    for part, (count, (version, lora_version)) in enumerate(parts):
        last = part == len(parts) - 1
        span = slice(at, None if last else at + count)
        at += count
        top_ids = top_values = b""
        if top and values is not None:
            top_ids = _matrix(output.output_top_logprobs_idx[i][span], top, "<i4")
            top_values = _matrix(output.output_top_logprobs_val[i][span], top, "<f4")
        given_values = b""
        if given and values is not None:
            given_values = _matrix(output.output_token_ids_logprobs_val[i][span], given, "<f4")
        mask_ids = mask_lengths = b""
        if masks:
            own = masks[span]
            mask_ids = b"".join([ids.tobytes() for ids in own])
            mask_lengths = np.array([len(ids) for ids in own], "<i4").tobytes()
        chunks.append(
            TokenChunk(
                ids[span].tobytes(),
                values[span].tobytes() if values is not None else b"",
                finished["type"] if finished and last else "",
                cached_tokens(output, i),
                version,
                top_ids,
                top_values,
                finished.get("matched") if finished and last else None,
                mask_ids=mask_ids,
                mask_lengths=mask_lengths,
                lora_version=lora_version,
                given_logprobs=given_values,
                hidden_states=b"" if states is None else states[span].tobytes(),
            )
        )
    return chunks


def take_states(output: BatchTokenIDOutput | SimpleNamespace, i: int) -> NDArray[np.float32]:
    """Remove the hidden states of new tokens from request ``i``. Return float32 [t, hidden size].

    SGLang appends the states to one list, and puts the same list into each output of the request.
    The values are Python floats of 32 bytes, so they are removed after each output.
    """
    entries = output.output_hidden_states[i]
    # A prefill has the states of all its tokens. The last of them predicts the new token.
    rows = [entry[-1] if isinstance(entry[0], list) else entry for entry in entries]
    entries.clear()
    return np.array(rows, "<f4")


def score_chunk(
    output: BatchTokenIDOutput, i: int, start: int, top: int, prefills: list[tuple[int, Versions]]
) -> TokenChunk:
    """Convert the prompt's logprobs of request ``i``, from position ``start`` on.

    Position 0 has no logprobs: its logprobs are NaN, and the ids of its likeliest tokens are -1.

    Args:
        prefills: (first position, versions) of each part of the prompt. One pair of versions has
            computed one part. The logits at a position predict the next token.
    """
    # SGLang's first position is ``start - 1``, unless ``start`` is 0.
    skip = 1 if start else 0
    values = [float("nan") if v is None else v for v in output.input_token_logprobs_val[i][skip:]]
    top_ids = top_values = b""
    if top:
        top_ids = _matrix(
            [row or [-1] * top for row in output.input_top_logprobs_idx[i][skip:]], top, "<i4"
        )
        top_values = _matrix(
            [row or [float("nan")] * top for row in output.input_top_logprobs_val[i][skip:]],
            top,
            "<f4",
        )
    ends = [first + 1 for first, _ in prefills[1:]] + [start + len(values)]
    parts = []
    for end, (_, version) in zip(ends, prefills, strict=True):
        if end > start:
            parts.append((end - start, version))
            start = end
    return TokenChunk(
        b"",
        np.array(values, dtype="<f4").tobytes(),
        "stop",
        output.cached_tokens[i],
        parts[-1][1][0],
        top_ids,
        top_values,
        parts=_parts(parts, 0),
        lora_version=parts[-1][1][1],
        lora_parts=_parts(parts, 1),
    )


def _parts(parts: list[tuple[int, Versions]], which: int) -> bytes:
    """Return (number of tokens, version) of each part as int32, or b"" for a single version."""
    runs: list[list[int]] = []
    for count, versions in parts:
        if runs and runs[-1][1] == versions[which]:
            runs[-1][0] += count
        else:
            runs.append([count, versions[which]])
    return np.array(runs, dtype="<i4").tobytes() if len(runs) > 1 else b""


def rest_of(request: Any, sent: int) -> SimpleNamespace:
    """Return the output of SGLang's request after its first ``sent`` tokens, with reason "abort".

    Use this for a request that is aborted while it waits, because SGLang makes no output for it.
    """
    logprob = request.logprob if request.return_logprob else None

    def rest(name: str) -> list[Any] | None:
        values = getattr(logprob, name, None)
        return None if values is None else [values[sent:]]

    return SimpleNamespace(
        finished_reasons=[{"type": "abort"}],
        output_ids=[request.output_ids[sent:]],
        output_token_logprobs_val=rest("output_token_logprobs_val"),
        output_top_logprobs_val=rest("output_top_logprobs_val"),
        output_top_logprobs_idx=rest("output_top_logprobs_idx"),
        output_token_ids_logprobs_val=rest("output_token_ids_logprobs_val"),
        output_hidden_states=[request.hidden_states],
        prompt_tokens=[0],
        cached_tokens=[0],
    )


def end_of(finished: dict[str, Any] | None) -> tuple[int, str, str]:
    """Convert a finish reason to the kind of the call's item, the error name and the message."""
    if finished is None:
        return ItemKind.CHUNK, "", ""
    if finished["type"] != "abort":
        return ItemKind.DONE, "", ""
    status = finished.get("status_code")
    message = _XGRAMMAR_PLACE.sub("", str(finished.get("message") or "aborted")).strip()
    if status is not None and int(status) == 400:
        return ItemKind.ERROR, "InvalidRequest", message
    if "grammar" in message.lower() and "compile" in message.lower():
        return ItemKind.ERROR, "InvalidRequest", message
    return ItemKind.ERROR, "EngineError", message
