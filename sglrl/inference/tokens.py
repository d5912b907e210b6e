"""Check token ids of callers, and load the model's tokenizer on first use."""

from __future__ import annotations

import json
import os
import struct
import threading
import warnings
from array import array
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from inspect import isawaitable
from typing import Annotated, Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from ..config import is_text, type_of
from ..errors import InvalidRequest
from ..transport.system_limits import start_thread
from .roles import Roles
from .tool_schemas import schemas

TokenIds = Sequence[int] | NDArray[np.integer[Any]]
_INT: set[type] = {int}


def in_range(ids: bytes, vocab_size: int) -> bool:
    """Return whether ``ids`` are int32 token ids, all of them in ``[0, vocab_size)``."""
    if len(ids) % 4:
        return False
    # Read the ids as unsigned integers, so that a negative id is a large number.
    tokens = np.frombuffer(ids, "<u4")
    return not len(tokens) or int(tokens.max()) < vocab_size


def check_ids(ids: Any, vocab_size: int) -> bytes:
    """Check token ids and return them as int32 little-endian bytes.

    Raises:
        InvalidRequest: the ids are empty, not one-dimensional, not integers, or outside
            ``[0, vocab_size)``.
    """
    if isinstance(ids, (list, tuple)):
        return _pack(ids, vocab_size) or _check_list(ids, vocab_size)
    return _check_array(ids, vocab_size)


def _pack(ids: Sequence[Any], vocab_size: int) -> bytes | None:
    """Pack a list of valid Python integers, or return None for any other list.

    This function is three times as fast as ``_check_list``, which reports the error in a list.
    """
    try:
        msgspec.convert((ids,), _prompt_type(vocab_size))
    except msgspec.ValidationError:
        return None
    return _packer(len(ids))(*ids)


@lru_cache
def _prompt_type(vocab_size: int) -> type[msgspec.Struct]:
    # msgspec prepares the type of a struct field once, but the type of a bare list at every call.
    ids = list[Annotated[int, msgspec.Meta(ge=0, lt=vocab_size)]]
    return msgspec.defstruct("_Prompt", [("ids", ids)], array_like=True)


@lru_cache(maxsize=4096)
def _packer(count: int) -> Callable[..., bytes]:
    return struct.Struct(f"<{count}i").pack


def _check_list(ids: Sequence[Any], vocab_size: int) -> bytes:
    """Pack a list that may hold numpy integers.

    Raises:
        InvalidRequest: the list is wrong. The error states the reason.
    """
    if not ids:
        raise InvalidRequest("the prompt is empty; at least one token is needed")
    kinds = set(map(type, ids))
    if kinds != _INT and (
        bool in kinds
        or np.bool_ in kinds
        or not all(issubclass(kind, (int, np.integer)) for kind in kinds)
    ):
        names = ", ".join(sorted(kind.__name__ for kind in kinds))
        raise InvalidRequest(f"input_ids must be integers, got {names}")
    low, high = min(ids), max(ids)
    if low < 0 or high >= vocab_size:
        raise _out_of_range(low if low < 0 else high, vocab_size)
    return array("i", ids).tobytes()


def _check_array(ids: Any, vocab_size: int) -> bytes:
    if isinstance(ids, (str, bytes)):
        raise InvalidRequest("input_ids must be token ids: encode text with client.tokenizer")
    if isawaitable(ids):
        raise InvalidRequest(f"input_ids must be a sequence of integers, got {type_of(ids)}")
    if isinstance(ids, Mapping):
        # vLLM's TokensPrompt, for example.
        raise InvalidRequest(
            "input_ids must be a one-dimensional sequence of integers, got a mapping of "
            f"{list(ids)}"
        )
    try:
        if hasattr(ids, "detach"):
            # A torch tensor, on any device. numpy lacks some torch dtypes, hence the except below.
            ids = ids.detach().cpu().numpy()
        values = np.asarray(ids)
    except (ValueError, TypeError) as error:
        raise InvalidRequest(f"input_ids must be a sequence of integers: {error}") from None
    if values.ndim != 1 or values.dtype.kind not in "iu":
        raise InvalidRequest(
            f"input_ids must be a one-dimensional sequence of integers, got {values.dtype} of "
            f"shape {values.shape}"
        )
    if not values.size:
        raise InvalidRequest("the prompt is empty; at least one token is needed")
    low, high = int(values.min()), int(values.max())
    if low < 0 or high >= vocab_size:
        raise _out_of_range(low if low < 0 else high, vocab_size)
    return values.astype("<i4", copy=False).tobytes()


