"""Run SGLang's own HTTP server, as ``python -m sglang.launch_server`` does.

``python -m bench.sglang_server ARGUMENTS FILE`` writes one byte to the pipe FILE when the server is
ready, so that its client need not poll.
"""

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
def sglang_server(arguments: Mapping[str, Any]) -> Iterator[int]:
    """Run a server with these ``ServerArgs`` on loopback, and yield its port.

    Raises:
        RuntimeError: the server exits before it is ready.
    """
    port = free_port()
    given = json.dumps({**arguments, "host": "127.0.0.1", "port": port})
    read_end, write_end = os.pipe()
    server = subprocess.Popen(
        [sys.executable, "-m", "bench.sglang_server", given, str(write_end)],
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


def _serve(arguments: Mapping[str, Any], descriptor: int) -> None:
    os.set_inheritable(descriptor, False)
    from sglang.srt.entrypoints.http_server import launch_server
    from sglang.srt.server_args import ServerArgs
    from sglang.srt.utils import kill_process_tree

    from . import sglang_cpu

    options: dict[str, Any] = {}
    if arguments["device"] == "cpu":
        options["run_scheduler_process_func"] = sglang_cpu.run_scheduler_process
    try:
        launch_server(
            ServerArgs(**arguments),
            launch_callback=lambda: os.write(descriptor, b"\n"),
            **options,
        )
    finally:
        kill_process_tree(os.getpid(), include_parent=False)


if __name__ == "__main__":
    _serve(json.loads(sys.argv[1]), int(sys.argv[2]))
