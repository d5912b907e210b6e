"""SGLang workers on another host, also while it is away during an update."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import numpy as np
import pytest
from engine.policies import PROMPTS, Lab, Policies, on_phase
from engine.reference import Reference
from namespaces import another_host

import sglrl

pytestmark = pytest.mark.asyncio(loop_scope="session")


NODE = Path("-m")


async def test_workers_on_another_host(
    models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    policies = Policies(models / "nodes")
    with another_host() as (here, there):
        # This machine may have other addresses, which the node cannot reach.
        async with sglrl.Hosts("tcp://0.0.0.0:*", insecure=True) as hosts:
            address = f"tcp://{here.address}:{hosts.address.rpartition(':')[2]}"
            with monkeypatch.context() as environment:
                environment.setenv("SGLRL_CACHE", str(tmp_path))
                there.run(NODE, "sglrl", "node", address, "--name", "there", "--insecure")
            with pytest.raises(sglrl.WorkerStartError, match="this host has no folder /"):
                # The driver has this folder, and the node starts in a system without it.
                gone = policies[1].folder.rename(tmp_path / "gone")
                try:
                    client = sglrl.launch(gone, hosts=hosts, device="cpu")
                finally:
                    gone.rename(policies[1].folder)
                await client
            async with sglrl.launch(
                policies[0].folder, hosts=hosts, device="cpu", replicas=2
            ) as client:
                assert [worker.host for worker in client.workers] == ["there", "there"]
                lab = Lab(client, policies)
                await lab.check(PROMPTS[:2], 4)
                size = sum(t.nbytes for t in policies[0].model.state_dict().values())
                for version, mode in ((1, "full"), (2, "bucketed")):
                    before = here.sent_bytes
                    report = await client.update_weights(policies[version].model, mode=mode)
                    assert report.workers == [0, 1]
                    # One of the two workers receives the weights, and passes them on.
                    assert size < here.sent_bytes - before < 1.5 * size
                    lab.by_version[version] = policies[version]
                    await lab.check(PROMPTS[:2], 4)
                # The replacement copies the weights from the other worker there.
                os.kill(client.workers[0].pid, signal.SIGKILL)
                await lab.check(PROMPTS[:2], 4)
                await client.wait_until_full()
                assert [worker.weight_version for worker in client.workers] == [2, 2]
                await lab.check(PROMPTS[:2], 4)
                # Worker 0 is the relay.
                target: list[tuple[str, int]] = []

                def strike(phase: str, member: tuple[int, int]) -> None:
                    if (phase, member[0]) in target:
                        target.clear()
                        os.kill(client.workers[member[0]].pid, signal.SIGKILL)

                on_phase(monkeypatch, client, strike)
                for struck, victim in (("join", 0), ("stage", 0), ("stage", 1)):
                    target.append((struck, victim))
                    report = await lab.other()
                    assert report.workers == [1 - victim]
                    await client.wait_until_full()
                    await lab.check(PROMPTS[:2], 4)
            # The node makes this model in its own cache.
            async with sglrl.launch("tiny", hosts=hosts, device="cpu", tp_size=2) as client:
                made = await client.generate("2 + 2 =", max_new_tokens=8, logprobs=True)
                assert client.info.model == str(tmp_path / Path(client.model).name)
            expected = Reference(Path(client.model)).logprobs_of(made.prompt_ids, made.output_ids)
            np.testing.assert_allclose(made.logprobs, expected, atol=1e-4, rtol=0)


async def test_a_host_that_is_away_in_each_phase_of_an_update(
    models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The update goes on without it. Its worker returns and copies the weights from the other."""
    policies = Policies(models / "nodes")
    with another_host() as (here, there):
        async with sglrl.Hosts(
            f"tcp://{here.address}:*", insecure=True, at_least=2, heartbeat_timeout=4.0
        ) as hosts:
            options = ("--insecure", "--heartbeat-timeout", "4", "--orphan-timeout", "60")
            for host, name in ((here, "here"), (there, "there")):
                host.run(NODE, "sglrl", "node", hosts.address, "--name", name, *options)
            async with sglrl.launch(
                policies[0].folder, hosts=hosts, device="cpu", replicas=2
            ) as client:
                pids = [worker.pid for worker in client.workers]
                (away,) = [worker.id for worker in client.workers if worker.host == "there"]
                lab = Lab(client, policies)
                left = ["join", "prepare", "stage", "commit"]

                def lose(phase: str, member: tuple[int, int]) -> None:
                    if left and phase == left[0] and member[0] == away and there.up:
                        there.up = False
                        del left[0]

                on_phase(monkeypatch, client, lose)
                while left:
                    report = await lab.other()
                    assert report.workers == [1 - away]
                    there.up = True
                    await client.wait_until_full()
                    assert [worker.pid for worker in client.workers] == pids
                    await lab.check(PROMPTS[:2], 4)
