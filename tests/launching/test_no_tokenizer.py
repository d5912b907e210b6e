"""Models without a tokenizer: token ids go in and come out, and all text is refused."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from engine.policies import collect
from engine.reference import Reference

import sglrl
from sglrl.launching.tiny_model import make_model

pytestmark = pytest.mark.asyncio(loop_scope="session")

PROMPTS = [[3 + (5 * i + 13 * j * j) % 500 for j in range(2 + 3 * i)] for i in range(8)]
KEPT = {"config.json", "generation_config.json", "model.safetensors"}


# For qwen3, transformers makes up a tokenizer whose end of sequence is token 0.
@pytest_asyncio.fixture(scope="module", loop_scope="session", params=["qwen3", "llama"])
async def engine(request: pytest.FixtureRequest, models: Path) -> AsyncIterator[sglrl.Client]:
    folder = make_model(models / f"{request.param}-no-tokenizer", architecture=request.param)
    for file in folder.iterdir():
        if file.name not in KEPT:
            file.unlink()
    async with sglrl.launch(folder, device="cpu", timeout=300) as client:
        yield client


async def test_tokens_are_the_references(engine: sglrl.Client) -> None:
    reference = Reference(Path(engine.model))
    made = await engine.generate(input_ids=PROMPTS, max_new_tokens=20, temperature=0)
    (eos,) = engine.info.eos_token_ids
    for prompt, one in zip(PROMPTS, made, strict=True):
        expected = reference.greedy(prompt, 20)
        end = expected.index(eos) + 1 if eos in expected else 20
        assert one.output_ids.tolist() == expected[:end]
    stream = await collect(engine.stream(input_ids=PROMPTS[0], max_new_tokens=20, temperature=0))
    assert stream.output_ids.tolist() == made[0].output_ids.tolist()


async def test_only_the_models_own_tokens_end_an_output(engine: sglrl.Client) -> None:
    (eos,) = engine.info.eos_token_ids
    wanted = {"input_ids": [5, 6], "max_new_tokens": 9}
    zeros = await engine.generate(**wanted, logit_bias={0: 1000})
    assert zeros.output_ids.tolist() == [0] * 9
    ended = await engine.generate(**wanted, logit_bias={eos: 1000})
    assert ended.output_ids.tolist() == [eos]
    assert ended.finish_reason == "stop"
    later = await engine.generate(**wanted, logit_bias={eos: 1000}, min_new_tokens=4)
    assert later.output_ids.tolist().index(eos) == 4
    stopped = await engine.generate(**wanted, logit_bias={7: 1000}, stop_token_ids=[7])
    assert stopped.output_ids.tolist() == [7]


async def test_text_is_refused(engine: sglrl.Client) -> None:
    for values in (
        {"stop": "a"},
        {"stop_regex": "a"},
        {"regex": "a"},
        {"json_schema": {}},
        {"ebnf": 'root ::= "a"'},
    ):
        with pytest.raises(sglrl.InvalidRequest, match="this model has none"):
            await engine.generate(input_ids=[5], max_new_tokens=3, **values)
    made = await engine.generate(input_ids=[5], max_new_tokens=3)
    with pytest.raises(sglrl.InvalidRequest, match="no usable tokenizer"):
        made.text  # noqa: B018
    for prompt in ({"prompt": "a"}, {"messages": [{"role": "user", "content": "a"}]}):
        with pytest.raises(sglrl.InvalidRequest, match="no usable tokenizer"):
            await engine.generate(**prompt)
