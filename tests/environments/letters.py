"""A taskset of verifiers for a harness without tools: rewards with weights, and a metric."""

from __future__ import annotations

from collections.abc import Iterator

import verifiers.v1 as vf

__all__ = ["LettersTaskset"]

played: list[vf.Trace] = []
"""The traces that were scored in this process."""


class LettersData(vf.TaskData):
    wanted: str


class LettersTask(vf.Task[LettersData, vf.State, vf.TaskConfig]):
    @vf.reward(weight=0.5)
    async def wanted_letters(self, trace: vf.Trace) -> float:
        played.append(trace)
        return float(sum(trace.last_reply.count(letter) for letter in self.data.wanted))

    @vf.reward
    async def short(self, trace: vf.Trace) -> float:
        return 1.0 / (1 + len(trace.last_reply))

    @vf.metric
    async def characters(self, trace: vf.Trace) -> float:
        return float(len(trace.last_reply))


class LettersTaskset(vf.Taskset[LettersTask, vf.TasksetConfig]):
    def load(self) -> Iterator[LettersTask]:
        for wanted in ("ab", "xyz", "e"):
            data = LettersData(prompt=f"Write {wanted}.", system_prompt="Be brief.", wanted=wanted)
            yield LettersTask(data, self.config.task)
