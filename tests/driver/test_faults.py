"""A short run of ``bench.faults``, which usually runs for minutes, with the same code.

Also checks that it detects wrong answers.
"""

from __future__ import annotations

import asyncio
import os
import signal

import msgspec
import numpy as np
import pytest

import sglrl
from bench.fault_cases import CASES
from bench.fault_load import Answer, Load, Outcomes, Prompt
from bench.fault_schedule import FATAL, schedule
from bench.faults import measure
from bench.soak import POOLS, Sample, Soak, growth
from sglrl.core.calls import Call
from sglrl.inference.replies import GenerationReply


async def test_no_call_is_lost_duplicated_or_wrong_under_faults() -> None:
    case = CASES["fake"]._replace(replicas=6, faults=30, gap=0.2, in_flight=24)
    found = await measure(lambda text: None, case=case, model="fake", seed=5)
    assert found["flawless"], (found["reasons"], found["troubles"])
    assert sum(found["faults"].values()) == 30
    assert set(found["faults"]) == set(case.shares)
    assert found["answered"] == found["submitted"] > 100
    # The faults hit running calls, and every worker that they killed was replaced.
    assert found["resumed"]
    assert found["first_ms"]["kill"]["count"]
    for kind in FATAL:
        assert found["back_ms"].get(kind, {}).get("count", 0) == found["faults"].get(kind, 0)


def test_a_schedule_depends_on_its_seed_alone() -> None:
    shares = CASES["fake"].shares
    assert schedule(3, 200, 0.5, shares) == schedule(3, 200, 0.5, shares)
    assert schedule(3, 200, 0.5, shares) != schedule(4, 200, 0.5, shares)
    assert {fault.kind for fault in schedule(3, 200, 0.5, shares)} == set(shares)


PROMPTS = [
    Prompt([i + 3, 7], {"max_new_tokens": 8, "temperature": 0, "ignore_eos": True})
    for i in range(4)
]


def answer(prompt: Prompt) -> Answer:
    logprobs = -(np.arange(8, dtype=np.float32) + 1) / 1024
    return Answer(np.resize(np.array(prompt.ids, dtype=np.int32), 8), logprobs, "length")


async def outcomes_of(
    prompts: list[Prompt], answers: list[Answer], *, kill: bool = False
) -> Outcomes:
    """Run three rounds of prompts, as calls and as streams, and return the outcomes."""
    async with sglrl.launch(
        "fake", engine="fake", restarts=0, tokens_per_step=3, step_seconds=0.001
    ) as client:
        load = Load(client, prompts, answers, in_flight=len(prompts), tolerance=0.0)
        running = asyncio.ensure_future(load.run())
        while load.outcomes.submitted < 3 * len(prompts):
            await client.stats()
        if kill:
            os.kill(client.workers[0].pid, signal.SIGKILL)
            while not load.outcomes.lost:
                await asyncio.to_thread(bool)
        load.stop()
        await running
        return load.outcomes


async def test_the_outcomes_tell_what_is_wrong() -> None:
    good = [answer(prompt) for prompt in PROMPTS]
    outcomes = await outcomes_of(PROMPTS, good)
    assert outcomes.flawless, outcomes
    assert 0 < outcomes.streams < outcomes.answered
    changed = [
        good[0]._replace(ids=good[0].ids[::-1].copy()),
        good[1]._replace(logprobs=good[1].logprobs + np.float32(1e-6)),
        good[2]._replace(finish="stop"),
        good[3],
    ]
    outcomes = await outcomes_of(PROMPTS, changed)
    assert not outcomes.flawless
    assert 6 <= outcomes.wrong < outcomes.answered
    assert {reason.partition(":")[0] for reason in outcomes.reasons} == {
        "wrong ids",
        "wrong logprobs",
        "wrong finish reason",
    }
    shorter = [a._replace(ids=a.ids[:7], logprobs=a.logprobs[:7]) for a in good]
    outcomes = await outcomes_of(PROMPTS, shorter)
    assert outcomes.duplicated == outcomes.answered
    longer = [a._replace(ids=np.append(a.ids, a.ids[:1])) for a in good]
    outcomes = await outcomes_of(PROMPTS, longer)
    assert outcomes.wrong == outcomes.answered


async def test_the_outcomes_tell_what_is_lost() -> None:
    outcomes = await outcomes_of(PROMPTS, [answer(prompt) for prompt in PROMPTS], kill=True)
    assert outcomes.lost
    assert not outcomes.flawless
    assert outcomes.submitted == outcomes.answered + outcomes.lost
    assert all(reason.startswith("WorkerLost") for reason in outcomes.reasons)


async def test_the_outcomes_tell_of_a_call_that_ends_twice() -> None:
    async with sglrl.launch("fake", engine="fake") as client:
        load = Load(client, PROMPTS, [answer(p) for p in PROMPTS], in_flight=1, tolerance=0.0)
        future: asyncio.Future[sglrl.Completion] = asyncio.get_running_loop().create_future()
        reply = GenerationReply(lambda ids, skip: "", future, b"", None, False, 0)  # type: ignore[arg-type]
        call = Call("generate", msgspec.Raw(b""), reply)
        with load.count_ends():
            reply.end(call, sglrl.Closed("once"), ())
            assert load.outcomes.duplicated == 0
            reply.end(call, sglrl.Closed("twice"), ())
        assert load.outcomes.duplicated == 1
        with pytest.raises(sglrl.Closed, match="once"):
            await future


async def test_a_soak_measures_every_process() -> None:
    case = POOLS[0]._replace(gap=0.4)
    soak = Soak((case,), 0.05, 1)
    notes: list[str] = []
    await soak.run(0.1, notes.append)
    assert len(notes) > 10
    assert soak.loads["fake"].outcomes.flawless
    assert soak.strikers["fake"].strikes
    assert {strike.worker for strike in soak.strikers["fake"].strikes} <= {1, 2, 3}
    assert set(soak.early) == {"deadline", "cancelled", "stream left"}
    # Start at a sample, not at a time: after a short stall of the machine a sample may come late.
    rows = soak.rows(soak.samples["driver"][2].minute)
    assert {"driver", "fork server (plain)"} < set(rows)
    assert any(name.startswith("fake worker 0") for name in rows)
    assert all(row["rss_mb"][0] > 0 for row in rows.values())


def test_growth_is_found() -> None:
    soak = Soak(POOLS, 1.0, 0)
    soak.samples["steady"] = [Sample(i / 60, 50.0 + i % 2, 30.0, 10 + i % 3, 4) for i in range(60)]
    soak.samples["leaky"] = [
        Sample(i / 60, 50.0 + i / 60, 30.0 + i / 120, 10 + i // 10, 4) for i in range(60)
    ]
    soak.samples["short-lived"] = soak.samples["leaky"][:20]
    rows = soak.rows(0.1)
    assert set(rows) == {"steady", "leaky"}
    assert rows["leaky"]["mb_per_minute"] == pytest.approx(1.0)
    assert rows["leaky"]["own_mb_per_minute"] == pytest.approx(0.5)
    assert abs(rows["steady"]["mb_per_minute"]) < 0.1
    assert [text.partition(":")[0] for text in growth(rows)] == ["leaky"]
