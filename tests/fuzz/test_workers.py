"""Every message that may arrive at a worker's mailbox, for an engine and for a plain actor."""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import AsyncIterator, Sequence
from typing import Any

import msgspec
import numpy as np
import pytest
from numpy.typing import NDArray

from sglrl.actors.actor import Actor, endpoint, endpoints_of
from sglrl.errors import ProtocolError
from sglrl.transport.memory import MemoryRouter
from sglrl.wire.calls import CallMessage, ItemKind, Load, Results, Shutdown, Submit
from sglrl.wire.codec import decode_to_driver, decode_to_worker, encode
from sglrl.wire.engine import ScoreArgs, TokenChunk
from sglrl.wire.processes import EngineSpec, WorkerSpec
from sglrl_workers import mailbox as mailbox_module
from sglrl_workers.actor_worker import Host
from sglrl_workers.engine.fake import FakeEngine
from sglrl_workers.mailbox import Mailbox

from .harness import memory, nobody_raises
from .mutator import FRAMES, Mutator
from .samples import ARRAY, SAMPLING, generate_args, ids, raw, to_worker

TO_ENGINE = FRAMES * 2 // 10
TO_ACTOR = FRAMES * 2 // 10
BATCH = 50
GROWTH = 64 << 20
FIRST_GOOD = 10**15
"""First id of valid calls. Mutated messages never get an id from here on."""


def ends_the_worker(frames: Sequence[bytes]) -> bool:
    try:
        return isinstance(decode_to_worker(frames[0]), Shutdown)
    except ProtocolError:
        return False


