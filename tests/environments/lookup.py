"""A taskset of verifiers with a tool, which runs as an MCP server in a process of its own."""

from __future__ import annotations

from collections.abc import Iterator

import verifiers.v1 as vf

__all__ = ["LookupTaskset"]

FRUIT = "It is a fruit."


class Lookup(vf.Toolset[vf.ToolsetConfig, vf.State]):
    @vf.tool
    async def look_up(self, word: str) -> str:
        """Look up a word."""
        return FRUIT


class LookupData(vf.TaskData):
    pass


class LookupTask(vf.Task[LookupData, vf.State, vf.TaskConfig]):
    @classmethod
    def toolsets(cls, config: vf.TaskConfig) -> list[vf.Toolset]:
        return [Lookup(vf.ToolsetConfig())]

    @vf.reward(weight=2.0)
    async def looked_up(self, trace: vf.Trace) -> float:
        """Return the number of answers of the tool."""
        return float(sum(FRUIT in str(message.content) for message in trace.tool_messages))


class LookupTaskset(vf.Taskset[LookupTask, vf.TasksetConfig]):
    def load(self) -> Iterator[LookupTask]:
        yield LookupTask(LookupData(prompt="What is an apple?"), self.config.task)


if __name__ == "__main__":
    Lookup.run()
