"""Pause, resume and abort calls with a real engine, in both of SGLang's loops."""

from __future__ import annotations

import asyncio
import textwrap
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
from engine.policies import PROMPTS, Lab, lab_of_four, until_idle, until_running
from readme import DOCS, example

import sglrl

pytestmark = pytest.mark.asyncio(loop_scope="session")

# These requests are so long that none finishes before the test ends it, even on a slow machine.
ENDLESS: dict[str, Any] = {
    "max_new_tokens": 1900,
    "logprobs": True,
    "top_logprobs": 2,
    "ignore_eos": True,
}
SHORT: dict[str, Any] = {**ENDLESS, "max_new_tokens": 20}


@pytest_asyncio.fixture(
    scope="module", loop_scope="session", params=[False, True], ids=["normal", "overlap"]
)
async def lab(request: pytest.FixtureRequest, models: Path) -> AsyncIterator[Lab]:
    async with lab_of_four(models, overlap=request.param) as lab:
        yield lab


@pytest_asyncio.fixture(autouse=True, loop_scope="session")
async def at_rest(lab: Lab) -> AsyncIterator[None]:
    """Clean up after each test, so that a failed test leaves no calls for the next one."""
    yield
    await lab.client.resume()
    await lab.client.abort()
    await until_idle(lab.client)


async def until_grown(client: sglrl.Client) -> None:
    """Wait until the running requests have made some steps."""
    (first,) = await client.stats()
    while (await client.stats())[0].engine.kv_tokens < first.engine.kv_tokens + 20:
        pass


def begin(client: sglrl.Client, count: int, wanted: dict[str, Any]) -> list[Any]:
    return [
        asyncio.ensure_future(client.generate(input_ids=[*PROMPTS[i % 4], i], **wanted))
        for i in range(count)
    ]


async def standing(client: sglrl.Client) -> sglrl.EngineStats:
    """Return the engine's stats, after checking that they do not change while it is paused."""
    # A cancelled request leaves the engine in the next turn of its loop.
    await client.stats()
    (first,) = await client.stats()
    for _ in range(20):
        (again,) = await client.stats()
        assert again.engine.kv_tokens == first.engine.kv_tokens
        assert again.engine.running == first.engine.running
        assert again.engine.waiting == first.engine.waiting
    return first.engine


def check(lab: Lab, completion: sglrl.Completion, *, again: bool = False) -> None:
    """Check the history of a completion, unless it has no tokens."""
    if len(completion.output_ids):
        lab.check_history(completion, again=again)


async def test_an_engine_that_cannot_sleep(lab: Lab) -> None:
    with pytest.raises(sglrl.UsageError, match=r"only after launch\(enable_memory_saver=True\)"):
        await lab.client.sleep()


@pytest.mark.parametrize("mode", ["in_place", "retract"])
async def test_what_runs_goes_on(lab: Lab, mode: Any) -> None:
    client = lab.client
    assert await client.flush_cache()
    calls = begin(client, 5, ENDLESS)
    await until_running(client, 4)
    await until_grown(client)
    for _ in range(3):
        # The engine sends its last answer before its next step, so the pause comes between.
        await client.pause(mode)
        stats = await standing(client)
        if mode == "in_place":
            assert (stats.running, stats.waiting) == (4, 1)
            assert stats.kv_tokens > 0
        else:
            assert (stats.running, stats.waiting) == (0, 5)
            assert stats.kv_tokens == 0
        await client.pause(mode)
        await client.resume()
    await client.pause(mode)
    later = begin(client, 2, SHORT)
    scored = asyncio.ensure_future(client.score(PROMPTS[0]))
    asked = asyncio.ensure_future(client.next_token_logprobs(PROMPTS[0]))
    with pytest.raises(sglrl.DeadlineExceeded):
        await client.generate(input_ids=PROMPTS[0], timeout=0.2)
    await standing(client)
    assert not any(call.done() for call in [*calls, *later, scored, asked])
    assert not await client.flush_cache()
    calls.pop().cancel()
    await client.resume()
    await client.resume()
    await until_running(client, 4)
    await until_grown(client)
    calls.pop().cancel()
    for completion in await asyncio.gather(*later):
        assert completion.finish_reason == "length"
        lab.check_history(completion)
    await client.abort()
    for completion in await asyncio.gather(*calls):
        assert completion.finish_reason == "abort"
        assert len(completion.output_ids) > 10
        lab.check_history(completion)
    assert len(await scored) == len(PROMPTS[0])
    assert (await asked).logprobs.shape == (client.info.vocab_size,)
    assert client.workers[0].load == 0


