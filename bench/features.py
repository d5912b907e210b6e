"""``python -m bench.features``: measure what LoRA, masks, sleep and starts cost on a GPU."""

from __future__ import annotations

import asyncio
import os
import signal
import statistics
import subprocess
import time
from enum import StrEnum
from functools import partial
from typing import Annotated, Any

import torch
import typer

import sglrl
from sglrl.config import visible_cuda_devices

from .cases import CASES, Case, CaseName, prompts
from .parts import Note
from .report import Json, Report

_DEFAULT = CaseName("8b")
_TARGETS = {
    # For each name in the result of a part: its title, its target, and the unit.
    "start_second_s": ("start of a second worker, with two GPUs", 12, "s"),
    "start_replacement_s": ("start of a replacement", 8, "s"),
    "lora_replace_ms": ("replace an adapter of rank 32", 30, "ms"),
    "sleep_first_kept_s": ("sleep, weights kept, first time", 1, "s"),
    "sleep_kept_s": ("sleep, weights kept", 1, "s"),
    "sleep_kept_wake_s": ("wake, weights kept", 1, "s"),
    "sleep_lost_s": ("sleep, weights lost", 0.1, "s"),
    "sleep_lost_wake_s": ("wake, weights lost", 0.3, "s"),
    "sleep_kept_left_mib": ("memory left, weights kept", 1500, "MiB"),
    "sleep_lost_left_mib": ("memory left, weights lost", 1500, "MiB"),
}


_RANK = 32
_REPEATS = 12
_MODULES = {
    "self_attn.q_proj": ("hidden", "heads"),
    "self_attn.k_proj": ("hidden", "kv"),
    "self_attn.v_proj": ("hidden", "kv"),
    "self_attn.o_proj": ("heads", "hidden"),
    "mlp.gate_proj": ("hidden", "middle"),
    "mlp.up_proj": ("hidden", "middle"),
    "mlp.down_proj": ("middle", "hidden"),
}
"""The modules of Qwen3 that LoRA changes, with the names of their input and output sizes."""


PartName = StrEnum("PartName", {n: n for n in ("lora", "masks", "sleep", "start")})  # type: ignore[misc]


def main(
    case: Annotated[CaseName, typer.Option(help="Model and load.")] = _DEFAULT,
    part: Annotated[
        list[PartName] | None, typer.Option(help="What to measure; repeatable. Everything.")
    ] = None,
    json: Json = None,
) -> None:
    """Measure features of engines that need a GPU to be measured."""
    report = Report("features", json)
    one = CASES[case.value]
    parts = {"lora": lora, "masks": masks, "sleep": sleep, "start": start}
    names = [name.value for name in part or PartName]
    plan = {name: partial(parts[name], case=one) for name in names}
    results = report.measure(plan, env=one.environment)
    figures = {name: value for result in results.values() for name, value in result.items()}
    report.table(f"features, {one.name}", ("figure", ""), list(figures.items()))
    for name, (title, asked, unit) in _TARGETS.items():
        if name.partition("_")[0] in names and one.on_gpu:
            report.target(title, asked, figures.get(name), unit, at_most=True)
    report.finish(case=one.name, figures=figures)


async def _load(client: sglrl.Client, case: Case, count: int, **values: Any) -> float:
    """Generate once for each of ``count`` prompts, and return the tokens per second."""
    begun = time.perf_counter()
    await client.generate(
        input_ids=prompts(case, 0, count), max_new_tokens=case.new, ignore_eos=True, **values
    )
    return count * case.new / (time.perf_counter() - begun)


# --- adapters -------------------------------------------------------------------------------------


