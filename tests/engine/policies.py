"""Models of one shape with different weights (policies), and an engine that switches between them.

Tests compare logprobs with Hugging Face transformers. The reference uses the KV cache that the
request had when each of its tokens was sampled.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from transformers import DynamicCache

import sglrl
from sglrl.launching.tiny_model import make_model
from sglrl.weights import UpdateReport
from sglrl.weights.update_run import UpdateRun

from .reference import Reference

TOLERANCE = 1e-4
NORM = "model.norm.weight"
Weights = dict[str, torch.Tensor]
PROMPTS = [[3 + (5 * i + 13 * j * j) % 500 for j in range(4 + 11 * i)] for i in range(4)]


def finish(folder: Path, seed: int, *, flat: bool) -> None:
    """Give the norms random weights, which are all ones in a new model.

    Args:
        flat: make the logits a quarter as large. The random model's logits are so large that
            rounding them to 16 bits, which both sides do, alone reaches the tolerance.
    """
    weights = load_file(folder / "model.safetensors")
    random = torch.Generator().manual_seed(seed)
    for tensor in weights.values():
        if tensor.dim() == 1:
            tensor *= 0.5 + torch.rand(tensor.shape, generator=random)
    if flat:
        weights["lm_head.weight"] /= 4
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


class Policies:
    """Policies by seed: ``policies[k]`` is made with seed k at its first use.

    Args:
        saved: the dtype of the saved file.
        dtype: the dtype in which the reference computes.
        options: arguments of ``make_model``.
    """

    def __init__(
        self,
        folder: Path,
        *,
        saved: str = "float32",
        dtype: str = "auto",
        flat: bool = False,
        **options: Any,
    ) -> None:
        self._folder = folder
        self._dtype = dtype
        self._flat = flat
        self._options = {**options, "dtype": saved}
        self._made: dict[int, Reference] = {}

    def __getitem__(self, seed: int) -> Reference:
        if seed not in self._made:
            folder = make_model(self._folder / f"seed-{seed}", seed=seed, **self._options)
            finish(folder, seed, flat=self._flat)
            self._made[seed] = Reference(folder, self._dtype)
        return self._made[seed]


class Lab:
    """A client whose engines start with ``policies[0]``, and the policy of each version."""

    def __init__(
        self, client: sglrl.Client, policies: Policies, tolerance: float = TOLERANCE
    ) -> None:
        self.client = client
        self.policies = policies
        self.tolerance = tolerance
        self.by_version = {0: policies[0]}

    @property
    def current(self) -> Reference:
        return self.by_version[self.client.weight_version]

    async def update(self, seed: int, weights: Any = None, **options: Any) -> UpdateReport:
        """Update to policy ``seed``. ``weights`` replaces the policy's module as the source."""
        policy = self.policies[seed]
        report = await self.client.update_weights(
            policy.model if weights is None else weights, **options
        )
        self.by_version[report.version] = policy
        assert self.client.weight_version == report.version
        return report

    async def other(self, **options: Any) -> UpdateReport:
        """Update to a policy other than the current one."""
        return await self.update(1 if self.current is not self.policies[1] else 2, **options)

    async def check(self, prompts: Sequence[list[int]] = PROMPTS, count: int = 12) -> None:
        """Check that every worker has exactly the current policy's weights and uses them."""
        client = self.client
        live = [w for w in client.workers if w.state == "ready"]
        assert live
        assert {w.weight_version for w in live} == {client.weight_version}
        assert await client.verify_weights(self.current.model) == []
        made = await asyncio.gather(
            *(
                client.generate(
                    input_ids=prompt,
                    max_new_tokens=count,
                    temperature=0,
                    logprobs=True,
                    ignore_eos=True,
                    worker=worker.id,
                )
                for prompt in prompts
                for worker in live
            )
        )
        for completion in made:
            assert completion.versions == ((0, count, client.weight_version),)
            ids = np.concatenate([completion.prompt_ids, completion.output_ids])
            rows = self.current.logprobs(ids)[len(completion.prompt_ids) - 1 : -1]
            chosen = rows[np.arange(count), completion.output_ids]
            np.testing.assert_allclose(
                completion.logprobs, chosen, atol=self.tolerance, rtol=0, equal_nan=False
            )
            # In 16 bits two logits may be so close that the order of summation decides.
            slack = 0 if self.tolerance == TOLERANCE else 2 * self.tolerance
            assert (chosen >= rows.max(axis=1) - slack).all()

    def expected(self, completion: sglrl.Completion, *, again: bool) -> NDArray[np.float32]:
        """Return float32 [t]: logprobs of the output, each by the policy of its token's version.

        The step that samples a token computes the missing KV of the tokens before it. KV that older
        policies computed stays as it is. With ``again`` all KV is recomputed where the version
        changes. All KV is always recomputed where another worker resumed the request.
        """
        spans = completion.versions
        renewed = {*completion.resumed_at, *(span.start for span in spans if again)}
        versions = [span.version for span in spans for _ in range(span.start, span.stop)]
        prompt, output = completion.prompt_ids.tolist(), completion.output_ids.tolist()
        return logprobs_of_versions(self.by_version, prompt, output, versions, renewed)

    def check_history(self, completion: sglrl.Completion, *, again: bool = False) -> None:
        """Check that spans are contiguous and ascending, with the logprobs of their versions."""
        spans = completion.versions
        assert spans[0].start == 0
        assert spans[-1].stop == len(completion.output_ids)
        for before, after in itertools.pairwise(spans):
            assert before.stop == after.start
            # A worker that has the new version may be lost before another worker gets it.
            assert before.version < after.version or completion.resumed
        np.testing.assert_allclose(
            completion.logprobs,
            self.expected(completion, again=again),
            atol=self.tolerance,
            rtol=0,
        )


