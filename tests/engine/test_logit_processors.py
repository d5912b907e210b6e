"""Custom logit processors: tokens and logprobs equal transformers with the same change."""

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
from numpy.typing import NDArray
from processes import strike

import sglrl
from sglrl.inference.sampling import SamplingParams
from sglrl.inference.sampling_cache import SamplingCache

from .reference import Reference

pytestmark = pytest.mark.asyncio(loop_scope="session")

MODULE = f"{__package__}.processors"
SHIFT, BAN, FAILS, WAITS = PROCESSORS = tuple(
    f"{MODULE}:{name}" for name in ("Shift", "Ban", "Fails", "Waits")
)
PROMPT = [5, 6, 7, 8, 9, 10, 11, 12]
SHIFTED: dict[str, Any] = {"logit_processor": SHIFT, "custom_params": {"bias": 9.5}}
BANNED = [*range(0, 512, 2)]
BANNING: dict[str, Any] = {
    "logit_processor": BAN,
    "custom_params": {"tokens": BANNED, "every": 3},
}
LONG: dict[str, Any] = {"input_ids": PROMPT, "max_new_tokens": 70, "ignore_eos": True}
Change = Callable[[NDArray[np.float32], list[int], int], None]
"""Changes the logits of a position in place. Arguments: logits, all tokens before, position."""


def nothing(row: NDArray[np.float32], ids: list[int], at: int) -> None:
    pass


def shift(row: NDArray[np.float32], ids: list[int], at: int) -> None:
    row[(7 * ids[-1] + at) % len(row)] += 9.5


def ban(row: NDArray[np.float32], ids: list[int], at: int) -> None:
    if at % 3 == 0:
        row[BANNED] = -np.inf


@pytest_asyncio.fixture(
    scope="module",
    loop_scope="session",
    params=[True, False],
    ids=["normal loop", "overlapping loop"],
)
async def engine(request: pytest.FixtureRequest, qwen: Path) -> AsyncIterator[sglrl.Client]:
    async with sglrl.launch(
        qwen,
        device="cpu",
        replicas=2,
        restarts=9,
        logit_processors=PROCESSORS,
        chunked_prefill_size=64,
        disable_overlap_schedule=request.param,
    ) as client:
        yield client


def expected(
    reference: Reference, made: sglrl.Completion, change: Change, temperature: float = 1.0
) -> NDArray[np.float32]:
    """Return the logprobs of all tokens at each output position, float32 [t, vocabulary]."""
    begin, ids = len(made.prompt_ids), [*made.prompt_ids.tolist(), *made.output_ids.tolist()]
    rows = reference.logits(ids)[begin - 1 : -1].numpy()
    for at, row in enumerate(rows):
        change(row, ids[: begin + at], at)
    scaled = rows / temperature
    return scaled - np.logaddexp.reduce(scaled, axis=1, keepdims=True)


def check(
    reference: Reference,
    made: sglrl.Completion,
    change: Change,
    temperature: float = 1.0,
    greedy: bool = False,
) -> NDArray[np.float32]:
    """Check the logprobs of the sampled tokens, and that a greedy request took the likeliest."""
    rows = expected(reference, made, change, temperature)
    own = rows[np.arange(len(rows)), made.output_ids]
    np.testing.assert_allclose(made.logprobs, own, atol=1e-4, rtol=0)
    if greedy:
        assert made.output_ids.tolist() == rows.argmax(-1).tolist()
    return rows


