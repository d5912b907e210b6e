"""Requests with wrong prompts and sampling parameters: none is an internal error."""

from __future__ import annotations

import json
import random
from typing import Any

import httpx
import pytest

import sglrl
from sglrl.gateway import completions, sglang_generate, tokens, vllm_generate
from sglrl.gateway.serve import serve

ODD: list[Any] = [
    None, True, False, 0, -1, 3, 2**31, 2**63, 10**30, 1.5, -1e308, "", "x", "\x00", [], {}, [[]],
    [1, 2], [[1], [2]], [-1], [2**40], [None], ["a", "b"], ["", "a"], {"5": 1}, {"x": 1}, {"n": 2},
    {"5": 1e308}, {"a": {"b": []}}, [{}, {}], [{"n": 3}], {"max_new_tokens": 2, "stop": [""]},
    {"regex": "("}, {"json_schema": "{"}, {"ebnf": "\x00"}, "a" * 5000, {"type": "json_object"},
    {"structured_outputs": {"json": "{"}}, {"temperature": 1e-60}, {"include_usage": True},
]  # fmt: skip
FIELDS: dict[str, tuple[dict[str, Any], Any]] = {
    "/v1/completions": (
        {"model": "tiny", "prompt": "Hi", "max_tokens": 2},
        completions.CompletionRequest,
    ),
    "/generate": (
        {"text": "Hi", "sampling_params": {"max_new_tokens": 2}},
        sglang_generate.GenerateRequest,
    ),
    "/inference/v1/generate": (
        {"token_ids": [3], "sampling_params": {"max_tokens": 2}},
        vllm_generate.TokenRequest,
    ),
    "/tokenize": ({"prompt": "Hi"}, tokens.TokenizeRequest),
    "/detokenize": ({"tokens": [3]}, tokens.DetokenizeRequest),
    "/abort_request": ({"rid": "x"}, None),
    "/inference/v1/abort_requests": ({"request_ids": ["x"]}, None),
}
PARAMS = {"/generate": sglang_generate._Sampling, "/inference/v1/generate": vllm_generate._Sampling}


def hostile(chance: random.Random) -> tuple[str, bytes]:
    path = chance.choice(list(FIELDS))
    given, kind = FIELDS[path]
    fields = dict(given)
    names = list(fields) if kind is None else kind.__struct_fields__
    for name in chance.sample(names, min(len(names), chance.randint(0, 2))):
        fields[name] = chance.choice(ODD)
    if path in PARAMS and chance.random() < 0.6:
        params = dict(given["sampling_params"])
        for name in chance.sample(PARAMS[path].__struct_fields__, 2):
            # More than a few tokens take long.
            if name not in ("n", "max_tokens", "max_new_tokens"):
                params[name] = chance.choice(ODD)
        fields["sampling_params"] = params
    if path == "/inference/v1/generate" and "max_tokens" not in str(fields["sampling_params"]):
        fields["sampling_params"] = {"max_tokens": 2}
    body = json.dumps(fields).encode()
    if chance.random() < 0.1:
        at = chance.randrange(len(body))
        body = body[:at] + chance.randbytes(2) + body[at + chance.randint(0, 9) :]
    return path, body


@pytest.mark.asyncio
async def test_hostile_requests() -> None:
    chance = random.Random(7)
    seen: dict[str, set[int]] = {path: set() for path in FIELDS}
    async with (
        sglrl.launch("tiny", engine="fake") as pool,
        serve(pool, name="tiny") as gateway,
        httpx.AsyncClient(base_url=gateway.url, timeout=300) as http,
    ):
        for _ in range(900):
            path, body = hostile(chance)
            answer = await http.post(path, content=body)
            seen[path].add(answer.status_code)
            assert answer.status_code in (200, 400, 404), (path, body, answer.text)
            if answer.status_code >= 400:
                assert answer.json()["error"]["message"]
    assert all({200, 400} <= statuses for statuses in seen.values()), seen
