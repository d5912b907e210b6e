"""``hosts="ray"``: a Ray cluster of three nodes on this machine loses one of them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
import ray
from actor_classes import Values
from ray.cluster_utils import Cluster

import sglrl
from sglrl.hosts import started

from .nodes import hosts_of

IDS = [3, 1, 4, 1, 5]
TOKENS = 400


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Any, list[Any]]]:
    """Yield a cluster, and its nodes other than the head."""
    monkeypatch.setattr(started, "_started", {})
    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 2})
    try:
        others = [made.add_node(num_cpus=2) for _ in range(2)]
        ray.init(address=made.address, log_to_driver=False)
        yield made, others
    finally:
        ray.shutdown()
        made.shutdown()


async def test_a_node_is_removed_and_another_joins(cluster: tuple[Any, list[Any]]) -> None:
    """Calls go on at the other nodes. The new node is used."""
    made, others = cluster
    async with sglrl.launch(
        "fake", engine="fake", hosts="ray", replicas=3, tokens_per_step=1, step_seconds=0.01
    ) as client:
        assert len(set(hosts_of(client))) == 3
        async with sglrl.spawn(Values, hosts="ray", replicas=3) as values:
            assert hosts_of(values) == hosts_of(client)
            assert await values.add(1) == 11
        streams = [client.stream(input_ids=[*IDS, n], max_new_tokens=TOKENS) for n in range(12)]
        readers = [aiter(stream) for stream in streams]
        got = [(await anext(reader)).output_ids.tolist() for reader in readers]

        async def read(n: int) -> None:
            async for chunk in readers[n]:
                got[n] += chunk.output_ids.tolist()

        tasks = [asyncio.ensure_future(read(n)) for n in range(len(streams))]
        await asyncio.to_thread(made.remove_node, others[0])
        await asyncio.gather(*tasks)
        for n, tokens in enumerate(got):
            assert tokens == ([*IDS, n] * TOKENS)[:TOKENS]
        assert sum(stream.completion.resumed for stream in streams) == 4
        made.add_node(num_cpus=2)
        hosts = started._started["ray"]
        while [host.state for host in hosts.hosts].count("connected") < 3:
            await hosts.change()
        await client.wait_until_full()
        await client.add_workers(3)
        assert len(set(hosts_of(client))) == 3


def test_without_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(started, "_started", {})
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(sglrl.UsageError, match=r"pip install 'sglrl\[ray\]'"):
        sglrl.spawn(Values, hosts="ray")


async def test_without_a_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(started, "_started", {})
    with pytest.raises(sglrl.WorkerStartError, match="no Ray cluster runs here"):
        await sglrl.spawn(Values, hosts="ray")
