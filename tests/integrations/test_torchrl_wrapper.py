"""SGLangWrapper against TorchRL's TransformersWrapper, with a real engine."""

from __future__ import annotations

import pickle
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict, TensorDictBase
from torchrl.data.llm import History
from torchrl.modules.llm.policies import ChatHistory, Masks, Text, Tokens, TransformersWrapper

import sglrl
from sglrl.integrations.torchrl import AsyncSGLang, SGLangWrapper
from sglrl.integrations.torchrl.inputs import unpad

pytestmark = [
    # This warning comes from TorchRL itself.
    pytest.mark.filterwarnings("ignore:size_average and reduce args:UserWarning"),
]
CHATS = [
    [
        {"role": "system", "content": "You are a careful assistant."},
        {"role": "user", "content": "What is the sum of two numbers?"},
    ],
    [
        {"role": "system", "content": "Answer with a number, step by step."},
        {"role": "user", "content": "one two three"},
    ],
    [
        {"role": "system", "content": "Think."},
        {"role": "user", "content": "What is the result of adding seven and eight together?"},
    ],
]
ANSWERS = ["The answer is twelve.", "four", "zero zero zero"]
TEXTS = ["What is the sum?", "You are", "The answer is the result of adding them together. What"]
MODES = ("history", "text", "tokens")
PAD = 0
layouts = pytest.mark.parametrize("padded", [True, False], ids=["padded", "ragged"])
modes = pytest.mark.parametrize("mode", MODES)
GREEDY: dict[str, Any] = {"max_new_tokens": 6, "temperature": 0.0}


@pytest.fixture(scope="module")
def tokenizer(pool: sglrl.BlockingClient) -> Any:
    return pool.tokenizer


def prompts(mode: str, tokenizer: Any) -> TensorDict:
    if mode == "history":
        return TensorDict(history=ChatHistory(prompt=History.from_chats(CHATS)), batch_size=3)
    if mode == "text":
        return TensorDict(text=Text(prompt=TEXTS), batch_size=3)
    ids = tokenizer(TEXTS, padding=True, padding_side="left", return_tensors="pt")
    return TensorDict(
        tokens=Tokens(prompt=ids["input_ids"]), attention_mask=ids["attention_mask"], batch_size=3
    )


def wholes(mode: str, tokenizer: Any) -> TensorDict:
    if mode == "history":
        chats = [
            [*chat, {"role": "assistant", "content": answer}]
            for chat, answer in zip(CHATS, ANSWERS, strict=True)
        ]
        return TensorDict(history=ChatHistory(full=History.from_chats(chats)), batch_size=3)
    if mode == "text":
        return TensorDict(text=Text(full=TEXTS), batch_size=3)
    ids = tokenizer(TEXTS, padding=True, padding_side="left", return_tensors="pt")
    return TensorDict(
        tokens=Tokens(full=ids["input_ids"]),
        masks=Masks(all_attention_mask=ids["attention_mask"].bool()),
        batch_size=3,
    )


def lists(td: TensorDictBase, *key: str) -> list[torch.Tensor] | None:
    found: Any = td.get(key, as_list=True)
    return None if found is None else list(found)


def assert_same(ours: TensorDictBase, theirs: TensorDictBase, *key: str, **limits: float) -> None:
    one, other = lists(ours, *key), lists(theirs, *key)
    assert (one is None) == (other is None), key
    for a, b in zip(one or [], other or [], strict=True):
        torch.testing.assert_close(a, b, check_dtype=False, **(limits or {"atol": 0, "rtol": 0}))


# --- against the reference ------------------------------------------------------------------------


