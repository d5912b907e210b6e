"""The interface of the gateway's APIs, and the functions that they share.

A dialect is the API of one endpoint. It turns the body of a request into a ``TurnRequest``, and
the completions into an answer. Dialects do no I/O: ``app.py`` receives requests and sends answers.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any, Final, Literal, NamedTuple, Protocol, TypeVar, get_args

import msgspec

from ..errors import InvalidRequest
from ..inference.completion import Completion
from ..inference.tokens import without_surrogates
from ..wire.codec import malformed
from .accepted_fields import Fields
from .errors import HttpError
from .prompt_logprobs import Wanted
from .sampling_body import SamplingBody

_T = TypeVar("_T")
Message = dict[str, Any]
Part = Literal["reasoning_content", "content"]
"""The parts of a message that are text."""
NewTokens = Callable[[], Completion] | None
"""A function that returns new tokens of a choice as a completion. None: there are no new tokens."""

encode: Final = msgspec.json.Encoder(enc_hook=str).encode
_decode = msgspec.json.Decoder(dict[str, Any]).decode
_SURROGATE: Final = re.compile(rb"\\u[dD][89a-fA-F]")
"""Matches the start of each escaped surrogate in JSON."""
_CONVERSATION: Final = ("input", "instructions", "messages", "system")
"""The fields that contain texts of the model and of the user."""
MAX_CHOICES: Final = 128
_NO_FIELDS: Final = Fields()


class Stored(msgspec.Struct, frozen=True, kw_only=True):
    """How the conversation of a request is stored. See ``store.py``.

    Attributes:
        id: the id of the answer. "": the conversation is not stored.
        previous: the id of an answer whose conversation comes before the messages of this request.
            "": the request has the whole conversation.
        unstored: number of messages at the beginning that are not stored, because they belong to
            this request alone.
    """

    id: str = ""
    previous: str = ""
    unstored: int = 0


class TurnRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The turn that a request asks for, in a form that is the same for all dialects.

    Attributes:
        messages: the conversation, as in OpenAI's chat completions. None: there is only a prompt.
        prompt: text or token ids. With messages, the prompt is token ids: the model receives these
            ids, and the messages only decide how the answer is parsed.
        choices: number of choices to sample.
        stream: whether the client wants the text while it is sampled.
        sampling: fields of ``SamplingParams``. Without ``max_new_tokens``, a turn may fill the
            context.
        tool_choice, parallel_tool_calls, top_logprobs: as in ``Session.generate``.
        prompt_logprobs: which logprobs of the prompt are wanted. Only answers that have a field
            ``scored`` and are no streams can have them. None: no logprobs of the prompt.
        tools, chat_template_kwargs: as in ``Client.session``.
        later_tools: tools that a message describes. The prompt does not show them with the other
            tools.
        left_out: the tools and fields that the model cannot be shown.
        names: for each of our names of a sampling parameter, the name of the client's field.
        priority: as in ``Client.generate``.
        stored: how the conversation is stored. A request whose conversation is stored has one
            choice.
        rid: the id by which clients may abort the request.
        lora: the name of a LoRA adapter. "": the LoRA adapter of the session, if it has one.
        experts_from: the first position whose routed experts are wanted, if the engines keep them.
            None: no routed experts.
    """

    messages: Sequence[Message] | None = None
    prompt: str | Sequence[int] | None = None
    choices: int = 1
    stream: bool = False
    sampling: Mapping[str, Any] = {}
    tool_choice: Any = None
    parallel_tool_calls: bool = True
    top_logprobs: int = 0
    prompt_logprobs: Wanted | None = None
    tools: Sequence[Any] | None = None
    later_tools: Sequence[Any] = ()
    left_out: Sequence[str] = ()
    names: Mapping[str, str] = {}
    chat_template_kwargs: Mapping[str, Any] | None = None
    priority: int = 0
    stored: Stored = Stored()
    rid: str = ""
    lora: str = ""
    experts_from: int | None = None


class Answer(Protocol):
    """Makes the answer to one request. The methods for streams return the bytes of events."""

    def whole(self, completions: Sequence[Completion]) -> Any:
        """Return the whole answer, for JSON."""

    def begin(self) -> bytes:
        """Return the first events of a stream."""

    def text(self, index: int, part: Part, added: str, new: NewTokens = None) -> bytes:
        """Return the events for new text of a choice.

        Args:
            index: the number of the choice.
            part: the part of the message that has the text.
            added: the new text.
            new: returns the tokens that have arrived since the last call for this choice. None:
                there are none. The last tokens of a choice are passed to ``end`` alone.
        """

    def end(self, completions: Sequence[Completion], sent: Sequence[Mapping[Part, str]]) -> bytes:
        """Return the last events of a stream.

        Args:
            completions: the finished choices.
            sent: for each choice, the text of each part that was sent before.
        """

    def failed(self, error: HttpError) -> bytes:
        """Return the last events of a stream that fails."""


