"""Every message that a worker, a rank, a sender or a stranger may send to the driver."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import numpy as np

from sglrl.client.client import Client
from sglrl.core.invariants import validate
from sglrl.errors import SglrlError
from sglrl.inference.completion import Completion
from sglrl.weights.update_report import UpdateReport
from sglrl.weights.update_request import UpdateRequest
from sglrl.wire.weights import rank_identity

from .harness import Pool, Rank, memory, nobody_raises
from .mutator import FRAMES, Mutator
from .samples import SPECS, from_client, from_rank, to_driver, to_rank, to_worker

MESSAGES = FRAMES * 6 // 10
ROUND = 400
GROWTH = 64 << 20


class Attack:
    """Makes mutated messages, and chooses the senders they come from."""

    def __init__(self, pool: Pool, client: Client) -> None:
        self.pool = pool
        self.of_worker = Mutator(to_driver())
        self.of_rank = Mutator(from_rank())
        self.of_client = Mutator(from_client())
        self.of_anyone = Mutator(
            [*to_driver(), *from_rank(), *from_client(), *to_worker(), *to_rank()]
        )
        self.random = self.of_worker.random
        token = pool.weights.address.partition("#")[2].encode()
        self.senders = [b"sender/%s/%d" % (token, n) for n in range(40)]
        server = client._server
        assert server is not None
        self.server = server
        secret = server.address.partition("#")[2].encode()
        self.clients = [b"client/%s/%d" % (secret, n) for n in range(4)]
        self.strangers = [
            b"",
            b"0",
            b"\0" * 5,
            b"x" * 255,
            b"sender/%s" % token[:-1],
            b"sender//",
            b"client//",
        ]
        for identity in self.senders[:2]:
            Rank(pool.router.connect(identity))
        for identity in self.clients[:2]:
            pool.router.connect(identity).start(lambda frames: None)

    def strike(self) -> None:
        """Deliver one message."""
        pool, random = self.pool, self.random
        how = random.random()
        if how < 0.5:
            identity, mutator = pool.bad_identity, self.of_worker
        elif how < 0.75:
            identity, mutator = rank_identity(pool.bad_identity, 0), self.of_rank
        elif how < 0.83:
            identity, mutator = random.choice(self.senders), self.of_rank
        elif how < 0.93:
            identity, mutator = random.choice(self.clients), self.of_client
            if identity not in self.server._peers:
                pool.router.take(identity, self.of_client.samples[0])
        else:
            identity, mutator = random.choice(self.strangers), self.of_anyone
        if random.random() < 0.02:
            mutator = self.of_anyone
        pool.router.take(identity, mutator.message())

    def know(self, ids: list[int]) -> None:
        for mutator in (self.of_worker, self.of_rank, self.of_client, self.of_anyone):
            mutator.ids = ids


async def test_who_behaves_is_served_as_if_alone() -> None:
    pool = Pool(2)
    with nobody_raises():
        async with pool.client() as client:
            attack = Attack(pool, client)
            before = 0
            rounds = max(4, MESSAGES // ROUND)
            for n in range(rounds):
                await one_round(pool, client, attack, n)
                if n == rounds // 4:
                    before = memory()
            assert memory() - before < GROWTH
            assert pool.driver.dropped.count > MESSAGES // 4
            assert pool.driver.fabric.stray_items > MESSAGES // 100
    # The tasks that were deferred because of the bad worker are done, too.
    assert asyncio.all_tasks() == {asyncio.current_task()}


async def one_round(pool: Pool, client: Client, attack: Attack, n: int) -> None:
    good = asyncio.gather(*(honest_work(client, worker, n) for worker in range(pool.bad)))
    spoiled = [asyncio.ensure_future(work) for work in work_at(client, pool.bad)]
    update = asyncio.ensure_future(
        pool.weights.updates.update(UpdateRequest(specs=SPECS, partial=n % 2 == 0), pool.source)
    )
    for at in range(ROUND):
        if at % 40 == 0:
            run = pool.weights.updates.run
            ids = [*pool.bad_worker.held, *pool.driver.fabric.calls]
            attack.know([*ids, pool.weights._ranks.last_id, 1 if run is None else run.id])
            await asyncio.sleep(0)
        attack.strike()
    while not all(task.done() for task in spoiled):
        pool.bad_worker.work()
        await asyncio.sleep(0)
    await good
    for peer in list(attack.server._peers.values()):
        attack.server._forget(peer)
    pool.bad_worker.work()
    await asyncio.sleep(0)
    for task in spoiled:
        check_spoiled(task)
    with contextlib.suppress(SglrlError):
        assert isinstance(await update, UpdateReport)
    if n % 8 == 7:
        pool.replace_bad()
        await pool.enter()
    validate(pool.driver.fabric)
    assert not pool.driver.fabric.calls
    assert not pool.driver._raw
    assert len(pool.weights._senders) <= 16


async def honest_work(client: Client, worker: int, n: int) -> None:
    """Request whole answers, streams and scores, and check that all are right."""
    prompt = [n % 1000, worker, 7]
    made = await client.generate(
        input_ids=prompt, max_new_tokens=3, logprobs=True, n=3, worker=worker
    )
    for completion in made:
        assert completion.worker == worker
        assert completion.output_ids.tolist() == prompt
        assert completion.logprobs is not None
        assert completion.logprobs.tobytes() == completion.output_ids.tobytes()
        assert completion.finish_reason == "length"
    stream = client.stream(input_ids=prompt, max_new_tokens=3, worker=worker)
    assert [chunk.output_ids.tolist() async for chunk in stream] == [prompt[:1], prompt[1:]]
    scores = await client.score(prompt, start=1, worker=worker)
    assert scores.tolist() == [0.0, 0.0]


def work_at(client: Client, worker: int) -> list[Any]:
    async def streamed() -> Completion:
        stream = client.stream(input_ids=[5, 6], max_new_tokens=2, logprobs=True, worker=worker)
        async for chunk in stream:
            assert chunk.logprobs is not None
            assert len(chunk.output_ids) == len(chunk.logprobs)
        return stream.completion

    async def sampled(top: int) -> Any:
        return await client.generate(
            input_ids=[8], max_new_tokens=1, logprobs=True, top_logprobs=top, worker=worker
        )

    return [sampled(0), sampled(0), sampled(2), streamed(), client.score([1, 2], worker=worker)]


def check_spoiled(task: asyncio.Future[Any]) -> None:
    """Check that the task has a consistent answer, or an ``SglrlError``."""
    error = task.exception()
    if error is not None:
        assert isinstance(error, SglrlError), error
        return
    result = task.result()
    if isinstance(result, Completion):
        assert result.logprobs is not None
        assert len(result.output_ids) == len(result.logprobs)
        assert sum(span.stop - span.start for span in result.versions) == len(result.output_ids)
        assert isinstance(result.finish_reason, str)
        assert repr(result)
    else:
        assert isinstance(result, np.ndarray)
        assert len(result) == 2
