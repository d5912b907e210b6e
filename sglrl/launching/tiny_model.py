"""Make a tiny random model with a tokenizer and a chat template, without a network.

By default, the model is a Qwen3 with a byte-level BPE tokenizer. Its weights are random, so the
text that it generates is meaningless. The architecture, file formats, tokenizer and template are
real. The model is made once and kept in the cache folder (about 2 MB).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from urllib.parse import quote

from .model_cache import made_once

RECIPE = 3
"""Version of the model recipe. Increase it with every change to the model or the tokenizer, so that
old cache entries are not used."""

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHAT_TEMPLATE = (
    "{% if tools %}<|im_start|>system\nTools: {{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for message in messages %}"
    "<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CHARACTER_SPECIAL_TOKENS = ("<|pad|>", "<|end|>", "<|user|>", "<|assistant|>", "<|tool|>")
CHARACTER_CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}"
    "{% for call in message['tool_calls'] %}"
    "{% for value in call['function']['arguments'].values() %}{{ value }}{% endfor %}{% endfor %}"
    "<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
"""The template for the character tokenizer. Tool calls appear as their arguments' values."""
_CORPUS = [
    "You are a careful assistant. Think step by step and answer with a number.",
    "What is the sum of two numbers? The answer is the result of adding them together.",
    "system user assistant question answer reward policy rollout token prompt model",
    "zero one two three four five six seven eight nine ten eleven twelve hundred thousand",
]


def make_tokenizer(folder: Path, vocab_size: int) -> Any:
    """Train a byte-level BPE tokenizer of at most ``vocab_size`` tokens on a few sentences.

    Save it in ``folder`` and return it.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    made: Any = trainers.BpeTrainer
    trainer = made(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_CORPUS, trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = CHAT_TEMPLATE
    fast.save_pretrained(folder)
    return fast


def make_character_tokenizer(folder: Path, characters: str) -> Any:
    """Make a tokenizer with one token per character and a few special tokens for chat.

    The tokenizer drops characters that are not in ``characters``. Its vocabulary is small, so that
    a policy can learn from random weights. Save the tokenizer in ``folder`` and return it.
    """
    from tokenizers import Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    names = [*CHARACTER_SPECIAL_TOKENS, *characters]
    tokenizer = Tokenizer(models.BPE({name: i for i, name in enumerate(names)}, []))
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|end|>",
        pad_token="<|pad|>",
        extra_special_tokens=list(CHARACTER_SPECIAL_TOKENS[2:]),
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = CHARACTER_CHAT_TEMPLATE
    fast.save_pretrained(folder)
    return fast


def make_model(
    folder: Path,
    *,
    architecture: str = "qwen3",
    dtype: str = "float32",
    vocab_size: int = 512,
    characters: str = "",
    hidden_size: int = 64,
    layers: int = 2,
    context_length: int = 2048,
    tied: bool = False,
    initializer_range: float = 0.2,
    seed: int = 0,
) -> Path:
    """Write a random model and its tokenizer into ``folder``.

    Args:
        folder: an existing folder for the model.
        architecture: "qwen3" or "llama".
        dtype: dtype of the saved weights: "float32" or "bfloat16".
        vocab_size: maximum number of tokens in the vocabulary.
        characters: the whole vocabulary except special tokens, for a tokenizer of
            ``make_character_tokenizer``. If given, ``vocab_size`` is ignored.
        hidden_size: size of the hidden states.
        layers: number of layers.
        context_length: maximum number of tokens in the context.
        tied: whether the output layer shares the weights of the embedding.
        initializer_range: standard deviation of the weights. The default is large enough that the
            logits of a random model differ clearly. With 0.02, the usual value for models to be
            trained, all tokens are about equally likely.
        seed: seed of the random weights.
    """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

    if characters:
        tokenizer = make_character_tokenizer(folder, characters)
        vocab_size = len(tokenizer)
    else:
        tokenizer = make_tokenizer(folder, vocab_size)
    common: dict[str, Any] = {
        "vocab_size": vocab_size,
        "hidden_size": hidden_size,
        "intermediate_size": 2 * hidden_size,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": hidden_size // 4,
        "max_position_embeddings": context_length,
        "tie_word_embeddings": tied,
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "initializer_range": initializer_range,
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        if architecture == "qwen3":
            model: Any = Qwen3ForCausalLM(Qwen3Config(**common))
        elif architecture == "llama":
            model = LlamaForCausalLM(LlamaConfig(**common))
        else:
            raise ValueError(f"unknown architecture {architecture!r}")
    model.to(getattr(torch, dtype)).save_pretrained(folder)
    # No default sampling parameters: the caller sets them all.
    generation = folder / "generation_config.json"
    generation.write_text(json.dumps({"eos_token_id": tokenizer.eos_token_id}), encoding="utf-8")
    return folder


def tiny_model(**options: Any) -> Path:
    """Make a small random model, or find it in the cache, and return its folder.

    Args:
        **options: the keyword arguments of ``make_model``.

    Raises:
        UsageError: the cache folder cannot be written.
    """
    values = (f"{name}={quote(str(options[name]), safe='')}" for name in sorted(options))
    name = "-".join(["tiny", str(RECIPE), *values])
    return made_once(name, lambda folder: make_model(folder, **options))
