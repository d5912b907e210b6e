"""``sglrl eval``: every item is sampled once, also after kills; errors name the line."""

from __future__ import annotations

import fcntl
import os
import random
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
import pytest
from readme import DOCS, example

from sglrl.__main__ import main
from sglrl.errors import UsageError
from sglrl.inference.sampling import SamplingParams
from sglrl.launching.tiny_model import make_model
from sglrl.rollouts.evaluation import Outcome, Summary, summarize
from sglrl.sessions.session import Session
from sglrl.tools.eval import run as eval_run
from sglrl.tools.eval.items import Item, read_items
from sglrl.tools.eval.results import ResultsFile, Sample
from sglrl.tools.eval.run import EvalSettings

Record = dict[str, Any]
PROGRESS = ("start: ", "items: ")
_names = count()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Make a model folder with a tokenizer."""
    return str(make_model(tmp_path_factory.mktemp("models") / "tiny"))


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Run each test in its own folder, where ``--score`` finds modules."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    return tmp_path


def write(items: Sequence[Record], name: str = "in.jsonl") -> None:
    Path(name).write_bytes(b"".join(msgspec.json.encode(item) + b"\n" for item in items))


def read(name: str = "out.jsonl") -> list[Record]:
    return [msgspec.json.decode(line) for line in Path(name).read_bytes().splitlines()]


def module(code: str) -> str:
    """Write a module with a name that no other test uses. Return the name."""
    name = f"rewards_{next(_names)}"
    Path(f"{name}.py").write_text(code)
    return name


def questions(number: int) -> list[Record]:
    return [{"id": i, "prompt": f"question {i}", "answer": i % 3} for i in range(number)]


def command(model: str, *options: str) -> list[str]:
    """Return a command that uses the fake engine, which repeats the prompt."""
    files = ["--input", "in.jsonl", "--output", "out.jsonl"]
    return ["eval", model, *files, "--engine", "fake", "--max-new-tokens", "4", *options]


class Result:
    """The exit code of a command that ran in this process, and its output."""

    def __init__(self, arguments: Sequence[str], capsys: pytest.CaptureFixture[str]) -> None:
        with pytest.raises(SystemExit) as exit_:
            main(arguments)
        self.code = exit_.value.code
        self.out, self.err = capsys.readouterr()

    @property
    def summary(self) -> Record:
        assert self.code == 0, self.err
        return msgspec.json.decode(self.out)  # type: ignore[no-any-return]


# --- a run ----------------------------------------------------------------------------------------


def test_each_line_has_its_own_fields_and_its_samples(
    model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    items: list[Record] = [
        {"prompt": "hello world", "id": "a", "big": 1 << 80, "nested": {"x": [1.5, None]}},
        {"messages": [{"role": "user", "content": "hé"}], "input_ids": None},
        {"input_ids": [5, 6, 7, 8], "answer": 3},
    ]
    # A blank line counts as a line.
    lines = [msgspec.json.encode(item) for item in items]
    Path("in.jsonl").write_bytes(b"\n\n".join(lines))
    options = ["-n", "2", "--logprobs", "--seed", "1", "--json"]
    summary = Result(command(model, *options), capsys).summary
    records = sorted(read(), key=lambda record: record["line"])
    assert [record.pop("line") for record in records] == [1, 3, 5]
    for record in records:
        for sample in record["samples"]:
            assert sample["finish_reason"] == "length"
            assert sample["tokens"] == len(sample["output_ids"]) == 4
            assert sample["logprobs"] == pytest.approx([-i / 1024 for i in (1, 2, 3, 4)])
            assert "score" not in sample
    assert [len(record.pop("samples")) for record in records] == [2, 2, 2]
    assert records == items
    del summary["seconds"], summary["tokens_per_second"]
    assert summary == {
        "items": 3,
        "samples": 6,
        "mean_score": None,
        "pass_at_k": {},
        "truncated": 1.0,
        "tokens": 24,
    }


SCORES = """
import asyncio

counts = {}

def passes(item, text):
    # Of the item's four samples, the first item["answer"] pass.
    counts[item["id"]] = counts.get(item["id"], 0) + 1
    item["prompt"] = "changed"
    return counts[item["id"]] <= item["answer"]

