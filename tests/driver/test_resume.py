"""A worker is killed in mid-decode: its requests resume on another worker.

The results do not differ from those without a loss, except for ``resumed``.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
import torch
from engine.reference import Reference, penalized

import sglrl
from sglrl.core.calls import RUNNING
from sglrl.core.members import READY

pytestmark = pytest.mark.asyncio(loop_scope="session")

PROMPT = [5, 6, 7, 8, 9, 10, 11, 12]
WANTED: dict[str, Any] = {"max_new_tokens": 140, "logprobs": True, "ignore_eos": True}
SEEN = 66
"""Tokens that every request has when its worker is killed. They take more than one report."""

CASES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "seed": {"seed": 11},
    "seed and limits": {"seed": 4, "top_p": 0.8, "top_k": 40, "temperature": 1.3},
    "masks": {
        "seed": 9,
        "top_p": 0.7,
        "return_sampling_mask": True,
        "logprobs_mode": "processed_logprobs",
        "token_ids_logprob": [3, 14, 15, 92, 6],
    },
    "frequency": {"temperature": 0, "frequency_penalty": 0.6},
    "presence": {"temperature": 0, "presence_penalty": 1.1},
    "repetition": {"temperature": 0, "repetition_penalty": 1.4},
    "at least": {"temperature": 0, "min_new_tokens": 135, "ignore_eos": False},
    "regex": {"temperature": 0, "regex": "(abc){45}", "ignore_eos": False},
    "other budget": {"temperature": 0, "max_new_tokens": 131},
}


# In its overlapping loop SGLang reports a token to its penalizers in time, a step late or not at
# all, depending on what it prefills meanwhile. There two runs of one request may differ without any
# loss. A separate test checks these cases, with no other request in the engine.
LATE = {"frequency", "presence", "repetition"}
CALLED = ["greedy", "seed", "masks", "frequency", "regex"]
"""Cases that also run without streaming."""


@pytest_asyncio.fixture(
    loop_scope="session", params=[False, True], ids=["normal loop", "overlapping loop"]
)
async def pair(
    request: pytest.FixtureRequest, qwen: Path
) -> AsyncIterator[tuple[sglrl.Client, bool]]:
    """Two workers, and whether they use the overlapping loop.

    The second worker gets calls only when the first one is lost.
    """
    async with sglrl.launch(
        qwen, device="cpu", replicas=2, restarts=0, disable_overlap_schedule=not request.param
    ) as client:
        fabric = client.requests.driver.fabric
        fabric.router.chain[:] = [
            lambda call: next(
                (m for m in fabric.members.values() if m.state is READY and m.has_room), None
            )
        ]
        yield client, request.param


class Reader:
    """Reads a stream, and sets ``enough`` when it has read ``SEEN`` tokens."""

    def __init__(self, stream: sglrl.Stream) -> None:
        self.stream = stream
        self.enough = asyncio.Event()
        self.ids: list[int] = []
        self.text = ""

    async def read(self) -> sglrl.Completion:
        async for chunk in self.stream:
            self.ids += chunk.output_ids.tolist()
            self.text += chunk.text
            if len(self.ids) >= SEEN:
                self.enough.set()
        return self.stream.completion


async def kill_first(client: sglrl.Client) -> None:
    """Kill the first worker when the driver has received reports about every call on it."""
    fabric = client.requests.driver.fabric
    while not all(call.state == RUNNING for call in fabric.members[0].calls.values()):
        await client.stats()
    os.kill(client.workers[0].pid, signal.SIGKILL)


def same(made: sglrl.Completion, whole: sglrl.Completion, name: str) -> None:
    assert made.output_ids.tolist() == whole.output_ids.tolist(), name
    np.testing.assert_allclose(made.logprobs, whole.logprobs, atol=1e-4, rtol=0, err_msg=name)
    if whole.sampling_mask is not None:
        assert made.sampling_mask is not None
        for part, expected in zip(made.sampling_mask, whole.sampling_mask, strict=True):
            assert part.tolist() == expected.tolist(), name
    if whole.token_ids_logprobs is not None:
        np.testing.assert_allclose(made.token_ids_logprobs, whole.token_ids_logprobs, atol=1e-4)
    assert made.finish_reason == whole.finish_reason, name
    assert made.stop_match == whole.stop_match, name
    assert made.text == whole.text, name
    assert made.versions == whole.versions, name


def likeliest_but_for_penalties(
    reference: Reference, made: sglrl.Completion, how: dict[str, Any], name: str
) -> None:
    """Check that each token has the highest logit after the penalties of the tokens before it.

    The last of these tokens may lack its penalty: SGLang's penalizers may receive it late. They
    then have the prompt's last token in its place.
    """
    output = made.output_ids.tolist()
    rows = reference.logits([*PROMPT, *output])[len(PROMPT) - 1 : -1]
    for i, token in enumerate(output):
        shortfalls = []
        for heard in (
            output[:i],
            [PROMPT[-1], *output[:i]],
            [PROMPT[-1], *output[: max(0, i - 1)]],
        ):
            ids, counts = torch.unique(torch.tensor(heard, dtype=torch.int64), return_counts=True)
            logits = rows[i].clone()
            logits[ids] -= how.get("frequency_penalty", 0.0) * counts
            logits[ids] -= how.get("presence_penalty", 0.0)
            scale = how.get("repetition_penalty", 1.0)
            logits[ids] = torch.where(logits[ids] > 0, logits[ids] / scale, logits[ids] * scale)
            shortfalls.append(float(logits.max() - logits[token]))
        assert min(shortfalls) < 1e-3, (name, i, made.resumed_at, shortfalls)


async def test_requests_go_on_where_they_were(
    pair: tuple[sglrl.Client, bool], reference: Reference
) -> None:
    client, overlap = pair
    plain = {**WANTED, "temperature": 0}
    uncut = (await client.generate(input_ids=PROMPT, **plain)).text
    # The engine compiles a new grammar while other requests run, perhaps to their ends.
    await client.generate(input_ids=PROMPT, max_new_tokens=1, regex=CASES["regex"]["regex"])
    # Stop strings that end a request after its worker is lost, each at another position.
    stops = [uncut[at : at + 4] for at in range(len(uncut) - 40, len(uncut) - 4, 9)]
    stops = [stop for stop in stops if "\ufffd" not in stop and uncut.count(stop) == 1]
    assert stops
    cases = CASES | {f"stop {stop!r}": {"temperature": 0, "stop": stop} for stop in stops[:2]}
    if overlap:
        cases = {name: how for name, how in cases.items() if name not in LATE}
    readers = {
        name: Reader(client.stream(input_ids=PROMPT, **{**WANTED, **how}))
        for name, how in cases.items()
    }
    calls = {
        name: asyncio.ensure_future(
            client.generate(input_ids=PROMPT, **{**WANTED, **cases[name]}, top_logprobs=2)
        )
        for name in CALLED
        if name in cases
    }
    streams = [asyncio.ensure_future(reader.read()) for reader in readers.values()]
    await asyncio.gather(*(reader.enough.wait() for reader in readers.values()))
    await kill_first(client)
    streamed = dict(zip(cases, await asyncio.gather(*streams), strict=True))
    called = dict(zip(calls, await asyncio.gather(*calls.values()), strict=True))
    assert [worker.state for worker in client.workers] == ["retired", "ready"]
    again = [
        client.generate(input_ids=PROMPT, **{**WANTED, **how}, top_logprobs=2)
        for how in cases.values()
    ]
    for name, whole in zip(cases, await asyncio.gather(*again), strict=True):
        assert len(whole.output_ids) > SEEN, name
        made = streamed[name]
        assert (made.resumed, made.worker, whole.resumed) == (1, 1, 0), name
        (at,) = made.resumed_at
        assert SEEN <= at < len(made.output_ids), name
        assert whole.resumed_at == ()
        # The streamed pieces contain every token exactly once.
        assert readers[name].ids == made.output_ids.tolist(), name
        assert readers[name].text == made.text, name
        same(made, whole, name)
        if name in called:
            assert called[name].resumed == len(called[name].resumed_at) == 1, name
            same(called[name], whole, name)
            top, other = called[name].top_logprobs, whole.top_logprobs
            assert top is not None
            assert other is not None
            np.testing.assert_allclose(top.logprobs, other.logprobs, atol=1e-4, rtol=0)
    made = streamed["greedy"]
    expected = reference.logprobs_of(PROMPT, made.output_ids)
    np.testing.assert_allclose(made.logprobs, expected, atol=1e-4, rtol=0)
    stats = (await client.stats())[0].engine
    assert stats.running == stats.waiting == 0


@pytest.mark.parametrize("pair", [True], ids=["overlapping loop"], indirect=True)
@pytest.mark.parametrize("name", sorted(LATE))
async def test_penalties_go_on_in_the_overlapping_loop(
    pair: tuple[sglrl.Client, bool], reference: Reference, name: str
) -> None:
    client, _ = pair
    # The output is so long that the request still runs when the worker is killed.
    how = {**WANTED, **CASES[name], "max_new_tokens": 500}
    reader = Reader(client.stream(input_ids=PROMPT, **how))
    running = asyncio.ensure_future(reader.read())
    await reader.enough.wait()
    await kill_first(client)
    made = await running
    assert made.resumed == 1
    whole = await client.generate(input_ids=PROMPT, **how)
    for completion in (whole, made):
        assert len(completion.output_ids) == how["max_new_tokens"]
        likeliest_but_for_penalties(reference, completion, how, name)


async def test_a_resumed_request_goes_through_a_weight_update(
    pair: tuple[sglrl.Client, bool], qwen: Path
) -> None:
    """The version spans are correct although another worker generated the first part."""
    client, _ = pair
    # The output is so long that the request still runs when the worker is killed after the update.
    long = {**WANTED, "temperature": 0, "max_new_tokens": 1800}
    reader = Reader(client.stream(input_ids=PROMPT, **long))
    running = asyncio.ensure_future(reader.read())
    await reader.enough.wait()
    await client.update_weights_from_disk(qwen, version=5)
    seen = len(reader.ids)
    await kill_first(client)
    made = await running
    assert made.resumed == 1
    (first, second) = made.versions
    assert (first.start, first.version, second.version) == (0, 0, 5)
    assert SEEN <= first.stop <= seen + 2
    assert second.stop == 1800
    whole = await client.generate(input_ids=PROMPT, **long)
    assert made.output_ids.tolist() == whole.output_ids.tolist()


async def test_with_overlap_penalties_count_every_token_once(
    qwen: Path, reference: Reference
) -> None:
    """The last token may not be counted yet. This also holds while other requests are prefilled."""
    penalty = 0.7
    async with sglrl.launch(qwen, device="cpu", disable_overlap_schedule=False) as client:
        call = asyncio.ensure_future(
            client.generate(input_ids=PROMPT, frequency_penalty=penalty, **WANTED)
        )
        prompts = ([100 + i % 300, i % 97 + 3, 7] for i in range(1 << 20))
        while not call.done():
            await client.generate(input_ids=next(prompts), max_new_tokens=1)
        made = await call
        alone = {"frequency_penalty": 0.7, "presence_penalty": 0.4, "repetition_penalty": 1.5}
        together = await client.generate(input_ids=PROMPT, **{**WANTED, **alone})
    output = together.output_ids.tolist()
    logits = reference.logits([*PROMPT, *output])[len(PROMPT) - 1 :]
    assert together.logprobs is not None
    for at, (token, logprob) in enumerate(zip(output, together.logprobs, strict=True)):
        rows = [
            torch.log_softmax(penalized(logits[at], counted, alone, []), -1)
            for counted in (output[:at], output[: max(0, at - 1)])
        ]
        assert min(abs(float(row[token]) - float(logprob)) for row in rows) < 1e-3, at
    output = made.output_ids.tolist()
    logits = reference.logits([*PROMPT, *output])[len(PROMPT) - 1 :]
    assert made.logprobs is not None
    for at, (token, logprob) in enumerate(zip(output, made.logprobs, strict=True)):
        off = []
        for counted in (output[:at], output[: max(0, at - 1)]):
            row = logits[at].clone()
            row.index_add_(
                0, torch.tensor(counted, dtype=torch.long), torch.full((len(counted),), -penalty)
            )
            off.append(abs(float(torch.log_softmax(row, -1)[token]) - float(logprob)))
        assert min(off) < 1e-3, (at, off)
