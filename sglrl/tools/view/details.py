"""What the page shows of one trajectory, as values for JSON."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import msgspec
import numpy as np

from ...inference.completion import Decode
from ...sessions.live import RunningTurn
from ...sessions.record import Record
from ...sessions.turn import Turn

_MORE: Final = "\ufffd"
"""What a decoder returns for an incomplete character."""
_MOST_TOKENS: Final = 8
"""The largest number of tokens of one character."""
_TOKEN_LISTS: Final = ("ids", "texts", "mask", "logprobs", "versions", "loras")
"""The lists of a conversation with a value for each token."""
_KNOWN: Final = 1 << 18
"""The largest number of texts to remember."""


def details(
    record: Record | None, running: Sequence[RunningTurn], pieces: Pieces
) -> dict[str, Any]:
    """Return a trajectory, with the turns that are being sampled.

    Returns:
        A dict with ``leaves``: all conversations, the latest one last. Each has ``prompt`` (its
        number of tokens) and, for all of its tokens, lists of ``ids``, ``texts``, ``mask``,
        ``logprobs``, ``versions``, ``loras`` and ``alternatives``. An alternative is a pair of a
        token's text and its logprob, which may be None.
    """
    leaves = [] if record is None else [*map(_leaf, record.branches), _leaf(record)]
    for turn in running:
        _join(leaves, turn)
    for leaf in leaves:
        ids = leaf["ids"]
        leaf["texts"] = pieces(ids)
        leaf["alternatives"] = {
            str(at): [[pieces([one])[0], logprob] for one, logprob in ones]
            for at, ones in leaf["alternatives"].items()
        }
    metadata = {} if record is None else dict(record.metadata)
    return {
        "leaves": leaves,
        "metadata": _plain(metadata),
        "timing": None if record is None else record.timing._asdict(),
    }


class Pieces:
    """Turns token ids into one text for each token."""

    def __init__(self, decode: Decode | None) -> None:
        self._decode = decode
        self._known: dict[tuple[int, ...], str] = {}

    def __call__(self, ids: Sequence[int]) -> list[str]:
        """Return the text of each token. Their concatenation is the text of all tokens.

        A character may consist of several tokens. Its text then belongs to the last of them, and
        the texts of the others are empty. Without a tokenizer, the texts are the ids.
        """
        if self._decode is None:
            return [f"‹{one}›" for one in ids]
        texts: list[str] = []
        # The text of a token may depend on the token before it, such as a leading space.
        context: tuple[int, ...] = ()
        waiting: tuple[int, ...] = ()
        for one in ids:
            waiting += (one,)
            text = self._text(context, waiting)
            if text.endswith(_MORE) and len(waiting) < _MOST_TOKENS:
                texts.append("")
                continue
            texts.append(text)
            context, waiting = waiting[-1:], ()
        if waiting:
            texts[-1] = self._text(context, waiting)
        return texts

    def _text(self, context: tuple[int, ...], ids: tuple[int, ...]) -> str:
        """Return the text that ``ids`` add after ``context``."""
        key = (*context, -1, *ids)
        text = self._known.get(key)
        if text is None:
            assert self._decode is not None
            start = self._decode(list(context), False)
            text = self._decode([*context, *ids], False)[len(start) :]
            if len(self._known) >= _KNOWN:
                self._known.clear()
            self._known[key] = text
        return text


def _leaf(record: Record) -> dict[str, Any]:
    prompt = np.frombuffer(record.prompt_ids, "<i4").tolist()
    mask = np.frombuffer(record.loss_mask, np.uint8).tolist()
    logprobs = np.frombuffer(record.logprobs, "<f4").tolist()
    versions = np.frombuffer(record.versions, "<i4").tolist()
    before = len(prompt)
    loras = None
    if record.lora_versions is not None:
        loras = [-1] * before + np.frombuffer(record.lora_versions, "<i4").tolist()
    return {
        "prompt": before,
        "ids": prompt + np.frombuffer(record.response_ids, "<i4").tolist(),
        "mask": [0] * before + mask,
        "logprobs": [None] * before
        + [value if one else None for value, one in zip(logprobs, mask, strict=True)],
        "versions": [-1] * before + versions,
        "loras": loras,
        "alternatives": _alternatives(record),
        "turns": [_turn(turn, before) for turn in record.turns],
        "messages": _plain(record.messages),
        "reward": sum([turn.reward for turn in record.turns]),
        "running": False,
    }


def _alternatives(record: Record) -> dict[int, list[tuple[int, float | None]]]:
    """Return the recorded alternatives of tokens, by the position of the token.

    They are the tokens that could be drawn (``return_sampling_mask``), or the likeliest tokens,
    which a fork records.
    """
    before = len(record.prompt_ids) // 4
    found: dict[int, list[tuple[int, float | None]]] = {}
    if record.mask_lengths is not None:
        ids = np.frombuffer(record.mask_ids, "<i4").tolist()
        at = 0
        for position, count in enumerate(np.frombuffer(record.mask_lengths, "<i4").tolist()):
            if count:
                found[before + position] = [(one, None) for one in ids[at : at + count]]
            at += count
    top = record.metadata.get("top_logprobs")
    if isinstance(top, list):
        for position, ones in enumerate(top):
            found[before + position] = [(one, logprob) for one, logprob in ones]
    return found


def _turn(turn: Turn, before: int) -> dict[str, Any]:
    values = msgspec.structs.asdict(turn)
    values["rewards"] = [msgspec.structs.asdict(reward) for reward in turn.rewards]
    values["start"] += before
    values["stop"] += before
    return values


def _join(leaves: list[dict[str, Any]], turn: RunningTurn) -> None:
    """Add a running turn to the conversation that it continues, or begin another one."""
    prompt = np.frombuffer(turn.prompt, "<i4").tolist()
    leaf = next((one for one in leaves if prompt[: len(one["ids"])] == one["ids"]), None)
    if leaf is None:
        leaf = {
            "prompt": len(prompt),
            "ids": [],
            "mask": [],
            "logprobs": [],
            "versions": [],
            "loras": None,
            "alternatives": {},
            "turns": [],
            "messages": None,
            "reward": 0.0,
        }
        leaves.append(leaf)
    new = prompt[len(leaf["ids"]) :]
    ids = np.frombuffer(turn.ids, "<i4").tolist()
    logprobs: list[float | None] = np.frombuffer(turn.logprobs, "<f4").tolist()
    leaf["ids"] += new + ids
    leaf["mask"] += [0] * len(new) + [1] * len(ids)
    leaf["logprobs"] += [None] * len(new)
    leaf["logprobs"] += logprobs or [None] * len(ids)
    leaf["versions"] += [-1] * len(new) + np.frombuffer(turn.versions, "<i4").tolist()
    leaf["running"] = True


def _plain(value: Any) -> Any:
    """Return a value that JSON can express."""
    return msgspec.to_builtins(value, enc_hook=repr, builtin_types=(), str_keys=True)


def patch(before: dict[str, Any] | None, after: dict[str, Any]) -> dict[str, Any]:
    """Return what changed in the details of a trajectory, for a page that shows it.

    Each conversation has ``from``: the number of tokens that are still right. The lists of its
    tokens begin there.
    """
    known = [] if before is None else before["leaves"]
    leaves = []
    for index, leaf in enumerate(after["leaves"]):
        same = 0
        if index < len(known):
            # The text of the last token may change when more tokens arrive.
            same = _same(known[index]["texts"], leaf["texts"])
            same = min(same, _same(known[index]["ids"], leaf["ids"]))
        changed = {**leaf, "from": same}
        for name in _TOKEN_LISTS:
            if leaf[name] is not None:
                changed[name] = leaf[name][same:]
        leaves.append(changed)
    return {**after, "leaves": leaves}


def _same(one: Sequence[Any], other: Sequence[Any]) -> int:
    """Return the number of equal values at the beginning."""
    least = min(len(one), len(other))
    if one[:least] == other[:least]:
        return least
    return next(at for at in range(least) if one[at] != other[at])
