"""The gateway's limits, keys and ends, over real sockets, with the fake engine."""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import signal
import socket
import ssl
import subprocess
import sys
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio
import trustme
from engine.policies import until_idle, until_running

import sglrl
from sglrl import config
from sglrl.gateway import serve as serve_module
from sglrl.gateway.chat import ChatRequest
from sglrl.gateway.serve import Gateway, serve
from sglrl.gateway.settings import Settings

pytestmark = pytest.mark.asyncio(loop_scope="module")

ASK = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}
SLOW = {**ASK, "max_tokens": 1_000}
"""Takes two seconds."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pool() -> AsyncIterator[sglrl.Client]:
    async with sglrl.launch("tiny", engine="fake", step_seconds=0.002, tokens_per_step=1) as client:
        yield client


def http_of_nothing() -> httpx.AsyncClient:
    return httpx.AsyncClient(timeout=300)


def http_of(gateway: Gateway) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=gateway.url, timeout=300)


async def test_a_session_that_nobody_uses_expires(pool: sglrl.Client) -> None:
    async with serve(pool, name="tiny", expire_after=2.0) as gateway, http_of(gateway) as http:
        made = (await http.post("/sessions")).json()
        url = f"/sessions/{made['id']}/v1/models"
        assert (await http.get(url)).status_code == 200
        async with asyncio.timeout(300):
            # Each request of another session is none of this one.
            while (await http.post(f"/sessions/{made['id']}x/reward")).status_code == 404:
                await asyncio.sleep(2.1)
                if (await http.get(url)).status_code == 404:
                    break


async def test_limits(pool: sglrl.Client) -> None:
    limits: Any = {"max_sessions": 2, "max_body_bytes": 2000}
    async with serve(pool, name="tiny", **limits) as gateway, http_of(gateway) as http:
        long = {**ASK, "user": "x" * 2000}
        large = await http.post("/v1/chat/completions", json=long)
        assert large.status_code == 413
        assert large.json()["error"]["message"] == "the body has more than 2,000 bytes"
        for _ in range(2):
            assert (await http.post("/sessions")).status_code == 201
        full = await http.post("/sessions")
        assert full.status_code == 400
        assert "2 sessions are open" in full.json()["error"]["message"]
        for body in ("[", "[1]", '{"metadata": 1}', '{"other": 1}'):
            assert (await http.post("/sessions", content=body)).status_code == 400


@pytest.mark.parametrize(
    "path", ["/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"]
)
async def test_the_name_of_the_model(pool: sglrl.Client, path: str) -> None:
    """It may be missing, as in requests of AReaL. A wrong name is an error."""
    bodies: dict[str, Any] = {
        "/v1/completions": {"prompt": "Hi", "max_tokens": 2},
        "/v1/responses": {"input": "Hi", "max_output_tokens": 2},
    }
    body = bodies.get(path, {"messages": ASK["messages"], "max_tokens": 2})
    async with serve(pool, name="tiny") as gateway, http_of(gateway) as http:
        answer = await http.post(path, json=body)
        assert answer.status_code == 200
        assert answer.json()["model"] == "tiny"
        wrong = await http.post(path, json={**body, "model": "gpt"})
        assert wrong.status_code == 404
        assert "there is no model 'gpt'; there is: tiny" in wrong.text


async def test_a_slow_body(pool: sglrl.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve_module, "Settings", partial(Settings, body_seconds=0.3))
    async with serve(pool, name="tiny") as gateway:
        port = int(gateway.url.rpartition(":")[2])
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"POST /generate HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n{")
        async with asyncio.timeout(300):
            answer = await reader.read()
        writer.close()
    assert answer.startswith(b"HTTP/1.1 408")
    assert b"the body took longer than 0.3 s" in answer


async def sent(gateway: Gateway, data: bytes) -> bytes:
    """Send bytes, and return all that arrives until the gateway closes the connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", int(gateway.url.rpartition(":")[2]))
    found = b""
    try:
        writer.write(data)
        async with asyncio.timeout(300):
            while part := await reader.read(1 << 16):
                found += part
    except ConnectionResetError:
        # The gateway has not read all that was sent.
        pass
    finally:
        writer.close()
    return found


