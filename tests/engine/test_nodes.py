"""SGLang workers on another host."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from namespaces import another_host

import sglrl

from .policies import PROMPTS, Lab, Policies

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(300)]


async def test_workers_on_another_host(models: Path, tmp_path: Path) -> None:
    policies = Policies(models / "nodes")
    with another_host() as (here, there):
        async with sglrl.Hosts(f"tcp://{here.address}:*", insecure=True) as hosts:
            node = ("-m", "sglrl", "node", hosts.address, "--name", "there", "--insecure")
            there.run(Path(node[0]), *node[1:])
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
                for version, mode in ((1, "full"), (2, "bucketed")):
                    report = await client.update_weights(policies[version].model, mode=mode)
                    assert report.workers == [0, 1]
                    lab.by_version[version] = policies[version]
                    await lab.check(PROMPTS[:2], 4)
                # The replacement copies the weights from the other worker there.
                os.kill(client.workers[0].pid, signal.SIGKILL)
                await lab.check(PROMPTS[:2], 4)
                await client.wait_until_full()
                assert [worker.weight_version for worker in client.workers] == [2, 2]
                await lab.check(PROMPTS[:2], 4)
