"""Names and values that ``launch`` accepts or rejects before any process starts."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch

import sglrl
from sglrl.config import shows_progress
from sglrl.launching.tiny_model import make_model

NAMES = {
    "bf16": "bfloat16",
    "fp16": "float16",
    "half": "float16",
    "fp32": "float32",
    "float": "float32",
    torch.bfloat16: "bfloat16",
    torch.float32: "float32",
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("models") / "qwen3")


def engine_arguments(client: sglrl.Client) -> dict[str, Any]:
    """Return SGLang's arguments in the spec of the first worker."""
    pool: Any = client.pool
    arguments: dict[str, Any] = pool._first[0].bodies[0].args
    return arguments


@pytest.mark.parametrize("name", NAMES, ids=str)
def test_names_of_dtypes(model: Path, name: Any) -> None:
    client = sglrl.launch(model, device="cpu", dtype=name)
    assert engine_arguments(client)["dtype"] == NAMES[name]


def test_the_models_own_dtype(model: Path) -> None:
    assert engine_arguments(sglrl.launch(model, device="cpu"))["dtype"] == "float32"


@pytest.mark.parametrize("dtype", ["fp8", torch.int32, 16])
def test_a_dtype_that_the_engine_has_not(model: Path, dtype: Any) -> None:
    with pytest.raises(sglrl.UsageError, match=r"dtype must be 'auto', .*, got"):
        sglrl.launch(model, device="cpu", dtype=dtype)


@pytest.mark.parametrize(
    ("name", "ours"),
    [
        ("gpu_memory_utilization", "mem_fraction_static="),
        ("max_model_len", "context_length="),
        ("torch_dtype", "dtype="),
        ("attn_implementation", "attention_backend="),
        ("max_seq_len", "context_length="),
        ("max_num_seqs", "max_running_requests="),
        ("enforce_eager", "disable_cuda_graph="),
        ("enable_prefix_caching", "disable_radix_cache="),
        ("max_num_batched_tokens", "chunked_prefill_size="),
        ("num_devices", "tp_size="),
        ("data_parallel_size", "replicas="),
        ("seed", "random_seed="),
        ("max_tokens", "max_new_tokens= of generate"),
    ],
)
def test_an_error_names_our_argument(model: Path, name: str, ours: str) -> None:
    with pytest.raises(sglrl.UsageError) as caught:
        sglrl.launch(model, device="cpu", **{name: 1})
    assert str(caught.value).startswith(f"{name!r} is not an argument of launch; use {ours}")


@pytest.mark.parametrize("engine", ["sglang", "fake"])
@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("replica", "replicas"),
        ("replics", "replicas"),
        ("devise", "device"),
        ("dytpe", "dtype"),
        ("max_que", "max_queue"),
        ("context_lenght", "context_length"),
    ],
)
def test_a_misspelt_argument(model: Path, engine: str, name: str, meant: str) -> None:
    with pytest.raises(sglrl.UsageError, match=f"'{name}' is .*; did you mean '{meant}'"):
        sglrl.launch(model, engine=engine, **{name: 1})


@pytest.mark.parametrize(
    ("answers", "says"),
    [
        (["abc"], r"answers\[0\] must be a list of token ids .*, got 'abc'"),
        ([[1], [512]], r"answers\[1\] must be a list of token ids .*, got \[512\]"),
        ([1], r"answers\[0\] must be"),
        ([[]], r"answers\[0\] must be"),
        ("abc", "answers must be lists of token ids, got 'abc'"),
    ],
)
def test_answers_of_the_fake_engine(answers: Any, says: str) -> None:
    with pytest.raises(sglrl.UsageError, match=says):
        sglrl.launch("tiny", engine="fake", vocab_size=512, answers=answers)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ("a:B", r"must be a list of names, got 'a:B'"),
        ({"a:B"}, r"must be a list of names, got"),
        (["a:B", "C"], r"as 'module:Class', got 'C'"),
        (["__main__:C"], r"as 'module:Class', got '__main__:C'"),
        ([int], r"as 'module:Class', got <class 'int'>"),
    ],
)
def test_names_of_logit_processors(model: Path, given: Any, says: str) -> None:
    with pytest.raises(sglrl.UsageError, match=says):
        sglrl.launch(model, device="cpu", logit_processors=given)


