"""Declare the sampling parameters, and check their values before anything is sent."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from typing import Annotated, Any, Final, Literal, TypedDict

import msgspec

from ..core.seeds import MAX_SEED
from ..errors import InvalidRequest
from .logit_processors import check_processor
from .sampling_fields import (
    DIALECTS,
    Biases,
    Choice,
    Flag,
    Grammar,
    Integer,
    JsonGrammar,
    Names,
    Number,
    Patterns,
    ProcessorName,
    ProcessorParams,
    StopTexts,
    Temperature,
    TokenIds,
    TopK,
    fields_of,
)

DEFAULT_MAX_NEW_TOKENS: Final = 128
RAW_LOGPROBS: Final = "raw_logprobs"
SCALED_LOGPROBS: Final = "scaled_logprobs"
PROCESSED_LOGPROBS: Final = "processed_logprobs"
LogprobsMode = Literal["raw_logprobs", "scaled_logprobs", "processed_logprobs"]
LOGPROBS_MODES: Final = (RAW_LOGPROBS, SCALED_LOGPROBS, PROCESSED_LOGPROBS)
NO_HIDDEN_STATES: Final = "return_hidden_states needs launch(enable_return_hidden_states=True)"

_OPENAI: Final = ("chat", "completions", "responses", "anthropic")
_NOT_VLLM: Final[dict[str, tuple[str, ...]]] = {"vllm": ()}
_SGLANG_ONLY: Final[dict[str, tuple[str, ...]]] = dict.fromkeys((*_OPENAI, "vllm"), ())
_CLIENTS_ONLY: Final = Names(http=dict.fromkeys(DIALECTS, ()), option=False)
"""The ``Names`` of fields that HTTP requests and commands lack. HTTP answers have no place for the
results of these fields."""


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """Sampling parameters of a request. The constructor checks every value.

    Attributes:
        max_new_tokens: maximum number of tokens to generate. None: 128, or the context that is left
            if that is less.
        temperature: 0 is greedy. Otherwise at least 1e-6.
        top_p: sample from the smallest set of tokens whose probability reaches this, in (0, 1].
        top_k: sample from the k most likely tokens. -1: from all.
        min_p: sample from tokens with at least this probability, relative to the most likely token,
            in [0, 1].
        stop: strings that end the output. They are part of ``output_ids`` but not of ``text``. A
            stop string that contains special tokens is removed completely only with
            ``skip_special_tokens=False``.
        stop_token_ids: tokens that end the output, in addition to the model's own.
        stop_regex: regular expressions whose first match ends the output. The match is part of
            ``text``. An expression that takes half a second of CPU time to match raises
            ``InvalidRequest``.
        no_stop_trim: keep the stop string or stop token at the end of ``text``.
        min_new_tokens: number of tokens before which the output does not end. Until then, no token
            that ends an output is sampled, and no stop string or expression is checked. A match
            that ends after these tokens ends the output, even if it begins within them (as in
            vLLM).
        frequency_penalty, presence_penalty: penalty in [-2, 2], as OpenAI defines it.
        repetition_penalty: penalty in (0, 2], 1 for none (https://arxiv.org/abs/1909.05858).
        logit_bias: by token id, a bias that is added to the token's logit before temperature and
            softmax. The logprobs therefore include it. -inf and any value below -1e6 mean -1e6: the
            token is never sampled.
        ignore_eos: continue after the model's end-of-sequence token, except where it ends a
            grammar.
        seed: makes the sampling repeatable, in 0..2**62-1. A single request, and the first sample
            of several, use this seed. Every other sample, turn, fork and attempt uses a seed that
            is derived from it, so that no two of them sample the same.
        json_schema: a JSON schema that the text must follow, as a dict or JSON text. At most one of
            ``json_schema``, ``regex``, ``ebnf`` and ``structural_tag`` may be given.
        regex: a regular expression that the text must match.
        ebnf: a grammar in EBNF that the text must follow.
        structural_tag: a structural tag of XGrammar (https://xgrammar.mlc.ai) that the text must
            follow, as a dict or JSON text.
        skip_special_tokens: leave special tokens out of ``text``.
        logprobs_mode: the distribution of all logprobs that the request returns.

            * "raw_logprobs": the softmax of the model's logits, as ``Client.score`` returns it.
            * "scaled_logprobs": the softmax after penalties, ``logit_bias``, grammar,
              ``logit_processor`` and temperature. Temperature 0 counts as 1.
            * "processed_logprobs": the distribution from which the token was drawn. It also has
              top-k, top-p and min-p applied. With temperature 0, all logprobs are 0.
        return_sampling_mask: return the tokens that could be drawn (``Completion.sampling_mask``).
            Needs top_p, top_k, min_p, temperature 0 or a grammar.
        token_ids_logprob: token ids, at most 1,000. Return the logprob of each of them at every
            output position (``Completion.token_ids_logprobs``).
        return_hidden_states: return the hidden state that each token was sampled from
            (``Completion.hidden_states``). Needs ``launch(enable_return_hidden_states=True)``.
        return_routed_experts: return the experts that each token was routed to
            (``Completion.routed_experts``). Needs ``launch(enable_return_routed_experts=True)``.
        logit_processor: the name of a class ("module:Class") that changes the logits before each
            token is sampled, after penalties, ``logit_bias`` and grammar. It must be one of
            ``launch(logit_processors=[...])``.
        custom_params: parameters of ``logit_processor``, which depend on the class: a dict of JSON
            values (None, bool, int, float, str, lists, dicts with text keys).

    Raises:
        InvalidRequest: a value is out of range or of the wrong type.
    """

    # An annotation has the type of the field and its kind. ``Names`` are the field's other names.
    max_new_tokens: Annotated[
        int | None,
        Integer(1),
        Names(
            aliases=("max_tokens", "max_completion_tokens"),
            http={
                "chat": ("max_tokens", "max_completion_tokens"),
                "completions": ("max_tokens",),
                "responses": ("max_output_tokens",),
                "anthropic": ("max_tokens",),
                "vllm": ("max_tokens",),
            },
        ),
    ] = None
    temperature: Annotated[float, Temperature(0)] = 1.0
    top_p: Annotated[float, Number(0, 1, open_low=True)] = 1.0
    top_k: Annotated[int, TopK(-1, math.inf)] = -1
    min_p: Annotated[float, Number(0, 1)] = 0.0
    stop: Annotated[
        str | Sequence[str], StopTexts(), Names(http={"anthropic": ("stop", "stop_sequences")})
    ] = ()
    stop_token_ids: Annotated[Sequence[int], TokenIds()] = ()
    min_new_tokens: Annotated[
        int,
        Integer(0),
        Names(aliases=("min_tokens",), http=dict.fromkeys((*_OPENAI, "vllm"), ("min_tokens",))),
    ] = 0
    frequency_penalty: Annotated[float, Number(-2, 2)] = 0.0
    presence_penalty: Annotated[float, Number(-2, 2)] = 0.0
    repetition_penalty: Annotated[float, Number(0, 2, open_low=True)] = 1.0
    ignore_eos: Annotated[bool, Flag()] = False
    seed: Annotated[
        int | None,
        Integer(0, MAX_SEED),
        Names(aliases=("sampling_seed",), http={"sglang": ("seed", "sampling_seed")}),
    ] = None
    json_schema: Annotated[
        str | Mapping[str, Any] | None,
        JsonGrammar(),
        Names(aliases=("guided_json",), http=_SGLANG_ONLY),
    ] = None
    regex: Annotated[str | None, Grammar(), Names(aliases=("guided_regex",), http=_NOT_VLLM)] = None
    ebnf: Annotated[str | None, Grammar(), Names(aliases=("guided_grammar",), http=_NOT_VLLM)] = (
        None
    )
    skip_special_tokens: Annotated[bool, Flag()] = True
    stop_regex: Annotated[str | Sequence[str], Patterns(), Names(http=_NOT_VLLM)] = ()
    no_stop_trim: Annotated[
        bool,
        Flag(),
        Names(
            aliases=("include_stop_str_in_output",),
            http={"vllm": ("include_stop_str_in_output",)},
        ),
    ] = False
    logit_bias: Annotated[Mapping[int | str, float] | None, Biases()] = None
    structural_tag: Annotated[
        str | Mapping[str, Any] | None, JsonGrammar(), Names(http=_SGLANG_ONLY)
    ] = None
    logprobs_mode: Annotated[LogprobsMode, Choice(LOGPROBS_MODES), _CLIENTS_ONLY] = SCALED_LOGPROBS
    return_sampling_mask: Annotated[bool, Flag(), _CLIENTS_ONLY] = False
    token_ids_logprob: Annotated[Sequence[int], TokenIds(ordered=True), _CLIENTS_ONLY] = ()
    return_hidden_states: Annotated[bool, Flag(), _CLIENTS_ONLY] = False
    return_routed_experts: Annotated[bool, Flag(), _CLIENTS_ONLY] = False
    logit_processor: Annotated[str | None, ProcessorName(), Names(http=_SGLANG_ONLY)] = None
    custom_params: Annotated[
        Mapping[str, Any] | None, ProcessorParams(), Names(http=_SGLANG_ONLY)
    ] = None

    def __post_init__(self) -> None:
        for field in FIELDS.values():
            value = getattr(self, field.name)
            if value is not field.default:
                field.kind.check(field.name, value)
        if self.max_new_tokens is not None and self.min_new_tokens > self.max_new_tokens:
            raise InvalidRequest(
                f"min_new_tokens={self.min_new_tokens} is more than max_new_tokens="
                f"{self.max_new_tokens}"
            )
        if len(self.grammars) > 1:
            raise InvalidRequest(f"give only one of {' and '.join(self.grammars)}")
        if self.return_sampling_mask and not self._limited and not self.grammars:
            raise InvalidRequest(
                "return_sampling_mask is for limited sampling, and all tokens may be drawn: set "
                "top_p, top_k or min_p, or leave it out"
            )
        if self.custom_params is not None:
            check_processor(self.logit_processor, self.custom_params)

    @property
    def _limited(self) -> bool:
        return self.temperature == 0 or self.top_p < 1 or self.top_k != -1 or self.min_p > 0

    @property
    def grammars(self) -> list[str]:
        """The names of the given grammars, including an empty schema, which allows any JSON."""
        return [name for name in GRAMMARS if getattr(self, name) not in (None, "")]

    @property
    def stop_strings(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    def to_wire(self, max_new_tokens: int, seed: int | None) -> dict[str, Any]:
        """Return the fields that differ from their defaults, as ``SentSampling`` decodes them."""
        sent: dict[str, Any] = {}
        for field in FIELDS.values():
            value = getattr(self, field.name)
            if value is not field.default:
                sent[field.name] = field.kind.plain(value)
        sent |= {"max_new_tokens": max_new_tokens, "seed": seed}
        if "min_new_tokens" in sent:
            sent["min_new_tokens"] = min(sent["min_new_tokens"], max_new_tokens)
        if self.ignore_eos and self.grammars:
            # With ignore_eos, SGLang would notice the end of a grammar one token too late.
            del sent["ignore_eos"]
        return sent


FIELDS: Final = fields_of(SamplingParams)
"""The declarations of the sampling parameters by name."""
ALIASES: Final = {alias: field.name for field in FIELDS.values() for alias in field.names.aliases}
"""The parameters by the names that vLLM and OpenAI have for them."""
GRAMMARS: Final = tuple(name for name, field in FIELDS.items() if isinstance(field.kind, Grammar))
"""The sampling parameters that are grammars."""


class SentSampling(SamplingParams, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Sampling parameters from another process, which the constructor checks again.

    The msgpack map contains only fields that differ from their defaults. The sender always sets
    ``max_new_tokens``, and sets the seed if the sampling must be repeatable.
    """

    max_new_tokens: int


class UnseededOptions(TypedDict, total=False):
    """The fields of ``SamplingParams`` and their aliases, without the seed, for editors."""

    max_new_tokens: int | None
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    stop: str | Sequence[str]
    stop_token_ids: Sequence[int]
    min_new_tokens: int
    frequency_penalty: float
    presence_penalty: float
    repetition_penalty: float
    ignore_eos: bool
    json_schema: str | Mapping[str, Any] | None
    regex: str | None
    ebnf: str | None
    skip_special_tokens: bool
    stop_regex: str | Sequence[str]
    no_stop_trim: bool
    logit_bias: Mapping[int | str, float] | None
    structural_tag: str | Mapping[str, Any] | None
    logprobs_mode: LogprobsMode
    return_sampling_mask: bool
    token_ids_logprob: Sequence[int]
    return_hidden_states: bool
    return_routed_experts: bool
    logit_processor: str | None
    custom_params: Mapping[str, Any] | None
    max_tokens: int | None
    max_completion_tokens: int | None
    min_tokens: int
    guided_json: str | Mapping[str, Any] | None
    guided_regex: str | None
    guided_grammar: str | None
    include_stop_str_in_output: bool


class SamplingOptions(UnseededOptions, total=False):
    """The fields of ``SamplingParams`` and their aliases, for editors and type checkers."""

    seed: int | None
    sampling_seed: int | None


def own_names(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Replace aliases by the names of ``SamplingParams``, so that arguments can be merged.

    Raises:
        InvalidRequest: a parameter is given twice, under two names.
    """
    named: dict[str, Any] = {}
    for name, value in kwargs.items():
        target = ALIASES.get(name, name)
        if target in named:
            raise InvalidRequest(f"{name!r} and another name for {target!r} were both given")
        named[target] = value
    return named


_FOREIGN: Final = {
    "lora_path": "lora=",
    "return_logprob": "logprobs=",
    "rid": "nothing: to abort a call, cancel its task",
    "sampling_params": "sampling=",
    "stream": "Client.stream",
    "top_logprobs_num": "top_logprobs=",
}
"""Arguments of SGLang's ``generate``, and the replacements that an error suggests."""


def _canonical(kwargs: dict[str, Any]) -> dict[str, Any]:
    named: dict[str, Any] = {}
    for name, value in kwargs.items():
        target = ALIASES.get(name, name)
        if target not in SamplingParams.__struct_fields__:
            if ours := _FOREIGN.get(name):
                raise InvalidRequest(f"unknown sampling argument {name!r}; use {ours}")
            known = [*SamplingParams.__struct_fields__, *ALIASES]
            near = get_close_matches(name, known, n=1, cutoff=0.75)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise InvalidRequest(f"unknown sampling argument {name!r}{hint}")
        if target in named:
            raise InvalidRequest(f"{name!r} and another name for {target!r} were both given")
        # None means "not given", as in the APIs of OpenAI and SGLang.
        if value is not None:
            named[target] = value
    return named


def from_kwargs(kwargs: dict[str, Any]) -> SamplingParams:
    """Make ``SamplingParams`` from keyword arguments, whose names may be aliases."""
    return SamplingParams(**_canonical(kwargs))


def merged(params: SamplingParams, kwargs: dict[str, Any]) -> SamplingParams:
    """Return ``params`` with other values. The names in ``kwargs`` may be aliases."""
    # Before msgspec 0.21, msgspec.structs.replace does not call __post_init__.
    return SamplingParams(**{**msgspec.structs.asdict(params), **_canonical(kwargs)})
