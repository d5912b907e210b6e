"""The parts of ``bench.features``."""

from __future__ import annotations

import asyncio
import os
import signal
import statistics
import subprocess
import time
from collections.abc import Mapping
from typing import Any

import torch

import sglrl
from sglrl.config import visible_cuda_devices

from .cases import Case, prompts
from .parts import Note, serve_part

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
"""The modules of Qwen3 that have an adapter, with the sizes of their inputs and outputs."""


def _case(options: Mapping[str, Any]) -> Case:
    return Case(*options["case"])


def _launch(options: Mapping[str, Any], **arguments: Any) -> sglrl.Client:
    case = _case(options)
    given = {**options["arguments"], **arguments}
    return sglrl.launch(options["model"], device=case.device, dtype=case.dtype, **given)


async def _load(client: sglrl.Client, case: Case, count: int, **values: Any) -> float:
    """Generate once for each of ``count`` prompts, and return the tokens per second."""
    begun = time.perf_counter()
    await client.generate(
        input_ids=prompts(case, 0, count), max_new_tokens=case.new, ignore_eos=True, **values
    )
    return count * case.new / (time.perf_counter() - begun)


# --- adapters -------------------------------------------------------------------------------------


def _adapter(folder: str, device: str, seed: int) -> dict[str, torch.Tensor]:
    """Return the tensors of an adapter of the model, by PEFT's names."""
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

    found = {}
    for layer in range(config.num_hidden_layers):
        for module, (before, after) in _MODULES.items():
            name = f"base_model.model.model.layers.{layer}.{module}"
            found[f"{name}.lora_A.weight"] = tensor(_RANK, sizes[before])
            found[f"{name}.lora_B.weight"] = tensor(sizes[after], _RANK)
    return found


def lora(options: Mapping[str, Any], note: Note) -> dict[str, Any]:
    return asyncio.run(_lora(options, note))


async def _lora(options: Mapping[str, Any], note: Note) -> dict[str, Any]:
    case = _case(options)
    states = [_adapter(options["model"], case.device, seed) for seed in range(2)]
    config = {"r": _RANK, "lora_alpha": _RANK, "target_modules": "all-linear"}
    arguments = {
        "enable_lora": True,
        "max_lora_rank": _RANK,
        "lora_target_modules": ["all"],
        "max_loras_per_batch": 2,
    }
    note("start")
    async with _launch(options, **arguments) as client:
        begun = time.perf_counter()
        await client.load_lora("policy", states[0], config=config)
        loaded = (time.perf_counter() - begun) * 1e3
        note("warm up")
        await _load(client, case, case.in_flight, lora="policy")
        note("replace")
        load = asyncio.ensure_future(_load(client, case, case.in_flight, lora="policy"))
        await asyncio.sleep(2 if case.device == "cuda" else 0.1)
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


def masks(options: Mapping[str, Any], note: Note) -> dict[str, Any]:
    return asyncio.run(_masks(options, note))


async def _masks(options: Mapping[str, Any], note: Note) -> dict[str, Any]:
    case = _case(options)
    kinds = {
        "plain": {},
        "top_p": {"top_p": 0.95},
        "masks": {"top_p": 0.95, "top_k": 50, "return_sampling_mask": True},
        "top_k": {"top_p": 0.95, "top_k": 50},
    }
    note("start")
    async with _launch(options) as client:
        found = {}
        for name, values in kinds.items():
            note(name)
            await _load(client, case, case.in_flight, logprobs=True, **values)
            found[f"{name}_tokens_per_s"] = await _load(
                client, case, case.in_flight, logprobs=True, **values
            )
    return found


# --- sleep ----------------------------------------------------------------------------------------


def sleep(options: Mapping[str, Any], note: Note) -> dict[str, Any]:
    return asyncio.run(_sleep(options, note))


def _used(device: str) -> float:
    """Return the memory that is in use on the first visible GPU, in MiB.

    The engine uses this GPU. ``CUDA_VISIBLE_DEVICES`` holds indices or UUIDs, and nvidia-smi takes
    both.
    """
    if device == "cpu":
        return 0.0
    gpu, *_ = visible_cuda_devices() or ["0"]
    query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    run = subprocess.run([*query, f"--id={gpu}"], capture_output=True, check=True)
    return float(run.stdout)


async def _sleep(options: Mapping[str, Any], note: Note) -> dict[str, Any]:
    case = _case(options)
    before = _used(case.device)
    found: dict[str, Any] = {}
    note("start")
    async with _launch(options, enable_memory_saver=True) as client:
        await _load(client, case, case.in_flight)
        greedy = {"input_ids": prompts(case, 1, 4), "max_new_tokens": 64, "temperature": 0}
        expected = [made.output_ids.tolist() for made in await client.generate(**greedy)]
        found["sleep_awake_mib"] = _used(case.device) - before
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
                await asyncio.sleep(1 if case.device == "cuda" else 0.1)
            begun = time.perf_counter()
            await client.sleep(keep_weights=keep)
            found[f"sleep_{name}_s"] = time.perf_counter() - begun
            found[f"sleep_{name}_left_mib"] = _used(case.device) - before
            begun = time.perf_counter()
            await client.wake()
            found[f"sleep_{name}_wake_s"] = time.perf_counter() - begun
            if running is not None:
                await running
            if keep:
                again = [made.output_ids.tolist() for made in await client.generate(**greedy)]
                assert again == expected, "the answers have changed"
    return found


# --- starts ---------------------------------------------------------------------------------------


def start(options: Mapping[str, Any], note: Note) -> dict[str, Any]:
    return asyncio.run(_start(options, note))


async def _start(options: Mapping[str, Any], note: Note) -> dict[str, Any]:
    """Measure seconds until a worker serves, and until its first batch of four is answered.

    The first start also imports SGLang, and compiles kernels that no cache has.
    """
    case = _case(options)
    found: dict[str, Any] = {}

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
    async with _launch(options) as client:
        found["start_first_s"] = time.perf_counter() - begun
        found["start_first_batch_s"] = await answered(0)
        for name in ("replacement", "later_replacement"):
            # A spare process is made after a second without work.
            await asyncio.sleep(3)
            note(name)
            found[f"start_{name}_s"] = await replaced()
            found[f"start_{name}_batch_s"] = await answered(0)
        if case.device == "cuda" and torch.cuda.device_count() > 1:
            note("second")
            begun = time.perf_counter()
            (worker,) = await client.add_workers(1)
            found["start_second_s"] = time.perf_counter() - begun
            found["start_second_batch_s"] = await answered(worker)
    return found


if __name__ == "__main__":
    serve_part({"lora": lora, "masks": masks, "sleep": sleep, "start": start})
