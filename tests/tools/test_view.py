"""``sglrl view`` without a browser: its rows, filters, texts of tokens, and HTTP interface."""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from transformers import AutoTokenizer

import sglrl
from sglrl.errors import UsageError
from sglrl.rollouts import save
from sglrl.sessions.live import RunningTurn
from sglrl.sessions.trajectory_files import iter_records
from sglrl.tools.view.details import Pieces, details, patch
from sglrl.tools.view.rows import FINISH, Rows, parse
from sglrl.tools.view.store import Store

ADDRESS = re.compile(r"http://127\.0\.0\.1:\d+/\?key=\S+")


def made(chance: random.Random, item: int | None) -> sglrl.Trajectory:
    """Return a random trajectory of up to three turns."""
    mask: list[bool] = []
    versions: list[int] = []
    turns = []
    version = chance.randrange(5)
    for _ in range(chance.randrange(1, 4)):
        start = len(mask)
        for _ in range(chance.randrange(1, 5)):
            mask.append(True)
            versions.append(version)
            version += chance.random() < 0.2
        turn = sglrl.Turn(
            start=start,
            stop=len(mask),
            reward=chance.choice([0.0, 0.5, 1.0]),
            finish_reason=chance.choice(["stop", "length"]),
            seconds=chance.random(),
            seconds_before=chance.random(),
        )
        turns.append(turn)
        mask.append(False)
        versions.append(-1)
    return sglrl.Trajectory(
        prompt_ids=[chance.randrange(400) for _ in range(chance.randrange(1, 5))],
        response_ids=[chance.randrange(400) for _ in mask],
        loss_mask=mask,
        logprobs=[-chance.random() * one for one in mask],
        versions=versions,
        turns=turns,
        metadata={} if item is None else {"item": item, "sample": chance.randrange(4)},
    )


def test_filters_choose_what_a_loop_chooses(tmp_path: Path) -> None:
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    chance = random.Random(seed)
    trajectories = [made(chance, chance.randrange(6)) for _ in range(200)]
    save(tmp_path / "a.traj", trajectories)
    rows = Rows()
    rows.sources.append("a.traj")
    for offset, size, record in iter_records(tmp_path / "a.traj"):
        rows.add(0, offset, size, record)
    values = {
        "reward": lambda t: t.reward,
        "oldest": lambda t: t.oldest_version,
        "newest": lambda t: t.newest_version,
        "turns": lambda t: len(t.turns),
        "sampled": lambda t: t.sampled_tokens,
        "prompt": lambda t: len(t.prompt_ids),
        "tokens": lambda t: len(t.response_ids),
        "item": lambda t: t.metadata["item"],
        "sample": lambda t: t.metadata["sample"],
        "engine": lambda t: sum(turn.seconds for turn in t.turns),
    }
    signs = ("=", "!=", "<", "<=", ">", ">=")
    for _ in range(300):
        terms = []
        expected = set(range(len(trajectories)))
        for _ in range(chance.randrange(1, 3)):
            name, sign = chance.choice([*values]), chance.choice(signs)
            value = values[name](chance.choice(trajectories))
            terms.append(f"{name}{sign}{value!r}")
            python = {"=": "=="}.get(sign, sign)
            expected &= {
                at
                for at, one in enumerate(trajectories)
                if eval(f"{values[name](one)!r} {python} {value!r}")
            }
        assert set(rows.matching(parse(" ".join(terms))).tolist()) == expected, terms
    for version in range(8):
        found = set(rows.matching(parse(f"version={version}")).tolist())
        assert found == {
            at
            for at, one in enumerate(trajectories)
            if one.oldest_version <= version <= one.newest_version
        }
    lengths = set(rows.matching(parse("finish=length failed=no file=a.traj")).tolist())
    assert lengths == {at for at, one in enumerate(trajectories) if one.finish_reason == "length"}
    assert "" in FINISH


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("rewards>1", "unknown name 'rewards'"),
        ("reward>high", "reward> needs a number, got 'high'"),
        ("finish=done", "finish may be = or != one of stop, length, abort"),
        ("failed<yes", "failed may be = or !="),
        ("item>one", "item> needs a number"),
        ('"open', "open quote"),
    ],
)
def test_wrong_filters_say_what_is_right(text: str, why: str) -> None:
    rows = Rows()
    rows.items.append(3)
    with pytest.raises(UsageError, match=re.escape(why)):
        rows.matching(parse(text))


