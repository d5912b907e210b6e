"""The page of ``sglrl view`` in headless Chromium."""

from __future__ import annotations

import asyncio
import os
import random
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from playwright.async_api import Page, expect
from transformers import AutoTokenizer

import sglrl
from sglrl.rollouts import save

from .browser import browser, page_in
from .test_view import viewing

SCREENSHOTS = os.environ.get("SGLRL_SCREENSHOTS")
"""The folder for screenshots. The documentation shows those in ``docs``."""
SECONDS = 60_000
"""Milliseconds to wait for the page on a busy machine."""

expect.set_options(timeout=SECONDS)


@asynccontextmanager
async def open_page(*arguments: str) -> AsyncIterator[Page]:
    context = viewing(*arguments)
    url = await asyncio.to_thread(context.__enter__)
    try:
        async with browser() as opened, page_in(opened, url) as page:
            page.set_default_timeout(SECONDS)
            yield page
    finally:
        await asyncio.to_thread(context.__exit__, None, None, None)


def made(tokenizer: Any, item: int, sample: int, text: str) -> sglrl.Trajectory:
    """Return a trajectory of two turns, with an observation between them."""
    parts = [tokenizer.encode(one, add_special_tokens=False) for one in (text, " 42 is the result")]
    seen = tokenizer.encode("<tool>9 * 9 = 81</tool>", add_special_tokens=False)
    ids = parts[0] + seen + parts[1]
    mask = [True] * len(parts[0]) + [False] * len(seen) + [True] * len(parts[1])
    chance = random.Random(item * 100 + sample)
    begin = len(parts[0]) + len(seen)
    return sglrl.Trajectory(
        prompt_ids=tokenizer.encode(f"What is {item}?", add_special_tokens=False),
        response_ids=ids,
        loss_mask=mask,
        logprobs=[-3 * chance.random() * one for one in mask],
        versions=[(3 if at < begin else 4) if one else -1 for at, one in enumerate(mask)],
        turns=[
            sglrl.Turn(start=0, stop=len(parts[0]), seconds=0.5, waiting=0.1),
            sglrl.Turn(
                start=begin, stop=len(ids), reward=sample / 4, seconds=0.2, seconds_before=0.4
            ),
        ],
        timing=sglrl.TrajectoryTiming(1.7e9 + item, 1.3, 0.7),
        metadata={"item": item, "sample": sample},
    )


@pytest.fixture
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(sglrl.local_model("tiny"))