@modes
@layouts
def test_greedy_generation_equals_the_references(
    mode: str, padded: bool, pool: sglrl.BlockingClient, hf_model: Any, tokenizer: Any
) -> None:
    arguments = {"input_mode": mode, "pad_output": padded, "tokenizer": tokenizer}
    ours = SGLangWrapper(pool, **arguments, generate_kwargs={**GREEDY, "ignore_eos": True})
    found = ours(prompts(mode, tokenizer))
    reference = TransformersWrapper(
        hf_model,
        **arguments,
        generate_kwargs={"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False},
    )
    with torch.inference_mode():
        expected = reference(prompts(mode, tokenizer))
    assert ours.in_keys == reference.in_keys
    assert ours.out_keys == reference.out_keys
    for name in ("prompt", "response", "full"):
        assert_same(found, expected, "tokens", name)
    assert_same(found, expected, "masks", "all_attention_mask")
    # The reference sets the log-prob of the first response token to 0.
    for key in ("response",):
        one, other = lists(found, "log_probs", key), lists(expected, "log_probs", key)
        assert one is not None
        assert other is not None
        for a, b in zip(one, other, strict=True):
            torch.testing.assert_close(a[1:], b[1:], atol=1e-4, rtol=1e-4)
    if mode != "tokens":
        assert found["text"].prompt == expected["text"].prompt


@modes
@layouts
def test_scores_equal_the_references(
    mode: str, padded: bool, pool: sglrl.BlockingClient, hf_model: Any, tokenizer: Any
) -> None:
    arguments = {
        "input_mode": mode,
        "pad_output": padded,
        "generate": False,
        "tokenizer": tokenizer,
    }
    ours = SGLangWrapper(pool, **arguments)
    found = ours(wholes(mode, tokenizer))
    with torch.inference_mode():
        expected = TransformersWrapper(hf_model, **arguments)(wholes(mode, tokenizer))
    assert_same(found, expected, "tokens", "full")
    assert_same(found, expected, "log_probs", "full", atol=1e-4, rtol=1e-4)
    assert_same(found, expected, "masks", "all_attention_mask")
    assert_same(found, expected, "masks", "all_assistant_mask")
    if mode == "history":
        masks = lists(found, "masks", "all_assistant_mask")
        assert masks is not None
        assert all(mask.any() for mask in masks)
        assert found["text"].full == expected["text"].full
        assert found["text"].response is None
    log_prob = ours.log_prob(wholes(mode, tokenizer))
    for a, b in zip(log_prob, lists(found, "log_probs", "full") or [], strict=True):
        torch.testing.assert_close(a, b)


@modes
@layouts
def test_sampled_log_probs_are_the_references(
    mode: str, padded: bool, pool: sglrl.BlockingClient, hf_model: Any, tokenizer: Any
) -> None:
    """As in a trainer, the policy in transformers scores the sampled tokens."""
    # Some responses stop early.
    values = {"max_new_tokens": 12, "stop_token_ids": range(100), "seed": 3, "n": 3}
    ours = SGLangWrapper(pool, input_mode=mode, pad_output=padded, generate_kwargs=values)
    found = ours(prompts(mode, tokenizer)).view(-1)
    reference = TransformersWrapper(
        hf_model, input_mode="tokens", generate=False, pad_output=padded, tokenizer=tokenizer
    )
    with torch.inference_mode():
        scored = reference(found.select("tokens", "masks").copy())
    # Our wrapper keeps each token at its place, also between the paddings.
    scorer = ours.get_new_version(input_mode="tokens", generate=False, generate_kwargs=None)
    again = scorer(found.select("tokens", "masks").copy())
    assert_same(again, scored, "tokens", "full")
    assert_same(again, scored, "log_probs", "full", atol=1e-4, rtol=1e-4)
    assert_same(again, found, "masks", "all_attention_mask")
    assert_same(again, found, "masks", "all_assistant_mask")
    ratios = []
    for a, b, mask in zip(
        lists(found, "log_probs", "full") or [],
        lists(scored, "log_probs", "full") or [],
        lists(found, "masks", "all_assistant_mask") or [],
        strict=True,
    ):
        assert a[~mask].isnan().logical_or(a[~mask] == 0).all()
        torch.testing.assert_close(a[mask], b[mask], atol=1e-4, rtol=1e-4)
        ratios.append((b[mask] - a[mask]).exp())
    weights = torch.cat(ratios)
    assert weights.sum() ** 2 / (weights**2).sum() / len(weights) > 0.99


@layouts
def test_distributions_are_the_references(
    padded: bool, pool: sglrl.BlockingClient, hf_model: Any, tokenizer: Any
) -> None:
    def shared(mode: str) -> dict[str, Any]:
        return {
            "input_mode": mode,
            "pad_output": padded,
            "generate": False,
            "tokenizer": tokenizer,
        }

    policy = SGLangWrapper(pool, input_mode="text", pad_output=padded, generate_kwargs=GREEDY)
    made = policy(prompts("text", tokenizer)).select("tokens", "masks")
    cases = {
        "_get_sft_dist": ("tokens", made),
        "_get_rlhf_dist": ("history", wholes("history", tokenizer)),
        "_get_generic_dist": ("history", wholes("history", tokenizer)),
    }
    for name, (mode, td) in cases.items():
        # TorchRL's own methods need this layout.
        td = td.to_lazystack(0)
        found = getattr(SGLangWrapper(pool, **shared(mode)), name)(td.copy())
        with torch.inference_mode():
            reference = TransformersWrapper(hf_model, **shared(mode))
            expected = getattr(reference, name)(td.copy())
        assert (found.mask == expected.mask).all()
        assert found.mask.any()
        ids = torch.randint(0, 512, found.mask.shape)
        torch.testing.assert_close(
            found.log_prob(ids), expected.log_prob(ids), atol=1e-3, rtol=1e-4
        )
    scorer = SGLangWrapper(pool, **shared("text"))
    td = wholes("text", tokenizer)
    whole = scorer.get_dist(td)
    ids = scorer(td).get(
        ("tokens", "full"), as_padded_tensor=True, padding_side="left", padding_value=PAD
    )
    for a, b, mask in zip(whole.log_prob(ids), scorer.log_prob(td), whole.mask, strict=True):
        torch.testing.assert_close(a[mask][1:], b[-int(mask.sum()) :][1:], atol=1e-4, rtol=1e-4)
    with pytest.raises(NotImplementedError, match="generate=True"):
        policy.get_dist(td)


@layouts
@pytest.mark.parametrize("key", ["full", "prompt"])
def test_the_assistant_mask_of_a_text_is_that_of_its_tokens(
    key: str, padded: bool, tiny: Path
) -> None:
    """There is no mask for the prompt alone, or for a text that omits a token."""
    with sglrl.blocking(tiny, engine="fake", vocab_size=512) as client:
        policy = SGLangWrapper(
            client, input_mode="text", pad_output=padded, generate_kwargs={"max_new_tokens": 5}
        )
        # The fake engine repeats the prompt.
        texts = ["hello there", "hi", f"hi{client.tokenizer.eos_token}"]
        made = policy(TensorDict(text=Text(prompt=texts), batch_size=3))
        scorer = policy.get_new_version(generate=False, input_key=("text", key))
        found = scorer(made.copy())
    for i, same in enumerate([key == "full", key == "full", False]):
        mask = found[i]["masks"].all_assistant_mask
        assert (mask is not None) is same
        if same:
            torch.testing.assert_close(found[i]["tokens"].full, made[i]["tokens"].full)
            torch.testing.assert_close(mask, made[i]["masks"].all_assistant_mask)


# --- layouts --------------------------------------------------------------------------------------


def test_padded_on_the_sides_that_torchrl_says(pool: sglrl.BlockingClient, tokenizer: Any) -> None:
    wrapper = SGLangWrapper(
        pool,
        input_mode="text",
        pad_output=True,
        generate_kwargs={"max_new_tokens": 6, "temperature": 0.0, "regex": "(a|bcd)"},
    )
    found = wrapper(prompts("text", tokenizer))
    tokens, masks, log_probs = found["tokens"], found["masks"], found["log_probs"]
    width, answer = tokens.prompt.shape[1], tokens.response.shape[1]
    assert tokens.full.shape == masks.all_attention_mask.shape == (3, width + answer)
    assert log_probs.full.shape == tokens.full.shape
    torch.testing.assert_close(tokens.full, torch.cat([tokens.prompt, tokens.response], 1))
    for i, text in enumerate(TEXTS):
        ids = torch.tensor(tokenizer(text)["input_ids"])
        assert (tokens.prompt[i, : width - len(ids)] == PAD).all()
        torch.testing.assert_close(tokens.prompt[i, width - len(ids) :], ids)
        mask = masks.all_attention_mask[i]
        torch.testing.assert_close(tokens.full[i, mask][: len(ids)], ids)
        made = masks.all_assistant_mask[i].sum()
        assert mask.sum() == len(ids) + made
        assert (tokens.response[i, made:] == PAD).all()
        assert log_probs.full[i, masks.all_assistant_mask[i]].isfinite().all()
        assert log_probs.full[i, :width].isnan().all()
    assert found["tokens"].padded is True


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_ragged_in_every_form_that_tensordict_gives(
    pool: sglrl.BlockingClient, tokenizer: Any
) -> None:
    wrapper = SGLangWrapper(pool, input_mode="text", generate_kwargs=GREEDY)
    found = wrapper(prompts("text", tokenizer))
    assert found["tokens"].padded is False
    rows = lists(found, "tokens", "full")
    assert rows is not None
    assert len({len(row) for row in rows}) > 1
    for layout in (torch.strided, torch.jagged):
        nested: Any = found.get(("tokens", "full"), as_nested_tensor=True, layout=layout)
        assert nested.is_nested
        assert nested.layout is layout
        for a, b in zip(nested.unbind(0), rows, strict=True):
            torch.testing.assert_close(a, b)
    padded: Any = found.get(
        ("tokens", "full"), as_padded_tensor=True, padding_side="left", padding_value=PAD
    )
    for a, b in zip(padded, rows, strict=True):
        torch.testing.assert_close(a[len(a) - len(b) :], b)


@pytest.mark.parametrize("ragged", ["list", "strided", "jagged"])
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_ragged_tokens_come_in(ragged: str, pool: sglrl.BlockingClient, tokenizer: Any) -> None:
    ids = [torch.tensor(tokenizer(text)["input_ids"]) for text in TEXTS]
    td = TensorDict(batch_size=3).to_lazystack(0)
    if ragged == "list":
        for row, one in zip(td.unbind(0), ids, strict=True):
            row["tokens", "prompt"] = one
    else:
        layout = getattr(torch, ragged)
        td["tokens"] = Tokens(
            prompt=torch.nested.nested_tensor(ids, layout=layout), batch_size=3
        ).to_lazystack(0)
    found = SGLangWrapper(pool, input_mode="tokens", generate_kwargs=GREEDY)(td)
    for a, b in zip(lists(found, "tokens", "prompt") or [], ids, strict=True):
        torch.testing.assert_close(a, b)


@layouts
def test_eos_is_kept_where_it_is_also_the_padding(
    padded: bool, pool: sglrl.BlockingClient, tiny: Any
) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny)
    tokenizer.pad_token = tokenizer.eos_token
    wrapper = SGLangWrapper(
        pool,
        tokenizer=tokenizer,
        pad_output=padded,
        generate_kwargs={"max_new_tokens": 16, "regex": "(a|bcdbcd)", "temperature": 2.0},
        num_samples=4,
    )
    found = wrapper(prompts("history", tokenizer)).view(-1)
    for i in range(12):
        row = found[i]
        made = row["masks"].all_assistant_mask
        ids, full = row["tokens"].response, row["tokens"].full
        assert full[made][-1] == tokenizer.eos_token_id
        assert (full[made][:-1] != tokenizer.eos_token_id).all()
        torch.testing.assert_close(ids[: made.sum()], full[made])
        # The template also ends turns with this token.
        prompt = full[row["masks"].all_attention_mask & ~made]
        assert (prompt == tokenizer.eos_token_id).sum() == 2
        assert row["log_probs"].full[made].isfinite().all()
        assert row["text"].response == tokenizer.decode(full[made][:-1])
        assert row["history"].full.content[-1] == row["text"].response
        assert row["history"].full.is_complete[-1]


