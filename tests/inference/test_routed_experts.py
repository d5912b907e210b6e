"""Routed experts with the fake engine, along every way to sample."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from processes import strike

import sglrl

IDS = [3, 1, 4, 1, 5, 999]
WANTED: dict[str, Any] = {"return_routed_experts": True}
ENGINE: dict[str, Any] = {
    "engine": "fake",
    "enable_return_routed_experts": True,
    "routed_experts": (3, 2, 8),
    "vocab_size": 1000,
}


def expected(end: int, begin: int = 0) -> list[Any]:
    """Return the rows of the fake engine for positions ``begin`` to ``end``."""
    return [
        [[(at + layer + choice) % 8 for choice in range(2)] for layer in range(3)]
        for at in range(begin, end)
    ]


def rows(found: NDArray[Any] | None) -> list[Any]:
    assert found is not None
    assert found.dtype == np.uint8
    assert not found.flags.writeable
    listed: list[Any] = found.tolist()
    return listed


@pytest.fixture
async def client() -> AsyncIterator[sglrl.Client]:
    async with sglrl.launch("fake", **ENGINE, tokens_per_step=4, context_length=128) as client:
        yield client


async def test_calls_and_streams(client: sglrl.Client) -> None:
    made = await client.generate(input_ids=IDS, max_new_tokens=30, **WANTED)
    assert rows(made.routed_experts) == expected(6 + 30 - 1)
    assert made.routed_from == 0
    several = await client.generate(input_ids=[IDS, IDS[:2]], n=2, max_new_tokens=5, **WANTED)
    ends = [len(rows(one.routed_experts)) for group in several for one in group]
    assert ends == [10, 10, 6, 6]
    stream = client.stream(input_ids=IDS, max_new_tokens=30, **WANTED)
    assert len([chunk async for chunk in stream]) > 1
    assert rows(stream.completion.routed_experts) == expected(35)
    one = await client.generate(input_ids=IDS, max_new_tokens=1, **WANTED)
    assert rows(one.routed_experts) == expected(6)


async def test_a_client_in_another_place(client: sglrl.Client) -> None:
    async with sglrl.connect(client.address) as remote:
        made = await remote.generate(input_ids=IDS, max_new_tokens=30, **WANTED)
        assert rows(made.routed_experts) == expected(35)


async def test_many_experts_take_16_bits() -> None:
    engine = {**ENGINE, "routed_experts": (1, 2, 300)}
    async with sglrl.launch("fake", **engine, context_length=1024) as client:
        made = await client.generate(input_ids=IDS, max_new_tokens=400, **WANTED)
        assert made.routed_experts is not None
        assert made.routed_experts.dtype == np.int16
        assert made.routed_experts[:, 0].tolist() == [
            [at % 300, (at + 1) % 300] for at in range(405)
        ]


async def test_rows_that_exceed_a_frame_are_sent_in_several() -> None:
    engine = {**ENGINE, "routed_experts": (40, 8, 64)}
    async with sglrl.launch(
        "fake", **engine, context_length=4096, max_message_bytes=1 << 16
    ) as client:
        made = await client.generate(input_ids=[1] * 2000, max_new_tokens=1, **WANTED)
        assert made.routed_experts is not None
        assert made.routed_experts.shape == (2000, 40, 8)
        assert made.routed_experts[:, 39, 7].tolist() == [(at + 46) % 64 for at in range(2000)]


async def one_turn(session: sglrl.Session, item: object) -> float:
    await session.generate()
    session.observe([7])
    await session.generate()
    return 1.0


async def test_turns_and_rollouts(client: sglrl.Client) -> None:
    async with client.session(input_ids=IDS, max_new_tokens=3, **WANTED) as session:
        first = await session.generate()
        session.observe([7, 8])
        second = await session.generate()
        assert rows(first.routed_experts) == expected(8)
        assert second.routed_from == 8
        assert rows(second.routed_experts) == expected(13, 8)
        assert rows(session.trajectory().routed_experts) == expected(13)
        session.observe([9])
        # A turn without rows: the next one brings those of both.
        await session.generate(return_routed_experts=False)
        assert rows(session.trajectory().routed_experts) == expected(13)
        last = await session.generate()
        assert last.routed_from == 13
        trajectory = session.trajectory()
        assert rows(trajectory.routed_experts) == expected(len(trajectory.input_ids) - 1)

    for processes in (None, 1):
        run = sglrl.rollout(
            client,
            one_turn,
            [{"input_ids": IDS}],
            group_size=2,
            processes=processes,
            max_new_tokens=4,
            **WANTED,
        )
        (group,) = [group async for group in run]
        for trajectory in group.trajectories:
            assert rows(trajectory.routed_experts) == expected(6 + 4 + 1 + 4 - 1)


async def test_branches(client: sglrl.Client) -> None:
    async with client.session(input_ids=IDS, max_new_tokens=3, **WANTED) as session:
        await session.generate()
        session.observe([7])
        fork = session.fork()
        await session.generate()
        await session.generate()
        await fork.generate()
        # From here on, without the turns before: their tokens are no prefix.
        session.go_back(2)
        session.observe([8, 8])
        await session.generate()
        found = session.trajectory()
    assert len(found.leaves) == 3
    for leaf in found.leaves:
        assert rows(leaf.routed_experts) == expected(len(leaf.input_ids) - 1)


@pytest.mark.parametrize("remote", [False, True])
async def test_a_call_continues_on_another_worker(remote: bool, tmp_path: Path) -> None:
    count = 300
    hang_file = tmp_path / "hang"
    hang_file.write_text("105")
    async with sglrl.launch(
        "fake",
        **ENGINE,
        replicas=2,
        restarts=0,
        tokens_per_step=5,
        step_seconds=0.002,
        context_length=512,
        hang_file=str(hang_file),
    ) as owner:
        async with AsyncExitStack() as stack:
            client = owner
            if remote:
                client = await stack.enter_async_context(sglrl.connect(owner.address))
            stream = client.stream(input_ids=IDS, max_new_tokens=count, **WANTED)
            seen, killed = 0, False
            async for chunk in stream:
                seen += len(chunk.output_ids)
                if seen > 100 and not killed:
                    killed = True
                    (busy,) = [worker for worker in owner.workers if worker.load]
                    strike(busy.pid, signal.SIGKILL)
                    hang_file.unlink(missing_ok=True)
        made = stream.completion
        assert made.resumed == 1
        assert rows(made.routed_experts) == expected(6 + count - 1)


async def test_an_aborted_call_has_the_rows_of_its_tokens() -> None:
    async with sglrl.launch(
        "fake", **ENGINE, tokens_per_step=1, step_seconds=0.001, context_length=1 << 16
    ) as client:
        stream = client.stream(input_ids=IDS, max_new_tokens=50_000, **WANTED)
        chunks = aiter(stream)
        await anext(chunks)
        await client.abort()
        rest = [chunk async for chunk in chunks]
        assert rest[-1].finish_reason == "abort"
        made = stream.completion
        assert rows(made.routed_experts) == expected(6 + len(made.output_ids) - 1)
        async with client.session(input_ids=IDS, max_new_tokens=60, **WANTED) as session:
            begun = asyncio.Event()
            turn = asyncio.ensure_future(session.generate(on_chunk=lambda chunk: begun.set()))
            await begun.wait()
            await client.abort()
            # The turn continues after its last token.
            assert rows((await turn).routed_experts) == expected(65)


async def test_what_is_rejected(client: sglrl.Client) -> None:
    with pytest.raises(sglrl.InvalidRequest, match="must be True or False, got 1"):
        await client.generate(input_ids=IDS, return_routed_experts=1)  # type: ignore[arg-type]
    async with sglrl.launch("fake", engine="fake") as plain:
        for call in (
            plain.generate(input_ids=IDS, **WANTED),
            plain.generate(input_ids=IDS, sampling=sglrl.SamplingParams(**WANTED)),
        ):
            with pytest.raises(sglrl.InvalidRequest, match="enable_return_routed_experts=True"):
                await call
        with pytest.raises(sglrl.InvalidRequest, match="enable_return_routed_experts=True"):
            plain.session(input_ids=IDS, **WANTED)
