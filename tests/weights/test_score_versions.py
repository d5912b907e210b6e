"""Scores and next-token logprobs report the version of the weights that computed them.

This also holds when an update comes between two parts of a prompt. The tests run in SGLang's normal
loop and in its overlapping loop.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
import torch
from engine.policies import PROMPTS, Lab, Policies, until_idle
from numpy.typing import NDArray
from transformers import DynamicCache

import sglrl

pytestmark = pytest.mark.asyncio(loop_scope="session")

PART = 48
LENGTH = 1500
TEXTS = [[3 + (i * 7 + k * k) % 200 for k in range(LENGTH + i)] for i in range(8)]
OTHER_TEXTS = [[203 + token for token in text] for text in TEXTS]
"""For a second test of one version. If the cache has the KV of a whole text, computed by the old
version, SGLang continues with this KV after an update in the middle of the text."""


@pytest_asyncio.fixture(
    scope="module", loop_scope="session", params=[False, True], ids=["normal", "overlap"]
)
async def lab(request: pytest.FixtureRequest, models: Path) -> AsyncIterator[Lab]:
    """One worker that prefills a few tokens at a time."""
    policies = Policies(models / "policies")
    async with sglrl.launch(
        policies[0].folder,
        device="cpu",
        weight_device="cpu",
        chunked_prefill_size=PART,
        disable_overlap_schedule=not request.param,
    ) as client:
        yield Lab(client, policies)


def expected(lab: Lab, ids: list[int], versions: Any) -> NDArray[np.float32]:
    """Return float32 [len(ids)]: each span computed by its version.

    Each span uses the KV cache of the spans before it. The logits of a token come from the token
    before it.
    """
    cache, rows, held = DynamicCache(), [], 0
    for span in versions:
        tokens = ids[held : span.stop - 1]
        held += len(tokens)
        if not tokens:
            # The span is only position 0, which has no logprob.
            continue
        with torch.inference_mode():
            logits = (
                lab.by_version[span.version]
                .model(torch.tensor([tokens]), past_key_values=cache, use_cache=True)
                .logits[0]
            )
        rows.append(torch.log_softmax(logits.float(), dim=-1).numpy())
    logprobs = np.concatenate(rows)
    chosen = logprobs[np.arange(len(logprobs)), ids[1:]]
    return np.concatenate([[np.nan], chosen]).astype(np.float32)


def check_spans(versions: Any, count: int) -> None:
    assert versions[0].start == 0
    assert versions[-1].stop == count
    for before, after in itertools.pairwise(versions):
        assert before.stop == after.start
        assert before.version < after.version


@pytest.mark.parametrize("start", [0, 700])
async def test_an_update_comes_between_two_parts_of_a_score(lab: Lab, start: int) -> None:
    client = lab.client
    await until_idle(client)
    old = client.weight_version
    texts = OTHER_TEXTS if start else TEXTS
    calls = [
        asyncio.ensure_future(client.score(ids, start=start, top_logprobs=i % 2 * 2))
        for i, ids in enumerate(texts)
    ]
    await asyncio.wait(calls, return_when=asyncio.FIRST_COMPLETED)
    await lab.other(inflight="continue")
    assert not all(call.done() for call in calls)
    several = 0
    for ids, found in zip(texts, await asyncio.gather(*calls), strict=True):
        check_spans(found.versions, len(ids) - start)
        assert found.version == found.versions[-1].version
        assert {span.version for span in found.versions} <= {old, old + 1}
        logprobs = found.logprobs if isinstance(found, sglrl.Scores) else found
        spans = [
            span._replace(start=span.start + start, stop=span.stop + start)
            for span in found.versions
        ]
        if len(spans) > 1 or start == 0 or spans[0].version == old:
            # In other cases an older version may have computed the KV cache before ``start``.
            np.testing.assert_allclose(
                logprobs, expected(lab, ids, spans)[start:], atol=lab.tolerance, rtol=0
            )
        several += len(found.versions) > 1
    assert {call.result().version for call in calls} == {old, old + 1}
    if start == 0:
        assert several > 0


@pytest.mark.parametrize("inflight", ["continue", "retract", "abort", "drain"])
async def test_calls_that_are_made_after_an_update_are_of_its_version(
    lab: Lab, inflight: str
) -> None:
    client = lab.client
    earlier = [asyncio.ensure_future(client.score(ids)) for ids in TEXTS]
    asked = [asyncio.ensure_future(client.next_token_logprobs(ids)) for ids in TEXTS]
    await asyncio.wait(earlier, return_when=asyncio.FIRST_COMPLETED)
    old = client.weight_version
    report = await lab.other(inflight=inflight)
    scores = [asyncio.ensure_future(client.score(ids)) for ids in PROMPTS]
    others = [asyncio.ensure_future(client.next_token_logprobs(ids)) for ids in PROMPTS]
    for ids, score, other in zip(
        PROMPTS, await asyncio.gather(*scores), await asyncio.gather(*others), strict=True
    ):
        assert score.version == other.version == report.version
        assert score.versions == ((0, len(ids), report.version),)
        rows = lab.current.logprobs(ids)
        np.testing.assert_allclose(
            score[1:], rows[np.arange(len(ids) - 1), ids[1:]], atol=lab.tolerance, rtol=0
        )
        np.testing.assert_allclose(other.logprobs, rows[-1], atol=lab.tolerance, rtol=0)
    for score in await asyncio.gather(*earlier):
        assert {span.version for span in score.versions} <= {old, report.version}
        if inflight != "continue":
            assert len(score.versions) == 1
    assert {(await call).version for call in asked} <= {old, report.version}