def logprobs_of_versions(
    policies: Mapping[int, Reference],
    prompt: Sequence[int],
    output: Sequence[int],
    versions: Sequence[int],
    renewed: Collection[int],
    banned: Sequence[int] = (),
) -> NDArray[np.float32]:
    """Return float32 [t]: logprobs of the output, each by the policy of its token's version.

    Args:
        policies: by version.
        versions: of each token of the output.
        renewed: positions in the output at which all KV is computed again. KV stays as it is where
            the version changes at another position.
        banned: tokens with a logit bias of -100.
    """
    ids = [*prompt, *output]
    changes = [at for at in range(1, len(output)) if versions[at] != versions[at - 1]]
    cache, held, start = DynamicCache(), 0, 0
    rows = []
    for stop in sorted({*changes, *renewed, len(output)} - {0}):
        if start in renewed:
            cache, held = DynamicCache(), 0
        tokens = ids[held : len(prompt) + stop - 1]
        with torch.inference_mode():
            logits = (
                policies[versions[start]]
                .model(torch.tensor([tokens]), past_key_values=cache, use_cache=True)
                .logits[0, start - stop :]
                .float()
            )
            logits[:, list(banned)] -= 100
        held, start = held + len(tokens), stop
        rows.append(torch.log_softmax(logits, dim=-1).numpy())
    return np.concatenate(rows)[np.arange(len(output)), output]  # type: ignore[no-any-return]


def without(weights: Weights, name: str) -> Weights:
    return {n: t for n, t in weights.items() if n != name}


def on_phase(
    monkeypatch: pytest.MonkeyPatch,
    client: sglrl.Client,
    act: Callable[[str, tuple[int, int]], None],
) -> None:
    """Call ``act(phase, member)`` right before a member of an update is asked for a phase."""
    channel = client.pool.weights
    ask = UpdateRun._ask

    def observed(run: UpdateRun, phase: str, member: tuple[int, int]) -> None:
        if run is channel.updates.run:
            act(phase, member)
        ask(run, phase, member)

    monkeypatch.setattr(UpdateRun, "_ask", observed)


