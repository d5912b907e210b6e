"""Read the inputs of ``SGLangWrapper``: convert conversations, texts or token ids to token ids."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import msgspec
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDictBase, lazy_stack
from torchrl.data.llm import History

from ...inference.prompts import check_conversation
from .rows import Sample

_PADDING_ARGUMENTS = ("padding", "padding_side", "return_tensors", "return_attention_mask")


class InputReader(msgspec.Struct, frozen=True, kw_only=True):
    """Converts tensordicts without batch dimensions to samples without results.

    Attributes:
        pad_ends_texts: whether the padding token is also an end-of-text token.

    The other attributes have the same meaning as in ``SGLangWrapper``.
    """

    input_mode: str
    input_key: Any
    generate: bool
    tokenizer: Any
    tokenizer_kwargs: Mapping[str, Any]
    chat_template_name: str | None
    chat_template: str | None
    prefer_tokens: bool
    tokens_key: Any
    masks_key: Any
    attention_mask_key: Any
    padding_value: int
    pad_ends_texts: bool

    def read(self, inputs: Sequence[TensorDictBase]) -> list[Sample]:
        """Return a sample for each input.

        Raises:
            TypeError: the type of an input does not match ``input_mode``.
            InvalidRequest: a content part of a conversation is not text.
        """
        if self.input_mode == "history":
            return self._histories(inputs)
        if self.input_mode == "text":
            return self._texts(inputs)
        return self._tokens(inputs)

    def _histories(self, inputs: Sequence[TensorDictBase]) -> list[Sample]:
        template = {
            "tokenizer": self.tokenizer,
            "chat_template_name": self.chat_template_name,
            "chat_template": self.chat_template,
            "add_generation_prompt": self.generate,
        }
        known = self._known_tokens(inputs) if self.generate and self.prefer_tokens else None
        samples = []
        for i, row in enumerate(inputs):
            history = row.get(self.input_key)
            if not isinstance(history, History):
                raise TypeError(
                    f"Expected History object for '{self.input_key}', got {type(history)}"
                )
            if not history.ndim:
                history = lazy_stack([history])
            mask = None
            if known is not None:
                ids = known[i]
                text = self.tokenizer.decode(ids, skip_special_tokens=False)
            else:
                rendered = _with_texts(history)
                text = rendered.apply_chat_template(tokenize=False, **template)
                if self.generate:
                    # The template has already added the special tokens.
                    encoded = self.tokenizer(text, add_special_tokens=False)
                    ids = torch.tensor(encoded["input_ids"])
                else:
                    result = rendered.apply_chat_template(
                        tokenize=True,
                        return_dict=True,
                        return_assistant_tokens_mask=True,
                        **template,
                    )
                    ids = _tensor(result.get("input_ids"))
                    mask = result.get("assistant_masks").bool().cpu()
            samples.append(Sample(ids, text=text, history=history, assistant_mask=mask))
        return samples

    def _known_tokens(self, inputs: Sequence[TensorDictBase]) -> list[torch.Tensor] | None:
        for name in ("prompt", "full"):
            tokens = [row.get((self.tokens_key, name), None) for row in inputs]
            if all(ids is not None for ids in tokens):
                masks = unpad(tokens, None, self.padding_value, self.pad_ends_texts)
                return [_tensor(ids)[m] for ids, m in zip(tokens, masks, strict=True)]
        return None

    def _texts(self, inputs: Sequence[TensorDictBase]) -> list[Sample]:
        texts = []
        for row in inputs:
            text = _plain(row.get(self.input_key))
            if not isinstance(text, str):
                raise TypeError(f"Expected text for '{self.input_key}', got {type(text)}")
            texts.append(text)
        options = {k: v for k, v in self.tokenizer_kwargs.items() if k not in _PADDING_ARGUMENTS}
        encoded = self.tokenizer(texts, **options)["input_ids"]
        masks = []
        given = self._given_assistant_masks(inputs)
        for row, mask, ids in zip(inputs, given, encoded, strict=True):
            tokens = row.get((self.masks_key, "all_attention_mask"), None)
            known = row.get((self.tokens_key, "full"), None)
            if mask is not None and tokens is not None and tokens.shape == mask.shape:
                mask = mask[tokens.bool().cpu()]
                if known is not None and known.shape == tokens.shape:
                    known = known[tokens.bool()]
            # Ignore a mask that is for other tokens. For example, the text may lack the end token.
            fits = mask is not None and mask.shape == (len(ids),)
            masks.append(mask if fits and (known is None or known.tolist() == ids) else None)
        return [
            Sample(torch.tensor(ids, dtype=torch.long), text=text, assistant_mask=mask)
            for ids, text, mask in zip(encoded, texts, masks, strict=True)
        ]

    def _tokens(self, inputs: Sequence[TensorDictBase]) -> list[Sample]:
        tokens = [_tensor(row.get(self.input_key)) for row in inputs]
        keys = ((self.masks_key, "all_attention_mask"), self.attention_mask_key)
        given: list[Any] | None = None
        for key in keys:
            values = [row.get(key, None) for row in inputs]
            if all(
                m is not None and m.shape == ids.shape
                for m, ids in zip(values, tokens, strict=True)
            ):
                given = values
                break
        masks = unpad(tokens, given, self.padding_value, self.pad_ends_texts)
        assistant = self._given_assistant_masks(inputs)
        samples = []
        for ids, mask, theirs in zip(tokens, masks, assistant, strict=True):
            if theirs is not None:
                theirs = theirs[mask] if theirs.shape == mask.shape else None
            # Scored tokens keep their positions in the padded row, so results match the input.
            samples.append(
                Sample(ids[mask], places=None if self.generate else mask, assistant_mask=theirs)
            )
        return samples

    def _given_assistant_masks(self, inputs: Sequence[TensorDictBase]) -> list[torch.Tensor | None]:
        if self.generate:
            return [None] * len(inputs)
        key = (self.masks_key, "all_assistant_mask")
        return [None if (m := row.get(key, None)) is None else m.bool().cpu() for row in inputs]


def _with_texts(history: History) -> History:
    """Return the history with content parts replaced by text; see ``check_conversation``.

    Raises:
        InvalidRequest: a content part is not text.
    """
    messages = history.view(-1).tolist(tolist_first=True)
    if not any(isinstance(message["content"], (list, dict)) for message in messages):
        return history
    for message in messages:
        # TorchRL stores a list of one part as the part itself.
        if isinstance(message["content"], dict):
            message["content"] = [message["content"]]
    return History.from_chats([[*map(dict, check_conversation(messages))]])[0]


def _plain(value: Any) -> Any:
    if isinstance(value, NonTensorStack):
        return value.tolist()
    return value.data if isinstance(value, NonTensorData) else value


def _tensor(ids: Any) -> torch.Tensor:
    """Return token ids as int64 [length] on the CPU."""
    if not isinstance(ids, torch.Tensor):
        ids = torch.tensor(_plain(ids))
    return cast(torch.Tensor, ids.detach().cpu().long())


def unpad(
    rows: Sequence[Any], masks: Sequence[torch.Tensor] | None, pad: int, pad_is_end: bool
) -> list[torch.Tensor]:
    """Return a mask, bool [length], for every row of token ids. The mask is False at padding.

    Given masks are returned unchanged, as bool on the CPU. Without masks, padding is the run of
    ``pad`` at either end. Tokens in between never count as padding.

    If the padding token also ends texts (``pad_is_end``), the last token of a row may belong to the
    text. In a batch that is padded on the right, the longest row has no padding. So the shortest
    run of padding tokens at the right end is text, and every row keeps this number of them.

    Args:
        masks: the attention masks of the rows, or None.
        pad: the id of the padding token.
        pad_is_end: whether the padding token also ends texts.
    """
    if masks is not None:
        return [mask.detach().bool().cpu() for mask in masks]
    runs = [_runs(torch.as_tensor(row) == pad) for row in rows]
    common = 0
    if pad_is_end:
        common = min(right for _, right in runs)
        if any(left for left, _ in runs) or len({len(row) for row in rows}) > 1:
            # The rows are padded on the left, or not at all. All tokens at the right are text.
            common = max(right for _, right in runs)
    kept = []
    for row, (left, right) in zip(rows, runs, strict=True):
        mask = torch.ones(len(row), dtype=torch.bool)
        mask[:left] = False
        mask[len(row) - max(0, right - common) :] = False
        kept.append(mask)
    return kept


def _runs(is_pad: torch.Tensor) -> tuple[int, int]:
    """Return the lengths of the runs of True at the left and at the right.

    If all values are True, return (0, length).
    """
    others = (~is_pad).nonzero().flatten()
    if not len(others):
        return 0, len(is_pad)
    return int(others[0]), len(is_pad) - 1 - int(others[-1])
