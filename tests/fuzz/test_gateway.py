"""Hostile requests to a gateway with the fake engine.

No answer may be an internal error, and nothing may be left of the requests. ``SGLRL_FUZZ_REQUESTS``
is their number, and ``SGLRL_FUZZ_SEED`` selects others.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
import pytest_asyncio
from hypothesis import HealthCheck, Phase, given, note, seed, settings
from hypothesis import strategies as st

from sglrl.gateway.anthropic import MessagesRequest
from sglrl.gateway.chat import ChatRequest, ChatTokensRequest
from sglrl.gateway.completions import CompletionRequest
from sglrl.gateway.responses import ResponsesRequest
from sglrl.gateway.sglang_generate import GenerateRequest
from sglrl.gateway.vllm_generate import TokenRequest

from .mutator import SEED
from .watched_gateway import (
    ASK,
    REQUESTS,
    Connection,
    State,
    Watched,
    watched_gateway,
)

pytestmark = pytest.mark.asyncio(loop_scope="module")

EPOCH = 500
"""Number of requests after which sessions end. A conversation grows with its turns."""
GROWTH = 16 << 20
"""Bytes that the second half of the requests may add. The allocator's pages and the caches of
libraries are a few MiB, and a leak of 1 KiB for each of 50,000 requests is 50 MiB."""


@pytest.fixture(scope="module")
def monkeypatch_module() -> Iterator[pytest.MonkeyPatch]:
    with pytest.MonkeyPatch.context() as patch:
        yield patch


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def gateway(monkeypatch_module: pytest.MonkeyPatch) -> AsyncIterator[Watched]:
    async with watched_gateway(monkeypatch_module) as made:
        yield made


# --- JSON -----------------------------------------------------------------------------------------

BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": ASK,
    "/v1/responses": {"model": "tiny", "input": "Hi", "max_output_tokens": 2},
    "/v1/messages": ASK,
    "/v1/messages/count_tokens": ASK,
    "/v1/completions": {"model": "tiny", "prompt": "Hi", "max_tokens": 2},
    "/generate": {"text": "Hi", "sampling_params": {"max_new_tokens": 2}},
    "/inference/v1/generate": {"token_ids": [3], "sampling_params": {"max_tokens": 2}},
    "/tokenize": {"prompt": "Hi"},
    "/detokenize": {"tokens": [3]},
    "/abort_request": {"rid": "x"},
    "/inference/v1/abort_requests": {"request_ids": ["x"]},
    "/sessions": {"metadata": {}, "reward_weights": {"": 1}},
    "/sessions/{session}/reward": {"reward": 1, "name": "x"},
    "/update_weights_from_distributed": {"names": ["x"], "dtypes": ["x"], "shapes": [[2]]},
    # No group is formed: that would wait for the trainer.
    "/init_weights_update_group": {
        "master_address": "x", "master_port": 1, "rank_offset": 1, "world_size": 2,
        "backend": "none",
    },
    "/update_weights_from_disk": {"model_path": "/nothing"},
}  # fmt: skip
"""Valid bodies, if others are not."""
SPECIAL = [
    "NaN", "-Infinity", "1e999", "-0", "1" * 400, "1e-400", "9223372036854775808", "00", "+1",
    r'"\ud800"', r'"\udc00\ud800"', r'"\u0000"', '"\\x"', "'x'", "[1,]", "{,}", '{"a":1,"a":2}',
    "true", "null", '""', "[]", "{}", "[[]]", "[" * 3000 + "]" * 3000, "[" * 9000,
    '{"a":' * 3000 + "1" + "}" * 3000, '"' + "x" * 20_000 + '"', "/*x*/1", "\x00", "\ufeff1",
    '[{"role":"user","content":[{"type":"text","text":"x"}]}]',
    '[{"role":"assistant","content":null,"tool_calls":[{"id":1,"function":{"name":[]}}]}]',
    '[{"role":"tool","content":{},"tool_call_id":[]}]',
    '[{"type":"function","name":"f","function":{"name":"f","parameters":5}}]',
    '{"type":"json_schema","json_schema":{"schema":{"$ref":"#"}}}', '{"regex":"(((((("}',
    '{"format":{"type":"json_schema","name":"x","schema":{"type":"nothing"}}}',
]  # fmt: skip
"""JSON, and what is no JSON."""
WORDS = ["user", "text", "auto", "type", "role", "content", "a", "0", "abort", "\0", "ä\u202e😀"]

scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.sampled_from([-1, 2**31, 2**53 + 1, 2**63, -(2**63) - 1, 10**30])
    | st.floats()
    | st.text(st.characters(exclude_categories=()), max_size=20)
    | st.sampled_from(WORDS)
)
values = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.sampled_from(WORDS) | st.text(max_size=5), inner, max_size=4)
    ),
    max_leaves=12,
)
texts = st.sampled_from(SPECIAL) | values.map(json.dumps)


STRUCTS = {
    "/v1/chat/completions": ChatRequest,
    "/v1/chat/completions/tokens": ChatTokensRequest,
    "/v1/responses": ResponsesRequest,
    "/v1/messages": MessagesRequest,
    "/v1/messages/count_tokens": MessagesRequest,
    "/v1/completions": CompletionRequest,
    "/generate": GenerateRequest,
    "/inference/v1/generate": TokenRequest,
}
READS = [
    "/health", "/metrics", "/v1/models", "/v1/models/{model}", "/server_info", "/get_load",
    "/v1/loads", "/model_info", "/weight_version", "/health_generate", "/get_world_size",
]  # fmt: skip
CHANGES = [
    "/pause_generation", "/continue_generation", "/pause", "/resume", "/flush_cache",
    "/reset_prefix_cache", "/destroy_weights_update_group", "/update_weights_from_tensor",
]  # fmt: skip


def endpoints() -> list[tuple[str, str]]:
    """Return the methods and paths of the endpoints. "{session}" stands for that of a session."""
    alone = [("GET", path) for path in READS]
    alone += [("POST", path) for path in [*BODIES, *STRUCTS, *CHANGES] if path[:5] != "/sess"]
    within = [(method, "/sessions/{session}" + path) for method, path in alone]
    own = [("POST", "/sessions"), ("POST", "/sessions/{session}/reward")]
    return [*alone, *within, *own, ("DELETE", "/sessions/{session}")]


def fields_of(path: str) -> list[str]:
    """Return the fields of the body of an endpoint."""
    struct = STRUCTS.get(path)
    names = [] if struct is None else list(struct.__struct_fields__)
    return [*names, *BODIES.get(path, ()), "group_name", "rid"]


@st.composite
def bodies(draw: Any, names: list[str], base: dict[str, Any]) -> bytes:
    kind = draw(st.integers(0, 19))
    if kind == 0:
        return draw(texts).encode("utf-8", "surrogatepass")  # type: ignore[no-any-return]
    if kind == 1:
        return draw(st.binary(max_size=50))  # type: ignore[no-any-return]
    fields = [(name, json.dumps(value)) for name, value in base.items()]
    odd = draw(st.lists(st.tuples(st.sampled_from(names), texts), max_size=3))
    if draw(st.integers(0, 9)):
        # Otherwise they are there twice.
        fields = [one for one in fields if one[0] not in dict(odd)]
    made = ",".join(f"{json.dumps(name)}:{text}" for name, text in fields + odd)
    body = f"{{{made}}}".encode("utf-8", "surrogatepass")
    if kind == 2:
        cut = draw(st.integers(0, len(body)))
        return body[:cut] + draw(st.binary(max_size=3)) + body[cut + draw(st.integers(0, 3)) :]
    return body


ENDPOINTS = endpoints()
IDS = [
    "0-x",
    "9-x",
    "x",
    "%00",
    "%F0%9F%98%80",
    "%ff",
    "..",
    "a%2Fb",
    "0-" + "x" * 3000,
    "{x}",
    "'",
]
METHODS = ["GET", "PUT", "PATCH", "HEAD", "OPTIONS", "TRACE", "DELETE", "POST"]
KEYS = [
    b"", b"Authorization: Bearer\r\n", b"Authorization: Bearer \xff\xfe\r\n", b"X-Api-Key: x\r\n",
    b"Authorization: Bearer sk-sglrl-0-x\r\n", b"Authorization: Basic eA==\r\n",
    b"Authorization: Bearer " + b"x" * 9000 + b"\r\n", b"X-Stainless-Retry-Count: 1\r\n",
    b"X-Stainless-Retry-Count: -1e9\r\nContent-Encoding: gzip\r\n", b"Host: [\r\n",
    b"Content-Type: application/json; charset=utf-16\r\n", b"Host: \xff:99999999\r\n",
]  # fmt: skip


@st.composite
def requests(draw: Any) -> tuple[str, str, bytes, bytes]:
    """Draw a method, a path, a body and headers. "{live}" and "{key}" stand for an open session."""
    method, pattern = draw(st.sampled_from(ENDPOINTS))
    plain = pattern.removeprefix("/sessions/{session}")
    path = pattern if pattern in BODIES else plain
    body = draw(bodies(fields_of(path), BODIES.get(path, {})))
    if plain.endswith("/pause"):
        pattern += draw(st.sampled_from(["", "?mode=keep", "?mode=", "?mode=%00", "?mode=x&mode"]))
    session = draw(st.sampled_from(["{live}"] * 12 + IDS))
    model = draw(st.sampled_from(["tiny", "x/y", *IDS]))
    pattern = pattern.replace("{session}", session).replace("{model}", model)
    if not draw(st.integers(0, 9)):
        method = draw(st.sampled_from(METHODS))
    key = draw(st.sampled_from([b"Authorization: Bearer {key}\r\n", *KEYS]))
    return method, pattern, body, key


class Sender:
    """Sends requests one after another on a connection, with a session of its own."""

    def __init__(self, gateway: Watched) -> None:
        self.gateway = gateway
        self.http: Connection
        self.count = 0
        self.half: State
        self.live, self.key = "", ""

    async def send(self, method: str, path: str, body: bytes, headers: bytes) -> None:
        if self.count % EPOCH == 0:
            await self._again()
        self.count += 1
        path = path.replace("{live}", self.live)
        headers = headers.replace(b"{key}", self.key.encode())
        try:
            answer = await self.http.request(method, path, body, headers)
        except BaseException:
            await self._reconnect()
            raise
        if method != "HEAD":
            self.gateway.check_answer(path, answer)
        if answer.status == 200 and "/pause" in path:
            assert (await self.http.request("POST", "/continue_generation")).status == 200
        if answer.headers.get("connection") == "close":
            await self._reconnect()
        if self.count == REQUESTS // 2:
            await self.http.close()
            self.half = await self.gateway.check()
            self.http = await self.gateway.connect()

    async def _reconnect(self) -> None:
        await self.http.close()
        self.http = await self.gateway.connect()

    async def _again(self) -> None:
        """Connect again, and open a session."""
        if self.count:
            await self.http.close()
        await self.gateway.end_sessions()
        self.http = await self.gateway.connect()
        made = json.loads((await self.http.request("POST", "/sessions")).body)
        self.live, self.key = made["id"], made["api_key"]


@pytest.mark.timeout(0)
async def test_json(gateway: Watched) -> None:
    sender = Sender(gateway)
    loop = asyncio.get_running_loop()

    @seed(SEED)
    @settings(
        max_examples=REQUESTS,
        database=None,
        phases=[Phase.generate, Phase.shrink],
        report_multiple_bugs=False,
        suppress_health_check=list(HealthCheck),
    )
    @given(requests())
    def each(request: tuple[str, str, bytes, bytes]) -> None:
        note(repr(request))
        asyncio.run_coroutine_threadsafe(sender.send(*request), loop).result()

    # The driver of the engines runs in this loop.
    await asyncio.to_thread(each)
    await sender.http.close()
    assert sender.count >= REQUESTS
    assert {200, 201, 400, 401, 403, 404, 405} <= set(gateway.seen), gateway.seen
    report("JSON", sender.count, gateway, sender.half, await gateway.check())


def report(what: str, count: int, gateway: Watched, half: State, end: State) -> None:
    """Print the figures, and check the memory."""
    mib = [round(state.memory / (1 << 20), 1) for state in (gateway._begin, half, end)]
    print(f"{what}: {count:,} requests, {mib} MiB, answers {dict(sorted(gateway.seen.items()))}")
    assert end.memory - half.memory < GROWTH
