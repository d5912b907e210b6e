"""The systems that ``bench.weights`` measures, each in its own process (see ``parts``).

The sender is on GPU 0, and the engines are on the other GPUs. Without GPUs, sender and engines
share the CPU. All systems send the same tensors: the model's parameters, filled with small random
numbers.
"""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import os
import random
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from .cases import Case
from .parts import ROOT, Note
from .sglang_server import free_port, sglang_server

BUCKET = 256 << 20
PHASES = ("prepare", "broadcast", "stage", "commit")
MODES = {
    "decoding": ("full", True),
    "idle": ("full", False),
    "paused": ("bucketed", True),
    "kept": ("full", True),
}
"""For each row of the table: the mode of the update, and whether the engines decode meanwhile."""


def _on_gpu(name: str, prompt: int, new: int, updates: int) -> Case:
    """Return a case that leaves half of the GPU's memory for a second copy of the weights."""
    load = (prompt, new, 96, 0, updates, 1)
    memory = {"mem_fraction_static": 0.5}
    return Case(name, f"qwen3-{name}", "cuda", "bfloat16", 151_936, *load, memory)


CASES = {
    case.name: case
    for case in (
        Case("tiny-cpu", "tiny", "cpu", "float32", 512, 32, 512, 16, 0, 10),
        _on_gpu("0.6b", 128, 2048, 10),
        _on_gpu("8b", 128, 2048, 10),
        _on_gpu("32b", 64, 256, 5),
    )
}
"""Models, and the load that decodes while their weights are updated. ``in_flight`` is the number of
requests at one worker, and ``repeats`` is the number of updates of each kind."""


def _tensors(specs: Mapping[str, Any], device: str) -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    return {
        name: torch.randn(tuple(s[1]), device=device).mul_(0.02).to(getattr(torch, s[0]))
        for name, s in specs.items()
    }


def _synchronize(device: str) -> None:
    if device != "cpu":
        torch.cuda.synchronize()


# --- ours -----------------------------------------------------------------------------------------


async def sglrl(
    note: Note, *, case: Case, replicas: int, tp_size: int, modes: Sequence[str]
) -> dict[str, Any]:
    """Measure each of the ``MODES`` in ``modes``. The mode "kept" needs a pool of its own."""
    pool = {"replicas": replicas, "tp_size": tp_size}
    most = [name for name in modes if name != "kept"]
    result = await _measure_pool(note, case, most, keep_weights=None, **pool)
    if "kept" in modes:
        kept = await _measure_pool(note, case, ["kept"], keep_weights="auto", **pool)
        result["modes"] |= kept["modes"]
    return result


async def _measure_pool(
    note: Note, case: Case, modes: Sequence[str], *, replicas: int, **pool: Any
) -> dict[str, Any]:
    """Measure the modes with one pool. ``pool`` has further arguments of ``launch``."""
    device = "cpu"
    if case.on_gpu:
        device = "cuda:0"
        pool["gpus"] = list(range(1, 1 + replicas * pool["tp_size"]))
    note("starting")
    client = case.launch(replicas=replicas, **pool)
    result: dict[str, Any] = {"modes": {}}
    async with client:
        begun = time.perf_counter()
        metadata = await client.model_metadata()
        result["metadata_ms"] = (time.perf_counter() - begun) * 1e3
        result["metadata"] = {name: [m.dtype, list(m.shape)] for name, m in metadata.items()}
        weights = _tensors(result["metadata"], device)
        result["bytes"] = sum(t.numel() * t.element_size() for t in weights.values())
        note("forming the group")
        result["join_ms"] = await client.connect_weights(device=device)
        first = await client.update_weights(weights)
        result["first_ms"] = first.total_ms
        for name in modes:
            mode, load = MODES[name]
            note(f"{name}: warming up")
            async with _decoding(client, case, replicas if load else 0) as steps:
                await client.update_weights(weights, mode=mode)
                reports, returned = [], []
                for _ in range(case.repeats):
                    # Start each update at another point of a decode step.
                    await asyncio.sleep(0.1 + random.random() * 0.05)
                    begun = time.perf_counter()
                    reports.append(await client.update_weights(weights, mode=mode))
                    last = (begun, time.perf_counter())
                    returned.append((last[1] - begun) * 1e3)
                # The plot also shows the tokens after the last update.
                await asyncio.sleep(0.15)
            note(f"{name}: {reports[-1]}")
            result["modes"][name] = _summary(reports)
            if name == "kept":
                # The call also waits for the copy to the host's memory, which the report of the
                # update does not include.
                total = {"total_ms": statistics.median(returned), "all_total_ms": returned}
                result["modes"][name] |= total
            if load:
                result["modes"][name]["timeline"] = _timeline(steps, *last, reports[-1])
        note("verifying")
        wrong = await client.verify_weights(weights)
        if wrong:
            raise ValueError(f"{len(wrong)} tensors are not what was sent: {wrong[:4]}")
    return result


