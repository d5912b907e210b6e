"""vLLM's ``structured_outputs``, in the requests that have it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import xgrammar
from transformers import AutoTokenizer

from sglrl.errors import InvalidRequest
from sglrl.gateway import chat, completions, vllm_generate
from sglrl.launching.tiny_model import tiny_model

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
FORM = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}


def of_chat(fields: dict[str, Any]) -> Mapping[str, Any]:
    body = {"messages": [{"role": "user", "content": "Hi"}], **fields}
    return chat.CHAT.parse(json.dumps(body).encode()).turns()[0].sampling


def of_completions(fields: dict[str, Any]) -> Mapping[str, Any]:
    body = {"prompt": "Hi", "max_tokens": None, **fields}
    made = dict(completions.parse(json.dumps(body).encode()).turns()[0].sampling)
    assert made.pop("max_new_tokens") == 16
    return made


def of_vllm(fields: dict[str, Any]) -> Mapping[str, Any]:
    body = {"token_ids": [5], "sampling_params": fields}
    return vllm_generate.parse(json.dumps(body).encode()).turns()[0].sampling


every_dialect = pytest.mark.parametrize("sampling_of", [of_chat, of_completions, of_vllm])


@every_dialect
@pytest.mark.parametrize(
    ("given", "ours"),
    [
        ({"json": SCHEMA}, {"json_schema": SCHEMA}),
        ({"json": json.dumps(SCHEMA)}, {"json_schema": json.dumps(SCHEMA)}),
        ({"json_object": True, "regex": None}, {"json_schema": {"type": "object"}}),
        ({"regex": "[a-z]+"}, {"regex": "[a-z]+"}),
        ({"grammar": 'root ::= "a"'}, {"ebnf": 'root ::= "a"'}),
        ({"structural_tag": {"type": "x"}}, {"structural_tag": {"type": "x"}}),
        ({"json_object": False, "disable_fallback": False}, {}),
        ({}, {}),
    ],
)
def test_each_grammar(
    sampling_of: Callable[[dict[str, Any]], Any], given: dict[str, Any], ours: dict[str, Any]
) -> None:
    assert sampling_of({"structured_outputs": given}) == ours


@every_dialect
@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"regex": "a", "json": SCHEMA}, "structured_outputs: give one grammar, got 2"),
        ({"json_object": True, "json": SCHEMA}, "structured_outputs: give one grammar, got 2"),
        ({"choice": ["a"], "structural_tag": "{}"}, "give one grammar, got 2"),
        ({"choice": []}, "choice must be a list of texts that are not empty"),
        ({"choice": ["a", ""]}, "choice must be a list of texts that are not empty"),
        ({"choice": "a"}, "structured_outputs: Expected `array | null`, got `str` - at `choice`"),
        ({"disable_any_whitespace": True}, "the field 'disable_any_whitespace' is not supported"),
    ],
)
def test_a_field_is_honoured_or_rejected(
    sampling_of: Callable[[dict[str, Any]], Any], given: dict[str, Any], message: str
) -> None:
    with pytest.raises(InvalidRequest) as error:
        sampling_of({"structured_outputs": given})
    assert message in str(error.value)


@pytest.mark.parametrize("sampling_of", [of_chat, of_completions])
@pytest.mark.parametrize(
    ("other", "name"),
    [
        ({"response_format": FORM}, "response_format"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"regex": "a"}, "regex"),
        ({"ebnf": "a"}, "ebnf"),
    ],
)
def test_two_grammars(
    sampling_of: Callable[[dict[str, Any]], Any], other: dict[str, Any], name: str
) -> None:
    for given in ({"json": SCHEMA}, {"regex": "b"}, {"choice": ["c"]}):
        with pytest.raises(InvalidRequest, match=f"structured_outputs and {name} are both"):
            sampling_of({"structured_outputs": given, **other})
    assert sampling_of({"structured_outputs": {}, **other})


@every_dialect
def test_a_choice(sampling_of: Callable[[dict[str, Any]], Any]) -> None:
    """The grammar allows exactly these texts."""
    texts = ["yes", "no", "no way", 'a "quoted" \\d+\n', "é🙂"]
    tokenizer = AutoTokenizer.from_pretrained(tiny_model())
    compiler = xgrammar.GrammarCompiler(xgrammar.TokenizerInfo.from_huggingface(tokenizer))
    sampling = sampling_of({"structured_outputs": {"choice": texts}})
    compiled = compiler.compile_structural_tag(json.dumps(sampling["structural_tag"]))

    def allows(text: str) -> bool:
        matcher = xgrammar.GrammarMatcher(compiled, terminate_without_stop_token=True)
        return matcher.accept_string(text) and matcher.is_completed()

    assert [text for text in texts if not allows(text)] == []
    for text in ("", "ye", "yes!", "maybe", 'a "quoted" 5\n'):
        assert not allows(text)