async def passes_later(item, text):
    await asyncio.sleep(0)
    return float(passes(item, text))

def half(item, text):
    assert text.startswith("quest")
    return 0.5
"""


@pytest.mark.parametrize("function", ["passes", "passes_later"])
def test_scores_become_pass_at_k(
    model: str, function: str, capsys: pytest.CaptureFixture[str]
) -> None:
    write(questions(6))
    score = f"{module(SCORES)}:{function}"
    options = ["-n", "4", "--score", score]
    summary = Result(command(model, *options, "--json"), capsys).summary
    for record in read():
        assert sum(sample["score"] for sample in record["samples"]) == record["answer"]
        assert record["prompt"] == f"question {record['id']}"
    # Two items each with 0, 1 and 2 of 4 passed samples.
    assert summary["mean_score"] == pytest.approx(1 / 4)
    wanted = {
        "1": (0 + 1 / 4 + 2 / 4) / 3,
        "2": (0 + 3 / 6 + 5 / 6) / 3,
        "4": (0 + 1 + 1) / 3,
    }
    assert summary["pass_at_k"] == pytest.approx(wanted)
    # Everything is finished, so the command only shows another table.
    again = Result(command(model, *options, "--k", "3", "--k", "1"), capsys)
    assert (again.code, again.err) == (0, "6 of 6 items are finished\n")
    assert f"pass@3 │ {(0 + 3 / 4 + 1) / 3:.2%}" in " ".join(again.out.split())
    assert "pass@2" not in again.out


def test_a_score_below_1_has_not_passed(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    write(questions(2))
    options = ["--score", f"{module(SCORES)}:half", "--json"]
    summary = Result(command(model, *options), capsys).summary
    assert (summary["mean_score"], summary["pass_at_k"]) == (0.5, {"1": 0.0})


AGENT = """
async def agent(session, item):
    await session.generate(max_new_tokens=2)
    session.observe([5, 6, 7])
    await session.generate(max_new_tokens=3)
    return {"answer": item.pop("answer"), "half": 0.5}

async def fails(session, item):
    await session.generate(max_new_tokens=2)
    return 1 / item["answer"]
"""


def test_an_agent_has_several_turns(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    write(questions(6))
    name = module(AGENT)
    options = ["-n", "2", "--agent", f"{name}:agent", "--logprobs", "--json"]
    summary = Result(command(model, *options), capsys).summary
    assert (summary["tokens"], summary["mean_score"]) == (6 * 2 * 5, 1.5)
    assert summary["pass_at_k"] == {"1": pytest.approx(2 / 3), "2": pytest.approx(2 / 3)}
    for record in read():
        answer = record["line"] % 3 if record["line"] % 3 != 0 else 3
        for sample in record["samples"]:
            assert sample["rewards"] == {"answer": record["answer"], "half": 0.5}
            assert sample["score"] == record["answer"] + 0.5 == answer - 1 + 0.5
            assert sample["output_ids"][2:5] == [5, 6, 7]
            assert len(sample["output_ids"]) == 8
    failed = Result(
        command(model, "--overwrite", "--concurrency", "1", "--agent", f"{name}:fails"), capsys
    )
    assert failed.code == 1
    assert f"error: in.jsonl:1: --agent {name}:fails raised an exception" in failed.err
    assert failed.err.rstrip().endswith("ZeroDivisionError: division by zero")
    both = Result(command(model, "--agent", f"{name}:agent", "--score", f"{name}:agent"), capsys)
    assert (both.code, "exclude each other" in both.err) == (2, True)


OVER_HTTP = """
import httpx

async def agent(session, item):
    headers = {"Authorization": f"Bearer {session.api_key}"}
    async with httpx.AsyncClient(base_url=session.base_url, headers=headers) as client:
        for text in item["questions"]:
            body = {"model": "any", "prompt": text, "max_tokens": 3}
            (await client.post("/completions", json=body)).raise_for_status()
    return len(item["questions"])
"""


def test_an_agent_over_http(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    write([{"questions": ["one", "two"]}, {"questions": ["three"]}])
    agent = f"{module(OVER_HTTP)}:agent"
    summary = Result(command(model, "--agent", agent, "--gateway", "--json"), capsys).summary
    assert (summary["mean_score"], summary["tokens"]) == (1.5, 9)
    without = Result(command(model, "--agent", agent), capsys)
    assert (without.code, "got none of them" in without.err) == (2, True)
    alone = Result(command(model, "--gateway"), capsys)
    assert (alone.code, "--gateway needs --agent" in alone.err) == (2, True)


IN_FLIGHT = """
import asyncio

