"""A trainer on a different host than the rollouts sends the weights."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from engine.policies import PROMPTS, Lab, Policies
from namespaces import another_host

import sglrl

pytestmark = pytest.mark.asyncio(loop_scope="session")

TRAINER = Path(__file__).parents[1] / "weights" / "trainer_program.py"


async def test_a_trainer_on_another_host(models: Path) -> None:
    policies = Policies(models / "hosts")
    with another_host() as (here, there):
        async with sglrl.launch(
            policies[0].folder,
            device="cpu",
            replicas=2,
            address=f"tcp://{here.address}:*",
            insecure=True,
            heartbeat_timeout=5.0,
        ) as client:
            lab = Lab(client, policies)
            trainer = there.run(TRAINER, client.weights_address, there.address, "5")
            says = await asyncio.to_thread(trainer.says)
            assert says == {"result": "connected", "version": 0}
            for version, options in ((1, {}), (2, {"mode": "bucketed", "bucket_bytes": 1 << 16})):
                folder = str(policies[version].folder)
                done = await asyncio.to_thread(trainer.ask, update=folder, **options)
                assert done["result"] == "updated", done
                assert (done["version"], done["workers"]) == (version, [0, 1])
                lab.by_version[version] = policies[version]
                await lab.check(PROMPTS[:2], 4)
            # The link fails, and both sides notice it.
            senders = client.pool.weights._senders
            assert len(senders) == 1
            there.up = False
            lost = await asyncio.to_thread(trainer.ask, update=str(policies[0].folder))
            assert (lost["result"], lost["error"]) == ("error", "WeightUpdateError")
            assert "the client has ended or cannot be reached" in lost["says"]
            while senders:
                await client.generate(input_ids=PROMPTS[0], max_new_tokens=1)
            await lab.check(PROMPTS[:1], 4)
            await asyncio.to_thread(trainer.leave)