def phase_event(
    monkeypatch: pytest.MonkeyPatch, client: sglrl.Client, wanted: str
) -> asyncio.Event:
    """Return an event that is set when the next update reaches the phase ``wanted``."""
    event = asyncio.Event()
    on_phase(monkeypatch, client, lambda phase, member: event.set() if phase == wanted else None)
    return event


def phase_held(
    monkeypatch: pytest.MonkeyPatch, client: sglrl.Client, wanted: str
) -> tuple[asyncio.Event, Callable[[], None]]:
    """Hold the next update in the phase ``wanted``: its last member is not asked yet.

    Returns:
        An event that is set when the update reaches the phase, and a function that releases the
        update. Cancelling the update releases it as well.
    """
    event = asyncio.Event()
    channel = client.pool.weights
    ask = UpdateRun._ask
    held: list[tuple[UpdateRun, str, tuple[int, int]]] = []

    def release() -> None:
        while held:
            ask(*held.pop())

    def observed(run: UpdateRun, phase: str, member: tuple[int, int]) -> None:
        is_last = member == max(run.machine.members)
        if run is channel.updates.run and phase == wanted and is_last:
            held.append((run, phase, member))
            event.set()
        else:
            release()
            ask(run, phase, member)

    monkeypatch.setattr(UpdateRun, "_ask", observed)
    return event, release


@asynccontextmanager
async def lab_of_four(models: Path, *, overlap: bool) -> AsyncIterator[Lab]:
    """Launch one worker that runs four requests at a time, so that a fifth waits in the engine.

    Args:
        overlap: use SGLang's overlapping loop.
    """
    policies = Policies(models / "policies")
    async with sglrl.launch(
        policies[0].folder,
        device="cpu",
        max_running_requests=4,
        weight_device="cpu",
        disable_overlap_schedule=not overlap,
    ) as client:
        yield Lab(client, policies)


async def until_running(client: sglrl.Client, count: int) -> None:
    """Wait until ``count`` requests run.

    The engine answers each call of ``stats`` between two scheduler steps, so no sleep is needed.
    """
    while sum(s.engine.running for s in await client.stats()) < count:
        pass


async def until_idle(client: sglrl.Client) -> None:
    """Wait until the engine is idle: a finished request may stay in its batch for a step."""
    while any(s.engine.running or s.engine.waiting for s in await client.stats()):
        pass


async def until_draining(client: sglrl.Client, held: int = 0) -> None:
    """Wait until a worker drains and holds ``held`` requests back."""
    while not any(s.engine.draining and s.engine.waiting >= held for s in await client.stats()):
        pass


async def collect(stream: sglrl.Stream) -> sglrl.Completion:
    """Read a stream to its end and return the completion."""
    async for _ in stream:
        pass
    return stream.completion


class Gate:
    """A tensor whose gathering blocks, like a sharded tensor that waits for the other ranks."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._reached, self._opened = threading.Event(), threading.Event()
        self._failed = False
        gate = self

        class Gated(torch.Tensor):
            def full_tensor(self) -> torch.Tensor:
                gate._reached.set()
                assert gate._opened.wait(100)
                if gate._failed:
                    raise RuntimeError("the trainer's mesh is gone")
                return tensor

        self.tensor = torch.Tensor._make_subclass(Gated, tensor.detach())

    async def reached(self) -> None:
        """Wait until the sender gathers the tensor."""
        assert await asyncio.get_running_loop().run_in_executor(None, self._reached.wait, 100)

    def open(self) -> None:
        self._opened.set()

    def fail(self) -> None:
        """Open the gate and raise an error in the sender."""
        self._failed = True
        self._opened.set()


def gated(weights: dict[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], Gate]:
    """Return the weights with a gate in place of the last tensor, and the gate."""
    *others, last = weights
    gate = Gate(weights[last])
    return {**{name: weights[name] for name in others}, last: gate.tensor}, gate
