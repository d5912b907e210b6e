"""Check sampling parameters once. A wrong value raises before anything is sent."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence, Set
from difflib import get_close_matches
from typing import Any, Final, Literal

import msgspec
import numpy as np

from ..core.seeds import MOST_SEED
from ..errors import InvalidRequest
from ..wire.engine import Sampling
from .grammar_checks import GRAMMARS, check_grammar
from .logit_processors import check_processor
from .number_checks import check_integer, check_number, check_token_ids
from .tokens import check_text

DEFAULT_MAX_NEW_TOKENS: Final = 128
TOP_K_ALL: Final = 1 << 30
LEAST_TEMPERATURE: Final = 1e-6
"""SGLang samples greedily below this, and its logprobs are then those of temperature 1."""
MOST_BIAS: Final = 1e6
"""Largest bias of a logit. With a larger bias, rounding would erase the logit itself."""
RAW_LOGPROBS: Final = "raw_logprobs"
SCALED_LOGPROBS: Final = "scaled_logprobs"
PROCESSED_LOGPROBS: Final = "processed_logprobs"
LogprobsMode = Literal["raw_logprobs", "scaled_logprobs", "processed_logprobs"]
LOGPROBS_MODES: Final = (RAW_LOGPROBS, SCALED_LOGPROBS, PROCESSED_LOGPROBS)
NO_HIDDEN_STATES: Final = "return_hidden_states needs launch(enable_return_hidden_states=True)"

_FLAGS: Final = (
    *("ignore_eos", "skip_special_tokens", "no_stop_trim"),
    *("return_sampling_mask", "return_routed_experts", "return_hidden_states"),
)

ALIASES: Final = {
    "max_tokens": "max_new_tokens",
    "max_completion_tokens": "max_new_tokens",
    "min_tokens": "min_new_tokens",
    "sampling_seed": "seed",
    "guided_json": "json_schema",
    "guided_regex": "regex",
    "guided_grammar": "ebnf",
    "include_stop_str_in_output": "no_stop_trim",
}
"""Names of vLLM and OpenAI for the same parameters."""


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
        stop_regex: regular expressions. The output ends where one of them matches, and the match is
            part of ``text``. An expression that takes half a second of CPU time to match raises
            ``InvalidRequest``.
        no_stop_trim: keep the stop string or stop token at the end of ``text``.
        min_new_tokens: number of tokens before which the output does not end. Until then, no token
            that ends an output is sampled, and no stop string or expression is checked. As in vLLM,
            a match that ends after these tokens counts, even if it begins before.
        frequency_penalty, presence_penalty: in [-2, 2], as OpenAI defines them.
        repetition_penalty: in (0, 2], 1 for none (https://arxiv.org/abs/1909.05858).
        logit_bias: by token id, a bias that is added to the token's logit before temperature and
            softmax. The logprobs therefore include it. -inf and any value below -1e6 mean -1e6: the
            token is never sampled.
        ignore_eos: continue after the model's end-of-sequence token, except where it ends a
            grammar.
        seed: makes the sampling repeatable, in 0..2**62-1. A single request, and the first sample
            of several, use this seed. Every other sample, turn, fork and attempt uses a seed that
            is derived from it, so that no two of them sample the same.
        json_schema, regex, ebnf, structural_tag: a grammar that the text must follow. At most one
            of them may be given. A schema or a tag (see XGrammar, https://xgrammar.mlc.ai) may be a
            dict or JSON text.
        skip_special_tokens: leave special tokens out of ``text``.
        logprobs_mode: the distribution of all logprobs that the request returns.

            * "raw_logprobs": the softmax of the model's logits, as ``Client.score`` returns it.
            * "scaled_logprobs": the same after penalties, ``logit_bias``, grammar,
              ``logit_processor`` and temperature. With temperature 0, that of temperature 1.
            * "processed_logprobs": the distribution that the token was drawn from: also after
              top-k, top-p and min-p, and normalized again. With temperature 0, all logprobs are 0.
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

    max_new_tokens: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    min_new_tokens: int = 0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    ignore_eos: bool = False
    seed: int | None = None
    json_schema: str | Mapping[str, Any] | None = None
    regex: str | None = None
    ebnf: str | None = None
    skip_special_tokens: bool = True
    stop_regex: str | Sequence[str] = ()
    no_stop_trim: bool = False
    logit_bias: Mapping[int | str, float] | None = None
    structural_tag: str | Mapping[str, Any] | None = None
    logprobs_mode: LogprobsMode = SCALED_LOGPROBS
    return_sampling_mask: bool = False
    token_ids_logprob: Sequence[int] = ()
    return_hidden_states: bool = False
    return_routed_experts: bool = False
    logit_processor: str | None = None
    custom_params: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        if self.max_new_tokens is not None:
            check_integer("max_new_tokens", self.max_new_tokens, 1)
        check_number("temperature", self.temperature, 0.0, math.inf)
        if 0 < float(self.temperature) < LEAST_TEMPERATURE:
            raise InvalidRequest(
                f"temperature must be 0, which is greedy, or at least {LEAST_TEMPERATURE:g}, got "
                f"{self.temperature}"
            )
        check_number("top_p", self.top_p, 0.0, 1.0, open_low=True)
        check_number("min_p", self.min_p, 0.0, 1.0)
        check_number("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        check_number("presence_penalty", self.presence_penalty, -2.0, 2.0)
        check_number("repetition_penalty", self.repetition_penalty, 0.0, 2.0, open_low=True)
        check_integer("top_k", self.top_k, -1, math.inf)
        if self.top_k == 0:
            raise InvalidRequest("top_k must be at least 1, or -1 for all tokens, got 0")
        check_integer("min_new_tokens", self.min_new_tokens, 0)
        if self.max_new_tokens is not None and self.min_new_tokens > self.max_new_tokens:
            raise InvalidRequest(
                f"min_new_tokens={self.min_new_tokens} is more than max_new_tokens="
                f"{self.max_new_tokens}"
            )
        if self.seed is not None:
            check_integer("seed", self.seed, 0, MOST_SEED)
        for text in _texts("stop", self.stop):
            if not text:
                raise InvalidRequest("stop has an empty string: it would end every output at once")
        for text in _texts("stop_regex", self.stop_regex):
            try:
                re.compile(text)
            except (re.error, OverflowError, RecursionError) as error:
                raise InvalidRequest(
                    f"stop_regex {text!r} is not a regular expression: {error}"
                ) from None
        check_token_ids("stop_token_ids", self.stop_token_ids)
        check_token_ids("token_ids_logprob", self.token_ids_logprob)
        for name in _FLAGS:
            if not isinstance(getattr(self, name), bool):
                raise InvalidRequest(f"{name} must be True or False, got {getattr(self, name)!r}")
        self._check_bias()
        self._check_grammar()
        self._check_reports()
        check_processor(self.logit_processor, self.custom_params)

    def _check_bias(self) -> None:
        if self.logit_bias is None:
            return
        if not isinstance(self.logit_bias, Mapping):
            raise InvalidRequest(
                f"logit_bias must be a dict of token id and bias, got {self.logit_bias!r}"
            )
        for token, bias in self.logit_bias.items():
            # Keys may be text, as in JSON objects and in the APIs of SGLang and OpenAI.
            decimal = isinstance(token, str) and token.isdecimal() and len(token) < 20
            check_integer("a key of logit_bias", int(token) if decimal else token, 0)
            if not (isinstance(bias, (float, np.floating)) and bias == -math.inf):
                check_number("logit_bias", bias, -math.inf, MOST_BIAS)

    def _check_grammar(self) -> None:
        for name in ("json_schema", "structural_tag"):
            value = getattr(self, name)
            if value is None:
                continue
            if not isinstance(value, (str, Mapping)):
                raise InvalidRequest(
                    f"{name} must be a dict or JSON text, got {type(value).__name__}"
                )
            try:
                text = value if isinstance(value, str) else _json(value)
            except (TypeError, ValueError, RecursionError) as error:
                raise InvalidRequest(f"{name} cannot be written as JSON: {error}") from None
            check_grammar(name, text)
        for name in ("regex", "ebnf"):
            value = getattr(self, name)
            if value is not None and not isinstance(value, str):
                raise InvalidRequest(f"{name} must be a string, got {type(value).__name__}")
            if value is not None:
                check_grammar(name, value)
        if len(self.grammars) > 1:
            raise InvalidRequest(f"give only one of {' and '.join(self.grammars)}")

    def _check_reports(self) -> None:
        if not isinstance(self.logprobs_mode, str) or self.logprobs_mode not in LOGPROBS_MODES:
            raise InvalidRequest(
                f"logprobs_mode must be one of {', '.join(map(repr, LOGPROBS_MODES))}, got "
                f"{self.logprobs_mode!r}"
            )
        limited = self.temperature == 0 or self.top_p < 1 or self.top_k != -1 or self.min_p > 0
        if self.return_sampling_mask and not limited and not self.grammars:
            raise InvalidRequest(
                "return_sampling_mask is for limited sampling, and all tokens may be drawn: set "
                "top_p, top_k or min_p, or leave it out"
            )
        if isinstance(self.token_ids_logprob, (Set, Mapping)):
            raise InvalidRequest(
                f"token_ids_logprob must be a list of token ids, got {self.token_ids_logprob!r}"
            )

    @property
    def grammars(self) -> list[str]:
        """The names of the given grammars. An empty schema (a dict) counts: it allows any JSON."""
        return [name for name in GRAMMARS if getattr(self, name) not in (None, "")]

    @property
    def stop_strings(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    @property
    def stop_patterns(self) -> tuple[str, ...]:
        return (self.stop_regex,) if isinstance(self.stop_regex, str) else tuple(self.stop_regex)

    def to_wire(self, max_new_tokens: int, seed: int | None) -> Sampling:
        """Return the values to send, with defaults filled in."""
        biases = self.logit_bias or {}
        return Sampling(
            max_new_tokens=max_new_tokens,
            temperature=float(self.temperature),
            top_p=float(self.top_p),
            top_k=TOP_K_ALL if self.top_k == -1 else min(int(self.top_k), TOP_K_ALL),
            min_p=float(self.min_p),
            stop=tuple(map(str, self.stop_strings)),
            stop_token_ids=tuple(int(t) for t in self.stop_token_ids),
            min_new_tokens=min(int(self.min_new_tokens), max_new_tokens),
            frequency_penalty=float(self.frequency_penalty),
            presence_penalty=float(self.presence_penalty),
            repetition_penalty=float(self.repetition_penalty),
            # With ignore_eos, SGLang would notice the end of a grammar one token too late.
            ignore_eos=self.ignore_eos and not self.grammars,
            seed=seed,
            json_schema=_sent(self.json_schema),
            regex=_sent(self.regex),
            ebnf=_sent(self.ebnf),
            skip_special_tokens=self.skip_special_tokens,
            stop_regex=tuple(map(str, self.stop_patterns)),
            logit_bias={int(token): max(-MOST_BIAS, float(bias)) for token, bias in biases.items()},
            structural_tag=_sent(self.structural_tag),
            logprobs_mode=None if self.logprobs_mode == SCALED_LOGPROBS else self.logprobs_mode,
            return_sampling_mask=self.return_sampling_mask,
            token_ids_logprob=tuple(int(t) for t in self.token_ids_logprob),
            return_hidden_states=self.return_hidden_states,
            return_routed_experts=self.return_routed_experts,
            logit_processor=str(self.logit_processor or ""),
            custom_params=dict(self.custom_params or {}),
        )


def _json(value: Mapping[str, Any]) -> str:
    return msgspec.json.encode(dict(value)).decode()


def _sent(value: str | Mapping[str, Any] | None) -> str | None:
    if isinstance(value, Mapping):
        return _json(value)
    # numpy's str is a str, but msgspec does not encode it.
    return str(value) if value else None


def _texts(name: str, value: Any) -> Sequence[str]:
    texts = (value,) if isinstance(value, str) else value
    if not isinstance(texts, (list, tuple)) or not all(isinstance(text, str) for text in texts):
        hint = "; for token ids use stop_token_ids" if _has_ids(texts) else ""
        raise InvalidRequest(
            f"{name} must be a string or a list of strings, got {value!r:.200}{hint}"
        )
    for text in texts:
        check_text(name, text)
    return texts


def _has_ids(values: Any) -> bool:
    given = values if isinstance(values, (list, tuple)) else (values,)
    return any(type(one) is int for one in given)


def own_names(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Replace aliases by our own names, so that the arguments can override other arguments.

    Raises:
        InvalidRequest: a parameter is given twice, under two names.
    """
    found: dict[str, Any] = {}
    for name, value in kwargs.items():
        target = ALIASES.get(name, name)
        if target in found:
            raise InvalidRequest(f"{name!r} and another name for {target!r} were both given")
        found[target] = value
    return found


