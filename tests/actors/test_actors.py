"""Endpoints through real processes: values, kinds of calls, and errors."""

from __future__ import annotations

import asyncio
import pickle
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
from actor_classes import Gate, Label, Picky, Point, Refuses, Values
from msgspec import Raw

import sglrl
from sglrl.core.calls import Call
from sglrl.core.invariants import validate
from sglrl.wire.codec import encode


@pytest.fixture
async def values() -> AsyncIterator[sglrl.ActorHandle]:
    async with sglrl.spawn(Values, replicas=2) as handle:
        yield handle


async def test_unary_calls_take_positions_names_and_defaults(values: sglrl.ActorHandle) -> None:
    assert await values.add(1, 2) == 3
    assert await values.add(1) == 11
    assert await values.add(b=5, a=1) == 6


async def test_constructor_arguments_arrive() -> None:
    async with sglrl.spawn(Values, factor=3) as values:
        assert await values.add(1, 1) == 6


async def test_a_handle_stays_where_it_is(values: sglrl.ActorHandle) -> None:
    with pytest.raises(sglrl.UsageError, match="an actor handle stays in the process that made it"):
        pickle.dumps(values)
    assert await values.add(1) == 11


async def test_dataclasses_and_structs(values: sglrl.ActorHandle) -> None:
    answer = await values.label(Point(1), Label("a", [Point(2, 3.0)]))
    assert answer == Label("A", [Point(2, 3.0), Point(1, 0.5)])


async def test_arrays_and_bytes(values: sglrl.ActorHandle) -> None:
    array = np.arange(12, dtype=np.float32).reshape(3, 4)
    scaled = await values.scale(array, 2.0)
    assert scaled.dtype == np.float32
    np.testing.assert_array_equal(scaled, 2 * array)
    # A view with strides, and an empty array.
    np.testing.assert_array_equal(await values.scale(array[::2, ::-1], 1.0), array[::2, ::-1])
    assert (await values.scale(np.empty((0, 3), np.float32), 1.0)).shape == (0, 3)
    data = bytes(range(256)) * 4096
    assert await values.reverse(data) == data[::-1]
    assert await values.reverse(b"") == b""


@pytest.mark.parametrize(
    "view", [memoryview(b"abcdef")[::2], np.arange(6.0).data[::2]], ids=["bytes", "floats"]
)
async def test_views_with_gaps_as_arguments(values: sglrl.ActorHandle, view: memoryview) -> None:
    """A view with gaps is sent together with other calls and before later calls."""
    reversed_, *others = await asyncio.gather(
        values.reverse(view), *(values.add(n) for n in range(4))
    )
    assert reversed_ == view.tobytes()[::-1]
    assert others == [10, 11, 12, 13]
    assert await values.broadcast.add(1) == [11, 11]


@pytest.mark.parametrize("floats", [False, True], ids=["bytes", "floats"])
async def test_views_with_gaps_as_results(values: sglrl.ActorHandle, floats: bool) -> None:
    data = bytes(range(32))
    found, *others = await asyncio.gather(
        values.view(data, floats), *(values.add(n) for n in range(4))
    )
    assert found == (data[:8] + data[16:24] if floats else data[::2])
    assert others == [10, 11, 12, 13]
    assert await values.broadcast.add(1) == [11, 11]


async def test_the_size_of_a_view_is_that_of_its_bytes(values: sglrl.ActorHandle) -> None:
    values._pool.driver.max_message_bytes = 1 << 16
    with pytest.raises(sglrl.MessageTooLarge):
        await values.reverse(np.zeros(1 << 14).data)


async def test_streams(values: sglrl.ActorHandle) -> None:
    assert [i async for i in values.stream.count(5)] == [0, 1, 2, 3, 4]
    assert [i async for i in values.stream.count(0)] == []
    arrays = [a async for a in values.stream.arrays(3)]
    assert [a.shape for a in arrays] == [(2, 0), (2, 1), (2, 2)]
    assert arrays[2].tolist() == [[2, 2], [2, 2]]


async def test_broadcast_asks_every_worker_in_order(values: sglrl.ActorHandle) -> None:
    pids = await values.broadcast.pid()
    assert pids == [worker.pid for worker in values.workers]
    assert len(set(pids)) == 2
    assert await values.broadcast.add(1, 2) == [3, 3]


