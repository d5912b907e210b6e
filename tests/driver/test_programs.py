"""Users' programs: scripts without a main guard, notebooks, and drivers that die in every way."""

from __future__ import annotations

import ast
import asyncio
import os
import random
import signal
import subprocess
import sys
import textwrap
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from processes import descendants, wait_for_end

SCRIPT = """
import asyncio, os, sys
from pathlib import Path
import sglrl

with Path(sys.argv[1]).open("a") as file:
    file.write("ran\\n")

class Echo(sglrl.Actor):
    @sglrl.endpoint
    async def say(self, text: str) -> str:
        return f"{text} from {os.getpid() != DRIVER}"

DRIVER = os.getpid()

async def main():
    async with sglrl.spawn(Echo, replicas=2) as echo:
        print(await echo.say("hello"))
        print(len(await echo.broadcast.say("hello")))

asyncio.run(main())
"""


@pytest.fixture(autouse=True)
def hidden_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the lines about starts, programs print nothing of the library to stderr."""
    monkeypatch.setenv("SGLRL_PROGRESS", "0")


def run(*arguments: str, cwd: Path, text: str | None = None) -> str:
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=cwd,
        input=text,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    # The library prints nothing to stderr.
    assert done.stderr == ""
    return done.stdout


@pytest.mark.parametrize("way", ["script", "command", "stdin"])
def test_programs_without_a_guard(tmp_path: Path, way: str) -> None:
    log = tmp_path / "log"
    if way == "script":
        (tmp_path / "train.py").write_text(SCRIPT)
        out = run("train.py", str(log), cwd=tmp_path)
    elif way == "command":
        out = run("-c", SCRIPT, str(log), cwd=tmp_path)
    else:
        out = run("-", str(log), cwd=tmp_path, text=SCRIPT)
    assert out == "hello from True\n2\n"
    assert log.read_text() == "ran\n"


def test_types_of_the_program_itself(tmp_path: Path) -> None:
    """Types of the program are pickled with the actor that is defined beside them.

    A second pool in the same program gives the same result.
    """
    program = """
from __future__ import annotations
import asyncio, dataclasses, enum, typing
import msgspec, numpy, sglrl

class Kind(enum.Enum):
    A = "a"

@dataclasses.dataclass
class Point:
    x: int
    label: str | None = None

class Named(typing.NamedTuple):
    n: int

class Dict(typing.TypedDict):
    d: float

class Base(msgspec.Struct, kw_only=True):
    kind: Kind
    weight: float = 1.0

class Body(Base, array_like=True, kw_only=True):
    points: list[Point]
    tags: list[str] = msgspec.field(default_factory=list, name="t")
    named: Named
    dict: Dict

    def __post_init__(self):
        self.tags.append("made")

    @property
    def last(self):
        return self.points[-1].x

class Shapes(sglrl.Actor):
    def __init__(self, first: Point) -> None:
        self.first = first

    @sglrl.endpoint
    async def shift(self, body: Body, by: int = 1) -> Body:
        assert body.last == 2 and body.tags == ["made", "made"], body
        body.points = [self.first, *(Point(p.x + by, p.label) for p in body.points)]
        return body

async def main():
    for _ in range(2):
        async with sglrl.spawn(Shapes, Point(0)) as shapes:
            points = [Point(1), Point(2, "b")]
            body = Body(points=points, kind=Kind.A, named=Named(3), dict={"d": 0.5})
            found = await shapes.shift(body, by=10)
            assert type(found) is Body and type(found.points[0]) is Point, found
            print([p.x for p in found.points], found.kind, found.named.n, found.dict)

asyncio.run(main())
"""
    line = "[0, 11, 12] Kind.A 3 {'d': 0.5}\n"
    assert run("-c", program, cwd=tmp_path) == 2 * line


def test_a_pool_that_is_left_open_is_no_news(tmp_path: Path) -> None:
    program = """
import sglrl

client = sglrl.blocking("fake", engine="fake")
client.__enter__()
print(client.generate(input_ids=[7, 8], max_new_tokens=2).output_ids.tolist())
"""
    assert run("-c", program, cwd=tmp_path) == "[7, 8]\n"


def test_a_copy_of_the_process_leaves_the_pool_alone(tmp_path: Path) -> None:
    program = """
import asyncio, os, sglrl

async def main():
    async with sglrl.launch("fake", engine="fake") as client:
        child = os.fork()
        if not child:
            raise SystemExit(3)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        print((await client.generate(input_ids=[7], max_new_tokens=1)).output_ids)

asyncio.run(main())
"""
    assert run("-c", program, cwd=tmp_path) == "3\n[7]\n"


def test_a_folder_that_is_gone(tmp_path: Path) -> None:
    """Workers start in a deleted folder, and are replaced."""
    program = """
import asyncio, os, signal, sglrl

