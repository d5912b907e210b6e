"""The metrics of the gateway, compared with what its answers say."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import socket
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio
import torch
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


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


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

    @property
    def choices(self) -> dict[str, float]:
        return self.by_label("sglrl_gateway_choices_total", "finish_reason")

    def by_label(self, name: str, label: str) -> dict[str, float]:
        """Return the values of a metric that has one label, by its whole name."""
        return {
            sample.labels[label]: sample.value
            for family in self.families
            for sample in family.samples
            if sample.name == name
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
    assert found.choices == ends
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
    assert found.choices == {
        "length": 2,
        "stop": 1,
    }


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
    running = found.by_label("sglang:num_running_reqs", "worker")
    assert set(running) == {"0", "1"}
    assert sum(running.values()) == 3
    assert found.by_label("sglang:num_queue_reqs", "worker") == {"0": 0, "1": 0}
    assert found.by_label("sglrl_worker_weight_version", "worker") == {"0": 0, "1": 0}
    usage = found.by_label("sglang:token_usage", "worker")
    assert all((0 < usage[worker] < 1) == (running[worker] > 0) for worker in ("0", "1"))
    assert found.by_label("sglrl_workers", "state") == {"ready": 2}
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
    assert found.choices == {
        "abort": 3,
        "cancelled": 1,
    }
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
    assert found.by_label("sglang:num_running_reqs", "worker") == {}


async def test_a_part_of_the_pool_that_cannot_be_described(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Snapshots fail then, but neither calls nor the metrics of a gateway."""

    def broken() -> Any:
        raise ZeroDivisionError("this collector is broken")

    port = free_port()
    async with (
        sglrl.launch("tiny", engine="fake", metrics_port=port) as client,
        serve(client, name="tiny") as gateway,
        http_of(gateway) as http,
    ):
        await http.post("/v1/completions", json={"prompt": "a", "max_tokens": 2})
        client.observed.rollouts.append(broken)
        found, own, made = await asyncio.gather(
            scrape(http),
            http.get(f"http://127.0.0.1:{port}/metrics"),
            client.generate(input_ids=[3, 4], max_new_tokens=5),
        )
        assert found.choices == {"length": 1}
        assert found.by_label("sglang:num_running_reqs", "worker") == {}
        assert (own.status_code, own.text) == (200, "")
        assert made.output_ids.size == 5
        assert any(record.name == "sglrl.metrics" for record in caplog.records)
        with pytest.raises(ZeroDivisionError):
            await client.snapshot()
        client.observed.rollouts.remove(broken)
        found = await scrape(http)
        assert found.by_label("sglang:num_running_reqs", "worker") == {"0": 0}


async def test_metrics_port(pool: sglrl.Client) -> None:
    """The metrics of a pool without a gateway, beside what its client says."""
    port = free_port()
    async with sglrl.launch("tiny", engine="fake", replicas=2, metrics_port=port) as client:
        with pytest.raises(sglrl.UsageError, match="metrics_port: cannot listen"):
            async with sglrl.launch("tiny", engine="fake", metrics_port=port):
                pass
        await client.generate(input_ids=[3, 4], max_new_tokens=5)
        await client.update_weights({"w": torch.zeros(10, 10)})

        async def agent(session: Any, item: Any) -> dict[str, float]:
            await session.generate(max_new_tokens=2)
            return {"right": 1.0, "short": 0.5}

        items = [{"input_ids": [i + 1]} for i in range(3)]
        async with sglrl.rollout(client, agent, items, group_size=2) as run:
            await run.take(3)
            async with httpx.AsyncClient() as http:
                answer = await http.get(f"http://127.0.0.1:{port}/metrics")
                found = Scrape(answer.text)
                os.kill(client.workers[1].pid, signal.SIGSTOP)
                try:
                    stopped = Scrape((await http.get(f"http://127.0.0.1:{port}/metrics")).text)
                finally:
                    os.kill(client.workers[1].pid, signal.SIGCONT)
        stats = {str(one.worker): one.engine for one in await client.stats()}
    # The dashboard shows metrics that exist, except the times of tools, which this agent has not.
    dashboard = (Path(__file__).parents[2] / "docs/grafana.json").read_text(encoding="utf-8")
    shown = set(re.findall(r"\b(?:sglang:|sglrl_)\w+", dashboard))
    served = {sample.name for family in found.families for sample in family.samples}
    assert len(shown) == 17
    assert shown - served == {"sglrl_rollout_tool_seconds_mean"}
    generated = {worker: one.generated_tokens for worker, one in stats.items()}
    assert found.by_label("sglang:generation_tokens_total", "worker") == generated
    assert sum(generated.values()) == 5 + 3 * 2 * 2
    assert found.by_label("sglrl_workers", "state") == {"ready": 2}
    assert found.by_label("sglrl_worker_weight_version", "worker") == {"0": 1, "1": 1}
    assert found.by_label("sglrl_worker_restarts_total", "worker") == {"0": 0, "1": 0}
    assert found.by_label("sglrl_rollout_groups_taken", "rollout") == {"0": 3}
    assert found.by_label("sglrl_rollout_named_reward", "name") == {"right": 1, "short": 0.5}
    sizes = [f for f in found.families if f.name == "sglrl_update_bytes"]
    assert [sample.value for family in sizes for sample in family.samples] == [400]
    assert set(stopped.by_label("sglang:num_running_reqs", "worker")) == {"0"}
    assert stopped.by_label("sglrl_worker_weight_version", "worker") == {"0": 1, "1": 1}
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port), timeout=5).close()


@pytest.mark.parametrize("wrong", [0, 70_000, True, "9100", "host:", ":9100", "host:x", 1.5])
async def test_wrong_ports(wrong: Any) -> None:
    with pytest.raises(sglrl.UsageError, match="metrics_port must be a port"):
        sglrl.launch("tiny", engine="fake", metrics_port=wrong)