async def test_in_one_batch(engine: sglrl.Client, reference: Reference) -> None:
    """Two processors and plain requests, which begin and end at different times."""

    def call(tokens: int, **values: Any) -> Any:
        wanted = {**LONG, "logprobs": True, "worker": 0, "max_new_tokens": tokens}
        return engine.generate(**{**wanted, **values})

    first = asyncio.ensure_future(call(370, temperature=0, **SHIFTED))
    plain = asyncio.ensure_future(call(390, temperature=0))
    while (await engine.stats())[0].engine.running < 2:
        pass
    rest = await asyncio.gather(
        call(40, temperature=0, **BANNING),
        call(9, temperature=0, **SHIFTED),
        call(30, n=3, temperature=0.8, seed=5, **SHIFTED),
        call(30, temperature=0.7, top_logprobs=3, token_ids_logprob=[3, 4], **BANNING),
        call(20, temperature=0, logprobs_mode="raw_logprobs", **SHIFTED),
        call(
            20,
            top_p=0.6,
            seed=3,
            logprobs_mode="processed_logprobs",
            **SHIFTED,
            return_sampling_mask=True,
        ),
        call(20, temperature=0, frequency_penalty=1.5, logit_bias={3: 2.0}),
        # The prompt is prefilled in parts.
        call(12, input_ids=[*range(40, 240)], temperature=0, **SHIFTED),
    )
    banned, short, samples, top, raw, masked, _, parts = rest
    one, other = await first, await plain
    for made in (one, short, parts):
        check(reference, made, shift, greedy=True)
    check(reference, banned, ban, greedy=True)
    check(reference, other, nothing, greedy=True)
    assert one.output_ids[:20].tolist() == raw.output_ids.tolist() != other.output_ids[:20].tolist()
    check(reference, raw, nothing)
    for made in samples:
        check(reference, made, shift, 0.8)
    assert len({tuple(made.output_ids.tolist()) for made in samples}) == 3
    again = await call(30, n=3, temperature=0.8, seed=5, **SHIFTED)
    assert [m.output_ids.tolist() for m in again] == [m.output_ids.tolist() for m in samples]

    rows = check(reference, top, ban, 0.7)
    given, most = top.token_ids_logprobs, top.top_logprobs
    assert given is not None
    assert most is not None
    # The logprob of a token that is not allowed is the least float32.
    rows = np.maximum(rows, np.finfo(np.float32).min)
    np.testing.assert_allclose(given, rows[:, [3, 4]], atol=1e-4, rtol=1e-6)
    np.testing.assert_allclose(most.logprobs, np.sort(rows)[:, :-4:-1], atol=1e-4, rtol=0)

    assert masked.sampling_mask is not None
    for row, mask, token, value in zip(
        expected(reference, masked, shift),
        masked.sampling_mask.sets(),
        masked.output_ids,
        masked.logprobs,
        strict=True,
    ):
        order = np.argsort(row)[::-1]
        before = np.cumsum(np.exp(row[order])) - np.exp(row[order])
        assert sorted(mask) == sorted(order[before <= 0.6])
        assert abs(value - row[token] + np.logaddexp.reduce(row[mask])) < 1e-4


async def test_a_grammar(engine: sglrl.Client, reference: Reference) -> None:
    """The processor sees the logits after the grammar. What it adds permits no other token."""
    made = await engine.generate(
        input_ids=PROMPT, max_new_tokens=40, temperature=0, regex="[ab]{30}", **SHIFTED
    )
    assert set(made.text) == {*"ab"}
    a, b = (reference.tokenizer.convert_tokens_to_ids(letter) for letter in "ab")
    other = await engine.generate(
        input_ids=PROMPT,
        max_new_tokens=40,
        regex="[ab]{30}",
        logit_processor=BAN,
        custom_params={"tokens": [a], "every": 1},
    )
    assert a not in other.output_ids
    assert b in other.output_ids or len(other.text) == 30


async def test_sessions_and_other_processes(engine: sglrl.Client, reference: Reference) -> None:
    how = {"max_new_tokens": 6, "temperature": 0, "ignore_eos": True, **SHIFTED}
    async with engine.session(input_ids=PROMPT, **how) as session:
        first = await session.generate()
        session.observe([7, 8])
        second = await session.generate(**BANNING)
    assert second.prompt_ids.tolist() == [*PROMPT, *first.output_ids, 7, 8]
    check(reference, first, shift, greedy=True)
    check(reference, second, ban, greedy=True)
    async with sglrl.connect(engine.address) as remote:
        assert remote.info.logit_processors == PROCESSORS
        made = await remote.generate(input_ids=PROMPT, logprobs=True, **how)
    assert made.output_ids.tolist() == first.output_ids.tolist()
    check(reference, made, shift, greedy=True)


async def test_after_a_pause(engine: sglrl.Client, reference: Reference) -> None:
    wanted = {**LONG, "max_new_tokens": 400, "logprobs": True, "temperature": 0, "worker": 0}
    calls = [asyncio.ensure_future(engine.generate(**wanted, **how)) for how in (SHIFTED, BANNING)]
    for mode in ("retract", "in_place"):
        begun = (await engine.stats())[0].engine.kv_tokens
        while (await engine.stats())[0].engine.kv_tokens < begun + 30:
            pass
        await engine.pause(mode)
        await engine.resume()
    shifted, banned = await asyncio.gather(*calls)
    check(reference, shifted, shift, greedy=True)
    check(reference, banned, ban, greedy=True)


