"""Sessions on the real engine: trajectories hold exactly the tokens that the model saw and sampled.

The tests also compare sessions with a chat template's rendering of the same conversation.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
from engine.policies import PROMPTS, Lab, Policies, until_running
from engine.reference import Reference

import sglrl
from sglrl.launching.tiny_model import CHAT_TEMPLATE
from sglrl.wire.engine import TokenChunk

pytestmark = pytest.mark.asyncio(loop_scope="session")

ASK = [{"role": "system", "content": "Answer."}, {"role": "user", "content": "2 + 3 = ?"}]
WORDS: dict[str, Any] = {"regex": "[a-z]{3,8}( [a-z]{2,5}){1,3}", "max_new_tokens": 48}
"""Options for answers that are text and that the model ends itself."""


@pytest.fixture
def template(client: sglrl.Client) -> Iterator[Any]:
    """Yield a function that sets another chat template until the test ends."""
    tokenizer = client.tokenizer

    def use(text: str) -> None:
        tokenizer.chat_template = text

    yield use
    tokenizer.chat_template = CHAT_TEMPLATE


def rendered(client: sglrl.Client, messages: list[dict[str, str]], **more: Any) -> str:
    text = client.tokenizer.apply_chat_template(messages, tokenize=False, **more)
    assert isinstance(text, str)
    return text


TEMPLATES = {
    "chatml": CHAT_TEMPLATE,
    # This template has no line end after a turn, and starts a turn differently.
    "tight": (
        "{% for m in messages %}<|im_start|>{{ m.role }}:{{ m.content }}<|im_end|>{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant:{% endif %}"
    ),
    # The turn's end is text that no single token matches.
    "text": (
        "{% for m in messages %}[{{ m.role }}] {{ m.content }} [end]\n{% endfor %}"
        "{% if add_generation_prompt %}[assistant] {% endif %}"
    ),
    "tools": (
        "{% if tools %}{{ tools | length }} tools\n{% endif %}{% for m in messages %}"
        "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    ),
}


@pytest.mark.parametrize("name", TEMPLATES)
async def test_a_conversation_is_what_the_template_makes_of_it(
    client: sglrl.Client, template: Any, name: str
) -> None:
    template(TEMPLATES[name])
    tools = [{"name": "add"}] if name == "tools" else None
    messages: list[dict[str, str]] = list(ASK)
    async with client.session(messages=messages, tools=tools, **WORDS) as session:
        replies: list[list[dict[str, str]]] = [
            [{"role": "tool", "content": "5"}],
            [{"role": "tool", "content": "6"}, {"role": "user", "content": "Sure?"}],
            [],
        ]
        for reply in replies:
            turn = await session.generate()
            assert turn.finish_reason == "stop"
            messages.append({"role": "assistant", "content": turn.text})
            for message in reply:
                session.observe(message)
            messages += reply
        ids = session.ids
        whole = rendered(client, messages, tools=tools)
        text = client.tokenizer.decode(ids.tolist(), skip_special_tokens=False)
        # The last turn has the model's own end. The template continues after it.
        end = client.tokenizer.eos_token
        if name == "text":
            text = text.replace(end, "")
        assert whole.startswith(text)
        assert whole[len(text) :] in ("", "\n", " [end]\n")
        trajectory = session.trajectory(1.0)
    assert trajectory.messages == messages
    assert text.endswith(trajectory.text.replace(end, "") if name == "text" else trajectory.text)
    sampled = np.concatenate([t.output_ids for t in session.turns])
    assert trajectory.response_ids[trajectory.loss_mask].tolist() == sampled.tolist()
    assert [t.prompt_ids.tolist() for t in session.turns] == [
        trajectory.input_ids[: len(trajectory.prompt_ids) + turn.start].tolist()
        for turn in trajectory.turns
    ]


REASONING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{{ m.content.split('q')[-1] if m.role == 'assistant' and not loop.last else m.content }}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""Omits the text before a "q" in earlier answers, as other templates omit reasoning."""


