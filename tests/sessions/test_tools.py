"""``Session.run_tools``: what each failure of a tool becomes. A script plays the model."""

from __future__ import annotations

import asyncio
import functools
import threading
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from readme import DOCS, example

import sglrl
from sglrl.inference.message import AssistantMessage
from sglrl.launching.tiny_model import make_tokenizer
from sglrl.sessions import session as session_module

pytestmark = pytest.mark.asyncio(loop_scope="module")
ASK = [{"role": "user", "content": "Go."}]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[sglrl.Client]:
    folder: Path = tmp_path_factory.mktemp("tokenizer")
    make_tokenizer(folder, 512)
    async with sglrl.launch(folder, engine="fake", vocab_size=512) as client:
        yield client


def call(name: str, number: int = 0, error: str = "", **arguments: Any) -> sglrl.ToolCall:
    return sglrl.ToolCall(
        id=f"id-{number}",
        name=name,
        arguments=None if error else arguments,
        raw="raw",
        error=error,
    )


class Script:
    """Replaces the parser: each turn makes the next calls, and then none."""

    def __init__(self, turns: Sequence[Sequence[sglrl.ToolCall]]) -> None:
        self._turns: Iterator[Sequence[sglrl.ToolCall]] = iter(turns)

    def __call__(self, *args: Any) -> AssistantMessage:
        return AssistantMessage(content="said", tool_calls=tuple(next(self._turns, ())))


class NoBridge:
    """Stands for a renderer that cannot extend conversations."""

    name = "script"

    def bridge(self, *args: Any) -> None:
        return None


