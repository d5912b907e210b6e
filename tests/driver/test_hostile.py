"""Peers that violate the protocol, against a pool with real worker processes."""

from __future__ import annotations

import asyncio
import logging
import os
import stat
from pathlib import Path

import msgspec
import pytest

import sglrl
from sglrl.driver.driver import Driver
from sglrl.transport.curve_keys import make_keys, read_client_keys, read_driver_keys
from sglrl.transport.zmq import ZmqDealer, ZmqRouter
from sglrl.weights import Sender
from sglrl.weights.channel import WeightChannel
from sglrl.wire.calls import PROTOCOL_VERSION, Item, ItemKind, Ready, Results
from sglrl.wire.codec import decode_to_rank, encode
from sglrl.wire.weights import (
    Describe,
    ModelDescription,
    RankAnswer,
    RankHello,
    RankSettings,
    TensorSpec,
)

IDS = [3, 1, 4]


async def works(client: sglrl.Client) -> None:
    made = await asyncio.gather(
        *(client.generate(input_ids=IDS, max_new_tokens=6, worker=w.id) for w in client.workers)
    )
    assert [c.output_ids.tolist() for c in made] == [IDS * 2] * len(client.workers)


def router_of(client: sglrl.Client) -> ZmqRouter:
    transport = client.pool.driver.transport
    assert isinstance(transport, ZmqRouter)
    return transport


async def test_the_sockets_are_in_a_folder_that_is_closed_to_others() -> None:
    async with sglrl.launch("fake", engine="fake") as client:
        path = router_of(client).address.removeprefix("ipc://")
        assert stat.S_ISSOCK(os.stat(path).st_mode)
        pool = os.path.dirname(path)
        for folder in (pool, os.path.dirname(pool)):
            assert stat.S_IMODE(os.stat(folder).st_mode) == 0o700
        await works(client)


async def test_messages_that_are_too_large(caplog: pytest.LogCaptureFixture) -> None:
    """The driver drops a stranger's large message and its connection. A large call is not sent."""
    limit = 1 << 16
    async with sglrl.launch(
        "fake", engine="fake", replicas=2, max_message_bytes=limit, context_length=1 << 17
    ) as client:
        await works(client)
        gone = asyncio.Event()
        loop = asyncio.get_running_loop()
        hostile = ZmqDealer(
            router_of(client).address,
            b"hostile",
            max_message_bytes=limit,
            on_break=lambda: loop.call_soon_threadsafe(gone.set),
        )
        hostile.send([b"x" * (limit + 1)])
        await gone.wait()
        hostile.close()
        with pytest.raises(sglrl.MessageTooLarge):
            await client.generate(input_ids=[1] * (limit // 4), max_new_tokens=1)
        await works(client)
        assert client.pool.driver.dropped.count == 0
        assert [w.state for w in client.workers] == ["ready"] * 2


async def test_a_stranger_that_knows_everything_but_a_name() -> None:
    """An unknown peer sends valid messages for existing calls."""
    async with sglrl.launch(
        "fake", engine="fake", address="tcp", replicas=2, step_seconds=0.01, tokens_per_step=1
    ) as client:
        driver = client.pool.driver
        stranger = ZmqDealer(router_of(client).address, b"0-0", max_message_bytes=1 << 20)
        work = asyncio.create_task(works(client))
        await asyncio.sleep(0)
        held = list(driver.fabric.calls)
        stranger.send([encode(Ready(PROTOCOL_VERSION, 1, 100, ["generate"]))])
        stranger.send([encode(Results([Item(id_, ItemKind.CANCELLED) for id_ in held]))])
        await work
        while driver.dropped.count < 2:
            await works(client)
        assert driver.fabric.stray_items == 0
        stranger.close()


async def test_keys_from_the_user_to_the_workers(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "keys"
    make_keys(folder)
    with caplog.at_level(logging.WARNING):
        async with sglrl.launch(
            "fake", engine="fake", replicas=2, address="tcp://0.0.0.0:*", keys=folder
        ) as client:
            await works(client)
            router = router_of(client)
            plain = ZmqDealer(router.address, b"plain", max_message_bytes=1 << 20)
            plain.send([b"hello"])
            known = ZmqDealer(
                router.address, b"known", max_message_bytes=1 << 20, keys=read_client_keys(folder)
            )
            known.send([b"hello"])
            while client.pool.driver.dropped.count < 1:
                await works(client)
            for end in (plain, known):
                end.close()
            await works(client)
            assert client.pool.driver.dropped.count == 1
            assert client.weights_address.startswith("tcp://")
            assert "0.0.0.0" not in client.weights_address
    assert "insecure" not in caplog.text


async def test_without_keys_it_does_not_even_begin(tmp_path: Path) -> None:
    with pytest.raises(sglrl.UsageError, match=r"'sglrl keys DIR' and pass keys='DIR'"):
        sglrl.launch("fake", engine="fake", address="tcp://0.0.0.0:*")
    with pytest.raises(sglrl.InvalidKeys, match="there is no folder"):
        sglrl.launch("fake", engine="fake", address="tcp://0.0.0.0:*", keys=tmp_path / "none")
    with pytest.raises(sglrl.UsageError, match="keys= is for tcp"):
        sglrl.launch("fake", engine="fake", keys=tmp_path)
    with pytest.raises(sglrl.UsageError, match="not a loopback address"):
        await Sender.connect("tcp://192.0.2.1:5#token", device="cpu")


async def test_a_remote_sender_needs_a_key_and_the_token(tmp_path: Path) -> None:
    folder, other = tmp_path / "keys", tmp_path / "other"
    make_keys(folder)
    make_keys(other)
    # This client knows the driver's right public key, but the driver does not know the client's
    # key.
    (other / "driver.public").write_text((folder / "driver.public").read_text())
    router = ZmqRouter(
        "tcp://127.0.0.1:*", max_message_bytes=1 << 20, keys=read_driver_keys(folder)
    )
    driver = Driver(router)
    channel = WeightChannel(lambda worker, reason: None)
    channel.attach(driver, router.outer_address)
    driver.start()
    driver.workers.add(0, b"w")
    channel.add_rank(0, 0, b"w/0")
    rank = ZmqDealer(router.address, b"w/0", max_message_bytes=1 << 20, keys=router.worker_keys)

    def answer(frames: list[bytes]) -> None:
        message = decode_to_rank(frames[0])
        assert isinstance(message, Describe)
        body = encode(ModelDescription([TensorSpec("w", "float32", (4,))], []))
        rank.send([encode(RankAnswer(message.id, "describe", None, msgspec.Raw(body)))])

    rank.start(answer)
    settings = RankSettings(device="cpu", uuid="", torch="", nccl="", environment={})
    rank.send([encode(RankHello(settings))])

    sender = await Sender.connect(channel.address, keys=folder, device="cpu")
    assert sender.weight_version == 0
    await sender.close()
    dropped = driver.dropped.count
    for address, keys, words in (
        (channel.address, other, "or the driver does not accept this key"),
        (channel.address[:-1], folder, "after '#' in the address is not its token"),
        (channel.address, None, "no answer from"),
    ):
        with pytest.raises(sglrl.WeightUpdateError, match=words):
            await Sender.connect(address, keys=keys, device="cpu", timeout=0.5)
    # Only the sender with a valid key and a wrong token got a message through.
    assert driver.dropped.count > dropped
    assert router.refused >= 1
    assert len(channel._senders) == 0
    rank.close()
    await channel.close()
    driver.close()
    router.close()