@pytest.mark.parametrize("paused", ["", "in_place", "retract"])
async def test_abort_returns_what_there_is(lab: Lab, paused: Any) -> None:
    client = lab.client
    calls = begin(client, 6, ENDLESS)
    await until_running(client, 4)
    if paused:
        await client.pause(paused)
    scored = asyncio.ensure_future(client.score(PROMPTS[0]))
    fresh = begin(client, 1, ENDLESS)
    await asyncio.sleep(0)
    assert await client.abort() == 7
    made = await asyncio.gather(*calls, *fresh)
    if paused:
        # The engine is still paused: only the aborted calls have finished.
        await standing(client)
        assert not scored.done()
        assert await client.abort() == 0
        await client.resume()
    for completion in made:
        assert completion.finish_reason == "abort"
        assert len(completion.logprobs) == len(completion.output_ids) < ENDLESS["max_new_tokens"]
        assert len(completion.top_logprobs.ids) == len(completion.output_ids)
        check(lab, completion)
    lengths = [len(c.output_ids) for c in made]
    assert min(lengths[:4]) > 0
    assert lengths[4:] == [0, 0, 0]
    assert len(await scored) == len(PROMPTS[0])
    await lab.check()


@pytest.mark.parametrize("before", ["", "in_place", "retract"])
async def test_pausing_with_abort(lab: Lab, before: Any) -> None:
    client = lab.client
    calls = begin(client, 6, ENDLESS)
    await until_running(client, 4)
    if before:
        await client.pause(before)
    await client.pause("abort")
    for completion in await asyncio.gather(*calls):
        assert completion.finish_reason == "abort"
        check(lab, completion)
    (later,) = begin(client, 1, SHORT)
    stats = await standing(client)
    assert stats.running == 0
    assert not later.done()
    await client.resume()
    lab.check_history(await later)
    # Resuming at once need not wait for the calls that are being aborted.
    calls = begin(client, 6, ENDLESS)
    await until_running(client, 4)
    await asyncio.gather(client.pause("abort"), client.resume())
    assert {c.finish_reason for c in await asyncio.gather(*calls)} == {"abort"}
    await lab.check()


async def test_pausing_when_what_runs_has_finished(lab: Lab) -> None:
    client = lab.client
    calls = begin(client, 6, {**ENDLESS, "max_new_tokens": 300})
    await until_running(client, 4)
    pausing = asyncio.ensure_future(client.pause("drain", timeout=600))
    await asyncio.sleep(0)
    later = begin(client, 1, SHORT)
    scored = asyncio.ensure_future(client.score(PROMPTS[0]))
    await pausing
    made = await asyncio.gather(*calls)
    stats = await standing(client)
    assert (stats.running, stats.waiting) == (0, 2)
    assert not any(call.done() for call in [*later, scored])
    await client.resume()
    for completion in [*made, *await asyncio.gather(*later)]:
        assert completion.finish_reason == "length"
        lab.check_history(completion)
    assert len(await scored) == len(PROMPTS[0])
    await lab.check()


@pytest.mark.parametrize("instead", ["resume", "in_place", "retract", "abort", "drain"])
async def test_another_command_while_a_pause_waits(lab: Lab, instead: Any) -> None:
    client = lab.client
    count = 300 if instead == "drain" else 1900
    calls = begin(client, 5, {**ENDLESS, "max_new_tokens": count})
    await until_running(client, 4)
    with pytest.raises(sglrl.DeadlineExceeded):
        await client.pause("drain", timeout=0.01)
    pausing = asyncio.ensure_future(client.pause("drain", timeout=600))
    await asyncio.sleep(0)
    later = begin(client, 1, SHORT)
    await asyncio.sleep(0)
    await (client.resume() if instead == "resume" else client.pause(instead))
    await pausing
    if instead == "resume":
        await until_grown(client)
    else:
        stats = await standing(client)
        assert (stats.running, stats.waiting) == {
            "in_place": (4, 2),
            "retract": (0, 6),
            "abort": (0, 0),
            "drain": (0, 1),
        }[instead]
        await client.resume()
    await client.abort()
    made = await asyncio.gather(*calls, *later)
    ends = {c.finish_reason for c in made[:5]}
    assert ends == {"length" if instead == "drain" else "abort"}
    for completion in made:
        check(lab, completion, again=instead == "retract")
    await lab.check()


