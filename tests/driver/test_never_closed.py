"""Programs that never close their clients and pools: they exit by themselves and leave nothing."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap

import pytest
from processes import wait_for_end

OPENERS = {
    "launch": 'sglrl.launch("fake", engine="fake", replicas=2)',
    "tcp": 'sglrl.launch("fake", engine="fake", replicas=2, address="tcp")',
    "spawn": "sglrl.spawn(Echo, replicas=2)",
}
WARNINGS = {
    "launch": "the Client of fake",
    "tcp": "the Client of fake",
    "spawn": "the ActorHandle of Echo",
}

BEGIN = """
import asyncio, gc, os, select, sys
import sglrl
from sglrl.driver import fork_server

class Echo(sglrl.Actor):
    @sglrl.endpoint
    async def say(self, text: str) -> str:
        return text

def show(*pids):
    print("pids", *pids, flush=True)
    return pids

def servers():
    return [server.process.pid for server in fork_server._servers.values()]

def pids_of(client):
    return show(*(worker.pid for worker in client.workers), *servers())

def wait_for_end(pids):
    for pid in pids:
        try:
            fd = os.pidfd_open(pid)
        except ProcessLookupError:
            continue
        poll = select.poll()
        poll.register(fd, select.POLLIN)
        assert poll.poll(20_000), f"{pid} is still there"
"""


def run(program: str, *options: str, before: str = "") -> tuple[str, str]:
    """Return what a program writes to stdout and stderr.

    The program must exit within a minute. Its processes must exit with it.

    Args:
        before: code that runs before sglrl is imported.
    """
    options = options or ("-W", "always::ResourceWarning")
    done = subprocess.run(
        [sys.executable, *options, "-c", before + BEGIN + textwrap.dedent(program)],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
        env={**os.environ, "SGLRL_PROGRESS": "0"},
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    pids = {int(pid) for line in lines if line.startswith("pids") for pid in line.split()[1:]}
    assert pids
    assert wait_for_end([*pids], 10.0) == []
    return "\n".join(line for line in lines if not line.startswith("pids")), done.stderr


def assert_warned(errors: str, warning: str) -> None:
    (line,) = [line for line in errors.splitlines() if "was never closed" in line]
    assert f"ResourceWarning: {warning}" in line
    assert "was never closed; use it in an 'async with' block" in line
    assert line.endswith("or call its close()")


@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
@pytest.mark.parametrize("what", OPENERS)
def test_the_loop_has_ended(what: str, loop: str) -> None:
    out, errors = run(f"""
        async def main():
            client = await {OPENERS[what]}.__aenter__()
            return pids_of(client)

        import {loop}
        pids = {loop}.run(main())
        gc.collect()
        # All but the fork server, which other pools may use.
        wait_for_end(pids[:-1])
        (server,) = fork_server._servers.values()
        print(server.alive, list(server.folder.glob("pool-*")))
    """)
    assert out == "True []"
    assert_warned(errors, WARNINGS[what])


@pytest.mark.parametrize("what", OPENERS)
@pytest.mark.parametrize(
    "options", [("-X", "dev"), ("-W", "error::ResourceWarning"), ("-W", "always::ResourceWarning")]
)
def test_the_interpreter_exits(what: str, options: tuple[str, str]) -> None:
    out, errors = run(
        f"""
        async def main():
            global client
            client = await {OPENERS[what]}.__aenter__()
            pids_of(client)

        asyncio.run(main())
        print("exits")
        """,
        *options,
    )
    assert out == "exits"
    assert_warned(errors, WARNINGS[what])


@pytest.mark.parametrize("what", OPENERS)
def test_nothing_warns_of_what_was_closed(what: str) -> None:
    out, errors = run(
        f"""
        async def main():
            async with {OPENERS[what]} as client:
                pids_of(client)

        asyncio.run(main())
        gc.collect()
        """,
        "-W",
        "error::ResourceWarning",
    )
    assert (out, errors) == ("", "")


def test_another_client_is_opened_meanwhile() -> None:
    out, errors = run("""
        async def main(close):
            client = await sglrl.launch("fake", engine="fake").__aenter__()
            pids = pids_of(client)
            gc.collect()
            print((await client.generate(input_ids=[7], max_new_tokens=1)).output_ids)
            if close:
                await client.close()
            return pids

        pids = asyncio.run(main(close=False))
        asyncio.run(main(close=True))
        wait_for_end(pids[:-1])
    """)
    assert out == "[7]\n[7]"
    assert_warned(errors, "the Client of fake")


def test_a_forked_process_collects_its_copy() -> None:
    out, errors = run("""
        client = None

        async def main():
            global client
            client = await sglrl.launch("fake", engine="fake").__aenter__()
            pids_of(client)
            for collects in (True, False):
                child = os.fork()
                if not child:
                    asyncio.set_event_loop(None)
                    raise SystemExit(3)
                # Flushed: the next child has a copy of what is not.
                print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
            print((await client.generate(input_ids=[7], max_new_tokens=1)).output_ids)

        try:
            asyncio.run(main())
        except SystemExit:
            # The copy: dropped, and collected.
            client = None
            gc.collect()
            raise
        print("the parent ends", flush=True)
    """)
    assert out == "3\n3\n[7]\nthe parent ends"
    assert_warned(errors, "the Client of fake")


REMOTE = """
    async def main():
        async with sglrl.launch("fake", engine="fake") as pool:
            pids_of(pool)
            await asyncio.to_thread(remote, pool.address)
            # It is still there for others.
            print((await pool.generate(input_ids=[7], max_new_tokens=1)).output_ids)
