"""The routed experts that engines return, compared with the choices of transformers' routers."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
import torch
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM, DynamicCache, Qwen3MoeConfig

import sglrl

pytestmark = pytest.mark.asyncio(loop_scope="session")

LAYERS, K, EXPERTS = 3, 4, 16
PROMPTS = [[3 + (5 * i + 7 * j * j) % 290 for j in range(3 + 20 * i)] for i in range(3)]
WANTED: dict[str, Any] = {"return_routed_experts": True, "ignore_eos": True, "temperature": 0}


def make(folder: Path, seed: int) -> Path:
    torch.manual_seed(seed)
    config = Qwen3MoeConfig(
        vocab_size=300,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_experts=EXPERTS,
        num_experts_per_tok=K,
        moe_intermediate_size=16,
        norm_topk_prob=True,
        max_position_embeddings=512,
        bos_token_id=None,
        eos_token_id=2,
        pad_token_id=None,
    )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for tensor in model.parameters():
            tensor.copy_(torch.randn(tensor.shape) * 0.3 + (tensor.dim() == 1))
    model.save_pretrained(folder)
    return folder


class Router:
    """The choices of transformers' routers."""

    def __init__(self, folder: Path) -> None:
        torch.set_num_threads(1)
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    @torch.no_grad()
    def rows(self, ids: Any, cache: DynamicCache | None = None) -> NDArray[np.int64]:
        """Return the experts of tokens, most likely first: [tokens, layers, k].

        Args:
            cache: the KV cache of earlier tokens. It is extended.
        """
        tokens = torch.from_numpy(np.asarray(ids, np.int64))[None]
        options = {"output_router_logits": True, "past_key_values": cache}
        found = self.model(tokens, use_cache=cache is not None, **options).router_logits
        logits = torch.stack([one.reshape(len(ids), EXPERTS) for one in found], dim=1)
        return logits.topk(K, dim=-1).indices.numpy()


def whole(prompt: Sequence[int], made: sglrl.Completion) -> NDArray[np.int32]:
    return np.concatenate([np.array(prompt, np.int32), made.output_ids])


def same(rows: NDArray[Any] | None, expected: NDArray[np.int64]) -> None:
    assert rows is not None
    assert (rows.dtype, rows.shape) == (np.uint8, expected.shape)
    assert not rows.flags.writeable
    np.testing.assert_array_equal(rows, expected)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    base = tmp_path_factory.mktemp("experts")
    return [make(base / str(seed), seed) for seed in range(2)]


@pytest.fixture(scope="module")
def routers(folders: list[Path]) -> list[Router]:
    return [Router(folder) for folder in folders]


@pytest_asyncio.fixture(
    scope="module",
    loop_scope="session",
    params=[False, True],
    ids=["normal loop", "overlapping loop"],
)
async def pair(request: pytest.FixtureRequest, folders: list[Path]) -> AsyncIterator[sglrl.Client]:
    """Two workers, which prefill long prompts in parts."""
    async with sglrl.launch(
        folders[0],
        device="cpu",
        replicas=2,
        restarts=0,
        timeout=300,
        enable_return_routed_experts=True,
        disable_overlap_schedule=not request.param,
        chunked_prefill_size=32,
    ) as client:
        yield client


async def test_calls(pair: sglrl.Client, routers: list[Router]) -> None:
    for cached in (False, True):
        made = await pair.generate(input_ids=PROMPTS, max_new_tokens=70, worker=0, **WANTED)
        for prompt, one in zip(PROMPTS, made, strict=True):
            same(one.routed_experts, routers[0].rows(whole(prompt, one))[:-1])
            assert one.routed_from == 0
        # The second time, the prompts come from the prefix cache.
        assert (made[2].cached_tokens > 0) == cached
    plain = await pair.generate(input_ids=PROMPTS[0], max_new_tokens=4)
    assert (plain.routed_experts, plain.routed_from) == (None, 0)


