"""A trainer in a different process than the rollouts sends the weights.

The tests also kill the sender of an update.
"""

from __future__ import annotations

import asyncio
import gc
import socket
import sys
import warnings
import weakref
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from engine.policies import PROMPTS, Lab, Policies, gated, phase_event

import sglrl
from sglrl.weights import Sender, remote_sender

from .trainer import PROGRAM, trainer

pytestmark = pytest.mark.asyncio(loop_scope="session")

WANTED = {"max_new_tokens": 40, "logprobs": True, "ignore_eos": True}


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def lab(models: Path) -> AsyncIterator[Lab]:
    policies = Policies(models / "policies")
    async with sglrl.launch(policies[0].folder, device="cpu", replicas=2) as client:
        yield Lab(client, policies)


def folder(lab: Lab, seed: int) -> str:
    return str(lab.policies[seed].folder)


async def test_a_trainer_in_another_process(lab: Lab) -> None:
    client = lab.client
    await lab.update(1)
    async with trainer(client) as other:
        assert await other.says() == {"result": "connected", "version": 1}
        assert (await other.ask(group=0))["total"] == 3
        for version, seed, options in (
            (2, 2, {}),
            (3, 3, {"inflight": "retract", "mode": "bucketed", "bucket_bytes": 1 << 16}),
        ):
            calls = [
                asyncio.ensure_future(client.generate(input_ids=prompt, **WANTED))
                for prompt in PROMPTS
            ]
            done = await other.ask(update=folder(lab, seed), **options)
            assert done["result"] == "updated"
            assert (done["version"], done["known"]) == (version, version)
            assert done["workers"] == [0, 1]
            assert f"v{version}" in done["repr"]
            lab.by_version[version] = lab.policies[seed]
            assert client.weight_version == version
            await lab.check(PROMPTS[:2], 4)
            for completion in await asyncio.gather(*calls):
                lab.check_history(completion, again="inflight" in options)
        refused = await other.ask(update=folder(lab, 1), version=3)
        assert (refused["result"], refused["error"]) == ("error", "UsageError")
        assert "above 3" in refused["says"]
        refused = await other.ask(update=folder(lab, 1), mode="half")
        assert refused["error"] == "UsageError"
        await lab.check(PROMPTS[:1], 4)
        # The client and the other process can take turns.
        await lab.update(2)
        done = await other.ask(update=folder(lab, 1))
        assert (done["result"], done["version"]) == ("updated", 5)
        lab.by_version[5] = lab.policies[1]
        await lab.check(PROMPTS[:1], 4)
        # The process's own default group still works.
        assert await other.ask(group=0) == {"result": "group", "ranks": 1, "total": 3}
        assert other.process.stdin is not None
        other.process.stdin.close()
        assert await other.says() == {"result": "closed"}
        assert await other.process.wait() == 0
    await lab.update(2)
    await lab.check(PROMPTS[:1], 4)


async def test_senders_are_refused_as_the_client_is(lab: Lab, models: Path) -> None:
    """The sender runs in the client's process: it does not need its own."""
    before = lab.client.weight_version
    weights = lab.policies[3].model.state_dict()
    async with await Sender.connect(lab.client.weights_address) as sender:
        assert sender.weight_version == before
        with pytest.raises(sglrl.UsageError, match="register_model"):
            await sender.update()
        with pytest.raises(sglrl.InvalidWeights, match="unknown: nonsense"):
            await sender.update({**weights, "nonsense": weights["lm_head.weight"].clone()})
        with pytest.raises(sglrl.InvalidWeights, match="missing"):
            await sender.update(list(weights.items())[1:])
        with pytest.raises(sglrl.UsageError, match="not int"):
            await sender.update(3)
        with pytest.raises(sglrl.UsageError, match="above"):
            await sender.update(weights, version=before)
        assert sender.weight_version == before
        await lab.check(PROMPTS[:1], 4)
        sender.register_model(weights)
        report = await sender.update()
        lab.by_version[report.version] = lab.policies[3]
        assert sender.weight_version == report.version == before + 1
        await lab.check(PROMPTS[:1], 4)
        # The second update is cancelled while it waits for the first one, which continues.
        one, two = (asyncio.ensure_future(sender.update(weights)) for _ in range(2))
        await asyncio.wait([two], timeout=0.001)
        two.cancel()
        report = await one
        lab.by_version[report.version] = lab.policies[3]
        with pytest.raises(asyncio.CancelledError):
            await two
    assert lab.client.weight_version == before + 2
    await lab.check(PROMPTS[:1], 4)


