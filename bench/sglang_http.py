"""Run ``bench.sglang_server`` while a peer is measured."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from typing import Any

from .parts import ROOT


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@contextlib.contextmanager
def serve(arguments: Mapping[str, Any]) -> Iterator[int]:
    """Run a server with these ``ServerArgs`` on loopback, and yield its port.

    Raises:
        RuntimeError: the server exits before it is ready.
    """
    port = free_port()
    read_end, write_end = os.pipe()
    server = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "bench.sglang_server",
            json.dumps({**arguments, "host": "127.0.0.1", "port": port}),
            str(write_end),
        ],
        cwd=ROOT,
        pass_fds=(write_end,),
    )
    os.close(write_end)
    try:
        with os.fdopen(read_end, "rb") as pipe:
            if not pipe.read(1):
                raise RuntimeError(f"the server ended with status {server.wait()}")
        yield port
    finally:
        server.terminate()
        try:
            server.wait(timeout=20)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()