async def test_turns(pair: sglrl.Client, routers: list[Router]) -> None:
    async with pair.session(input_ids=PROMPTS[1], max_new_tokens=9, **WANTED) as session:
        first = await session.generate()
        session.observe([7, 8, 9])
        second = await session.generate(return_routed_experts=False)
        session.observe([11])
        third = await session.generate()
        # Each position is sent once.
        stops = [len(PROMPTS[1]) + 9 - 1, len(third.prompt_ids) + 9 - 1]
        assert [first.routed_from, third.routed_from] == [0, stops[0]]
        assert second.routed_experts is None
        assert [len(turn.routed_experts) for turn in (first, third)] == [
            stops[0],
            stops[1] - stops[0],
        ]
        fork = session.fork()
        session.go_back()
        session.observe([200, 201])
        await session.generate()
        fork.observe([5])
        await fork.generate()
        trajectory = session.trajectory()
    assert len(trajectory.leaves) == 2
    for leaf in trajectory.leaves:
        same(leaf.routed_experts, routers[0].rows(leaf.input_ids)[:-1])


@pytest.mark.parametrize("pair", [True], ids=["overlapping loop"], indirect=True)
@pytest.mark.parametrize("inflight", ["continue", "retract"])
async def test_updates(
    pair: sglrl.Client, folders: list[Path], routers: list[Router], inflight: Any
) -> None:
    """A row is that of the pass whose logits gave the next token."""
    prompt = PROMPTS[1]
    stream = pair.stream(input_ids=prompt, max_new_tokens=400, **WANTED)
    chunks = aiter(stream)
    for _ in range(5):
        await anext(chunks)
    # On a busy machine, the request could end before the update.
    await pair.pause()
    await pair.update_weights_from_disk(folders[1], inflight=inflight)
    await pair.resume()
    async for _ in chunks:
        pass
    made = stream.completion
    await pair.update_weights_from_disk(folders[0])
    before, after = made.versions
    assert before.stop == after.start < after.stop == 400
    ids, switch = whole(prompt, made), len(prompt) + after.start - 1
    cache = DynamicCache()
    expected = [routers[0].rows(ids[:switch], cache)]
    if inflight == "continue":
        # One token after the other, as the engine has computed them.
        expected.append(routers[1].rows(ids[switch:-1], cache))
    else:
        expected.append(routers[1].rows(ids[:-1])[switch:])
    same(made.routed_experts, np.concatenate(expected))
    assert (routers[1].rows(ids[:switch]) != expected[0]).any()


async def test_a_worker_dies(pair: sglrl.Client, routers: list[Router]) -> None:
    prompt = PROMPTS[2]
    stream = pair.stream(input_ids=prompt, max_new_tokens=400, **WANTED)
    call = asyncio.ensure_future(pair.generate(input_ids=prompt, max_new_tokens=400, **WANTED))
    chunks = aiter(stream)
    for _ in range(5):
        await anext(chunks)
    await pair.pause()
    for worker in pair.workers:
        if worker.load:
            os.kill(worker.pid, signal.SIGKILL)
            break
    await pair.resume()
    async for _ in chunks:
        pass
    made = [stream.completion, await call]
    assert sum(one.resumed for one in made)
    for one in made:
        same(one.routed_experts, routers[0].rows(whole(prompt, one))[:-1])


async def test_what_is_rejected(qwen: Path, folders: list[Path]) -> None:
    async with sglrl.launch(qwen, device="cpu") as client:
        with pytest.raises(sglrl.InvalidRequest, match="enable_return_routed_experts=True"):
            await client.generate("a", return_routed_experts=True)
    why = "enable_return_routed_experts=True needs a mixture of experts, and this model has none"
    whole = "needs chunked_prefill_size above 0"
    options: dict[str, Any] = {"device": "cpu", "enable_return_routed_experts": True}
    with pytest.raises(sglrl.WorkerStartError, match=why):
        await sglrl.launch(qwen, **options)
    with pytest.raises(sglrl.WorkerStartError, match=whole):
        await sglrl.launch(folders[0], chunked_prefill_size=-1, **options)