# --- arguments ------------------------------------------------------------------------------------


def test_num_samples(pool: sglrl.BlockingClient, tokenizer: Any) -> None:
    few = {"max_tokens": 5}
    for given in (
        {"num_samples": 3, "generate_kwargs": few},
        {"generate_kwargs": {**few, "n": 3}},
    ):
        wrapper = SGLangWrapper(pool, **given)
        found = wrapper(prompts("history", tokenizer))
        assert found.batch_size == (3, 3)
        for i in range(3):
            group = found[i]
            assert len({tuple(ids.tolist()) for ids in lists(group, "tokens", "response")}) > 1
            assert len({tuple(ids.tolist()) for ids in lists(group, "tokens", "prompt")}) == 1
            assert group["history"].full.batch_size == (3, 3)
        one = wrapper(prompts("history", tokenizer)[0])
        assert one.batch_size == (3,)
    with pytest.raises(ValueError, match="makes 3 samples"):
        wrapper(prompts("history", tokenizer), n=2)
    with pytest.raises(ValueError, match="num_samples differs"):
        SGLangWrapper(pool, num_samples=2, generate_kwargs={"n": 3})
    with pytest.raises(ValueError, match="inplace must be False"):
        SGLangWrapper(pool, num_samples=2, inplace=True)


class Recorder:
    """A client that records its generate calls, and answers with one token."""

    def __init__(self, pool: sglrl.BlockingClient) -> None:
        self.pool = pool
        self.calls: list[dict[str, Any]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.pool, name)

    def generate(self, *, input_ids: list[Any], **kwargs: Any) -> list[Any]:
        self.calls.append(kwargs)
        answer = SimpleNamespace(
            output_ids=np.array([5], np.int32),
            logprobs=np.array([-1.0], np.float32),
            text="a",
            finish_reason="length",
        )
        return [answer] * len(input_ids)


