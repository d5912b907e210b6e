"""The engine client's whole path with the fake engine: input, back-pressure, kills, threads."""

from __future__ import annotations

import asyncio
import copy
import os
import pickle
import signal
import threading
import weakref
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import pytest
from processes import strike

import sglrl

IDS = [3, 1, 4, 1, 5]


@pytest.fixture(params=["ipc", "tcp"])
async def client(request: pytest.FixtureRequest) -> AsyncIterator[sglrl.Client]:
    async with sglrl.launch(
        "fake",
        engine="fake",
        address=request.param,
        replicas=2,
        tokens_per_step=4,
        vocab_size=1000,
        context_length=64,
    ) as client:
        yield client


async def test_generate(client: sglrl.Client) -> None:
    made = await client.generate(input_ids=IDS, max_new_tokens=12, logprobs=True)
    assert made.prompt_ids.tolist() == IDS
    assert made.output_ids.tolist() == (IDS * 3)[:12]
    np.testing.assert_allclose(made.logprobs, -(np.arange(12) + 1) / 1024)
    assert made.finish_reason == "length"
    several = await client.generate(input_ids=[[1], [2], [3]], n=2, max_new_tokens=2)
    assert [[c.output_ids.tolist() for c in group] for group in several] == [
        [[i, i], [i, i]] for i in (1, 2, 3)
    ]


async def test_given_answers() -> None:
    """Each request gets the next one, whole or cut. Later requests get their prompt."""
    answers = [[7, 8, 9], [7, 8, 9], [7, 8, 9, 8], [4]]
    options: dict[str, Any] = {"answers": answers, "tokens_per_step": 2, "vocab_size": 100}
    async with sglrl.launch("fake", engine="fake", **options) as client:
        for values, expected in (
            ({}, ([7, 8, 9], "stop", 9)),
            ({"max_new_tokens": 2}, ([7, 8], "length", None)),
            ({"stop_token_ids": [8, 50]}, ([7, 8], "stop", 8)),
            ({}, ([4], "stop", 4)),
            ({"max_new_tokens": 3}, ([5, 5, 5], "length", None)),
        ):
            made = await client.generate(input_ids=[5], **values)  # type: ignore[arg-type]
            assert (made.output_ids.tolist(), made.finish_reason, made.stop_match) == expected


async def test_many_at_once(client: sglrl.Client) -> None:
    made = await asyncio.gather(
        *(client.generate(input_ids=[i % 1000], max_new_tokens=1 + i % 20) for i in range(3000))
    )
    for i, completion in enumerate(made):
        assert completion.output_ids.tolist() == [i % 1000] * (1 + i % 20)
    assert {c.worker for c in made} == {0, 1}
    assert all(worker.load == 0 for worker in client.workers)


async def test_what_waits_holds_its_prompt_once(client: sglrl.Client) -> None:
    """A waiting call holds its prompt as bytes only, so the caller's array can be freed."""
    given = np.array(IDS)
    alive = weakref.ref(given)
    call = asyncio.ensure_future(client.generate(input_ids=given, max_new_tokens=12))
    del given
    await asyncio.sleep(0)
    assert not call.done()
    assert alive() is None
    assert (await call).prompt_ids.tolist() == IDS


async def test_stream_equals_generate(client: sglrl.Client) -> None:
    stream = client.stream(input_ids=IDS, max_new_tokens=30, logprobs=True)
    with pytest.raises(sglrl.Closed):
        stream.completion  # noqa: B018
    chunks = [chunk async for chunk in stream]
    whole = await client.generate(input_ids=IDS, max_new_tokens=30, logprobs=True)
    assert len(chunks) > 1
    assert np.concatenate([c.output_ids for c in chunks]).tolist() == whole.output_ids.tolist()
    assert np.concatenate([c.logprobs for c in chunks]).tolist() == whole.logprobs.tolist()
    assert stream.completion.output_ids.tolist() == whole.output_ids.tolist()


async def test_score_stats_and_flush(client: sglrl.Client) -> None:
    assert (await client.score(IDS)).shape == (5,)
    assert (await client.score(IDS, start=3)).shape == (2,)
    assert [s.worker for s in await client.stats()] == [0, 1]
    assert await client.flush_cache()


