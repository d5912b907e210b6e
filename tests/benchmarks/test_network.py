"""Hosts that a program joins, with a delay and a loss that it adds (``bench.switch``)."""

from __future__ import annotations

import socket
import time
from pathlib import Path

import pytest
from namespaces import Host, need_namespaces

from bench.network import star

ECHO = Path(__file__).with_name("echo_program.py")
DELAY = 0.02
SECONDS = 10.0


def need_switch() -> None:
    """Skip the test on a kernel without TAP interfaces, or if it may not make namespaces."""
    need_namespaces()
    if not Path("/dev/net/tun").exists():
        pytest.skip("this kernel has no TAP interfaces")


def echoes(here: Host, there: Host, port: int, count: int, wait: float) -> dict[int, float]:
    """Send datagrams, and return how long each echo took that arrived within ``wait`` seconds."""
    took: dict[int, float] = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
        sender.bind((here.address, 0))
        sent = []
        for n in range(count):
            sent.append(time.monotonic())
            sender.sendto(n.to_bytes(4, "big"), (there.address, port))
            # Not more than the queue of an interface holds.
            sender.settimeout(0.001)
            _receive(sender, sent, took)
        sender.settimeout(wait)
        while len(took) < count and _receive(sender, sent, took):
            pass
    return took


def _receive(sender: socket.socket, sent: list[float], took: dict[int, float]) -> bool:
    try:
        number = int.from_bytes(sender.recv(100), "big")
    except TimeoutError:
        return False
    took[number] = time.monotonic() - sent[number]
    return True


def test_each_packet_is_delayed() -> None:
    need_switch()
    with star(2, delay=DELAY) as (here, others):
        for other in others:
            port = other.run(ECHO, other.address).says()["port"]
            took = echoes(here, other, port, 50, SECONDS)
            assert len(took) == 50
            assert min(took.values()) >= 2 * DELAY


def test_some_packets_are_lost() -> None:
    need_switch()
    with star(1, loss=0.1) as (here, (other,)):
        port = other.run(ECHO, other.address).says()["port"]
        # Of 2,000 datagrams, 19 % do not come back. The standard deviation is 0.9 %.
        took = echoes(here, other, port, 2_000, 2.0)
        assert 0.14 < 1 - len(took) / 2_000 < 0.24


def test_links_that_are_broken() -> None:
    need_switch()
    with star(2, delay=DELAY) as (here, others):
        ports = [other.run(ECHO, other.address).says()["port"] for other in others]
        for other, port in zip(others, ports, strict=True):
            assert len(echoes(here, other, port, 5, SECONDS)) == 5
        others[0].up = False
        assert not echoes(here, others[0], ports[0], 5, 0.3)
        assert len(echoes(here, others[1], ports[1], 5, SECONDS)) == 5
        others[0].up = True
        others[1].loses = True
        assert len(echoes(here, others[0], ports[0], 5, SECONDS)) == 5
        assert not echoes(here, others[1], ports[1], 5, 0.3)
        others[1].loses = False
        assert len(echoes(here, others[1], ports[1], 5, SECONDS)) == 5