@pytest.mark.parametrize("inflight", ["continue", "retract", "abort", "drain"])
async def test_an_update_while_a_pause_waits(lab: Lab, inflight: str) -> None:
    """Only an update that drains too waits for the running calls."""
    client = lab.client
    calls = begin(client, 5, {**ENDLESS, "max_new_tokens": 1000})
    await until_running(client, 4)
    await until_grown(client)
    pausing = asyncio.ensure_future(client.pause("drain", timeout=600))
    await asyncio.sleep(0)
    later = begin(client, 1, SHORT)
    report = await lab.other(inflight=inflight)
    if inflight in ("continue", "retract"):
        assert not pausing.done()
    await pausing
    made = await asyncio.gather(*calls)
    stats = await standing(client)
    assert (stats.running, stats.waiting) == (0, 1)
    await client.resume()
    made += await asyncio.gather(*later)
    assert [c.finish_reason for c in made] == [
        *["abort" if inflight == "abort" else "length"] * 5,
        "length",
    ]
    assert [span.version for span in made[-1].versions] == [report.version]
    for completion in made:
        check(lab, completion, again=inflight == "retract")
    await lab.check()


async def test_pauses_and_resumes_at_once(lab: Lab) -> None:
    """The engine may receive both commands in one turn of its loop."""
    client = lab.client
    calls = begin(client, 4, {**ENDLESS, "max_new_tokens": 300})
    await until_running(client, 4)
    await asyncio.gather(client.pause("retract"), client.pause("drain", timeout=600))
    assert (await standing(client)).waiting == 4
    await asyncio.gather(client.resume(), client.pause("drain", timeout=600))
    made = await asyncio.gather(*calls)
    assert {c.finish_reason for c in made} == {"length"}
    (later,) = begin(client, 1, SHORT)
    assert (await standing(client)).running == 0
    assert not later.done()
    await client.resume()
    for completion in [*made, await later]:
        check(lab, completion)


@pytest.mark.parametrize("before", ["in_place", "retract"])
async def test_a_paused_engine_finishes_nothing(lab: Lab, before: Any) -> None:
    client = lab.client
    calls = begin(client, 5, ENDLESS)
    await until_running(client, 4)
    await client.pause(before)
    await client.pause("drain", timeout=600)
    stats = await standing(client)
    assert (stats.running, stats.waiting) == ((4, 1) if before == "in_place" else (0, 5))
    await client.resume()
    await until_running(client, 4)
    await client.abort()
    assert {c.finish_reason for c in await asyncio.gather(*calls)} == {"abort"}


@pytest.mark.parametrize("mode", ["in_place", "retract"])
@pytest.mark.parametrize("inflight", ["continue", "retract", "abort"])
async def test_new_weights_while_it_is_paused(lab: Lab, inflight: str, mode: Any) -> None:
    client = lab.client
    calls = begin(client, 5, ENDLESS)
    await until_running(client, 4)
    await until_grown(client)
    await client.pause(mode)
    report = await lab.other(inflight=inflight)
    await standing(client)
    assert sum(call.done() for call in calls) == (5 if inflight == "abort" else 0)
    await client.resume()
    if inflight != "abort":
        await until_running(client, 4)
        await until_grown(client)
        await client.abort()
    made = await asyncio.gather(*calls)
    # The KV cache is kept only if no retraction has released it.
    again = mode == "retract" or inflight == "retract"
    for completion in made:
        assert completion.finish_reason == "abort"
        check(lab, completion, again=again)
    went_on = [c for c in made if c.versions and c.versions[-1].version == report.version]
    assert len(went_on) == (0 if inflight == "abort" else 4)
    await lab.check()


async def test_pausing_while_what_runs_is_being_ended(lab: Lab) -> None:
    client = lab.client
    for ends in (lambda: client.pause("abort"), lambda: lab.other(inflight="abort")):
        calls = begin(client, 4, ENDLESS)
        await until_running(client, 4)
        await asyncio.gather(ends(), client.pause())
        assert {c.finish_reason for c in await asyncio.gather(*calls)} == {"abort"}
        await standing(client)
        await client.resume()
    await lab.check()


