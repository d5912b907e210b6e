"""The watch over the network finds what it is there for."""

from __future__ import annotations

import socket

import pytest

from . import network


@pytest.mark.parametrize("host", ["192.0.2.1", "example.com"])
def test_another_machine(host: str) -> None:
    with pytest.raises(ConnectionRefusedError, match="must not use the network"):
        socket.create_connection((host, 443), 1)
    assert network.attempts
    network.attempts.clear()


def test_this_machine() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        socket.create_connection(("localhost", server.getsockname()[1]), 10).close()
    assert not network.attempts
