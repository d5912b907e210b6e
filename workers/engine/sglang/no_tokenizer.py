"""Models without a tokenizer: the input and the output are token ids."""

from __future__ import annotations

from collections.abc import Set
from pathlib import Path

_STEMS = ("tokenizer", "tokenization", "vocab", "merges", "spiece", "sentencepiece", "tekken")
_ENDINGS = (".tiktoken", ".model")


def has_tokenizer(model: str) -> bool:
    """Return False for a folder without the files of a tokenizer.

    For some architectures transformers (5.12) makes a tokenizer without these files. It has only
    an end-of-sequence token, with the id of a different token of the model. For other architectures
    transformers makes none, and SGLang does not start.
    """
    folder = Path(model)
    return not folder.is_dir() or any(
        file.name.startswith(_STEMS) or file.name.endswith(_ENDINGS) for file in folder.iterdir()
    )


class NoTokenizer:
    """The part of a tokenizer that SGLang's scheduler needs without text: the end tokens.

    Args:
        eos_token_ids: the model's own end-of-sequence tokens.
    """

    eos_token_id = None

    def __init__(self, eos_token_ids: Set[int]) -> None:
        self.additional_stop_token_ids = eos_token_ids
