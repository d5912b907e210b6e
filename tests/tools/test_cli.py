"""``sglrl`` without SGLang: help, doctor, generate with the fake engine, one-line errors."""

from __future__ import annotations

import functools
import io
import socket
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

import sglrl
from sglrl.__main__ import main
from sglrl.launching.tiny_model import make_model
from sglrl.tools.options import launch_arguments


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Make a model folder with a tokenizer.

    With the name ``tiny`` every command would make it again, with torch.
    """
    return str(make_model(tmp_path_factory.mktemp("models") / "tiny"))


COMMANDS = ("demo", "check", "generate", "eval", "node", "rollouts", "serve", "doctor", "keys")


def run(*arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "sglrl", *arguments],
        input=stdin,
        capture_output=True,
        text=True,
        check=False,
    )


def run_here(*arguments: str, capsys: pytest.CaptureFixture[str], code: int = 0) -> str:
    """Run a command in this process, which already has the imports.

    Args:
        code: the exit code that the command must have.

    Returns:
        What the command wrote to standard output, or to standard error if it must fail.
    """
    with pytest.raises(SystemExit) as exit_:
        main(arguments)
    captured = capsys.readouterr()
    assert exit_.value.code == code, captured.err
    return captured.err if code else captured.out


@pytest.mark.parametrize("command", COMMANDS)
def test_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert f"sglrl {command}" in run_here(command, "--help", capsys=capsys)


def test_help_lists_the_commands() -> None:
    process = run("--help")
    assert process.returncode == 0
    for command in COMMANDS:
        assert command in process.stdout


def test_the_short_option_of_help(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in ((), ("doctor",)):
        short = run_here(*arguments, "-h", capsys=capsys)
        assert short == run_here(*arguments, "--help", capsys=capsys)


def test_the_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_here("--version", capsys=capsys) == f"sglrl {sglrl.__version__}\n"


@pytest.mark.parametrize(
    ("module", "remedy"),
    [
        ("sglrl.tools.nonsense", "this installation of sglrl is incomplete"),
        ("sglrl_workers.nonsense", "this installation of sglrl is incomplete"),
        ("torch.nonsense", "[sglang]"),
        ("uvicorn", "[gateway]"),
        ("pyarrow.parquet", "[parquet]"),
        ("nonsense", ""),
    ],
)
def test_the_remedy_for_a_missing_module(
    module: str, remedy: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def examine(engine: str) -> None:
        raise ModuleNotFoundError(f"No module named {module!r}", name=module)

    monkeypatch.setattr("sglrl.tools.doctor.examine", examine)
    message = run_here("doctor", capsys=capsys, code=1)
    assert message.startswith(f"error: No module named {module!r}")
    assert remedy in message
    assert ("pip install" in message) == ("[" in remedy)


def test_the_script_is_installed() -> None:
    script = Path(sys.executable).with_name("sglrl")
    process = subprocess.run([script, "--help"], capture_output=True, text=True, check=False)
    assert process.returncode == 0
    assert "doctor" in process.stdout


def test_doctor_makes_a_call() -> None:
    process = run("doctor", "--json")
    assert process.returncode == 0, process.stderr
    findings = {f["name"]: f for f in msgspec.json.decode(process.stdout)}
    assert all(f["ok"] for f in findings.values())
    assert "answer in" in findings["one call (fake)"]["detail"]
    assert "--engine sglang" in findings["one call (fake)"]["detail"]
    table = run("doctor")
    assert table.returncode == 0
    assert "one call (fake)" in table.stdout


def test_doctor_lists_the_arguments_of_sglang() -> None:
    process = run("doctor", "--arguments", "--json")
    assert process.returncode == 0, process.stderr
    rows = {row["field"]: row for row in msgspec.json.decode(process.stdout)}
    assert len(rows) > 400
    assert rows["context_length"] == {
        "field": "context_length",
        "type": "int or None",
        "default": "None",
        "state": "tested",
        "note": "tests/launching/test_accepted_arguments.py",
    }
    lines = run("doctor", "--arguments").stdout.splitlines()
    assert [line.split()[0] for line in lines] == list(rows)
    assert all(line.endswith(row["note"]) for line, row in zip(lines, rows.values(), strict=True))


def test_doctor_finds_what_does_not_work(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fails = functools.partial(sglrl.launch, fail_start="no disk")
    monkeypatch.setattr("sglrl.tools.doctor.launch", fails)
    with pytest.raises(SystemExit) as exit_:
        main(["doctor", "--json"])
    assert exit_.value.code == 1
    assert "no disk" in msgspec.json.decode(capsys.readouterr().out)[-1]["detail"]


def test_generate_writes_a_line_per_sample(
    model: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("hello world\nanother one\n"))
    out = run_here(
        "generate", model, "--engine", "fake", "--json", "--logprobs", "-n", "2",
        "--max-new-tokens", "3", capsys=capsys,
    )  # fmt: skip
    lines = [msgspec.json.decode(line) for line in out.splitlines()]
    assert [line["prompt"] for line in lines] == ["hello world"] * 2 + ["another one"] * 2
    for line in lines:
        assert len(line["output_ids"]) == 3
        assert line["logprobs"] == pytest.approx([-1 / 1024, -2 / 1024, -3 / 1024])
        assert line["finish_reason"] == "length"


@pytest.mark.parametrize("closed", [0, 1, 2])
def test_a_command_without_a_standard_file(closed: int) -> None:
    """A daemon may have closed its standard files."""
    sign = "<" if closed == 0 else ">"
    process = subprocess.run(
        ["sh", "-c", f"exec {sys.executable} -m sglrl doctor {closed}{sign}&-"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert process.returncode == 0, process.stderr
    assert ("one call (fake)" in process.stdout) == (closed != 1)


def test_generate_where_the_terminal_has_no_letter_for_it(
    monkeypatch: pytest.MonkeyPatch, model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PYTHONIOENCODING", "ascii")
    command = ("generate", model, "hé", "--engine", "fake", "--max-new-tokens", "3")
    process = run(*command)
    assert process.stdout == "h\\xe9\n", process.stderr
    assert msgspec.json.decode(run_here(*command, "--json", capsys=capsys))["text"] == "hé"


def test_folders_whose_names_are_too_long_for_sockets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / ("long" * 20)
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    assert run("doctor").returncode == 0
    assert not [*folder.glob("sglrl-*")]


def test_an_empty_line_is_told_by_its_number() -> None:
    process = run("generate", "tiny", "--engine", "fake", stdin="one\n\nthree\n")
    assert process.returncode == 2
    assert "line 2 of standard input is empty" in process.stderr


def test_generate_prints_text() -> None:
    process = run("generate", "tiny", "hello world", "--engine", "fake", "--max-new-tokens", "64")
    assert process.returncode == 0, process.stderr
    # The fake engine repeats the prompt.
    assert process.stdout.startswith("hello worldhello world")
    first, *others = process.stderr.splitlines()
    assert first.startswith("sglrl: starting 1 worker of tiny (fake engine) ... ready in ")
    # On a slow machine.
    assert others in ([], ["sglrl: loading the tokenizer ..."])


def test_values_of_set_are_json_or_text() -> None:
    given = ["a=0.5", "b=true", 'c=["x", 1]', "d=bfloat16", "e=", "f=x=y", "g=null", "h=False"]
    assert launch_arguments(given) == {
        "a": 0.5,
        "b": True,
        "c": ["x", 1],
        "d": "bfloat16",
        "e": "",
        "f": "x=y",
        "g": None,
        "h": False,
    }


def test_set_is_an_argument_of_launch(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    logs = tmp_path / "logs"
    run_here(
        "generate", "tiny", "hi", "--engine", "fake", "--set", f"log_dir={logs}", capsys=capsys
    )
    assert [*logs.iterdir()]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["generate", "/no/such/model", "hi"], "no model at '/no/such/model'"),
        (["generate", "tiny", "--engine", "fake"], "there is no prompt"),
        # These are found before SGLang starts.
        (["generate", "/no", "hi", "--top-p", "3"], "top_p must be in"),
        (["generate", "/no", "hi", "--logprobs"], "--logprobs needs --json"),
        (["serve", "/no", "--engine", "fake"], "'/no' is neither a folder nor 'owner/name'"),
        (["serve", "no/such model", "--engine", "fake"], "no/such model has no usable tokenizer"),
        (["serve", "tiny", "--set", "dtype"], "--set is NAME=VALUE"),
        (["serve", "tiny", "--set", "tp_size=2"], "tp_size: give it as the option --tp-size"),
        (["serve", "tiny", "--set", "max_queue=many"], "max_queue must be"),
        (["generate", "tiny", "--set", "top=1", "--set", "top=2", "hi"], "top is given twice"),
        (["generate", "tiny", "hi", "--set", "mem_fraction_statik=0.8"], "mem_fraction_static"),
        (["check", "--model", "/no/such/model"], "no model at '/no/such/model'"),
        (["check", "--device", "tpu"], "device must be"),
        (["demo", "--json", "/no/such/folder/x.json"], "there is no such folder"),
        (["check", "--json", "/no/such/folder/x.json"], "there is no such folder"),
        (["check", "--json", "/"], "is a folder"),
        (["demo", "--plot", "/"], "is a folder"),
        (["check", "--rollouts", "0"], "--rollouts"),
        (["keys", "~nobody-of-this-name/x"], "home directory"),
        (["demo", "--task", "sing"], "unknown task 'sing'; known: repeat, lookup"),
        (["demo", "--steps", "0"], "--steps"),
        (["keys", "/proc/none"], "/proc/none cannot be made"),
        (["keys", "/no/such/folder", "--add", "me"], "there is no folder /no/such/folder"),
        (["keys"], "DIR"),
        (["node", "10.0.0.1:7000"], "the address of a program is tcp://HOST:PORT"),
        (["node", "tcp://10.0.0.1:99999", "--insecure"], "has a port from 1 to 65535"),
        (["node", "tcp://0.0.0.0:7000", "--insecure"], "stands for all interfaces"),
        (["node", "tcp://10.0.0.1:7000"], "need keys"),
        (["node", "tcp://10.0.0.1:7000", "--keys", "/no/such"], "there is no folder /no/such"),
        (
            ["node", "tcp://10.0.0.1:7000", "--keys", "/no/a.secret"],
            "there is no file /no/a.secret",
        ),
        (["node", "tcp://127.0.0.1:7000", "--gpus", "0-"], "--gpus is a list such as 0,1 or 0-7"),
        (["node", "tcp://127.0.0.1:7000", "--gpus", "900"], "--gpus 900 names others than the"),
        (["doctor", "--engine", "x"], "unknown engine 'x'; known: sglang, fake"),
        (["generate", "tiny", "--temperatur", "1"], "--temperatur"),
    ],
)
def test_wrong_usage_is_one_message_and_exit_code_2(
    arguments: list[str],
    words: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Other tests run commands with wrong usage in their own processes."""
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    message = run_here(*arguments, capsys=capsys, code=2)
    assert words in message
    assert "Traceback" not in message


