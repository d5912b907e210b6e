"""``hosts="slurm"``, with an ``srun`` that starts its tasks in network namespaces."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from actor_classes import Values
from namespaces import Host, other_hosts
from processes import strike

import sglrl
from sglrl.hosts import started
from sglrl.hosts.slurm_nodes import SlurmNodes

from .nodes import SECONDS, hosts_of

SRUN = Path(__file__).with_name("fake_srun.py")


@pytest.fixture
def allocation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Host]]:
    """Yield the machines of an allocation of two."""
    monkeypatch.setattr(started, "_started", {})
    srun = tmp_path / "bin" / "srun"
    srun.parent.mkdir()
    srun.write_text(f'#!/bin/sh\nexec {sys.executable} {SRUN} "$@"\n')
    srun.chmod(0o755)
    monkeypatch.setenv("PATH", str(srun.parent), prepend=":")
    with other_hosts(2) as (here, machines):
        monkeypatch.setenv("SLURMD_NODENAME", here.address)
        monkeypatch.setenv("NAMESPACES", ",".join(str(machine.namespace) for machine in machines))
        monkeypatch.setenv("SLURM_JOB_ID", "17")
        monkeypatch.setenv("SLURM_JOB_NUM_NODES", "2")
        yield machines


async def test_pools_share_the_machines_of_an_allocation(allocation: list[Host]) -> None:
    """The nodes run from the first pool to the last one. A lost worker is replaced."""
    for _ in range(2):
        async with (
            sglrl.launch("fake", engine="fake", hosts="slurm", replicas=2) as client,
            sglrl.spawn(Values, hosts="slurm", replicas=2) as values,
        ):
            assert len(set(hosts_of(client))) == 2
            assert hosts_of(values) == hosts_of(client)
            strike(client.workers[0].pid, signal.SIGKILL)
            made = await client.generate(input_ids=[7, 8], n=8, max_new_tokens=4)
            assert [one.output_ids.tolist() for one in made] == [[7, 8, 7, 8]] * 8
            assert await values.add(1) == 11
            await client.wait_until_full(SECONDS)
            assert hosts_of(client) == hosts_of(values)


@pytest.mark.usefixtures("allocation")
async def test_nodes_that_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NAMESPACES", "sglrl-none,sglrl-nothing")
    with pytest.raises(sglrl.WorkerStartError, match=r"hosts='slurm': srun ended with status 1:"):
        await sglrl.spawn(Values, hosts="slurm")


@pytest.mark.usefixtures("allocation")
async def test_an_error_that_nothing_expects(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is the error of the start, at once."""
    monkeypatch.setenv("SLURM_JOB_NUM_NODES", "two")
    with pytest.raises(sglrl.WorkerStartError, match=r"hosts='slurm': ValueError: .*'two'"):
        await sglrl.spawn(Values, hosts="slurm")


@pytest.mark.parametrize(
    ("name", "host"),
    [("10.1.2.3", "10.1.2.3"), ("localhost", "0.0.0.0"), ("unknown.invalid", "0.0.0.0")],
)
def test_the_driver_is_known_by_its_name(
    name: str, host: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SLURMD_NODENAME", raising=False)
    monkeypatch.setattr("socket.gethostname", lambda: name)
    assert SlurmNodes().own_host() == host
    monkeypatch.setenv("SLURMD_NODENAME", "10.1.2.4")
    assert SlurmNodes().own_host() == "10.1.2.4"


def test_without_an_allocation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(started, "_started", {})
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    with pytest.raises(sglrl.UsageError, match="needs an allocation"):
        sglrl.spawn(Values, hosts="slurm")
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(sglrl.UsageError, match="the command srun"):
        sglrl.launch("fake", engine="fake", hosts="slurm")


@pytest.mark.parametrize("hosts", ["k8s", 7, ["a"]])
def test_hosts_that_are_not_valid(hosts: object) -> None:
    with pytest.raises(sglrl.UsageError, match=r"'ray', 'slurm' or sglrl\.Hosts"):
        sglrl.spawn(Values, hosts=hosts)  # type: ignore[arg-type]
