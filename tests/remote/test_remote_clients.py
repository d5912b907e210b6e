"""Clients of a pool with the fake engine, in other processes.

Clients in this process use the same path.
"""

from __future__ import annotations

import asyncio
import math
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

import sglrl
from sglrl.core.clients import ClientState
from sglrl.core.invariants import validate
from sglrl.remote import pool as remote_pool
from sglrl.remote.driver import RemoteDriver
from sglrl.remote.forwarding import Peer
from sglrl.transport.curve_keys import make_keys
from sglrl.transport.zmq import ZmqDealer, ZmqRouter
from sglrl.wire.calls import PROTOCOL_VERSION, Cancel
from sglrl.wire.codec import decode_to_client, encode
from sglrl.wire.engine import GenerateArgs
from sglrl.wire.remote import Answers, Hello, Leave, Rejected, Request, Requests, Welcome

IDS = [3, 1, 4, 1, 5]
PROGRAM = Path(__file__).with_name("remote_program.py")


@pytest.fixture
async def pool() -> AsyncIterator[sglrl.Client]:
    async with sglrl.launch(
        "fake",
        engine="fake",
        replicas=2,
        tokens_per_step=4,
        step_seconds=0.001,
        vocab_size=1000,
        context_length=40_000,
    ) as client:
        yield client


@pytest.fixture
async def remote(pool: sglrl.Client) -> AsyncIterator[sglrl.Client]:
    async with sglrl.connect(pool.address) as client:
        yield client


def peers(client: sglrl.Client) -> list[Peer]:
    assert client._server is not None
    return [*client._server._peers.values()]


async def until(client: sglrl.Client, met: Callable[[], bool]) -> None:
    """Make round trips to a worker until the condition is met."""
    async with asyncio.timeout(300):
        while not met():
            await client.generate(input_ids=IDS, max_new_tokens=1)


async def test_a_message_out_of_place_is_logged_without_its_secret(
    remote: sglrl.Client, caplog: pytest.LogCaptureFixture
) -> None:
    driver = remote.requests.driver
    assert isinstance(driver, RemoteDriver)
    address = "ipc://x#token"
    again = Welcome(PROTOCOL_VERSION, 1, address, remote.info, driver.status)
    driver._on_message(b"", [encode(again)])
    assert driver.dropped.count == 1
    assert "the pool sent Welcome out of place" in caplog.text
    assert "token" not in caplog.text


async def test_it_does_what_the_pools_own_client_does(
    pool: sglrl.Client, remote: sglrl.Client
) -> None:
    made = await remote.generate(input_ids=IDS, max_new_tokens=12, logprobs=True)
    own = await pool.generate(input_ids=IDS, max_new_tokens=12, logprobs=True)
    assert made.output_ids.tolist() == own.output_ids.tolist() == (IDS * 3)[:12]
    np.testing.assert_array_equal(made.logprobs, own.logprobs)
    assert made.finish_reason == "length"
    assert made.resumed == 0
    assert 0 <= made.timing.queued <= made.timing.total
    groups = await remote.generate(input_ids=[[1], [2]], n=3, max_new_tokens=2)
    assert [[c.output_ids.tolist() for c in g] for g in groups] == [[[1, 1]] * 3, [[2, 2]] * 3]
    stream = remote.stream(input_ids=IDS, max_new_tokens=30, logprobs=True)
    chunks = [chunk async for chunk in stream]
    assert len(chunks) > 2
    assert np.concatenate([c.output_ids for c in chunks]).tolist() == IDS * 6
    assert stream.completion.output_ids.tolist() == IDS * 6
    scores, own_scores = await remote.score(IDS, start=1), await pool.score(IDS, start=1)
    np.testing.assert_array_equal(scores, own_scores)
    assert scores.versions == own_scores.versions == ((0, len(IDS) - 1, 0),)
    row, own_row = await remote.next_token_logprobs(IDS), await pool.next_token_logprobs(IDS)
    np.testing.assert_array_equal(row.logprobs, own_row.logprobs)
    assert row.worker in (0, 1)
    assert remote.info == pool.info
    assert remote.weight_version == pool.weight_version == 0
    assert [s.worker for s in await remote.stats()] == [0, 1]
    assert await remote.flush_cache()
    await remote.wait_until_full()
    assert [(w.id, w.pid, w.state) for w in remote.workers] == [
        (w.id, w.pid, w.state) for w in pool.workers
    ]