class Sent(NamedTuple):
    """The numbers of tokens and of characters of a choice that a stream has sent."""

    tokens: int = 0
    text: int = 0


class Progress(NamedTuple):
    """A choice that is being sampled.

    Attributes:
        completion: the tokens so far, as a completion without a ``finish_reason``.
        text: decodes and returns the text so far. Later tokens do not change this text.
        sent: the part of the choice that earlier events of the stream have sent.
    """

    completion: Completion
    text: Callable[[], str]
    sent: Sent


class TokenAnswer(Protocol):
    """Makes the answer to one request. Unlike ``Answer``, it receives tokens in place of texts."""

    def whole(self, completions: Sequence[Completion]) -> Any:
        """Return the whole answer, for JSON."""

    def begin(self) -> bytes:
        """Return the first events of a stream."""

    def tokens(self, index: int, progress: Progress) -> bytes:
        """Return the events for new tokens of a choice. ``index`` is the number of the choice."""

    def end(self, completions: Sequence[Completion], sent: Sequence[Sent]) -> bytes:
        """Return the last events of a stream.

        Args:
            completions: the finished choices.
            sent: the part of each choice that was sent before.
        """

    def failed(self, error: HttpError) -> bytes:
        """Return the last events of a stream that fails."""


class Body(Protocol):
    """The body of a request.

    Attributes:
        model: the name of the model that the client sends. None: requests of this API do not name a
            model.
    """

    @property
    def model(self) -> str | None: ...

    def turns(self) -> Sequence[TurnRequest]:
        """Return the turns to sample: a ``TurnRequest`` for each prompt.

        Raises:
            InvalidRequest: a field has a wrong value, or two exclude each other.
        """

    def answer(self, model: str, call_ids: str) -> Answer | TokenAnswer:
        """Return the object that makes the answer.

        Args:
            model: the name of the model.
            call_ids: a prefix for the ids of tool calls.
        """


class Dialect(NamedTuple):
    """The API of one endpoint.

    Attributes:
        path: the path of the endpoint, without "/sessions/ID".
        parse: parses the body of a request.
        error: makes the body of an answer from an error.
        body: the struct with the fields of a request.
        tokens: whether ``Body.answer`` returns a ``TokenAnswer``.
    """

    path: str
    parse: Callable[[bytes], Body]
    error: Callable[[HttpError], Any]
    body: type[msgspec.Struct]
    tokens: bool = False


class FlatBody(SamplingBody, frozen=True, kw_only=True):
    """The body of a request of OpenAI's or Anthropic's APIs.

    These APIs have sampling parameters at the top level of the body.

    Attributes:
        chat_template_kwargs, priority: as in ``TurnRequest``.
        return_token_ids: whether to add the tokens of the prompt and of each choice to the answer.
    """

    chat_template_kwargs: dict[str, Any] | None = None
    priority: int | None = None
    return_token_ids: bool | None = None


def decode_body(body: bytes, kind: type[_T], fields: Fields = _NO_FIELDS) -> _T:
    """Parse the body of a request. An empty body has no fields.

    Args:
        body: the JSON text.
        kind: a struct with the supported fields.
        fields: the unsupported fields.

    Raises:
        InvalidRequest: the body is not JSON, a field has a wrong type, or a field asks for
            something that is not supported.
    """
    try:
        given = _decode(body or b"{}")
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        fixed = _with_surrogates(body)
        if fixed is None:
            wrong = malformed(error, body)
            raise InvalidRequest(f"the body is not a JSON object: {wrong}") from None
        given = fixed
    return convert_fields(given, kind, fields)


def _with_surrogates(body: bytes) -> dict[str, Any] | None:
    """Parse a body with surrogates. None: the body has none, or is not a JSON object.

    Clients cut texts in the middle of a surrogate pair, and models sample one half of a pair. A
    lone surrogate is not Unicode text, so U+FFFD replaces it in the conversation.

    Raises:
        InvalidRequest: a field outside the conversation has a lone surrogate.
    """
    if not _SURROGATE.search(body):
        return None
    try:
        fields = json.loads(body.decode(), parse_constant=_reject)
    except (ValueError, RecursionError):
        return None
    if not isinstance(fields, dict):
        return None
    joined: dict[str, Any] = {}
    for name, value in fields.items():
        fixed = without_surrogates([name, value])
        if fixed != [name, value] and name not in _CONVERSATION:
            raise InvalidRequest(
                f"the field {name!a:.99} holds a lone surrogate, which is not Unicode text"
            )
        joined[name] = fixed[1]
    return joined