@pytest.fixture
def scripted(client: sglrl.Client, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that makes a session whose turns make these calls."""

    def make(*turns: Sequence[sglrl.ToolCall]) -> sglrl.Session:
        monkeypatch.setattr(session_module, "parsed", Script(turns))
        session = client.session(messages=ASK, max_new_tokens=2)
        session.spec.renderer = NoBridge()  # type: ignore[assignment]
        session.spec._searched = True
        return session

    return make


def contents(session: sglrl.Session) -> list[str]:
    """Return the contents of the results that the session has observed."""
    observed = session.trajectory().messages or []
    return [message["content"] for message in observed if message["role"] == "tool"]


async def add(a: int, b: int) -> int:
    return a + b


async def test_results_are_observed(scripted: Any) -> None:
    seen: list[str] = []

    def look_up(word: str) -> dict[str, Any]:
        seen.append(threading.current_thread().name)
        return {"word": word, "n": [1, None]}

    session = scripted([call("add", a=1, b=2), call("look_up", 1, word="é")], [call("text", 2)])
    tools = {"add": add, "look_up": look_up, "text": lambda: "plain é"}
    turn = await session.run_tools(tools)
    assert turn is session.turns[-1]
    assert len(session.turns) == 3
    assert contents(session) == ["3", '{"word":"é","n":[1,null]}', "plain é"]
    assert seen == ["sglrl-tool"]
    messages = session.trajectory().messages
    assert [m.get("tool_call_id") for m in messages if m["role"] == "tool"] == [
        "id-0", "id-1", "id-2"
    ]  # fmt: skip
    assert "tool_errors" not in session.metadata


async def boom(**arguments: Any) -> None:
    raise ValueError(f"bad {arguments}")


async def stubborn() -> None:
    while True:
        try:
            await asyncio.sleep(5)
        except asyncio.CancelledError:
            if ended.is_set():
                raise


ended = asyncio.Event()


async def leave() -> None:
    raise asyncio.CancelledError


FAILURES = {
    "not valid": (call("add", error="it has no end"), "this is no valid call: it has no end"),
    "unknown": (call("nothing"), "there is no tool 'nothing'; there are: add, block, boom, "),
    "raises": (call("boom", a=1), "ValueError: bad {'a': 1}"),
    "arguments": (call("add", a=1), "TypeError: add() missing 1 required"),
    "types": (call("add", a=1, b="x"), "TypeError: unsupported operand"),
    "never returns": (call("stubborn"), "no result within 0.2 s"),
    "blocks": (call("block"), "no result within 0.2 s"),
    "cancels itself": (call("leave"), "the tool was cancelled"),
}


@pytest.mark.parametrize("name", FAILURES)
async def test_a_failure_is_observed_or_raised(scripted: Any, name: str) -> None:
    failing, why = FAILURES[name]
    release = threading.Event()
    tools = {"add": add, "boom": boom, "stubborn": stubborn, "block": release.wait, "leave": leave}
    good = call("add", 1, a=1, b=2)
    try:
        session = scripted([good, failing])
        await session.run_tools(tools, timeout=0.2)
        # The other call of the turn has its result.
        first, second = contents(session)
        assert first == "3"
        assert second.startswith(f"error: {why}")
        (error,) = session.trajectory().metadata["tool_errors"]
        assert (error["call"], error["tool"]) == ("id-0", failing.name)
        assert error["error"].startswith(why)
        session = scripted([good, failing])
        with pytest.raises(sglrl.ToolError) as raised:
            await session.run_tools(tools, timeout=0.2, on_error="raise")
        assert raised.value.message.startswith(why)
        assert (raised.value.tool, raised.value.call_id) == (failing.name, "id-0")
        assert isinstance(raised.value.__cause__, ValueError) == (name == "raises")
        assert session.trajectory().metadata["tool_errors"]
        assert contents(session) == []
    finally:
        release.set()
        ended.set()
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            if "stubborn" in repr(task.get_coro()) or "_result" in repr(task.get_coro()):
                task.cancel()
                await asyncio.wait({task})
        ended.clear()


@pytest.mark.parametrize("on_error", ["observe", "raise"])
async def test_a_lost_environment_ends_the_loop(scripted: Any, on_error: str) -> None:
    """The loss of a leased process is not the result of a call. Any other loss is."""
    leased = sglrl.WorkerLost("worker 0 was lost", state_lost=True)

    async def step() -> None:
        raise leased

    async def search() -> None:
        raise sglrl.WorkerLost("worker 1 was lost")

    tools = {"step": step, "search": search}
    session = scripted([call("search"), call("step", 1)], [])
    with pytest.raises(sglrl.WorkerLost) as raised:
        await session.run_tools(tools, on_error=on_error)
    assert raised.value is leased
    if on_error == "observe":
        session = scripted([call("search")], [])
        await session.run_tools(tools)
        assert contents(session) == ["error: WorkerLost: worker 1 was lost"]


async def test_the_documented_environment(client: sglrl.Client) -> None:
    space: dict[str, Any] = {"sglrl": sglrl, "functools": functools, "__name__": "__main__"}
    exec(example("worlds.lease()", DOCS / "rollouts.md"), space)
    groups = await space["collect"](client, [{"prompt": "12 34"}] * 6)
    rewards = [reward for group in groups for reward in group.rewards]
    assert len(rewards) == 24
    assert all(reward > 20 for reward in rewards)


async def test_long_results_are_cut(scripted: Any) -> None:
    session = scripted([call("big")])
    await session.run_tools([big], max_result=100)
    (content,) = contents(session)
    assert content == "x" * 100 + "... (cut: 10,000,000 characters)"


def big() -> str:
    return "x" * 10_000_000


async def test_turns_are_limited(scripted: Any) -> None:
    session = scripted(*[[call("add", a=1, b=2)]] * 9)
    turn = await session.run_tools([add], max_turns=3)
    assert len(session.turns) == 3
    assert turn.tool_calls[0].name == "add"
    assert contents(session) == ["3", "3"]


async def test_calls_of_a_turn_run_at_the_same_time(scripted: Any) -> None:
    both = asyncio.Barrier(2)

    async def meet() -> str:
        await both.wait()
        return "met"

    session = scripted([call("meet"), call("meet", 1)])
    await session.run_tools([meet], timeout=300)
    assert contents(session) == ["met", "met"]


async def test_a_cancelled_loop_cancels_its_tools(scripted: Any) -> None:
    began, cancelled = asyncio.Event(), asyncio.Event()

    async def wait() -> None:
        began.set()
        try:
            await asyncio.sleep(60)
        finally:
            cancelled.set()

    session = scripted([call("wait")])
    running = asyncio.ensure_future(session.run_tools([wait]))
    await began.wait()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    async with asyncio.timeout(300):
        await cancelled.wait()


async def test_a_turn_that_fills_the_context_is_the_last(scripted: Any) -> None:
    ran: list[bool] = []
    session = scripted([call("note")])
    tools = {"note": lambda: ran.append(True)}
    turn = await session.run_tools(tools, max_new_tokens=session.room)
    assert session.room == 0
    assert turn.tool_calls
    assert turn.finish_reason == "length"
    assert ran == []
    assert session.turns == [turn]


async def test_a_full_context_ends_the_loop(scripted: Any) -> None:
    session = scripted(*[[call("big")]] * 9)
    room = session.room
    with pytest.raises(sglrl.InvalidRequest, match="the context is full"):
        await session.run_tools([big], max_result=room * 20)
    assert len(session.turns) == 1
    assert session.trajectory().turns[0].stop == 2


async def test_wrong_arguments(scripted: Any) -> None:
    session = scripted()
    for arguments, why in (
        ({"tools": {"add": 3}}, "the tool 'add' cannot be called"),
        ({"tools": [add, add]}, "two of the tools have the same name"),
        ({"tools": add}, r"tools must be a list of .*, got <function add.*run_tools\(\[tool\]\)"),
        ({"tools": [add], "max_turns": 0}, "max_turns must be"),
        ({"tools": [add], "max_result": True}, "max_result must be"),
        ({"tools": [add], "on_error": "ignore"}, 'on_error must be "observe" or "raise"'),
        ({"tools": [add], "timeout": -1}, "timeout"),
    ):
        with pytest.raises(sglrl.UsageError, match=why):
            await session.run_tools(**arguments)
    assert session.turns == []