async def test_the_list_scrolls_sorts_and_filters(tokenizer: Any, tmp_path: Path) -> None:
    trajectories = [made(tokenizer, at // 4, at % 4, f"sample {at}") for at in range(3000)]
    save(tmp_path / "a.traj", trajectories)
    async with open_page(str(tmp_path), "--tokenizer", "tiny") as page:
        rows, count = page.locator("#space .row"), page.locator("#count")
        await expect(count).to_have_text("3,000 of 3,000 trajectories")
        await expect(rows.first).to_contain_text("sample 0")
        # Only the visible rows are elements of the page.
        assert await rows.count() < 60
        await page.locator("#rows").evaluate("(list) => (list.scrollTop = list.scrollHeight)")
        await expect(rows.last).to_contain_text("sample 2999")
        await page.fill("#filter", "reward>=0.5 item=7")
        await expect(count).to_have_text("2 of 3,000 trajectories")
        await expect(rows).to_have_count(2)
        await page.fill("#filter", '"sample 1234"')
        await expect(count).to_have_text("1 of 3,000 trajectories")
        await expect(rows.first).to_contain_text("308")
        await page.fill("#filter", "reward>")
        await expect(count).to_have_text("reward> needs a number, got ''")
        await page.fill("#filter", "")
        await page.get_by_role("button", name="reward").click()
        await page.get_by_role("button", name="reward").click()
        await expect(rows.first).to_contain_text("0.750")
        # A click on the plot lists the group at this place.
        await page.locator("#plot").click(position={"x": 250, "y": 40})
        await expect(page.locator("#filter")).to_have_value(re.compile(r"^group=\d+$"))
        await expect(count).to_have_text("4 of 3,000 trajectories")


async def test_a_sample_is_shown_token_by_token(tokenizer: Any, tmp_path: Path) -> None:
    trajectories = [made(tokenizer, at // 4, at % 4, f"sample {at}") for at in range(8)]
    save(tmp_path / "a.traj", trajectories)
    async with open_page(str(tmp_path), "--tokenizer", "tiny") as page:
        await page.locator("#space .row").nth(5).click()
        pane = page.locator(".pane").first
        await expect(pane.locator("h2")).to_have_text("item 1 sample 1")
        await expect(pane.locator(".facts")).to_contain_text("reward 0.250 · 2 turns")
        roles = pane.locator(".role")
        await expect(roles).to_have_count(4)
        await expect(roles.nth(2)).to_have_text("observed")
        await expect(pane.locator(".message.assistant").first).to_contain_text("sample 5")
        await page.keyboard.press("t")
        spans = pane.locator(".tokens span")
        one = trajectories[5]
        await expect(spans).to_have_count(len(one.prompt_ids) + len(one.response_ids))
        first = len(one.prompt_ids)
        await spans.nth(first).click()
        inspect = pane.locator(".inspect")
        await expect(inspect).to_contain_text("masksampled")
        await expect(inspect).to_contain_text(f"{one.logprobs[0]:.3f}")
        colours = {}
        for by in ("logprob", "version", "mask", "none"):
            await pane.get_by_label("Colour").select_option(by)
            colours[by] = await spans.nth(first).evaluate("(span) => span.style.backgroundColor")
        assert len(set(colours.values())) == 4
        assert colours["none"] == ""
        # The previous and the next token, and the previous sample, with keys.
        await page.keyboard.press("ArrowRight")
        await expect(spans.nth(first + 1)).to_have_class("picked")
        await page.keyboard.press("k")
        await expect(pane.locator("h2")).to_have_text("item 1 sample 0")
        # Two samples of the group beside each other.
        await pane.get_by_role("button", name="group").click()
        await expect(page.locator("#count")).to_have_text("4 of 8 trajectories")
        await pane.get_by_role("button", name="beside").click()
        await page.locator("#space .row").nth(3).click()
        await expect(page.locator(".pane h2")).to_have_text(["item 1 sample 0", "item 1 sample 3"])
        await page.keyboard.press("l")
        await expect(page.locator("canvas.timeline")).to_have_count(1)


async def test_text_of_a_model_is_never_code(tokenizer: Any, tmp_path: Path) -> None:
    attack = "<img src=x onerror=alert(1)><script>alert(2)</script>"
    one = made(tokenizer, 0, 0, attack).replace(
        messages=[
            {"role": "user", "content": attack},
            {
                "role": "assistant",
                "content": attack,
                "reasoning_content": attack,
                "tool_calls": [{"function": {"name": attack, "arguments": {"x": attack}}}],
            },
        ],
        metadata={"item": attack, "sample": 0},
    )
    save(tmp_path / "a.traj", [one])
    async with open_page(str(tmp_path), "--tokenizer", "tiny") as page:
        await page.locator("#space .row").first.click()
        await expect(page.locator(".message .text").first).to_have_text(attack)
        await expect(page.locator(".message .reasoning")).to_have_text(attack)
        await expect(page.locator(".message .call")).to_contain_text(attack)
        await page.keyboard.press("t")
        await expect(page.locator(".tokens")).to_contain_text(attack)
        assert await page.locator("main img, main script").count() == 0


async def test_a_live_sample_is_followed_and_forked(tokenizer: Any) -> None:
    go = asyncio.Event()

    async def agent(session: sglrl.Session, item: Any) -> float:
        await session.generate(max_new_tokens=5)
        await go.wait()
        await session.generate(max_new_tokens=4)
        return 0.5

    async with (
        sglrl.launch("tiny", engine="fake") as client,
        open_page(client.address) as page,
        sglrl.rollout(client, agent, [{"prompt": "What is it?"}]) as run,
    ):
        waiting = asyncio.create_task(run.take(1))
        await page.locator("#running .row:not(.head)").click()
        pane = page.locator(".pane")
        await expect(pane.locator(".live")).to_have_text("live: tools")
        await page.keyboard.press("t")
        prompt = len(tokenizer.encode("What is it?", add_special_tokens=False))
        await expect(pane.locator(".tokens span")).to_have_count(prompt + 5)
        await pane.locator(".tokens span").nth(prompt + 1).click()
        await page.fill(".fork textarea", " or not")
        await page.fill('.fork input[name="max_new_tokens"]', "3")
        await page.fill('.fork input[name="temperature"]', "0")
        await page.get_by_role("button", name="Fork here").click()
        fork = page.locator(".pane").nth(1)
        await expect(fork.locator("h2")).to_have_text("fork")
        await expect(fork.locator(".facts")).to_contain_text("3 sampled")
        added = len(tokenizer.encode(" or not", add_special_tokens=False))
        await expect(fork.locator(".tokens span")).to_have_count(prompt + 2 + added + 3)
        # The sample goes on as if nobody had looked, and is then a row of the list.
        go.set()
        (group,) = await waiting
        (trajectory,) = group.trajectories
        first = page.locator(".pane").first
        await expect(first.locator(".facts")).to_contain_text("reward 0.500 · 2 turns")
        await expect(first.locator(".tokens span")).to_have_count(
            prompt + len(trajectory.response_ids)
        )
        assert len(trajectory.turns) == 2
        assert trajectory.sampled_tokens == 9
        assert np.asarray(trajectory.loss_mask).all()


async def test_screenshots_of_a_model_that_answers(smollm2: str, tmp_path: Path) -> None:
    folder = Path(SCREENSHOTS or tmp_path)
    go = asyncio.Event()

    async def agent(session: sglrl.Session, item: dict[str, Any]) -> float:
        answer = await session.generate(max_new_tokens=8, temperature=1.0)
        session.observe([{"role": "user", "content": "Are you sure? Explain it in one sentence."}])
        await session.generate(max_new_tokens=40, temperature=1.0)
        right = str(item["right"]) in answer.text
        if item["wait"]:
            await go.wait()
        return float(right)

    chance = random.Random(4)
    items: list[dict[str, Any]] = []
    for number in range(6):
        one, two = chance.randrange(1, 10), chance.randrange(1, 10)
        question = f"What is {one} + {two}? Answer with the number only."
        messages = [{"role": "user", "content": question}]
        items.append({"messages": messages, "right": one + two, "wait": number == 5})
    async with (
        sglrl.launch(smollm2, device="cpu") as client,
        open_page(client.address) as page,
    ):
        await expect(page.locator("#about")).to_contain_text("pool of")
        # The samples of a run are kept from the first time that a page asks for them.
        run = sglrl.rollout(client, agent, items, group_size=4, seed=1)
        async with run:
            for _ in range(2):
                await run.take(2)
                await client.update_weights_from_disk(smollm2)
            await expect(page.locator("#running .row:not(.head)")).to_have_count(4)
            await page.locator("#space .row").nth(2).click()
            await expect(page.locator(".message.assistant")).to_have_count(2)
            await page.screenshot(path=folder / "view-conversation.png")
            await page.get_by_role("button", name="group").click()
            await expect(page.locator("#count")).to_contain_text("4 of")
            await page.get_by_role("button", name="beside").click()
            await page.locator("#space .row:not(.chosen)").first.click()
            await page.keyboard.press("t")
            await page.locator(".pane").nth(0).get_by_role("tab", name="tokens").click()
            await page.locator(".pane").nth(0).locator(".tokens .begins").last.click()
            await page.screenshot(path=folder / "view-tokens.png")
            await page.keyboard.press("l")
            await expect(page.locator("canvas.timeline")).to_have_count(1)
            await page.locator(".pane").first.get_by_role("button", name="×").click()
            await page.fill("#filter", "")
            await expect(page.locator("#count")).to_contain_text("20 of 20")
            await page.screenshot(path=folder / "view-timeline.png")
            # A live sample, and a fork that continues it with the likeliest tokens.
            await page.locator("#running .row:not(.head)").first.click()
            spans = page.locator(".tokens span")
            await page.keyboard.press("t")
            await expect(page.locator(".live")).to_have_text("live: tools")
            picked = page.locator(".tokens .begins").last
            await picked.click()
            await page.fill(".fork textarea", " think it is")
            await page.fill('.fork input[name="temperature"]', "0")
            await page.fill('.fork input[name="max_new_tokens"]', "24")
            at = await picked.evaluate("(one) => [...one.parentElement.children].indexOf(one)")
            id_ = (await page.locator("#running .chosen").get_attribute("data-live")) or ""
            state = await client.live_state(id_)
            await page.get_by_role("button", name="Fork here").click()
            fork = page.locator(".pane").nth(1)
            await expect(fork.locator(".facts")).to_contain_text("finish:")
            shown = await fork.locator(".tokens span").all_inner_texts()
            await page.screenshot(path=folder / "view-fork.png")
            assert state is not None
            assert state.trajectory is not None
            whole = bytes(state.trajectory.prompt_ids) + bytes(state.trajectory.response_ids)
            ids = np.frombuffer(whole, "<i4")[: at + 1].tolist()
            ids += client.tokenizer.encode(" think it is", add_special_tokens=False)
            greedy = await client.generate(input_ids=ids, temperature=0, max_new_tokens=24)
            text = "".join(shown[len(ids) :]).replace("⏎\n", "").replace("⏎", "")
            assert text == client.tokenizer.decode(greedy.output_ids).replace("\n", "")
            assert await spans.count() > 0
            go.set()
            await run.take(2)
