"""Hidden states with the fake engine, along every way to sample."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import numpy as np
import pytest

import sglrl
from sglrl.core.calls import Call
from sglrl.errors import ProtocolError
from sglrl.inference.replies import GenerationReply
from sglrl.inference.sampling import SamplingParams
from sglrl.inference.sampling_cache import Prepared
from sglrl.wire.calls import Item, ItemKind
from sglrl.wire.codec import encode
from sglrl.wire.engine import TokenChunk

WANTED: dict[str, Any] = {"input_ids": [3, 1, 4], "return_hidden_states": True}


def check(made: sglrl.Completion, count: int) -> None:
    expected = np.arange(count)[:, None] + np.arange(8) / 1024
    found = made.hidden_states
    assert found is not None
    assert (found.dtype, found.flags.writeable) == (np.float32, False)
    assert found.tolist() == expected.tolist()


@pytest.fixture
async def client() -> AsyncIterator[sglrl.Client]:
    async with sglrl.launch(
        "fake", engine="fake", tokens_per_step=4, vocab_size=1000, hidden_size=8
    ) as client:
        yield client


async def test_calls_streams_and_turns(client: sglrl.Client) -> None:
    check(await client.generate(**WANTED, max_new_tokens=30), 30)
    for made in await client.generate(**WANTED, max_new_tokens=5, n=2, logprobs=True):
        check(made, 5)
    stream = client.stream(**WANTED, max_new_tokens=30)
    chunks = [chunk async for chunk in stream]
    assert [len(chunk.hidden_states) for chunk in chunks] == [4] * 7 + [2]
    check(stream.completion, 30)
    async with sglrl.connect(client.address) as remote:
        check(await remote.generate(**WANTED, max_new_tokens=9), 9)
    async with client.session(**WANTED) as session:
        await session.generate(max_new_tokens=3)
        await session.generate(max_new_tokens=2, return_hidden_states=False)
        check(session.turns[0], 3)
        assert session.turns[1].hidden_states is None
    plain = client.stream(input_ids=[1], max_new_tokens=4)
    assert [chunk.hidden_states async for chunk in plain] == [None]


async def test_an_engine_without_hidden_states(monkeypatch: pytest.MonkeyPatch) -> None:
    says = r"return_hidden_states needs launch\(enable_return_hidden_states=True\)"
    async with sglrl.launch("fake", engine="fake") as client:
        with pytest.raises(sglrl.InvalidRequest, match=says):
            await client.generate(**WANTED)
        with pytest.raises(sglrl.InvalidRequest, match="must be True or False, got 1"):
            await client.generate(input_ids=[1], return_hidden_states=1)
        assert client.pool.driver.fabric._next_id == 0
        to_wire = SamplingParams.to_wire

        def wrong(*args: Any) -> Any:
            return {**to_wire(*args), "return_hidden_states": True}

        # The pool checks the requests of clients in other processes again.
        monkeypatch.setattr(SamplingParams, "to_wire", wrong)
        async with sglrl.connect(client.address) as remote:
            with pytest.raises(sglrl.InvalidRequest, match=says):
                await remote.generate(input_ids=[1])


@pytest.mark.parametrize("values", [b"", b"\0" * 4, b"\0" * 12])
async def test_a_chunk_needs_the_state_of_each_token(values: bytes) -> None:
    future: asyncio.Future[sglrl.Completion] = asyncio.get_running_loop().create_future()
    prepared = Prepared(SamplingParams(return_hidden_states=True))
    reply = GenerationReply(lambda ids, skip: "", future, b"\0" * 4, prepared, False, 0)
    chunk = TokenChunk(b"\0" * 8, finish="stop", hidden_states=values)
    item = Item(1, ItemKind.DONE, msgspec.Raw(encode(chunk)))
    reply.end(Call("generate", None, reply), item, [])
    with pytest.raises(ProtocolError, match="tokens without hidden states"):
        await future


async def test_no_tokens() -> None:
    future: asyncio.Future[sglrl.Completion] = asyncio.get_running_loop().create_future()
    prepared = Prepared(SamplingParams(return_hidden_states=True))
    reply = GenerationReply(lambda ids, skip: "", future, b"\0" * 4, prepared, False, 0)
    made = reply.completion(Call("generate", None, reply), [TokenChunk(b"", finish="abort")])
    assert made.hidden_states is not None
    assert made.hidden_states.shape == (0, 0)
