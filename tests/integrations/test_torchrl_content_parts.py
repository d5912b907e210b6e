"""Histories whose content is a list of parts, in a wrapper with a template like Qwen3's."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tensordict import TensorDict, lazy_stack
from torchrl.data.llm import History
from torchrl.data.llm.history import ContentBase
from torchrl.modules.llm.policies import ChatHistory

import sglrl
from sglrl.integrations.torchrl import SGLangWrapper
from sglrl.launching.tiny_model import make_tokenizer

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content if m.content is string }}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TWO = [{"type": "text", "text": "2 + "}, {"type": "text", "text": "2?"}]


@pytest.fixture
def wrapper(tmp_path: Path) -> Iterator[Any]:
    make_tokenizer(tmp_path, 512)
    with sglrl.blocking(tmp_path, engine="fake", vocab_size=512) as client:
        yield SGLangWrapper(
            client,
            input_mode="history",
            tokenizer=client.tokenizer,
            chat_template=TEMPLATE,
            generate_kwargs={"max_new_tokens": 1},
        )


def of_parts(*parts: ContentBase) -> History:
    content = parts[0] if len(parts) == 1 else lazy_stack(list(parts))
    return lazy_stack([lazy_stack([History(role="user", content=content)])])


@pytest.mark.parametrize(
    "history",
    [
        History.from_chats([[{"role": "user", "content": TWO}]]),
        of_parts(ContentBase(type="text", text="2 + 2?")),
        of_parts(ContentBase(type="text", text="2 + "), ContentBase(type="text", text="2?")),
    ],
    ids=["dicts", "one ContentBase", "two ContentBases"],
)
def test_parts_of_text_are_the_text(wrapper: Any, history: History) -> None:
    def prompt(given: History) -> str:
        out = wrapper(TensorDict(history=ChatHistory(prompt=given), batch_size=1))
        text: str = out[0]["text", "prompt"]
        return text

    plain = History.from_chats([[{"role": "user", "content": "2 + 2?"}]])
    assert prompt(history) == prompt(plain)
    assert "2 + 2?" in prompt(plain)


def test_an_image_is_refused(wrapper: Any) -> None:
    image = ContentBase(type="image", url="https://example.com/image.png")
    given = of_parts(ContentBase(type="text", text="what is it?"), image)
    with pytest.raises(sglrl.InvalidRequest, match=r"\['content'\]\[1\] is of type 'image'"):
        wrapper(TensorDict(history=ChatHistory(prompt=given), batch_size=1))
