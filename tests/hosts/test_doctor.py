"""``sglrl doctor --hosts``, on the program's and on the node's machine."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path

import msgspec
import pytest
import torch

import sglrl
from sglrl.driver.environment import environment, limits
from sglrl.tools.doctor import Finding
from sglrl.tools.doctor_hosts import examine_hosts
from sglrl.transport.curve_keys import add_client, make_keys

from .nodes import NodeProcess, free_addresses, nodes, until_there

ANY = "tcp://127.0.0.1:*"


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    """A program's folder of keys, with a key of a node."""
    folder = tmp_path / "keys"
    make_keys(folder)
    add_client(folder, "node")
    return folder


async def examine(address: str, keys: Path | None) -> list[Finding]:
    return await asyncio.to_thread(examine_hosts, address, None if keys is None else str(keys), 3.0)


def steps(findings: list[Finding]) -> list[tuple[str, bool]]:
    return [(finding.name, finding.ok) for finding in findings]


async def test_a_node_that_would_be_used(keys: Path) -> None:
    async with sglrl.Hosts(ANY, keys=keys) as hosts:
        found = await examine(hosts.address, keys / "node.secret")
        assert steps(found) == [(n, True) for n in ("keys", "port", "handshake", "versions")]
        assert hosts.hosts == []
    async with sglrl.Hosts(ANY) as hosts:
        assert all(finding.ok for finding in await examine(hosts.address, None))


async def test_a_key_that_is_missing(keys: Path, tmp_path: Path) -> None:
    make_keys(tmp_path / "other")
    async with sglrl.Hosts(ANY, keys=keys) as hosts:
        for key, step, why in (
            (keys / "nobody.secret", "keys", "there is no file"),
            (tmp_path / "other" / "trainer.secret", "handshake", "driver.public here is not"),
            (None, "handshake", "only one side uses keys"),
        ):
            *_, last = await examine(hosts.address, key)
            assert (last.name, last.ok) == (step, False)
            assert why in last.detail
        # The program has started before this key was added.
        add_client(keys, "late")
        *_, last = await examine(hosts.address, keys / "late.secret")
        assert (last.name, last.ok) == ("handshake", False)
        assert "the key is refused: copy the .public file" in last.detail


async def test_a_port_that_is_closed() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    *_, last = await examine(f"tcp://127.0.0.1:{port}", None)
    assert (last.name, last.ok) == ("port", False)
    assert "nothing listens at" in last.detail


async def test_another_program_at_the_port() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        *_, last = await examine(f"tcp://127.0.0.1:{server.getsockname()[1]}", None)
    assert (last.name, last.ok) == ("handshake", False)
    assert "is it another program?" in last.detail


async def test_versions_that_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    other = msgspec.structs.replace(environment(), python="3.0")
    async with sglrl.Hosts(ANY) as hosts:
        with monkeypatch.context() as patch:
            patch.setattr("sglrl.hosts.hosts.__version__", "9.9.9")
            *_, last = await examine(hosts.address, None)
            assert not last.ok
            assert "here 9.9.9" in last.detail
        monkeypatch.setattr("sglrl.hosts.hosts.environment", lambda: other)
        *_, last = await examine(hosts.address, None)
        assert last.ok
        assert "the program has Python 3.0" in last.detail
        other = msgspec.structs.replace(environment(), torch="1.2.3")
        *_, last = await examine(hosts.address, None)
        assert "the program has torch 1.2.3" in last.detail
        assert "weights cannot be sent from memory" in last.detail


def test_what_works_with_other_versions() -> None:
    own = environment()
    assert own.torch == torch.__version__.partition("+")[0]
    assert own.nccl == ".".join(map(str, torch.cuda.nccl.version()))

    def found(*, gpus: bool = True, **changes: str) -> list[str]:
        other = msgspec.structs.replace(own, **changes)
        return [limit.partition(",")[0] for limit in limits(other, gpus=gpus)]

    assert found() == found(sglang="/other") == []
    assert found(python="3.0", torch="1", nccl="2") == ["Python 3.0", "torch 1", "NCCL 2"]
    assert found(nccl="2", gpus=False) == []
    # A side without torch sends no weights.
    assert found(torch="", nccl="") == []


async def test_a_node_with_another_torch(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    own = environment()
    monkeypatch.setattr(
        "sglrl.driver.environment.environment",
        lambda: msgspec.structs.replace(own, torch="1.2.3"),
    )
    async with sglrl.Hosts(ANY) as hosts:
        with nodes(hosts.address, "a"):
            await until_there(hosts, 1)
            said = f"torch {own.torch}, here 1.2.3: weights cannot be sent from memory"
            assert hosts.hosts[0].limits == [said]
            assert f"host a has {said}" in caplog.text


def test_the_side_of_the_program(keys: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"tcp://127.0.0.1:{server.getsockname()[1]}"
    *_, last = examine_hosts(address, str(keys), 1.0)
    assert (last.name, last.ok) == ("nodes", False)
    assert "none within 1 s" in last.detail
    own, late = ("--keys", str(keys / "node.secret")), ("--keys", str(keys / "late.secret"))
    add_client(keys, "late")
    (keys / "late.public").unlink()
    with nodes(address, "a", options=own), nodes(address, "stranger", options=late):
        found = examine_hosts(address, str(keys), 10.0)
    assert ("node a", True) in steps(found)
    assert ("strangers", False) in steps(found)


def test_nodes_that_listen(keys: Path) -> None:
    address, there, closed = free_addresses(3)
    node = NodeProcess(f"--listen={there}", "a", "--keys", str(keys / "node.secret"))
    with node.process:
        try:
            node.says("waiting for a program")
            found = examine_hosts(address, str(keys), 3.0, [there, closed])
            alone = examine_hosts(address, str(keys), 3.0, [there])
        finally:
            node.process.kill()
    assert steps(found)[2:] == [
        ("port", True), ("port", False), ("node a", True), ("nodes", False)
    ]  # fmt: skip
    assert f"nothing listens at {closed}" in found[3].detail
    assert "1 of 2 have connected" in found[-1].detail
    assert all(finding.ok for finding in alone)
    with pytest.raises(sglrl.UsageError, match="keys of the program"):
        examine_hosts(address, None, 1.0, [there])