@pytest.mark.parametrize("phase", ["join", "prepare", "stage"])
async def test_a_sender_gives_up(lab: Lab, monkeypatch: pytest.MonkeyPatch, phase: str) -> None:
    before = lab.client.weight_version
    async with await Sender.connect(lab.client.weights_address) as sender:
        reached = phase_event(monkeypatch, lab.client, phase)
        update = asyncio.ensure_future(sender.update(lab.policies[0].model))
        await reached.wait()
        update.cancel()
        with pytest.raises(asyncio.CancelledError):
            await update
        # The cancellation may have come too late.
        report = await sender.update(lab.policies[1].model, timeout=10)
        lab.by_version[report.version] = lab.policies[1]
        assert before < report.version <= before + 2
        await lab.check(PROMPTS[:1], 4)


@pytest.mark.parametrize("mode", ["full", "bucketed"])
async def test_a_sender_gives_up_in_the_middle_of_a_broadcast(lab: Lab, mode: str) -> None:
    """Reading has stopped when ``update`` returns, so the trainer may change its tensors."""
    before = lab.client.weight_version
    weights, gate = gated(lab.policies[3].model.state_dict())
    async with await Sender.connect(lab.client.weights_address) as sender:
        update = asyncio.ensure_future(sender.update(weights, mode=mode, bucket_bytes=1 << 16))
        await gate.reached()
        update.cancel()
        if mode == "full":
            with pytest.raises(asyncio.CancelledError):
                await update
            gate.open()
        else:
            # Live weights are being overwritten, so the update must finish.
            await asyncio.wait([update], timeout=0.05)
            assert not update.done()
            gate.open()
            with pytest.raises(asyncio.CancelledError):
                await update
            lab.by_version[before + 1] = lab.policies[3]
        assert lab.client.weight_version == before + (mode == "bucketed")
        await lab.check(PROMPTS[:1], 4)
        report = await sender.update(lab.policies[1].model, timeout=10)
        lab.by_version[report.version] = lab.policies[1]
        await lab.check(PROMPTS[:1], 4)


async def test_a_sender_may_refuse_to_wait_for_itself(lab: Lab) -> None:
    weights, gate = gated(lab.policies[3].model.state_dict())
    async with await Sender.connect(lab.client.weights_address) as sender:
        running = asyncio.ensure_future(sender.update(weights))
        await gate.reached()
        with pytest.raises(sglrl.UpdateInProgress):
            await sender.update(lab.policies[1].model, wait=False)
        gate.open()
        lab.by_version[(await running).version] = lab.policies[3]
    await lab.check(PROMPTS[:1], 4)


async def test_a_sender_does_not_wait_in_vain(
    lab: Lab, monkeypatch: pytest.MonkeyPatch, models: Path
) -> None:
    weights = lab.policies[1].model.state_dict()
    sender = await Sender.connect(lab.client.weights_address)
    for wrong in ({"version": True}, {"partial": 1}, {"inflight": None}, {"timeout": "5"}):
        with pytest.raises(sglrl.UsageError, match="must be"):
            await sender.update(weights, **wrong)  # type: ignore[arg-type]
    async with sglrl.connect(lab.client.address) as other:
        with pytest.raises(sglrl.UsageError, match="must be"):
            await other.update_weights(weights, version=True)
    await sender.close()
    with pytest.raises(sglrl.Closed):
        await sender.update(weights)
    # This driver is alive but processes no messages.
    sender = await Sender.connect(lab.client.weights_address)
    monkeypatch.setattr(lab.client.pool.weights, "on_peer", lambda identity, frames: True)
    monkeypatch.setattr(remote_sender, "MIN_SILENCE", 0.1)
    with pytest.raises(sglrl.WeightUpdateError, match=r"no message .* for 0\.2 s; connect again"):
        await sender.update(weights, timeout=0.2)
    monkeypatch.undo()
    assert sender.lost
    with pytest.raises(sglrl.WeightUpdateError, match="connect again"):
        await sender.update(weights)
    await sender.close()
    await lab.check(PROMPTS[:1], 4)


async def test_a_sender_that_is_never_closed(lab: Lab) -> None:
    address = lab.client.weights_address
    weights = lab.policies[2].model.state_dict()

    async def use() -> tuple[weakref.ref[Sender], int]:
        sender = await Sender.connect(address)
        report = await sender.update(weights)
        return weakref.ref(sender), report.version

    def run() -> int:
        found, version = asyncio.run(use())
        while found() is not None:
            gc.collect()
        return version

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        version = await asyncio.to_thread(run)
    lab.by_version[version] = lab.policies[2]
    said = [str(warning.message) for warning in caught if "never closed" in str(warning.message)]
    assert said == [
        f"the Sender connected to {address.partition('#')[0]} was never closed; use it in an "
        "'async with' block ('with' for sglrl.blocking), or call its close()"
    ]
    await lab.update(1)
    await lab.check(PROMPTS[:1], 4)