SAMPLING = {
    "max_new_tokens": 3,
    "temperature": 0.7,
    "top_p": 0.9,
    "top_k": 40,
    "min_p": 0.01,
    "stop_token_ids": (7,),
    "min_new_tokens": 2,
    "frequency_penalty": 0.1,
    "presence_penalty": 0.2,
    "repetition_penalty": 1.1,
    "ignore_eos": True,
    "seed": 5,
    "regex": "[ab]+",
    "skip_special_tokens": False,
    "stop_regex": ("z{9}",),
    "no_stop_trim": True,
    "logit_bias": {5: -1.0},
    "logprobs_mode": "raw_logprobs",
    "logit_processor": "module:Class",
    "custom_params": {"bias": 1.0},
}


def test_every_sampling_name_is_forwarded(pool: sglrl.BlockingClient, tokenizer: Any) -> None:
    recorder = Recorder(pool)
    wrapper = SGLangWrapper(
        recorder,
        input_mode="text",
        generate_kwargs={
            **SAMPLING,
            "stop_sequences": ["zz"],
            "do_sample": True,
            "num_beams": 1,
            # Options of SGLang and vLLM that do not affect the result, or request nothing.
            "spaces_between_special_tokens": False,
            "stream_interval": 8,
            "detokenize": True,
            "best_of": 1,
            "truncate_prompt_tokens": None,
            "timeout": 30.0,
            "priority": 2,
        },
    )
    wrapper(prompts("text", tokenizer))
    wrapper(prompts("text", tokenizer), max_tokens=1, min_new_tokens=0, priority=3)
    first, second = recorder.calls
    assert (first["timeout"], first["priority"]) == (30.0, 2)
    for name, value in {**SAMPLING, "stop": ["zz"]}.items():
        assert getattr(first["sampling"], name) == value
    assert second["priority"] == 3
    assert second["sampling"].max_new_tokens == 1
    assert second["sampling"].temperature == 0.7
    left = set(sglrl.SamplingParams.__struct_fields__) - {*SAMPLING, "stop"}
    # A request has one form of a grammar at most. The wrapper rejects the others.
    rejected = {"return_sampling_mask", "return_routed_experts"}
    rejected |= {"token_ids_logprob", "return_hidden_states"}
    assert left == {"json_schema", "ebnf", "structural_tag", *rejected}
    # A call's argument overrides the constructor's, even under another name.
    wrapper(
        prompts("text", tokenizer), sampling_seed=6, stop=["y"], include_stop_str_in_output=False
    )
    last = recorder.calls[-1]["sampling"]
    assert (last.seed, last.stop, last.no_stop_trim) == (6, ["y"], False)
    SGLangWrapper(recorder, input_mode="text", generate_kwargs={"do_sample": False})(
        prompts("text", tokenizer), max_new_tokens=1
    )
    assert recorder.calls[-1]["sampling"].temperature == 0.0


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"temperature": -0.1}, "Temperature must be non-negative"),
        ({"top_p": 1.5}, "top_p must be between 0 and 1"),
        ({"top_k": 0}, "top_k must be positive"),
        ({"repetition_penalty": 0.0}, "repetition_penalty must be positive"),
        ({"do_sample": False, "temperature": 0.7}, "temperature must be 0"),
        ({"num_beams": 4}, "SGLang has nothing of the kind"),
        ({"best_of": 4}, "SGLang has nothing of the kind"),
        ({"logprobs": 5}, "of sampled tokens alone"),
        ({"custom_params": {"a": 1}}, "custom_params needs logit_processor"),
        ({"allowed_token_ids": [1]}, "logit_bias"),
        ({"bad_words": ["a"]}, "logit_bias"),
        ({"prompt_logprobs": 1}, r"client\.score"),
        ({"stop_sequences": ["a"], "stop": ["b"]}, "both given"),
        ({"guided_choice": ["a", "b"]}, "give a regex"),
        ({"top_p": 0.9, "return_sampling_mask": True}, "has no place for it"),
        ({"token_ids_logprob": [3]}, "has no place for it"),
        ({"return_hidden_states": True}, "has no place for it"),
        ({"return_routed_experts": True}, "has no place for it"),
        ({"max_new_token": 4}, "did you mean 'max_new_tokens'"),
    ],
)
def test_wrong_sampling_values(given: dict[str, Any], text: str, pool: Any) -> None:
    with pytest.raises(ValueError, match=text):
        SGLangWrapper(pool, generate_kwargs=given)