async def test_slow_and_long_heads(pool: sglrl.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve_module, "Settings", partial(Settings, body_seconds=0.3))
    begin = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\n"
    body = json.dumps(SLOW).encode()
    whole = begin + b"content-length: %d\r\n\r\n" % len(body) + body
    async with serve(pool, name="tiny", max_body_bytes=1000) as gateway, http_of(gateway) as http:
        for slow in (b"", b"POST", begin, b"GET /health HTTP/1.1\r\n\r\nPOST"):
            answer = await sent(gateway, slow)
            assert answer.count(b"HTTP/1.1") == slow.count(b"health"), slow
        for long in (b"x: " + b"y" * 300_000, b"x: y\r\n" * 20_000 + b"\r\n"):
            answer = await sent(gateway, begin + long)
            assert answer[:12] in (b"", b"HTTP/1.1 400")
        # The rest of a body that is too large does not arrive.
        answer = await sent(gateway, begin + b"content-length: 9000\r\n\r\n" + b"x" * 2000)
        assert answer.startswith(b"HTTP/1.1 413")
        # A turn may take longer, and the client may begin to send another request meanwhile.
        assert (await http.post("/v1/chat/completions", json=SLOW)).status_code == 200
        assert (await sent(gateway, whole + b"GET /")).startswith(b"HTTP/1.1 200")


async def test_a_client_that_sends_two_requests_and_disconnects(pool: sglrl.Client) -> None:
    """The request that is being answered ends, although it is not the last one."""
    body = json.dumps({**ASK, "max_tokens": 30_000}).encode()
    head = b"POST /v1/chat/completions HTTP/1.1\r\ncontent-length: %d\r\n\r\n" % len(body)
    async with serve(pool, name="tiny") as gateway:
        port = int(gateway.url.rpartition(":")[2])
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(head + body + b"GET /health HTTP/1.1\r\n\r\n")
        await until_running(pool, 1)
        writer.close()
        async with asyncio.timeout(300):
            await until_idle(pool)


async def leave(pool: sglrl.Client, http: httpx.AsyncClient, call: asyncio.Future[Any]) -> None:
    """Cancel a call of the paused pool when it has begun, and wait until the gateway notices."""
    async with asyncio.timeout(300):
        while not any(worker.load for worker in pool.workers):
            assert not call.done()
            assert (await http.get("/health")).status_code == 200
    call.cancel()
    await asyncio.wait([call])
    # Each lets the gateway notice what has happened before.
    for _ in range(10):
        assert (await http.get("/health")).status_code == 200


@pytest.mark.parametrize("keeps", [True, False])
async def test_a_client_that_disconnects(pool: sglrl.Client, keeps: bool) -> None:
    async with (
        serve(pool, name="tiny", keep_disconnected=keeps) as gateway,
        gateway.session() as session,
        http_of(gateway) as http,
    ):
        url = f"{session.base_url}/chat/completions"
        began = asyncio.Event()

        async def stream() -> None:
            async with http.stream("POST", url, json={**SLOW, "stream": True}) as answer:
                async for _ in answer.aiter_lines():
                    began.set()

        try:
            await pool.pause("in_place")
            await leave(pool, http, asyncio.ensure_future(http.post(url, json=SLOW)))
            await pool.resume()
            call = asyncio.ensure_future(stream())
            async with asyncio.timeout(300):
                await began.wait()
            await pool.pause("in_place")
            await leave(pool, http, call)
        finally:
            await pool.resume()
        await until_idle(pool)
        assert (await http.post(url, json=ASK)).status_code == 200
    assert session.trajectory is not None
    sizes = [int(leaf.loss_mask.sum()) for leaf in session.trajectory.leaves]
    assert sizes[-1] == 4
    assert len(sizes) == (3 if keeps else 1), sizes


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_disconnects_before_the_first_token(
    pool: sglrl.Client, stream: bool
) -> None:
    body = {**ASK, "max_tokens": 1, "stream": stream}
    async with (
        serve(pool, name="tiny", keep_disconnected=False) as gateway,
        gateway.session() as session,
        http_of(gateway) as http,
    ):
        url = f"{session.base_url}/chat/completions"
        await pool.pause("in_place")
        try:
            await leave(pool, http, asyncio.ensure_future(http.post(url, json=body)))
        finally:
            await pool.resume()
        assert (await http.post(url, json=ASK)).status_code == 200
    assert session.trajectory is not None
    assert [len(leaf.turns) for leaf in session.trajectory.leaves] == [1]


