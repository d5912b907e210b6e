"""Draws follow the model's distribution, repeat with a seed, and end where they should."""

from __future__ import annotations

import asyncio
import json
import re
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch

import sglrl
from sglrl.wire.engine import GenerateArgs

from .reference import Reference, penalized

pytestmark = pytest.mark.asyncio(loop_scope="session")

PROMPT = [5, 6, 7, 8, 9, 10, 11, 12]


def chi_square(counts: np.ndarray, expected: np.ndarray) -> float:
    """Return how many standard deviations the statistic is above its mean (Wilson and Hilferty)."""
    # Merge rare tokens, so that every class has a sufficient expected count.
    order = np.argsort(expected)[::-1]
    counts, expected = counts[order], expected[order]
    common = int((expected >= 8).sum())
    if common < len(expected):
        counts = np.append(counts[:common], counts[common:].sum())
        expected = np.append(expected[:common], expected[common:].sum())
    # Tokens of probability 0 must not occur, and form no class.
    assert not counts[expected == 0].any()
    counts, expected = counts[expected > 0], expected[expected > 0]
    statistic = float(((counts - expected) ** 2 / expected).sum())
    freedom = len(expected) - 1
    spread = 2 / (9 * freedom)
    return float(((statistic / freedom) ** (1 / 3) - (1 - spread)) / spread**0.5)


@pytest.mark.parametrize("seed", [None, 0])
async def test_temperature_1_follows_the_distribution(
    client: sglrl.Client, reference: Reference, seed: int | None
) -> None:
    n = 4000
    samples = await client.generate(input_ids=PROMPT, n=n, max_new_tokens=1, seed=seed)
    counts = np.bincount([int(s.output_ids[0]) for s in samples], minlength=512)
    expected = n * np.exp(reference.logprobs(PROMPT)[-1].astype(np.float64))
    # A value above 4 has a probability below 1 in 30,000.
    assert chi_square(counts, expected) < 4
    # A slightly wrong distribution does not pass.
    assert chi_square(counts, np.roll(expected, 1)) > 4


async def test_samples_differ_and_a_seed_repeats(client: sglrl.Client) -> None:
    async def draw(**values: object) -> list[list[int]]:
        made = await client.generate(
            input_ids=PROMPT, n=4, max_new_tokens=16, ignore_eos=True, **values
        )
        return [c.output_ids.tolist() for c in made]

    free = await draw()
    assert len(set(map(tuple, free))) == 4
    seeded = await draw(seed=3)
    assert len(set(map(tuple, seeded))) == 4
    # The same draws alone, in a batch and after a flush. Sample i has its own seed.
    beside = asyncio.gather(draw(), draw(seed=99), draw(temperature=0))
    assert await draw(seed=3) == seeded
    await beside
    assert await client.flush_cache()
    assert await draw(seed=3) == seeded
    # Another seed shares no sample, and the first sample is that of a single call.
    others = [*(await draw(seed=4)), *(await draw(seed=2))]
    assert not set(map(tuple, others)) & set(map(tuple, seeded))
    alone = await client.generate(input_ids=PROMPT, max_new_tokens=16, ignore_eos=True, seed=3)
    assert alone.output_ids.tolist() == seeded[0]
    listed = await client.generate(
        input_ids=[PROMPT] * 4, max_new_tokens=16, ignore_eos=True, seed=3
    )
    assert [c.output_ids.tolist() for c in listed] == seeded
    assert await draw(seed=3, temperature=0.8) != seeded
    assert await draw() != free


@pytest.mark.parametrize(
    "limits",
    [{"top_k": 3}, {"top_p": 0.3}, {"min_p": 0.2}, {"top_k": 9, "top_p": 0.5, "min_p": 0.1}],
)
async def test_limits_hold_with_and_without_a_seed(
    client: sglrl.Client, reference: Reference, limits: dict[str, float]
) -> None:
    probs = np.exp(reference.logprobs(PROMPT)[-1])
    order = np.argsort(probs)[::-1]
    before = np.cumsum(probs[order]) - probs[order]
    keep = np.arange(512) < limits.get("top_k", 512)
    keep &= before <= limits.get("top_p", 1.0)
    keep &= probs[order] >= limits.get("min_p", 0.0) * probs[order[0]]
    allowed = set(order[keep].tolist())
    assert 1 < len(allowed) < 100
    for seed in (None, 5):
        made = await client.generate(input_ids=PROMPT, n=200, max_new_tokens=1, seed=seed, **limits)
        assert {int(c.output_ids[0]) for c in made} <= allowed
    again = await client.generate(input_ids=PROMPT, n=200, max_new_tokens=1, seed=5, **limits)
    assert [c.output_ids[0] for c in again] == [c.output_ids[0] for c in made]
    assert len({int(c.output_ids[0]) for c in made}) > 1


