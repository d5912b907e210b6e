"""Many conversations over HTTP while engines are killed and weights change.

Clients disconnect and retry, in three APIs and in one conversation. No client may get an error, no
turn may be sampled twice, and each token has the version and the logprob of the weights that
sampled it. The checks use what the clients received, and transformers.

``tox run -e storm`` runs it with 1,000 conversations, three kills and five updates, which takes
three minutes on two cores. ``SGLRL_STORM_CONVERSATIONS``, ``SGLRL_STORM_KILLS``,
``SGLRL_STORM_UPDATES`` and ``SGLRL_STORM_SEED`` select others.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import random
import signal
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import numpy as np
import pytest
from engine.policies import Lab, Policies, logprobs_of_versions
from sessions.families import FAMILIES, family_tokenizer

import sglrl
from sglrl.gateway.serve import Gateway, serve

from .storm_agents import FAULTS, Agent, http_client
from .storm_dialects import DIALECTS, Answer, Ask
from .test_chat_engine import rewritten_tokens

CONVERSATIONS = int(os.environ.get("SGLRL_STORM_CONVERSATIONS", "60"))
KILLS = int(os.environ.get("SGLRL_STORM_KILLS", "1"))
UPDATES = int(os.environ.get("SGLRL_STORM_UPDATES", "2"))
SEED = int(os.environ.get("SGLRL_STORM_SEED", "1"))
TURNS = 5
AT_ONCE = 32
"""Conversations that run at the same time, and sessions that may be open."""
INFLIGHT = ("abort", "continue", "retract")
"""Of the updates, one after the other."""
RENEWS = ("abort", "retract")
"""The modes after which the KV of a running turn is computed again."""
TOLERANCE = 2e-4
WORDS = ["apple", "pear", "plum", "cherry", "quince", "medlar", "sloe"]


class Row(NamedTuple):
    """A trajectory as the gateway returns it, over HTTP or to Python."""

    prompt: list[int]
    response: list[int]
    mask: list[bool]
    logprobs: list[float]
    versions: list[int]
    turns: list[tuple[int, int, int]]
    """Start, stop and number of lost workers."""


class Talk(NamedTuple):
    """One conversation: what a client said and received, and the trajectories of its session."""

    said: list[str]
    answers: list[Answer]
    sizes: list[int]
    rows: list[Row]


class Storm:
    """The conversations, and the faults and updates meanwhile.

    Attributes:
        talks: the conversations that have ended.
        inflight: of the update to each version.
        counts: faults, dialects and ways to open sessions.
    """

    def __init__(self, lab: Lab, gateway: Gateway, http: httpx.AsyncClient) -> None:
        self.lab = lab
        self.client = lab.client
        self.gateway = gateway
        self.http = http
        self.talks: list[Talk] = []
        self.inflight: dict[int, str] = {}
        self.counts: Counter[str] = Counter()
        self._turns = 0
        self._progress = asyncio.Condition()

    async def run(self, fields: dict[str, Any]) -> None:
        """Have all conversations, with kills and updates after random numbers of turns.

        Args:
            fields: of each request.
        """
        numbers = iter(range(CONVERSATIONS))
        chance = random.Random(SEED)
        total = CONVERSATIONS * TURNS
        updates = sorted(chance.sample(range(total // 20, total * 4 // 5), UPDATES))
        # One worker is killed while an update runs.
        kills = [updates[0], *chance.sample(range(total // 20, total * 4 // 5), KILLS)][:KILLS]

        async def converse() -> None:
            for number in numbers:
                self.talks.append(await self.converse(number, fields))

        async with asyncio.TaskGroup() as group:
            for _ in range(AT_ONCE):
                group.create_task(converse())
            group.create_task(self._update(updates))
            group.create_task(self._kill(sorted(kills)))

    async def converse(self, number: int, fields: dict[str, Any]) -> Talk:
        """Have a conversation in a session of its own."""
        chance = random.Random(f"{SEED}-{number}")
        said: list[str] = []
        answers: list[Answer] = []
        sizes: list[int] = []
        opened = self._over_http() if chance.random() < 0.5 else self._from_python()
        async with opened as (base_url, key, rows):
            by_key = chance.random() < 0.5
            self.counts["by key" if by_key else "by URL"] += 1
            where = (self.gateway.url + "/v1", key) if by_key else (base_url, "")
            async with Agent(*where, chance, fields, self.counts) as agent:
                messages: list[dict[str, str]] = []
                names = chance.sample(list(DIALECTS), chance.randint(1, len(DIALECTS)))
                last = ""
                for turn in range(TURNS):
                    said.append(f"{turn}: " + " ".join(chance.choices(WORDS, k=3)))
                    messages.append({"role": "user", "content": said[-1]})
                    name = chance.choice(names)
                    sizes.append(chance.randint(4, 32))
                    goes_on = last == name == "responses" and chance.random() < 0.5
                    previous = answers[-1].id if goes_on else ""
                    self.counts["previous_response_id"] += goes_on
                    ask = Ask(messages, sizes[-1], chance.random() < 0.5, previous)
                    answers.append(await agent.send(name, ask))
                    messages.append({"role": "assistant", "content": answers[-1].text})
                    last = name
                    await self._made_progress()
                    if chance.random() < 0.3:
                        self.counts["dropped connections"] += 1
                        await agent.drop_connections()
        return Talk(said, answers, sizes, rows)

    @asynccontextmanager
    async def _over_http(self) -> AsyncIterator[tuple[str, str, list[Row]]]:
        self.counts["opened over HTTP"] += 1
        rows: list[Row] = []
        opened = await self.http.post(self.gateway.url + "/sessions")
        assert opened.status_code == 201, opened.text
        made = opened.json()
        yield made["base_url"], made["api_key"], rows
        ended = await self.http.delete(f"{self.gateway.url}/sessions/{made['id']}")
        assert ended.status_code == 200, ended.text
        for row in ended.json()["trajectories"]:
            turns = [(turn[0], turn[1], turn[7]) for turn in row["turns"]]
            names = ("prompt_ids", "response_ids", "loss_mask", "logprobs", "versions")
            rows.append(Row(*[row[name] for name in names], turns))

    @asynccontextmanager
    async def _from_python(self) -> AsyncIterator[tuple[str, str, list[Row]]]:
        self.counts["opened from Python"] += 1
        rows: list[Row] = []
        async with self.gateway.session() as session:
            yield session.base_url, session.api_key, rows
        assert session.trajectory is not None
        for leaf in session.trajectory.leaves:
            turns = [(turn.start, turn.stop, turn.resumed) for turn in leaf.turns]
            tokens = leaf.prompt_ids, leaf.response_ids, leaf.loss_mask
            arrays = (*tokens, leaf.logprobs, leaf.versions)
            rows.append(Row(*[array.tolist() for array in arrays], turns))

    # --- kills and updates ------------------------------------------------------------------------

    async def _update(self, turns: Sequence[int]) -> None:
        for number, (turn, inflight) in enumerate(zip(turns, itertools.cycle(INFLIGHT))):
            await self._reached(turn)
            report = await self.lab.update(number + 1, inflight=inflight)
            self.inflight[report.version] = inflight

    async def _kill(self, turns: Sequence[int]) -> None:
        """Kill a worker at these turns. The other one is ready then: it has the weights."""
        for turn in turns:
            await self._reached(turn)
            while len(ready := [w for w in self.client.workers if w.state == "ready"]) < 2:
                await self.client.pool.driver.change()
            os.kill(random.Random(f"{SEED}-{turn}").choice(ready).pid, signal.SIGKILL)
            self.counts["kills"] += 1
            await self.client.pool.driver.change()

    async def _made_progress(self) -> None:
        async with self._progress:
            self._turns += 1
            self._progress.notify_all()

    async def _reached(self, turn: int) -> None:
        async with self._progress:
            await self._progress.wait_for(lambda: self._turns >= turn)

    # --- checks -----------------------------------------------------------------------------------

    def check(self, talk: Talk, banned: Sequence[int]) -> int:
        """Check a conversation. Return how many workers its turns have lost.

        Args:
            banned: tokens with a logit bias of -100.
        """
        decode = self.lab.policies[0].tokenizer.decode
        # Branches would be further rows.
        assert len(talk.rows) == 1, (
            talk.answers, [(row.turns, decode(row.prompt + row.response)) for row in talk.rows]
        )  # fmt: skip
        (row,) = talk.rows
        assert len(row.turns) == len(talk.answers) == TURNS
        sampled = [False] * len(row.response)
        at, last = 0, 0
        for said, size, answer, (start, stop, lost) in zip(
            talk.said, talk.sizes, talk.answers, row.turns, strict=True
        ):
            before = row.response[at:start] if at else row.prompt
            assert said in decode(before)
            tokens, versions = row.response[start:stop], row.versions[start:stop]
            assert len(tokens) == size
            assert answer.tokens == tokens
            assert answer.text.strip() == decode(tokens).strip()
            assert answer.versions == versions
            # A worker that has the new version may be lost before another worker gets it.
            assert lost or [last, *versions] == sorted([last, *versions])
            sampled[start:stop] = [True] * size
            self._check_logprobs(
                [*row.prompt, *row.response[:start]],
                tokens, versions, row.logprobs[start:stop], lost, banned,
            )  # fmt: skip
            at, last = stop, versions[-1]
        assert row.mask == sampled
        return sum(lost for _, _, lost in row.turns)

    def _check_logprobs(
        self,
        prompt: list[int],
        output: list[int],
        versions: list[int],
        logprobs: list[float],
        lost: int,
        banned: Sequence[int],
    ) -> None:
        """Compare logprobs with transformers'.

        Where a worker is lost, another one computes all KV again. It is not known where, and only
        matters if the KV of several versions was kept. Then the first token that differs tells.
        """
        renewed = {
            at
            for at in range(1, len(output))
            if versions[at] < versions[at - 1]
            or any(
                self.inflight[version] in RENEWS
                for version in range(versions[at - 1] + 1, versions[at] + 1)
            )
        }
        while True:
            expected = logprobs_of_versions(
                self.lab.by_version, prompt, output, versions, renewed, banned
            )
            wrong = np.flatnonzero(np.abs(expected - logprobs) > TOLERANCE)
            if not len(wrong) or not lost or wrong[0] in renewed:
                break
            lost -= 1
            renewed.add(int(wrong[0]))
        np.testing.assert_allclose(logprobs, expected, atol=TOLERANCE, rtol=0)


async def open_files(http: httpx.AsyncClient, gateway: Gateway, pid: int) -> int:
    """Return the number of open files of the gateway's process, after one more request."""
    assert (await http.get(gateway.url + "/health")).status_code == 200
    return len(os.listdir(f"/proc/{pid}/fd"))


