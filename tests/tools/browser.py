"""A headless Chromium for tests of pages."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from playwright.async_api import Browser, Page, Request, async_playwright

# Chromium looks for updates and other services unless it is told not to.
_QUIET = (
    "--no-sandbox",
    "--disable-gpu",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)


def _chromium() -> str | None:
    """Return an installed Chromium, or None for the one of Playwright, which is then installed."""
    for name in ("chromium", "chromium-browser", "google-chrome"):
        if (found := shutil.which(name)) is not None:
            return found
    install = [sys.executable, "-m", "playwright", "install", "chromium"]
    subprocess.run(install, check=True, timeout=600)
    return None


@asynccontextmanager
async def browser() -> AsyncIterator[Browser]:
    async with async_playwright() as playwright:
        chromium = playwright.chromium
        opened = await chromium.launch(executable_path=_chromium(), args=list(_QUIET))
        yield opened
        await opened.close()


def _elsewhere(request: Request, url: str) -> list[str]:
    own = url.partition("/?")[0], "data:"
    return [] if request.url.startswith(own) else [f"asked for {request.url}"]


@asynccontextmanager
async def page_in(opened: Browser, url: str) -> AsyncIterator[Page]:
    """Open a page. At the end, check that it has loaded nothing from elsewhere, and that no error
    was raised in it.
    """
    page = await opened.new_page(viewport={"width": 1400, "height": 800})
    errors: list[str] = []
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("dialog", lambda dialog: errors.append(f"a dialog: {dialog.message}"))
    # A request that the page's policy has blocked was not sent.
    page.on("requestfinished", lambda request: errors.extend(_elsewhere(request, url)))
    page.on(
        "requestfailed",
        lambda request: errors.extend(_elsewhere(request, url) if request.failure != "csp" else ()),
    )
    await page.goto(url)
    yield page
    await page.close()
    assert not errors, errors