async def test_one_worker_by_index(values: sglrl.ActorHandle) -> None:
    assert len(values) == 2
    assert await values[1].pid() == values.workers[1].pid
    assert await values[0].pid() == values.workers[0].pid
    assert [i async for i in values[1].stream.count(2)] == [0, 1]
    assert [await worker.pid() for worker in values] == [w.pid for w in values.workers]
    wrong: Any
    for wrong in (2, -1, None):
        with pytest.raises(sglrl.UsageError, match="there is no worker"):
            values[wrong]
    for wrong in ("0", 1.0, True):
        with pytest.raises(sglrl.UsageError, match="worker must be the id"):
            values[wrong]


async def test_workers_are_described(values: sglrl.ActorHandle) -> None:
    for index, worker in enumerate(values.workers):
        assert worker.id == index
        assert worker.state == "ready"
        assert worker.device == "cpu"
        assert worker.weight_version == 0
        assert worker.window == 64
        assert worker.load == 0


async def test_environment_of_the_workers() -> None:
    async with sglrl.spawn(Values, env={"RUBRIC": "strict"}) as values:
        assert await values.environment("RUBRIC") == "strict"
        assert await values.environment("NO_SUCH_VARIABLE") is None


@pytest.mark.parametrize(
    ("args", "kwargs", "says"),
    [
        (("1",), {}, "argument `a"),
        ((1.5,), {}, "argument `a"),
        ((None,), {}, "argument `a"),
        ((1, "2"), {}, "argument `b"),
        ((), {}, "missing"),
        ((1, 2, 3), {}, "too many"),
        ((1,), {"c": 1}, "unexpected keyword"),
        ((1 << 70,), {}, "add"),
        ((object(),), {}, "cannot be sent"),
    ],
)
async def test_wrong_arguments_are_never_sent(
    values: sglrl.ActorHandle, args: tuple[Any, ...], kwargs: dict[str, Any], says: str
) -> None:
    with pytest.raises(sglrl.UsageError, match=says):
        await values.add(*args, **kwargs)
    # No call was submitted, and no worker has received one.
    assert values._pool.driver.fabric._next_id == 0
    assert await values.broadcast.calls_seen() == [0, 0]
    assert await values.add(1, 1) == 2


@pytest.mark.parametrize(
    ("name", "argument"),
    [
        ("scale", np.arange(3)),
        ("scale", [1.0, 2.0]),
        ("reverse", "text"),
    ],
)
async def test_wrong_arrays_and_bytes(values: sglrl.ActorHandle, name: str, argument: Any) -> None:
    arguments = (argument, 1.0) if name == "scale" else (argument,)
    with pytest.raises(sglrl.UsageError):
        await getattr(values, name)(*arguments)
    assert await values.add(1, 1) == 2


async def test_unknown_endpoints(values: sglrl.ActorHandle) -> None:
    for space in (values, values.stream, values.broadcast, values[0]):
        with pytest.raises(sglrl.UnknownEndpoint, match="did you mean 'add'"):
            space.ad  # noqa: B018
        assert not hasattr(space, "ad")
    with pytest.raises(sglrl.UsageError, match=r"handle\.stream\.count"):
        values.count  # noqa: B018
    with pytest.raises(sglrl.UsageError, match="returns one result"):
        values.stream.add  # noqa: B018
    with pytest.raises(sglrl.UsageError, match="broadcast takes unary"):
        values.broadcast.count  # noqa: B018


async def test_an_exception_in_the_actor_arrives_with_its_traceback(
    values: sglrl.ActorHandle,
) -> None:
    with pytest.raises(sglrl.RemoteError) as caught:
        await values.fail("no such key")
    assert caught.value.kind == "KeyError"
    assert "no such key" in caught.value.message
    assert "raise KeyError(text)" in caught.value.traceback
    assert "in fail" in str(caught.value)
    assert await values.add(1, 1) == 2


async def test_a_traceback_names_the_users_file() -> None:
    """The traceback also names the file when only the user's program defines the class."""

    class Local(sglrl.Actor):
        @sglrl.endpoint
        async def fail(self) -> None:
            raise KeyError("a line of this file")

    async with sglrl.spawn(Local) as handle:
        with pytest.raises(sglrl.RemoteError) as caught:
            await handle.fail()
    assert f'File "{__file__}", line ' in caught.value.traceback
    assert 'raise KeyError("a line of this file")' in caught.value.traceback


async def test_a_handle_says_what_it_is() -> None:
    handle = sglrl.spawn(Values, replicas=2)
    with pytest.raises(sglrl.UsageError, match="async with"), handle:
        pass
    async with handle:
        assert repr(handle) == "<ActorHandle of Values, 2 ready>"
        assert repr(handle.add) == "<UnaryCaller of endpoint add>"
        assert repr(handle[1].add) == "<UnaryCaller of endpoint add of worker 1>"
    assert repr(handle) == "<ActorHandle of Values, no workers>"


