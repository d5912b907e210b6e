"""Models that have no tokenizer: token ids go in and come out."""

from __future__ import annotations

from collections.abc import Set
from pathlib import Path

_STEMS = ("tokenizer", "tokenization", "vocab", "merges", "spiece", "sentencepiece", "tekken")
_ENDINGS = (".tiktoken", ".model")


def has_tokenizer(model: str) -> bool:
    """False for a folder in which there is nothing to make one of. Of some architectures
    transformers (5.12) makes one all the same, which knows its end-of-sequence token only: an id
    that is another token of the model. Of others it makes none, and SGLang does not start."""
    folder = Path(model)
    return not folder.is_dir() or any(
        file.name.startswith(_STEMS) or file.name.endswith(_ENDINGS) for file in folder.iterdir()
    )


class NoTokenizer:
    """What SGLang's scheduler asks of a tokenizer where there is no text: which tokens end an
    output. ``eos_token_ids``: the model's own."""

    eos_token_id = None

    def __init__(self, eos_token_ids: Set[int]) -> None:
        self.additional_stop_token_ids = eos_token_ids