BAD: list[tuple[dict[str, Any], str]] = [
    ({"input_ids": []}, "empty"),
    ({"input_ids": np.array([], dtype=np.int32)}, "empty"),
    ({"prompt": ""}, "empty"),
    ({"prompt": "a", "input_ids": [1]}, "exactly one"),
    ({}, "exactly one"),
    ({"messages": "hi"}, "non-empty list"),
    ({"messages": [{"content": "hi"}]}, r"messages\[0\] has no 'role'"),
    (
        {"messages": [{"role": "user", "content": "hi"}, {"role": "user"}]},
        r"\[1\] has no 'content'",
    ),
    ({"input_ids": [1000]}, "1000 is outside"),
    ({"input_ids": np.array([1000])}, "1000 is outside"),
    ({"input_ids": [-1]}, "-1 is outside"),
    ({"input_ids": [1, True]}, "bool"),
    ({"input_ids": np.array([True])}, "integers"),
    ({"input_ids": [1.0]}, "integers"),
    ({"input_ids": "text"}, "client.tokenizer"),
    ({"input_ids": [1] * 64}, "64 tokens.*63.*64"),
    ({"input_ids": [1], "max_new_tokens": 0}, "at least 1"),
    ({"input_ids": [1], "max_new_tokens": -5}, "at least 1"),
    ({"input_ids": [1], "max_new_tokens": True}, "integer"),
    ({"input_ids": [1], "max_new_tokens": 64}, "at most 63"),
    ({"input_ids": [1], "temperature": float("nan")}, "temperature"),
    ({"input_ids": [1], "temperature": -1}, "temperature"),
    ({"input_ids": [1], "top_p": 0}, "top_p"),
    ({"input_ids": [1], "stop_token_ids": [1000]}, "1000"),
    ({"input_ids": [1], "json_schema": "{"}, "not JSON"),
    ({"input_ids": [1], "temprature": 1.0}, "did you mean 'temperature'"),
    ({"input_ids": [1], "n": 0}, "n must be"),
    ({"input_ids": [1], "logprobs": 5}, "top_logprobs"),
]


async def test_bad_requests_are_never_sent(client: sglrl.Client) -> None:
    for values, says in BAD:
        with pytest.raises(sglrl.InvalidRequest, match=says):
            await client.generate(**values)
        assert client.pool.driver.fabric._next_id == 0, values
    with pytest.raises(sglrl.UsageError, match="no worker 2"):
        await client.generate(input_ids=IDS, worker=2)
    with pytest.raises(sglrl.DeadlineExceeded):
        await client.generate(input_ids=IDS, timeout=0)
    for timeout in (-1, float("nan"), "1"):
        for call in (
            client.generate(input_ids=IDS, timeout=timeout),
            client.score(IDS, timeout=timeout),
            client.next_token_logprobs(IDS, timeout=timeout),  # type: ignore[arg-type]
            anext(aiter(client.stream(input_ids=IDS, timeout=timeout))),  # type: ignore[arg-type]
            client.pause(timeout=timeout),  # type: ignore[arg-type]
            client.wait_until_full(timeout),  # type: ignore[arg-type]
            client.remove_worker(0, timeout=timeout),  # type: ignore[arg-type]
        ):
            with pytest.raises(sglrl.UsageError, match="timeout must be a number of seconds"):
                await call
        with pytest.raises(sglrl.UsageError, match="timeout must be a number of seconds"):
            client.session(input_ids=IDS, timeout=timeout)  # type: ignore[arg-type]
    with pytest.raises(sglrl.InvalidRequest, match=r"messages\[0\] has no 'role'"):
        client.session(messages=[{"content": "hi"}])
    with pytest.raises(sglrl.InvalidRequest, match="one prompt, got a list"):
        client.session(messages=[[{"role": "user", "content": "hi"}]])  # type: ignore[list-item]
    session = client.session(input_ids=IDS)
    for wrong in ({"role": "user"}, [{"role": "user", "content": "hi"}, {"role": "user"}]):
        with pytest.raises(sglrl.InvalidRequest, match=r"messages\[.\] has no 'content'"):
            session.observe(wrong)
    assert [s.engine.prompt_tokens for s in await client.stats()] == [0, 0]
    assert (await client.generate(input_ids=IDS, max_new_tokens=1)).output_ids.tolist() == [3]


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"tokens_per_stp": 1}, "did you mean 'tokens_per_step'"),
        ({"replicas": 0}, "replicas"),
        ({"replicas": True}, "replicas"),
        ({"timeout": 0}, "timeout"),
        ({"routing": "by-moon"}, "unknown routing"),
        ({"window": 0}, "window"),
        ({"window": 1.5}, "window"),
        ({"timeout": "5"}, "timeout"),
        ({"routing": 5}, "routing"),
        ({"device": "gpu"}, "'auto', 'cuda' or 'cpu'"),
        ({"device": "cuda"}, "no use for GPUs"),
        ({"gpus": [0]}, "no use for GPUs"),
        ({"tp_size": 2}, "no use for GPUs"),
    ],
)
async def test_bad_launches(values: dict[str, Any], says: str) -> None:
    with pytest.raises(sglrl.UsageError, match=says):
        sglrl.launch("fake", engine="fake", **values)


