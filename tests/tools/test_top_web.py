"""``sglrl top --web``: who may open it, and that a browser gets the screen."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager

import aiohttp
import pytest_asyncio
from gateway.test_metrics import free_port

import sglrl
from sglrl.tools.pools import POOL_VARIABLE

from .browser import browser, page_in


@pytest_asyncio.fixture
async def client() -> AsyncIterator[sglrl.Client]:
    async with sglrl.launch("tiny", engine="fake", replicas=3) as client:
        yield client


@contextmanager
def serving(address: str) -> Iterator[str]:
    """Run ``sglrl top --web`` while the block runs, and provide the address of its page."""
    command = [sys.executable, "-m", "sglrl", "top", "--web", "--port", str(free_port())]
    environment = {**os.environ, POOL_VARIABLE: address}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    try:
        assert process.stdout is not None
        found = re.search(r"http://\S+", process.stdout.readline())
        assert found is not None
        yield found.group()
    finally:
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=60)


@contextlib.asynccontextmanager
async def page_of(client: sglrl.Client) -> AsyncIterator[str]:
    context = serving(client.address)
    url = await asyncio.to_thread(context.__enter__)
    try:
        # The server listens soon after it has printed its address. No event reports that.
        async with asyncio.timeout(60), aiohttp.ClientSession() as http:
            while True:
                with contextlib.suppress(aiohttp.ClientConnectionError):
                    await http.get(url.partition("?")[0])
                    break
                await asyncio.sleep(0.05)
        yield url
    finally:
        await asyncio.to_thread(context.__exit__, None, None, None)


async def test_only_those_who_know_the_key_see_the_screen(client: sglrl.Client) -> None:
    async with page_of(client) as url:
        base = url.partition("?")[0]
        jar = aiohttp.CookieJar(unsafe=True)
        async with (
            aiohttp.ClientSession() as stranger,
            aiohttp.ClientSession(cookie_jar=jar) as http,
        ):
            for path in ("", "ws", "static/css/xterm.css", "?key=wrong"):
                assert (await stranger.get(base + path)).status == 403
            answer = await http.get(url)
            assert answer.status == 200
            assert "connect-src 'self'" in answer.headers["Content-Security-Policy"]
            (cookie,) = jar
            assert (cookie["samesite"], cookie["httponly"]) == ("Strict", True)
            async with http.ws_connect(f"{base}ws?width=80&height=24") as screen:
                seen = b""
                async with asyncio.timeout(60):
                    while b"3 ready" not in seen:
                        message = await screen.receive()
                        seen += message.data if isinstance(message.data, bytes) else b""


async def test_a_browser_loads_nothing_from_elsewhere(client: sglrl.Client) -> None:
    async with page_of(client) as url, browser() as opened, page_in(opened, url) as page:
        await page.wait_for_selector(".xterm-screen", timeout=60_000)
        if (folder := os.environ.get("SGLRL_SCREENSHOTS")) is not None:
            await page.wait_for_timeout(3000)
            await page.screenshot(path=f"{folder}/top-web.png")