def hostile(chance: random.Random) -> tuple[str, bytes, dict[str, str]]:
    """Return the path, body and headers of a request that is probably wrong."""
    odd: list[Any] = [
        None, True, False, 0, -1, 3, 10**30, 1.5, -1e308, "", "x", "\ud800", "\x00", [], {}, [[]],
        {"role": "user"}, [{"role": 3, "content": [{}]}], {"type": "json_schema"}, {"a": {"b": []}},
        [{"role": "assistant", "content": None, "tool_calls": [{"function": 3}]}], ["\ud800"],
        [{"type": "function", "function": {"name": "f", "parameters": 5}}], "required", "auto",
        {"type": "json_schema", "json_schema": {"schema": {"type": "nothing"}}}, "a" * 5000,
    ]  # fmt: skip
    fields: dict[str, Any] = {"messages": ASK["messages"], "model": "tiny", "max_tokens": 2}
    for name in chance.sample(ChatRequest.__struct_fields__, chance.randint(1, 3)):
        fields[name] = chance.choice(odd)
    body = json.dumps(fields).encode()
    if chance.random() < 0.2:
        at = chance.randrange(len(body))
        body = (
            body[:at] + chance.randbytes(chance.randint(0, 3)) + body[at + chance.randint(0, 9) :]
        )
    if chance.random() < 0.05:
        body = b"[" * 50_000
    path = chance.choice(["/v1/chat/completions"] * 8 + ["/sessions", "/sessions/x/reward", "/x"])
    keys = ["", "Bearer", "Bearer \xff", "Basic x", "Bearer sk-sglrl-none", "Bearer x"]
    return path, body, {"authorization": chance.choice(keys)}


@pytest.mark.parametrize("seed", range(4))
async def test_hostile_requests(pool: sglrl.Client, seed: int) -> None:
    """Each gets an answer that says what is wrong, and none is an internal error."""
    chance = random.Random(seed)
    seen = set()
    async with serve(pool, name="tiny") as gateway, http_of(gateway) as http:
        for _ in range(300):
            path, body, headers = hostile(chance)
            sent = {key: value.encode("latin-1") for key, value in headers.items()}
            answer = await http.post(path, content=body, headers=sent)
            seen.add(answer.status_code)
            assert answer.status_code in (200, 201, 400, 401, 404), (path, body, answer.text)
            if answer.status_code >= 400:
                error = answer.json()["error"]
                assert error["message"], error
                assert error["type"] in ("invalid_request_error", "authentication_error")
        assert (await http.post("/v1/chat/completions", json=ASK)).status_code == 200
    assert {200, 400, 401} <= seen


async def test_the_end_of_a_session_aborts_its_turns(pool: sglrl.Client) -> None:
    async with (
        serve(pool, name="tiny") as gateway,
        gateway.session() as session,
        http_of(gateway) as http,
    ):
        url = f"{session.base_url}/chat/completions"
        assert (await http.post(url, json=ASK)).status_code == 200
        slow = asyncio.ensure_future(http.post(url, json=SLOW))
        alone = asyncio.ensure_future(http.post("/v1/chat/completions", json=SLOW))
        await until_running(pool, 2)
        assert (await http.delete(f"/sessions/{session._id}")).status_code == 200
        ended = await slow
        assert (ended.status_code, "has ended" in ended.text) == (503, True)
        assert (await alone).status_code == 200
        # Another program has ended the session. An agent's own error is not replaced.
        with pytest.raises(ZeroDivisionError):
            async with gateway.session() as other:
                await http.delete(f"/sessions/{other._id}")
                raise ZeroDivisionError
        assert other.trajectory is None
        with pytest.raises(sglrl.Closed, match="the session was lost"):
            async with gateway.session() as other:
                await http.delete(f"/sessions/{other._id}")
        again = await gateway._processes.open_session({}, None)
        session._id = again.id


