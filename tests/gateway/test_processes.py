"""Several processes of a gateway behind one port, with the fake engine."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import ssl
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio
import trustme
from engine.policies import until_idle, until_running
from prometheus_client.parser import text_string_to_metric_families

import sglrl
from sglrl.gateway.serve import Gateway, serve

pytestmark = pytest.mark.asyncio(loop_scope="module")

COUNT = 3
ASK: dict[str, Any] = {
    "model": "tiny",
    "messages": [{"role": "user", "content": "Hi"}],
    "max_tokens": 4,
}
SLOW = {**ASK, "max_tokens": 100_000}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pool() -> AsyncIterator[sglrl.Client]:
    async with sglrl.launch(
        "tiny", engine="fake", step_seconds=0.002, tokens_per_step=1, context_length=200_000
    ) as client:
        yield client


@pytest_asyncio.fixture(loop_scope="module")
async def gateway(pool: sglrl.Client) -> AsyncIterator[Gateway]:
    async with serve(pool, name="tiny", processes=COUNT) as gateway:
        yield gateway


async def send(
    gateway: Gateway, path: str, body: Any = None, *, method: str = "POST", key: str = ""
) -> httpx.Response:
    """Send a request on a connection of its own, which may reach any process."""
    async with httpx.AsyncClient(base_url=gateway.url, timeout=300) as http:
        headers = {"authorization": f"Bearer {key}"} if key else {}
        return await http.request(method, path, json=body, headers=headers)


def process_of(session: Any) -> int:
    return int(session.base_url.split("/sessions/")[1].split("-")[0])


async def test_requests_reach_their_session(gateway: Gateway) -> None:
    opened = [(await send(gateway, "/sessions")).json() for _ in range(40)]
    assert {made["id"].split("-")[0] for made in opened} == {"0", "1", "2"}
    for number, made in enumerate(opened):
        messages = list(ASK["messages"])
        for turn in range(3):
            # The URL and the key each select the session.
            path = f"/sessions/{made['id']}/v1/chat/completions" if turn else "/v1/chat/completions"
            body = {**ASK, "messages": messages, "stream": number % 2 > 0}
            answer = await send(gateway, path, body, key=made["api_key"])
            assert answer.status_code == 200, answer.text
            text = answer.text if number % 2 else answer.json()["choices"][0]["message"]["content"]
            assert text
            if number % 2:
                break
            messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "?"}]
        path = f"/sessions/{made['id']}"
        assert (await send(gateway, f"{path}/reward", {"reward": 0.5})).status_code == 200
        ended = (await send(gateway, path, method="DELETE")).json()
        (trajectory,) = ended["trajectories"]
        assert len(trajectory["turns"]) == (1 if number % 2 else 3)
        assert trajectory["reward"] == 0.5
        assert (await send(gateway, path, method="DELETE")).status_code == 404


async def test_answers_are_passed_on_as_they_are(gateway: Gateway) -> None:
    async with gateway.session() as session:
        path = session.base_url.removeprefix(gateway.url)
        for _ in range(8):
            wrong = await send(gateway, f"{path}/messages", {"messages": 1})
            assert (wrong.status_code, wrong.json()["type"]) == (400, "error")
            assert wrong.headers["content-type"] == "application/json"
            assert len(wrong.headers.get_list("date")) == 1
            models = await send(gateway, f"{path}/models?x=1", method="GET")
            assert models.json()["data"][0]["id"] == "tiny"
        async with httpx.AsyncClient(base_url=gateway.url, timeout=300) as http:
            long = await http.post(f"{path}/chat/completions", content=b"x" * (17 << 20))
            assert long.status_code == 413
        for id_ in ("9-x", "99999999999-x", "x"):
            assert (await send(gateway, f"/sessions/{id_}", method="DELETE")).status_code == 404


async def test_sessions_of_the_program(gateway: Gateway) -> None:
    async def use(number: int) -> int:
        async with gateway.session({"number": number}) as session:
            path = session.base_url.removeprefix(gateway.url)
            await send(gateway, f"{path}/chat/completions", ASK)
            await session.reward(float(number))
        assert session.trajectory is not None
        assert (session.trajectory.reward, session.trajectory.metadata) == (
            number,
            {"number": number},
        )
        return process_of(session)

    assert set(await asyncio.gather(*map(use, range(12)))) == set(range(COUNT))


async def test_aborts_and_pauses_reach_all(pool: sglrl.Client, gateway: Gateway) -> None:
    body = {"input_ids": [5], "sampling_params": {"max_new_tokens": 100_000}}
    for number in range(6):
        turn = asyncio.ensure_future(send(gateway, "/generate", {**body, "rid": f"r{number}"}))
        await until_running(pool, 1)
        assert (await send(gateway, "/abort_request", {"rid": "other"})).json() == {"aborted": 0}
        answer = await send(gateway, "/abort_request", {"rid": f"r{number}"})
        assert answer.json() == {"aborted": 1}
        assert (await turn).json()["meta_info"]["finish_reason"]["type"] == "abort"
    assert (await send(gateway, "/abort_request", {})).status_code == 400
    for _ in range(6):
        assert (await send(gateway, "/pause_generation", {"mode": "in_place"})).status_code == 200
        turn = asyncio.ensure_future(send(gateway, "/v1/chat/completions", ASK))
        assert (await send(gateway, "/continue_generation", {})).status_code == 200
        assert (await turn).status_code == 200


async def test_metrics_of_all(gateway: Gateway) -> None:
    for _ in range(12):
        assert (await send(gateway, "/v1/models", method="GET")).status_code == 200
    answer = await send(gateway, "/metrics", method="GET")
    found = {family.name: family for family in text_string_to_metric_families(answer.text)}
    asked = [
        sample
        for sample in found["sglrl_gateway_requests"].samples
        if sample.name.endswith("_total") and sample.labels["endpoint"] == "/v1/models"
    ]
    assert sum(sample.value for sample in asked) == 12
    assert {sample.labels["process"] for sample in asked} <= {"0", "1", "2"}
    assert len({sample.labels["process"] for sample in asked}) > 1


async def test_a_client_that_disconnects(pool: sglrl.Client) -> None:
    async with serve(pool, name="tiny", processes=2, keep_disconnected=False) as gateway:
        async with gateway.session() as session:
            for stream in (False, True) * 4:
                body = {**SLOW, "stream": stream}
                path = session.base_url.removeprefix(gateway.url) + "/chat/completions"
                turn = asyncio.ensure_future(send(gateway, path, body))
                await until_running(pool, 1)
                turn.cancel()
                await until_idle(pool)
        assert session.trajectory is None


async def test_a_process_that_dies(gateway: Gateway) -> None:
    sessions: dict[int, Any] = {}
    for session in itertools.starmap(gateway.session, [()] * 9):
        await session.__aenter__()
        sessions[process_of(session)] = session
    assert len(sessions) == COUNT
    path = sessions[1].base_url.removeprefix(gateway.url) + "/chat/completions"
    turns = [asyncio.ensure_future(send(gateway, path, SLOW)) for _ in range(6)]
    await until_running(gateway._client, 6)
    os.kill(gateway._processes.workers[1].pid, signal.SIGKILL)
    for turn in await asyncio.gather(*turns, return_exceptions=True):
        # Those that came by another process get an answer.
        assert isinstance(turn, httpx.TransportError) or turn.status_code == 503, turn
    with pytest.raises(sglrl.Closed, match="the session was lost"):
        await sessions[1].__aexit__(None)
    for index in (0, 2):
        path = sessions[index].base_url.removeprefix(gateway.url) + "/chat/completions"
        for _ in range(4):
            assert (await send(gateway, path, ASK)).status_code == 200
        await sessions[index].__aexit__(None)
        assert len(sessions[index].trajectory.leaves) == 4
    await gateway._processes.wait_until_full()
    for _ in range(12):
        async with gateway.session() as again:
            path = again.base_url.removeprefix(gateway.url) + "/chat/completions"
            assert (await send(gateway, path, ASK)).status_code == 200
        assert again.trajectory is not None


async def test_https(pool: sglrl.Client, tmp_path: Path) -> None:
    authority = trustme.CA()
    context = ssl.create_default_context()
    authority.configure_trust(context)
    made = authority.issue_cert("127.0.0.1")
    made.private_key_pem.write_to_path(tmp_path / "key.pem")
    made.cert_chain_pems[0].write_to_path(tmp_path / "cert.pem")
    files: Any = {"tls_cert": tmp_path / "cert.pem", "tls_key": tmp_path / "key.pem"}
    async with serve(pool, name="tiny", processes=2, **files) as gateway, gateway.session() as one:
        for _ in range(6):
            async with httpx.AsyncClient(verify=context, timeout=300) as http:
                answer = await http.post(f"{one.base_url}/chat/completions", json=ASK)
                assert answer.status_code == 200


async def test_the_number_of_processes_is_checked(pool: sglrl.Client) -> None:
    with pytest.raises(sglrl.UsageError, match="processes must be an integer of at least 1"):
        serve(pool, processes=0)