async def test_the_fake_engine_has_no_logit_processors(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(sglrl.UsageError, match=r"engine='fake' has no logits"):
        sglrl.launch("fake", engine="fake", logit_processors=["a:B"])
    async with sglrl.launch("fake", engine="fake") as client:
        monkeypatch.setattr(
            "sglrl.inference.sampling_cache.check_declared", lambda name, declared: None
        )
        with pytest.raises(sglrl.InvalidRequest, match="no logit processor 'a:B'"):
            await client.generate(input_ids=[1], max_new_tokens=1, logit_processor="a:B")


def test_tensor_parallel_size_is_tp_size(model: Path) -> None:
    with pytest.raises(sglrl.UsageError, match="ep_size=3 is more than tp_size=2"):
        sglrl.launch(model, device="cpu", tensor_parallel_size=2, ep_size=3)
    with pytest.raises(sglrl.UsageError, match="are the same: give one of them"):
        sglrl.launch(model, device="cpu", tensor_parallel_size=2, tp_size=2)
    with pytest.raises(sglrl.UsageError, match="tp_size must be"):
        sglrl.launch(model, device="cpu", tensor_parallel_size=0)


async def test_the_tiny_model_has_a_tokenizer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SGLRL_CACHE", str(tmp_path))
    async with sglrl.launch("tiny", engine="fake", vocab_size=512) as client:
        assert (await client.generate("hello", max_new_tokens=3)).text
    (folder,) = os.listdir(tmp_path)
    assert folder.startswith("tiny-")


@pytest.mark.parametrize("value", [[1], 1.5, True, b"/tmp"], ids=str)
@pytest.mark.parametrize("name", ["address", "env", "log_dir"])
def test_a_value_of_another_type(name: str, value: Any) -> None:
    with pytest.raises(sglrl.UsageError, match=rf"^{name} m.*, got {re.escape(repr(value))}$"):
        sglrl.launch("tiny", engine="fake", **{name: value})


@pytest.mark.parametrize("value", ["yes", 1, [True]], ids=str)
@pytest.mark.parametrize("name", ["deterministic", "insecure", "progress"])
def test_a_flag_of_another_type(name: str, value: Any) -> None:
    with pytest.raises(sglrl.UsageError, match=f"^{name} must be True or False, got "):
        sglrl.launch("tiny", engine="fake", **{name: value})


def test_a_client_checks_insecure() -> None:
    with pytest.raises(sglrl.UsageError, match="insecure must be True or False"):
        sglrl.connect("tcp://127.0.0.1:1#token", insecure="yes")  # type: ignore[arg-type]


@pytest.mark.parametrize("device", ["gpu", "cuda:", 1.5, ["cpu"]], ids=str)
def test_a_weight_device_that_does_not_exist(device: Any) -> None:
    with pytest.raises(sglrl.UsageError, match="weight_device must be "):
        sglrl.launch("tiny", engine="fake", weight_device=device)


@pytest.mark.parametrize("value", ["many", "1k", 2.5, [7]], ids=str)
@pytest.mark.parametrize("name", ["max_total_tokens", "max_prefill_tokens", "context_length"])
def test_a_number_that_the_command_line_parses(model: Path, name: str, value: Any) -> None:
    with pytest.raises(sglrl.UsageError, match=f"^{name} must be "):
        sglrl.launch(model, device="cpu", **{name: value})


@pytest.mark.parametrize("engine", ["fake", "sglang"])
def test_the_tiny_model_without_torch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, engine: str
) -> None:
    monkeypatch.setenv("SGLRL_CACHE", str(tmp_path))
    # None makes an import fail.
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(sglrl.UsageError, match=r"made with torch and transformers.*\[sglang\]"):
        sglrl.launch("tiny", engine=engine)


BEGIN = """
import asyncio, sys, time
import sglrl

class Echo(sglrl.Actor):
    @sglrl.endpoint
    async def say(self, text: str) -> str:
        return text
"""


def run(program: str, **settings: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", BEGIN + textwrap.dedent(program)],
        env={**os.environ, **settings},
        capture_output=True,
        text=True,
        timeout=300,
    )


@pytest.mark.parametrize("close", [True, False])
def test_a_client_without_a_block(close: bool) -> None:
    """It stays open until it is closed or the program exits, without a warning of ours."""
    done = run(f"""
        import warnings
        warnings.filterwarnings("always", ".* was never closed")

        async def main():
            global client, actors
            client = await sglrl.launch("fake", engine="fake", progress=False)
            actors = await sglrl.spawn(Echo)
            other = await sglrl.connect(client.address)
            print(await actors.say("hi"), (await other.generate(input_ids=[1, 2])).output_ids[:2])
            await other.close()
            if {close}:
                await client.close()
                await actors.close()
        asyncio.run(main())
        print(client)
    """)
    assert done.stderr == ""
    first, second = done.stdout.splitlines()
    assert first == "hi [1 2]"
    assert second.startswith("<Client of fake, ")


