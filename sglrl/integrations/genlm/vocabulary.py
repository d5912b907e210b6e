"""Find the bytes of each token of a Hugging Face tokenizer."""

from __future__ import annotations

import json
import re
from typing import Any

_HEXADECIMAL = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_SPACE = "▁"
"""Represents a space in SentencePiece's vocabularies."""


class Token(bytes):
    """The bytes of a token, with its id.

    Several tokens may have the same bytes. So two tokens are equal if their ids are equal. A token
    equals plain bytes if the contents are equal.
    """

    token_id: int

    def __new__(cls, token_id: int, byte_string: bytes) -> Token:
        token = super().__new__(cls, byte_string)
        token.token_id = token_id
        return token

    @property
    def byte_string(self) -> bytes:
        """The token as plain bytes."""
        return bytes(self)

    def __eq__(self, other: object) -> bool:
        return self.token_id == other.token_id if isinstance(other, Token) else NotImplemented

    def __ne__(self, other: object) -> bool:
        return self.token_id != other.token_id if isinstance(other, Token) else NotImplemented

    def __hash__(self) -> int:
        return hash(self.token_id)

    def __lt__(self, other: bytes) -> bool:
        return self.token_id < other.token_id if isinstance(other, Token) else NotImplemented

    def __le__(self, other: bytes) -> bool:
        return self.token_id <= other.token_id if isinstance(other, Token) else NotImplemented

    def __gt__(self, other: bytes) -> bool:
        return self.token_id > other.token_id if isinstance(other, Token) else NotImplemented

    def __ge__(self, other: bytes) -> bool:
        return self.token_id >= other.token_id if isinstance(other, Token) else NotImplemented

    def __repr__(self) -> str:
        return f"Token(token_id={self.token_id}, byte_string={bytes(self)!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.token_id, bytes(self))


def _byte_level() -> dict[str, int]:
    """Return the byte for each character of the byte-level alphabet, which GPT-2 introduced.

    Printable bytes are written as themselves. The other bytes, in order, are written as the
    characters from 256 on.
    """
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    table: dict[str, int] = {}
    moved = 0
    for byte in range(256):
        if byte in printable:
            table[chr(byte)] = byte
        else:
            table[chr(256 + moved)] = byte
            moved += 1
    return table


def token_bytes(tokenizer: Any) -> list[bytes]:
    """Return the bytes of each token, by id. A special or added token has the bytes of its text.

    Raises:
        ValueError: the kind of the tokenizer's decoder is unknown, or a token is not in the
            byte-level alphabet.
    """
    added: dict[str, int] = tokenizer.get_added_vocab()
    texts = {id_: text for text, id_ in added.items()}
    kinds = _decoders(tokenizer)
    table = _byte_level()
    vocabulary = []
    for id_, piece in enumerate(tokenizer.convert_ids_to_tokens(range(len(tokenizer)))):
        if id_ in texts:
            vocabulary.append(texts[id_].encode())
        elif piece is None:
            # No token has this id.
            vocabulary.append(b"")
        elif "ByteLevel" in kinds:
            if not table.keys() >= set(piece):
                raise ValueError(f"token {id_}, {piece!r}, is not in the byte-level alphabet")
            vocabulary.append(bytes(table[character] for character in piece))
        elif match := "ByteFallback" in kinds and _HEXADECIMAL.fullmatch(piece):
            vocabulary.append(bytes.fromhex(match[1]))
        else:
            vocabulary.append((piece.replace(_SPACE, " ") if "Spaces" in kinds else piece).encode())
    return vocabulary


def _decoders(tokenizer: Any) -> set[str]:
    """Return the kinds of the tokenizer's decoders. "Spaces": ``_SPACE`` becomes a space."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        if hasattr(tokenizer, "sp_model"):
            return {"ByteFallback", "Spaces"}
        if hasattr(tokenizer, "byte_decoder"):
            return {"ByteLevel"}
        raise ValueError(f"the bytes of the tokens of a {type(tokenizer).__name__} are not known")
    decoder = json.loads(backend.to_str())["decoder"]
    parts = decoder["decoders"] if decoder and decoder["type"] == "Sequence" else [decoder]
    kinds = set()
    for part in parts:
        if part is None or part["type"] in ("Fuse", "Strip"):
            continue
        if part["type"] == "Metaspace" or (
            part["type"] == "Replace" and part["pattern"] == {"String": _SPACE}
        ):
            kinds.add("Spaces")
        elif part["type"] in ("ByteLevel", "ByteFallback"):
            kinds.add(part["type"])
        else:
            raise ValueError(
                f"the bytes of tokens are not known for a tokenizer that decodes by {part['type']}"
            )
    return kinds


def token_strings(tokenizer: Any, vocabulary: list[bytes]) -> list[str]:
    """Return the text of each token, or the tokenizer's name for it if its bytes are not UTF-8."""
    strings = []
    for id_, token in enumerate(vocabulary):
        try:
            strings.append(token.decode())
        except UnicodeDecodeError:
            strings.append(tokenizer.convert_ids_to_tokens(id_))
    return strings