running = most = 0
three = asyncio.Event()

def begin():
    global running, most
    running += 1
    most = max(most, running)
    if running == 3:
        three.set()

async def score(item, text):
    global running
    await asyncio.wait_for(three.wait(), 300)
    for _ in range(10):
        # A sample that need not wait for this one would begin meanwhile.
        await asyncio.sleep(0)
    running -= 1
    return most
"""


def test_concurrency_is_the_number_of_samples_in_flight(
    model: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write(questions(6))
    name = module(IN_FLIGHT)
    generate = Session.generate

    async def counted(self: Session, **arguments: Any) -> Any:
        sys.modules[name].begin()
        return await generate(self, **arguments)

    monkeypatch.setattr(Session, "generate", counted)
    options = ["-n", "2", "--concurrency", "3", "--score", f"{name}:score", "--json"]
    # Every score waits for three samples in flight, and is the largest number that there were.
    assert Result(command(model, *options), capsys).summary["mean_score"] == 3.0


def test_options_become_settings(
    model: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write(questions(1))
    found: list[EvalSettings] = []

    def run_eval(settings: EvalSettings, console: Any) -> Summary:
        found.append(settings)
        return summarize([OUTCOMES], [1], new_tokens=6, seconds=2.0)

    monkeypatch.setattr(eval_run, "run_eval", run_eval)
    options = """
        --input in.jsonl --output out.jsonl --samples 3 --score a:b --k 2 --k 3 --max-new-tokens 7
        --temperature 0.5 --top-p 0.25 --top-k 4 --min-p 0.125 --stop x --stop y --stop-token-ids 5
        --stop-regex z+ --min-new-tokens 2 --frequency-penalty 1.5 --presence-penalty -1.5
        --repetition-penalty 1.25 --ignore-eos --regex [ab] --seed 9 --logprobs --template {"a":1}
        --concurrency 6 --replicas 2 --tp-size 1 --device cpu --engine fake --overwrite --json
        --set timeout=5 --set routing=requests
    """
    summary = Result(["eval", model, *options.split()], capsys).summary
    assert summary["tokens_per_second"] == 3.0
    assert found == [
        EvalSettings(
            model=model,
            input=Path("in.jsonl"),
            output=Path("out.jsonl"),
            samples=3,
            score="a:b",
            k=(2, 3),
            more={"timeout": 5, "routing": "requests"},
            sampling=SamplingParams(
                max_new_tokens=7,
                temperature=0.5,
                top_p=0.25,
                top_k=4,
                min_p=0.125,
                stop=["x", "y"],
                stop_token_ids=[5],
                stop_regex=["z+"],
                min_new_tokens=2,
                frequency_penalty=1.5,
                presence_penalty=-1.5,
                repetition_penalty=1.25,
                ignore_eos=True,
                regex="[ab]",
                seed=9,
            ),
            logprobs=True,
            template={"a": 1},
            concurrency=6,
            replicas=2,
            device="cpu",
            engine="fake",
            overwrite=True,
        )
    ]


def test_the_example_of_the_documentation(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    page = (DOCS / "evaluation.md").read_text()
    lines, _ = re.findall(r"```json\n(.*?)```", page, re.DOTALL)
    Path("problems.jsonl").write_text(lines)
    Path("rewards.py").write_text(example("def contains", DOCS / "evaluation.md"))
    (shell,) = re.findall(r"```console\nsglrl (.*?)```", page, re.DOTALL)
    arguments = shlex.split(shell.replace("\\\n", "").replace("Qwen/Qwen3-0.6B", model))
    summary = Result([*arguments, "--engine", "fake", "--json"], capsys).summary
    assert list(summary["pass_at_k"]) == ["1", "2", "4", "8"]
    records = read("results.jsonl")
    assert [[*record] for record in records] == [
        ["line", "id", "messages", "answer", "samples"]
    ] * 2
    for record in records:
        assert [*record["samples"][0]] == ["finish_reason", "tokens", "score", "text"]


# --- kills ----------------------------------------------------------------------------------------

EVENTS = """
import os