async def test_late_news_of_weights_change_nothing(remote: sglrl.Client) -> None:
    weights, told = remote.pool.weights, []
    weights.version = 3
    weights.on_version.add(lambda: told.append(weights.version))
    # The pool's last report has version 0.
    remote.requests.driver.on_news()  # type: ignore[attr-defined]
    assert remote.weight_version == 3
    assert told == []


async def test_as_many_tokens_as_there_may_be_are_scored(remote: sglrl.Client) -> None:
    assert len(await remote.score([7] * remote.info.max_total_tokens)) == 40_000


@pytest.mark.parametrize(
    "grammar",
    [
        {"regex": "a\0"},
        {"ebnf": "\0"},
        {"json_schema": '{"pattern": "\\u0000"}'},
        {"json_schema": "[" * 100_000},
        {"structural_tag": "["},
    ],
    ids=lambda grammar: f"{grammar!r:.30}",
)
async def test_grammars_that_a_client_should_not_have_let_through(
    remote: sglrl.Client, monkeypatch: pytest.MonkeyPatch, grammar: dict[str, str]
) -> None:
    to_wire = sglrl.SamplingParams.to_wire
    (name,) = grammar
    with monkeypatch.context() as patch, pytest.raises(sglrl.InvalidRequest, match=name):
        patch.setattr(sglrl.SamplingParams, "to_wire", lambda *args: {**to_wire(*args), **grammar})
        await remote.generate(input_ids=IDS, max_new_tokens=2, stop=[name])
    assert len((await remote.generate(input_ids=IDS, max_new_tokens=2)).output_ids) == 2


async def test_calls_go_where_they_are_told(pool: sglrl.Client, remote: sglrl.Client) -> None:
    for worker in (0, 1):
        made = await remote.generate(input_ids=IDS, max_new_tokens=2, worker=worker)
        assert made.worker == worker
    with pytest.raises(sglrl.UsageError, match="no worker 7"):
        await remote.generate(input_ids=IDS, worker=7)
    turns = [
        await remote.generate(input_ids=[i], max_new_tokens=1, session="game") for i in range(8)
    ]
    assert len({turn.worker for turn in turns}) == 1
    async with remote.session(input_ids=IDS) as session:
        workers = set()
        for _ in range(4):
            workers.add((await session.generate(max_new_tokens=3)).worker)
            session.observe([7])
    assert len(workers) == 1


class Number(int):
    """An ``int`` subclass, which messages do not support."""


@pytest.mark.parametrize(
    "values",
    [
        {"session": np.str_("game")},
        {"timeout": np.float64(60)},
        {"timeout": np.float32(60)},
        {"timeout": math.inf},
        {"priority": Number(1)},
        {"worker": Number(1)},
    ],
    ids=lambda values: f"{values!r}",
)
async def test_values_of_other_types_arrive(
    pool: sglrl.Client, remote: sglrl.Client, values: dict[str, Any]
) -> None:
    """The values arrive locally and remotely, beside a call without them."""
    made = await asyncio.gather(
        *(
            client.generate(input_ids=IDS, max_new_tokens=5, **more)
            for client in (pool, remote)
            for more in (values, {})
        )
    )
    assert [completion.output_ids.tolist() for completion in made] == [IDS] * 4


@pytest.mark.parametrize(
    "values",
    [{"session": "\udc80"}, {"worker": 1 << 70}, {"timeout": 10**400}],
    ids=lambda values: f"{values!a:.20}",
)
async def test_values_that_cannot_arrive_harm_no_other_call(
    remote: sglrl.Client, values: dict[str, Any]
) -> None:
    refused, made = await asyncio.gather(
        remote.generate(input_ids=IDS, **values),
        remote.generate(input_ids=IDS, max_new_tokens=5),
        return_exceptions=True,
    )
    assert isinstance(refused, sglrl.UsageError)
    assert next(iter(values)) in str(refused)
    assert isinstance(made, sglrl.Completion)
    assert made.output_ids.tolist() == IDS