@pytest.mark.parametrize("what", ["pause", "two pauses", "update", "bucketed update"])
async def test_what_returns_nothing_does_not_hold_up_who_aborts(lab: Lab, what: str) -> None:
    """Scores and next-token logprobs are recomputed with the current weights.

    They report the version of these weights.
    """
    client = lab.client
    texts = [[3 + (i * 7 + k * k) % 200 for k in range(300 + i)] for i in range(80)]
    before = client.weight_version
    calls = begin(client, 3, ENDLESS)
    await until_running(client, 3)
    scores = [asyncio.ensure_future(client.score(ids)) for ids in texts[:40]]
    asked = [asyncio.ensure_future(client.next_token_logprobs(ids)) for ids in texts[40:]]
    others = [*scores, *asked]
    await asyncio.wait(others, return_when=asyncio.FIRST_COMPLETED)
    if what == "pause":
        await client.pause("abort")
    elif what == "two pauses":
        await asyncio.gather(client.pause("abort"), client.pause("abort"))
    else:
        mode = "bucketed" if "bucketed" in what else "full"
        await lab.other(inflight="abort", mode=mode)
    done = [call.done() for call in others]
    assert not all(done), "it has waited for all of them"
    assert {c.finish_reason for c in await asyncio.gather(*calls)} == {"abort"}
    if "pause" in what:
        assert (await standing(client)).running == 0
        await client.resume()
    later = [asyncio.ensure_future(client.score(ids)) for ids in texts[:2]]
    later += [asyncio.ensure_future(client.next_token_logprobs(ids)) for ids in texts[2:4]]
    versions = []
    for index, call in enumerate([*others, *later]):
        found, ids = await call, texts[index % len(texts)]
        versions.append(found.version)
        rows = lab.by_version[found.version].logprobs(ids)
        if isinstance(found, sglrl.NextTokenLogprobs):
            logprobs, wanted = found.logprobs, rows[-1]
        else:
            assert found.versions == ((0, len(ids), found.version),)
            logprobs, wanted = found[1:], rows[np.arange(len(ids) - 1), ids[1:]]
        assert abs(logprobs - wanted).max() < lab.tolerance
    # A result that is finished before the update may arrive after it.
    assert set(versions[: len(others)]) <= {before, client.weight_version}
    assert set(versions[len(others) :]) == {client.weight_version}
    await lab.check()


async def test_ending_all_beside_pausing_and_going_on(lab: Lab) -> None:
    client = lab.client
    for first in ("pause", "resume"):
        calls = begin(client, 4, ENDLESS)
        await until_running(client, 4)
        if first == "resume":
            await client.pause()
        _, ended = await asyncio.gather(getattr(client, first)(), client.abort())
        assert ended == 4
        assert {c.finish_reason for c in await asyncio.gather(*calls)} == {"abort"}
        if first == "pause":
            await client.resume()
        (made,) = await client.generate(input_ids=PROMPTS[:1], **SHORT)
        assert made.finish_reason == "length"


async def test_a_turn_that_has_ended_is_not_gone_on_with(lab: Lab) -> None:
    client = lab.client
    (eos,) = client.info.eos_token_ids
    running = True

    async def keep_aborting() -> None:
        while running:
            await client.abort()

    async def turn(i: int) -> str:
        async with client.session(input_ids=PROMPTS[i % len(PROMPTS)]) as session:
            made = await session.generate(regex="(ab|cd)+", max_new_tokens=60)
            assert made.finish_reason in ("stop", "length")
            assert eos not in made.output_ids[:-1]
            return made.text

    aborting = asyncio.ensure_future(keep_aborting())
    texts = await asyncio.gather(*(turn(i) for i in range(40)))
    running = False
    await aborting
    for text in texts:
        assert set(zip(text[::2], text[1::2], strict=False)) <= {("a", "b"), ("c", "d")}


async def test_a_turn_that_goes_on_has_no_more_cached_than_its_prompt(lab: Lab) -> None:
    client = lab.client
    async with client.session(input_ids=PROMPTS[1], ignore_eos=True) as session:
        turn = asyncio.ensure_future(session.generate(max_new_tokens=1000))
        await until_running(client, 1)
        await until_grown(client)
        assert await client.abort() == 1
        made = await turn
        assert len(made.output_ids) == 1000
        assert made.cached_tokens == len(PROMPTS[1]), "it was there when the turn went on"
        (stats,) = await client.stats()
        assert stats.engine.cached_tokens <= stats.engine.prompt_tokens


async def test_what_the_documents_show(lab: Lab) -> None:
    code = example("next_token_logprobs", DOCS / "engine.md")
    names: dict[str, Any] = {"client": lab.client, "ids": PROMPTS[1], "n": 2}
    exec("async def shown():\n" + textwrap.indent(code, "    "), names)
    await names["shown"]()
    (made,) = await lab.client.generate(input_ids=PROMPTS[:1], **SHORT)
    assert made.finish_reason == "length"