async def test_a_template_that_rewrites_history(client: sglrl.Client, template: Any) -> None:
    template(REASONING)
    thinks: dict[str, Any] = {"regex": "think[a-z]{2}q[a-p]{4}", "max_new_tokens": 32}
    messages: list[dict[str, str]] = list(ASK)
    async with client.session(messages=messages, **thinks) as session:
        for reward in (1, 2, 3):
            turn = await session.generate()
            text = client.tokenizer.decode(turn.prompt_ids.tolist(), skip_special_tokens=False)
            assert text == rendered(client, messages, add_generation_prompt=True)
            assert turn.text.startswith("think")
            session.reward(reward)
            new = {"role": "user", "content": "Go on."}
            session.observe(new)
            messages += [{"role": "assistant", "content": turn.text}, new]
        leaves = session.trajectories()
        assert len(session.trajectory().branches) == 2
    assert [leaf.reward for leaf in leaves] == [1, 2, 3]
    for leaf, turn in zip(leaves, session.turns, strict=True):
        assert leaf.prompt_ids.tolist() == turn.prompt_ids.tolist()
        assert leaf.response_ids.tolist() == turn.output_ids.tolist()
    async with client.session(messages=ASK, allow_rewrite=True, **thinks) as session:
        first = await session.generate()
        session.observe({"role": "user", "content": "Go on."})
        second = await session.generate()
        # The answer as sampled, reasoning included, and then the template's text after an answer.
        text = client.tokenizer.decode(second.prompt_ids.tolist(), skip_special_tokens=False)
        assert text == (
            rendered(client, ASK, add_generation_prompt=True)
            + first.text
            + "<|im_end|>\n<|im_start|>user\nGo on.<|im_end|>\n<|im_start|>assistant\n"
        )


async def test_a_turn_cut_short_is_ended_as_the_template_does(client: sglrl.Client) -> None:
    end = client.tokenizer.eos_token_id
    async with client.session(messages=ASK, regex="[a-z]{90}") as session:
        turn = await session.generate(max_new_tokens=3)
        assert turn.finish_reason == "length"
        session.observe({"role": "user", "content": "Go on."})
        following = await session.generate(max_new_tokens=3)
    added = following.prompt_ids[len(turn.prompt_ids) + 3 :].tolist()
    assert added[0] == end
    assert client.tokenizer.decode(added).startswith("<|im_end|>\n<|im_start|>user\nGo on.")


@pytest.mark.parametrize("during", [False, True])
async def test_messages_of_a_turn_that_failed_are_in_the_next_one(
    client: sglrl.Client, during: bool
) -> None:
    """Messages observed before or during the failed turn are included: it adds no answer."""
    async with client.session(messages=ASK, **WORDS) as session:
        first = await session.generate()
        session.observe({"role": "tool", "content": "5"})
        before = session.ids.tolist()
        failing = asyncio.ensure_future(
            session.generate(regex=None, max_new_tokens=1500, ignore_eos=True)
        )
        await until_running(client, 1)
        if during:
            session.observe({"role": "user", "content": "Be brief."})
        failing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await failing
        assert session.ids.tolist() == before
        if not during:
            session.observe({"role": "user", "content": "Be brief."})
        second = await session.generate()
    messages = [
        *ASK,
        {"role": "assistant", "content": first.text},
        {"role": "tool", "content": "5"},
        {"role": "user", "content": "Be brief."},
    ]
    text = client.tokenizer.decode(second.prompt_ids.tolist())
    assert text == rendered(client, messages, add_generation_prompt=True)


async def test_what_is_observed_while_messages_are_encoded(client: sglrl.Client) -> None:
    """The observation is added after the running turn, and is not lost."""
    async with client.session(messages=ASK, **WORDS) as session:
        await session.generate()
        session.observe({"role": "user", "content": "one"})
        turn = asyncio.ensure_future(session.generate())
        await asyncio.sleep(0)
        # This blocks for at least as long as the encoding takes.
        client.tokenizer(["two"] * 2000)
        session.observe(" TWO")
        await turn
        assert "TWO" not in client.tokenizer.decode(session.ids.tolist())
        last = await session.generate()
    assert client.tokenizer.decode(last.prompt_ids.tolist()).endswith(" TWO")


async def test_text_within_a_turn_belongs_to_it(client: sglrl.Client) -> None:
    async with client.session(messages=ASK, **WORDS) as session:
        await session.generate(max_new_tokens=2)
        session.observe(" = (looked up) ")
        turn = await session.generate()
        session.observe({"role": "user", "content": "Thanks."})
        following = await session.generate(max_new_tokens=2)
        text = client.tokenizer.decode(following.prompt_ids.tolist())
    answer = text.removeprefix(rendered(client, ASK, add_generation_prompt=True))
    answer = answer.partition("<|im_end|>")[0]
    assert " = (looked up) " in answer
    assert answer.endswith(turn.text)
    messages = [
        *ASK,
        {"role": "assistant", "content": answer},
        {"role": "user", "content": "Thanks."},
    ]
    assert text == rendered(client, messages, add_generation_prompt=True)


