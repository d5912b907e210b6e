"""``Chunk``, the new tokens that a stream yields, and the text that each chunk adds."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property

import msgspec
import numpy as np
from numpy.typing import NDArray

from ..wire.engine import TokenChunk
from .completion import Decode, cut_text, given_logprobs, hidden_states
from .sampling import SamplingParams
from .sampling_mask import SamplingMask, mask_of


class Chunk(msgspec.Struct, frozen=True, dict=True, eq=False):
    """New tokens of a stream since the previous chunk.

    Attributes:
        finish_reason: None until the last chunk, then as in ``Completion``.
        version: the policy version of the tokens.
        lora_version: the version of the LoRA adapter, or 0 without one.
    """

    finish_reason: str | None
    version: int
    _ids: bytes
    _logprobs: bytes | None
    _text: Callable[[], str]
    lora_version: int = 0
    _chunk: TokenChunk | None = None
    _params: SamplingParams | None = None

    @cached_property
    def output_ids(self) -> NDArray[np.int32]:
        """The new tokens, int32 [t], read-only."""
        return np.frombuffer(self._ids, dtype="<i4")

    @cached_property
    def logprobs(self) -> NDArray[np.float32] | None:
        """Logprobs of the new tokens, float32 [t], read-only. None unless requested."""
        return None if self._logprobs is None else np.frombuffer(self._logprobs, dtype="<f4")

    @property
    def sampling_mask(self) -> SamplingMask | None:
        """The tokens that could be drawn at each new position. None unless requested."""
        chunk, params = self._chunk, self._params
        if chunk is None or params is None or not params.return_sampling_mask:
            return None
        return mask_of([chunk])

    @cached_property
    def token_ids_logprobs(self) -> NDArray[np.float32] | None:
        """Logprobs of the k tokens of ``token_ids_logprob``, float32 [t, k], or None."""
        chunk, params = self._chunk, self._params
        return None if chunk is None or params is None else given_logprobs([chunk], params)

    @cached_property
    def hidden_states(self) -> NDArray[np.float32] | None:
        """The hidden states of the new tokens, float32 [t, hidden size], or None."""
        chunk, params = self._chunk, self._params
        return None if chunk is None or params is None else hidden_states([chunk], params)

    @property
    def text(self) -> str:
        """The text that these tokens add.

        Incomplete characters, and characters that may begin a stop string, come with a later chunk.
        The joined texts of all chunks equal ``Completion.text``.
        """
        return self._text()

    def __repr__(self) -> str:
        return f"<Chunk {len(self._ids) // 4} tokens, finish_reason={self.finish_reason!r}>"


class StreamText:
    """Computes the text that each chunk adds to a growing list of tokens.

    For each chunk, only the last tokens are decoded again, as in the detokenizers of SGLang and
    vLLM. The text of earlier tokens is final, and ends with a complete character.
    """

    def __init__(self, decode: Decode, params: SamplingParams) -> None:
        self._decode = decode
        self._params = params
        self._stops = params.stop_strings
        self._skip = params.skip_special_tokens
        self._chunks: list[tuple[bytes, str, str | int | None]] = []
        self._texts: list[str] = []
        self._ids: list[int] = []
        self._prefix = 0
        self._read = 0
        self._emitted = 0
        self._pending = ""

    def add(self, chunk: TokenChunk) -> Callable[[], str]:
        """Add a chunk. Return a function that computes its text on the first call."""
        index = len(self._chunks)
        self._chunks.append((chunk.ids, chunk.finish, chunk.stop_match))
        return lambda: self._text_of(index)

    def _text_of(self, index: int) -> str:
        while len(self._texts) <= index:
            self._texts.append(self._advance(*self._chunks[len(self._texts)]))
        return self._texts[index]

    def _advance(self, ids: bytes, finish: str, stop_match: str | int | None) -> str:
        new = np.frombuffer(ids, dtype="<i4")
        self._ids += new.tolist()
        if finish:
            whole = cut_text(
                np.array(self._ids, dtype=np.int32), finish, stop_match, self._decode, self._params
            )
            return whole[self._emitted :]
        before = self._decode(self._ids[self._prefix : self._read], self._skip)
        whole = self._decode(self._ids[self._prefix :], self._skip)
        # Some decoders drop the space before the first word that they decode. So decode from an
        # earlier token (``_prefix``), and move this position only when new text appears.
        if len(whole) > len(before) and not whole.endswith("\ufffd"):
            self._pending += whole[len(before) :]
            self._prefix, self._read = self._read, len(self._ids)
        keep = self._held_back()
        text = self._pending[: len(self._pending) - keep]
        self._pending = self._pending[len(self._pending) - keep :]
        self._emitted += len(text)
        return text

    def _held_back(self) -> int:
        """Return how many characters at the end of the text could begin a stop string."""
        longest = 0
        for stop in self._stops:
            for size in range(min(len(stop), len(self._pending)), longest, -1):
                if self._pending.endswith(stop[:size]):
                    longest = size
                    break
        return longest
