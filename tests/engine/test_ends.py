"""Finish reasons when several apply: the last token that fits is checked like any other token."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

import sglrl

from .policies import Policies, until_running

pytestmark = pytest.mark.asyncio(loop_scope="session")

PROMPT = [5, 6, 7]
ASK = [{"role": "user", "content": "Hi"}]
GREEDY: dict[str, Any] = {"temperature": 0, "ignore_eos": True}


@pytest.mark.parametrize("room", [0, 1, 8])
@pytest.mark.parametrize("stream", [False, True])
async def test_the_last_token_may_be_the_end(client: sglrl.Client, room: int, stream: bool) -> None:
    """The grammar allows one letter and then the end token, with or without room after it."""
    (eos,) = client.info.eos_token_ids
    wanted: dict[str, Any] = {"messages": ASK, "regex": "a", "max_new_tokens": 2 + room}
    if stream:
        chunks = client.stream(**wanted)
        assert "".join([chunk.text async for chunk in chunks]) == "a"
        made = chunks.completion
    else:
        made = await client.generate(**wanted)
    assert (made.finish_reason, made.stop_match, made.text) == ("stop", eos, "a")
    assert len(made.output_ids) == 2
    assert made.output_ids[-1] == eos


@pytest.mark.parametrize("room", [0, 3])
async def test_the_last_token_may_end_a_stop_string(client: sglrl.Client, room: int) -> None:
    whole = await client.generate(input_ids=PROMPT, max_new_tokens=30, **GREEDY)
    ids = whole.output_ids.tolist()
    decode = client.tokenizer.decode
    # The first position whose text is letters and has not occurred before.
    at = next(
        i
        for i in range(3, 30)
        if decode([ids[i]]).isalpha() and decode([ids[i]]) not in decode(ids[:i])
    )
    stop = decode([ids[at]])
    made = await client.generate(
        input_ids=PROMPT, max_new_tokens=at + 1 + room, stop=stop, **GREEDY
    )
    assert (made.finish_reason, made.stop_match) == ("stop", stop)
    assert made.output_ids.tolist() == ids[: at + 1]
    assert made.text == decode(ids[:at])
    found = await client.generate(
        input_ids=PROMPT, max_new_tokens=at + 1 + room, stop_regex=stop, **GREEDY
    )
    assert found.finish_reason == "stop"
    made = await client.generate(input_ids=PROMPT, max_new_tokens=at, stop=stop, **GREEDY)
    assert (made.finish_reason, made.stop_match) == ("length", None)


@pytest.mark.parametrize("stop", ["answer", "日本"])
async def test_stop_strings_are_found_in_whatever_tokens(client: sglrl.Client, stop: str) -> None:
    """A model need not write a text in the tokens that its tokenizer produces for the text."""
    wanted: dict[str, Any] = {"regex": f"xx {stop} yyyy zzz", "max_new_tokens": 60, "n": 20}
    for how in ({"stop": stop}, {"stop_regex": stop}):
        found = await client.generate(messages=ASK, temperature=2.0, **wanted, **how)
        for made in found:
            assert made.finish_reason == "stop"
            assert made.text == ("xx " if "stop" in how else f"xx {stop}")


@pytest.mark.parametrize("room", [0, 5])
async def test_stop_tokens_count_also_where_the_models_own_end_does_not(
    client: sglrl.Client, room: int
) -> None:
    whole = await client.generate(input_ids=PROMPT, max_new_tokens=30, **GREEDY)
    ids = whole.output_ids.tolist()
    at = next(i for i in range(5, 30) if ids[i] not in ids[:i])
    made = await client.generate(
        input_ids=PROMPT, max_new_tokens=at + 1 + room, stop_token_ids=[ids[at]], **GREEDY
    )
    assert (made.finish_reason, made.stop_match) == ("stop", ids[at])
    assert made.output_ids.tolist() == ids[: at + 1]
    # The stop token also works alone.
    (eos,) = client.info.eos_token_ids
    made = await client.generate(
        input_ids=PROMPT,
        max_new_tokens=6,
        stop_token_ids=[ids[at]],
        logit_bias={eos: 1e6},
        **GREEDY,
    )
    assert made.output_ids.tolist() == [eos] * 6
    assert made.finish_reason == "length"


@pytest.mark.parametrize(
    "wanted",
    [
        pytest.param({"regex": "a", "max_new_tokens": 2}, id="length"),
        pytest.param({"stop": "<|im_end|>", "max_new_tokens": 9}, id="stop string"),
        pytest.param({"max_new_tokens": 1}, id="not an end"),
    ],
)
async def test_a_turn_that_the_model_has_ended_is_not_ended_again(
    client: sglrl.Client, wanted: dict[str, Any]
) -> None:
    (eos,) = client.info.eos_token_ids
    if "regex" not in wanted:
        wanted = wanted | {"ignore_eos": True, "logit_bias": {eos: 1e6}}
    async with client.session(messages=ASK, **wanted) as session:
        turn = await session.generate()
        assert turn.output_ids[-1] == eos
        session.observe({"role": "user", "content": "Go on."})
        following = await session.generate(max_new_tokens=2)
    behind = following.prompt_ids[len(turn.prompt_ids) + len(turn.output_ids) :]
    assert client.tokenizer.decode(behind.tolist()).startswith("\n<|im_start|>user\nGo on.")


async def test_the_oldest_version_is_of_a_token(qwen: Path, tmp_path: Path) -> None:
    """New weights return a turn that waits in the engine: no token of it has the old version."""
    policies = Policies(tmp_path)
    async with sglrl.launch(qwen, device="cpu", max_running_requests=1) as client:
        long = asyncio.create_task(
            client.generate(input_ids=[5, 6], max_new_tokens=1500, ignore_eos=True)
        )
        await until_running(client, 1)
        session = client.session(input_ids=[7, 8], max_new_tokens=5, ignore_eos=True)
        turn = asyncio.create_task(session.generate())
        while sum(s.engine.waiting for s in await client.stats()) < 1:
            pass
        assert session.oldest_version == 0
        await client.update_weights(policies[1].model, inflight="abort")
        made = await turn
        assert made.versions == (sglrl.VersionSpan(0, 5, 1),)
        assert session.oldest_version == session.trajectory(0.0).oldest_version == 1
        await client.update_weights(policies[2].model)
        fork = session.fork()
        assert (await fork.generate()).versions == (sglrl.VersionSpan(0, 5, 2),)
        assert session.oldest_version == fork.oldest_version == 1
        assert fork.trajectory(0.0).newest_version == 2
        assert (await long).finish_reason == "abort"