@pytest.mark.parametrize("model", [None, "", 3, b"folder"])
def test_what_is_no_model(model: Any) -> None:
    for make in (sglrl.launch, sglrl.blocking):
        with pytest.raises(sglrl.UsageError, match="model must be a folder or a name on the hub"):
            make(model, engine="fake")


async def test_a_client_stays_where_it_is(client: sglrl.Client) -> None:
    for held in (client, client.session(input_ids=IDS)):
        for take in (pickle.dumps, cloudpickle.dumps, copy.deepcopy):
            with pytest.raises(sglrl.UsageError, match=r"call sglrl\.connect\(address\) there"):
                take(held)
    blocking = sglrl.blocking("fake", engine="fake")
    with pytest.raises(sglrl.UsageError, match=r"call sglrl\.blocking\.connect\(address\) there"):
        pickle.dumps(blocking)
    assert (await client.generate(input_ids=IDS, max_new_tokens=1)).output_ids.tolist() == [3]


async def test_another_event_loop_is_refused(client: sglrl.Client) -> None:
    """Calls from another event loop raise. Their answers would never arrive.

    This happens when a fixture's loop differs from the test's loop.
    """

    async def elsewhere() -> None:
        for call in (
            client.generate(input_ids=IDS),
            client.score(IDS),
            client.stats(),
            client.flush_cache(),
        ):
            with pytest.raises(sglrl.UsageError, match="another event loop"):
                await asyncio.wait_for(call, 300)

    await asyncio.to_thread(asyncio.run, elsewhere())
    assert len(await client.stats()) == 2


async def test_a_message_that_is_too_large() -> None:
    async with sglrl.launch(
        "fake", engine="fake", max_message_bytes=20_000, context_length=1 << 16
    ) as client:
        with pytest.raises(sglrl.MessageTooLarge, match="max_message_bytes"):
            await client.generate(input_ids=[1] * 10_000, max_new_tokens=1)
        assert len((await client.generate(input_ids=IDS, max_new_tokens=3)).output_ids) == 3


async def test_answers_of_one_step_that_do_not_fit_one_message() -> None:
    async with sglrl.launch("fake", engine="fake", max_message_bytes=20_000) as client:
        pid = client.workers[0].pid
        scores = await client.score([[1] * 100] * 5, top_logprobs=15)
        assert [s.top_logprobs.shape for s in scores] == [(100, 15)] * 5
        assert client.workers[0].pid == pid


async def test_an_answer_that_does_not_fit_a_message() -> None:
    async with sglrl.launch("fake", engine="fake", max_message_bytes=20_000) as client:
        pid = client.workers[0].pid
        failed, good = await asyncio.gather(
            client.generate(input_ids=IDS, max_new_tokens=10_000),
            client.generate(input_ids=IDS, max_new_tokens=5),
            return_exceptions=True,
        )
        assert isinstance(failed, sglrl.MessageTooLarge)
        assert isinstance(good, sglrl.Completion)
        assert good.output_ids.tolist() == IDS
        assert client.workers[0].pid == pid


