"""Compute the logprobs of prompts with ``Client.score``, after the choices are sampled."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from ..client.client import Client
from ..errors import InvalidRequest
from ..inference.completion import Completion, Scores
from .errors import named


class Wanted(NamedTuple):
    """The logprobs of a prompt that a request wants.

    Attributes:
        start: the first position whose logprob is wanted.
        top: number of likeliest tokens that are wanted at each position.
        name: the name of the field that gives ``top``, for error messages.
    """

    start: int = 0
    top: int = 0
    name: str = "prompt_logprobs"


class Scored(NamedTuple):
    """A token of a prompt with its logprobs.

    Attributes:
        id: the token.
        logprob: the logprob of the token. None for the first token, which has no context.
        others: the likeliest tokens and their logprobs, most likely first.
    """

    id: int
    logprob: float | None
    others: list[tuple[int, float]]


def check_whole(name: str, stream: bool | None) -> None:
    """Raise ``InvalidRequest`` if the answer is a stream."""
    if stream:
        raise InvalidRequest(f"{name} needs stream=false")


def wanted_of(top: int | None) -> Wanted | None:
    """Return the logprobs that a value of vLLM's ``prompt_logprobs`` asks for."""
    return None if top is None else Wanted(top=top)


async def score_prompts(
    client: Client, wanted: Sequence[Wanted | None], completions: Sequence[Completion]
) -> list[list[Scored]]:
    """Return the tokens of each prompt with their logprobs, from the wanted position on.

    Args:
        client: computes the logprobs.
        wanted: the wanted logprobs of each prompt. None: no logprobs of this prompt.
        completions: the completions of all prompts, in order. Each prompt has the same number of
            completions.
    """
    each = len(completions) // len(wanted)
    firsts = completions[::each]

    async def score(one: Wanted | None, completion: Completion) -> list[Scored]:
        ids = completion.prompt_ids
        if one is None or one.start >= len(ids):
            return []
        how: dict[str, Any] = {"start": one.start, "lora": completion.lora}
        try:
            scores = await client.score(ids, top_logprobs=one.top, **how)
        except InvalidRequest as error:
            raise named(error, {"top_logprobs": one.name}) from None
        logprobs: list[float | None] = list(
            (scores.logprobs if isinstance(scores, Scores) else scores).tolist()
        )
        if one.start == 0:
            logprobs[0] = None
        rows: list[list[tuple[int, float]]] = [[]] * len(logprobs)
        if isinstance(scores, Scores):
            top = zip(scores.top_ids.tolist(), scores.top_logprobs.tolist(), strict=True)
            rows = [list(zip(*row, strict=True)) for row in top]
        return [
            Scored(id_, logprob, [] if logprob is None else row)
            for id_, logprob, row in zip(ids[one.start :].tolist(), logprobs, rows, strict=True)
        ]

    return await asyncio.gather(*map(score, wanted, firsts))


def by_token(
    tokens: Sequence[Scored], text_of: Callable[[int], str | None]
) -> list[dict[int, Any] | None]:
    """Return vLLM's ``prompt_logprobs``: a dict for each token, and null for the first token.

    The first item of a dict is the token itself. If it is not one of the likeliest tokens, its rank
    is one more than their number.

    Args:
        tokens: the tokens of a prompt.
        text_of: returns the text of a token, or None.
    """
    entries: list[dict[int, Any] | None] = []
    for token in tokens:
        if token.logprob is None:
            entries.append(None)
            continue
        ranks = {id_: rank for rank, (id_, _) in enumerate(token.others, 1)}
        row = {token.id: token.logprob, **dict(token.others)}
        entries.append(
            {
                id_: {
                    "logprob": logprob,
                    "rank": ranks.get(id_, len(ranks) + 1),
                    "decoded_token": text_of(id_),
                }
                for id_, logprob in row.items()
            }
        )
    return entries