@layouts
def test_a_row_of_nothing_but_padding(
    padded: bool, pool: sglrl.BlockingClient, hf_model: Any, tokenizer: Any
) -> None:
    ids = torch.tensor([[5, 6, 7, 8], [PAD] * 4, [PAD, 9, 10, 11]])
    mask = torch.tensor([[1] * 4, [0] * 4, [0, 1, 1, 1]]).bool()
    td = TensorDict(tokens=Tokens(full=ids), masks=Masks(all_attention_mask=mask), batch_size=3)
    arguments = {"input_mode": "tokens", "pad_output": padded, "tokenizer": tokenizer}
    ours = SGLangWrapper(pool, generate=False, **arguments)
    reference = TransformersWrapper(hf_model, generate=False, **arguments)
    with torch.inference_mode():
        expected = reference(td.clone())
    found = ours(td.clone())
    for key in (("tokens", "full"), ("masks", "all_attention_mask")):
        assert_same(found, expected, *key)
    assert_same(found, expected, "log_probs", "full", atol=1e-3, rtol=0)
    prompt = TensorDict(
        tokens=Tokens(prompt=ids), masks=Masks(all_attention_mask=mask), batch_size=3
    )
    with pytest.raises(ValueError, match="prompt 1 of the batch has no tokens"):
        SGLangWrapper(pool, generate_kwargs=GREEDY, **arguments)(prompt)


