"""A worker is killed or stopped in each phase of a weight update.

All other workers soon get the new weights, or all keep the old ones. No call is lost.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from engine.policies import PROMPTS, Lab, Policies, gated, on_phase, phase_event
from processes import strike

import sglrl
from sglrl.core.weight_update import COMMIT, WeightUpdate

pytestmark = pytest.mark.asyncio(loop_scope="session")

SECONDS = 2.0
"""The time limit of a phase in which a worker is stopped, except COMMIT."""
WANTED = {"max_new_tokens": 160, "logprobs": True, "ignore_eos": True}
VICTIM = 1


@pytest.fixture(scope="module")
def policies(models: Path) -> Policies:
    return Policies(models / "policies")


def expire(monkeypatch: pytest.MonkeyPatch, machine: WeightUpdate) -> None:
    """Shorten the time limit of this phase. A late COMMIT ends when the others have answered."""
    if machine.state != COMMIT:
        machine.deadline = time.monotonic() + SECONDS
        return
    answered = machine.answered

    def observed(*args: Any) -> None:
        answered(*args)
        if {worker for worker, _ in machine.waiting} == {VICTIM}:
            machine.deadline = time.monotonic()

    monkeypatch.setattr(machine, "answered", observed)


@pytest.mark.parametrize(
    ("phase", "mode"),
    [
        ("join", "full"),
        ("prepare", "full"),
        ("stage", "full"),
        ("stage", "bucketed"),
        ("commit", "full"),
        ("commit", "bucketed"),
    ],
)
@pytest.mark.parametrize("fault", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
async def test_a_worker_fails_in_an_update(
    policies: Policies,
    monkeypatch: pytest.MonkeyPatch,
    fault: signal.Signals,
    phase: str,
    mode: str,
) -> None:
    async with sglrl.launch(policies[0].folder, device="cpu", replicas=2, restarts=0) as client:
        lab = Lab(client, policies)
        pid = client.workers[VICTIM].pid
        if phase != "join":
            await lab.update(1, mode=mode)
        before = client.weight_version
        done = False

        def fail(asked: str, member: tuple[int, int]) -> None:
            nonlocal done
            if asked == phase and member[0] == VICTIM and not done:
                done = True
                strike(pid, fault)
                if fault == signal.SIGSTOP:
                    run = client.pool.weights.updates.run
                    assert run is not None
                    expire(monkeypatch, run.machine)

        on_phase(monkeypatch, client, fail)
        calls = [
            asyncio.ensure_future(client.generate(input_ids=[*PROMPTS[1], i], **WANTED))
            for i in range(6)
        ]
        while sorted(s.engine.running for s in await client.stats()) < [1, 1]:
            pass
        report = await lab.update(2, mode=mode, bucket_bytes=1 << 18)
        assert report.workers == [0]
        assert report.version == before + 1
        assert done
        for completion in await asyncio.gather(*calls):
            assert completion.finish_reason == "length"
            assert len(completion.output_ids) == WANTED["max_new_tokens"]
            assert completion.worker == 0 or not completion.resumed
            lab.check_history(completion)
        assert [w.state for w in client.workers] == ["ready", "retired"]
        await lab.check(PROMPTS[:1], 4)
        after = await lab.update(1, mode=mode)
        assert after.workers == [0]
        await lab.check(PROMPTS[:1], 4)
    assert not alive(pid)


async def test_a_worker_is_lost_when_another_is_half_updated(
    policies: Policies, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other worker cannot return to the old weights, so it stays held until it has the rest."""
    async with sglrl.launch(policies[0].folder, device="cpu", replicas=2, restarts=0) as client:
        lab = Lab(client, policies)
        pid = client.workers[VICTIM].pid
        calls = [
            asyncio.ensure_future(client.generate(input_ids=[*PROMPTS[1], i], **WANTED))
            for i in range(4)
        ]
        while sorted(s.engine.running for s in await client.stats()) < [1, 1]:
            pass
        weights, gate = gated(policies[1].model.state_dict())
        update = asyncio.ensure_future(lab.update(1, weights, mode="bucketed", bucket_bytes=1))
        await gate.reached()
        again = phase_event(monkeypatch, client, "join")
        os.kill(pid, signal.SIGKILL)
        await again.wait()
        gate.open()
        report = await update
        assert (report.workers, report.attempts) == ([0], 2)
        for completion in await asyncio.gather(*calls):
            assert len(completion.output_ids) == WANTED["max_new_tokens"]
            lab.check_history(completion)
        await lab.check(PROMPTS[:1], 4)


async def test_the_only_worker_is_lost(policies: Policies, monkeypatch: pytest.MonkeyPatch) -> None:
    async with sglrl.launch(policies[0].folder, device="cpu", restarts=0) as client:
        pid = client.workers[0].pid
        on_phase(
            monkeypatch,
            client,
            lambda phase, member: (
                strike(pid, signal.SIGKILL) if phase == "stage" and member[0] == 0 else None
            ),
        )
        for _ in range(2):
            with pytest.raises(sglrl.WorkerLost, match="no worker is left"):
                await client.update_weights(policies[1].model)
        assert client.weight_version == 0


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
