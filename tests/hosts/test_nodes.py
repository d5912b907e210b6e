"""Workers on nodes: spread, replaced, and gone with their node or with the program."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import weakref
from pathlib import Path

import pytest
from actor_classes import Values
from processes import wait_for_end

import sglrl
from sglrl.errors import WorkerStartError
from sglrl.hosts import node_pool
from sglrl.transport.curve_keys import make_keys
from sglrl.wire.nodes import FromNode, PoolOpened

from .nodes import SECONDS, hosts_of, nodes, until_there

ANY = "tcp://127.0.0.1:*"
IDS = [3, 1, 4, 1, 5]


async def test_workers_are_spread_and_replaced() -> None:
    async with sglrl.Hosts(ANY, at_least=2) as hosts:
        with nodes(hosts.address, "a", "b"):
            async with sglrl.spawn(Values, replicas=4, hosts=hosts) as values:
                assert hosts_of(values) == ["a", "a", "b", "b"]
                assert await values.add(1) == 11
                first = values.workers[0]
                os.kill(first.pid, signal.SIGKILL)
                while values.workers[0].pid == first.pid:
                    await values._pool.driver.change()
                await values.wait_until_full()
                assert values.workers[0].host == first.host
                assert values.workers[0].pid != first.pid
                assert await values.add_workers(2) == [4, 5]
                assert hosts_of(values) == ["a", "a", "a", "b", "b", "b"]
                pids = [worker.pid for worker in values.workers]
            assert wait_for_end(pids, SECONDS) == []


async def test_a_node_that_starts_again_before_its_death_is_noticed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It has the same name. The workers are replaced at once, not after the orphan timeout."""
    monkeypatch.setattr("sglrl.hosts.hosts.CHECK_SECONDS", 1000.0)
    options = ("--orphan-timeout", "1000")
    async with sglrl.Hosts(ANY) as hosts:
        with nodes(hosts.address, "a", options=options) as (first,):
            async with sglrl.spawn(Values, hosts=hosts) as values:
                pid = values.workers[0].pid
                first.strike(signal.SIGKILL)
                first.ends()
                with nodes(hosts.address, "a", options=options):
                    while values.workers[0].pid == pid:
                        await values._pool.driver.change()
                    await values.wait_until_full()
                    assert [host.name for host in hosts.hosts] == hosts_of(values) == ["a"]


async def test_a_remote_client_sees_the_hosts() -> None:
    async with sglrl.Hosts(ANY, at_least=2) as hosts:
        with nodes(hosts.address, "a", "b"):
            async with (
                sglrl.launch("fake", engine="fake", replicas=2, hosts=hosts) as client,
                sglrl.connect(client.address) as remote,
            ):
                assert hosts_of(remote) == hosts_of(client) == ["a", "b"]


def test_a_pool_that_is_never_closed() -> None:
    """It is garbage after its event loop has ended, although its hosts are still in use."""
    hosts = sglrl.Hosts(ANY)

    async def use() -> weakref.ref[object]:
        hosts.open()
        with nodes(hosts.address, "a"):
            values = sglrl.spawn(Values, hosts=hosts)
            await values.__aenter__()
            assert await values.add(1) == 11
            return weakref.ref(values._pool)

    pool = asyncio.run(use())
    assert pool() is not None
    with pytest.warns(ResourceWarning, match="ActorHandle of Values was never closed"):
        gc.collect()
    assert pool() is None


async def test_a_key_that_the_program_does_not_have(tmp_path: Path) -> None:
    """The error says so. The node tries again less and less often."""
    make_keys(tmp_path / "keys")
    make_keys(tmp_path / "others")
    key = tmp_path / "others" / "trainer.secret"
    (tmp_path / "others" / "driver.public").write_bytes(
        (tmp_path / "keys" / "driver.public").read_bytes()
    )
    async with sglrl.Hosts(ANY, keys=tmp_path / "keys") as hosts:
        with nodes(hosts.address, "a", options=("--keys", str(key))):
            with pytest.raises(
                sglrl.WorkerStartError, match="connections had a key that is not in"
            ):
                async with sglrl.spawn(Values, hosts=hosts, start_timeout=15.0):
                    pass
            # 0, 0.2, 0.7, 1.7, 3.7 seconds after the first one, and then every two seconds.
            assert hosts.strangers < 15


