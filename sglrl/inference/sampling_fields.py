"""The kinds of sampling fields, which define how values are checked and sent.

``SamplingParams`` declares each field with one of these kinds. The fields of HTTP requests and the
options of commands are derived from these declarations.
"""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final, NamedTuple, get_args

import msgspec
import numpy as np

from ..errors import InvalidRequest
from .engine_grammar import check_grammar
from .logit_processors import check_processor
from .number_checks import check_integer, check_number, check_token_ids
from .tokens import check_text

MAX_INT32: Final = (1 << 31) - 1
TOP_K_ALL: Final = 1 << 30
MIN_TEMPERATURE: Final = 1e-6
"""Below this temperature, SGLang samples greedily and computes logprobs at temperature 1."""
MAX_BIAS: Final = 1e6
"""The largest bias of a logit. With a larger bias, rounding would erase the logit itself."""


class Kind:
    """Defines how the values of a field are checked and sent.

    Attributes:
        option: the type of the command-line option, for typer. None: the option takes JSON.
    """

    option: ClassVar[Any] = None

    def check(self, name: str, value: Any) -> None:
        """Raise ``InvalidRequest`` if the value is wrong.

        Args:
            name: the name of the field, for the error.
            value: the value to check, which is not the default.
        """

    def plain(self, value: Any) -> Any:
        """Return a checked value in a form that msgpack can encode."""
        return value


@dataclass(frozen=True)
class Number(Kind):
    """A float in [low, high], or in (low, high] if ``open_low`` is True."""

    low: float = -math.inf
    high: float = math.inf
    open_low: bool = False
    option: ClassVar[Any] = float

    def check(self, name: str, value: Any) -> None:
        check_number(name, value, self.low, self.high, self.open_low)

    def plain(self, value: Any) -> float:
        return float(value)


class Temperature(Number):
    """A temperature of 0, or of at least ``MIN_TEMPERATURE``."""

    def check(self, name: str, value: Any) -> None:
        super().check(name, value)
        if 0 < float(value) < MIN_TEMPERATURE:
            raise InvalidRequest(
                f"{name} must be 0, which is greedy, or at least {MIN_TEMPERATURE:g}, got {value}"
            )


@dataclass(frozen=True)
class Integer(Kind):
    """An integer from ``low`` to ``high``."""

    low: int = 0
    high: float = MAX_INT32
    option: ClassVar[Any] = int

    def check(self, name: str, value: Any) -> None:
        check_integer(name, value, self.low, self.high)

    def plain(self, value: Any) -> int:
        return int(value)


class TopK(Integer):
    """A number of tokens, or -1 for all tokens."""

    def check(self, name: str, value: Any) -> None:
        super().check(name, value)
        if value == 0:
            raise InvalidRequest(f"{name} must be at least 1, or -1 for all tokens, got 0")

    def plain(self, value: Any) -> int:
        return min(int(value), TOP_K_ALL)


class Flag(Kind):
    """A bool."""

    option: ClassVar[Any] = bool

    def check(self, name: str, value: Any) -> None:
        if not isinstance(value, bool):
            raise InvalidRequest(f"{name} must be True or False, got {value!r}")


@dataclass(frozen=True)
class Choice(Kind):
    """One of several texts."""

    values: tuple[str, ...]
    option: ClassVar[Any] = str

    def check(self, name: str, value: Any) -> None:
        if not isinstance(value, str) or value not in self.values:
            raise InvalidRequest(
                f"{name} must be one of {', '.join(map(repr, self.values))}, got {value!r}"
            )

    def plain(self, value: Any) -> str:
        # numpy's str is a str, but msgspec does not encode it.
        return str(value)


class Texts(Kind):
    """A text or a list of texts."""

    option: ClassVar[Any] = list[str]

    def check(self, name: str, value: Any) -> None:
        texts = (value,) if isinstance(value, str) else value
        if not isinstance(texts, (list, tuple)) or not all(isinstance(text, str) for text in texts):
            hint = "; for token ids use stop_token_ids" if _has_ids(texts) else ""
            raise InvalidRequest(
                f"{name} must be a string or a list of strings, got {value!r:.200}{hint}"
            )
        for text in texts:
            check_text(name, text)
            self.check_one(name, text)

    def check_one(self, name: str, text: str) -> None:
        """Raise ``InvalidRequest`` if one of the texts is wrong."""

    def plain(self, value: Any) -> tuple[str, ...]:
        return (str(value),) if isinstance(value, str) else tuple(map(str, value))


class StopTexts(Texts):
    """Texts that are not empty."""

    def check_one(self, name: str, text: str) -> None:
        if not text:
            raise InvalidRequest(f"{name} has an empty string: it would end every output at once")


class Patterns(Texts):
    """Regular expressions of Python."""

    def check_one(self, name: str, text: str) -> None:
        try:
            re.compile(text)
        except (re.error, OverflowError, RecursionError) as error:
            raise InvalidRequest(f"{name} {text!r} is not a regular expression: {error}") from None


