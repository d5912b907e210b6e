"""Run callers in a closed loop, check their answers, and count the outcomes of their calls.

A prompt belongs to one caller, so no two running calls have the same prompt. The prompt therefore
identifies a call at a worker. Unary and streamed calls alternate.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

import sglrl
from sglrl.core.calls import RUNNING, SENT
from sglrl.core.invariants import validate
from sglrl.inference import replies

from .parts import Note

_TIMEOUT = 60.0
"""Seconds after which a call without an answer counts as lost."""
_NOTE_SECONDS = 5.0
_EXAMPLES = 20
_REMEMBERED = 2_000
"""Number of ended calls that are remembered. With a limit, the bench's own memory does not grow
during a soak."""


class Prompt(NamedTuple):
    """Token ids and sampling arguments. Sampling is greedy, so that there is one right answer."""

    ids: list[int]
    options: dict[str, Any]

    @property
    def key(self) -> bytes:
        return np.array(self.ids, dtype="<i4").tobytes()


class Answer(NamedTuple):
    """The answer to a prompt without faults.

    Attributes:
        ids: the sampled tokens, int32 [t].
        logprobs: the logprobs of the tokens, float32 [t].
        finish: the finish reason.
    """

    ids: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    finish: str


@dataclass
class Strike:
    """One fault that happened.

    Attributes:
        at: the time right after the signal. The other times are in seconds after it.
        held: number of calls that the worker held.
        waits: for each stream that the worker held, the time until the first token from another
            worker.
        back: time until the replacement was ready.
        alone: whether no other worker was stopped or slow at that time. If one was, a call may have
            moved to a worker with another fault.
    """

    kind: str
    worker: int
    pid: int
    at: float
    held: int = 0
    waits: list[float] = field(default_factory=list)
    back: float | None = None
    alone: bool = True


@dataclass
class Outcomes:
    """Counts the outcomes of calls.

    Every submitted call is answered or lost. An answer is right, duplicated (it has tokens twice,
    or too many tokens) or wrong.

    Attributes:
        streams: number of calls of ``stream``.
        resumed: number of calls that another worker continued.
        losses: number of times that a call lost its worker and was answered later.
        tokens: number of tokens in all answers.
        recomputed: number of tokens that another worker had to prefill to continue a call.
        reasons: examples of errors, each with the number of its occurrences.
    """

    submitted: int = 0
    answered: int = 0
    lost: int = 0
    duplicated: int = 0
    wrong: int = 0
    streams: int = 0
    resumed: int = 0
    losses: int = 0
    tokens: int = 0
    recomputed: int = 0
    reasons: Counter[str] = field(default_factory=Counter)

    @property
    def flawless(self) -> bool:
        settled = self.submitted == self.answered + self.lost
        return settled and not (self.lost or self.duplicated or self.wrong)

    def add_example(self, text: str) -> None:
        """Count an error, if there are not too many different errors yet."""
        if text in self.reasons or len(self.reasons) < _EXAMPLES:
            self.reasons[text] += 1


class _Stream:
    """A running stream, with the strikes on workers that held it.

    ``pieces`` has the time and the position of each chunk.
    """

    def __init__(self) -> None:
        self.pieces: list[tuple[float, int]] = []
        self.strikes: list[Strike] = []

    def record_waits(self, continued: Sequence[int]) -> None:
        """Record for each strike the time until the stream continued at another worker.

        Tokens that the struck worker sent before the strike may still arrive after it. They do not
        count as a continuation.

        Args:
            continued: the positions at which another worker continued.
        """
        for strike in self.strikes:
            for at, start in self.pieces:
                if at > strike.at and start in continued:
                    strike.waits.append(at - strike.at)
                    break


class Load:
    """Runs ``in_flight`` callers, which send the prompts again and again until ``stop`` is called.

    Each caller waits ``pause`` seconds between an answer and its next call.
    """

    def __init__(
        self,
        client: sglrl.Client,
        prompts: Sequence[Prompt],
        answers: Sequence[Answer],
        *,
        in_flight: int,
        tolerance: float | None,
        pause: float = 0.0,
    ) -> None:
        if len(prompts) < in_flight:
            raise ValueError(f"{in_flight} callers need as many prompts, got {len(prompts)}")
        if len({prompt.key for prompt in prompts}) < len(prompts):
            raise ValueError("a prompt occurs twice")
        self.client = client
        self.prompts = prompts
        self.answers = answers
        self.in_flight = in_flight
        self.tolerance = tolerance
        self.pause = pause
        self.outcomes = Outcomes()
        self._streams: dict[bytes, _Stream] = {}
        self._stopping = False

    @property
    def _fabric(self) -> Any:
        """The driver's tables. Unlike the client, they show the worker that holds a call."""
        return self.client.pool.driver.fabric

    async def run(self) -> None:
        with self.count_ends():
            async with asyncio.TaskGroup() as group:
                for caller in range(self.in_flight):
                    group.create_task(self._call(caller))

    @asynccontextmanager
    async def running(self, faults: Callable[[], int], note: Note) -> AsyncIterator[None]:
        """Run the callers while the block runs, and regularly show how their calls ended.

        Args:
            faults: returns the number of faults so far.
            note: shows a text to the user.
        """

        async def show() -> None:
            while True:
                o = self.outcomes
                note(
                    f"{faults()} faults; {o.answered:,} calls answered, {o.lost} lost, "
                    f"{o.duplicated} duplicated, {o.wrong} wrong"
                )
                await asyncio.sleep(_NOTE_SECONDS)

        async with asyncio.TaskGroup() as group:
            calls = group.create_task(self.run())
            notes = group.create_task(show())
            try:
                yield
            finally:
                notes.cancel()
                self.stop()
            await calls

    def stop(self) -> None:
        """Start no more calls. Running calls are still awaited."""
        self._stopping = True

    def struck(self, strike: Strike) -> None:
        """Record the calls that the worker holds. Call this right after the signal."""
        member = self._fabric.members[strike.worker]
        for call in member.calls.values():
            if call.state in (SENT, RUNNING):
                strike.held += 1
                running = self._streams.get(call.route.tokens) if call.route else None
                if running is not None:
                    running.strikes.append(strike)

    def may_strike(self, worker: int) -> bool:
        """Return whether the worker may be killed without making one of its calls fail.

        A call that has lost ``max_attempts`` workers in a row fails, because it may be the cause of
        the losses. On a busy machine, a call can lose that many workers before its first token.
        """
        most = self._fabric.config.max_attempts - 1
        return all(call.losses < most for call in self._fabric.members[worker].calls.values())

    def left_over(self) -> list[str]:
        """Check the driver's tables when no call should run, and describe what is wrong."""
        validate(self._fabric)
        left = len(self._fabric.calls)
        return [f"{left} calls are left in the driver's tables"] if left else []

    async def _call(self, caller: int) -> None:
        turn = caller
        while not self._stopping:
            for at in range(caller, len(self.prompts), self.in_flight):
                turn += 1
                await self._ask(self.prompts[at], self.answers[at], turn % 2 == 0)
                if self.pause:
                    await asyncio.sleep(self.pause)
                if self._stopping:
                    break

    async def _ask(self, prompt: Prompt, answer: Answer, streamed: bool) -> None:
        outcomes = self.outcomes
        outcomes.submitted += 1
        try:
            if streamed:
                outcomes.streams += 1
                made, pieces = await self._read(prompt)
            else:
                made = await self.client.generate(
                    input_ids=prompt.ids, logprobs=True, timeout=_TIMEOUT, **prompt.options
                )
                pieces = [made]
        except sglrl.SglrlError as error:
            outcomes.lost += 1
            outcomes.add_example(f"{type(error).__name__}: {error}")
            # A pool without workers rejects calls at once. Let the event loop run in between.
            await asyncio.sleep(0.01)
            return
        outcomes.answered += 1
        outcomes.resumed += made.resumed > 0
        outcomes.losses += made.resumed
        outcomes.tokens += len(made.output_ids)
        # A call that was lost before its first token is prefilled again from its start.
        outcomes.recomputed += sum(made.resumed_at) + made.resumed * len(prompt.ids)
        self._check(prompt, answer, made, pieces)

    async def _read(self, prompt: Prompt) -> tuple[sglrl.Completion, list[Any]]:
        running = self._streams[prompt.key] = _Stream()
        pieces: list[Any] = []
        position = 0
        stream = self.client.stream(
            input_ids=prompt.ids, logprobs=True, timeout=_TIMEOUT, **prompt.options
        )
        try:
            async for chunk in stream:
                running.pieces.append((time.monotonic(), position))
                position += len(chunk.output_ids)
                pieces.append(chunk)
        finally:
            del self._streams[prompt.key]
        made = stream.completion
        # ``resumed_at`` does not list a worker that was lost before it had sent a token.
        early = (0,) if made.resumed > len(made.resumed_at) else ()
        running.record_waits(early + made.resumed_at)
        return made, pieces

    def _check(
        self, prompt: Prompt, answer: Answer, made: sglrl.Completion, pieces: Sequence[Any]
    ) -> None:
        """Compare an answer with the right answer, and count the outcome.

        Args:
            prompt: the prompt.
            answer: the right answer.
            made: the answer of the pool.
            pieces: the chunks of a stream, which must add up to the whole answer.
        """
        outcomes = self.outcomes
        expected, count = answer.ids, len(answer.ids)
        ids = np.concatenate([p.output_ids for p in pieces])
        if len(ids) > count or len(made.output_ids) > count:
            outcomes.duplicated += 1
            outcomes.add_example(
                f"{len(ids)} tokens where {count} were right, resumed {made.resumed}"
            )
            return
        logprobs = np.concatenate([p.logprobs for p in pieces])
        ends = [span.stop for span in made.versions]
        starts = [span.start for span in made.versions]
        if self.tolerance is None:
            expected, wanted, tolerance = made.output_ids, made.logprobs, 0.0
        else:
            wanted, tolerance = answer.logprobs, self.tolerance
        faults = {
            "ids": len(ids) != count
            or not (np.array_equal(ids, expected) and np.array_equal(made.output_ids, ids)),
            "logprobs": len(logprobs) != count
            or not np.allclose(logprobs, wanted, rtol=0, atol=tolerance)
            or not np.array_equal(made.logprobs, logprobs),
            "finish reason": made.finish_reason != answer.finish,
            "versions": starts != [0, *ends[:-1]] or ends[-1] != count,
        }
        wrong = [name for name, is_wrong in faults.items() if is_wrong]
        if wrong:
            outcomes.wrong += 1
            outcomes.add_example(
                f"wrong {', '.join(wrong)}: {len(ids)} tokens of {count} after {len(prompt.ids)}, "
                f"resumed at {made.resumed_at}, {len(pieces)} pieces"
            )

    @contextmanager
    def count_ends(self) -> Iterator[None]:
        """Count calls that end twice, while the block runs.

        At the second end, the caller has already returned. To notice that end all the same, this
        replaces the methods through which the driver delivers the end of a call.
        """
        ended: dict[tuple[int, float], None] = {}
        originals = [(kind, kind.end) for kind in (replies.GenerationReply, replies.ChunkReply)]

        def counted(original: Any) -> Any:
            def end(reply: Any, call: Any, outcome: Any, frames: Any) -> None:
                # The id alone is not enough, because another pool in this process has the same ids.
                key = (call.id, call.submitted_at)
                if key in ended:
                    self.outcomes.duplicated += 1
                    self.outcomes.add_example(f"a call ended twice: {call!r}")
                ended[key] = None
                if len(ended) > _REMEMBERED:
                    del ended[next(iter(ended))]
                original(reply, call, outcome, frames)

            return end

        for kind, original in originals:
            kind.end = counted(original)  # type: ignore[method-assign]
        try:
            yield
        finally:
            for kind, original in originals:
                kind.end = original  # type: ignore[method-assign]


async def fault_free(
    client: sglrl.Client, prompts: Sequence[Prompt], in_flight: int, tolerance: float | None
) -> list[Answer | None]:
    """Return the answers of a pool without faults.

    Returns:
        One answer for each prompt. It is None if the prompt has more than one right answer. Then,
        at some position, the logprobs of the two likeliest tokens are so close that errors of
        ``tolerance`` may swap the tokens.
    """
    room = asyncio.Semaphore(in_flight)

    async def ask(prompt: Prompt) -> Answer | None:
        async with room:
            made = await client.generate(input_ids=prompt.ids, top_logprobs=2, **prompt.options)
        assert made.logprobs is not None
        assert made.top_logprobs is not None
        first, second = made.top_logprobs.logprobs.T
        if tolerance is not None and (first - second).min() <= 2 * tolerance:
            return None
        return Answer(made.output_ids, made.logprobs, made.finish_reason)

    return list(await asyncio.gather(*(ask(prompt) for prompt in prompts)))