async def test_temperature_0_is_greedy_and_near_0_is_close(client: sglrl.Client) -> None:
    greedy = await client.generate(input_ids=PROMPT, max_new_tokens=8, temperature=0)
    top = await client.generate(input_ids=PROMPT, max_new_tokens=8, top_k=1)
    assert top.output_ids.tolist() == greedy.output_ids.tolist()


async def test_stop_strings(client: sglrl.Client) -> None:
    wanted = {"max_new_tokens": 40, "temperature": 0, "ignore_eos": True}
    whole = await client.generate(input_ids=PROMPT, **wanted)
    text = whole.text
    stop = next(
        text[i : i + 3]
        for i in range(8, len(text) - 3)
        if "\ufffd" not in text[i : i + 3] and text.index(text[i : i + 3]) == i
    )
    made = await client.generate(input_ids=PROMPT, stop=["never seen", stop], **wanted)
    assert made.finish_reason == "stop"
    assert made.stop_match == stop
    assert made.text == text[: text.index(stop)]
    count = len(made.output_ids)
    assert made.output_ids.tolist() == whole.output_ids.tolist()[:count]
    # The ids end with the token that completes the stop string.
    assert stop in client.tokenizer.decode(made.output_ids)
    assert stop not in client.tokenizer.decode(made.output_ids[:-1])
    stream = client.stream(input_ids=PROMPT, stop=stop, **wanted)
    assert "".join([chunk.text async for chunk in stream]) == made.text
    assert stream.completion.output_ids.tolist() == made.output_ids.tolist()


async def test_stop_tokens_and_least_tokens(client: sglrl.Client) -> None:
    wanted = {"max_new_tokens": 30, "temperature": 0, "ignore_eos": True}
    whole = (await client.generate(input_ids=PROMPT, **wanted)).output_ids.tolist()
    token = whole[5]
    first = whole.index(token)
    made = await client.generate(
        input_ids=PROMPT, max_new_tokens=30, temperature=0, stop_token_ids=[token]
    )
    assert made.output_ids.tolist() == whole[: first + 1]
    assert (made.finish_reason, made.stop_match) == ("stop", token)
    assert made.text == client.tokenizer.decode(whole[:first], skip_special_tokens=True)
    longer = await client.generate(
        input_ids=PROMPT,
        max_new_tokens=30,
        temperature=0,
        stop_token_ids=[token],
        min_new_tokens=20,
    )
    assert len(longer.output_ids) >= 20
    assert token not in longer.output_ids[:19]


async def test_the_end_of_sequence_token(client: sglrl.Client) -> None:
    (eos,) = client.info.eos_token_ids
    ends = await client.generate(input_ids=PROMPT, n=32, max_new_tokens=96, seed=1)
    stopped = [c for c in ends if c.finish_reason == "stop"]
    assert stopped
    for completion in stopped:
        assert completion.output_ids[-1] == eos
        assert eos not in completion.output_ids[:-1]
        assert completion.stop_match == eos
    ignored = await client.generate(
        input_ids=PROMPT, n=32, max_new_tokens=96, seed=1, ignore_eos=True
    )
    assert {c.finish_reason for c in ignored} == {"length"}
    assert {len(c.output_ids) for c in ignored} == {96}


async def test_grammars(client: sglrl.Client) -> None:
    (pattern,) = await client.generate(["Call"], max_new_tokens=40, regex=r"[0-9]{3}-[0-9]{4}")
    assert re.fullmatch(r"[0-9]{3}-[0-9]{4}", pattern.text)
    schema = {
        "type": "object",
        "properties": {"ok": {"type": "boolean"}, "n": {"enum": [1, 2, 3]}},
        "required": ["ok", "n"],
        "additionalProperties": False,
    }
    for given in (schema, json.dumps(schema)):
        made = await client.generate(
            "x", max_new_tokens=200, temperature=0.3, top_k=20, json_schema=given, seed=2
        )
        value = json.loads(made.text)
        assert value["n"] in (1, 2, 3)
        assert value["ok"] in (True, False)
    made = await client.generate("x", max_new_tokens=20, ebnf='root ::= "yes" | "no"')
    assert made.text in ("yes", "no")
    # The end of the grammar is not ignored: the grammar allows no token after it.
    made = await client.generate("x", max_new_tokens=20, regex="a{3}", ignore_eos=True)
    assert made.text == "aaa"
    assert made.output_ids[-1] in client.info.eos_token_ids
    tag = {
        "type": "structural_tag",
        "format": {
            "type": "sequence",
            "elements": [
                {"type": "const_string", "value": "<n>"},
                {"type": "regex", "pattern": "[0-9]{2}"},
                {"type": "const_string", "value": "</n>"},
            ],
        },
    }
    made = await client.generate("x", max_new_tokens=20, structural_tag=tag)
    assert re.fullmatch("<n>[0-9]{2}</n>", made.text)