def score(item, text):
    os.write(int(os.environ["EVENTS"]), b"%d\\n" % item["id"])
    return item["answer"] == 1
"""


@contextmanager
def started(arguments: Sequence[str]) -> Iterator[tuple[subprocess.Popen[str], BinaryIO]]:
    """Start a command. Its score function writes the id of every sample that it scores."""
    reading, writing = os.pipe()
    with open(reading, "rb", buffering=0) as events:
        try:
            process = subprocess.Popen(
                [sys.executable, "-m", "sglrl", *arguments],
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
                pass_fds=[writing],
                env={**os.environ, "EVENTS": str(writing)},
            )
        finally:
            os.close(writing)
        with process:
            try:
                yield process, events  # type: ignore[misc]
            finally:
                if process.poll() is None:
                    process.kill()


@pytest.mark.timeout(900)
def test_kills_at_any_moment_lose_and_repeat_nothing(
    model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    chance = random.Random(0)
    items = questions(200)
    write(items)
    options = ["-n", "2", "--concurrency", "5", "--score", f"{module(EVENTS)}:score"]
    output = Path("out.jsonl")
    finished: set[int] = set()
    for _ in range(3):
        with started(command(model, *options)) as (process, events):
            scored = [int(events.readline()) for _ in range(chance.randrange(1, 90))]
            process.send_signal(signal.SIGKILL)
            assert process.wait() == -signal.SIGKILL
            scored += [int(line) for line in events]
        assert not finished & {*scored}, "a finished item was sampled again"
        whole = output.read_bytes().splitlines(keepends=True)
        if whole and not whole[-1].endswith(b"\n"):
            whole.pop()
        found = [msgspec.json.decode(line)["id"] for line in whole]
        assert len(set(found)) == len(found)
        assert finished <= {*found} <= finished | {*scored}
        finished = {*found}
        if found:
            # A kill while a line is written is rare, so write a part of a line here.
            line = chance.choice(whole)
            output.write_bytes(b"".join(whole) + line[: chance.randrange(len(line))])
    assert 0 < len(finished) < len(items)
    with started(command(model, *options)) as (process, events):
        scored = [int(line) for line in events]
        assert process.stderr is not None
        assert f"{len(finished)} of 200 items are finished\n" in process.stderr.readlines()
        assert process.wait() == 0
    assert sorted(scored) == sorted(2 * [i for i in range(len(items)) if i not in finished])
    records = read()
    assert sorted(record["line"] for record in records) == [*range(1, 201)]
    for record in records:
        assert {k: record[k] for k in ("id", "prompt", "answer")} == items[record["line"] - 1]
        assert [s["score"] for s in record["samples"]] == [float(record["answer"] == 1)] * 2
    summary = Result(command(model, *options, "--json"), capsys).summary
    assert (summary["items"], summary["samples"], summary["tokens"]) == (200, 400, 1600)


@pytest.mark.timeout(900)
def test_an_interrupt_saves_what_is_finished(model: str) -> None:
    write(questions(2000))
    options = ["--concurrency", "2", "--score", f"{module(EVENTS)}:score"]
    with started(command(model, *options)) as (process, events):
        for _ in range(20):
            events.readline()
        process.send_signal(signal.SIGINT)
        events.read()
        assert process.stderr is not None
        lines = process.stderr.read().splitlines()
        assert process.wait() == 130
    assert [line for line in lines if not line.startswith(PROGRESS)] == ["interrupted"]
    # At most the two samples in flight were scored and not saved.
    assert 18 <= len(read()) < 2000


# --- the file of results --------------------------------------------------------------------------

ITEMS = [Item(i, f"in:{i}", "prompt", {"prompt": "é" * i}) for i in (1, 2, 4)]
SAMPLES = [Sample(finish_reason="stop", tokens=3, score=0.5, text="a\nb")]
OUTCOMES = [Outcome(finish_reason="stop", tokens=3, score=0.5)]


def results(path: Path, *, overwrite: bool = False, **options: Any) -> ResultsFile:
    return ResultsFile(path, options, ITEMS, overwrite=overwrite)


def test_the_file_may_end_at_any_byte(tmp_path: Path) -> None:
    path = tmp_path / "out"
    with results(path, n=(1, 2)) as file:
        for item in ITEMS:
            file.append(item, SAMPLES)
    whole = path.read_bytes()
    lines = whole.splitlines(keepends=True)
    for size in range(len(whole) + 1):
        path.write_bytes(whole[:size])
        complete = whole[:size].count(b"\n")
        with results(path, n=(1, 2)) as file:
            assert file.finished == dict.fromkeys([1, 2, 4][:complete], OUTCOMES)
            assert path.read_bytes() == b"".join(lines[:complete])
            for item in ITEMS[complete:]:
                file.append(item, SAMPLES)
        assert path.read_bytes() == whole


def test_a_kill_before_the_first_line_begins_anew(tmp_path: Path) -> None:
    path = tmp_path / "out"
    path.touch()
    for text in (b"", b'{"n": 1', b'{"n": 1}'):
        (tmp_path / "out.run").write_bytes(text)
        with results(path, n=2) as file:
            assert file.finished == {}
        assert msgspec.json.decode((tmp_path / "out.run").read_bytes()) == {"n": 2}


def test_two_processes_do_not_write_one_file(tmp_path: Path) -> None:
    path = tmp_path / "out"
    with open(path, "ab") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        for overwrite in (False, True):
            other.write(b"x")
            other.flush()
            size = path.stat().st_size
            with pytest.raises(UsageError, match="another process is writing"):
                results(path, overwrite=overwrite).__enter__()
            assert path.stat().st_size == size


def test_a_file_that_does_not_fit_is_refused_and_kept(tmp_path: Path) -> None:
    path = tmp_path / "out"
    first, second = (
        msgspec.json.encode({"line": item.line, **item.fields, "samples": []}) + b"\n"
        for item in ITEMS[:2]
    )
    with results(path, n=2, seed=None) as file:
        file.append(ITEMS[0], SAMPLES)
    for content, words in (
        (b"notes", None),
        (b"notes\n", "out:1 is not a line of sglrl eval"),
        (first + b"[]\n", "out:2 is not a line of sglrl eval"),
        (b'{"line": 1, "prompt": "\xff"}\n', "out:1 is not a line"),
        (b'{"line": [1], "samples": []}\n', "out:1 is not a line"),
        (first + first, "out:2 has the results of line 1 a second time"),
        (first.replace("é".encode(), b"e"), "line 1 of the input, which has changed since"),
        (second.replace(b'"line":2', b'"line":3'), "line 3 of the input, which has changed since"),
    ):
        path.write_bytes(content)
        if words is None:
            (tmp_path / "out.run").rename(tmp_path / "kept")
            with pytest.raises(UsageError, match=r"but not .*out\.run"):
                results(path, n=2, seed=None).__enter__()
            (tmp_path / "kept").rename(tmp_path / "out.run")
        else:
            with pytest.raises(UsageError, match=words):
                results(path, n=2, seed=None).__enter__()
        assert path.read_bytes() == content


def test_other_options_are_refused_until_overwrite(
    model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    write(questions(3))
    assert Result(command(model, "--seed", "3"), capsys).code == 0
    before = Path("out.jsonl").read_bytes()
    refused = Result(command(model, "--seed", "3", "--top-p", "0.5", "-n", "2"), capsys)
    assert refused.code == 2
    assert "samples was 1 and is 2; top_p was 1.0 and is 0.5" in refused.err
    assert Path("out.jsonl").read_bytes() == before
    # These options do not change the results.
    assert Result(command(model, "--seed", "3", "--concurrency", "2"), capsys).code == 0
    # A finished line has changed.
    write([{"prompt": "other"}, *questions(3)[1:]])
    refused = Result(command(model, "--seed", "3"), capsys)
    assert refused.code == 2
    assert "line 1 of the input, which has changed since" in refused.err
    assert Path("out.jsonl").read_bytes() == before
    assert Result(command(model, "-n", "2", "--overwrite"), capsys).code == 0
    assert [len(record["samples"]) for record in read()] == [2, 2, 2]


# --- errors ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{", "not a JSON object"),
        ("[1]", "not a JSON object"),
        ('{"prompt": NaN}', "not a JSON object"),
        ('{"id": 1}', "exactly one of prompt, messages, input_ids; got none of them"),
        ('{"prompt": "a", "input_ids": [1]}', "got prompt and input_ids"),
        ('{"prompt": ""}', "prompt must be text that is not empty"),
        ('{"prompt": ["a"]}', "prompt must be text"),
        ('{"messages": []}', "messages must be a list that is not empty"),
        ('{"messages": [{"content": "a"}]}', "messages[0] has no 'role'"),
        ('{"messages": [[{"role": "user", "content": "a"}]]}', "messages[0] is list"),
        ('{"input_ids": "ab"}', "input_ids must be a list"),
        ('{"input_ids": [1.5]}', "input_ids must be integers"),
        ('{"input_ids": [-1]}', "token id -1"),
        ('{"input_ids": []}', "the prompt is empty"),
        ('{"prompt": "a", "samples": []}', "a field 'samples' of its own"),
        ('{"prompt": "a", "line": 1}', "a field 'line' of its own"),
    ],
)
def test_a_wrong_line_is_named_before_anything_starts(line: str, words: str) -> None:
    path = Path("in.jsonl")
    path.write_text(f'{{"prompt": "right"}}\n\n{line}\n')
    with pytest.raises(UsageError) as caught:
        read_items(path)
    assert str(caught.value).startswith("in.jsonl:3: ")
    assert words in str(caught.value)


def test_bytes_that_are_not_text_are_named_by_line() -> None:
    Path("in.jsonl").write_bytes(b'{"prompt": "\xff"}\n')
    with pytest.raises(UsageError, match=r"^in.jsonl:1: the line is not a JSON object"):
        read_items(Path("in.jsonl"))
    Path("in.jsonl").write_bytes(b"\n \n")
    with pytest.raises(UsageError, match="has no items"):
        read_items(Path("in.jsonl"))


def test_a_rejected_prompt_is_named_and_may_be_corrected(
    model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    items: list[Record] = [{"prompt": "one"}, {"input_ids": [1] * 40_000}, {"prompt": "three"}]
    write(items)
    refused = Result(command(model, "--concurrency", "1"), capsys)
    assert refused.code == 2
    assert "error: in.jsonl:2: the context is full: the prompt has 40000 tokens" in refused.err
    assert [record["line"] for record in read()] == [1]
    write([items[0], {"prompt": "two"}, items[2]])
    assert Result(command(model, "--concurrency", "1"), capsys).code == 0
    assert [record["line"] for record in read()] == [1, 2, 3]


WRONG = """
def raises(item, text):
    return item["answer"] if item["id"] < 3 else {}["missing"]