def test_a_cell_that_runs_twice_is_told_of_the_first_client() -> None:
    done = run("""
        async def main():
            for i in range(2):
                client = await sglrl.launch("fake", engine="fake", progress=False)
            await client.close()
            other = await sglrl.launch("another", engine="fake", progress=False)
        asyncio.run(main())
    """)
    (line,) = done.stderr.splitlines()
    assert line.startswith("the Client of fake was started before and is still open: ")


def test_the_program_ends_while_the_tokenizer_is_loaded(tmp_path: Path) -> None:
    """An executor's thread would delay the end until the tokenizer is there."""
    done = run(
        f"""
        from sglrl.inference import tokens
        begun = asyncio.Event()

        def load(box):
            loop.call_soon_threadsafe(begun.set)
            time.sleep(3600)

        async def main():
            global loop
            loop = asyncio.get_running_loop()
            tokens.TokenizerBox._load = load
            async with sglrl.launch({str(tmp_path)!r}, engine="fake") as client:
                calls = [asyncio.ensure_future(client.generate("hi")) for _ in range(50)]
                await begun.wait()
                calls[0].cancel()
                print(len(asyncio.all_tasks()) > 49)
        sglrl.run(main())
    """
    )
    assert (done.returncode, done.stdout) == (0, "True\n"), done.stderr


def test_run_ends_with_one_line() -> None:
    program = subprocess.Popen(
        [
            sys.executable,
            "-c",
            BEGIN
            + textwrap.dedent("""
                async def main():
                    options = dict(engine="fake", step_seconds=0.1, progress=False)
                    async with sglrl.launch("fake", **options) as client:
                        print(client.workers[0].pid, flush=True)
                        await client.generate(input_ids=[1], max_new_tokens=10_000)
                sglrl.run(main())
            """),
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    with program:
        assert program.stdout is not None
        assert program.stderr is not None
        pid = int(program.stdout.readline())
        program.send_signal(2)
        assert program.stderr.read() == "interrupted\n"
        assert program.wait(30) == 130
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_run_returns_the_result() -> None:
    async def main() -> int:
        return 3

    assert sglrl.run(main()) == 3


@pytest.mark.parametrize(
    ("options", "shown"), [("progress=True", True), ("progress=False", False), ("", True)]
)
def test_the_start_is_one_line(options: str, shown: bool) -> None:
    done = run(f"""
        async def main():
            async with sglrl.launch("fake", engine="fake", replicas=2, {options}) as client:
                print(client.workers[1].state)
        asyncio.run(main())
    """)
    assert done.stdout == "ready\n"
    if not shown:
        assert done.stderr == ""
        return
    (line,) = done.stderr.splitlines()
    assert line.startswith("sglrl: starting 2 workers of fake ... ready in ")


def test_the_start_names_a_folder_with_a_slash(tmp_path: Path) -> None:
    done = run(f"""
        async def main():
            folder = {str(tmp_path / "qwen")!r} + "/"
            async with sglrl.launch(folder, engine="fake", progress=True):
                pass
        asyncio.run(main())
    """)
    assert done.stderr.startswith("sglrl: starting 1 worker of qwen (fake engine) ... ready in ")


def test_a_start_that_fails_ends_the_line() -> None:
    done = run("""
        async def main():
            await sglrl.launch("fake", engine="fake", fail_start="no room", progress=True)
        asyncio.run(main())
    """)
    assert done.stderr.startswith("sglrl: starting 1 worker of fake ... failed\n")
    assert "no room" in done.stderr


def test_the_environment_hides_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SGLRL_PROGRESS", raising=False)
    assert shows_progress(None)
    monkeypatch.setenv("SGLRL_PROGRESS", "0")
    assert not shows_progress(None)
    assert shows_progress(True)


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ({"deterministic": True}, "need a GPU"),
        ({"enable_deterministic_inference": True}, "need a GPU"),
        ({"rl_on_policy_target": "fsdp"}, "need a GPU"),
        ({"deterministic": True, "attention_backend": "triton"}, "needs attention_backend='fa3'"),
        (
            {"deterministic": True, "decode_attention_backend": "triton"},
            "decode_attention_backend='triton' exclude each other",
        ),
        ({"deterministic": True, "enable_deterministic_inference": False}, "contradict"),
        ({"deterministic": True, "attention_backend": None}, "need a GPU"),
    ],
)
def test_deterministic_inference_that_cannot_work(
    model: Path, arguments: dict[str, Any], why: str
) -> None:
    with pytest.raises(sglrl.UsageError, match=why):
        sglrl.launch(model, device="cpu", **arguments)
