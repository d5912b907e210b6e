"""Support for models without a tokenizer, whose input and output are token ids."""

from __future__ import annotations

from collections.abc import Set
from pathlib import Path

_STEMS = ("tokenizer", "tokenization", "vocab", "merges", "spiece", "sentencepiece", "tekken")
_ENDINGS = (".tiktoken", ".model")


def has_tokenizer(model: str) -> bool:
    """Return False if ``model`` is a folder without tokenizer files. In other cases, return True.

    Without these files, transformers (5.12) still creates a tokenizer for some architectures. That
    tokenizer has only an end-of-sequence token, with the id of another token of the model. For
    other architectures transformers creates no tokenizer, and SGLang would not start.
    """
    folder = Path(model)
    return not folder.is_dir() or any(
        file.name.startswith(_STEMS) or file.name.endswith(_ENDINGS) for file in folder.iterdir()
    )


class NoTokenizer:
    """Replaces a tokenizer in SGLang's scheduler, which then only needs the end tokens.

    Args:
        eos_token_ids: the end-of-sequence tokens of the model.
    """

    eos_token_id = None

    def __init__(self, eos_token_ids: Set[int]) -> None:
        self.additional_stop_token_ids = eos_token_ids