async def test_a_worker_is_lost(engine: sglrl.Client, reference: Reference, tmp_path: Path) -> None:
    """The processor sees the tokens that the lost worker sampled as output."""
    fifo = tmp_path / "fifo"
    wanted = {**LONG, "max_new_tokens": 150, "logprobs": True, "seed": 8}
    whole = await engine.generate(**wanted, **SHIFTED)
    os.mkfifo(fifo)
    params = {**SHIFTED["custom_params"], "at": 100, "fifo": str(fifo)}
    stream = engine.stream(**wanted, logit_processor=WAITS, custom_params=params)
    seen = 0
    async for chunk in stream:
        seen += len(chunk.output_ids)
        if seen > 66 and fifo.exists():
            (busy,) = [worker for worker in engine.workers if worker.load]
            strike(busy.pid, signal.SIGKILL)
            fifo.unlink()
    made = stream.completion
    assert made.resumed == 1
    assert made.output_ids.tolist() == whole.output_ids.tolist()
    check(reference, made, shift)


FAILURES = {
    "raise": r"Fails' failed: KeyError: 'some key'",
    "shape": r"failed: ValueError: it returned shape \[1, 511\] for logits of shape \[1, 512\]",
    "none": r"failed: TypeError: it returned NoneType, not a tensor",
}


async def test_a_processor_that_fails(engine: sglrl.Client) -> None:
    """Only its request ends. Others of the same processor, in the same step, continue."""

    def call(token: int, at: int, how: str, **values: Any) -> Any:
        params = {"at": at, "how": how, "token": token}
        wanted = {**LONG, "max_new_tokens": 12, "worker": 1, **values}
        return engine.generate(**wanted, logit_processor=FAILS, custom_params=params)

    # With overlap, a finished request stays in the batch for one more step, whose position is 12.
    good = [
        call(3, 12, "exit", temperature=0),
        call(4, 40, "raise", temperature=0, max_new_tokens=20),
    ]
    bad = [call(5, 4, how, temperature=0.5) for how in FAILURES]
    every = {"tokens": [*range(512)], "every": 5}
    none = engine.generate(
        **{**LONG, "worker": 1}, logit_processor=BAN, custom_params=every, temperature=0
    )
    *made, gone = await asyncio.gather(*good, *bad, none, return_exceptions=True)
    assert made[0].output_ids.tolist() == [3] * 12
    assert made[1].output_ids.tolist() == [4] * 20
    assert made[1].resumed == 0
    for error, says in zip(made[2:], FAILURES.values(), strict=True):
        with pytest.raises(sglrl.InvalidRequest, match=says):
            raise error
    with pytest.raises(sglrl.InvalidRequest, match=r"Ban' allows no token after the 0 generated"):
        raise gone


async def test_a_processor_that_is_not_declared(
    engine: sglrl.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert engine.info.logit_processors == PROCESSORS
    says = r"no logit processor 'os:system'; declare it with launch\(logit_processors=.*:Shift, "
    sent = engine.requests.driver.fabric._next_id
    with pytest.raises(sglrl.InvalidRequest, match=says):
        await engine.generate(input_ids=PROMPT, logit_processor="os:system")
    assert engine.requests.driver.fabric._next_id == sent
    # The worker checks it again, and the pool checks the requests of other processes.
    to_wire = SamplingParams.to_wire

    def changed(*args: Any) -> Any:
        return {**to_wire(*args), "logit_processor": "os:system"}

    monkeypatch.setattr(SamplingParams, "to_wire", changed)
    monkeypatch.setattr(SamplingCache, "_bound", staticmethod(lambda cache: {}))
    with pytest.raises(sglrl.InvalidRequest, match=says):
        await engine.generate(input_ids=PROMPT, max_new_tokens=3)
    async with sglrl.connect(engine.address) as remote:
        with pytest.raises(sglrl.InvalidRequest, match=says):
            await remote.generate(input_ids=PROMPT, max_new_tokens=3)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("no_such_module:Class", r"cannot be imported: ModuleNotFoundError: No module named"),
        (f"{MODULE}:NoClass", r"cannot be imported: AttributeError: .* no attribute 'NoClass'"),
        (f"{MODULE}:NoProcessor", r"is not a subclass of CustomLogitProcessor"),
        (f"{MODULE}:Needs", r"cannot be instantiated: OSError: the table is missing"),
    ],
)
async def test_a_start_that_fails(qwen: Path, name: str, says: str) -> None:
    with pytest.raises(
        sglrl.WorkerStartError, match=f"the logit processor '{name}' {says}"
    ) as error:
        async with sglrl.launch(qwen, device="cpu", logit_processors=[SHIFT, name]):
            pass
    assert "Traceback" not in str(error.value)
