"""Effects of new weights on running and waiting requests, checked token by token.

The tests run in SGLang's normal loop and in its overlapping loop, where a step begins before the
results of the last step are known.
"""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import pytest_asyncio
from engine.policies import (
    PROMPTS,
    Lab,
    collect,
    lab_of_four,
    until_draining,
    until_idle,
    until_running,
)

import sglrl

pytestmark = pytest.mark.asyncio(loop_scope="session")

LONG: dict[str, Any] = {"max_new_tokens": 300, "logprobs": True, "ignore_eos": True}
# These requests are so long that none finishes before an update comes, even on a slow machine.
ENDLESS = {**LONG, "max_new_tokens": 1900}
GREEDY: dict[str, Any] = {"temperature": 0, "top_logprobs": 3}


@pytest_asyncio.fixture(
    scope="module", loop_scope="session", params=[False, True], ids=["normal", "overlap"]
)
async def lab(request: pytest.FixtureRequest, models: Path) -> AsyncIterator[Lab]:
    async with lab_of_four(models, overlap=request.param) as lab:
        yield lab


# --- what happens to requests that are running ----------------------------------------------------


async def through_updates(lab: Lab, **how: Any) -> tuple[list[sglrl.Completion], int]:
    """Run generations, the last one streamed, through three updates and then abort them.

    Returns:
        The completions, and the version before the updates.
    """
    client = lab.client
    first = client.weight_version
    calls = [
        asyncio.ensure_future(client.generate(input_ids=prompt, **ENDLESS, **options))
        for prompt, options in zip(PROMPTS, ({}, GREEDY, {}), strict=False)
    ]
    stream = client.stream(input_ids=PROMPTS[3], **ENDLESS)
    seen = 0
    ids: list[int] = []
    versions: list[int] = []
    async for chunk in stream:
        ids += chunk.output_ids.tolist()
        versions += [chunk.version] * len(chunk.output_ids)
        if len(ids) >= 30 * (seen + 1) and seen < 3:
            seen += 1
            await lab.update(seen, **how)
        if seen == 3 and versions.count(first + 3) >= 30:
            seen += 1
            await client.abort()
    streamed = stream.completion
    assert streamed.output_ids.tolist() == ids
    assert [v for s in streamed.versions for v in [s.version] * (s.stop - s.start)] == versions
    return [*await asyncio.gather(*calls), streamed], first


@pytest.mark.parametrize("mode", ["full", "bucketed"])
@pytest.mark.parametrize("inflight", ["continue", "retract"])
async def test_a_generation_through_three_updates(lab: Lab, inflight: str, mode: str) -> None:
    await lab.update(0)
    completions, first = await through_updates(
        lab, inflight=inflight, mode=mode, bucket_bytes=1 << 16
    )
    again = inflight == "retract"
    for completion in completions:
        assert completion.finish_reason == "abort"
        assert [s.version for s in completion.versions] == [first + i for i in range(4)]
        lab.check_history(completion, again=again)
        # The two histories differ, so the test distinguishes them.
        other = np.abs(lab.expected(completion, again=not again) - completion.logprobs)
        assert other[completion.versions[1].start :].max() > 100 * lab.tolerance
    greedy = completions[1]
    top = greedy.top_logprobs
    assert top.ids.shape == (len(greedy.output_ids), 3)
    assert top.ids[:, 0].tolist() == greedy.output_ids.tolist()
    np.testing.assert_allclose(top.logprobs[:, 0], greedy.logprobs, atol=lab.tolerance, rtol=0)
    await lab.check()


async def test_abort_returns_what_there_is(lab: Lab) -> None:
    client = lab.client
    old = client.weight_version
    await until_idle(client)
    streamed = asyncio.ensure_future(collect(client.stream(input_ids=PROMPTS[1], **ENDLESS)))
    await until_running(client, 1)
    # Three more requests run, and two wait in the engine.
    calls = [
        asyncio.ensure_future(client.generate(input_ids=[*PROMPTS[2], i], **ENDLESS))
        for i in range(5)
    ]
    await until_running(client, 4)
    await until_waiting(client, 2)
    report = await lab.other(inflight="abort")
    assert report.version == old + 1
    *running, fifth, sixth = [await streamed, *await asyncio.gather(*calls)]
    for completion in running:
        assert completion.finish_reason == "abort"
        assert 0 < len(completion.output_ids) < ENDLESS["max_new_tokens"]
        assert [s.version for s in completion.versions] == [old]
        lab.check_history(completion)
    for completion in (fifth, sixth):
        assert completion.finish_reason == "abort"
        assert len(completion.output_ids) == 0
        assert completion.versions == ()
    await lab.check()


