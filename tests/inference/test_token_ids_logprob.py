"""Logprobs of given token ids with the fake engine, along every way to sample."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from processes import strike

import sglrl
from sglrl.core.calls import Call
from sglrl.errors import ProtocolError
from sglrl.inference.replies import GenerationReply
from sglrl.inference.sampling import SamplingParams
from sglrl.inference.sampling_cache import Prepared
from sglrl.wire.calls import Item, ItemKind
from sglrl.wire.codec import encode
from sglrl.wire.engine import TokenChunk

IDS = [3, 1, 4, 1, 5, 999]
GIVEN = (512, 0, 999, 0)


def expected(count: int) -> list[list[float]]:
    """Return the logprobs of the fake engine."""
    return [[-id_ / 1024 - at for id_ in GIVEN] for at in range(count)]


def rows(made: sglrl.Completion | sglrl.Chunk) -> list[list[float]]:
    found = made.token_ids_logprobs
    assert found is not None
    assert (found.dtype, found.shape) == (np.float32, (len(made.output_ids), len(GIVEN)))
    assert not found.flags.writeable
    return found.tolist()


@pytest.fixture
async def client() -> AsyncIterator[sglrl.Client]:
    async with sglrl.launch(
        "fake", engine="fake", tokens_per_step=4, vocab_size=1000, context_length=128
    ) as client:
        yield client


@pytest.mark.parametrize(
    "given", [GIVEN, [*GIVEN], np.array(GIVEN)], ids=["tuple", "list", "array"]
)
async def test_calls_and_streams(client: sglrl.Client, given: Any) -> None:
    wanted: dict[str, Any] = {"input_ids": IDS, "token_ids_logprob": given}
    made = await client.generate(**wanted, max_new_tokens=30)
    assert rows(made) == expected(30)
    assert made.logprobs is None
    several = await client.generate(**wanted, n=3, max_new_tokens=5, top_logprobs=2)
    assert [rows(one) for one in several] == [expected(5)] * 3
    stream = client.stream(**wanted, max_new_tokens=30)
    chunks = [chunk async for chunk in stream]
    assert len(chunks) > 1
    assert [row for chunk in chunks for row in rows(chunk)] == expected(30)
    assert rows(stream.completion) == expected(30)
    async with sglrl.connect(client.address) as remote:
        assert rows(await remote.generate(**wanted, max_new_tokens=9)) == expected(9)
    plain = client.stream(input_ids=IDS, max_new_tokens=5, token_ids_logprob=[])
    assert [chunk.token_ids_logprobs async for chunk in plain] == [None, None]
    assert plain.completion.token_ids_logprobs is None


async def test_turns(client: sglrl.Client) -> None:
    async with client.session(input_ids=IDS, token_ids_logprob=GIVEN) as session:
        await session.generate(max_new_tokens=3)
        session.observe([7, 8])
        await session.generate(max_new_tokens=2, token_ids_logprob=[5])
        first, second = session.turns
    assert rows(first) == expected(3)
    assert second.token_ids_logprobs.tolist() == [[-5 / 1024], [-5 / 1024 - 1]]


async def test_a_call_continues_on_another_worker(tmp_path: Path) -> None:
    hang_file = tmp_path / "hang"
    hang_file.write_text("105")
    async with sglrl.launch(
        "fake",
        engine="fake",
        replicas=2,
        restarts=0,
        tokens_per_step=5,
        step_seconds=0.002,
        vocab_size=1000,
        context_length=512,
        hang_file=str(hang_file),
    ) as client:
        stream = client.stream(input_ids=IDS, max_new_tokens=300, token_ids_logprob=GIVEN)
        seen: list[list[float]] = []
        killed = False
        async for chunk in stream:
            seen += rows(chunk)
            if len(seen) > 100 and not killed:
                killed = True
                (busy,) = [worker for worker in client.workers if worker.load]
                strike(busy.pid, signal.SIGKILL)
                hang_file.unlink(missing_ok=True)
        assert stream.completion.resumed == 1
        assert seen == rows(stream.completion) == expected(300)


BAD: list[tuple[Any, str]] = [
    (3, "token_ids_logprob must be a list of token ids, got 3"),
    ("7", "must be a list of token ids, got '7'"),
    ({7}, "must be a list of token ids, got .7."),
    ({7: 1.0}, "must be a list of token ids"),
    (np.array(7), "must be a list of token ids"),
    ([1.5], "token_ids_logprob must be an integer, got 1.5"),
    ([-1], "token_ids_logprob must be at least 0, got -1"),
    ([True], "must be an integer"),
    ([[1, 2]], "must be an integer"),
    ([5, 1000], "token_ids_logprob holds 1000; the vocabulary has 1000 tokens"),
    ([5] * 1001, "token_ids_logprob has 1001 token ids; at most 1000 can be"),
]


@pytest.mark.parametrize(("value", "says"), BAD)
async def test_wrong_values_are_never_sent(client: sglrl.Client, value: Any, says: str) -> None:
    with pytest.raises(sglrl.InvalidRequest, match=says):
        await client.generate(input_ids=IDS, token_ids_logprob=value)
    with pytest.raises(sglrl.InvalidRequest, match=says):
        client.session(input_ids=IDS, token_ids_logprob=value)
    assert client.pool.driver.fabric._next_id == 0


@pytest.mark.parametrize(
    ("value", "says"),
    [((1000,), "holds 1000; the vocabulary"), ((5,) * 1001, "has 1001 token ids")],
)
async def test_clients_in_other_places_are_checked(
    client: sglrl.Client, monkeypatch: pytest.MonkeyPatch, value: tuple[int, ...], says: str
) -> None:
    """A client that does not check its arguments gets an error."""
    to_wire = SamplingParams.to_wire

    def wrong(*args: Any) -> Any:
        return {**to_wire(*args), "token_ids_logprob": value}

    monkeypatch.setattr(SamplingParams, "to_wire", wrong)
    async with sglrl.connect(client.address) as remote:
        with pytest.raises(sglrl.InvalidRequest, match=says):
            await remote.generate(input_ids=IDS)


@pytest.mark.parametrize("values", [b"", b"\0" * 4, b"\0" * 20])
async def test_a_chunk_needs_the_logprobs_of_each_token(values: bytes) -> None:
    future: asyncio.Future[sglrl.Completion] = asyncio.get_running_loop().create_future()
    prepared = Prepared(SamplingParams(token_ids_logprob=[1, 2]))
    reply = GenerationReply(lambda ids, skip: "", future, b"\0" * 4, prepared, False, 0)
    chunk = TokenChunk(b"\0" * 8, finish="stop", given_logprobs=values)
    item = Item(1, ItemKind.DONE, msgspec.Raw(encode(chunk)))
    reply.end(Call("generate", None, reply), item, [])
    with pytest.raises(ProtocolError, match="without the logprobs of given token ids"):
        await future