def test_the_texts_of_tokens_are_the_whole_text() -> None:
    tokenizer = AutoTokenizer.from_pretrained(sglrl.local_model("tiny"))

    def decode(ids: Any, skip: bool) -> str:
        text: str = tokenizer.decode(ids, skip_special_tokens=skip)
        return text

    pieces = Pieces(decode)
    text = "What is 7 + 7? Ünïcödé 漢字 🎉 and <b>tags</b>\n\ttabs"
    ids = tokenizer.encode(text, add_special_tokens=False)
    texts = pieces(ids)
    assert len(texts) == len(ids)
    assert "".join(texts) == decode(ids, False) == text
    # An incomplete character at the end is shown as such, and is complete with more tokens.
    cut = next(at for at in range(1, len(ids)) if decode(ids[:at], False).endswith("\ufffd"))
    assert pieces(ids[:cut])[-1].endswith("\ufffd")
    assert "".join(pieces(ids)) == text
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    chance = random.Random(seed)
    for _ in range(50):
        ids = [chance.randrange(len(tokenizer)) for _ in range(30)]
        assert len(pieces(ids)) == len(ids)
    assert Pieces(None)([5, 6]) == ["‹5›", "‹6›"]


def test_running_turns_join_their_conversation() -> None:
    chance = random.Random(0)
    one = made(chance, 0)
    store = Store()
    number = store.add("x", sglrl.sessions.trajectory.record_of(one))
    record = store.record(number)
    before = [*one.prompt_ids.tolist(), *one.response_ids.tolist()]

    def words(*values: int) -> bytes:
        return np.array(values, "<i4").tobytes()

    def turn(prompt: list[int], *ids: int) -> RunningTurn:
        logprobs = np.full(len(ids), -0.5, "<f4").tobytes()
        return RunningTurn(words(*prompt), words(*ids), logprobs, words(*[9] * len(ids)))

    first = details(record, [turn([*before, 7], 1, 2)], Pieces(None))
    (leaf,) = first["leaves"]
    assert leaf["ids"] == [*before, 7, 1, 2]
    assert leaf["mask"][-3:] == [0, 1, 1]
    assert leaf["versions"][-3:] == [-1, 9, 9]
    assert leaf["running"]
    second = details(record, [turn([*before, 7], 1, 2, 3), turn([4, 4], 5)], Pieces(None))
    changed = patch(first, second)
    assert [leaf["from"] for leaf in changed["leaves"]] == [len(before) + 3, 0]
    assert changed["leaves"][0]["ids"] == [3]
    assert changed["leaves"][1]["ids"] == [4, 4, 5]
    store.close()


def test_a_damaged_file_shows_what_precedes_the_damage(tmp_path: Path) -> None:
    chance = random.Random(1)
    path = tmp_path / "cut.traj"
    save(path, [made(chance, index) for index in range(10)])
    path.write_bytes(path.read_bytes()[:-20])
    store = Store()
    store.load([path, tmp_path / "none.traj"])
    assert store.rows.count == 9
    assert "cut short" in store.problems[0] or "damaged" in store.problems[0]
    assert "none.traj" in store.problems[1]
    assert store.record(8) is not None
    with pytest.raises(IndexError):
        store.record(9)
    store.close()


def test_files_and_live_samples_are_added_at_the_same_time(tmp_path: Path) -> None:
    chance = random.Random(2)
    path = tmp_path / "many.traj"
    save(path, [made(chance, index) for index in range(3000)])
    store = Store()
    record = sglrl.sessions.trajectory.record_of(made(chance, 7))
    import threading

    thread = threading.Thread(target=store.load, args=([path],))
    thread.start()
    numbers = [store.add("live", record) for _ in range(3000)]
    thread.join()
    assert store.rows.count == 6000
    assert len(set(numbers)) == 3000
    for number in numbers:
        found = store.record(number)
        assert found is not None
        assert found.response_ids == bytes(record.response_ids)
    store.close()


# --- the command ----------------------------------------------------------------------------------


@contextmanager
def viewing(*arguments: str, before: Sequence[str] = ()) -> Iterator[str]:
    """Run ``sglrl view`` while the block runs, and provide the address of its page.

    Args:
        before: a command that runs the viewer.
    """
    command = [*before, sys.executable, "-m", "sglrl", "view", "--port", "0", *arguments]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        found = ADDRESS.search(line)
        assert found is not None, line
        yield found.group()
    finally:
        process.send_signal(signal.SIGINT)
        rest, _ = process.communicate(timeout=60)
        assert "Traceback" not in rest
        assert process.returncode == 0


