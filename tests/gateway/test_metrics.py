"""The metrics of the gateway, compared with what its answers say."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
import pytest_asyncio
from engine.policies import until_running
from prometheus_client.parser import text_string_to_metric_families

import sglrl
from sglrl.driver.driver import now
from sglrl.gateway.dialect import TurnRequest
from sglrl.gateway.metrics import Metrics
from sglrl.gateway.serve import Gateway, serve
from sglrl.inference.completion import Completion

from .made import completion

pytestmark = pytest.mark.asyncio(loop_scope="module")
ASK = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}
TEXT = {"model": "tiny", "prompt": ["One", "Another one"], "n": 2, "max_tokens": 3}
COUNTED = ("prompt", "generation", "cached")
STREAM = {"stream": True, "stream_options": {"include_usage": True}}
SLOW = {"input_ids": [5], "sampling_params": {"max_new_tokens": 1000}, "rid": "slow"}
"""Takes a second."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pool() -> AsyncIterator[sglrl.Client]:
    options: dict[str, Any] = {"step_seconds": 0.001, "tokens_per_step": 1, "replicas": 2}
    async with sglrl.launch("tiny", engine="fake", **options) as client:
        yield client


@pytest_asyncio.fixture(loop_scope="module")
async def http(pool: sglrl.Client) -> AsyncIterator[httpx.AsyncClient]:
    """A client of a gateway that has had no request."""
    async with serve(pool, name="tiny") as gateway, http_of(gateway) as http:
        yield http


def http_of(gateway: Gateway) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=gateway.url, timeout=300)


class Scrape:
    """What a gateway reports."""

    def __init__(self, text: str) -> None:
        self.families = list(text_string_to_metric_families(text))

    def value(self, name: str, **labels: str) -> float:
        """Return the value of a sample, by its name without the prefix; 0: there is none."""
        found = [
            sample.value
            for family in self.families
            for sample in family.samples
            if sample.name == f"sglrl_gateway_{name}" and sample.labels == labels
        ]
        assert len(found) <= 1
        return found[0] if found else 0.0

    def by_label(self, name: str, label: str) -> dict[str, float]:
        """Return the values of a metric that has one label."""
        return {
            sample.labels[label]: sample.value
            for family in self.families
            for sample in family.samples
            if sample.name == f"sglrl_gateway_{name}"
        }


async def scrape(http: httpx.AsyncClient, **headers: str) -> Scrape:
    answer = await http.get("/metrics", headers=headers)
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"].startswith("text/plain; version=")
    return Scrape(answer.text)


def usage_of(answer: httpx.Response) -> dict[str, Any]:
    """Return the usage of a whole answer of OpenAI's, or of a stream's last event but one."""
    if not answer.headers["content-type"].startswith("text/event-stream"):
        return dict(answer.json()["usage"])
    events = [line.removeprefix("data: ") for line in answer.text.splitlines() if line]
    assert events[-1] == "[DONE]"
    return dict(json.loads(events[-2])["usage"])


async def test_requests_tokens_and_times(http: httpx.AsyncClient) -> None:
    chat, text = "/v1/chat/completions", "/v1/completions"
    bodies = [(chat, ASK), (chat, {**ASK, "n": 3}), (text, TEXT)]
    good = [(path, {**body, **more}) for path, body in bodies for more in ({}, STREAM)]
    totals: Counter[str] = Counter()
    for path, body in good:
        answer = await http.post(path, json=body)
        assert answer.status_code == 200, answer.text
        usage = usage_of(answer)
        totals += Counter({"prompt": usage["prompt_tokens"]})
        totals += Counter({"generation": usage["completion_tokens"]})
    bad = [
        (chat, {**ASK, "best_of": 2}, 400),
        (chat, {**ASK, "model": "gpt"}, 404),
        (text, {**TEXT, "stream": True, "temperature": -1}, 400),
        ("/nothing", {}, 404),
        ("/nothing/else", {}, 404),
    ]
    for path, body, status in bad:
        assert (await http.post(path, json=body)).status_code == status
    assert (await http.get("/health")).status_code == 200
    found = await scrape(http)
    for name, count in totals.items():
        assert found.value(f"{name}_tokens_total") == count, name
    assert totals["generation"] == 2 * (4 + 3 * 4 + 2 * 2 * 3)
    for endpoint, status, count in (
        (chat, 200, 4),
        (chat, 400, 1),
        (chat, 404, 1),
        (text, 200, 2),
        (text, 400, 1),
        ("other", 404, 2),
        ("/health", 200, 1),
        ("/metrics", 200, 0),
    ):
        assert found.value("requests_total", endpoint=endpoint, status=str(status)) == count
    ends = {"length": 2 * (1 + 3 + 4), "error": 4}
    assert found.by_label("choices_total", "finish_reason") == ends
    assert found.value("e2e_request_latency_seconds_count") == len(good)
    assert found.value("time_to_first_token_seconds_count") == len(good) / 2
    total = found.value("e2e_request_latency_seconds_sum")
    assert 0 < found.value("time_to_first_token_seconds_sum") < total
    assert found.value("running_requests") == 0
    again = await scrape(http)
    assert again.value("requests_total", endpoint="/metrics", status="200") == 1


