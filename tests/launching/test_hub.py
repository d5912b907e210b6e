"""A model on the hub cannot be fetched: one error of a few lines, before any worker starts."""

from __future__ import annotations

import contextlib
import os
import re
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from huggingface_hub import snapshot_download

from sglrl.inference.hub_errors import unfetched

NAME = "some-owner/no-such-model"
LAUNCHES = """
import asyncio, sglrl

async def main():
    async with sglrl.launch(MODEL, device="cpu"):
        pass

try:
    asyncio.run(main())
except sglrl.ModelError as error:
    print(error)
from sglrl.driver import fork_server
print("fork servers:", len(fork_server._servers))
"""


CASES = {
    "offline": ({"HF_HUB_OFFLINE": "1"}, "offline mode is enabled"),
    "nobody listens": ({"HF_ENDPOINT": "http://127.0.0.1:9"}, "Connection refused"),
    "unknown model": ({}, "404"),
    "gated model": ({}, "403"),
    "silent": ({}, "timed out|no answer within"),
}


@pytest.mark.parametrize("what", ["model", "tokenizer"])
@pytest.mark.parametrize("name", CASES)
def test_one_error_before_workers_start(name: str, what: str, qwen: Path) -> None:
    settings, says = CASES[name]
    given = f"{NAME!r}" if what == "model" else f"{str(qwen)!r}, tokenizer_path={NAME!r}"
    with Hub({"unknown model": 404, "gated model": 403}.get(name, 0)) as hub:
        # The test needs its own process, because the library reads the variables at its import.
        program = subprocess.run(
            [sys.executable, "-c", LAUNCHES.replace("MODEL", given)],
            env={**os.environ, "HF_ENDPOINT": hub.address, **settings},
            capture_output=True,
            text=True,
            timeout=300,
        )
    first, *causes, advice, servers = program.stdout.splitlines()
    assert first == f"{NAME!r} could not be fetched from the hub:"
    assert re.search(says, causes[0])
    assert advice.startswith("Check its name and the network")
    assert advice.endswith("The models 'tiny' and 'smollm2' need no hub.")
    assert servers == "fork servers: 0"
    assert program.stderr == ""


class Hub:
    """A hub on this machine that answers every request with one status. 0: it never answers."""

    def __init__(self, status: int) -> None:
        self._status = status
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.address = f"http://127.0.0.1:{self._socket.getsockname()[1]}"

    def __enter__(self) -> Hub:
        if self._status:
            threading.Thread(target=self._serve, daemon=True).start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._socket.close()

    def _serve(self) -> None:
        with contextlib.suppress(OSError):  # closed
            while True:
                connection, _ = self._socket.accept()
                with connection:
                    request = b""
                    while b"\r\n\r\n" not in request and (part := connection.recv(1 << 16)):
                        request += part
                    fields = "Content-Length: 0\r\nConnection: close\r\n"
                    connection.sendall(f"HTTP/1.1 {self._status} No\r\n{fields}\r\n".encode())


def test_only_what_comes_from_the_hub(tmp_path: Path) -> None:
    try:
        snapshot_download(NAME, cache_dir=tmp_path, local_files_only=True)
    except Exception as error:
        said, local = unfetched(NAME, error), unfetched(str(tmp_path), error)
    assert said is not None
    assert said.startswith(f"{NAME!r} could not be fetched from the hub:\n  LocalEntryNotFoundErr")
    assert local is None
    assert unfetched(NAME, RuntimeError("no room for the model")) is None


def test_what_is_raised_on_the_way_is_told_once() -> None:
    hub = type("HubError", (Exception,), {"__module__": "huggingface_hub.errors"})
    with pytest.raises(OSError, match="cannot") as caught:
        try:
            try:
                raise ConnectionError("no route")
            except ConnectionError as error:
                raise hub("no route") from error
        except hub as error:
            raise OSError("cannot load\nit") from error
    said = unfetched(NAME, caught.value)
    assert said is not None
    assert said.splitlines()[1:-1] == ["  OSError: cannot load", "  HubError: no route"]
