"""Tokenizers of ten families of models: their chat templates and special tokens, and tiny words.

The templates are those that TRL ships, which are copies of the models' own.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, NamedTuple

import trl
from tokenizers import AddedToken

from sglrl.launching.tiny_model import make_tokenizer

_TEMPLATES = Path(trl.__file__).parent / "chat_templates"
_QWEN = "<|im_start|> <|im_end|> <|endoftext|> <think> </think> <tool_call> </tool_call> "
_QWEN += "<tool_response> </tool_response> <|vision_start|> <|vision_end|> <|image_pad|> "
_QWEN += "<|video_pad|>"


class Family(NamedTuple):
    """A family of models.

    Attributes:
        template: name of TRL's file.
        renderers: names of renderers that make the same tokens.
        tokens: special tokens, separated by spaces.
        end: the token that ends a turn.
    """

    template: str
    renderers: tuple[str, ...]
    tokens: str
    end: str


FAMILIES = {
    "qwen3": Family("qwen3", ("qwen3",), _QWEN, "<|im_end|>"),
    "qwen3.5": Family("qwen3_5_think", ("qwen3.5",), _QWEN, "<|im_end|>"),
    "qwen3.6": Family("qwen3_6", ("qwen3.5", "qwen3.6"), _QWEN, "<|im_end|>"),
    "qwen3.8": Family("qwen3_8", ("qwen3.8",), _QWEN, "<|im_end|>"),
    "nemotron-3": Family("nemotron_3_nano", ("nemotron-3",), _QWEN, "<|im_end|>"),
    "nemotron-3-ultra": Family("nemotron_3_ultra", ("nemotron-3-ultra",), _QWEN, "<|im_end|>"),
    "nemotron-3.5": Family(
        "nemotron_3_5_lightning", ("nemotron-3-ultra", "nemotron-3.5"), _QWEN, "<|im_end|>"
    ),
    "glm-4.5": Family(
        "glm4moe",
        ("glm-4.5",),
        "[gMASK] <sop> <|system|> <|user|> <|assistant|> <|observation|> <|endoftext|> <think> "
        "</think> <tool_call> </tool_call> <arg_key> </arg_key> <arg_value> </arg_value> "
        "<tool_response> </tool_response> /nothink",
        "<|user|>",
    ),
    "gemma4": Family(
        "gemma4_v5",
        ("gemma4",),
        "<bos> <eos> <|turn> <turn|> <|tool> <tool|> <|tool_call> <tool_call|> <|tool_response> "
        "<tool_response|> <|channel> <channel|> <|think|> <|image> <image|> <|image|> <|audio|> "
        '<|video|> <|"|>',
        "<turn|>",
    ),
    "llama-3": Family(
        "llama3_2",
        ("llama-3",),
        "<|begin_of_text|> <|end_of_text|> <|start_header_id|> <|end_header_id|> <|eom_id|> "
        "<|eot_id|> <|python_tag|>",
        "<|eot_id|>",
    ),
}


def family_template(family: Family) -> str:
    """Return the chat template of a family."""
    return (_TEMPLATES / f"{family.template}.jinja").read_text()


def family_tokenizer(folder: Path, family: Family, vocab_size: int = 400) -> Any:
    """Make the tokenizer of a family, and save it in ``folder``."""
    tokenizer = make_tokenizer(folder, vocab_size)
    tokens = family.tokens.split()
    # Models mark the tokens of calls and reasoning as not special, so that text contains them.
    plain = re.compile(r"</?[a-z_]+>|/nothink")
    tokenizer.add_tokens(
        [AddedToken(t, normalized=False, special=not plain.fullmatch(t)) for t in tokens]
    )
    tokenizer.chat_template = family_template(family)
    tokenizer.eos_token = family.end
    if tokens[0] in ("<|begin_of_text|>", "<bos>"):
        tokenizer.bos_token = tokens[0]
    tokenizer.save_pretrained(folder)
    return tokenizer
