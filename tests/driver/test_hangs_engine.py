"""A real engine that hangs is detected. A busy engine is not mistaken for a hung engine."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
from engine.policies import gated, until_running
from engine.reference import Reference

import sglrl
from sglrl.core.hangs import PREFILL, WEIGHTS
from sglrl.launching.tiny_model import make_model

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.alone]

HANG_TIMEOUT = 1.0
CONTEXT = 32_768


@pytest.fixture(autouse=True)
def no_worker_is_left() -> None:
    """Accept other processes after a test: the pool of this module replaces its workers."""


@pytest.fixture(scope="module")
def model(models: Path) -> Path:
    return make_model(models / "long", context_length=CONTEXT)


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def pair(model: Path) -> AsyncIterator[sglrl.Client]:
    async with sglrl.launch(
        model, device="cpu", replicas=2, hang_timeout=HANG_TIMEOUT, chunked_prefill_size=-1
    ) as client:
        yield client


class Stillness:
    """Measures how long a worker makes no progress in a phase, according to its heartbeats."""

    def __init__(self, client: sglrl.Client, worker: int, phase: str) -> None:
        monitor = client.pool._supervisor.monitor
        assert monitor._detector is not None
        self._detector: Any = monitor._detector
        self._worker = worker
        self._phase = phase
        self._begun: tuple[int, float] | None = None
        self.longest = 0.0
        self.too_long = asyncio.Event()
        """Set when the worker makes no progress for longer than another phase allows."""

    def __enter__(self) -> Stillness:
        self._heartbeat: Callable[..., None] = self._detector.heartbeat
        self._detector.heartbeat = self._seen
        return self

    def __exit__(self, *exc: object) -> None:
        del self._detector.heartbeat

    def _seen(self, worker: int, progress: int, phase: str, now: float) -> None:
        self._heartbeat(worker, progress, phase, now)
        if worker != self._worker:
            return
        if phase != self._phase:
            self._begun = None
        elif self._begun is None or self._begun[0] != progress:
            self._begun = (progress, now)
        else:
            self.longest = max(self.longest, now - self._begun[1])
            if self.longest > 2 * HANG_TIMEOUT:
                self.too_long.set()


async def test_a_long_prefill_is_no_hang(pair: sglrl.Client) -> None:
    pids = [worker.pid for worker in pair.workers]
    # On a fast machine only the longest prompts take long enough. On a busy one they take longer
    # than even a prefill may, so the shortest that suffice end the test.
    for begin, share in enumerate((16, 8, 4, 2, 1)):
        length = CONTEXT // share - 100
        prompts = [[(7 * i + begin + 10 * k) % 500 for i in range(length)] for k in range(2)]
        with Stillness(pair, 1, PREFILL) as stillness:
            made = await pair.generate(
                input_ids=prompts, max_new_tokens=2, temperature=0, ignore_eos=True, worker=1
            )
        assert [len(completion.output_ids) for completion in made] == [2, 2]
        if stillness.longest > HANG_TIMEOUT:
            break
    assert stillness.longest > HANG_TIMEOUT, "this machine is too fast for the test to say anything"
    assert [worker.pid for worker in pair.workers] == pids


async def test_a_held_engine_is_no_hang(pair: sglrl.Client, model: Path) -> None:
    pids = [worker.pid for worker in pair.workers]
    calls = [
        asyncio.ensure_future(
            pair.generate(input_ids=[5, 6, i], max_new_tokens=400, temperature=0, ignore_eos=True)
        )
        for i in range(4)
    ]
    await until_running(pair, 4)
    weights, gate = gated(dict(Reference(model).model.state_dict()))
    with Stillness(pair, 0, WEIGHTS) as stillness:
        update = asyncio.ensure_future(
            pair.update_weights(weights, mode="bucketed", bucket_bytes=1 << 14)
        )
        async with asyncio.timeout(300):
            await stillness.too_long.wait()
        gate.open()
        report = await update
    assert report.workers == [0, 1]
    for completion in await asyncio.gather(*calls):
        assert len(completion.output_ids) == 400
        assert completion.resumed == 0
    assert [worker.pid for worker in pair.workers] == pids


async def test_an_engine_that_stops_in_mid_decode(
    pair: sglrl.Client, model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    reference = Reference(model)
    wanted: dict[str, Any] = {
        "max_new_tokens": 150,
        "temperature": 0,
        "ignore_eos": True,
        "logprobs": True,
    }
    calls = [asyncio.ensure_future(pair.generate(input_ids=[9, 8, i], **wanted)) for i in range(4)]
    stream = pair.stream(input_ids=[9, 8, 7], **wanted)
    ids: list[int] = []
    victim = -1
    async for chunk in stream:
        ids += chunk.output_ids.tolist()
        if victim < 0 and len(ids) > 20:
            victim = next(
                worker.id
                for worker in pair.workers
                if any(
                    call.stream
                    for call in pair.pool.driver.fabric.members[worker.id].calls.values()
                )
            )
            os.kill(pair.workers[victim].pid, signal.SIGSTOP)
    made = [stream.completion, *await asyncio.gather(*calls)]
    assert ids == made[0].output_ids.tolist()
    assert made[0].resumed == 1
    assert made[0].worker != victim
    for completion in made:
        assert len(completion.output_ids) == 150
        rows = reference.logprobs(np.concatenate([completion.prompt_ids, completion.output_ids]))
        rows = rows[len(completion.prompt_ids) - 1 : -1]
        assert rows.argmax(axis=1).tolist() == completion.output_ids.tolist()
    reports = [r.getMessage() for r in caplog.records if " hangs: " in r.getMessage()]
    assert len(reports) == 1
    assert f"worker {victim} hangs: no heartbeat for" in reports[0]
    await pair.wait_until_full()
    assert {worker.state for worker in pair.workers} == {"ready"}