async def test_equal_requests_that_are_repeated(pool: sglrl.Client) -> None:
    """Two agents ask the same, both give up and ask again: each gets a turn of its own."""
    again = {"x-stainless-retry-count": "1"}
    async with (
        serve(pool, name="tiny") as gateway,
        gateway.session() as session,
        http_of(gateway) as http,
    ):
        url = f"{session.base_url}/chat/completions"
        body = {**SLOW, "return_token_ids": True}
        for _ in range(2):
            with pytest.raises(httpx.ReadTimeout):
                await http.post(url, json=body, timeout=httpx.Timeout(300, read=0.1))
        made = await asyncio.gather(*[http.post(url, json=body, headers=again) for _ in range(2)])
        assert [answer.status_code for answer in made] == [200, 200]
        ids = [answer.json()["id"] for answer in made]
        assert len(set(ids)) == 2
        last = await http.post(url, json=body, headers=again)
        assert last.status_code == 200
    assert session.trajectory is not None
    assert sum(len(leaf.turns) for leaf in session.trajectory.leaves) == 2


@pytest.mark.parametrize("stream", [False, True])
async def test_a_first_attempt_that_arrives_after_its_retry(
    pool: sglrl.Client, stream: bool
) -> None:
    """Its client has left, so it adds no turn. An equal request with a waiting client adds one."""
    again = {"x-stainless-retry-count": "1"}
    async with (
        serve(pool, name="tiny") as gateway,
        gateway.session() as session,
        http_of(gateway) as http,
    ):
        url = f"{session.base_url}/chat/completions"
        body = {**SLOW, "stream": stream}
        retry = asyncio.ensure_future(http.post(url, json=body, headers=again))
        await until_running(pool, 1)
        first = asyncio.ensure_future(http.post(url, json=body))
        await until_running(pool, 2)
        first.cancel()
        await asyncio.wait([first])
        second = await http.post(url, json=body, headers=again)
        other = await http.post(url, json=body)
        assert [one.status_code for one in (await retry, second, other)] == [200] * 3
    assert session.trajectory is not None
    assert sum(len(leaf.turns) for leaf in session.trajectory.leaves) == 2


async def test_the_end_of_the_gateway(pool: sglrl.Client) -> None:
    """Clients get an answer, and nothing has to be killed."""
    async with http_of_nothing() as http:
        async with serve(pool, name="tiny") as gateway:
            url = f"{gateway.url}/v1/chat/completions"
            slow = asyncio.ensure_future(http.post(url, json=SLOW))
            async with asyncio.timeout(300):
                while not any(worker.load for worker in pool.workers):
                    assert (await http.get(f"{gateway.url}/health")).status_code == 200
        assert (await slow).status_code == 503


async def test_paths(pool: sglrl.Client) -> None:
    """The error for a wrong path has the path that was probably meant."""
    async with serve(pool, name="tiny") as gateway, http_of(gateway) as http:
        at = f"/sessions/{(await http.post('/sessions')).json()['id']}"
        for path, hint in (
            ("/chat/completions", "; did you mean /v1/chat/completions?"),
            ("/completions", "; did you mean /v1/completions?"),
            ("/messages", "; did you mean /v1/messages?"),
            ("/v1/chat/completion", "; did you mean /v1/chat/completions?"),
            (f"{at}/responses/", f"; did you mean {at}/v1/responses?"),
            ("/", ""),
            ("/nonsense", ""),
        ):
            made = await http.post(path, json=ASK)
            assert made.status_code == 404
            assert made.json()["error"]["message"] == f"there is no endpoint POST {path}{hint}"
        made = await http.get("/v1/chat/completions")
        assert made.status_code == 405
        assert made.json()["error"]["message"] == "there is no endpoint GET /v1/chat/completions"
        assert (await http.get("/v1/models/tiny")).json()["id"] == "tiny"
        assert (await http.get("/v1/models/gpt")).status_code == 404