@contextlib.asynccontextmanager
async def _decoding(client: Any, case: Case, replicas: int) -> AsyncIterator[list[float]]:
    """Keep every engine busy while the block runs.

    Yields:
        A growing list of the times at which the tokens of one request arrived, one for each decode
        step of worker 0.
    """
    steps: list[float] = []
    warm = asyncio.Event()

    async def request(worker: int, seed: int, watched: bool) -> None:
        draw = random.Random(seed)
        while True:
            prompt = [draw.randrange(3, 500) for _ in range(case.prompt)]
            wanted = {"max_new_tokens": case.new, "ignore_eos": True, "worker": worker}
            if not watched:
                await client.generate(input_ids=prompt, **wanted)
                continue
            async for _ in client.stream(input_ids=prompt, **wanted):
                steps.append(time.perf_counter())
                if len(steps) > 20:
                    warm.set()

    async with asyncio.TaskGroup() as group:
        tasks = [
            group.create_task(request(worker, i, watched=i == 0 and worker == 0))
            for worker in range(replicas)
            for i in range(case.in_flight)
        ]
        try:
            if tasks:
                async with asyncio.timeout(120):
                    await warm.wait()
            yield steps
        finally:
            for task in tasks:
                task.cancel()


def _summary(reports: list[Any]) -> dict[str, Any]:
    def median(values: Any) -> float:
        return statistics.median(values)

    names = ("prepare_ms", "gather_ms", "broadcast_ms", "stage_ms", "commit_ms", "total_ms")
    figures = {name: median(getattr(r, name) for r in reports) for name in names}
    return figures | {
        "pause_ms": median(max(r.pause_ms) for r in reports),
        "worst_pause_ms": max(max(r.pause_ms) for r in reports),
        "all_total_ms": [r.total_ms for r in reports],
        "updates": len(reports),
        "mode": reports[0].mode,
    }


def _timeline(steps: list[float], begun: float, ended: float, report: Any) -> dict[str, Any]:
    """Return the phases and the tokens around an update, in milliseconds from its start."""
    near = [s for s in steps if begun - 0.15 < s < ended + 0.15]
    at = 0.0
    phases = []
    for name in ("prepare_ms", "stage_ms", "commit_ms"):
        took = getattr(report, name)
        phases.append([name.removesuffix("_ms"), at, at + took])
        at += took
    return {"tokens_ms": [(s - begun) * 1e3 for s in near], "phases": phases}


# --- the lower limit ------------------------------------------------------------------------------


def bare(note: Note, *, case: Case, receivers: int, size: int) -> dict[str, Any]:
    """Broadcast ``size`` bytes between processes that do nothing else, and return the times."""
    port = free_port()
    given = (case.device, str(receivers + 1), str(port), str(size), str(case.repeats))
    children = [
        subprocess.Popen([sys.executable, "-m", "bench.weights_parts", str(rank), *given], cwd=ROOT)
        for rank in range(1, receivers + 1)
    ]
    note("broadcasting")
    try:
        times = _broadcast(0, case.device, receivers + 1, port, size, case.repeats)
    finally:
        for child in children:
            try:
                child.wait(20)
            except subprocess.TimeoutExpired:
                child.kill()
    return {"total_ms": statistics.median(times), "all_total_ms": times}