"""


def test_a_client_in_another_process() -> None:
    out, errors = run(
        textwrap.dedent(REMOTE)
        + textwrap.dedent("""
        import weakref

        async def use(address):
            client = await sglrl.connect(address).__aenter__()
            print((await client.generate(input_ids=[8], max_new_tokens=1)).output_ids)
            return weakref.ref(client.pool.driver.transport._dealer.socket)

        def remote(address):
            socket = asyncio.run(use(address))
            gc.collect()
            print(socket() is None)

        asyncio.run(main())
        """)
    )
    assert out == "[8]\nTrue\n[7]"
    assert_warned(errors, "the Client connected to ipc://")
    assert "#" not in errors, "the address holds a secret"


def test_a_client_in_another_process_that_exits() -> None:
    out, errors = run(
        textwrap.dedent(REMOTE)
        + textwrap.dedent("""
        import subprocess

        PROGRAM = '''
        import asyncio, sys, sglrl
        client = sglrl.connect(sys.argv[1])
        asyncio.run(client.__aenter__())
        '''

        def remote(address):
            arguments = ["-W", "always::ResourceWarning", "-c", PROGRAM, address]
            print(subprocess.run([sys.executable, *arguments], timeout=300).returncode)

        asyncio.run(main())
        """)
    )
    assert out == "0\n[7]"
    assert_warned(errors, "the Client connected to ipc://")
    assert "#" not in errors, "the address holds a secret"


BLOCKING = 'sglrl.blocking("fake", engine="fake")'


def test_a_blocking_client_is_dropped() -> None:
    out, errors = run(f"""
        import threading

        client = {BLOCKING}
        client.__enter__()
        pids = pids_of(client)
        print(client.generate(input_ids=[7], max_new_tokens=1).output_ids)
        thread = client.thread
        del client
        gc.collect()
        wait_for_end(pids[:-1])
        thread.join(300)
        print(thread.is_alive())
    """)
    assert out == "[7]\nFalse"
    assert_warned(errors, "the Client of fake")


@pytest.mark.parametrize(
    "before",
    ["", "import asyncio, weakref; weakref.finalize(asyncio, print)"],
    ids=["sglrl-first", "weakref-first"],
)
def test_a_blocking_client_is_left_when_the_interpreter_exits(before: str) -> None:
    """The order in which modules register their functions with atexit has no effect."""
    out, errors = run(
        f"""
        client = {BLOCKING}
        client.__enter__()
        pids_of(client)
        print(client.generate(input_ids=[7], max_new_tokens=1).output_ids)
        """,
        before=before,
    )
    assert out.strip() == "[7]"
    assert_warned(errors, "the Client of fake")