async def test_a_part_that_does_not_fit_a_message_ends_the_work() -> None:
    async with sglrl.launch(
        "fake",
        engine="fake",
        max_message_bytes=20_000,
        tokens_per_step=10_000,
        context_length=4_100_000,
    ) as client:
        with pytest.raises(sglrl.MessageTooLarge):
            async for _ in client.stream(input_ids=IDS, max_new_tokens=4_000_000):
                pass
        # The worker sends its stats after the error. By then its engine has the call's abort.
        while (await client.stats())[0].engine.running:
            pass
        assert (await client.stats())[0].engine.generated_tokens < 4_000_000


async def test_scores_that_cannot_fit_a_message_are_not_asked_for() -> None:
    async with sglrl.launch("fake", engine="fake", max_message_bytes=20_000) as client:
        with pytest.raises(sglrl.MessageTooLarge, match="less top_logprobs"):
            await client.score([1] * 100, top_logprobs=30)
        assert client.pool.driver.fabric._next_id == 0


async def test_what_is_done_on_another_loop() -> None:
    async with sglrl.launch("fake", engine="fake", replicas=2) as client:
        for work in (
            client.close(),
            client.close(drain=True),
            client.add_workers(),
            client.remove_worker(0),
            client.wait_until_full(),
        ):
            with pytest.raises(sglrl.UsageError, match="another event loop"):
                await asyncio.to_thread(asyncio.run, work)
        assert [worker.state for worker in client.workers] == ["ready", "ready"]


async def test_an_engine_argument_that_cannot_be_sent() -> None:
    client = sglrl.launch("fake", engine="fake", tokens_per_step=np.int64(4))
    with pytest.raises(sglrl.UsageError, match="int64"):
        await client.__aenter__()
    await client.close()


async def test_a_seed_of_numpys(client: sglrl.Client) -> None:
    seed = np.int64(3)
    made = await client.generate(input_ids=IDS, max_new_tokens=5, n=2, seed=seed)
    assert [c.output_ids.tolist() for c in made] == [IDS, IDS]
    stream = client.stream(input_ids=IDS, max_new_tokens=5, seed=np.int64(4))
    assert np.concatenate([chunk.output_ids async for chunk in stream]).tolist() == IDS


async def test_logprobs_of_a_stream_are_wanted_or_not(client: sglrl.Client) -> None:
    with pytest.raises(sglrl.InvalidRequest, match="logprobs must be True or False, got 5"):
        async for _ in client.stream(input_ids=IDS, logprobs=5):  # type: ignore[arg-type]
            pass


async def test_a_worker_that_fails_to_start() -> None:
    with pytest.raises(sglrl.WorkerStartError) as caught:
        async with sglrl.launch(
            "fake", engine="fake", fail_start="no room for the model", start_timeout=3600
        ):
            pytest.fail("it cannot have started")
    assert "no room for the model" in caught.value.output


async def test_a_killed_worker_loses_no_call() -> None:
    async with sglrl.launch(
        "fake", engine="fake", replicas=2, restarts=0, tokens_per_step=1, step_seconds=0.002
    ) as client:
        calls = [
            asyncio.ensure_future(client.generate(input_ids=[i], max_new_tokens=1000))
            for i in range(40)
        ]
        while not min(s.engine.generated_tokens for s in await client.stats()):
            pass
        os.kill(client.workers[0].pid, signal.SIGKILL)
        made = await asyncio.gather(*calls)
        for i, completion in enumerate(made):
            assert completion.output_ids.tolist() == [i] * 1000
            assert completion.worker == 1
        resumed = sum(c.resumed for c in made)
        assert 0 < resumed < 40
        assert {c.resumed for c in made} == {0, 1}
        assert (await client.generate(input_ids=IDS, max_new_tokens=1)).worker == 1