async def test_messages_need_a_template_and_a_turn(client: sglrl.Client, template: Any) -> None:
    async with client.session("2 + 3 =", max_new_tokens=2) as session:
        await session.generate()
        with pytest.raises(sglrl.UsageError, match="began without messages"):
            session.observe({"role": "user", "content": "x"})
    with pytest.raises(sglrl.InvalidRequest, match="exactly one"):
        client.session("x", messages=ASK)
    template("{{ raise_exception('no') }}")
    async with client.session(messages=ASK) as session:
        with pytest.raises(sglrl.InvalidRequest, match="template rejects these messages: no"):
            await session.generate()


# --- logprobs and versions ------------------------------------------------------------------------


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def lab(models: Path) -> AsyncIterator[Lab]:
    policies = Policies(models / "session-policies")
    async with sglrl.launch(
        policies[0].folder, device="cpu", max_running_requests=8, weight_device="cpu"
    ) as client:
        yield Lab(client, policies)


def check_replay(lab: Lab, session: sglrl.Session, trajectory: sglrl.Trajectory) -> None:
    """Check every sampled token's logprob by transformers with the weights of its version."""
    turns = session.turns
    assert len(turns) == len(trajectory.turns)
    expected = np.zeros(len(trajectory.response_ids), np.float32)
    for turn, completion in zip(trajectory.turns, turns, strict=True):
        expected[turn.start : turn.stop] = lab.expected(completion, again=False)
    np.testing.assert_allclose(trajectory.logprobs, expected, atol=lab.tolerance, rtol=0)


def check_simple_replay(reference: Reference, trajectory: sglrl.Trajectory) -> None:
    """Check a trajectory of one version the same way, in one pass over all of it."""
    logprobs = reference.logprobs_of(trajectory.prompt_ids, trajectory.response_ids)
    mask = trajectory.loss_mask
    np.testing.assert_allclose(trajectory.logprobs[mask], logprobs[mask], atol=1e-4, rtol=0)
    assert (trajectory.logprobs[~mask] == 0).all()
    assert (trajectory.versions[~mask] == -1).all()


async def test_turns_of_one_version_replay_in_one_pass(lab: Lab) -> None:
    await lab.update(0)
    async with lab.client.session(input_ids=PROMPTS[2], max_new_tokens=20) as session:
        for observed in ([5, 6, 7], [400, 8]):
            await session.generate()
            session.observe(observed)
        await session.generate()
        trajectory = session.trajectory(0.0)
    check_simple_replay(lab.current, trajectory)
    assert set(trajectory.versions[trajectory.loss_mask].tolist()) == {lab.client.weight_version}


async def test_branches_replay(lab: Lab) -> None:
    await lab.update(0)
    async with lab.client.session(input_ids=PROMPTS[2], max_new_tokens=20) as session:
        for observed in ([5, 6, 7], [400, 8]):
            await session.generate()
            session.observe(observed)
        await session.generate()
        session.go_back(2)
        session.observe([9, 10])
        await session.generate()
        session.go_back()
        await session.generate()
        whole = session.trajectory()
    assert len(whole.branches) == 2
    for leaf in whole.leaves:
        check_simple_replay(lab.current, leaf)
    assert whole.sampled_tokens == sum(len(turn.output_ids) for turn in session.turns)


async def test_a_session_through_weight_updates_replays_span_by_span(lab: Lab) -> None:
    """Updates come between turns and in the middle of turns."""
    long: dict[str, Any] = {"ignore_eos": True, "max_new_tokens": 200}
    sessions = [lab.client.session(input_ids=p, **long) for p in PROMPTS]
    first = lab.client.weight_version
    for seed in (1, 2):
        turns = [asyncio.ensure_future(s.generate()) for s in sessions]
        await until_running(lab.client, len(sessions))
        await lab.update(seed)
        await asyncio.gather(*turns)
        for session in sessions:
            session.observe([9, 10 + seed])
        await lab.update(0)
    await asyncio.gather(*(s.generate(max_new_tokens=8) for s in sessions))
    for session in sessions:
        trajectory = session.trajectory(1.0)
        check_replay(lab, session, trajectory)
        found = trajectory.versions[trajectory.loss_mask].tolist()
        assert found == sorted(found)
        assert trajectory.oldest_version == session.oldest_version == first
        # An update may come too late for one of the versions between.
        assert {first + 2, first + 4} <= set(found) <= {first + i for i in range(5)}


