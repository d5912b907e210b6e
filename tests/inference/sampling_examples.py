"""A value of every sampling field, and what drivers send to their workers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import pytest

from sglrl.core.calls import Call
from sglrl.driver.driver import Driver
from sglrl.inference import sampling_fields as kinds
from sglrl.wire.codec import encode

IDS = [5, 6, 7]
EXAMPLES: dict[str, Any] = {
    "regex": "a+",
    "ebnf": 'root ::= "a"',
    "json_schema": {"type": "object"},
    "structural_tag": {
        "type": "structural_tag",
        "format": {"type": "const_string", "value": "a"},
    },
    "logit_processor": "a:B",
    "custom_params": {"x": 1},
}
WITH: dict[str, dict[str, Any]] = {
    "return_sampling_mask": {"top_k": 3},
    "custom_params": {"logit_processor": "a:B"},
}
"""Fields that another field needs."""
NOT_FAKE = ("logit_processor", "custom_params")
"""Fields that the fake engine rejects. ``tests/engine/test_logit_processors.py`` sends them."""
BODIES: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}]}),
    "completions": ("/v1/completions", {"prompt": "Hi"}),
    "responses": ("/v1/responses", {"input": "Hi"}),
    "anthropic": ("/v1/messages", {"messages": [{"role": "user", "content": "Hi"}]}),
    "sglang": ("/generate", {"text": "Hi"}),
    "vllm": ("/inference/v1/generate", {"token_ids": IDS}),
}
"""An endpoint of each dialect, and a request without sampling fields."""


def example(field: kinds.Field) -> Any:
    """Return a value that is not the default."""
    match field.kind:
        case _ if field.name in EXAMPLES:
            return EXAMPLES[field.name]
        case kinds.Number(low=low):
            return low + 0.5
        case kinds.Integer(low=low):
            return low + 3
        case kinds.Flag():
            return not field.default
        case kinds.Choice(values=values):
            return next(value for value in values if value != field.default)
        case kinds.Texts():
            return ["a"]
        case kinds.TokenIds():
            return [3]
        case kinds.Biases():
            return {"5": 1.0}
    raise AssertionError(f"EXAMPLES has no value of {field.name}")


def sent(field: kinds.Field) -> Any:
    """Return the example as an engine receives it."""
    return msgspec.msgpack.decode(encode(field.kind.plain(example(field))), strict=False)


def http_body(dialect: str, name: str, value: Any) -> dict[str, Any]:
    """Return a request with a sampling field under a name of the dialect."""
    others = WITH.get(name, {})
    _, body = BODIES[dialect]
    if dialect in ("sglang", "vllm"):
        return {**body, "sampling_params": {name: value, **others}}
    return {**body, name: value, **others}


@contextmanager
def received_sampling() -> Iterator[list[dict[str, Any]]]:
    """Record the sampling parameters that drivers of this process send to their workers."""
    found: list[dict[str, Any]] = []
    submit = Driver.submit

    def recorded(self: Driver, call: Call) -> None:
        if call.endpoint == "generate":
            found.append(msgspec.msgpack.decode(call.args.sampling, strict=False))
        submit(self, call)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Driver, "submit", recorded)
        yield found