@pytest.mark.parametrize(
    "grammar",
    [
        {"regex": "("},
        {"json_schema": "{"},
        {"json_schema": {"type": "nothing that exists"}},
        {"ebnf": "root ::= ("},
        {"structural_tag": {"type": "structural_tag", "format": {"type": "no such"}}},
        {"structural_tag": {}},
        {"structural_tag": "[]"},
        {"structural_tag": "3"},
        {"structural_tag": {"structures": [{"begin": "<a>"}], "triggers": ["<"]}},
        {"structural_tag": {"structures": 3, "triggers": {}}},
        {"structural_tag": {"format": 5}},
        {"stop_regex": "("},
    ],
)
async def test_bad_grammars(client: sglrl.Client, grammar: dict[str, object]) -> None:
    with pytest.raises(sglrl.InvalidRequest) as caught:
        await client.generate(input_ids=PROMPT, max_new_tokens=4, timeout=300, **grammar)
    assert ".cc:" not in str(caught.value), "no file of xgrammar"
    assert len((await client.generate(input_ids=PROMPT, max_new_tokens=4)).output_ids) <= 4


async def test_tokens_to_go_on_from_that_do_not_fit_the_grammar(
    client: sglrl.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No sglrl client sends such a request, but another process may."""
    letters = np.array(client.tokenizer.encode("ab"), "<i4").tobytes()

    def make(*args: Any) -> GenerateArgs:
        *others, resume, lora, begin, rows = args
        assert resume == b""
        return GenerateArgs(*others, letters, lora, begin, rows)

    before = client.workers[0].pid
    with monkeypatch.context() as context:
        context.setattr("sglrl.inference.requests.GenerateArgs", make)
        wrong = client.generate("Call", max_new_tokens=9, regex="[0-9]{4}", timeout=300)
        right = client.generate("Call", max_new_tokens=9, regex="ab[0-9]{2}", timeout=300)
        refused, made = await asyncio.gather(wrong, right, return_exceptions=True)
    assert isinstance(refused, sglrl.EngineError | sglrl.UsageError)
    assert "tokens to go on from do not fit the grammar" in str(refused)
    assert re.fullmatch("[0-9]{2}", made.text)
    assert client.workers[0].pid == before


async def test_stop_regexes(client: sglrl.Client) -> None:
    wanted = {"max_new_tokens": 40, "temperature": 0, "ignore_eos": True}
    whole = await client.generate(input_ids=PROMPT, **wanted)
    first = re.search("[a-z]{2}", whole.text)
    assert first is not None
    made = await client.generate(input_ids=PROMPT, stop_regex=["no[0-9]{9}", "[a-z]{2}"], **wanted)
    assert (made.finish_reason, made.stop_match) == ("stop", "[a-z]{2}")
    assert made.output_ids.tolist() == whole.output_ids.tolist()[: len(made.output_ids)]
    # The text keeps the match, and no token follows the one that completed it.
    assert made.text.startswith(whole.text[: first.end()])
    assert not re.search("[a-z]{2}", client.tokenizer.decode(made.output_ids[:-1]))
    stream = client.stream(input_ids=PROMPT, stop_regex="[a-z]{2}", **wanted)
    assert "".join([chunk.text async for chunk in stream]) == made.text


async def test_stop_regexes_that_take_for_ever_end_alone(client: sglrl.Client) -> None:
    """The time of this regex doubles with every character. Other requests must not wait for it."""
    pids = [worker.pid for worker in client.workers]
    wanted = {"max_new_tokens": 60, "ignore_eos": True, "timeout": 100}
    endless = {"input_ids": PROMPT, "stop_regex": r"(?:[\s\S]+)+\x00\x01", **wanted}
    others = asyncio.ensure_future(client.generate(input_ids=PROMPT, n=8, **wanted))
    streamed = client.stream(**endless)
    calls = [client.generate(**endless, n=4), collected(streamed), client.generate(**endless)]
    for error in await asyncio.gather(*calls, return_exceptions=True):
        assert isinstance(error, sglrl.InvalidRequest)
        assert "longer than 0.5 s" in str(error)
    assert [len(one.output_ids) for one in await others] == [60] * 8
    made = await client.generate(input_ids=PROMPT, stop_regex="[a-z]{2}", **wanted)
    assert made.finish_reason in ("stop", "length")
    assert [worker.pid for worker in client.workers] == pids


async def collected(stream: sglrl.Stream) -> int:
    return len([chunk async for chunk in stream])


async def test_what_ended_it_can_be_kept(client: sglrl.Client) -> None:
    wanted = {"max_new_tokens": 40, "temperature": 0, "ignore_eos": True}
    text = (await client.generate(input_ids=PROMPT, **wanted)).text
    found = re.search("[a-z]{2}", text)
    assert found is not None
    stop = found.group()
    made = await client.generate(input_ids=PROMPT, stop=stop, no_stop_trim=True, **wanted)
    assert made.stop_match == stop
    assert made.text == text[: text.index(stop)] + stop
    stream = client.stream(input_ids=PROMPT, stop=stop, include_stop_str_in_output=True, **wanted)
    assert "".join([chunk.text async for chunk in stream]) == made.text


async def test_biases_are_part_of_the_logprobs(client: sglrl.Client, reference: Reference) -> None:
    row = reference.logprobs(PROMPT)[-1].astype(np.float64)
    likeliest, other = (int(i) for i in row.argsort()[[-1, 100]])
    for temperature, bias in ((0, {other: 2.5}), (0.7, {likeliest: -1.5, str(other): 3})):
        made = await client.generate(
            input_ids=PROMPT,
            max_new_tokens=1,
            temperature=temperature,
            logit_bias=bias,
            logprobs=True,
        )
        biased = row.copy()
        for token, value in bias.items():
            biased[int(token)] += value
        biased /= temperature or 1
        biased -= np.log(np.exp(biased).sum())
        (token,) = made.output_ids.tolist()
        assert temperature or token == int(biased.argmax())
        assert abs(biased[token] - made.logprobs[0]) < 1e-4
    forced, banned = await asyncio.gather(
        client.generate(input_ids=PROMPT, max_new_tokens=8, logit_bias={other: 100.0}),
        client.generate(
            input_ids=PROMPT,
            n=64,
            max_new_tokens=4,
            temperature=2.0,
            logit_bias={str(token): -np.inf for token in range(256)},
        ),
    )
    assert forced.output_ids.tolist() == [other] * 8
    assert min(int(sample.output_ids.min()) for sample in banned) >= 256


async def test_penalties_are_part_of_the_logprobs(
    client: sglrl.Client, reference: Reference
) -> None:
    made = await client.generate(
        input_ids=PROMPT,
        max_new_tokens=20,
        temperature=0,
        presence_penalty=2.0,
        logprobs=True,
        ignore_eos=True,
    )
    ids = made.output_ids.tolist()
    seen: Counter[int] = Counter()
    for i, token in enumerate(ids):
        row = reference.logprobs([*PROMPT, *ids[:i]])[-1].astype(np.float64)
        for past in seen:
            row[past] -= 2.0
        row -= np.log(np.exp(row).sum())
        assert token == int(row.argmax())
        assert abs(row[token] - made.logprobs[i]) < 1e-4
        seen[token] += 1


async def test_penalties_are_those_of_the_documents(
    client: sglrl.Client, reference: Reference
) -> None:
    """Every logprob of the distribution, with several penalties at once."""
    cases: list[dict[str, Any]] = [
        {"frequency_penalty": 0.7},
        {"presence_penalty": 0.9, "temperature": 0.6},
        {"repetition_penalty": 1.5},
        {"frequency_penalty": 0.7, "presence_penalty": -0.4, "repetition_penalty": 1.5},
        {
            "frequency_penalty": -0.3,
            "presence_penalty": 0.9,
            "repetition_penalty": 0.6,
            "logit_bias": {9: 1.5, 11: -2.0},
            "min_new_tokens": 12,
            "temperature": 1.3,
        },
    ]
    made = await asyncio.gather(
        *(
            client.generate(
                input_ids=PROMPT,
                max_new_tokens=24,
                seed=5,
                top_logprobs=300,
                ignore_eos="min_new_tokens" not in how,
                **how,
            )
            for how in cases
        )
    )
    for how, completion in zip(cases, made, strict=True):
        output = completion.output_ids.tolist()
        assert len(output) > 12
        rows = reference.logits([*PROMPT, *output])[len(PROMPT) - 1 : -1]
        top = completion.top_logprobs
        assert top is not None
        for at, row in enumerate(rows):
            ends = client.info.eos_token_ids if at < how.get("min_new_tokens", 0) else []
            expected = torch.log_softmax(penalized(row, output[:at], how, ends), -1).numpy()
            np.testing.assert_allclose(
                top.logprobs[at], expected[top.ids[at]], atol=1e-3, rtol=0, err_msg=str(how)
            )