def test_nothing_to_generate_from(pool: sglrl.BlockingClient, tokenizer: Any) -> None:
    policy = SGLangWrapper(pool, input_mode="text", tokenizer=tokenizer, generate_kwargs=GREEDY)
    with pytest.raises(ValueError, match="prompt 1 of the batch has no tokens"):
        policy(TensorDict(text=Text(prompt=["Hello", ""]), batch_size=2))
    with pytest.raises(ValueError, match="the batch is empty"):
        policy(prompts("text", tokenizer)[:0])
    scorer = SGLangWrapper(pool, input_mode="tokens", tokenizer=tokenizer, generate=False)
    with pytest.raises(ValueError, match="the batch is empty"):
        scorer(wholes("tokens", tokenizer)[:0])


def test_wrong_arguments(pool: sglrl.BlockingClient) -> None:
    with pytest.raises(ValueError, match="input_mode must be one of"):
        SGLangWrapper(pool, input_mode="image")
    with pytest.raises(ValueError, match="return_log_probs must be True"):
        SGLangWrapper(pool, generate=False, return_log_probs=False)
    with pytest.raises(ValueError, match="must be None if batching is False"):
        SGLangWrapper(pool, batching=False, min_batch_size=2)
    with pytest.raises(ValueError, match="must be <= max_batch_size"):
        SGLangWrapper(pool, min_batch_size=3, max_batch_size=2)
    with pytest.raises(ValueError, match="pad_model_input is not supported when generate=True"):
        SGLangWrapper(pool, pad_model_input=True)
    with pytest.raises(TypeError, match="got int"):
        SGLangWrapper(3)
    with pytest.raises(TypeError, match="got Client"):
        SGLangWrapper(pool.source)
    for values in ([], [("temperature", 1.0)], 7):
        with pytest.raises(TypeError, match="generate_kwargs must be a mapping"):
            SGLangWrapper(pool, generate_kwargs=values)  # type: ignore[arg-type]
    wrong = TensorDict(text=Text(prompt=TEXTS), batch_size=3)
    with pytest.raises(ValueError, match=r"found keys: .*\('text', 'prompt'\)"):
        SGLangWrapper(pool)(wrong)
    with pytest.raises(ValueError, match=r"Expected 'history' key"):
        SGLangWrapper(pool, input_key="history")(TensorDict(batch_size=2))
    with pytest.raises(TypeError, match="Expected History object"):
        SGLangWrapper(pool)(TensorDict(history=ChatHistory(prompt="text"), batch_size=2))
    with pytest.raises(RuntimeError, match="generate=True"):
        SGLangWrapper(pool).log_prob(TensorDict())


