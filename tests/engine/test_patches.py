"""Every modification of SGLang is declared, fits the installed SGLang, and can be refused."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import sglrl
from sglrl.config import ACCELERATIONS as NAMES
from sglrl.errors import EngineError, UsageError
from sglrl_workers.engine.sglang.known_sources import KNOWN
from sglrl_workers.engine.sglang.patch import Setup, check_order, install
from sglrl_workers.engine.sglang.patch_list import ACCELERATIONS, PATCHES
from sglrl_workers.engine.sglang.source import digest, sglang_folder

from .programs import run_program

BY_NAME = {patch.name: patch for patch in PATCHES}
ARGUMENTS = SimpleNamespace(
    enable_deterministic_inference=False,
    rl_on_policy_target=None,
    tp_size=1,
    enable_lora=False,
    enable_return_routed_experts=False,
    enable_custom_logit_processor=False,
)


def setup(device: str = "cuda", **changes: Any) -> Setup:
    return replace(Setup(server_args=ARGUMENTS, device=device), **changes)


def used(setup: Setup) -> set[str]:
    return {patch.name for patch in PATCHES if not setup.excludes(patch)}


@pytest.mark.parametrize("name", BY_NAME)
def test_the_installed_source_is_known(name: str) -> None:
    assert BY_NAME[name].unknown(sglang_folder()) == ""


def test_known_sources_have_no_unused_entry() -> None:
    assert set(KNOWN) == {t for patch in PATCHES for t in (*patch.wraps, *patch.reads)}


@pytest.mark.parametrize("lora", [False, True])
def test_all_code_that_we_replace_is_declared(qwen: Path, lora: bool) -> None:
    declared = {
        target
        for patch in PATCHES
        if patch.device != "cuda"
        and patch.argument in ("", "enable_lora" if lora else "")
        and not patch.several_ranks
        for target in patch.wraps
    }
    # These are not functions: a flag, a number, a table, a module.
    values = {
        "sglang.srt.layers.rotary_embedding.base:_is_cpu",
        "sglang.srt.configs.update_config:DEFAULT_MOE_PADDING_SIZE",
        "sglang.srt.layers.attention.attention_registry:ATTENTION_BACKENDS",
        "sglang.srt.utils.common:parse_lscpu_topology",
    }
    if lora:
        # Engines that take adapters do not use short_prefill.
        values.add("sglang.srt.model_executor.model_runner:ModelRunner.forward")
    assert set(run_program("engine.patches_program", qwen, *["lora"] * lora)) == declared - values


def test_an_undeclared_second_patch_of_a_method_is_rejected() -> None:
    second = replace(BY_NAME["end_of_output"], name="second")
    with pytest.raises(ValueError, match=r"end_of_output and second both wrap .*Req\.update_fin"):
        check_order([*PATCHES, second])
    check_order([*PATCHES, replace(second, after=("end_of_output",))])


def test_names_that_launch_accepts() -> None:
    assert NAMES == ACCELERATIONS
    with pytest.raises(UsageError, match="'fast' is not an acceleration; known: cpu_attention"):
        sglrl.launch("a/model", device="cpu", accelerations=["fast"])
    with pytest.raises(UsageError, match="True, False or a list of names, got 'queries'"):
        sglrl.launch("a/model", device="cpu", accelerations="queries")
    with pytest.raises(UsageError, match="engine='fake' is not SGLang"):
        sglrl.launch("a/model", engine="fake", accelerations=False)


def test_the_environment_selects_accelerations(monkeypatch: pytest.MonkeyPatch) -> None:
    from sglrl.config import check_accelerations

    monkeypatch.setenv("SGLRL_ACCELERATIONS", "queries, short_prefill")
    assert check_accelerations(True) == ("queries", "short_prefill")
    assert check_accelerations(["decode_results"]) == ("decode_results",)
    monkeypatch.setenv("SGLRL_ACCELERATIONS", "none")
    assert check_accelerations(True) == ()
    monkeypatch.delenv("SGLRL_ACCELERATIONS")
    assert check_accelerations(True) is None


def test_selected_accelerations() -> None:
    corrections = {patch.name for patch in PATCHES if not (patch.acceleration or patch.argument)}
    corrections -= {"cpu_kernels", "cpu_ranks"}
    assert used(setup(accelerations=())) == corrections
    assert used(setup(accelerations=("queries",))) == corrections | {"queries"}
    assert "cpu_attention" not in used(setup())
    several = SimpleNamespace(**{**vars(ARGUMENTS), "tp_size": 2})
    alone, ranks = (used(setup("cpu", server_args=args)) for args in (ARGUMENTS, several))
    assert ranks - alone == {"cpu_ranks"}
    assert alone - ranks == {patch.name for patch in PATCHES if patch.single_rank}
    assert "gpu_sampling" not in used(setup("cpu"))


@pytest.mark.parametrize(
    "changes", [{"enable_deterministic_inference": True}, {"rl_on_policy_target": "fsdp"}]
)
def test_exact_results_exclude_other_kernels(changes: dict[str, Any]) -> None:
    arguments = SimpleNamespace(**{**vars(ARGUMENTS), **changes})
    for device, inexact in (
        ("cuda", {"gpu_sampling", "short_prefill", "queries"}),
        ("cpu", {"cpu_attention", "short_prefill", "queries"}),
    ):
        assert used(setup(device)) - used(setup(device, server_args=arguments)) == inexact


def changed_copy(folder: Path, *edits: tuple[str, str, str]) -> Path:
    """Make an SGLang of links to the installed one, with edited modules. Return its parent."""
    original, copy = sglang_folder(), folder / "sglang"
    for file, old, new in edits:
        path = copy
        source = original
        for part in Path(file).parts:
            if path.is_symlink():
                path.unlink()
            if not path.exists():
                path.mkdir()
                for child in source.iterdir():
                    if child.name != "__pycache__":
                        (path / child.name).symlink_to(child)
            path, source = path / part, source / part
        text = source.read_text()
        assert text.count(old) == 1
        path.unlink()
        path.write_text(text.replace(old, new))
    return folder


def test_a_method_that_is_gone_or_other(tmp_path: Path) -> None:
    file = "srt/managers/schedule_batch.py"
    gone = ("def update_finish_state(", "def update_end(")
    folder = changed_copy(tmp_path, (file, *gone)) / "sglang"
    patch = BY_NAME["end_of_output"]
    assert patch.unknown(folder).endswith("Req.update_finish_state does not exist")
    with pytest.raises(EngineError, match=r"Req\.update_finish_state does not exist"):
        install([patch], setup(), folder)
    assert digest("sglang.srt.no_module:f", folder) == ""
    doctor = subprocess.run(
        [sys.executable, "-m", "sglrl", "doctor", "--json"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])},
        stdout=subprocess.PIPE,
        text=True,
        timeout=300,
    )
    assert doctor.returncode == 1
    missing = [finding for finding in json.loads(doctor.stdout) if not finding["ok"]]
    assert [finding["name"] for finding in missing] == ["patch end_of_output"]
    assert "Req.update_finish_state does not exist" in missing[0]["detail"]


def test_source_that_is_unknown(qwen: Path, tmp_path: Path) -> None:
    """A worker does not start on it, unless told to. An acceleration stays off."""
    folder = changed_copy(
        tmp_path,
        (
            "srt/managers/schedule_batch.py",
            "    def _check_token_based_finish(self, new_accepted_tokens",
            "    # Changed.\n    @__import__('functools').wraps(print)\n"
            "    def _check_token_based_finish(self, new_accepted_tokens",
        ),
        (
            "srt/managers/scheduler_components/batch_result_processor.py",
            "    def _apply_decode_logprobs(",
            "    @__import__('functools').cache\n    def _not_used(self):\n        pass\n\n"
            "    @__import__('functools').wraps(print)\n    def _apply_decode_logprobs(",
        ),
    )
    program = subprocess.run(
        [sys.executable, "-m", f"{__package__}.unknown_source_program", str(qwen)],
        cwd=Path(__file__).parent.parent,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), *sys.path])},
        stdout=subprocess.PIPE,
        text=True,
        timeout=300,
        check=True,
    )
    found = json.loads(program.stdout.splitlines()[-1])
    assert "Req._check_token_based_finish has an unknown source (digest " in found["refused"]
    assert "the correction 'end_of_output' depends on it" in found["refused"]
    assert found["tokens"] == 4
    assert "decode_results" not in found["on"]
    assert {"cpu_attention", "shared_prefix"} <= set(found["on"])


async def test_an_acceleration_that_does_not_fit_is_off(qwen: Path) -> None:
    async with sglrl.launch(qwen, device="cpu", disable_radix_cache=True) as client:
        on = set(client.info.accelerations)
        completion = await client.generate(input_ids=[1, 2, 3], max_new_tokens=4, ignore_eos=True)
    assert len(completion.output_ids) == 4
    assert not on & {"queries", "shared_prefix"}
    assert {"cpu_attention", "decode_results", "short_prefill"} <= on