async def test_two_programs_one_after_the_other() -> None:
    """A node serves until it is stopped."""
    hosts = sglrl.Hosts(ANY)
    hosts.open()
    address = hosts.address
    with nodes(address, "a") as (node,):
        async with sglrl.spawn(Values, hosts=hosts) as values:
            assert await values.add(1) == 11
        await hosts.close()
        node.says("has closed its hosts")
        async with sglrl.Hosts(address) as others:
            async with sglrl.spawn(Values, hosts=others) as values:
                assert await values.add(1) == 11
            node.strike(signal.SIGTERM)
            assert node.ends() == 0


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
async def test_a_node_that_ends(how: signal.Signals) -> None:
    """Calls go on at the other host, where the replacements start."""
    async with sglrl.Hosts(ANY, at_least=2, heartbeat_timeout=5.0) as hosts:
        with nodes(hosts.address, "a", "b", options=("--orphan-timeout", "3")) as made:
            async with sglrl.launch(
                "fake",
                engine="fake",
                replicas=2,
                hosts=hosts,
                tokens_per_step=1,
                step_seconds=0.01,
            ) as client:
                streams = [
                    client.stream(input_ids=[*IDS, n], max_new_tokens=200) for n in range(10)
                ]
                readers = [aiter(stream) for stream in streams]
                got = [(await anext(reader)).output_ids.tolist() for reader in readers]
                pids = [worker.pid for worker in client.workers if worker.host == "a"]
                (node,) = [node for node in made if node.name == "a"]
                node.strike(how)
                for n, reader in enumerate(readers):
                    async for chunk in reader:
                        got[n] += chunk.output_ids.tolist()
                    assert got[n] == ([*IDS, n] * 200)[:200]
                assert wait_for_end(pids, SECONDS) == []
                await client.wait_until_full(SECONDS)
                assert hosts_of(client) == ["b", "b"]
                assert [host.name for host in hosts.hosts] == ["b"]


async def test_too_few_hosts() -> None:
    async with sglrl.Hosts(ANY, at_least=2) as hosts:
        with nodes(hosts.address, "only"):
            await until_there(hosts, 1)
            with pytest.raises(
                sglrl.WorkerStartError, match=r"1 of 2 hosts \(at_least\) have connected to tcp://"
            ):
                await sglrl.spawn(Values, hosts=hosts, start_timeout=1.0)


async def test_too_few_gpus() -> None:
    async with sglrl.Hosts(ANY) as hosts:
        with nodes(hosts.address, "only"):
            await until_there(hosts, 1)
            with pytest.raises(
                sglrl.WorkerStartError,
                match=r"2 workers with 2 GPUs each do not fit: only has 0 GPUs \(0 free\)",
            ):
                await sglrl.launch(
                    "tiny", hosts=hosts, replicas=2, tp_size=2, device="cuda", start_timeout=1.0
                )


async def test_a_worker_that_fails_shows_its_output() -> None:
    async with sglrl.Hosts(ANY) as hosts:
        with (
            nodes(hosts.address, "only"),
            pytest.raises(sglrl.WorkerStartError, match="no room for the model"),
        ):
            await sglrl.launch(
                "fake", engine="fake", fail_start="no room for the model", hosts=hosts
            )


def test_wrong_arguments(tmp_path: Path) -> None:
    for address, why in (
        ("ipc://x", "tcp://HOST:PORT"),
        ("tcp://0.0.0.0:7000", "need keys"),
        (7000, "tcp://HOST:PORT"),
    ):
        with pytest.raises(sglrl.UsageError, match=why):
            sglrl.Hosts(address)  # type: ignore[arg-type]
    with pytest.raises(sglrl.InvalidKeys, match="there is no folder"):
        sglrl.Hosts("tcp://0.0.0.0:7000", keys=tmp_path / "keys")
    with pytest.raises(sglrl.UsageError, match="at_least"):
        sglrl.Hosts(ANY, at_least=0)
    hosts = sglrl.Hosts(ANY)
    for others in (
        {"address": "tcp"},
        {"keys": tmp_path},
        {"insecure": True},
        {"python": "python"},
    ):
        with pytest.raises(sglrl.UsageError, match=r"hosts= and .*= exclude each other"):
            sglrl.launch("fake", engine="fake", hosts=hosts, **others)  # type: ignore[arg-type]
    with pytest.raises(sglrl.UsageError, match="hosts must be"):
        sglrl.launch("fake", engine="fake", hosts="somewhere")  # type: ignore[arg-type]
    with pytest.raises(sglrl.UsageError, match="hosts must be"):
        sglrl.spawn(Values, hosts=["a"])  # type: ignore[arg-type]


async def test_a_node_imports_with_the_variables_of_the_pool(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given: list[dict[str, str]] = []

    def fork_server(preload: str, env: dict[str, str]) -> None:
        given.append({**env, "preload": preload})
        raise WorkerStartError("not here")

    monkeypatch.setattr(node_pool, "fork_server", fork_server)
    answers: list[FromNode] = []
    env = {"SGLANG_X": "1", "TRITON_CACHE_DIR": "/x"}
    await node_pool.NodePool(1, "sglang", env, answers.append, lambda address: address).open()
    assert given[0].items() >= {**env, "preload": "sglang"}.items()
    assert isinstance(answers[0], PoolOpened)
    assert answers[0].error == "not here"