async def test_cancelled_requests_leave_the_engine() -> None:
    async with sglrl.launch(
        "fake", engine="fake", tokens_per_step=1, step_seconds=0.001, context_length=100_000
    ) as client:
        calls = [
            asyncio.ensure_future(client.generate(input_ids=IDS, max_new_tokens=90_000))
            for _ in range(5)
        ]
        while (await client.stats())[0].engine.running < 5:
            pass
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)
        with pytest.raises(sglrl.DeadlineExceeded):
            await client.generate(input_ids=IDS, max_new_tokens=90_000, timeout=0.05)
        stream = client.stream(input_ids=IDS, max_new_tokens=90_000)
        async for _ in stream:
            break
        await stream.aclose()
        while (await client.stats())[0].engine.running:
            pass


def test_blocking() -> None:
    with sglrl.blocking("fake", engine="fake", tokens_per_step=2) as client:
        assert client.generate(input_ids=IDS, max_new_tokens=5).output_ids.tolist() == IDS
        chunks = list(client.stream(input_ids=IDS, max_new_tokens=5))
        assert np.concatenate([c.output_ids for c in chunks]).tolist() == IDS
        for _ in client.stream(input_ids=IDS, max_new_tokens=500):
            break
        assert client.score(IDS).shape == (5,)
        assert client.stats()[0].worker == 0
        with pytest.raises(sglrl.InvalidRequest):
            client.generate(input_ids=[])
        results: dict[int, list[list[int]]] = {0: [], 1: []}

        def work(which: int) -> None:
            for _ in range(50):
                made = client.generate(input_ids=[which], max_new_tokens=2)
                results[which].append(made.output_ids.tolist())

        threads = [threading.Thread(target=work, args=(i,)) for i in results]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert results == {i: [[i, i]] * 50 for i in results}
    with pytest.raises(sglrl.Closed):
        client.generate(input_ids=IDS)
    client.close()


class SlowTokenizer:
    """A tokenizer that returns when ``go_on`` is set."""

    def __init__(self) -> None:
        self.begun = threading.Event()
        self.go_on = threading.Event()

    def __call__(self, texts: list[str], **more: Any) -> dict[str, list[list[int]]]:
        self.begun.set()
        self.go_on.wait()
        return {"input_ids": [[1] for _ in texts]}


def test_close_of_a_blocking_client_ends_calls_of_other_threads() -> None:
    """The calls wait at a worker, and in the tokenizer."""
    tokenizer = SlowTokenizer()
    ends: list[type[BaseException]] = []

    with sglrl.blocking("fake", engine="fake", tokens_per_step=1, step_seconds=0.01) as client:
        client.source.tokenizer_box._tokenizer = tokenizer

        def call(**values: Any) -> None:
            try:
                client.generate(max_new_tokens=20_000, **values)
            except sglrl.SglrlError as error:
                ends.append(type(error))
            finally:
                if "prompt" in values:
                    tokenizer.go_on.set()

        threads = [
            threading.Thread(target=call, kwargs=values, daemon=True)
            for values in ({"prompt": "text"}, {"input_ids": IDS})
        ]
        for thread in threads:
            thread.start()
        tokenizer.begun.wait()
        while not client.stats()[0].engine.running:
            pass
    for thread in threads:
        thread.join(300)
    tokenizer.go_on.set()
    assert ends == [sglrl.Closed] * 2


def test_a_blocking_client_that_runs_is_not_entered_again() -> None:
    with sglrl.blocking("fake", engine="fake") as client:
        with pytest.raises(sglrl.UsageError, match="running already"), client:
            pass
        assert client.generate(input_ids=IDS, max_new_tokens=5).output_ids.tolist() == IDS
    with pytest.raises(sglrl.Closed):
        client.generate(input_ids=IDS)