@pytest.mark.parametrize("mode", ["full", "bucketed"])
async def test_drain_lets_them_end(lab: Lab, mode: str) -> None:
    client = lab.client
    old = client.weight_version
    some = {**LONG, "max_new_tokens": 900}
    running = [asyncio.ensure_future(client.generate(input_ids=p, **some)) for p in PROMPTS[:2]]
    await until_running(client, 2)
    # Draining has its own timeout.
    update = asyncio.ensure_future(lab.other(inflight="drain", mode=mode, timeout=0.7))
    await until_draining(client)
    meanwhile = asyncio.ensure_future(
        client.generate(input_ids=PROMPTS[3], max_new_tokens=20, logprobs=True)
    )
    cancelled = asyncio.ensure_future(client.generate(input_ids=PROMPTS[3], **LONG))
    await until_draining(client, held=2)
    cancelled.cancel()
    with pytest.raises(asyncio.CancelledError):
        await cancelled
    report = await update
    assert report.version == old + 1
    for completion in await asyncio.gather(*running):
        assert completion.finish_reason == "length"
        assert completion.versions == ((0, some["max_new_tokens"], old),)
        lab.check_history(completion)
    late = await meanwhile
    assert [s.version for s in late.versions] == [old + 1]
    lab.check_history(late)
    await lab.check()
    assert (await client.stats())[0].engine.running == 0


async def test_calls_that_come_and_go_in_one_look_of_a_draining_worker(lab: Lab) -> None:
    """Cancelled calls never run, neither during the drain nor with the new weights."""
    client = lab.client
    await until_idle(client)
    before = (await client.stats())[0].engine.generated_tokens
    worker = psutil.Process(client.workers[0].pid)
    running = asyncio.ensure_future(client.generate(input_ids=PROMPTS[2], **ENDLESS))
    await until_running(client, 1)
    update = asyncio.ensure_future(lab.other(inflight="drain", mode="bucketed"))
    await until_draining(client)
    worker.suspend()
    try:
        started = [
            *(client.generate(input_ids=[*PROMPTS[3], i], **LONG) for i in range(4)),
            client.score(PROMPTS[3]),
            client.next_token_logprobs(PROMPTS[3]),
        ]
        calls = [asyncio.ensure_future(call) for call in started]
        while client.workers[0].load < 1 + len(calls):
            await asyncio.wait(calls, timeout=0.01)
        for call in calls:
            call.cancel()
        ended = await asyncio.gather(*calls, return_exceptions=True)
    finally:
        worker.resume()
    assert all(isinstance(e, asyncio.CancelledError) for e in ended), ended
    await running
    await update
    await until_idle(client)
    made = (await client.stats())[0].engine.generated_tokens - before
    assert made == ENDLESS["max_new_tokens"]
    await lab.check()


@pytest.mark.parametrize("mode", ["full", "bucketed"])
async def test_a_drain_that_takes_too_long_is_given_up(lab: Lab, mode: str) -> None:
    client = lab.client
    old = client.weight_version
    calls = [asyncio.ensure_future(client.generate(input_ids=p, **ENDLESS)) for p in PROMPTS[:2]]
    await until_running(client, 2)
    with pytest.raises(sglrl.WeightUpdateError, match=r"drain_timeout=0\.2 seconds"):
        await lab.other(inflight="drain", mode=mode, drain_timeout=0.2)
    late = await client.generate(input_ids=PROMPTS[3], max_new_tokens=4)
    assert late.versions[0].version == old
    assert not any(call.done() for call in calls)
    for call in calls:
        call.cancel()
    await asyncio.wait(calls)
    assert [w.state for w in client.workers] == ["ready"]
    await lab.other(inflight="drain", mode=mode)
    await lab.check()


@pytest.mark.parametrize("mode", ["full", "bucketed"])
async def test_a_drain_that_is_given_up_lets_new_calls_run(lab: Lab, mode: str) -> None:
    client = lab.client
    old = client.weight_version
    running = asyncio.ensure_future(client.generate(input_ids=PROMPTS[2], **ENDLESS))
    await until_running(client, 1)
    update = asyncio.ensure_future(lab.other(inflight="drain", mode=mode))
    await until_draining(client)
    meanwhile = asyncio.ensure_future(
        client.generate(input_ids=PROMPTS[3], max_new_tokens=4, logprobs=True)
    )
    await until_draining(client, held=1)
    assert not meanwhile.done()
    update.cancel()
    late = await asyncio.wait_for(meanwhile, 300)
    # The long request still runs.
    assert (await client.stats())[0].engine.running > 0
    with pytest.raises(asyncio.CancelledError):
        await update
    assert late.versions[0].version == old
    lab.check_history(late)
    assert (await running).versions == ((0, ENDLESS["max_new_tokens"], old),)
    await lab.other(inflight="drain", mode=mode)
    await lab.check()


# --- KV cache -------------------------------------------------------------------------------------