def _adapter(folder: str, device: str, seed: int) -> dict[str, torch.Tensor]:
    """Return the tensors of a LoRA adapter of the model, by PEFT's names."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(folder)
    sizes = {
        "hidden": config.hidden_size,
        "heads": config.num_attention_heads * config.head_dim,
        "kv": config.num_key_value_heads * config.head_dim,
        "middle": config.intermediate_size,
    }
    draw = torch.Generator(device).manual_seed(seed)

    def tensor(*shape: int) -> torch.Tensor:
        made = torch.randn(shape, generator=draw, device=device, dtype=torch.float32)
        return (made * 0.01).to(torch.bfloat16)

    figures = {}
    for layer in range(config.num_hidden_layers):
        for module, (before, after) in _MODULES.items():
            name = f"base_model.model.model.layers.{layer}.{module}"
            figures[f"{name}.lora_A.weight"] = tensor(_RANK, sizes[before])
            figures[f"{name}.lora_B.weight"] = tensor(sizes[after], _RANK)
    return figures


async def lora(note: Note, *, case: Case) -> dict[str, Any]:
    states = [_adapter(case.folder, case.device, seed) for seed in range(2)]
    config = {"r": _RANK, "lora_alpha": _RANK, "target_modules": "all-linear"}
    arguments = {
        "enable_lora": True,
        "max_lora_rank": _RANK,
        "lora_target_modules": ["all"],
        "max_loras_per_batch": 2,
    }
    note("start")
    async with case.launch(**arguments) as client:
        begun = time.perf_counter()
        await client.load_lora("policy", states[0], config=config)
        loaded = (time.perf_counter() - begun) * 1e3
        note("warm up")
        await _load(client, case, case.in_flight, lora="policy")
        note("replace")
        load = asyncio.ensure_future(_load(client, case, case.in_flight, lora="policy"))
        await asyncio.sleep(2 if case.on_gpu else 0.1)
        reports = [
            await client.update_weights(states[i % 2], lora="policy") for i in range(_REPEATS)
        ]
        await load
        note("replace without load")
        idle = [await client.update_weights(states[i % 2], lora="policy") for i in range(_REPEATS)]
        rate = await _load(client, case, case.in_flight, lora="policy")
        base = await _load(client, case, case.in_flight)
    return {
        "lora_bytes": reports[0].bytes,
        "lora_load_ms": loaded,
        "lora_replace_ms": statistics.median(r.total_ms for r in reports),
        "lora_replace_worst_ms": max(r.total_ms for r in reports),
        "lora_replace_pause_ms": statistics.median(max(r.pause_ms) for r in reports),
        "lora_replace_idle_ms": statistics.median(r.total_ms for r in idle),
        "lora_gather_ms": statistics.median(r.gather_ms for r in idle),
        "lora_prepare_ms": statistics.median(r.prepare_ms for r in idle),
        "lora_commit_ms": statistics.median(r.commit_ms for r in idle),
        "lora_tokens_per_s": rate,
        "lora_tokens_per_s_without": base,
    }


# --- masks ----------------------------------------------------------------------------------------


async def masks(note: Note, *, case: Case) -> dict[str, Any]:
    kinds = {
        "plain": {},
        "top_p": {"top_p": 0.95},
        "masks": {"top_p": 0.95, "top_k": 50, "return_sampling_mask": True},
        "top_k": {"top_p": 0.95, "top_k": 50},
    }
    note("start")
    async with case.launch() as client:
        figures = {}
        for name, values in kinds.items():
            note(name)
            await _load(client, case, case.in_flight, logprobs=True, **values)
            figures[f"{name}_tokens_per_s"] = await _load(
                client, case, case.in_flight, logprobs=True, **values
            )
    return figures


# --- sleep ----------------------------------------------------------------------------------------


def used_memory(device: str) -> float:
    """Return the used memory of the first visible GPU, in MiB. The engine runs on this GPU.

    ``CUDA_VISIBLE_DEVICES`` has indices or UUIDs of GPUs, and nvidia-smi accepts both.
    """
    if device == "cpu":
        return 0.0
    gpu, *_ = visible_cuda_devices() or ["0"]
    query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    run = subprocess.run([*query, f"--id={gpu}"], capture_output=True, check=True)
    return float(run.stdout)


async def sleep(note: Note, *, case: Case) -> dict[str, Any]:
    before = used_memory(case.device)
    figures: dict[str, Any] = {}
    note("start")
    async with case.launch(enable_memory_saver=True) as client:
        await _load(client, case, case.in_flight)
        greedy = {"input_ids": prompts(case, 1, 4), "max_new_tokens": 64, "temperature": 0}
        expected = [made.output_ids.tolist() for made in await client.generate(**greedy)]
        figures["sleep_awake_mib"] = used_memory(case.device) - before
        for name, keep, load in (
            ("first_kept", True, False),
            ("kept", True, False),
            ("kept_loaded", True, True),
            ("first_lost", False, False),
            ("lost", False, False),
        ):
            note(name)
            running = None
            if load:
                running = asyncio.ensure_future(_load(client, case, case.in_flight))
                await asyncio.sleep(1 if case.on_gpu else 0.1)
            begun = time.perf_counter()
            await client.sleep(keep_weights=keep)
            figures[f"sleep_{name}_s"] = time.perf_counter() - begun
            figures[f"sleep_{name}_left_mib"] = used_memory(case.device) - before
            begun = time.perf_counter()
            await client.wake()
            figures[f"sleep_{name}_wake_s"] = time.perf_counter() - begun
            if running is not None:
                await running
            if keep:
                again = [made.output_ids.tolist() for made in await client.generate(**greedy)]
                assert again == expected, "the answers have changed"
    return figures


# --- starts ---------------------------------------------------------------------------------------


async def start(note: Note, *, case: Case) -> dict[str, Any]:
    """Measure the seconds until a worker serves, and until its first four requests are answered.

    The first start also imports SGLang, and compiles kernels that are not cached.
    """
    figures: dict[str, Any] = {}

    async def answered(worker: int) -> float:
        begun = time.perf_counter()
        await client.generate(input_ids=prompts(case, 2, 4), max_new_tokens=8, worker=worker)
        return time.perf_counter() - begun

    async def replaced() -> float:
        """Kill worker 0 and return the seconds until its replacement serves."""
        begun = time.perf_counter()
        os.kill(client.workers[0].pid, signal.SIGKILL)
        while client.workers[0].state == "ready":  # noqa: ASYNC110 (a client has no event for it)
            await asyncio.sleep(0.001)
        await client.wait_until_full()
        return time.perf_counter() - begun

    note("first")
    begun = time.perf_counter()
    async with case.launch() as client:
        figures["start_first_s"] = time.perf_counter() - begun
        figures["start_first_batch_s"] = await answered(0)
        for name in ("replacement", "later_replacement"):
            # The pool makes a spare process after a second without work.
            await asyncio.sleep(3)
            note(name)
            figures[f"start_{name}_s"] = await replaced()
            figures[f"start_{name}_batch_s"] = await answered(0)
        if case.on_gpu and torch.cuda.device_count() > 1:
            note("second")
            begun = time.perf_counter()
            (worker,) = await client.add_workers(1)
            figures["start_second_s"] = time.perf_counter() - begun
            figures["start_second_batch_s"] = await answered(worker)
    return figures


if __name__ == "__main__":
    typer.run(main)