async def test_wrong_arguments(pool: sglrl.Client) -> None:
    with pytest.raises(sglrl.UsageError, match="so the gateway needs a key: api_key="):
        serve(pool, host="0.0.0.0")
    with pytest.raises(sglrl.UsageError, match=r"port must be in 0\.\.65535"):
        serve(pool, port=70_000)
    with pytest.raises(sglrl.UsageError, match="expire_after must be more than 0"):
        serve(pool, expire_after=0)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(sglrl.UsageError, match=f"cannot listen at 127.0.0.1:{port}: Address"):
            async with serve(pool, port=port):
                pass
    async with serve(pool) as gateway:
        port = int(gateway.url.rpartition(":")[2])
        with pytest.raises(sglrl.UsageError, match=f"cannot listen at 127.0.0.1:{port}: Address"):
            async with serve(pool, port=port):
                pass
    # The port is free again at once.
    async with serve(pool, port=port) as gateway, http_of(gateway) as http:
        assert (await http.get("/health")).status_code == 200


@pytest.mark.parametrize("package", ["jinja2", "prometheus_client", "transformers"])
async def test_a_package_that_is_missing(
    pool: sglrl.Client, monkeypatch: pytest.MonkeyPatch, package: str
) -> None:
    find = config.find_spec
    monkeypatch.setattr(config, "find_spec", lambda name: None if name == package else find(name))
    with pytest.raises(sglrl.UsageError, match=f"the gateway needs {package}: pip install"):
        serve(pool)


async def test_tls(pool: sglrl.Client, tmp_path: Path) -> None:
    authority = trustme.CA()
    made = authority.issue_cert("127.0.0.1")
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    made.cert_chain_pems[0].write_to_path(cert)
    made.private_key_pem.write_to_path(key)
    trusting = ssl.create_default_context()
    authority.configure_trust(trusting)
    async with serve(pool, name="tiny", tls_cert=cert, tls_key=key) as gateway:
        assert gateway.url.startswith("https://127.0.0.1:")
        async with httpx.AsyncClient(base_url=gateway.url, verify=trusting) as http:
            session = (await http.post("/sessions")).json()
            assert session["base_url"].startswith(gateway.url)
            assert (await http.post("/v1/chat/completions", json=ASK)).status_code == 200
        async with httpx.AsyncClient(base_url=gateway.url) as http:
            with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
                await http.get("/health")
    with pytest.raises(sglrl.UsageError, match="give both, or neither"):
        serve(pool, tls_cert=cert)
    with pytest.raises(sglrl.UsageError, match="cannot be read"):
        serve(pool, tls_cert=cert, tls_key=tmp_path / "none")


async def test_a_gateway_that_dies_is_replaced(pool: sglrl.Client) -> None:
    async with serve(pool, name="tiny") as gateway, http_of(gateway) as http:
        before = (await http.post("/sessions")).json()
        (worker,) = gateway._processes.workers
        os.kill(worker.pid, signal.SIGKILL)
        async with asyncio.timeout(300):
            while True:
                try:
                    answer = await http.post("/v1/chat/completions", json=ASK)
                    break
                except httpx.TransportError:
                    await asyncio.sleep(0.1)
        assert answer.status_code == 200
        gone = await http.get(f"/sessions/{before['id']}/v1/models")
        assert gone.status_code == 404


async def test_the_command() -> None:
    """``sglrl serve`` says where it listens, and ends at SIGTERM."""
    command = [sys.executable, "-m", "sglrl", "serve", "tiny", "--engine", "fake", "--port", "0"]
    made = await asyncio.create_subprocess_exec(*command, stderr=subprocess.PIPE)
    assert made.stderr is not None
    async with asyncio.timeout(300):
        while not (found := re.search(r"http://\S+", (await made.stderr.readline()).decode())):
            assert made.returncode is None
        async with httpx.AsyncClient(timeout=300) as http:
            models = (await http.get(f"{found.group()}/models")).json()["data"]
            assert [model["id"] for model in models] == ["tiny"]
            answer = await http.post(f"{found.group()}/chat/completions", json=ASK)
            assert answer.json()["usage"]["completion_tokens"] == 4
        made.send_signal(signal.SIGTERM)
        rest = (await made.stderr.read()).decode()
        assert await made.wait() == 0
    assert rest.strip() == "ending"