async def no_session_is_left(http: httpx.AsyncClient, gateway: Gateway) -> None:
    """Check that as many sessions can be opened as the gateway allows, and not one more."""
    url = gateway.url + "/sessions"
    opened = [await http.post(url) for _ in range(AT_ONCE + 1)]
    assert [answer.status_code for answer in opened] == [201] * AT_ONCE + [400]
    for answer in opened[:-1]:
        assert (await http.delete(f"{url}/{answer.json()['id']}")).status_code == 200


@pytest.mark.timeout(300 + CONVERSATIONS)
async def test_no_client_notices_kills_updates_and_its_own_retries(tmp_path: Path) -> None:
    policies = Policies(tmp_path)
    family_tokenizer(policies[0].folder, FAMILIES["qwen3"])
    for number in range(UPDATES + 1):
        assert policies[number].model is not None
    banned = rewritten_tokens(policies[0].tokenizer)
    fields = {"logit_bias": dict.fromkeys(banned, -100), "return_token_ids": True}
    async with (
        sglrl.launch(policies[0].folder, device="cpu", replicas=2) as client,
        serve(client, name="policy", max_sessions=AT_ONCE) as gateway,
        http_client() as http,
    ):
        storm = Storm(Lab(client, policies), gateway, http)
        (process,) = gateway._processes.workers
        storm.talks.append(await storm.converse(-1, fields))
        # Each request lets the gateway notice that earlier connections were closed.
        files = [await open_files(http, gateway, process.pid) for _ in range(10)][-1]
        await storm.run(fields)
        print(*storm.counts.items(), sep="\n")
        async with asyncio.timeout(300):
            while await open_files(http, gateway, process.pid) > files:
                pass
        assert [worker.pid for worker in gateway._processes.workers] == [process.pid]
        await no_session_is_left(http, gateway)
    lost = [storm.check(talk, banned) for talk in storm.talks]
    print(f"{sum(lost)} turns lost a worker")
    assert len(storm.talks) == CONVERSATIONS + 1
    versions = {v for talk in storm.talks for answer in talk.answers for v in answer.versions}
    assert versions == set(range(UPDATES + 1))
    assert storm.counts["kills"] == KILLS
    assert bool(sum(lost)) == bool(KILLS)
    wanted = [*(fault for fault in FAULTS if fault != "none"), *DIALECTS, "previous_response_id"]
    wanted += ["by key", "by URL", "opened over HTTP", "opened from Python", "dropped connections"]
    assert not [name for name in wanted if not storm.counts[name]]