def none(item, text):
    pass

async def cancelled(item, text):
    import asyncio
    raise asyncio.CancelledError

number = 3
"""


def test_a_score_that_raises_ends_the_run_with_its_line(
    model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    write(questions(6))
    name = module(WRONG)
    options = ["--concurrency", "1", "--score"]
    failed = Result(command(model, *options, f"{name}:raises"), capsys)
    assert failed.code == 1
    assert f"error: in.jsonl:4: --score {name}:raises raised an exception" in failed.err
    assert f'{name}.py", line 3, in raises' in failed.err
    assert failed.err.rstrip().endswith("KeyError: 'missing'")
    assert [record["line"] for record in read()] == [1, 2, 3]
    # A corrected function continues.
    Path(f"{name}.py").write_text(WRONG.replace('{}["missing"]', "1"))
    del sys.modules[name]
    os.utime(f"{name}.py", (0, 0))
    assert Result(command(model, *options, f"{name}:raises"), capsys).code == 0
    assert [record["line"] for record in read()] == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize(
    ("function", "words"),
    [
        ("none", "must return a finite number or a bool, got None"),
        ("cancelled", "was cancelled by something that it awaited"),
    ],
)
def test_a_score_without_a_number(
    model: str, function: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    write(questions(2))
    failed = Result(
        command(model, "--concurrency", "1", "--score", f"{module(WRONG)}:{function}"), capsys
    )
    assert failed.code == 1
    assert "in.jsonl:1" in failed.err
    assert words in failed.err
    assert read() == []


def test_wrong_options_are_named(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    write(questions(2))
    wrong, broken = module(WRONG), module("import sglrl\n1 / 0\n")
    for options, words in (
        (["--score", "rewards"], "--score must be module:function, got 'rewards'"),
        (["--score", "no_such_module:f"], "ModuleNotFoundError: No module named 'no_such_module'"),
        (["--score", f"{broken}:f"], "line 2, in <module>"),
        (["--score", f"{wrong}:f"], "is not a function"),
        (["--score", f"{wrong}:number"], "is not a function"),
        (["--score", f"{module('def f(text): return 1')}:f"], "too many positional arguments"),
        (["--k", "1"], "--k needs --score"),
        (["--score", f"{wrong}:none", "-n", "2", "--k", "3"], "--k must be in 1..2"),
        (["--template", "{"], "--template must be a JSON object"),
        (["--template", "[1]"], "--template must be a JSON object"),
        (["--template", '{"x": 1}'], "in.jsonl:1: --template is for messages"),
        (["--min-p", "2"], "min_p must be in"),
        (["--regex", "a", "--json-schema", "{}"], "only one of json_schema and regex"),
        (["--output", "in.jsonl", "--overwrite"], "is the input"),
        (["--output", "no/such/folder/x"], "there is no such folder"),
        (["--input", "missing"], "missing"),
    ):
        result = Result(command(model, *options), capsys)
        assert result.code == 2, options
        assert words in " ".join(result.err.split()), options
    assert not Path("out.jsonl").exists()
    assert len(read("in.jsonl")) == 2


@pytest.mark.parametrize("name", ["prompt", "messages", "input_ids"])
def test_generate_sends_users_of_jsonl_to_eval(
    model: str, name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("lines").write_text(f'{{"this": "is text"}}\n{{"{name}": "a"}}\n')
    with open("lines") as stdin:
        monkeypatch.setattr(sys, "stdin", stdin)
        result = Result(["generate", model, "--engine", "fake"], capsys)
    assert result.code == 2
    assert f"line 2 of standard input is a JSON object with '{name}'" in result.err
    assert "sglrl eval MODEL --input FILE" in result.err


# --- the real engine ------------------------------------------------------------------------------


@pytest.mark.timeout(900)
def test_greedy_texts_are_those_of_transformers(
    model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    reference = AutoModelForCausalLM.from_pretrained(model).eval()
    tokenizer = AutoTokenizer.from_pretrained(model)
    messages = [{"role": "user", "content": "What is the sum of two numbers?"}]
    items: list[Record] = [
        {"prompt": "zero one two three", "id": 7},
        {"messages": messages},
        {"input_ids": [5, 6, 7, 8]},
    ]
    write(items)
    rendered = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    prompts = [tokenizer(items[0]["prompt"])["input_ids"]]
    prompts += [tokenizer(rendered, add_special_tokens=False)["input_ids"], items[2]["input_ids"]]
    wanted = []
    for ids in prompts:
        with torch.inference_mode():
            made = reference.generate(
                torch.tensor([ids]), max_new_tokens=12, do_sample=False, pad_token_id=0
            )
        wanted.append(tokenizer.decode(made[0, len(ids) :], skip_special_tokens=True))
    options = ["--max-new-tokens", "12", "--temperature", "0", "-n", "2", "--device", "cpu"]
    files = ["--input", "in.jsonl", "--output", "out.jsonl"]
    summary = Result(["eval", model, *files, *options, "--json"], capsys).summary
    assert summary["samples"] == 6
    records = sorted(read(), key=lambda record: record["line"])
    assert [[s["text"] for s in record["samples"]] for record in records] == [
        [text, text] for text in wanted
    ]


@pytest.mark.timeout(900)
def test_a_seed_repeats_all_samples_and_they_differ(
    model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    # Both lines have the same prompt and, without seeds of their own, would have the same samples.
    write([{"prompt": "zero one two"}] * 2)
    made = []
    for concurrency in ("1", "4"):
        options = ["--seed", "5", "-n", "2", "--concurrency", concurrency, "--overwrite"]
        files = ["--input", "in.jsonl", "--output", "out.jsonl", "--max-new-tokens", "16"]
        assert Result(["eval", model, *files, *options, "--device", "cpu"], capsys).code == 0
        records = sorted(read(), key=lambda record: record["line"])
        made.append([sample["text"] for record in records for sample in record["samples"]])
    assert made[0] == made[1]
    assert len(set(made[0])) == 4