def _out_of_range(token: int, vocab_size: int) -> InvalidRequest:
    return InvalidRequest(f"token id {token} is outside the vocabulary (0..{vocab_size - 1})")


def check_text(name: str, text: str) -> None:
    """Raise ``InvalidRequest`` for text with lone surrogates, which UTF-8 cannot encode."""
    if not is_text(text):
        raise InvalidRequest(
            f"{name} holds a lone surrogate, which is not Unicode text: {text!a:.200}"
        )


def without_surrogates(value: Any) -> Any:
    """Return a JSON value with U+FFFD in place of each lone surrogate, which cannot be encoded.

    A value that is not JSON is returned unchanged.
    """
    try:
        text = json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError):
        return value
    if is_text(text):
        return value
    return json.loads(text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace"))


def has_words(tokenizer: Any) -> bool:
    """Return whether the tokenizer has tokens other than special tokens.

    For a folder without a tokenizer, transformers (5.12) returns a tokenizer that has only special
    tokens.
    """
    return len(tokenizer) > len(tokenizer.all_special_tokens)


def is_hub_name(model: str) -> bool:
    """Return whether the name of a model has the form "owner/name", as on the hub."""
    return model.count("/") == 1 and not model.startswith((".", "/", "~"))


class TokenizerBox:
    """Holds the model's Hugging Face tokenizer.

    Loading takes seconds, so the tokenizer is loaded on first use, or while the engines start
    (``load_early``). Several threads may encode at the same time.

    Args:
        model: the folder of the tokenizer, or its name on the hub.
        trust: whether to run Python code from the tokenizer's folder.
    """

    def __init__(self, model: str, trust: bool = False) -> None:
        self.model = model
        self._trust = trust
        self.fake = False
        """Whether the engine is the fake engine. Its model may be a name without a tokenizer."""
        self.shown = False
        """Whether slow loading is shown on stderr instead of logged."""
        self.awaited = False
        """Whether a task waits until the tokenizer is loaded. The first one shows that."""
        self._tokenizer: Any = None
        self._roles: dict[Any, Roles] = {}
        """The known roles by chat template. The key None stands for the model's own template."""
        self._shows_tools: set[Any] = set()
        """The chat templates that have written tools. None stands for the model's own template."""
        self._lock = threading.Lock()
        self._waiting: list[Callable[[Exception | None], None]] = []
        """The callbacks to call when the thread that loads the tokenizer ends."""
        self._waiting_lock = threading.Lock()

    def __reduce__(self) -> tuple[type[TokenizerBox], tuple[str]]:
        # Completions refer to the box, and may be sent to other processes.
        return TokenizerBox, (self.model,)

    def __deepcopy__(self, memo: Any) -> TokenizerBox:
        return self

    @property
    def tokenizer(self) -> Any:
        """The tokenizer. Raises ``InvalidRequest`` if the model has no usable tokenizer."""
        if self._tokenizer is None:
            with self._lock:
                if self._tokenizer is None:
                    self._tokenizer = self._load()
        return self._tokenizer

    @property
    def loaded(self) -> bool:
        return self._tokenizer is not None

    def load_early(self) -> None:
        """Load the tokenizer in a thread. The first use of the tokenizer raises any error."""
        self.load_in_thread(lambda error: None)

    def load_in_thread(self, finish: Callable[[Exception | None], None]) -> None:
        """Load the tokenizer in a daemon thread, which does not delay the exit of the program.

        Args:
            finish: called in the thread with None when the tokenizer is loaded, or with the error.
        """

        def load() -> None:
            try:
                _ = self.tokenizer
            except Exception as error:
                end(error)
            else:
                end(None)

        def end(error: Exception | None) -> None:
            with self._waiting_lock:
                waiting, self._waiting = self._waiting, []
            for each in waiting:
                each(error)

        with self._waiting_lock:
            self._waiting.append(finish)
            first = len(self._waiting) == 1
        if first:
            try:
                start_thread(threading.Thread(target=load, name="sglrl-tokenizer", daemon=True))
            except Exception as error:
                end(error)

    def _load(self) -> Any:
        if self.fake and not os.path.isdir(self.model) and not is_hub_name(self.model):
            # This is not a name on the hub, so do not send a request to the hub.
            raise InvalidRequest(
                f"{self.model!r} is neither a folder nor 'owner/name' on the hub, so the fake "
                "engine has no tokenizer; use input_ids"
            )
        # In a notebook without ipywidgets, tqdm warns when transformers imports it. The warning
        # would break the line that shows the progress of the start.
        warnings.filterwarnings("ignore", message="IProgress not found")
        try:
            from transformers import AutoTokenizer
        except ImportError:
            raise InvalidRequest(
                "text needs the transformers package (pip install transformers); without it use "
                "input_ids"
            ) from None
        try:
            tokenizer = AutoTokenizer.from_pretrained(self.model, trust_remote_code=self._trust)
            if not has_words(tokenizer):
                raise ValueError("it has special tokens only")
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise InvalidRequest(
                f"{self.model} has no usable tokenizer, so prompts must be input_ids and outputs "
                f"have no text: {error}"
            ) from None
        return tokenizer

    def encode_texts(self, texts: Sequence[str]) -> list[list[int]]:
        for text in texts:
            check_text("the prompt", text)
        encoded: list[list[int]] = self.tokenizer(list(texts))["input_ids"]
        return encoded

    def render(self, messages: Any, template: Mapping[str, Any] | None = None) -> str:
        """Apply the chat template and return the text up to the assistant's turn.

        Args:
            template: further arguments of the template (``tools``, ``enable_thinking``, ...). With
                ``continue_final_message``, the text ends within the last message, which must be a
                message of the assistant.

        Raises:
            InvalidRequest: there is no chat template, or the template rejects the messages or omits
                the messages of a role.
        """
        text = self._render(messages, template)
        self.check_roles(messages, template)
        return text

    def check_roles(
        self, messages: Any, template: Mapping[str, Any] | None = None, *, begin: int = 0
    ) -> None:
        """Check that the chat template writes the messages of all roles. See ``Roles.check``."""
        options = {k: v for k, v in (template or {}).items() if k == "chat_template"}
        key = options.get("chat_template")
        if key not in self._roles:
            self._roles[key] = Roles(lambda probe: self._render(probe, options))
        self._roles[key].check(messages, begin=begin)

    def _render(self, messages: Any, template: Mapping[str, Any] | None) -> str:
        tokenizer = self.tokenizer
        options = {"add_generation_prompt": True, **(template or {})}
        if not (options.get("chat_template") or getattr(tokenizer, "chat_template", None)):
            raise InvalidRequest(f"{self.model} has no chat template; use prompt or input_ids")
        if options.get("continue_final_message"):
            options["add_generation_prompt"] = False
            if messages[-1]["role"] != "assistant" or not messages[-1].get("content"):
                raise InvalidRequest(
                    "continue_final_message continues a message of the assistant, and the last "
                    f"message is {messages[-1]!r:.200}"
                )
        if options.get("tools"):
            options["tools"] = schemas(options["tools"])
        # A model may sample one half of a surrogate pair in the arguments of a call.
        messages = [
            {**message, "tool_calls": without_surrogates(message["tool_calls"])}
            if message.get("tool_calls")
            else message
            for message in messages
        ]
        try:
            text: str = tokenizer.apply_chat_template(messages, tokenize=False, **options)
        except Exception as error:
            # A template is a program of the model and may raise any exception.
            raise InvalidRequest(f"the chat template rejects these messages: {error}") from None
        return text

    def encode_messages(
        self, conversations: Sequence[Any], template: Mapping[str, Any] | None = None
    ) -> list[list[int]]:
        """Render each conversation and return its token ids.

        Raises:
            InvalidRequest: see ``render``, or the chat template does not write the tools.
        """
        texts = [self.render(c, template) for c in conversations]
        if template and template.get("tools"):
            self._check_tools(conversations[0], template, texts[0])
        return self.encode_rendered(texts)

    def _check_tools(self, messages: Any, template: Mapping[str, Any], text: str) -> None:
        """Check that the chat template writes tools, unless it has written tools before.

        Args:
            text: the rendered messages.
        """
        key = template.get("chat_template")
        if key in self._shows_tools:
            return
        options = {name: value for name, value in template.items() if name != "tools"}
        try:
            shows = self._render(messages, options) != text
        except InvalidRequest:
            # The template rejects messages without tools, so it uses the tools.
            shows = True
        if not shows:
            raise InvalidRequest("the chat template of this model shows no tools: omit tools")
        self._shows_tools.add(key)

    def encode_rendered(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the token ids of texts, without adding special tokens."""
        for text in texts:
            check_text("the text", text)
        encoded = self.tokenizer(list(texts), add_special_tokens=False)
        # Some tokenizers return arrays or tuples.
        return [list(ids) for ids in encoded["input_ids"]]

    def decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        text: str = self.tokenizer.decode(
            ids, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
        )
        return text