async def test_a_call_that_cannot_be_encoded_fails_alone(
    remote: sglrl.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Unencodable(GenerateArgs, frozen=True):
        what: object = 1j

    def make(ids: bytes, wire: Any, *others: Any) -> GenerateArgs:
        made = Unencodable if others[3] == 7 else GenerateArgs
        return made(ids, wire, *others)

    monkeypatch.setattr("sglrl.inference.requests.GenerateArgs", make)
    made = await asyncio.gather(
        *(remote.generate(input_ids=[i], max_new_tokens=1, priority=i) for i in range(10)),
        return_exceptions=True,
    )
    refused = made.pop(7)
    assert isinstance(refused, sglrl.UsageError)
    assert "generate: the call cannot be sent" in str(refused)
    ids = [m.output_ids.tolist() for m in made if isinstance(m, sglrl.Completion)]
    assert ids == [[i] for i in range(10) if i != 7]
    driver = remote.requests.driver
    validate(driver.fabric)
    assert not driver.fabric.calls


async def test_what_may_take_as_long_as_it_takes(remote: sglrl.Client) -> None:
    await remote.wait_until_full(None)
    await remote.pause(timeout=None)
    assert await remote.abort(timeout=None) == 0
    await remote.resume(timeout=None)
    await remote.sleep(timeout=None)
    await remote.wake(timeout=None)


async def test_sleep(pool: sglrl.Client, remote: sglrl.Client) -> None:
    await remote.sleep(["weights"])
    assert {stats.engine.asleep for stats in await pool.stats()} == {("weights",)}
    call = asyncio.ensure_future(remote.generate(input_ids=[5], max_new_tokens=4))
    await pool.sleep(["kv_cache"])
    await remote.wake(["weights"])
    assert {stats.engine.asleep for stats in await remote.stats()} == {("kv_cache",)}
    assert not call.done()
    await remote.wake()
    assert (await call).output_ids.tolist() == [5, 5, 5, 5]
    with pytest.raises(sglrl.UsageError, match="inflight must be one of"):
        await remote.sleep(inflight="x")  # type: ignore[arg-type]
    with pytest.raises(sglrl.UsageError, match="argument `tags`"):
        await remote.sleep("kv_cache")
    with pytest.raises(sglrl.InvalidRequest, match="does not drain"):
        await remote.sleep(inflight="drain")
    await remote.wake()


async def test_many_at_once_share_the_workers(pool: sglrl.Client, remote: sglrl.Client) -> None:
    clients = (pool, remote)
    made = await asyncio.gather(
        *(
            clients[i % 2].generate(input_ids=[i % 1000], max_new_tokens=1 + i % 20)
            for i in range(2000)
        )
    )
    for i, completion in enumerate(made):
        assert completion.output_ids.tolist() == [i % 1000] * (1 + i % 20)
    assert {c.worker for c in made} == {0, 1}
    assert all(worker.load == 0 for worker in pool.workers)
    (peer,) = peers(pool)
    assert not peer.calls


async def test_rollouts(remote: sglrl.Client) -> None:
    async def agent(session: sglrl.Session, item: dict[str, list[int]]) -> float:
        await session.generate(max_new_tokens=4)
        session.observe([7])
        await session.generate(max_new_tokens=4)
        return float(item["input_ids"][0])

    items = [{"input_ids": [i]} for i in range(1, 9)]
    async with sglrl.rollout(remote, agent, items, group_size=2, progress=False) as run:
        groups = await run.take(8)
    assert sorted(g.trajectories[0].reward for g in groups) == [float(i) for i in range(1, 9)]


async def test_a_lost_worker_is_no_loss(pool: sglrl.Client, remote: sglrl.Client) -> None:
    work = [
        asyncio.ensure_future(remote.generate(input_ids=IDS, max_new_tokens=4000, logprobs=True))
        for _ in range(4)
    ]
    stream = remote.stream(input_ids=IDS, max_new_tokens=4000)
    streamed = [await anext(aiter(stream))]
    victim = max(pool.workers, key=lambda worker: worker.load)
    os.kill(victim.pid, signal.SIGKILL)
    streamed += [chunk async for chunk in stream]
    assert np.concatenate([c.output_ids for c in streamed]).tolist() == IDS * 800
    made = await asyncio.gather(*work)
    expected = -(np.arange(4000, dtype=np.float32) + 1) / 1024
    for completion in made:
        assert completion.output_ids.tolist() == IDS * 800
        np.testing.assert_array_equal(completion.logprobs, expected)
    assert sum(c.resumed for c in made) + stream.completion.resumed >= 1
    await remote.wait_until_full()
    assert {w.state for w in remote.workers} == {"ready"}


async def test_cancelled_and_late_calls_end_at_the_worker(
    pool: sglrl.Client, remote: sglrl.Client
) -> None:
    calls = [
        asyncio.ensure_future(remote.generate(input_ids=IDS, max_new_tokens=39_000))
        for _ in range(3)
    ]
    late = asyncio.ensure_future(remote.generate(input_ids=IDS, max_new_tokens=39_000, timeout=5.0))
    await until(pool, lambda: len(peers(pool)[0].calls) == 4)
    for call in calls:
        call.cancel()
    with pytest.raises(sglrl.DeadlineExceeded):
        await late
    await until(pool, lambda: not peers(pool)[0].calls)
    await until(pool, lambda: all(w.load == 0 for w in pool.workers))
    # The remote client's own records are empty, too.
    held = remote.requests.driver.fabric.members[0].calls
    await until(remote, lambda: not held)
    with pytest.raises(sglrl.InvalidRequest):
        await remote.generate(input_ids=[5000])


async def test_too_much_work_is_refused_by_name() -> None:
    async with (
        sglrl.launch("fake", engine="fake", window=1, max_queue=1, step_seconds=0.05) as pool,
        sglrl.connect(pool.address) as remote,
    ):
        made = await asyncio.gather(
            *(remote.generate(input_ids=IDS, max_new_tokens=2) for _ in range(5)),
            return_exceptions=True,
        )
        refused = [m for m in made if isinstance(m, BaseException)]
        assert len(refused) == 3
        assert {type(m) for m in refused} == {sglrl.Overloaded}


@pytest.fixture
async def small() -> AsyncIterator[sglrl.Client]:
    """A client with a small message limit, of a pool that sends each answer in one message."""
    async with (
        sglrl.launch("fake", engine="fake") as pool,
        sglrl.connect(pool.address, max_message_bytes=1 << 16) as client,
    ):
        yield client


async def test_answers_that_are_together_more_than_a_client_takes(small: sglrl.Client) -> None:
    made = await asyncio.gather(
        *(small.generate(input_ids=[i], max_new_tokens=2000) for i in range(50))
    )
    assert [m.output_ids.tolist() for m in made] == [[i] * 2000 for i in range(50)]


async def test_an_answer_that_is_more_than_a_client_takes(small: sglrl.Client) -> None:
    with pytest.raises(sglrl.MessageTooLarge, match="of this client"):
        await small.generate(input_ids=IDS, max_new_tokens=20_000)
    assert (await small.generate(input_ids=IDS, max_new_tokens=1)).output_ids.tolist() == [3]


async def run_program(address: str, what: str) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        sys.executable, str(PROGRAM), address, what, stdout=asyncio.subprocess.PIPE
    )


