"""The sessions of this process that are running, for programs that watch them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from ..driver.driver import now
from ..inference.replies import GenerationReply
from ..wire.engine import TokenChunk
from .record import Record
from .shared import Shared
from .trajectory import record_of
from .turn_sampler import TurnSampler


class LiveSample(msgspec.Struct, frozen=True, kw_only=True):
    """A session that is open: a sample of a rollout, a session of a gateway, or one of a program.

    Attributes:
        id: identifies the session among all processes of this machine.
        item, sample: these values of its metadata. In a rollout, they are the index of the item,
            and the index of the sample in its group.
        doing: "engine": a turn is being sampled. "waiting": a turn waits at a paused run or in the
            queue. "tools": no turn is being sampled, so the agent is at work.
        turns: the number of finished turns.
        tokens: the number of sampled tokens, including those of the running turns.
        reward: the sum of the rewards so far.
        started: when it began, in seconds as ``time.time`` returns them.
    """

    id: str
    item: Any
    sample: Any
    doing: str
    turns: int
    tokens: int
    reward: float
    started: float


class EndedSample(msgspec.Struct, frozen=True, kw_only=True):
    """A sample of a rollout that has ended.

    Attributes:
        item: the index of the item in the data set.
        sample: the index of the sample in its group.
        error: why it failed or was given up, or "".
        trajectory: its turns. If it was not finished, the turns until then, or None if they are not
            known, as with agents in other processes.
        ended: when it ended, in seconds as ``time.time`` returns them.
    """

    item: int
    sample: int
    error: str
    trajectory: Record | None
    ended: float


class EndedSamples(msgspec.Struct, frozen=True, kw_only=True):
    """Some samples that have ended.

    Attributes:
        samples: the samples, oldest first.
        next: the number of the sample that follows them, for the next question.
    """

    samples: list[EndedSample]
    next: int


class RunningTurn(msgspec.Struct, frozen=True, array_like=True):
    """The tokens of a turn that is being sampled.

    Attributes:
        prompt: int32 [p], all tokens before the turn.
        ids, logprobs, versions: int32, float32 and int32 [t]: the tokens that have arrived, their
            logprobs, and the policy versions that sampled them.
    """

    prompt: bytes
    ids: bytes
    logprobs: bytes
    versions: bytes


class LiveState(msgspec.Struct, frozen=True, kw_only=True):
    """An open session with its tokens.

    Attributes:
        trajectory: the finished turns. None if there are none, or if the caller has them already.
        running: the turns that are being sampled. A session has several if it was forked.
    """

    sample: LiveSample
    trajectory: Record | None
    running: list[RunningTurn]


def live_samples(sessions: Iterable[Shared], wall: float) -> list[LiveSample]:
    """Describe the open sessions.

    Args:
        wall: the present time as ``time.time`` returns it.
    """
    return [_described(shared, wall) for shared in sessions if not shared.closed]


async def live_state(
    sessions: Iterable[Shared], id_: str, turns: int, tokens: int, seconds: float, wall: float
) -> LiveState | None:
    """Return an open session, or None if no open session has this id.

    The session's next turns are streamed for a while, so that each of their tokens can be seen.

    Args:
        turns, tokens: what the caller knows. Wait until the session differs from it.
        seconds: the longest time to wait.
    """
    shared = next((one for one in sessions if one.live_id == id_), None)
    if shared is None:
        return None
    shared.watch.begin()
    for sampler in _samplers(shared):
        reply = sampler.call.reply if sampler.call is not None else None
        if isinstance(reply, GenerationReply):
            reply.on_chunk = shared.telling(reply.on_chunk)
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            while not shared.closed and _progress(shared) == (turns, tokens):
                await shared.watch.changed()
    if shared.closed:
        return None
    history, record = shared.history, None
    if history.turns and len(history.turns) != turns:
        made = history.trajectory(
            total=now() - shared.began, generating=shared.generating, metadata=shared.metadata
        )
        record = record_of(made)
    running = [turn for sampler in _samplers(shared) if (turn := _running(sampler)) is not None]
    return LiveState(sample=_described(shared, wall), trajectory=record, running=running)


def _described(shared: Shared, wall: float) -> LiveSample:
    turns, tokens = _progress(shared)
    doing = "tools"
    for sampler in _samplers(shared):
        call = sampler.call
        doing = "waiting" if call is None or call.worker is None else "engine"
    return LiveSample(
        id=shared.live_id,
        item=shared.metadata.get("item"),
        sample=shared.metadata.get("sample"),
        doing=doing,
        turns=turns,
        tokens=tokens,
        reward=sum(shared.history.rewards.totals),
        started=wall - (now() - shared.began),
    )


def _progress(shared: Shared) -> tuple[int, int]:
    """Return the number of finished turns, and the number of all sampled tokens."""
    turns = shared.history.turns
    size = sum(len(chunk.ids) for turn in turns for chunk in turn.chunks)
    for sampler in _samplers(shared):
        if (turn := _running(sampler)) is not None:
            size += len(turn.ids)
    return len(turns), size // 4


def _samplers(shared: Shared) -> list[TurnSampler]:
    return [turn for turn in shared.running if isinstance(turn, TurnSampler)]


def _running(sampler: TurnSampler) -> RunningTurn | None:
    reply = None if sampler.call is None else sampler.call.reply
    if not isinstance(reply, GenerationReply):
        return None
    chunks: Sequence[TokenChunk] = reply.chunks or []
    future = reply.future
    if future.done():
        if future.cancelled() or future.exception() is not None:
            return None
        # The turn has ended, and is about to be added to the history.
        chunks = future.result().chunks
    return RunningTurn(
        reply.prompt,
        b"".join([chunk.ids for chunk in chunks]),
        b"".join([chunk.logprobs for chunk in chunks]),
        b"".join([chunk.version.to_bytes(4, "little") * (len(chunk.ids) // 4) for chunk in chunks]),
    )
