"""Every operation of ``Client`` reaches every door."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest

import sglrl
from sglrl.client.client import Client
from sglrl.control.operations import operations_of, public_operations
from sglrl.errors import UsageError

KNOWN = {
    "abort", "add_workers", "flush_cache", "list_loras", "load_lora", "pause", "remove_worker",
    "resume", "server_info", "sleep", "start_profile", "stats", "stop_profile", "unload_lora",
    "update_weights_from_disk", "wait_until_full", "wake",
}  # fmt: skip


def test_operations() -> None:
    assert public_operations(Client).keys() >= KNOWN
    for name, spec in operations_of(Client).items():
        # The schemas are made on first use, so make each one.
        assert all((spec.arguments, spec.result, spec.fields)), name


def test_the_blocking_client_has_every_method_and_property() -> None:
    public = [name for name in dir(Client) if not name.startswith("_")]
    assert set(public) <= set(dir(sglrl.BlockingClient))
    session = [name for name in dir(sglrl.Session) if not name.startswith("_")]
    assert set(session) <= set(dir(sglrl.BlockingSession))


async def test_clients_in_other_processes_and_http() -> None:
    async with (
        sglrl.launch("tiny", engine="fake", replicas=2, vocab_size=512) as pool,
        sglrl.connect(pool.address) as remote,
        sglrl.serve(pool) as gateway,
        httpx.AsyncClient(base_url=gateway.url, timeout=60) as http,
    ):

        async def post(name: str, **arguments: Any) -> httpx.Response:
            return await http.post(f"/pool/{name}", json=arguments)

        here = [(one.worker, one.engine.running) for one in await pool.stats()]
        assert [(one.worker, one.engine.running) for one in await remote.stats()] == here
        found = (await post("stats")).json()["result"]
        assert [(one["worker"]) for one in found] == [worker for worker, _ in here]
        assert [type(one) for one in await remote.broadcast("stats")] == [sglrl.EngineStats] * 2
        assert await remote.broadcast("server_info") == await pool.server_info()
        assert (await post("pause", mode="retract")).status_code == 200
        call = pool.generate(input_ids=[1], max_new_tokens=1, timeout=0.3)
        with pytest.raises(sglrl.DeadlineExceeded, match="generation is paused"):
            await call
        await remote.resume()
        assert (await remote.generate(input_ids=[1], max_new_tokens=1)).output_ids.size == 1
        wrong = await post("pause", mode="x")
        assert wrong.status_code == 400
        assert "mode must be one of" in wrong.text
        wrong = await post("pause", mod="retract")
        assert wrong.status_code == 400
        assert "'mod' is not supported" in wrong.text
        assert (await post("_describe", timeout=1)).status_code == 404
        with pytest.raises(UsageError, match=r"pause\(\): got an unexpected keyword argument"):
            await remote.pause(mod="x")  # type: ignore[call-arg]
        with pytest.raises(UsageError, match=r"remove_worker\(\): missing a required argument"):
            await remote.remove_worker()  # type: ignore[call-arg]
        paths = (await http.get("/openapi.json")).json()["paths"]
        served = {f"/pool/{name}" for name, spec in public_operations(Client).items() if spec.http}
        assert served == {path for path in paths if path.startswith("/pool/")}
        # All but those that end processes, and those that show tokens.
        assert len(served) == len(public_operations(Client)) - 5 - 3


async def test_errors_of_operations(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client in another process gets every error. It would wait for its deadline otherwise."""

    async def broken() -> None:
        raise KeyError("x")

    async with (
        sglrl.launch("fake", engine="fake") as pool,
        sglrl.connect(pool.address) as remote,
    ):
        monkeypatch.setattr(pool, "list_loras", broken)
        with pytest.raises(sglrl.RemoteError, match="KeyError: 'x'"):
            await remote.list_loras()
        for client in (pool, remote):
            with pytest.raises(UsageError, match="timeout must be a number of seconds"):
                await client.pause(timeout="x")  # type: ignore[arg-type]


async def test_the_command_line(tmp_path: Path) -> None:
    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "sglrl", "call", *arguments]
        return subprocess.run(
            command, capture_output=True, text=True, timeout=300, check=False, cwd=tmp_path
        )

    listed = run()
    assert listed.returncode == 0
    for name in public_operations(Client):
        assert f" {name} " in listed.stdout or f"\n{name} " in listed.stdout, name
    async with sglrl.launch("fake", engine="fake") as pool:
        import asyncio

        made = await asyncio.to_thread(run, pool.address, "stats")
        assert [one["worker"] for one in json.loads(made.stdout)["result"]] == [0]
        made = await asyncio.to_thread(run, pool.address, "pause", "mode=x")
        assert made.returncode == 2
        assert "mode must be one of" in made.stderr
        made = await asyncio.to_thread(run, pool.address, "paus")
        assert made.returncode == 2
        assert "unknown operation 'paus'" in made.stderr
        made = await asyncio.to_thread(run, pool.address, "abort", "worker=zero")
        assert made.returncode == 2
        assert "worker" in made.stderr