def test_a_blocking_session_is_closed_on_the_clients_thread(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    closed_on = []

    def close(session: sglrl.Session) -> None:
        closed_on.append(threading.current_thread())

    with sglrl.blocking("fake", engine="fake") as client:
        monkeypatch.setattr(sglrl.Session, "close", close)
        client.session(input_ids=IDS).close()
        with client.session(input_ids=IDS):
            pass
        assert closed_on == [client.thread] * 2


async def test_a_stream_continues_after_several_killed_workers(tmp_path: Path) -> None:
    """Every token arrives exactly once, however many workers are killed."""
    count, kills = 400, [80, 160, 240]
    hang_file = tmp_path / "hang"
    hang_file.write_text(str(kills[0]))
    async with sglrl.launch(
        "fake",
        engine="fake",
        replicas=4,
        restarts=0,
        tokens_per_step=5,
        step_seconds=0.002,
        context_length=512,
        hang_file=str(hang_file),
    ) as client:
        stream = client.stream(input_ids=IDS, max_new_tokens=count, logprobs=True)
        ids: list[int] = []
        async for chunk in stream:
            ids += chunk.output_ids.tolist()
            if kills and len(ids) == kills[0]:
                (busy,) = [w for w in client.workers if w.state == "ready" and w.load]
                strike(busy.pid, signal.SIGKILL)
                hang_file.unlink(missing_ok=True)
                del kills[0]
                if kills:
                    hang_file.write_text(str(kills[0]))
        made = stream.completion
        assert not kills
        assert made.resumed == 3
        assert ids == made.output_ids.tolist() == (IDS * count)[:count]
        np.testing.assert_allclose(made.logprobs, -(np.arange(count) + 1) / 1024)
        assert made.timing.queued <= made.timing.first_token <= made.timing.total


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        *(({"priority": p}, "priority must be") for p in (1.5, "x", None, True, 1 << 40)),
        *(({"worker": w}, "worker must be") for w in ("0", True, 0.0, 1 << 70)),
        *(({"session": s}, "session must be") for s in (3, "", b"a", "\udc80")),
    ],
)
async def test_where_a_call_cannot_go(client: sglrl.Client, wrong: Any, says: str) -> None:
    with pytest.raises(sglrl.UsageError, match=says):
        await client.generate(input_ids=[1], **wrong)
    with pytest.raises(sglrl.UsageError, match=says):
        async for _ in client.stream(input_ids=[1], **wrong):
            pass
    if "session" not in wrong:
        with pytest.raises(sglrl.UsageError, match=says):
            await client.score([1, 2], **wrong)
        with pytest.raises(sglrl.UsageError, match=says):
            await client.next_token_logprobs([1, 2], **wrong)
    if "priority" in wrong:
        with pytest.raises(sglrl.UsageError, match=says):
            client.session(input_ids=[1], **wrong)
    made = await client.generate(input_ids=[1], max_new_tokens=2)
    assert len(made.output_ids) == 2


@pytest.mark.parametrize(
    "env", [{"A": 1}, {1: "a"}, {"": "a"}, {"A=B": "c"}, {"A": "\0"}, {"A": "\udcff"}]
)
def test_variables_that_no_process_can_have(env: Any) -> None:
    with pytest.raises(sglrl.UsageError, match="env"):
        sglrl.launch("fake", engine="fake", env=env)