@pytest.mark.parametrize("kind", ["Textless", "Panic"])
async def test_whatever_is_raised_fails_its_own_call_alone(kind: str) -> None:
    async with sglrl.spawn(Gate, restarts=0) as gate:
        held = asyncio.ensure_future(gate.enter())
        await gate.until_begun(1)
        with pytest.raises(sglrl.RemoteError) as caught:
            await gate.fail(kind)
        assert caught.value.kind == kind
        await gate.open()
        assert await held == gate.workers[0].pid


async def test_a_stream_that_awaits_nothing_can_be_read_and_left(
    values: sglrl.ActorHandle,
) -> None:
    async with aclosing(values.stream.rush()) as stream:
        assert await anext(stream) == 0
        assert await anext(stream) == 1
    while any(worker.load for worker in values.workers):
        await values.broadcast.pid()


async def test_a_stream_that_breaks_gives_what_it_had(values: sglrl.ActorHandle) -> None:
    got = []
    with pytest.raises(sglrl.RemoteError, match="the stream broke"):
        async for item in values.stream.fail_later(3):
            got.append(item)
    assert got == [0, 1, 2]
    assert await values.add(1, 1) == 2


async def test_a_result_of_another_type_than_declared(values: sglrl.ActorHandle) -> None:
    with pytest.raises(sglrl.SglrlError, match="declares"):
        await values.lie()
    assert await values.add(1, 1) == 2


async def test_a_type_that_raises_when_it_is_made(values: sglrl.ActorHandle) -> None:
    """Answers of one tick arrive together. An undecodable value fails only its own call."""
    found = await asyncio.gather(
        *(values.picky(n if n % 4 else -n) for n in range(12)), return_exceptions=True
    )
    for n, result in enumerate(found):
        if n and not n % 4:
            assert isinstance(result, sglrl.ProtocolError)
            assert f"LookupError: nothing is {-n}" in str(result)
        else:
            assert result == Picky(n)
    with pytest.raises(sglrl.SglrlError, match="nothing is -5"):
        await values.pick(Picky.changed(-5))
    assert await values.pick(Picky(5)) == 5


def spoil(monkeypatch: pytest.MonkeyPatch, how: Callable[[Call], None]) -> None:
    """Apply ``how`` to the call with the arguments 5 and 10 only."""

    def make(endpoint: str, args: Any, *rest: Any, **more: Any) -> Call:
        call = Call(endpoint, args, *rest, **more)
        if args == Raw(encode([5, 10])):
            how(call)
        return call

    monkeypatch.setattr("sglrl.actors.handles.Call", make)