def _broadcast(rank: int, device: str, size: int, port: int, total: int, count: int) -> list[float]:
    if device == "cuda":
        torch.cuda.set_device(rank)
    backend = "nccl" if device == "cuda" else "gloo"
    dist.init_process_group(
        backend, init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=size
    )
    sizes = [BUCKET] * (total // BUCKET) + [total % BUCKET]
    buckets = [torch.zeros(max(1, s), dtype=torch.uint8, device=device) for s in sizes]
    times = []
    for _ in range(count + 2):
        dist.barrier()
        _synchronize(device)
        begun = time.perf_counter()
        works = [dist.broadcast(b, 0, async_op=True) for b in buckets]
        for work in works:
            work.wait()
        _synchronize(device)
        times.append((time.perf_counter() - begun) * 1e3)
    dist.destroy_process_group()
    return times[2:]


# --- SGLang's own way -----------------------------------------------------------------------------


Ask = Callable[..., None]
"""A function ``ask(endpoint, **fields)`` that makes one of SGLang's requests and awaits its
answer."""


def _sglang_arguments(case: Case) -> dict[str, Any]:
    return case.server_arguments(skip_tokenizer_init=True, base_gpu_id=1, log_level="error")


def sglang_engine(note: Note, *, case: Case, **given: Any) -> dict[str, Any]:
    """Measure SGLang's own ways, called through ``sglang.Engine`` in this process."""
    import sglang

    note("starting")
    engine = sglang.Engine(**_sglang_arguments(case))

    def ask(endpoint: str, **fields: Any) -> None:
        done, why = getattr(engine, endpoint)(**fields)
        if not done:
            raise RuntimeError(f"{endpoint}: {why}")

    try:
        return _sglang_ways(note, ask, case.device, **given)
    finally:
        engine.shutdown()


def sglang_http(note: Note, *, case: Case, **given: Any) -> dict[str, Any]:
    """Measure SGLang's own ways, called over one persistent connection to its HTTP server."""
    note("starting")
    with sglang_server(_sglang_arguments(case)) as port:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)

        def ask(endpoint: str, **fields: Any) -> None:
            headers = {"content-type": "application/json"}
            connection.request("POST", f"/{endpoint}", json.dumps(fields), headers)
            answer = connection.getresponse()
            said = answer.read()
            if answer.status != 200:
                raise RuntimeError(f"{endpoint}: HTTP {answer.status}: {said[:300]!r}")

        with contextlib.closing(connection):
            return _sglang_ways(note, ask, case.device, **given)


def _sglang_ways(
    note: Note, ask: Ask, device: str, *, ways: Sequence[str], metadata: Mapping[str, Any]
) -> dict[str, Any]:
    """Measure ``update_weights_from_distributed`` while generation is stopped.

    The ways are: all names in one request, flattened buckets, and one request for each parameter.
    There is no load, because users of these ways pause the engine.
    """
    from sglang.srt.utils import init_custom_process_group

    result: dict[str, Any] = {}
    backend = "nccl" if device == "cuda" else "gloo"
    weights = list(_tensors(metadata, device).items())
    port = free_port()
    joined: list[Any] = []

    def join() -> None:
        joined.append(
            init_custom_process_group(
                backend=backend,
                init_method=f"tcp://127.0.0.1:{port}",
                world_size=2,
                rank=0,
                group_name="bench",
            )
        )

    thread = threading.Thread(target=join)
    thread.start()
    ask(
        "init_weights_update_group",
        master_address="127.0.0.1",
        master_port=port,
        rank_offset=1,
        world_size=2,
        group_name="bench",
        backend=backend,
    )
    thread.join()
    (group,) = joined

    def update(part: list[tuple[str, torch.Tensor]], load_format: str | None) -> None:
        """Make one request, and at the same time the broadcasts that the engine waits for."""

        def send() -> None:
            if load_format is None:
                works = [dist.broadcast(t, 0, group=group, async_op=True) for _, t in part]
                for work in works:
                    work.wait()
            else:
                flat = torch.cat([t.reshape(-1).view(torch.uint8) for _, t in part])
                dist.broadcast(flat, 0, group=group)
            _synchronize(device)

        sender = threading.Thread(target=send)
        sender.start()
        ask(
            "update_weights_from_distributed",
            names=[name for name, _ in part],
            dtypes=[str(t.dtype).removeprefix("torch.") for _, t in part],
            shapes=[list(t.shape) for _, t in part],
            group_name="bench",
            flush_cache=False,
            load_format=load_format,
        )
        sender.join()

    updates: dict[str, Callable[[], None]] = {
        "one request": lambda: update(weights, None),
        "flattened 512 MB": lambda: [  # type: ignore[func-returns-value]
            update(part, "flattened_bucket") for part in _parts(weights, 512 << 20)
        ],
        "per parameter": lambda: [update([pair], None) for pair in weights],  # type: ignore[func-returns-value]
    }
    for name in ways:
        note(name)
        times = []
        count = 2 if name == "per parameter" else 4
        for _ in range(count + 1):
            begun = time.perf_counter()
            updates[name]()
            times.append((time.perf_counter() - begun) * 1e3)
        result[name] = {"total_ms": statistics.median(times[1:]), "all_total_ms": times[1:]}
    return result


def _parts(
    weights: list[tuple[str, torch.Tensor]], limit: int
) -> list[list[tuple[str, torch.Tensor]]]:
    parts: list[list[tuple[str, torch.Tensor]]] = []
    room = 0
    for name, tensor in weights:
        size = tensor.numel() * tensor.element_size()
        if not parts or size > room:
            parts.append([])
            room = limit
        parts[-1].append((name, tensor))
        room -= size
    return parts


if __name__ == "__main__":
    rank, device, *numbers = sys.argv[1:]
    _broadcast(int(rank), device, *map(int, numbers))
    sys.stdout.flush()
    os._exit(0)
