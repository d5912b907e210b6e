"""Every option of a session reaches it from every place where users can give it."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest
import torch

import sglrl
from sglrl.inference.sampling import SamplingOptions
from sglrl.sessions.options import RolloutSessionKeywords, SessionKeywords, SessionOptions

TOOL = {"type": "function", "function": {"name": "look", "parameters": {}}}
MESSAGES = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "A"}]
LAYER = "base_model.model.model.layers.0.self_attn.q_proj"
TENSORS = {
    f"{LAYER}.lora_A.weight": torch.ones(2, 8),
    f"{LAYER}.lora_B.weight": torch.ones(8, 2),
}
EXAMPLES: dict[str, Any] = {
    "tools": [TOOL],
    "template": {"enable_thinking": False},
    "chat_template_kwargs": {"enable_thinking": False},
    "continue_final_message": True,
    "allow_rewrite": True,
    "renderer": "template",
    "tool_choice": "required",
    "timeout": 5.0,
    "priority": 3,
    "metadata": {"level": 1},
    "reward_weights": {"format": 0.5},
    "lora": "a",
    "sampling": sglrl.SamplingParams(top_k=5),
}
WITH = {"tool_choice": {"tools": [TOOL]}}


async def session(client: sglrl.Client, **values: Any) -> SessionOptions:
    return client.session(messages=MESSAGES, **values).spec.options


async def blocking(client: sglrl.Client, **values: Any) -> SessionOptions:
    def call() -> SessionOptions:
        with sglrl.blocking.connect(client.address) as other:
            return other.session(messages=MESSAGES, **values).source.spec.options

    return await asyncio.to_thread(call)


async def of_rollout(client: sglrl.Client, **values: Any) -> SessionOptions:
    seen: list[SessionOptions] = []

    async def agent(session: sglrl.Session, item: Any) -> sglrl.Trajectory:
        seen.append(session.spec.options)
        other = client.session(input_ids=[1])
        await other.generate(max_new_tokens=1)
        return other.trajectory(0.0)

    run = sglrl.rollout(client, agent, [0], on_error="raise", **values)
    assert len([group async for group in run]) == 1
    return seen[0]


async def rollout(client: sglrl.Client, **values: Any) -> SessionOptions:
    return await of_rollout(client, open_session=lambda item: {"messages": MESSAGES}, **values)


async def item(client: sglrl.Client, **values: Any) -> SessionOptions:
    """The item's own arguments override those of the run."""
    run = {"lora": "b", "reward_weights": {"style": 1.0}, "sampling": sglrl.SamplingParams(top_k=9)}
    given = {"messages": MESSAGES, **values}
    return await of_rollout(client, open_session=lambda item: given, **run)


def test_the_keywords_are_the_declared_options() -> None:
    options = set(SessionOptions.__struct_fields__) - {"values"}
    sampling = SamplingOptions.__annotations__.keys()
    assert SessionKeywords.__annotations__.keys() == options | sampling
    left_out = {"timeout", "priority", "metadata", "seed", "sampling_seed"}
    assert RolloutSessionKeywords.__annotations__.keys() == (options | sampling) - left_out
    assert EXAMPLES.keys() == options


@pytest.mark.parametrize("call", [session, blocking, rollout, item], ids=lambda call: call.__name__)
async def test_every_place(call: Any) -> None:
    loras = {"max_lora_rank": 4, "lora_target_modules": ["q_proj"]}
    async with sglrl.launch("tiny", engine="fake", **loras) as client:
        for name in ("a", "b"):
            await client.load_lora(name, TENSORS, config={"r": 2, "lora_alpha": 4})
        for name, example in EXAMPLES.items():
            if call is rollout and name not in RolloutSessionKeywords.__annotations__:
                continue
            options = await call(client, **{name: example, **WITH.get(name, {})})
            assert getattr(options, name) == example, name


async def test_values_of_an_alias() -> None:
    async with sglrl.launch("tiny", engine="fake") as client:
        spec = client.session([{"role": "user", "content": "Hi"}], max_tokens=7).spec
        assert spec.options.values == {"max_new_tokens": 7}
        with pytest.raises(sglrl.InvalidRequest, match="another name"):
            client.session("Hi", max_tokens=7, max_new_tokens=7)


def test_options_are_checked_again_when_they_change() -> None:
    options = SessionOptions(tools=[TOOL], tool_choice="look")
    assert msgspec.structs.asdict(options.changed(priority=3)) == {
        **msgspec.structs.asdict(options),
        "priority": 3,
    }
    with pytest.raises(sglrl.InvalidRequest, match="tool_choice"):
        options.changed(tools=None)
    with pytest.raises(sglrl.UsageError, match="priority"):
        options.changed(priority=True)
