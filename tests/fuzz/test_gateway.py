"""Hostile requests to a gateway with the fake engine.

``SGLRL_FUZZ_REQUESTS`` is the number of requests, and ``SGLRL_FUZZ_SEED`` selects others.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from random import Random
from time import time
from typing import Any

import pytest
import pytest_asyncio
from hypothesis import HealthCheck, Phase, given, note, seed, settings
from hypothesis import strategies as st

from .mutator import SEED
from .watched_gateway import (
    ASK,
    BODY_SECONDS,
    MAX_BYTES,
    REQUESTS,
    Connection,
    State,
    Watched,
    watched_gateway,
)

pytestmark = pytest.mark.asyncio(loop_scope="module")

JSON_REQUESTS = REQUESTS * 6 // 10
RAW_REQUESTS = REQUESTS * 3 // 10
SCHEMA_REQUESTS = REQUESTS // 10
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
    "/v1/chat/completions/tokens": {**ASK, "tokens": [3]},
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
SIMPLE = ["null", "true", "false", "0", "1", "-1", "1.5", '""', '"x"', "[]", '["x"]', "{}"]
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
texts = st.sampled_from(SIMPLE) | st.sampled_from(SPECIAL) | values.map(json.dumps)


def fields_of(document: dict[str, Any], path: str) -> list[str]:
    """Return the fields of the body of an endpoint."""
    body = document["paths"][path].get("post", {}).get("requestBody")
    if body is None:
        return ["a"]
    reference = body["content"]["application/json"]["schema"]["$ref"]
    return list(document["components"]["schemas"][reference.rpartition("/")[2]]["properties"])


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
def requests(draw: Any, document: dict[str, Any]) -> tuple[str, str, bytes, bytes]:
    """Draw a method, a path, a body and headers. "{live}" and "{key}" stand for an open session."""
    pattern = draw(st.sampled_from(list(BODIES)) | st.sampled_from(sorted(document["paths"])))
    known = [name.upper() for name in document["paths"][pattern] if name != "parameters"]
    plain = pattern.removeprefix("/sessions/{session}")
    known_as = (pattern, plain, plain.removeprefix("/v1"))
    base = next((BODIES[path] for path in known_as if path in BODIES), {})
    body = draw(bodies(fields_of(document, pattern), base))
    if plain.endswith("/pause"):
        pattern += draw(st.sampled_from(["", "?mode=keep", "?mode=", "?mode=%00", "?mode=x&mode"]))
    session = draw(st.sampled_from(["{live}"] * 12 + IDS))
    model = draw(st.sampled_from(["tiny", "x/y", *IDS]))
    pattern = pattern.replace("{session}", session).replace("{model}", model)
    method = draw(st.sampled_from(known) if draw(st.integers(0, 9)) else st.sampled_from(METHODS))
    key = draw(st.sampled_from([b"Authorization: Bearer {key}\r\n", *KEYS]))
    return method, pattern, body, key


HOLDS = {
    "/pause": "/continue_generation",
    "/release_memory_occupation": "/resume_memory_occupation",
    "/pool/sleep": "/resume_memory_occupation",
}
"""Requests after which others wait, and what ends that."""


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
        if answer.status == 200:
            for name, opposite in HOLDS.items():
                if name in path:
                    assert (await self.http.request("POST", opposite)).status == 200
        if answer.headers.get("connection") == "close":
            await self._reconnect()
        if self.count == JSON_REQUESTS // 2:
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


async def test_json(gateway: Watched) -> None:
    await gateway.begin()
    sender = Sender(gateway)
    loop = asyncio.get_running_loop()

    @seed(SEED)
    @settings(
        max_examples=JSON_REQUESTS,
        database=None,
        phases=[Phase.generate, Phase.shrink],
        report_multiple_bugs=False,
        suppress_health_check=list(HealthCheck),
    )
    @given(requests(gateway.document))
    def each(request: tuple[str, str, bytes, bytes]) -> None:
        note(repr(request))
        asyncio.run_coroutine_threadsafe(sender.send(*request), loop).result()

    # The driver of the engines runs in this loop.
    await asyncio.to_thread(each)
    await sender.http.close()
    assert sender.count >= JSON_REQUESTS
    assert {200, 201, 400, 401, 403, 404, 405} <= set(gateway.seen), gateway.seen
    report("JSON", sender.count, gateway, sender.half, await gateway.check())


def report(what: str, count: int, gateway: Watched, half: State, end: State) -> None:
    """Print the figures, and check the memory."""
    mib = [round(state.memory / (1 << 20), 1) for state in (gateway.before, half, end)]
    seen = dict(sorted(gateway.seen.items()))
    print(f"\n{what}: {count:,} requests, {time() - gateway.began:.0f} s, {mib} MiB, {seen}")
    assert end.memory - half.memory < GROWTH


# --- bytes ----------------------------------------------------------------------------------------

START = b"POST /generate HTTP/1.1\r\nHost: x\r\n"
BODY = json.dumps(BODIES["/generate"]).encode()
WHOLE = START + b"Content-Length: %d\r\n\r\n" % len(BODY) + BODY
CHUNKED = START + b"Transfer-Encoding: chunked\r\n\r\n"


def _cut(chance: Random) -> bytes:
    return WHOLE[: chance.randrange(len(WHOLE))]


def _changed(chance: Random) -> bytes:
    at = chance.randrange(len(WHOLE))
    return WHOLE[:at] + chance.randbytes(chance.randint(1, 4)) + WHOLE[at + chance.randint(0, 9) :]


def _wrong_length(chance: Random) -> bytes:
    length = chance.choice(
        [b"-1", b"0", b"1", b"x", b"", b"9" * 30, b"+5", b"0x5", b"5, 5", b"1e1"]
    )
    lines = [b"Content-Length: " + length + b"\r\n"] * chance.randint(1, 2)
    return START + b"".join(lines) + b"\r\n" + BODY


def _wrong_chunks(chance: Random) -> bytes:
    sizes = [b"zz", b"-1", b"", b"f" * 20, b"5;" + b"x" * 500, b"2 ", b"0x2", b"%x" % len(BODY)]
    made = b"".join(chance.choice(sizes) + b"\r\n" + BODY + b"\r\n" for _ in range(3))
    both = b"Content-Length: 5\r\n" * chance.randint(0, 1)
    return (
        CHUNKED[:-2]
        + both
        + b"\r\n"
        + made
        + chance.choice([b"0\r\n\r\n", b"0\r\nx: y\r\n\r\n", b""])
    )


def _small_chunks(chance: Random) -> bytes:
    return CHUNKED + b"".join(b"1\r\n%c\r\n" % byte for byte in BODY) + b"0\r\n\r\n"


def _large_body(chance: Random) -> bytes:
    size = MAX_BYTES + chance.randint(1, MAX_BYTES)
    if chance.random() < 0.5:
        return CHUNKED + b"%x\r\n" % size + b"x" * size + b"\r\n0\r\n\r\n"
    return START + b"Content-Length: %d\r\n\r\n" % size + b"x" * size


def _many_headers(chance: Random) -> bytes:
    count = chance.randint(1000, 5000)
    lines = b"".join(b"x-%d: %d\r\n" % (n, n) for n in range(count))
    return START + lines + b"Content-Length: %d\r\n\r\n" % len(BODY) + BODY


def _long_header(chance: Random) -> bytes:
    name, size = chance.choice([b"x", b"Cookie", b"Authorization"]), chance.randint(1, 300_000)
    return START + name + b": " + b"x" * size + b"\r\n\r\n"


def _wrong_line(chance: Random) -> bytes:
    line = chance.choice([
        b"", b"GET", b"GET /", b"GET / HTTP/9.9", b"PRI * HTTP/2.0", b"GET  / HTTP/1.1", b"\0",
        b"get / HTTP/1.1", b"GET /\xff HTTP/1.1", b"CONNECT x:1 HTTP/1.1", b"OPTIONS * HTTP/1.1",
        b"GET http://x/health HTTP/1.1", b"GET //x HTTP/1.1", b"GET /% HTTP/1.1", b"X" * 300,
        b"GET /" + b"x" * 100_000 + b" HTTP/1.1", b"\x16\x03\x01\x02\x00\x01", b"POST ? HTTP/1.1",
        b"QUERY /health HTTP/1.1", b"GET /health HTTP/1.0", b"GET /health#\0 HTTP/1.1",
    ])  # fmt: skip
    return line + chance.choice(
        [b"\r\n\r\n", b"\n\n", b"\r\nHost: x\r\n\r\n", b"\r\n: \r\n\r\n", b""]
    )


def _wrong_header(chance: Random) -> bytes:
    header = chance.choice([
        b"a\0b: c", b"a b: c", b": c", b"nothing", b" folded: x", b"Host: x\r\nHost: y",
        b"Expect: 100-continue", b"Expect: x", b"Connection: upgrade\r\nUpgrade: websocket",
        b"Connection: upgrade\r\nUpgrade: h2c\r\nHTTP2-Settings: x", b"Connection: close, x",
        b"Transfer-Encoding: gzip, chunked", b"Transfer-Encoding: chunked, x", b"a: \xff\xfe",
    ])  # fmt: skip
    return START + header + b"\r\nContent-Length: %d\r\n\r\n" % len(BODY) + BODY


def _several(chance: Random) -> bytes:
    """Requests that do not wait for each other's answers."""
    made = [chance.choice([WHOLE, b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"]) for _ in range(20)]
    return b"".join(made) + chance.choice([b"", _cut(chance), _changed(chance), b"\r\n" * 50])


def _random(chance: Random) -> bytes:
    return chance.randbytes(chance.randint(1, 3000))


MAKERS: list[Callable[[Random], bytes]] = [
    _cut, _changed, _wrong_length, _wrong_chunks, _small_chunks, _large_body, _many_headers,
    _long_header, _wrong_line, _wrong_header, _several, _random,
]  # fmt: skip
CLIENTS = 100
"""At a time. Some of them wait for the gateway's limits."""


LAST = b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
"""Without it, the gateway would keep a connection for some seconds."""


async def exchange(gateway: Watched, data: bytes, chance: Random) -> None:
    """Send bytes on a connection of their own, and read the answers until it is closed."""
    data += LAST
    async with gateway.connected() as http:
        pace = chance.random()
        if pace < 0.2:
            half = chance.randrange(len(data) or 1)
            await http.send(data[:half])
            if pace < 0.02:
                # The rest comes late.
                await asyncio.sleep(BODY_SECONDS * chance.random() * 2)
            data = data[half:]
        await http.send(data)
        if pace > 0.8:
            # The client does not read.
            return
        # The gateway closes the connection when a request does not arrive, or is none.
        while (answer := await http.answer(what=data)) is not None:
            if answer.headers.get("content-type", "").startswith("text/plain"):
                assert answer.status == 400, (answer, data[:500])
                gateway.seen[400] = gateway.seen.get(400, 0) + 1
            elif answer.status >= 200:
                gateway.check_answer("", answer)


async def test_bytes(gateway: Watched) -> None:
    await gateway.begin()
    chance = Random(SEED)

    async def client(count: int) -> None:
        for _ in range(count):
            await exchange(gateway, chance.choice(MAKERS)(chance), chance)

    each = -(-RAW_REQUESTS // 2 // CLIENTS)
    states = []
    for _ in range(2):
        await asyncio.gather(*[client(each) for _ in range(CLIENTS)])
        states.append(await gateway.check())
    assert {200, 400, 408, 413} <= set(gateway.seen), gateway.seen
    report("bytes", 2 * each * CLIENTS, gateway, *states)


# --- the OpenAPI document -------------------------------------------------------------------------

UNFIT = r"/(pool/.*|pause|pause_generation|release_memory_occupation|init_weights_update_group)$"
"""Endpoints with which a valid request makes all others wait."""
PHASES = "fuzzing" if REQUESTS < 50_000 else "coverage,fuzzing"
"""The phase "coverage" is some 10,000 requests."""
CHECKS = "not_a_server_error,content_type_conformance,response_schema_conformance"


async def test_schema(gateway: Watched, tmp_path: Path) -> None:
    """Schemathesis makes requests from the OpenAPI document, valid and invalid ones."""
    await gateway.begin()
    states = [await gateway.state()]
    for part in range(2):
        await run_schemathesis(gateway, tmp_path, SEED + part, SCHEMA_REQUESTS // 2)
        states.append(await gateway.check())
    begin, half, end = states
    report("OpenAPI", end.answered - begin.answered, gateway, half, end)


async def run_schemathesis(gateway: Watched, folder: Path, seed_: int, count: int) -> None:
    operations = len(gateway.document["paths"])
    command = [
        *(sys.executable, "-m", "schemathesis.cli", "run", f"{gateway.url}/openapi.json"),
        *("--checks", CHECKS, "--phases", PHASES, "--exclude-path-regex", UNFIT, "--no-color"),
        *("--max-examples", str(max(1, count // operations)), "--seed", str(seed_)),
        *("--suppress-health-check", "all", "--request-timeout", "60"),
    ]
    made = await asyncio.create_subprocess_exec(
        *command, cwd=folder, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    assert made.stdout is not None
    output = (await made.stdout.read()).decode()
    assert await made.wait() == 0, output[-5000:]