@pytest.mark.parametrize("replicas", [1, 2])
async def test_many_calls_of_one_turn_go_out_in_pieces(
    replicas: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker begins with the first calls while the others are built."""
    async with sglrl.launch("fake", engine="fake", replicas=replicas, tokens_per_step=4) as client:
        driver = client.requests.driver
        assert driver is not None
        send, made = driver.transport.send, []

        def sent(identity: bytes, frames: list[Any]) -> bool:
            made.append(len(driver.fabric.calls))
            return send(identity, frames)

        monkeypatch.setattr(driver.transport, "send", sent)
        found = await asyncio.gather(
            *(client.generate(input_ids=[i], max_new_tokens=3) for i in range(300))
        )
        assert [one.prompt_ids.tolist() for one in found] == [[i] for i in range(300)]
        assert all(len(one.output_ids) == 3 for one in found)
        piece = 64 * replicas
        pieces = [piece * (1 + i) for i in range(300 // piece)]
        assert list(dict.fromkeys(made))[: len(pieces)] == pieces


async def test_things_say_what_they_are() -> None:
    client = sglrl.launch("some/fake", engine="fake", replicas=2)
    assert repr(client) == "<Client, not started>"
    with pytest.raises(sglrl.UsageError, match=r"async with.*sglrl.blocking"), client:
        pass
    async with client:
        assert repr(client) == "<Client of fake, 2 ready, weights version 0>"
        stream = client.stream(input_ids=[1, 2], max_new_tokens=2)
        assert repr(stream) == "<Stream, not at its end>"
        async for _ in stream:
            pass
        assert repr(stream) == "<Stream, ended>"
        found = await client.next_token_logprobs([1, 2], top_k=4)
        assert repr(found) == (
            f"<NextTokenLogprobs of the likeliest 4 tokens, version 0, worker={found.worker}, "
            "cached=0>"
        )
        assert repr(await client.score([1, 2, 3], top_logprobs=2)) == "<Scores of 3 tokens, top 2>"
        with pytest.raises(sglrl.InvalidRequest, match="must be integers, got float"):
            await client.generate(input_ids=[1.5, 2.5])
        run = sglrl.rollout(client, print, [])
        assert repr(run).startswith("<Rollout, not begun: 0 groups taken")
    assert repr(client) == "<Client of fake, closed>"
    assert [worker.state for worker in client.workers] == ["retired", "retired"]


async def test_a_client_that_was_closed_starts_nothing() -> None:
    async with sglrl.launch("fake", engine="fake") as client:
        with pytest.raises(sglrl.UsageError, match="started before"):
            await client.__aenter__()
        assert (await client.generate(input_ids=[1], max_new_tokens=1)).output_ids.tolist() == [1]
    for refused in (
        client.add_workers(1),
        client.remove_worker(0),
        client.wait_until_full(1),
        client.model_metadata(),
        client.update_weights({}),
        client.generate(input_ids=[1]),
    ):
        with pytest.raises(sglrl.Closed):
            await refused
    with pytest.raises(sglrl.UsageError, match="started before"):
        await client.__aenter__()


@pytest.mark.parametrize(
    ("argument", "says"),
    [
        ({"max_message_bytes": "3"}, "max_message_bytes must be an integer of at least 16,384"),
        ({"max_message_bytes": 1}, "max_message_bytes must be an integer of at least 16,384"),
        ({"start_timeout": -1}, "start_timeout must be a number of seconds"),
        ({"start_timeout": "x"}, "start_timeout must be a number of seconds"),
        ({"max_queue": "x"}, "max_queue must be at least 0, got 'x'"),
        ({"max_queue": True}, "max_queue must be at least 0, got True"),
    ],
)
def test_arguments_that_no_pool_can_have(argument: dict[str, Any], says: str) -> None:
    with pytest.raises(sglrl.UsageError, match=says):
        sglrl.launch("fake", engine="fake", **argument)


def test_the_package_is_pickled_by_its_name() -> None:
    """Also when a pickled function refers to the package, as for another process."""
    assert cloudpickle.loads(cloudpickle.dumps(sglrl)) is sglrl

    def version() -> str:
        return sglrl.__version__

    assert cloudpickle.loads(cloudpickle.dumps(version))() == sglrl.__version__


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_blocking_client_waits_for_nobody_who_cannot_answer() -> None:
    """Check that calls which could never be answered raise an error.

    One call comes from the client's own loop, the other from a forked process, which has no thread
    of that loop.
    """
    with sglrl.blocking("fake", engine="fake", vocab_size=1000) as client:

        async def agent(session: sglrl.Session, item: Any) -> float:
            client.generate(input_ids=[1], max_new_tokens=1)
            return 1.0

        with pytest.raises(sglrl.UsageError, match="own event loop"):
            list(client.rollout(agent, [{"input_ids": [1]}], on_error="raise"))
        child = os.fork()
        if not child:
            try:
                client.generate(input_ids=[1], max_new_tokens=1)
            except sglrl.UsageError as error:
                os._exit(7 if "forked" in str(error) else 1)
            finally:
                os._exit(2)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        assert client.generate(input_ids=[1], max_new_tokens=1).output_ids.tolist() == [1]


async def test_nobody_asks_the_hub_for_a_fake_models_tokenizer() -> None:
    async with (
        sglrl.launch("fake", engine="fake") as client,
        sglrl.connect(client.address) as remote,
    ):
        for one in (client, remote):
            with pytest.raises(sglrl.InvalidRequest, match="the fake engine has no tokenizer"):
                await one.generate("some text")