def test_packing_and_padding_give_the_same_scores(
    pool: sglrl.BlockingClient, tokenizer: Any
) -> None:
    """As TorchRL's TestPacking, with its two values of ``pad_model_input``."""
    packed, padded = (
        SGLangWrapper(pool, input_mode="text", generate=False, pad_model_input=value)(
            wholes("text", tokenizer)
        )
        for value in (False, True)
    )
    assert_same(packed, padded, "log_probs", "full", atol=1e-4, rtol=0)


def test_get_new_version_changes_what_is_given(pool: sglrl.BlockingClient, tokenizer: Any) -> None:
    wrapper = SGLangWrapper(
        pool,
        input_mode="text",
        num_samples=2,
        generate_kwargs=GREEDY,
        prefer_tokens=True,
        attention_mask_key="mask",
        tokenizer_kwargs={"add_special_tokens": False},
    )
    scorer = wrapper.get_new_version(generate=False, log_probs_key="ref")
    assert scorer.model is pool
    assert scorer.tokenizer is wrapper.tokenizer
    assert scorer.in_keys == [("text", "full")]
    assert scorer.prefer_tokens
    assert scorer.attention_mask_key == "mask"
    found = scorer(wholes("text", tokenizer))
    assert found.batch_size == (3,)
    assert lists(found, "ref", "full") is not None
    again = scorer.get_new_version(generate=True)
    assert again.num_samples == 2
    assert again.generate_kwargs == wrapper.generate_kwargs
    assert again(prompts("text", tokenizer)).batch_size == (3, 2)


def test_models_are_given_in_several_ways(pool: sglrl.BlockingClient, tokenizer: Any) -> None:
    def responses(wrapper: SGLangWrapper) -> Any:
        return wrapper(prompts("text", tokenizer))["text"].response

    arguments: dict[str, Any] = {"input_mode": "text", "generate_kwargs": GREEDY}
    expected = responses(SGLangWrapper(pool, **arguments))
    with ExitStack() as services:
        service = AsyncSGLang.connect(pool.address)
        services.callback(service.shutdown)
        wrapper = SGLangWrapper(service, **arguments)
        assert wrapper.client is service.client
        assert responses(wrapper) == expected
        # Pickling sends the wrapper to another process, with the tokenizer and all arguments.
        copy = pickle.loads(pickle.dumps(wrapper))
        services.callback(copy.model.shutdown)
        assert responses(copy) == expected
        assert copy.get_new_version(generate=False).model is copy.model
        wrapper = SGLangWrapper(pool.address, **arguments)
        services.callback(wrapper.model.shutdown)
        assert responses(wrapper) == expected


# --- where results go -----------------------------------------------------------------------------


