"""Test the connection between a program and its nodes: ``sglrl doctor --hosts``.

The command runs on the program's machine or on a node's machine. The keys decide which side it
tests: a folder with ``driver.secret`` belongs to the program, and all other keys to a node.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from ..driver.environment import environment, limits
from ..errors import SglrlError, UsageError
from ..hosts.hosts import Hosts
from ..hosts.node import say_hello
from ..launching.launch import cuda_devices
from ..transport.curve_keys import DRIVER, NODE, read_client_keys, read_driver_keys
from ..transport.zmq import check_port
from ..wire.nodes import Refuse
from ..wire.processes import ClientKeys, Environment
from .doctor import Finding

_SECONDS: Final = 5.0
"""Time limit in seconds for a connection, and for an answer."""


def examine_hosts(
    address: str, keys: str | None, seconds: float, nodes: Sequence[str] = ()
) -> list[Finding]:
    """Test the connection from this side, and return a finding for each step.

    Args:
        address: the address at which the program listens for nodes.
        keys: the path of the keys of the program or of a node. None: this is a node without keys.
        seconds: time for which the program's side waits for nodes.
        nodes: the addresses of listening nodes. The program's side invites them.

    Raises:
        UsageError: ``nodes`` is given on a node's side.
    """
    if keys is not None and (Path(keys).expanduser() / f"{DRIVER}.secret").exists():
        return asyncio.run(_of_program(address, keys, seconds, nodes))
    if nodes:
        raise UsageError("--node needs --keys DIR with the keys of the program")
    return _of_node(address, keys)


def _of_node(address: str, keys: str | None) -> list[Finding]:
    """Connect to the program as a node does, but offer no GPUs or cores."""
    findings = []
    try:
        own: ClientKeys | None = None
        step = "keys"
        if keys is not None:
            own = read_client_keys(keys)
        findings.append(Finding(step, True, "none: not encrypted" if own is None else str(keys)))
        step = "port"
        check_port(address, _SECONDS)
        findings.append(Finding(step, True, f"{address} is open"))
        step = "handshake"
        answer = say_hello(address, own, _SECONDS)
        findings.append(Finding(step, True, "both sides accept the other's key"))
        step = "versions"
        if isinstance(answer, Refuse):
            findings.append(Finding(step, False, answer.reason))
        else:
            findings.append(_versions(answer.environment))
    except SglrlError as error:
        findings.append(Finding(step, False, error.message))
    return findings


def _versions(other: Environment | None) -> Finding:
    """Compare the versions of both sides. A difference is not a failure, but limits what works."""
    own = environment()
    wrong = [] if other is None else limits(other, gpus=bool(cuda_devices()))
    if wrong:
        return Finding("versions", True, f"the program has {'; '.join(wrong)}")
    return Finding("versions", True, f"sglrl {own.sglrl} and Python {own.python} on both sides")


async def _of_program(
    address: str, keys: str, seconds: float, nodes: Sequence[str]
) -> list[Finding]:
    """Listen as the program does, and report which nodes connect."""
    try:
        clients = len(read_driver_keys(keys).clients)
        findings = [Finding("keys", clients > 0, f"{clients} of nodes and clients in {keys}")]
        hosts = Hosts(address, keys=keys, nodes=nodes)
        hosts.open()
    except SglrlError as error:
        return [Finding("address", False, error.message)]
    findings.append(Finding("address", True, f"listens at {hosts.address}"))
    try:
        async with asyncio.timeout(seconds):
            while True:
                await hosts.change()
    except TimeoutError:
        pass
    for node in nodes:
        try:
            await asyncio.to_thread(check_port, node, _SECONDS)
        except SglrlError as error:
            findings.append(Finding("port", False, error.message))
        else:
            findings.append(Finding("port", True, f"{node} is open"))
    for host in hosts.hosts:
        detail = f"{len(host.gpus)} GPUs, {host.cores} cores, Python {host.python}"
        if host.limits:
            detail += f"; it has {'; '.join(host.limits)}"
        findings.append(Finding(f"node {host.name}", True, detail))
    findings += [Finding(f"node {name}", False, why) for name, why in hosts.refused.items()]
    if hosts.strangers:
        text = f"{hosts.strangers} connections with a key whose .public file is not in {keys}"
        findings.append(Finding("strangers", False, text))
    if len(hosts.hosts) + len(hosts.refused) < len(nodes):
        text = (
            f"{len(hosts.hosts)} of {len(nodes)} have connected; one whose port is open has "
            f"other keys than the pair '{NODE}' in {keys}, serves another program, or cannot reach "
            f"{hosts.address}"
        )
        findings.append(Finding("nodes", False, text))
    elif not hosts.hosts and not hosts.refused and not hosts.strangers:
        text = (
            f"none within {seconds:g} s; run 'sglrl doctor --hosts {hosts.address} --keys DIR' on "
            "a node's machine to see why"
        )
        findings.append(Finding("nodes", False, text))
    await hosts.close()
    return findings