_FOREIGN: Final = {
    "lora_path": "lora=",
    "return_logprob": "logprobs=",
    "rid": "nothing: to abort a call, cancel its task",
    "sampling_params": "sampling=",
    "stream": "Client.stream",
    "top_logprobs_num": "top_logprobs=",
}
"""Arguments of SGLang's ``generate``, and what takes their place."""


def _canonical(kwargs: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in kwargs.items():
        target = ALIASES.get(name, name)
        if target not in SamplingParams.__struct_fields__:
            if ours := _FOREIGN.get(name):
                raise InvalidRequest(f"unknown sampling argument {name!r}; use {ours}")
            known = [*SamplingParams.__struct_fields__, *ALIASES]
            near = get_close_matches(name, known, n=1, cutoff=0.75)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise InvalidRequest(f"unknown sampling argument {name!r}{hint}")
        if target in found:
            raise InvalidRequest(f"{name!r} and another name for {target!r} were both given")
        # None means "not given", as in the APIs of OpenAI and SGLang.
        if value is not None:
            found[target] = value
    return found


def from_kwargs(kwargs: dict[str, Any]) -> SamplingParams:
    """Make ``SamplingParams`` from keyword arguments, which may be aliases."""
    return SamplingParams(**_canonical(kwargs))


def merged(params: SamplingParams, kwargs: dict[str, Any]) -> SamplingParams:
    """Return ``params`` with other values. ``kwargs`` may be aliases."""
    # Before msgspec 0.21, msgspec.structs.replace does not call __post_init__.
    return SamplingParams(**{**msgspec.structs.asdict(params), **_canonical(kwargs)})