def _reject(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def convert_fields(
    given: Mapping[str, Any],
    kind: type[_T],
    fields: Fields = _NO_FIELDS,
    *,
    where: str = "",
    part: str = "",
) -> _T:
    """Convert the fields of a request, or of a part of a request, to a struct.

    Args:
        given: the fields and their values.
        kind, fields: as for ``decode_body``.
        where: the name of the part for error messages. "": the whole request.
        part: the path of the part in ``fields``, such as "tools[].".

    Raises:
        InvalidRequest: a field has a wrong type, or asks for something that is not supported.
    """
    at = f"{where}: " if where else ""
    try:
        return msgspec.convert(_supported(given, kind, fields, at, part), kind)
    except msgspec.ValidationError as error:
        message = str(error).replace("`$.", "`").replace(" - at `$`", "")
        if (match := re.search(r" - at `(\w+)", message)) and (name := match[1]) in given:
            hint = "; for token ids use stop_token_ids" if name == "stop" else ""
            message += f"; got {name}={given[name]!r:.200}{hint}"
        raise InvalidRequest(at + message) from None


def _supported(
    given: Mapping[str, Any], kind: Any, fields: Fields, at: str, part: str
) -> Mapping[str, Any]:
    """Return only the supported fields of a part and of its nested parts. See ``convert_fields``.

    Raises:
        InvalidRequest: an unsupported field asks for something.
    """
    names = getattr(kind, "__struct_fields__", ())
    for name in given.keys() - set(names):
        if not fields.accepts(part + name, given[name]):
            hint = fields.hint(part, name, names)
            raise InvalidRequest(f"{at}the field {name!r} is not supported{hint}")
    kept = {name: given[name] for name in names if name in given}
    for name, inner in _parts(kind):
        value = kept.get(name)
        if isinstance(value, dict):
            kept[name] = _supported(value, inner, fields, f"{at}{name}: ", f"{part}{name}.")
        elif isinstance(value, list):
            kept[name] = [
                _supported(one, inner, fields, f"{at}{name}[{number}]: ", f"{part}{name}[].")
                if isinstance(one, dict)
                else one
                for number, one in enumerate(value)
            ]
    return kept


@cache
def _parts(kind: Any) -> list[tuple[str, Any]]:
    """Return the fields of a struct whose values are structs or lists of structs."""
    if not hasattr(kind, "__struct_fields__"):
        return []
    return [
        (field.name, inner)
        for field in msgspec.structs.fields(kind)
        for one in (field.type, *get_args(field.type))
        for inner in (one, *get_args(one))
        if isinstance(inner, type) and issubclass(inner, msgspec.Struct)
    ][:64]


def check_choices(choices: int | None) -> int:
    """Return the number of choices that a request asks for.

    Args:
        choices: the number in the request. None: 1.

    Raises:
        InvalidRequest: the number is too small or too large.
    """
    count = 1 if choices is None else choices
    if not 1 <= count <= MAX_CHOICES:
        raise InvalidRequest(f"n must be in 1..{MAX_CHOICES}, got {count}")
    return count


def template_of(
    effort: str | None, verbosity: str | None, given: Mapping[str, Any] | None
) -> dict[str, Any] | None:
    """Return the arguments of the chat template, or None if there are none.

    The effort sets the same arguments as in SGLang (``protocol.py`` and ``serving_chat.py`` of
    ``srt/entrypoints/openai``). A template ignores arguments that it does not read.

    Args:
        effort: the reasoning effort of the request.
        verbosity: the verbosity of the request.
        given: the other arguments of the request, which take precedence.
    """
    variables: dict[str, Any] = {}
    if effort is not None:
        thinks = effort != "none"
        variables = {"reasoning_effort": effort, "enable_thinking": thinks, "thinking": thinks}
    if verbosity is not None:
        variables["verbosity"] = verbosity
    return variables | dict(given or {}) or None


def event(content: Any, name: str = "") -> bytes:
    """Return an event of a stream (server-sent events)."""
    head = b"event: " + name.encode() + b"\n" if name else b""
    return head + b"data: " + encode(content) + b"\n\n"


DONE: Final = b"data: [DONE]\n\n"
"""The last event of streams in OpenAI's completions and in SGLang's API."""


def openai_error(error: HttpError) -> dict[str, Any]:
    """Return the body of an answer for an error, in OpenAI's APIs."""
    return {"error": {"message": str(error), "type": error.kind, "param": None, "code": error.code}}
