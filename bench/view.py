"""Time ``sglrl view``: from opening the page until many trajectories are listed, and its searches.

python -m bench.view
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from playwright.sync_api import Page, expect, sync_playwright
from rich.console import Console
from rich.table import Table

import sglrl
from sglrl.rollouts import save

TOKENS = 250
SECONDS = 120_000


def trajectories(count: int) -> Iterator[sglrl.Trajectory]:
    """Yield trajectories of two turns, in groups of 8."""
    random = np.random.default_rng(0)
    prompt, size = 50, TOKENS - 50
    mask = np.ones(size, bool)
    mask[80:120] = False
    for index in range(count):
        answer = {"role": "assistant", "content": f"The answer is {index + 7}."}
        yield sglrl.Trajectory(
            prompt_ids=random.integers(0, 400, prompt),
            response_ids=random.integers(0, 400, size),
            loss_mask=mask,
            logprobs=np.where(mask, -random.random(size), 0),
            versions=np.where(mask, index // 1000, -1),
            turns=(
                sglrl.Turn(start=0, stop=80, seconds=1.0),
                sglrl.Turn(start=120, stop=size, reward=index % 2, seconds=1.0),
            ),
            metadata={"item": index // 8, "sample": index % 8},
            messages=[{"role": "user", "content": f"What is {index} + 7?"}, answer],
        )


def measure(file: Path, count: int, chromium: str | None) -> dict[str, float]:
    """Return the seconds of each step."""
    command = [sys.executable, "-m", "sglrl", "view", str(file), "--tokenizer", "tiny"]
    begun = time.perf_counter()
    viewer = subprocess.Popen(
        [*command, "--port", "0"], stdout=subprocess.PIPE, text=True, encoding="utf-8"
    )
    assert viewer.stdout is not None
    try:
        found = re.search(r"http://\S+", viewer.stdout.readline())
        assert found is not None
        seconds = {"the command prints the address": time.perf_counter() - begun}
        with sync_playwright() as playwright:
            browser = playwright.chromium.launch(
                executable_path=chromium,
                args=["--no-sandbox", "--disable-gpu", "--disable-background-networking"],
            )
            page = browser.new_page()
            begun = time.perf_counter()
            page.goto(found.group())
            page.locator("#space .row").first.wait_for(timeout=SECONDS)
            seconds["the first rows are shown"] = time.perf_counter() - begun
            _counted(page, f"{count:,} of {count:,} trajectories")
            seconds["all trajectories are listed"] = time.perf_counter() - begun
            expect(page.locator("#count")).not_to_contain_text("loading", timeout=SECONDS)
            begun = time.perf_counter()
            page.locator("#rows").evaluate("(list) => (list.scrollTop = list.scrollHeight)")
            last = page.locator(f'#space .row[data-row="{count - 1}"]')
            last.wait_for(timeout=SECONDS)
            seconds["scroll to the last row"] = time.perf_counter() - begun
            for filter_, matched in (
                (f"item={count // 16}", 8),
                (f'"answer is {count // 2}."', 1),
            ):
                begun = time.perf_counter()
                page.fill("#filter", filter_)
                _counted(page, f"{matched:,} of {count:,} trajectories")
                seconds[f"filter {filter_}"] = time.perf_counter() - begun
            browser.close()
        return seconds
    finally:
        viewer.terminate()
        viewer.wait()


def _counted(page: Page, text: str) -> None:
    pattern = re.compile("^" + re.escape(text) + r"(, loading tokenizer \.\.\.)?$")
    expect(page.locator("#count")).to_have_text(pattern, timeout=SECONDS)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trajectories", type=int, default=100_000)
    parser.add_argument("--chromium", help="the executable; without it, that of Playwright")
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "many.traj")
        save(file, trajectories(chosen.trajectories))
        size = file.stat().st_size / 1e6
        seconds = measure(file, chosen.trajectories, chosen.chromium)
    title = (
        f"sglrl view with {chosen.trajectories:,} trajectories of {TOKENS} tokens, {size:.0f} MB"
    )
    table = Table("step", "seconds", title=title)
    for step, taken in seconds.items():
        table.add_row(step, f"{taken:.2f}")
    Console().print(table)


if __name__ == "__main__":
    main()