class Wire:
    """Replaces an engine's DEALER."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        self.arriving: deque[list[bytes]] = deque()
        self.sent: list[list[bytes]] = []
        self.something = asyncio.Event()

    def receive(self) -> list[bytes] | None:
        return self.arriving.popleft() if self.arriving else None

    def send(self, frames: Sequence[bytes]) -> None:
        self.sent.append(list(frames))
        self.something.set()

    def answers(self) -> dict[int, list[tuple[int, bytes]]]:
        """Return the answers to valid calls that were sent since the last call, by call id."""
        found: dict[int, list[tuple[int, bytes]]] = {}
        sent, self.sent = self.sent, []
        for frames in sent:
            message = decode_to_driver(frames[0])
            for item in message.items if isinstance(message, Results) else ():
                assert 0 <= item.kind <= 3
                if item.id >= FIRST_GOOD and item.id < 2 * FIRST_GOOD:
                    found.setdefault(item.id, []).append((item.kind, bytes(item.body)))
        return found


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> FakeEngine:
    """Return a fake engine with its mailbox, on a ``Wire``."""
    monkeypatch.setattr(mailbox_module, "ZmqPolledDealer", Wire)
    body = EngineSpec(
        engine="fake",
        model="fake",
        args={"context_length": 64, "vocab_size": 1000, "tokens_per_step": 5},
        device="cpu",
        rank=0,
        tp_size=1,
        gpu_id=0,
        rendezvous="",
        threads=1,
        memory_share=1.0,
        window=8,
    )
    spec = WorkerSpec(index=0, identity=b"w", address="", max_message_bytes=1 << 20, body=body)
    made = FakeEngine(body)
    made.mailbox = Mailbox(spec)
    return made


def test_a_call_that_comes_again_is_answered_once(engine: FakeEngine) -> None:
    mailbox = engine.mailbox
    wire: Any = mailbox._dealer
    calls = [CallMessage(FIRST_GOOD, "generate", generate_args(ids(n), SAMPLING)) for n in (1, 2)]
    wire.arriving.extend([[encode(Submit(calls))], [encode(Submit(calls[1:]))]])
    mailbox.receive(engine)
    while engine.busy:
        engine.step()
    mailbox.flush()
    ((_, body),) = wire.answers()[FIRST_GOOD]
    assert msgspec.msgpack.decode(body, type=TokenChunk).ids == ids(*[1] * 6)
    assert mailbox._drop.count == 2
    # The call was answered, so a call with the same id is a new call.
    wire.arriving.append([encode(Submit(calls[1:]))])
    mailbox.receive(engine)
    assert engine.busy


def test_an_engines_mailbox(engine: FakeEngine) -> None:
    mailbox = engine.mailbox
    wire: Any = mailbox._dealer
    mutator = Mutator(to_worker())
    before = 0
    rounds = max(4, TO_ENGINE // BATCH)
    for n in range(rounds):
        mutator.ids = [1, 2, n, n + 1, *list(engine.requests)[:5]]
        messages = [mutator.message() for _ in range(BATCH)]
        wire.arriving.extend(m for m in messages if not ends_the_worker(m))
        good = FIRST_GOOD + 2 * n
        prompt = ids(n % 1000, 5)
        calls = [
            CallMessage(
                good, "generate", generate_args(prompt, SAMPLING, logprobs=True, stream=True)
            ),
            CallMessage(good + 1, "score", raw(ScoreArgs(prompt, 1))),
        ]
        wire.arriving.insert(n % (len(wire.arriving) + 1), [encode(Submit(calls))])
        mailbox.receive(engine)
        assert not mailbox.stopped
        while engine.busy:
            engine.step()
        mailbox.flush(Load(engine.stats().kv_usage))
        answers = wire.answers()
        assert set(answers) == {good, good + 1}
        *chunks, (kind, last) = answers[good]
        assert {kind for kind, _ in chunks} <= {ItemKind.CHUNK}
        assert kind == ItemKind.DONE
        parts = [
            msgspec.msgpack.decode(p, type=TokenChunk) for p in (*(c for _, c in chunks), last)
        ]
        assert b"".join(part.ids for part in parts) == prompt * 3
        assert [kind for kind, _ in answers[good + 1]] == [ItemKind.DONE]
        assert not mailbox._held
        if n == rounds // 4:
            before = memory()
    assert memory() - before < GROWTH
    assert mailbox._drop.count > TO_ENGINE // 4


class Served(Actor):
    @endpoint
    async def echo(self, value: Any) -> Any:
        return value

    @endpoint
    async def sum_up(self, a: NDArray[np.float32], b: NDArray[np.float32]) -> float:
        total = a.sum() + b.sum()
        return float(total) if math.isfinite(total) else 0.0

    @endpoint
    async def join_bytes(self, data: bytes, names: list[str]) -> bytes:
        return data + "".join(names).encode()

    @endpoint
    async def count(self, to: int) -> AsyncIterator[int]:
        for n in range(min(to, 20)):
            yield n
            await asyncio.sleep(0)

    @endpoint
    async def fail(self, why: str) -> None:
        raise ValueError(why)


async def test_an_actors_mailbox() -> None:
    router = MemoryRouter()
    wire = Wire()
    router.start(lambda identity, frames: wire.send(frames))
    host = Host(Served(), endpoints_of(Served), router.connect(b"w"), 1 << 20)
    mutator = Mutator(to_worker())
    before = 0
    rounds = max(4, TO_ACTOR // BATCH)
    array, array_frames = ARRAY
    with nobody_raises():
        serving = asyncio.create_task(host.serve(8))
        await asyncio.sleep(0)
        for n in range(rounds):
            mutator.ids = [1, 2, n, n + 1, *list(host.running)[:5]]
            for at in range(BATCH):
                message = mutator.message()
                if not ends_the_worker(message):
                    router.send(b"w", message)
                if at == n % BATCH:
                    good = FIRST_GOOD + 3 * n
                    calls = [
                        CallMessage(good, "echo", raw([msgspec.Raw(array)]), 1),
                        CallMessage(good + 1, "count", raw([3])),
                        CallMessage(good + 2, "join_bytes", raw([0, ["a", "b"]]), 1),
                    ]
                    router.send(b"w", [encode(Submit(calls)), *array_frames, b"payload-"])
            await asyncio.sleep(0)
            answers: dict[int, list[tuple[int, bytes]]] = {}
            while sum(kind != ItemKind.CHUNK for one in answers.values() for kind, _ in one) < 3:
                wire.something.clear()
                for id_, items in wire.answers().items():
                    answers.setdefault(id_, []).extend(items)
                if len(answers) < 3 or answers[good + 1][-1][0] == ItemKind.CHUNK:
                    await wire.something.wait()
            assert set(answers) == {good, good + 1, good + 2}
            assert answers[good] == [(ItemKind.DONE, array)]
            done = (ItemKind.DONE, b"\xc0")
            counted = [(ItemKind.CHUNK, encode(i)) for i in range(3)]
            assert answers[good + 1] == [*counted, done]
            assert answers[good + 2] == [(ItemKind.DONE, encode(0))]
            if n == rounds // 4:
                before = memory()
        assert memory() - before < GROWTH
        assert host._drop.count > TO_ACTOR // 4
        router.send(b"w", [encode(Shutdown())])
        await serving
    assert asyncio.all_tasks() == {asyncio.current_task()}


async def test_a_call_that_comes_again_is_run_once() -> None:
    router = MemoryRouter()
    wire = Wire()
    router.start(lambda identity, frames: wire.send(frames))
    host = Host(Served(), endpoints_of(Served), router.connect(b"w"), 1 << 20)
    serving = asyncio.create_task(host.serve(8))
    await asyncio.sleep(0)
    calls = [CallMessage(FIRST_GOOD, "echo", raw([n])) for n in (1, 2)]
    router.send(b"w", [encode(Submit(calls))])
    router.send(b"w", [encode(Shutdown())])
    # This call arrives after the shutdown.
    router.send(b"w", [encode(Submit([CallMessage(FIRST_GOOD + 1, "echo", raw([3]))]))])
    await serving
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert wire.answers() == {FIRST_GOOD: [(ItemKind.DONE, encode(1))]}
    assert host._drop.count == 2