async def test_no_kv_of_other_versions_is_used(lab: Lab) -> None:
    client = lab.client
    prompt = [7 + (3 * i) % 400 for i in range(90)]
    wanted = {"max_new_tokens": 8, "logprobs": True, "temperature": 0, "ignore_eos": True}
    for expected in (0, 1):
        made = await client.generate(input_ids=prompt, **wanted)
        assert (made.cached_tokens > 0) == expected
    for _ in range(2):
        await lab.other()
        for expected in (0, 1):
            made = await client.generate(input_ids=prompt, **wanted)
            assert (made.cached_tokens > 0) == expected
            lab.check_history(made)
        ids = [*prompt, *made.output_ids.tolist()]
        scores = await client.score(ids, start=len(prompt))
        np.testing.assert_allclose(scores, made.logprobs, atol=2 * lab.tolerance, rtol=0)


@pytest.mark.parametrize("inflight", ["continue", "retract"])
async def test_requests_that_waited_in_the_engine_use_no_old_kv(lab: Lab, inflight: str) -> None:
    client = lab.client
    prompt = [11 + (7 * i) % 300 for i in range(80)]
    old = client.weight_version
    warm = await client.generate(input_ids=prompt, max_new_tokens=4)
    assert warm.versions[0].version == old
    await until_idle(client)
    running = [
        asyncio.ensure_future(client.generate(input_ids=[5, 6, 7, i], **LONG)) for i in range(4)
    ]
    await until_running(client, 4)
    waiting = [
        asyncio.ensure_future(
            client.generate(input_ids=prompt, max_new_tokens=8, logprobs=True, seed=i)
        )
        for i in range(3)
    ]
    await until_waiting(client, 3)
    await lab.other(inflight=inflight)
    for completion in await asyncio.gather(*running):
        assert [s.version for s in completion.versions] == [old, old + 1]
        lab.check_history(completion, again=inflight == "retract")
    for completion in await asyncio.gather(*waiting):
        assert [s.version for s in completion.versions] == [old + 1]
        lab.check_history(completion)


def slow_grammars() -> list[dict[str, Any]]:
    """Return arguments of calls that wait in the engine for their grammars.

    The grammars are new and take long to compile.
    """
    kinds = itertools.count(next(_grammars) * 1000)

    def schema(kind: int) -> str:
        keys = [f"k{j}_{kind}" for j in range(120)]
        strings = [{"type": "string", "maxLength": 2 + j % 5} for j in range(len(keys))]
        found = {"type": "object", "properties": dict(zip(keys, strings, strict=True))}
        return json.dumps(found | {"required": keys})

    prompt = [9 + (11 * i) % 300 for i in range(80)]
    wanted = {"max_new_tokens": 6, "logprobs": True, "temperature": 0, "input_ids": prompt}
    return [wanted | {"json_schema": schema(next(kinds))} for _ in range(32)]


_grammars = itertools.count()


async def until_waiting(client: sglrl.Client, count: int) -> None:
    async with asyncio.timeout(300):
        while (await client.stats())[0].engine.waiting < count:
            pass


@pytest.mark.parametrize("inflight", ["continue", "retract"])
async def test_requests_that_waited_for_their_grammar_use_no_old_kv(
    lab: Lab, inflight: str
) -> None:
    client = lab.client
    await until_idle(client)
    old = client.weight_version
    wanted = slow_grammars()
    warm = await client.generate(input_ids=wanted[0]["input_ids"], max_new_tokens=4)
    assert warm.versions[0].version == old
    calls = [asyncio.ensure_future(client.generate(**one)) for one in wanted]
    # There are so many calls that the last ones still wait when the update has come.
    await until_waiting(client, 24)
    await lab.other(inflight=inflight)
    made = await asyncio.gather(*calls)
    late = [i for i, m in enumerate(made) if m.versions[0].version == old + 1]
    assert late
    if inflight == "continue":
        # A late call recomputes the prompt. With "retract" the calls that ran have done so.
        assert any(made[i].cached_tokens == 0 for i in late)
    for i in late[-4:]:
        again = await client.generate(**wanted[i])
        assert made[i].output_ids.tolist() == again.output_ids.tolist()
        np.testing.assert_allclose(made[i].logprobs, again.logprobs, atol=2 * lab.tolerance, rtol=0)


@pytest.mark.parametrize("how", ["update", "abort"])
async def test_requests_that_wait_for_their_grammar_are_returned_empty(lab: Lab, how: str) -> None:
    client = lab.client
    await until_idle(client)
    calls = [asyncio.ensure_future(client.generate(**one)) for one in slow_grammars()]
    await until_waiting(client, 24)
    if how == "update":
        await lab.other(inflight="abort")
    else:
        await client.abort()
    made = await asyncio.gather(*calls)
    returned = [m for m in made if m.finish_reason == "abort"]
    assert any(len(m.output_ids) == 0 for m in returned)
    # No call has a token that its grammar forbids: the first token can only be a brace.
    texts = {m.text[:1] for m in returned}
    assert texts <= {"", "{"}
    await lab.check(PROMPTS[:1], 4)