def test_serve_finds_a_port_in_use_before_the_engines_start(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        message = run_here("serve", "/no/model", "--port", str(port), capsys=capsys, code=2)
    assert f"cannot listen at 127.0.0.1:{port}: Address already in use" in message


def test_keys_says_what_it_made_and_what_goes_where(tmp_path: Path) -> None:
    folder = tmp_path / "keys"
    process = run("keys", str(folder))
    assert process.returncode == 0, process.stderr
    names = ["driver.public", "driver.secret", "trainer.public", "trainer.secret"]
    assert sorted(path.name for path in folder.iterdir()) == names
    assert folder.stat().st_mode & 0o777 == 0o700
    for name in names:
        wanted = 0o600 if name.endswith(".secret") else 0o644
        assert (folder / name).stat().st_mode & 0o777 == wanted
        assert name in process.stdout
    assert f'launch(..., address="tcp://0.0.0.0:*", keys={str(folder)!r})' in process.stdout
    assert "Copy trainer.secret and driver.public into a folder" in process.stdout
    for name in names:
        assert (folder / name).read_text().strip() not in process.stdout


def test_keys_replaces_none_unless_it_is_told_to(tmp_path: Path) -> None:
    folder = tmp_path / "keys"
    assert run("keys", str(folder)).returncode == 0

    def contents() -> dict[str, str]:
        return {path.name: path.read_text() for path in folder.iterdir()}

    before = contents()
    process = run("keys", str(folder))
    assert process.returncode == 2
    assert "driver.secret, driver.public, trainer.secret, trainer.public already" in process.stderr
    assert "--force" in process.stderr
    assert contents() == before

    process = run("keys", str(folder), "--add", "node-2")
    assert process.returncode == 0, process.stderr
    assert "Copy node-2.secret and driver.public" in process.stdout
    added = contents()
    assert before.items() <= added.items()
    assert set(added) - set(before) == {"node-2.secret", "node-2.public"}
    assert run("keys", str(folder), "--add", "node-2").returncode == 2

    assert run("keys", str(folder), "--force").returncode == 0
    replaced = contents()
    assert {n for n in added if replaced[n] == added[n]} == {"node-2.secret", "node-2.public"}