async def test_cached_tokens(pool: sglrl.Client) -> None:
    """The fake engine has no prefix cache. The choices of a prompt share its tokens."""
    metrics = Metrics(pool)
    requests = [TurnRequest(prompt=[7, 8], choices=2), TurnRequest(prompt=[7, 8, 9])]
    made = [
        completion([1, 2], cached=1),
        completion([3], cached=2, finish="stop"),
        completion([4], prompt=(7, 8, 9), cached=2),
    ]

    async def sample() -> list[Completion]:
        return made

    task = asyncio.ensure_future(sample())
    await task
    metrics.turn_ended(requests, now(), task)
    text, _ = await metrics.exposition("", running=0, sessions=0)
    found = Scrape(text.decode())
    totals = {name: found.value(f"{name}_tokens_total") for name in COUNTED}
    assert totals == {"prompt": 5, "generation": 4, "cached": 3}
    assert found.by_label("choices_total", "finish_reason") == {"length": 2, "stop": 1}


async def test_sessions(http: httpx.AsyncClient) -> None:
    """Their requests have no label of their own. A request that is sent again has one turn."""
    made = (await http.post("/sessions")).json()
    url, key = f"/sessions/{made['id']}/v1/chat/completions", f"Bearer {made['api_key']}"
    again = {"x-stainless-retry-count": "1"}
    answers = [await http.post(url, json=ASK, headers={"authorization": key, **again})]
    answers += [await http.post(url, json=ASK, headers={"authorization": key, **again})]
    assert usage_of(answers[0]) == usage_of(answers[1])
    found = await scrape(http)
    assert found.value("open_sessions") == 1
    assert found.value("requests_total", endpoint="/v1/chat/completions", status="200") == 2
    assert found.value("generation_tokens_total") == 4
    assert found.value("prompt_tokens_total") == usage_of(answers[0])["prompt_tokens"]
    assert found.value("e2e_request_latency_seconds_count") == 1
    assert (await http.delete(f"/sessions/{made['id']}")).status_code == 200
    found = await scrape(http)
    assert found.value("open_sessions") == 0
    for endpoint, status in (("/sessions", "201"), ("/sessions/{session}", "200")):
        assert found.value("requests_total", endpoint=endpoint, status=status) == 1


async def test_turns_that_run(pool: sglrl.Client, http: httpx.AsyncClient) -> None:
    """What the engines report, and how a turn ends."""
    slow = [asyncio.ensure_future(http.post("/generate", json=SLOW)) for _ in range(3)]
    await until_running(pool, 3)
    found = await scrape(http)
    assert found.value("running_requests") == 3
    running = found.by_label("worker_running_requests", "worker")
    assert set(running) == {"0", "1"}
    assert sum(running.values()) == 3
    assert found.by_label("worker_waiting_requests", "worker") == {"0": 0, "1": 0}
    assert found.by_label("worker_weight_version", "worker") == {"0": 0, "1": 0}
    usage = found.by_label("worker_kv_cache_usage", "worker")
    assert all((0 < usage[worker] < 1) == (running[worker] > 0) for worker in ("0", "1"))
    assert found.by_label("workers", "state") == {"ready": 2}
    assert (await http.post("/abort_request", json={"rid": "slow"})).json() == {"aborted": 3}
    for answer in await asyncio.gather(*slow):
        assert answer.json()["meta_info"]["finish_reason"]["type"] == "abort"
    made = (await http.post("/sessions")).json()
    headers = {"authorization": f"Bearer {made['api_key']}"}
    turn = asyncio.ensure_future(http.post("/generate", json=SLOW, headers=headers))
    await until_running(pool, 1)
    await http.delete(f"/sessions/{made['id']}", headers=headers)
    assert (await turn).status_code == 503
    found = await scrape(http)
    assert found.by_label("choices_total", "finish_reason") == {"abort": 3, "cancelled": 1}
    assert found.value("running_requests") == 0
    assert found.value("requests_total", endpoint="/generate", status="503") == 1


async def test_a_key(pool: sglrl.Client) -> None:
    async with serve(pool, name="tiny", api_key="secret") as gateway, http_of(gateway) as http:
        async with gateway.session() as session:
            for key in ("none", "wrong", session.api_key):
                answer = await http.get("/metrics", headers={"authorization": f"Bearer {key}"})
                assert answer.status_code == 401
        found = await scrape(http, authorization="Bearer secret")
        assert found.value("requests_total", endpoint="/metrics", status="401") == 3


async def test_openmetrics(http: httpx.AsyncClient) -> None:
    """Prometheus asks for this format."""
    accept = {"accept": "application/openmetrics-text; version=1.0.0"}
    answer = await http.get("/metrics", headers=accept)
    assert answer.headers["content-type"].startswith("application/openmetrics-text; version=1.0.0")
    assert answer.text.endswith("# EOF\n")


async def test_a_pool_that_has_closed() -> None:
    """The gateway's own metrics are still there."""
    async with (
        sglrl.launch("tiny", engine="fake") as client,
        serve(client, name="tiny") as gateway,
        http_of(gateway) as http,
    ):
        assert (await http.post("/v1/chat/completions", json=ASK)).status_code == 200
        await client.close()
        found = await scrape(http)
    assert found.value("generation_tokens_total") == 4
    assert found.by_label("worker_running_requests", "worker") == {}