async def test_another_process(pool: sglrl.Client) -> None:
    program = await run_program(pool.address, "generate")
    out, _ = await program.communicate()
    assert out.decode().strip() == "[3, 1, 4, 3, 1, 4]"
    await until(pool, lambda: not peers(pool))


async def test_a_client_that_dies_is_forgotten_with_its_calls(pool: sglrl.Client) -> None:
    program = await run_program(pool.address, "hold")
    assert program.stdout is not None
    assert await program.stdout.readline() == b"begun\n"
    assert sum(w.load for w in pool.workers) == 20
    program.kill()
    await program.wait()
    await until(pool, lambda: not peers(pool))
    await until(pool, lambda: all(w.load == 0 for w in pool.workers))


async def test_who_could_not_be_told_hears_that_it_is_forgotten(
    pool: sglrl.Client, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(remote_pool, "_CHECK_SECONDS", 0.05)
    async with sglrl.connect(pool.address) as remote:
        # The client polls the pool during normal operation, too.
        call = asyncio.ensure_future(remote.generate(input_ids=IDS, max_new_tokens=2000))
        assert len((await call).output_ids) == 2000
        call = asyncio.ensure_future(remote.generate(input_ids=IDS, max_new_tokens=30_000))
        await until(pool, lambda: bool(peers(pool)[0].calls))
        driver, (peer,) = pool.requests.driver, peers(pool)
        with monkeypatch.context() as full:
            full.setattr(driver.transport, "send", lambda identity, frames: False)
            pool._server._tell(peer, Answers([], []))  # type: ignore[union-attr]
        assert "its calls (1) are cancelled" in caplog.text
        with pytest.raises(sglrl.Closed, match="not known to the pool any more"):
            await call
    await until(pool, lambda: all(w.load <= 1 for w in pool.workers))


async def test_when_the_pool_closes() -> None:
    async with sglrl.launch(
        "fake", engine="fake", step_seconds=0.01, tokens_per_step=1, context_length=40_000
    ) as pool:
        remote = sglrl.connect(pool.address)
        async with remote:
            call = asyncio.ensure_future(remote.generate(input_ids=IDS, max_new_tokens=9000))
            await until(pool, lambda: len(peers(pool)[0].calls) == 1)
            await pool.close()
            with pytest.raises(sglrl.Closed):
                await call
            with pytest.raises(sglrl.Closed):
                # The client may learn of the closed connection a moment after the call has failed.
                while True:
                    await remote.generate(input_ids=IDS, max_new_tokens=1, timeout=300)
        await remote.close()


async def test_when_the_process_that_has_the_pool_is_killed() -> None:
    program = await run_program("", "launch")
    assert program.stdout is not None
    address = (await program.stdout.readline()).decode().strip()
    async with sglrl.connect(address) as remote:
        calls = [
            asyncio.ensure_future(remote.generate(input_ids=IDS, max_new_tokens=30_000))
            for _ in range(3)
        ]
        stream = aiter(remote.stream(input_ids=IDS, max_new_tokens=30_000))
        await anext(stream)
        program.kill()
        await program.wait()
        for call in calls:
            with pytest.raises(sglrl.Closed, match="has exited"):
                await call
        with pytest.raises(sglrl.Closed, match="has exited"):
            await remote.generate(input_ids=IDS)
        with pytest.raises(sglrl.Closed, match="has exited"):
            while True:
                await anext(stream)
        with pytest.raises(sglrl.Closed):
            await remote.generate(input_ids=IDS)


async def test_addresses(pool: sglrl.Client, tmp_path: Path) -> None:
    for nonsense in ("tcp://127.0.0.1:5", "tcp://127.0.0.1:5#", "", None):
        with pytest.raises(sglrl.UsageError, match=r"pass client\.address"):
            sglrl.connect(nonsense)  # type: ignore[arg-type]
    for limit in ("timeout", "connect_timeout"):
        with pytest.raises(sglrl.UsageError, match=f"^{limit} must be a number of seconds"):
            sglrl.connect(pool.address, **{limit: -1})  # type: ignore[arg-type]
    for address in (pool.address[:-1], pool.weights_address):
        says = r"no answer from.*after '#' in the address is not its token.*client\.address"
        with pytest.raises(sglrl.DeadlineExceeded, match=says) as late:
            async with sglrl.connect(address, connect_timeout=0.3):
                pass
        assert address.partition("#")[2] not in str(late.value)
    with pytest.raises(sglrl.Closed, match="there is no pool at"):
        async with sglrl.connect(f"ipc://{tmp_path}/no#token"):
            pass
    assert not peers(pool)
    remote = sglrl.connect(pool.address)
    with pytest.raises(sglrl.Closed):
        await remote.generate(input_ids=IDS)
    async with remote:
        added = await remote.add_workers()
        assert added == [2]
        await remote.wait_until_full()
        await remote.remove_worker(*added)
        assert [w.id for w in pool.workers if w.state == "ready"] == [0, 1]
        assert await remote.model_metadata() == {}, "the fake engine had no update"
        # A client may pass on the address that it was given.
        async with sglrl.connect(remote.address) as third:
            assert (await third.generate(input_ids=IDS, max_new_tokens=1)).output_ids.tolist() == [
                3
            ]


async def test_keys(tmp_path: Path) -> None:
    folder, other = tmp_path / "keys", tmp_path / "other"
    make_keys(folder)
    make_keys(other)
    (other / "driver.public").write_text((folder / "driver.public").read_text())
    async with sglrl.launch("fake", engine="fake", address="tcp://0.0.0.0:*", keys=folder) as pool:
        assert "0.0.0.0" not in pool.address
        router = pool.pool.driver.transport
        assert isinstance(router, ZmqRouter)
        address = f"{router.address}#{pool.address.partition('#')[2]}"
        async with sglrl.connect(address, keys=folder) as remote:
            made = await remote.generate(input_ids=IDS, max_new_tokens=5)
            assert made.output_ids.tolist() == IDS
        for keys, why in ((None, "it needs keys="), (other, "it does not accept this key")):
            with pytest.raises(sglrl.DeadlineExceeded, match=f"no answer from.*{why}"):
                async with sglrl.connect(address, keys=keys, connect_timeout=0.5):
                    pass


def sampling(
    new_tokens: int = 1, stop: tuple[int, ...] = (), bias: dict[int, float] | None = None
) -> dict[str, Any]:
    values = sglrl.SamplingParams(max_new_tokens=new_tokens, stop_token_ids=stop)
    return {**values.to_wire(new_tokens, None), "logit_bias": bias}


def request(id_: int, ids: list[int], wire: dict[str, Any], **more: object) -> Request:
    args = GenerateArgs(np.array(ids, "<i4").tobytes(), msgspec.Raw(encode(wire)))
    return Request(id_, "generate", msgspec.Raw(encode(args)), **more)  # type: ignore[arg-type]


async def test_a_client_that_does_not_keep_to_the_rules(pool: sglrl.Client) -> None:
    """None of the hostile client's messages reaches a worker, and other clients are served."""
    url, _, token = pool.address.partition("#")
    hostile = ZmqDealer(url, f"client/{token}/x".encode(), max_message_bytes=1 << 20)
    said: list[object] = []
    hostile.start(lambda frames: said.append(decode_to_client(frames[0])))
    driver = pool.pool.driver
    # The client sends a request before its Hello.
    hostile.send([encode(Requests([request(1, IDS, sampling())]))])
    await until(pool, lambda: any(isinstance(m, Rejected) for m in said))
    hostile.send([encode(Hello(999))])
    await until(pool, lambda: len(said) == 2)
    assert not peers(pool)
    hostile.send([encode(Hello(PROTOCOL_VERSION))])
    await until(pool, lambda: isinstance(said[-1], Welcome))
    said.clear()
    dropped = driver.dropped.count
    nonsense = [
        [b""],
        [b"x" * 100],
        [encode(Hello(PROTOCOL_VERSION))],
        [encode(Cancel([1, 2])), b"frame"],
    ]
    for message in nonsense:
        hostile.send(message)
    await until(pool, lambda: driver.dropped.count == dropped + len(nonsense))
    wrong = [
        request(1, [], sampling()),
        request(2, [5000], sampling()),
        request(3, [-1], sampling()),
        request(4, IDS, sampling(50_000)),
        request(5, IDS, sampling(1, (1 << 20,))),
        request(6, IDS, sampling(), worker=-3),
        request(12, IDS, sampling(bias={1 << 20: 1.0})),
        request(13, IDS, sampling(bias={-1: 1.0})),
        request(14, IDS, sampling(bias={1: float("nan")})),
        request(15, IDS, sampling(bias={1: 1e300})),
        request(7, IDS, sampling(), timeout=float("nan")),
        request(8, IDS, sampling(), session="s" * 5000),
        Request(9, "shutdown", request(9, IDS, sampling()).args),
        Request(10, "generate", Request(1, "", request(1, [], sampling()).args).args),
        Request(11, "wait_until_full", request(1, IDS, sampling()).args),
    ]
    hostile.send([encode(Requests(wrong))])

    def failed() -> set[int]:
        return {i.id for m in said if isinstance(m, Answers) for i in m.items if i.kind == 4}

    await until(pool, lambda: len(failed()) == len(wrong))
    # Two requests with the same id: only one is accepted.
    held = request(50, IDS, sampling(39_000))
    hostile.send([encode(Requests([held, held]))])
    await until(pool, lambda: driver.dropped.count == dropped + len(nonsense) + 1)
    hostile.send([encode(Cancel([50, 50, 51]))])
    await until(pool, lambda: not peers(pool)[0].calls)
    # Sampling values that were validated before, with a prompt for which they are too large.
    said.clear()
    hostile.send([encode(Requests([request(60, [1] * 2000, sampling(39_000))]))])
    await until(pool, lambda: failed() == {60})
    hostile.send([encode(Leave())])
    await until(pool, lambda: not peers(pool))
    hostile.close()
    assert driver.fabric.stray_items == 0


def test_blocking(tmp_path: Path) -> None:
    with (
        sglrl.blocking("fake", engine="fake", replicas=2) as pool,
        sglrl.blocking.connect(pool.address) as remote,
    ):
        made = remote.generate(input_ids=IDS, max_new_tokens=10)
        assert made.output_ids.tolist() == IDS * 2
        assert [c.output_ids.tolist() for c in remote.stream(input_ids=[5], max_new_tokens=1)] == [
            [5]
        ]
        assert remote.address == pool.address
        assert len(remote.stats()) == 2


async def test_cancelled_turns_leave_nothing_at_the_driver() -> None:
    async with (
        sglrl.launch(
            "fake", engine="fake", replicas=2, step_seconds=0.05, tokens_per_step=1
        ) as pool,
        sglrl.connect(pool.address) as remote,
    ):
        for i in range(5):
            session = remote.session(input_ids=[1 + i] * 1000, max_new_tokens=1000)
            turn = asyncio.ensure_future(session.generate())
            await until(pool, lambda i=i: len(peers(pool)[0].conversations) == i + 1)  # type: ignore[misc]
            turn.cancel()
            await asyncio.wait([turn])
        await until(pool, lambda: not peers(pool)[0].calls)
        turns = peers(pool)[0].conversations.values()
        assert [route.tokens for route in turns] == [b""] * 5


def test_of_a_client_the_latest_conversations_are_known() -> None:
    peer, most = Peer(b"", 1, ClientState(0, 1)), 1 << 14
    first = peer.conversation(0)
    for number in range(1, 3 * most):
        peer.conversation(number)
        if number % (most // 2) == 0:
            assert peer.conversation(0) is first
        assert len(peer.conversations) + len(peer.silent) <= 2 * most
    assert peer.conversation(0) is first
    for number in range(3 * most, 4 * most):
        peer.conversation(number)
    assert peer.conversation(0) is first
    for number in range(4 * most, 6 * most + 1):
        peer.conversation(number)
    again = peer.conversation(0)
    assert again is not first
    again.tokens = b"1234"
    assert peer.conversation(0) is not again, "a turn of it runs"


async def test_calls_of_one_worker_stay_its(pool: sglrl.Client) -> None:
    """Calls with ``worker=1`` stay at worker 1, however many are made in one turn of the loop."""
    async with sglrl.connect(pool.address) as remote:
        made = await asyncio.gather(
            *(remote.generate(input_ids=[1 + i], max_new_tokens=2, worker=1) for i in range(300))
        )
    assert {completion.worker for completion in made} == {1}
