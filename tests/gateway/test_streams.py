"""The events of a stream, joined, equal the whole answer."""

from __future__ import annotations

import asyncio
import json
import random
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest

from sglrl.gateway import completions, sglang_generate, vllm_generate
from sglrl.gateway.dialect import DONE, TurnRequest
from sglrl.gateway.errors import HttpError
from sglrl.gateway.streams import StreamedTokens
from sglrl.inference.completion import cut_text
from sglrl.inference.sampling import SamplingParams
from sglrl.inference.tokens import TokenizerBox
from sglrl.launching.tiny_model import tiny_model
from sglrl.wire.engine import TokenChunk

from .made import chunk, completion

TEXT = "A stop, 🙂 é\n\n  and more 🙂🙂 text; stop"


@pytest.fixture(scope="module")
def box() -> TokenizerBox:
    return TokenizerBox(str(tiny_model()))


def pieces_of(ids: list[int], chance: random.Random, top: int) -> list[TokenChunk]:
    found, version = [], 0
    while ids:
        size = chance.randint(1, 3)
        version += chance.random() < 0.2
        # An update aborts a turn, which then goes on.
        finish = "abort" if chance.random() < 0.2 else ""
        found.append(chunk(ids[:size], top, version=version, finish=finish, cached_tokens=1))
        ids = ids[size:]
    return found


async def streamed(
    box: TokenizerBox, answer: Any, turns: list[TurnRequest], pieces: list[list[TokenChunk]],
    chance: random.Random,
) -> tuple[list[dict[str, Any]], list[Any]]:  # fmt: skip
    """Return the events of a stream, and its completions."""
    stream = StreamedTokens(turns)
    specs = []
    for turn in turns:
        found = box.encode_texts([turn.prompt])[0] if isinstance(turn.prompt, str) else turn.prompt
        spec: Any = SimpleNamespace(
            requests=SimpleNamespace(decode=box.decode),
            options=SimpleNamespace(lora=None),
            prepare=lambda values: SimpleNamespace(params=SamplingParams(**values)),
            known_ids=np.array(found, "<i4").tobytes(),
        )
        specs += [spec] * turn.choices
    made, wanted = [], [turn for turn in turns for _ in range(turn.choices)]
    for index, chunks in enumerate(pieces):
        ids = [token for one in chunks for token in np.frombuffer(one.ids, "<i4").tolist()]
        params = SamplingParams(**dict(wanted[index].sampling))
        whole = box.decode(ids, True)
        stops = [stop for stop in params.stop_strings if whole.endswith(stop)]
        finish, match = ("stop", stops[0]) if stops else ("length", None)
        held = chunks.pop() if chance.random() < 0.5 else TokenChunk(b"")
        if held.ids and not stops and chance.random() < 0.5:
            # A stop token, which the text does not have.
            finish, match = "stop", ids[-1]
        last = msgspec.structs.replace(
            held,
            finish=finish,
            stop_match=match,
            cached_tokens=1,
            version=held.version or (chunks[-1].version if chunks else 0),
        )
        chunks.append(last)
        prompt = np.frombuffer(specs[index].known_ids, "<i4").tolist()
        values: Any = dict(wanted[index].sampling)
        one = completion(
            [], chunks=chunks, prompt=prompt, decode=box.decode, top=wanted[index].top_logprobs,
            **values,
        )  # fmt: skip
        assert one.text == cut_text(
            one.output_ids, last.finish, last.stop_match, box.decode, one.params
        )
        made.append(one)
    order = [index for index, chunks in enumerate(pieces) for _ in chunks]
    chance.shuffle(order)
    left = [list(chunks) for chunks in pieces]
    events: list[bytes] = [answer.begin()]

    async def collect() -> None:
        async for event in stream.events(answer):
            events.append(event)

    collecting = asyncio.ensure_future(collect())
    for index in order:
        stream.add(index, specs[index], left[index].pop(0))
        if chance.random() < 0.7:
            # Otherwise an event has several chunks.
            await asyncio.sleep(0)
    stream.arrived.end()
    await collecting
    sent = b"".join(events) + answer.end(made, stream.sent)
    assert sent.endswith(DONE)
    lines = sent.decode().split("\n\n")
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-2]], made


@pytest.mark.parametrize("seed", range(25))
def test_joined_events(box: TokenizerBox, seed: int) -> None:
    chance = random.Random(seed)
    (text,) = box.encode_rendered([TEXT])

    def draw(top: int) -> list[list[TokenChunk]]:
        several = []
        for _ in range(4):
            ids = text if chance.random() < 0.5 else chance.choices(range(3, 300), k=20)
            several.append(pieces_of(list(ids), chance, top))
        return several

    check_completions(box, chance, draw(2))
    check_sglang(box, chance, draw(0))
    check_vllm(box, chance, draw(3))