@dataclass(frozen=True)
class TokenIds(Kind):
    """A list of token ids. If ``ordered`` is True, sets and mappings are rejected."""

    ordered: bool = False
    option: ClassVar[Any] = list[int]

    def check(self, name: str, value: Any) -> None:
        check_token_ids(name, value)
        if self.ordered and isinstance(value, (Set, Mapping)):
            raise InvalidRequest(f"{name} must be a list of token ids, got {value!r}")

    def plain(self, value: Any) -> tuple[int, ...]:
        return tuple(int(token) for token in value)


class Grammar(Kind):
    """A text that XGrammar reads."""

    option: ClassVar[Any] = str

    def check(self, name: str, value: Any) -> None:
        if not isinstance(value, str):
            raise InvalidRequest(f"{name} must be a string, got {type(value).__name__}")
        check_grammar(name, value)

    def plain(self, value: Any) -> str | None:
        return str(value) or None


class JsonGrammar(Grammar):
    """A dict or JSON text that XGrammar reads."""

    def check(self, name: str, value: Any) -> None:
        if not isinstance(value, (str, Mapping)):
            raise InvalidRequest(f"{name} must be a dict or JSON text, got {type(value).__name__}")
        try:
            text = value if isinstance(value, str) else _json(value)
        except (TypeError, ValueError, RecursionError) as error:
            raise InvalidRequest(f"{name} cannot be written as JSON: {error}") from None
        super().check(name, text)

    def plain(self, value: Any) -> str | None:
        return super().plain(_json(value) if isinstance(value, Mapping) else value)


class Biases(Kind):
    """A mapping from token ids to biases."""

    def check(self, name: str, value: Any) -> None:
        if not isinstance(value, Mapping):
            raise InvalidRequest(f"{name} must be a dict of token id and bias, got {value!r}")
        for token, bias in value.items():
            # Keys may be text, as in JSON objects and in the APIs of SGLang and OpenAI.
            decimal = isinstance(token, str) and token.isdecimal() and len(token) < 20
            check_integer(f"a key of {name}", int(token) if decimal else token, 0)
            if not (isinstance(bias, (float, np.floating)) and bias == -math.inf):
                check_number(name, bias, -math.inf, MAX_BIAS)

    def plain(self, value: Any) -> dict[int, float]:
        return {int(token): max(-MAX_BIAS, float(bias)) for token, bias in value.items()}


class ProcessorName(Kind):
    """The name of a class, as "module:Class"."""

    option: ClassVar[Any] = str

    def check(self, name: str, value: Any) -> None:
        check_processor(value, None)

    def plain(self, value: Any) -> str:
        return str(value)


class ProcessorParams(Kind):
    """A dict of JSON values, which ``check_processor`` checks together with the name."""

    def plain(self, value: Any) -> dict[str, Any]:
        return dict(value)


@dataclass(frozen=True, kw_only=True)
class Names:
    """The other names of a field, in keyword arguments and in HTTP requests.

    Attributes:
        aliases: the keyword arguments of vLLM and OpenAI with the same meaning.
        http: the names of the field in HTTP requests, by dialect (``DIALECTS``). (): the dialect
            lacks the field. In a dialect that is missing here, the name is ``Field.name``.
        option: whether commands have an option for the field.
    """

    aliases: tuple[str, ...] = ()
    http: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    option: bool = True


DIALECTS: Final = ("chat", "completions", "responses", "anthropic", "sglang", "vllm")
"""The HTTP APIs whose requests have sampling fields."""


class Field(NamedTuple):
    """The declaration of a sampling field.

    Attributes:
        text: the first sentence about the field in the docstring of the struct.
        type: the type of checked values.
        default: the value of a field that is not given.
    """

    name: str
    text: str
    type: Any
    default: Any
    kind: Kind
    names: Names

    def in_dialect(self, dialect: str) -> tuple[str, ...]:
        """Return the names of the field in the requests of a dialect."""
        return self.names.http.get(dialect, (self.name,))


def fields_of(params: type[msgspec.Struct]) -> dict[str, Field]:
    """Return the declared fields of a struct by name."""
    fields = {}
    texts = _texts_of(params.__doc__ or "")
    for declared in msgspec.structs.fields(params):
        type_, kind, *names = get_args(declared.type)
        fields[declared.name] = Field(
            declared.name,
            texts.get(declared.name, ""),
            type_,
            declared.default,
            kind,
            *(names or [Names()]),
        )
    return fields


def _texts_of(docstring: str) -> dict[str, str]:
    """Return the first sentence about each attribute in a docstring, by name."""
    section = inspect.cleandoc(docstring).partition("Attributes:\n")[2].partition("\n\nRaises:")[0]
    entries = re.findall(r"^ {4}([\w, ]+): (.*(?:\n(?: {8}.*)?)*)", section, re.MULTILINE)
    texts = {}
    for names, text in entries:
        for name in names.split(", "):
            texts[name] = re.split(r"(?<=\.) (?=[A-Z])", " ".join(text.split()))[0]
    return texts


def _json(value: Mapping[str, Any]) -> str:
    return msgspec.json.encode(dict(value)).decode()


def _has_ids(values: Any) -> bool:
    given: Sequence[Any] = values if isinstance(values, (list, tuple)) else (values,)
    return any(type(one) is int for one in given)
