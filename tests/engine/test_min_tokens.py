"""``min_new_tokens`` holds for every end of an output, in both of SGLang's loops."""

from __future__ import annotations

import json
import random
import re
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

import sglrl

pytestmark = pytest.mark.asyncio(loop_scope="session")

PROMPT = [5, 6, 7]
ENDS = [2, 300]
GREEDY: dict[str, Any] = {"input_ids": PROMPT, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def several_ends(qwen: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with two tokens that end a text. The tokenizer knows one of them."""
    folder = tmp_path_factory.mktemp("ends") / "model"
    shutil.copytree(qwen, folder)
    for name in ("config.json", "generation_config.json"):
        path = folder / name
        values = json.loads(path.read_text()) if path.exists() else {}
        path.write_text(json.dumps({**values, "eos_token_id": ENDS}))
    return folder


@pytest_asyncio.fixture(
    scope="module",
    loop_scope="session",
    params=[True, False],
    ids=["normal loop", "overlapping loop"],
)
async def engine(request: pytest.FixtureRequest, several_ends: Path) -> AsyncIterator[sglrl.Client]:
    async with sglrl.launch(
        several_ends, device="cpu", disable_overlap_schedule=request.param
    ) as client:
        yield client


@pytest.mark.parametrize("stops", [[], [9]])
@pytest.mark.parametrize("ignore_eos", [False, True])
async def test_tokens(engine: sglrl.Client, stops: list[int], ignore_eos: bool) -> None:
    assert sorted(engine.info.eos_token_ids) == ENDS
    ends = {*stops, *([] if ignore_eos else ENDS)}
    wanted: dict[str, Any] = {
        "input_ids": PROMPT,
        "n": 20,
        "seed": 3,
        "max_new_tokens": 60,
        "logit_bias": dict.fromkeys([*ENDS, *stops], 4.0),
        "stop_token_ids": stops,
        "ignore_eos": ignore_eos,
    }
    early = await engine.generate(**wanted)
    if ends:
        assert min(len(made.output_ids) for made in early) < 20, "the ends are likely"
    # Requests with several minimums share batches with requests without one.
    for least, found in (
        (20, await engine.generate(**wanted, min_new_tokens=20)),
        (1, await engine.generate(**wanted, min_new_tokens=1)),
    ):
        for made in found:
            ids = made.output_ids.tolist()
            assert not ends & {*ids[:least]}
            if made.finish_reason == "stop":
                assert len(ids) > least
                assert made.stop_match == ids[-1]
                assert ids[-1] in ends
        if ends:
            assert any(made.finish_reason == "stop" for made in found)


def first_end(decode: Any, ids: list[int], pattern: str, least: int) -> int | None:
    """Return the number of tokens at which a match ends that ends after the first tokens."""
    floor = len(decode(ids[:least]).rstrip("\ufffd"))
    for count in range(least + 1, len(ids) + 1):
        text = decode(ids[:count])
        matches = [re.compile(pattern).search(text, at) for at in range(len(text))]
        if any(match is not None and match.end() > floor for match in matches):
            return count
    return None


@pytest.mark.parametrize("seed", range(3))
async def test_strings_and_expressions(engine: sglrl.Client, seed: int) -> None:
    chance = random.Random(seed)
    print("seed", seed)
    decode = engine.tokenizer.decode
    whole = await engine.generate(**GREEDY, max_new_tokens=60, logit_bias={ENDS[0]: -1e6})
    ids = whole.output_ids.tolist()
    words = [m.group() for m in re.finditer(r"[A-Za-z]{2,6}", decode(ids))]
    crossing = early = 0
    for _ in range(12):
        word = chance.choice(words)
        at = chance.randint(0, len(word) - 2)
        stop = word[at : at + chance.randint(1, 4)]
        least = chance.randint(0, 50)
        count = first_end(decode, ids, re.escape(stop), least)
        early += stop in decode(ids[:least])
        values: dict[str, Any] = {
            **GREEDY,
            "max_new_tokens": 60,
            "min_new_tokens": least,
            "logit_bias": {ENDS[0]: -1e6},
        }
        for how in ({"stop": stop}, {"stop_regex": re.escape(stop)}):
            made = await engine.generate(**values, **how)
            assert made.output_ids.tolist() == ids[:count], (stop, least)
            assert made.finish_reason == ("length" if count is None else "stop")
            chunks = engine.stream(**values, **how)
            text = "".join([chunk.text async for chunk in chunks])
            assert text == made.text
        if count is not None:
            floor = len(decode(ids[: count - 1]))
            end = decode(ids[:count]).find(stop, max(0, floor - len(stop) + 1))
            made = await engine.generate(**values, stop=stop)
            assert made.text == decode(ids[:count])[:end]
            crossing += end < len(decode(ids[:least]))
    print("matches before the minimum:", early, "across it:", crossing)
    assert early


async def test_a_match_across_the_minimum(engine: sglrl.Client) -> None:
    """A grammar dictates the text, whose characters are tokens of the grammar's choice."""
    for how in ({"stop": "abcd"}, {"stop_regex": "abc."}):
        for least, text in ((0, "abcd"), (3, "abcd"), (5, "abcdxyabcd"), (8, "abcdxyabcd")):
            made = await engine.generate(
                input_ids=PROMPT,
                regex="abcdxyabcdxxxxxx",
                # Only single characters are likely.
                logit_bias={
                    id_: -100.0 for id_ in range(512) if len(engine.tokenizer.decode([id_])) != 1
                },
                max_new_tokens=40,
                min_new_tokens=least,
                no_stop_trim=True,
                **how,
            )
            assert made.text == text, (how, least)
            assert made.finish_reason == "stop"