def check_completions(box: TokenizerBox, chance: random.Random, pieces: Any) -> None:
    fields = {
        "prompt": ["ab", "c"], "n": 2, "stop": [" stop", "; stop"], "stream": True,
        "return_token_ids": True, "stream_options": {"include_usage": True},
        **chance.choice([{"logprobs": 2}, {"echo": True}]),
    }  # fmt: skip
    request = completions.parse(json.dumps(fields).encode())
    answer = request.answer("tiny", "")
    events, made = asyncio.run(streamed(box, answer, request.turns(), pieces, chance))
    whole = answer.whole(made)
    *events, usage = events
    assert usage["usage"] == whole["usage"]
    for index, choice in enumerate(whole["choices"]):
        parts = [event["choices"][0] for event in events if event["choices"][0]["index"] == index]
        assert "".join(part["text"] for part in parts) == choice["text"]
        for name in ("tokens", "token_logprobs", "top_logprobs") if request.logprobs else ():
            joined = [one for part in parts for one in part["logprobs"][name]]
            assert joined == choice["logprobs"][name]
        assert [token for part in parts for token in part["token_ids"]] == choice["token_ids"]
        *before, last = parts
        for name in ("finish_reason", "weight_versions", "prompt_token_ids"):
            assert last[name] == choice[name]
            assert not any(part.get(name) for part in before)


def check_sglang(box: TokenizerBox, chance: random.Random, pieces: Any) -> None:
    fields = {
        "input_ids": [[5, 6], [7]], "stream": True, "return_logprob": True,
        "sampling_params": {"n": 2, "stop": " stop"}, "return_text_in_logprobs": True,
    }  # fmt: skip
    request = sglang_generate.parse(json.dumps(fields).encode())
    answer = request.answer("tiny", "")
    events, made = asyncio.run(streamed(box, answer, request.turns(), pieces, chance))
    for index, whole in enumerate(answer.whole(made)):
        parts = [event for event in events if event["index"] == index]
        for one, other in pairwise(parts):
            # Each event has all so far.
            assert other["text"].startswith(one["text"])
            assert one["meta_info"]["finish_reason"] is None
            count = len(one["output_ids"])
            assert one["output_ids"] == whole["output_ids"][:count]
            assert one["meta_info"]["completion_tokens"] == count
            logprobs = whole["meta_info"]["output_token_logprobs"][:count]
            assert one["meta_info"]["output_token_logprobs"] == logprobs
            assert one["meta_info"]["prompt_tokens"] == whole["meta_info"]["prompt_tokens"]
            assert len(other["output_ids"]) > count or other["meta_info"]["finish_reason"]
            assert versions_of(one) == versions_of(whole)[:count]
        assert parts[-1] == json.loads(json.dumps({**whole, "index": index}))


def versions_of(row: dict[str, Any]) -> list[int]:
    """Return the policy version of each token."""
    spans = row["meta_info"]["weight_versions"]
    return [span["version"] for span in spans for _ in range(span["start"], span["end"])]


def check_vllm(box: TokenizerBox, chance: random.Random, pieces: Any) -> None:
    fields = {
        "token_ids": [5, 6], "stream": True, "sampling_params": {"n": 4, "logprobs": 3},
        "stream_options": {"include_usage": True}, "return_token_ids": True,
    }  # fmt: skip
    request = vllm_generate.parse(json.dumps(fields).encode())
    answer = request.answer("tiny", "")
    events, made = asyncio.run(streamed(box, answer, request.turns(), pieces, chance))
    whole = answer.whole(made)
    *events, usage = events
    assert usage["usage"] == whole["usage"]
    for index, choice in enumerate(whole["choices"]):
        own = [event for event in events if event["choices"][0]["index"] == index]
        assert own[0]["prompt_token_ids"] == [5, 6]
        assert not any(event.get("prompt_token_ids") for event in own[1:])
        parts = [event["choices"][0] for event in own]
        assert [token for part in parts for token in part["token_ids"]] == choice["token_ids"]
        assert all(part["token_ids"] for part in parts[:-1])
        joined = [one for part in parts for one in part["logprobs"]["content"]]
        assert joined == choice["logprobs"]["content"]
        for name in ("finish_reason", "stop_reason", "weight_versions"):
            assert parts[-1][name] == choice[name]


def test_a_stream_that_fails() -> None:
    error = HttpError(503, "no worker")
    for module, fields in (
        (completions, {"prompt": "a"}),
        (sglang_generate, {"text": "a"}),
        (vllm_generate, {"token_ids": [1]}),
    ):
        request: Any = module.parse(json.dumps(fields).encode())  # type: ignore[attr-defined]
        sent = request.answer("tiny", "").failed(error)
        assert sent.endswith(DONE)
        first = json.loads(sent.decode().partition("\n\n")[0].removeprefix("data: "))
        assert first["error"]["message"] == "no worker"