def test_inplace(pool: sglrl.BlockingClient, tokenizer: Any) -> None:
    def run(inplace: Any, **more: Any) -> tuple[TensorDictBase, TensorDictBase]:
        td = prompts("text", tokenizer).set("other", torch.zeros(3))
        wrapper = SGLangWrapper(pool, input_mode="text", inplace=inplace, generate_kwargs=GREEDY)
        return td, wrapper(td, **more)

    td, found = run(None)
    assert found is td
    assert set(found.keys()) == {"text", "tokens", "masks", "log_probs", "other"}
    for inplace in (False, "empty"):
        td, found = run(inplace)
        assert set(found.keys()) == {"text", "tokens", "masks", "log_probs"}
        assert set(td.keys()) == {"text", "other"}
    out = TensorDict({"kept": torch.ones(3)}, batch_size=3)
    td, found = run(None, tensordict_out=out)
    assert found is out
    assert set(found.keys()) == {"text", "tokens", "masks", "log_probs", "kept"}
    assert set(td.keys()) == {"text", "other"}


@modes
def test_results_are_where_the_input_is(mode: str, pool: sglrl.BlockingClient) -> None:
    for generate, td in (
        (True, prompts(mode, pool.tokenizer)),
        (False, wholes(mode, pool.tokenizer)),
    ):
        wrapper = SGLangWrapper(pool, input_mode=mode, generate=generate, inplace=False)
        assert wrapper(td, max_new_tokens=2).device is None
        found = wrapper(td.to("cpu"), max_new_tokens=2)
        assert found.device == found["tokens"].device == torch.device("cpu")
        placed = wrapper.get_new_version(device="cpu")(td, max_new_tokens=2)
        assert placed.device == torch.device("cpu")


@layouts
def test_batches_of_any_shape(padded: bool, pool: sglrl.BlockingClient, tokenizer: Any) -> None:
    wrapper = SGLangWrapper(pool, input_mode="text", pad_output=padded, generate_kwargs=GREEDY)
    flat = wrapper(TensorDict(text=Text(prompt=TEXTS * 2), batch_size=6))
    square = TensorDict(text=Text(prompt=TEXTS * 2), batch_size=6).reshape(2, 3)
    found = wrapper(square)
    assert found.batch_size == (2, 3)
    for i in range(6):
        assert found[i // 3, i % 3]["text"].response == flat[i]["text"].response
    single = wrapper(TensorDict(text=Text(prompt=TEXTS[0])))
    assert single.batch_size == ()
    assert single["text"].response == flat[0]["text"].response
    assert isinstance(single["tokens"].response, torch.Tensor)


def test_calls_from_several_threads_do_not_wait_for_each_other(
    pool: sglrl.BlockingClient, tokenizer: Any
) -> None:
    wrapper = SGLangWrapper(
        pool, input_mode="text", batching=True, min_batch_size=64, generate_kwargs=GREEDY
    )
    together = threading.Barrier(4, timeout=300)

    def call(i: int) -> TensorDictBase:
        together.wait()
        return wrapper(TensorDict(text=Text(prompt=[TEXTS[i % 3]]), batch_size=1))

    with ThreadPoolExecutor(4) as threads:
        results = list(threads.map(call, range(4), timeout=300))
    for i, found in enumerate(results):
        assert found["text"].prompt == [TEXTS[i % 3]]
    assert wrapper.get_batching_state()["queue_size"] == 0
    wrapper.cleanup_batching(flush=True)


# --- padding in the input -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pad_is_end", "rows", "kept"),
    [
        (False, ["..ab", "abcd", ".abc"], ["0011", "1111", "0111"]),
        (False, ["ab..", "abcd", "a..."], ["1100", "1111", "1000"]),
        (False, [".a.b."], ["01110"]),
        (False, ["...."], ["0000"]),
        # Padded on the left, or of different lengths: the last token belongs to the row.
        (True, ["..a.", "ab..", ".ab."], ["0011", "1111", "0111"]),
        (True, ["a.", "ab."], ["11", "111"]),
        # Padded on the right to the longest row, which ends with the end token.
        (True, ["ab..", "abc."], ["1110", "1111"]),
        (True, ["ab..", "abcd"], ["1100", "1111"]),
    ],
)
def test_what_is_padding(pad_is_end: bool, rows: list[str], kept: list[str]) -> None:
    ids = [torch.tensor([ord(c) for c in row]) for row in rows]
    found = unpad(ids, None, ord("."), pad_is_end)
    assert ["".join(str(int(k)) for k in mask) for mask in found] == kept