@pytest.mark.parametrize("way", ["tensors", "files"])
async def test_a_connected_client_has_the_version_of_its_own_update(lab: Lab, way: str) -> None:
    """The status message with the new version may arrive after the update's report."""
    async with sglrl.connect(lab.client.address) as other:
        other.requests.driver.on_news = lambda: None  # type: ignore[attr-defined]
        if way == "files":
            report = await other.update_weights_from_disk(folder(lab, 1))
        else:
            report = await other.update_weights(lab.policies[1].model)
        assert other.weight_version == report.version
    lab.by_version[report.version] = lab.policies[1]
    await lab.check(PROMPTS[:1], 4)


async def test_a_wrong_address(lab: Lab) -> None:
    address = lab.client.weights_address
    before = lab.client.weight_version
    url, _, token = address.partition("#")
    wrong = ("0" if token[0] != "0" else "1") + token[1:]
    with pytest.raises(sglrl.WeightUpdateError, match=r"no answer from.*within 0\.5 s"):
        await Sender.connect(f"{url}#{wrong}", timeout=0.5)
    with pytest.raises(sglrl.WeightUpdateError, match="no answer from"):
        await Sender.connect(f"{url}x#{token}", timeout=0.2)
    for bad in (url, f"{url}#", ""):
        with pytest.raises(sglrl.UsageError, match="weights_address"):
            await Sender.connect(bad)
    assert lab.client.weight_version == before
    await lab.check(PROMPTS[:1], 4)


async def test_killed_senders(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    """One sender is killed before its first update, one during a broadcast. A third succeeds."""
    client = lab.client
    before = client.weight_version
    async with trainer(client) as first, trainer(client) as second, trainer(client) as third:
        for one in (first, second, third):
            assert (await one.says())["result"] == "connected"
        await first.kill()
        await lab.other()
        call = asyncio.ensure_future(client.generate(input_ids=PROMPTS[0], **WANTED))
        staging = phase_event(monkeypatch, client, "stage")
        second.tell(block=folder(lab, 3))
        await staging.wait()
        assert (await second.says())["result"] == "blocked"
        # The third trainer waits for its turn.
        behind = asyncio.ensure_future(third.ask(update=folder(lab, 3)))
        await second.kill()
        done = await behind
        assert done["result"] == "updated", done
        assert done["version"] == before + 2
        assert done["workers"] == [0, 1]
        lab.by_version[before + 2] = lab.policies[3]
        await lab.check(PROMPTS[:1], 4)
        lab.check_history(await call)
    await lab.other()
    await lab.check(PROMPTS[:1], 4)


async def test_a_sharded_trainer(lab: Lab) -> None:
    """Both ranks of the trainer gather the DTensors, and one rank sends them."""
    client = lab.client
    program = str(PROGRAM.with_name("sharded_trainer_program.py"))
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    before = client.weight_version
    seed = 1 if lab.current is lab.policies[2] else 2
    ranks = [
        await asyncio.create_subprocess_exec(
            *(
                sys.executable,
                program,
                client.weights_address,
                folder(lab, seed),
                str(r),
                str(port),
            ),
            stdout=asyncio.subprocess.PIPE,
        )
        for r in range(2)
    ]
    try:
        said = await asyncio.gather(*(rank.communicate() for rank in ranks))
    finally:
        for rank in ranks:
            if rank.returncode is None:
                rank.kill()
                await rank.wait()
    assert [rank.returncode for rank in ranks] == [0, 0]
    assert int(said[0][0]) == client.weight_version == before + 1
    lab.by_version[before + 1] = lab.policies[seed]
    await lab.check(PROMPTS[:2])


async def test_the_client_is_gone(models: Path) -> None:
    """The client sends nothing any more, as if its process were killed."""
    policies = Policies(models / "gone")
    async with (
        sglrl.launch(policies[0].folder, device="cpu") as client,
        await Sender.connect(client.weights_address, device="cpu") as sender,
    ):
        weights, gate = gated(policies[1].model.state_dict())
        update = asyncio.ensure_future(sender.update(weights))
        await gate.reached()
        client.pool.driver.transport.close()
        with pytest.raises(sglrl.WeightUpdateError, match="the client has ended"):
            await update
        gate.open()
        with pytest.raises(sglrl.WeightUpdateError, match="the client has ended"):
            await sender.update(weights)