@asynccontextmanager
async def page_of(*arguments: str, before: Sequence[str] = ()) -> AsyncIterator[httpx.AsyncClient]:
    """Provide a client with the cookie of a page."""
    context = viewing(*arguments, before=before)
    url = await asyncio.to_thread(context.__enter__)
    try:
        base, _, key = url.partition("/?key=")
        async with httpx.AsyncClient(base_url=base, timeout=60) as client:
            assert (await client.get("/", params={"key": key})).status_code == 200
            yield client
    finally:
        await asyncio.to_thread(context.__exit__, None, None, None)


async def loaded(page: httpx.AsyncClient) -> dict[str, Any]:
    """Wait until the page has loaded its files and its tokenizer. No event reports that."""
    async with asyncio.timeout(120):
        while True:
            about: dict[str, Any] = (await page.get("/api/about")).json()
            if not about["loading"]:
                return about
            await asyncio.sleep(0.05)


async def events(page: httpx.AsyncClient, path: str) -> AsyncIterator[dict[str, Any]]:
    async with page.stream("GET", path) as answer:
        assert answer.status_code == 200
        async for line in answer.aiter_lines():
            if line.startswith("data: "):
                yield json.loads(line[6:])


async def test_the_page_needs_its_key(tmp_path: Path) -> None:
    save(tmp_path / "a.traj", [made(random.Random(3), 0)])
    async with page_of(str(tmp_path)) as page:
        async with httpx.AsyncClient(base_url=page.base_url) as stranger:
            for path in ("/", "/api/rows", "/static/main.js", "/?key=wrong"):
                assert (await stranger.get(path)).status_code == 403
            assert (await stranger.post("/api/forks", json={})).status_code == 403
        answer = await page.get("/")
        assert "default-src 'self'" in answer.headers["content-security-policy"]
        for name in ("main.js", "style.css"):
            assert (await page.get(f"/static/{name}")).status_code == 200
        for path in ("/static/app.py", "/static/..%2Fapp.py", "/api/rows/7"):
            assert (await page.get(path)).status_code == 404
        wrong = await page.get("/api/rows", params={"filter": "x>1"})
        assert (wrong.status_code, "unknown name" in wrong.json()["error"]) == (400, True)
        fork = await page.post("/api/forks", json={"ids": [1]})
        assert "with a running pool" in fork.json()["error"]