async def main():
    async with sglrl.launch("fake", engine="fake") as client:
        os.rmdir(os.getcwd())
        os.kill(client.workers[0].pid, signal.SIGKILL)
        print((await client.generate(input_ids=[7], max_new_tokens=1)).output_ids)
    async with sglrl.launch("fake", engine="fake") as client:
        print((await client.generate(input_ids=[8], max_new_tokens=1)).output_ids)

import logging
logging.disable()
asyncio.run(main())
"""
    folder = tmp_path / "gone"
    folder.mkdir()
    assert run("-c", program, cwd=folder) == "[7]\n[8]\n"


async def test_inside_a_running_loop_as_in_a_notebook() -> None:
    cells = [
        "import sglrl",
        """
        class Cell(sglrl.Actor):
            @sglrl.endpoint
            async def double(self, x: int) -> int:
                return 2 * x
        """,
        "handle = await sglrl.spawn(Cell).__aenter__()",
        "answer = await handle.double(21)",
        "await handle.close()",
    ]
    space: dict[str, Any] = {"__name__": "__main__"}
    for cell in cells:
        code = compile(
            textwrap.dedent(cell), "<cell>", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
        )
        result = eval(code, space)
        if asyncio.iscoroutine(result):
            await result
    assert space["answer"] == 42


DRIVER = """
import asyncio, sys
import sglrl

class Sleeper(sglrl.Actor):
    @sglrl.endpoint
    async def sleep(self) -> None:
        print("busy", flush=True)
        await asyncio.Event().wait()

async def main():
    print("begun", flush=True)
    async with sglrl.spawn(Sleeper, replicas=2) as sleepers:
        print("ready", flush=True)
        async with sglrl.launch("fake", engine="fake", replicas=2) as client:
            print("serving", flush=True)
            await asyncio.gather(sleepers.broadcast.sleep(), client.generate(input_ids=[1]))

try:
    asyncio.run(main())
except KeyboardInterrupt:
    sys.exit(130)
"""


class Driver:
    """A driver in its own process, its folder for sockets, and all processes that it started."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.process = subprocess.Popen(
            [sys.executable, "-c", DRIVER],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "TMPDIR": str(folder)},
        )

    def until(self, line: str) -> None:
        assert self.process.stdout is not None
        for got in self.process.stdout:
            if got.strip() == line:
                return
        pytest.fail(f"the driver ended before it said {line!r}")

    def end(self, number: int) -> tuple[str, list[int]]:
        """Send signal ``number``; return stderr and the descendants that live 5 seconds longer."""
        below = list(descendants(self.process.pid))
        self.process.send_signal(number)
        _, errors = self.process.communicate(timeout=300)
        return errors, wait_for_end(below, 5.0)


@pytest.mark.parametrize("stage", ["begun", "ready", "serving"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL, signal.SIGTERM])
def test_nothing_outlives_the_driver(
    tmp_path_factory: pytest.TempPathFactory, stage: str, number: signal.Signals
) -> None:
    # The folder is short, because paths of unix sockets have a length limit.
    folder = Path(tmp_path_factory.mktemp("d"))
    driver = Driver(folder)
    driver.until(stage)
    errors, left = driver.end(number)
    assert not left
    assert not list(folder.iterdir())
    if number == signal.SIGINT:
        assert driver.process.returncode == 130
        assert errors == ""


@pytest.mark.parametrize("seed", range(6))
def test_an_interrupt_at_any_moment(tmp_path_factory: pytest.TempPathFactory, seed: int) -> None:
    folder = Path(tmp_path_factory.mktemp("d"))
    driver = Driver(folder)
    driver.until("begun")
    # The driver is interrupted at a random moment, or after its exit if that comes first.
    with suppress(subprocess.TimeoutExpired):
        driver.process.wait(random.Random(seed).uniform(0.0, 0.8))
    _, left = driver.end(signal.SIGINT)
    assert not left
    assert not list(folder.iterdir())
    assert driver.process.returncode == 130


def test_what_agents_in_other_processes_say(tmp_path: Path) -> None:
    """Agents' output appears in the program's own output. Agents get the program's environment."""
    program = """
    import asyncio, logging, os
    import sglrl

    async def agent(session, item):
        await session.generate(max_new_tokens=1)
        print(f"item {item['id']} of {os.environ['LATER']}", flush=True)
        logging.warning("careful")
        return 1.0

    async def main():
        async with sglrl.launch("fake", engine="fake", progress=False) as client:
            os.environ["LATER"] = "now"
            items = [{"input_ids": [1], "id": i} for i in range(3)]
            async for _ in sglrl.rollout(client, agent, items, processes=1):
                pass
        print("end")

    asyncio.run(main())
    """
    (tmp_path / "train.py").write_text(textwrap.dedent(program))
    done = subprocess.run(
        [sys.executable, "train.py"], cwd=tmp_path, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["end", *(f"item {i} of now" for i in range(3))]
    assert done.stderr.splitlines() == ["WARNING:root:careful"] * 3