@pytest.mark.parametrize("seed", [None, 5])
async def test_a_turn_continues_with_new_weights_after_an_update(
    lab: Lab, seed: int | None
) -> None:
    long: dict[str, Any] = {"ignore_eos": True, "max_new_tokens": 800, "seed": seed}
    for _ in range(10):
        first = lab.client.weight_version
        session = lab.client.session(input_ids=PROMPTS[1], **long)
        turn = asyncio.ensure_future(session.generate())
        await until_running(lab.client, 1)
        await lab.other(inflight="abort")
        completion = await turn
        assert completion.finish_reason == "length"
        assert len(completion.output_ids) == 800
        if len(completion.versions) > 1:
            # Otherwise the turn had ended when the update came.
            break
    assert [s.version for s in completion.versions] == [first, first + 1]
    trajectory = session.trajectory(0.0)
    assert len(trajectory.turns) == 1
    # The new weights recompute the KV of all tokens: the resumed turn is a new request.
    np.testing.assert_allclose(
        trajectory.logprobs, lab.expected(completion, again=True), atol=lab.tolerance, rtol=0
    )


async def test_chunks_arrive_while_a_turn_is_sampled(client: sglrl.Client) -> None:
    """They arrive before the turn ends, and joined they are the turn. Silent turns have few."""
    async with client.session(input_ids=[5, 6, 7], ignore_eos=True, temperature=0.0) as session:
        arrived: list[TokenChunk] = []
        ended: list[bool] = []

        def on_chunk(chunk: TokenChunk) -> None:
            arrived.append(chunk)
            ended.append(turn.done())

        turn = asyncio.ensure_future(session.generate(max_new_tokens=64, on_chunk=on_chunk))
        streamed = await turn
    assert len(arrived) > 8
    assert not any(ended)
    assert b"".join(chunk.ids for chunk in arrived) == streamed.output_ids.tobytes()
    assert b"".join(chunk.logprobs for chunk in arrived) == streamed.logprobs.tobytes()
    async with client.session(input_ids=[5, 6, 7], ignore_eos=True, temperature=0.0) as session:
        assert (await session.generate(max_new_tokens=64)).output_ids.tolist() == (
            streamed.output_ids.tolist()
        )


async def test_top_logprobs_of_a_turn(client: sglrl.Client) -> None:
    values: dict[str, Any] = {"temperature": 0.0, "max_new_tokens": 8}
    async with client.session(input_ids=[5, 6, 7]) as session:
        turn = await session.generate(top_logprobs=3, **values)
        assert (await session.generate(**values)).top_logprobs is None
        with pytest.raises(sglrl.InvalidRequest, match="top_logprobs must be in"):
            await session.generate(top_logprobs=-1)
    single = await client.generate(input_ids=[5, 6, 7], top_logprobs=3, **values)
    assert turn.top_logprobs is not None
    assert single.top_logprobs is not None
    assert turn.top_logprobs.ids.tolist() == single.top_logprobs.ids.tolist()
    np.testing.assert_allclose(turn.top_logprobs.logprobs, single.top_logprobs.logprobs, atol=1e-5)
    assert turn.logprobs is not None
    np.testing.assert_allclose(turn.top_logprobs.logprobs[:, 0], turn.logprobs, atol=1e-5)


async def test_a_turn_to_go_on_after(client: sglrl.Client) -> None:
    """Its messages may be in another form: the tokens are those of the turn."""
    ask = [{"role": "user", "content": "Hi"}]
    async with client.session(messages=ask, max_new_tokens=6) as session:
        first = await session.generate()
        await session.generate()
        session.rewrite([*ask, {"role": "assistant", "content": "(as before)"}, *ask], after=0)
        third = await session.generate()
        whole = session.trajectory()
    before = [*first.prompt_ids.tolist(), *first.output_ids.tolist()]
    assert third.prompt_ids.tolist()[: len(before)] == before
    assert whole.branches[0].messages is not None
    assert whole.messages is not None
    assert len(whole.messages) == 4
    assert "(as before)" not in str(whole.messages)