async def test_rows_are_sorted_searched_and_shown(tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(sglrl.local_model("tiny"))
    prompt = tokenizer.encode("What is it?", add_special_tokens=False)

    def answering(text: str, item: int, reward: float) -> sglrl.Trajectory:
        ids = tokenizer.encode(text, add_special_tokens=False)
        return sglrl.Trajectory(
            prompt_ids=prompt,
            response_ids=ids,
            loss_mask=[True] * len(ids),
            logprobs=[-0.5] * len(ids),
            versions=[4] * len(ids),
            turns=[sglrl.Turn(start=0, stop=len(ids), reward=reward)],
            metadata={"item": item, "sample": 0},
        )

    texts = [f"answer {item}" for item in range(50)]
    texts[17] = "a Needle in the hay"
    trajectories = [answering(text, at, (at * 7) % 50) for at, text in enumerate(texts)]
    save(tmp_path / "a.traj", trajectories)
    async with page_of(str(tmp_path / "a.traj"), "--tokenizer", "tiny") as page:
        assert (await loaded(page))["rows"] == 50

        async def rows(**query: Any) -> dict[str, Any]:
            while True:
                found: dict[str, Any] = (await page.get("/api/rows", params=query)).json()
                if found["searched"] == found["of"]:
                    return found

        found = await rows(sort="-reward", limit=3)
        assert [row["reward"] for row in found["rows"]] == [49, 48, 47]
        found = await rows(sort="reward", offset=10, limit=2, filter="reward>=20")
        assert ([row["reward"] for row in found["rows"]], found["matched"]) == ([30, 31], 30)
        found = await rows(filter="needle reward<50")
        assert [row["item"] for row in found["rows"]] == [17]
        assert found["rows"][0]["preview"] == texts[17]
        shown = (await page.get("/api/rows/17")).json()
        (leaf,) = shown["leaves"]
        assert "".join(leaf["texts"]) == "What is it?" + texts[17]
        assert leaf["ids"] == [*prompt, *trajectories[17].response_ids.tolist()]
        assert leaf["mask"] == [0] * len(prompt) + [1] * len(trajectories[17].response_ids)
        groups = (await page.get("/api/groups")).json()
        assert groups["mean"] == [(at * 7) % 50 for at in range(50)]
        line = (await page.get("/api/timeline/17")).json()
        assert 17 in [sample["row"] for sample in line["samples"]]


async def test_a_fork_continues_a_sample_apart_from_the_run(tmp_path: Path) -> None:
    async with sglrl.launch("tiny", engine="fake") as client:
        async with page_of(client.address) as page:
            await loaded(page)
            async with client.session("hello there", metadata={"item": 1}) as session:
                await session.generate(max_new_tokens=4)
                state = await anext(events(page, f"/api/live/{session.live_id}"))
                (leaf,) = state["leaves"]
                kept = leaf["ids"][:5]
                body = {"ids": kept, "text": " or not", "sampling": {"max_new_tokens": 6}}
                id_ = (await page.post("/api/forks", json=body)).json()["id"]
                *_, end = [event async for event in events(page, f"/api/live/{id_}")]
                assert (end["ended"], end["error"]) == (True, "")
                row = (await page.get(f"/api/rows/{end['row']}")).json()
                (fork,) = row["leaves"]
                prompt = kept + client.tokenizer.encode(" or not", add_special_tokens=False)
                assert fork["ids"][: fork["prompt"]] == prompt
                assert sum(fork["mask"]) == 6
                # The fake engine repeats the prompt.
                assert fork["ids"][fork["prompt"] :] == (prompt * 6)[:6]
                assert len(fork["alternatives"]) == 6
                assert row["row"]["source"] == "forks"
                # The session has not changed.
                assert session.trajectory().response_ids.tolist() == leaf["ids"][leaf["prompt"] :]
                assert len(session.turns) == 1
            wrong = await page.post("/api/forks", json={"ids": [1], "sampling": {"top_x": 1}})
            assert wrong.status_code == 400
            assert "top_x" in wrong.json()["error"]
        async with page_of(client.address, "--read-only") as page:
            assert not (await loaded(page))["forks"]
            refused = await page.post("/api/forks", json={"ids": [1]})
            assert "without --read-only" in refused.json()["error"]


async def test_a_rollout_is_shown_while_it_runs() -> None:
    go = asyncio.Event()

    async def agent(session: sglrl.Session, item: Any) -> float:
        await session.generate(max_new_tokens=4)
        await go.wait()
        return 1.0

    async with (
        sglrl.launch("tiny", engine="fake") as client,
        page_of(client.address) as page,
    ):
        await loaded(page)
        async with sglrl.rollout(client, agent, [{"prompt": "a"}], group_size=2) as run:
            waiting = asyncio.create_task(run.take(1))
            states = events(page, "/api/state")
            async for state in states:
                if len(state["samples"]) == 2 and all(one["turns"] for one in state["samples"]):
                    break
            live = events(page, f"/api/live/{state['samples'][0]['id']}")
            assert (await anext(live))["sample"]["turns"] == 1
            go.set()
            await waiting
            *_, end = [event async for event in live]
            row = (await page.get(f"/api/rows/{end['row']}")).json()["row"]
            assert (row["item"], row["reward"], row["source"]) == (0, 1.0, "live")
            async for state in states:
                if state["rows"] == 2:
                    break
        await client.close()
        async for state in states:
            if state["problem"]:
                break
        assert "closed" in state["problem"]
        # What was seen stays.
        assert (await page.get(f"/api/rows/{end['row']}")).status_code == 200


async def test_a_failed_sample_shows_the_turns_until_its_error() -> None:
    async def agent(session: sglrl.Session, item: Any) -> float:
        await session.generate(max_new_tokens=4)
        if item["id"] == 7:
            raise ValueError("the tool broke")
        return 1.0

    async with sglrl.launch("tiny", engine="fake") as client, page_of(client.address) as page:
        states = events(page, "/api/state")
        assert (await anext(states))["rows"] == 0
        items = [{"prompt": "a", "id": id_} for id_ in range(12)]
        run = sglrl.rollout(client, agent, items, group_size=1, on_error="drop")
        assert len([group async for group in run]) == 11
        async for state in states:
            if state["rows"] == 12:
                break
        (failed,) = (await page.get("/api/rows", params={"filter": "failed=yes"})).json()["rows"]
        assert (failed["item"], failed["sampled"], failed["reward"]) == (7, 4, None)
        assert failed["preview"] == "ValueError: the tool broke"
        shown = (await page.get(f"/api/rows/{failed['row']}")).json()
        assert sum(shown["leaves"][0]["mask"]) == 4
        assert shown["error"] == "ValueError: the tool broke"
        assert (await page.get("/api/groups")).json()["mean"] == [1.0] * 11
        for sort, order in (("item", range(12)), ("-item", range(11, -1, -1))):
            rows = (await page.get("/api/rows", params={"sort": sort})).json()["rows"]
            assert [row["item"] for row in rows] == [*order]
        # A second viewer begins with the samples that end from now on, and has no forks.
        async with page_of(client.address) as second:
            assert (await anext(events(second, "/api/state")))["rows"] == 0
            await loaded(second)
            id_ = (await second.post("/api/forks", json={"ids": [3, 4, 5]})).json()["id"]
            *_, end = [event async for event in events(second, f"/api/live/{id_}")]
            assert end["row"] == 0
            assert (await second.get("/api/groups")).json()["mean"] == []


async def test_a_page_that_does_not_read_delays_no_other() -> None:
    async def agent(session: sglrl.Session, item: Any) -> float:
        await session.generate(max_new_tokens=200)
        return 1.0

    async with (
        sglrl.launch("tiny", engine="fake") as client,
        page_of(client.address) as page,
    ):
        key = page.cookies[f"sglrl_view_{page.base_url.port}"]
        hanging = []
        for _ in range(3):
            reader, writer = await asyncio.open_connection("127.0.0.1", page.base_url.port, limit=1)
            writer.write(f"GET /api/state?key={key} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
            hanging.append((reader, writer))
        items = [{"prompt": "a"} for _ in range(200)]
        run = sglrl.rollout(client, agent, items, group_size=2)
        assert len([group async for group in run]) == 200
        async for state in events(page, "/api/state"):
            if state["rows"] == 400:
                break
        for _, writer in hanging:
            writer.close()


async def test_a_full_disk_ends_only_the_keeping_of_samples() -> None:
    async def agent(session: sglrl.Session, item: Any) -> float:
        await session.generate(max_new_tokens=50)
        return 1.0

    async with (
        sglrl.launch("tiny", engine="fake") as client,
        # The limit of a file's size fails like a full disk.
        page_of(client.address, before=("prlimit", "--fsize=5000")) as page,
    ):
        items = [{"prompt": "a"} for _ in range(20)]
        assert len([group async for group in sglrl.rollout(client, agent, items)]) == 20
        async for state in events(page, "/api/state"):
            if state["problem"]:
                break
        assert "the finished samples cannot be kept" in state["problem"]
        assert 0 < state["rows"] < 20
        assert (await page.get("/api/rows/0")).status_code == 200
        assert await client.generate("still here", max_new_tokens=1)


async def test_the_viewer_needs_only_the_packages_of_its_extra(tmp_path: Path) -> None:
    for name in ("httptools", "httpx", "prometheus_client"):
        (tmp_path / f"{name}.py").write_text(f"raise ModuleNotFoundError(name={name!r})\n")
    path = os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")]))
    save(tmp_path / "a.traj", [made(random.Random(3), 0)])
    async with page_of(str(tmp_path / "a.traj"), before=("env", f"PYTHONPATH={path}")) as page:
        assert not (await loaded(page))["problems"]
        assert (await page.get("/api/rows")).json()["total"] == 1


def test_wrong_arguments_are_one_line(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    save(tmp_path / "a.traj", [])
    for arguments, why in (
        (["none.traj"], "there is no file none.traj"),
        ([str(tmp_path / "empty")], "has no files *.traj"),
        (["1.7"], "'1.7' is neither an address nor a pool"),
        (["1", "2"], "give one pool"),
        ([str(tmp_path / "a.traj"), "--keys", "k"], "--keys needs a pool"),
    ):
        ended = subprocess.run(
            [sys.executable, "-m", "sglrl", "view", *arguments],
            capture_output=True,
            text=True,
            timeout=120,
            env={**os.environ, "TMPDIR": str(tmp_path)},
        )
        assert ended.returncode == 2, ended
        assert why in ended.stderr
        assert "Traceback" not in ended.stderr