async def test_a_reply_that_raises_fails_its_own_call(
    values: sglrl.ActorHandle, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(body: Any, frames: Any) -> Any:
        raise MemoryError("no room")

    def break_reply(call: Call) -> None:
        call.reply.result = SimpleNamespace(decode=broken)

    spoil(monkeypatch, break_reply)
    found = await asyncio.gather(*(values.add(n) for n in range(10)), return_exceptions=True)
    assert [found[n] for n in range(10) if n != 5] == [n + 10 for n in range(10) if n != 5]
    assert isinstance(found[5], sglrl.SglrlError)
    assert "MemoryError: no room" in str(found[5])
    assert isinstance(found[5].__cause__, MemoryError)
    assert "the answer to add could not be processed" in caplog.text
    assert not values._pool.driver.fabric.calls
    assert await values.add(1, 1) == 2


class Unencodable(msgspec.Struct):
    what: object


async def test_a_call_that_cannot_be_encoded_fails_alone(
    values: sglrl.ActorHandle, monkeypatch: pytest.MonkeyPatch
) -> None:
    def break_args(call: Call) -> None:
        call.args = Unencodable(object())

    spoil(monkeypatch, break_args)
    found = await asyncio.gather(*(values.add(n) for n in range(10)), return_exceptions=True)
    assert [found[n] for n in range(10) if n != 5] == [n + 10 for n in range(10) if n != 5]
    assert isinstance(found[5], sglrl.UsageError)
    assert "add: the call cannot be sent" in str(found[5])
    # The failed call's slot is free again.
    validate(values._pool.driver.fabric)
    assert [worker.load for worker in values.workers] == [0, 0]


async def test_a_constructor_that_raises() -> None:
    with pytest.raises(sglrl.WorkerStartError) as caught:
        async with sglrl.spawn(Refuses, "raise", start_timeout=3600):
            pytest.fail("it cannot have started")
    assert caught.value.worker == 0
    assert "no such rubric" in caught.value.output
    assert "about to refuse" in str(caught.value)


async def test_a_worker_that_exits_while_it_starts() -> None:
    with pytest.raises(sglrl.WorkerStartError, match="exited with status 7") as caught:
        async with sglrl.spawn(Refuses, "exit", replicas=2, start_timeout=3600):
            pytest.fail("it cannot have started")
    assert "leaving the hard way" in caught.value.output


async def test_wrong_constructor_arguments() -> None:
    with pytest.raises(sglrl.UsageError, match="factor"):
        sglrl.spawn(Values, factor="three")
    with pytest.raises(sglrl.UsageError, match="replicas"):
        sglrl.spawn(Values, replicas=0)
    with pytest.raises(sglrl.UsageError, match="window"):
        sglrl.spawn(Values, window=True)
    with pytest.raises(sglrl.UsageError, match="did you mean 'replicas'"):
        sglrl.spawn(Values, replica=2)
    with pytest.raises(sglrl.UsageError, match="unexpected keyword argument 'other'"):
        sglrl.spawn(Values, other=2)
    with pytest.raises(sglrl.UsageError, match="subclass"):
        sglrl.spawn(int)  # type: ignore[arg-type]


async def test_results_that_cannot_be_sent() -> None:
    class Makes(sglrl.Actor):
        @sglrl.endpoint
        async def engine(self) -> list[sglrl.Client]:
            raise NotImplementedError

    with pytest.raises(sglrl.UsageError, match=r"result of engine\(\) has the type .*Client"):
        sglrl.spawn(Makes)


async def test_a_class_without_endpoints() -> None:
    class Empty(sglrl.Actor):
        pass

    with pytest.raises(sglrl.UsageError, match="declares no endpoint"):
        sglrl.spawn(Empty)


@pytest.mark.parametrize("name", ["add_workers", "remove_worker", "wait_until_full"])
def test_what_a_handle_has_itself_is_no_endpoint(name: str) -> None:
    async def method(self: Any) -> None: ...

    actor = type("Local", (sglrl.Actor,), {name: sglrl.endpoint(method)})
    with pytest.raises(sglrl.UsageError, match=rf"Local\.{name}: the name is reserved"):
        sglrl.spawn(actor)


def test_a_parameter_that_is_the_callers() -> None:
    class Local(sglrl.Actor):
        @sglrl.endpoint
        async def run(self, command: str, timeout: float = 5.0) -> None: ...

    with pytest.raises(sglrl.UsageError, match="'timeout', which is the caller's"):
        sglrl.spawn(Local)


async def test_a_path_object_among_the_folders_of_modules(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path, tmp_path])
    async with sglrl.spawn(Values) as values:
        assert await values.add(1) == 11


async def test_a_class_defined_in_a_function() -> None:
    word = "closure"

    class Local(sglrl.Actor):
        @sglrl.endpoint
        async def say(self) -> str:
            return word

    async with sglrl.spawn(Local) as local:
        assert await local.say() == "closure"


async def test_before_the_start_and_after_the_end() -> None:
    handle = sglrl.spawn(Gate)
    with pytest.raises(sglrl.Closed):
        await handle.enter()
    async with handle:
        enter = handle.enter
        await handle.until_begun(0)
    with pytest.raises(sglrl.Closed):
        await enter()
    await handle.close()


class Opened(sglrl.Actor):
    def __init__(self, fails: bool = False) -> None:
        self.fails = fails
        self.said: list[str] = []

    async def open(self) -> None:
        await asyncio.sleep(0)
        if self.fails:
            raise RuntimeError("the database is gone")
        self.said.append("opened")

    @sglrl.endpoint
    async def what(self) -> list[str]:
        return self.said


class Opens(sglrl.Actor):
    @sglrl.endpoint
    async def open(self, door: int) -> int:  # type: ignore[override]
        return door


async def test_an_actor_is_opened_before_it_serves() -> None:
    async with sglrl.spawn(Opened) as actors:
        assert await actors.what() == ["opened"]
    with pytest.raises(sglrl.WorkerStartError, match="the database is gone"):
        async with sglrl.spawn(Opened, fails=True):
            pass
    async with sglrl.spawn(Opens) as actors:
        assert await actors.open(3) == 3
