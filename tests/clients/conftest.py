"""Unmodified client libraries against the gateway and a real engine.

The engine runs in the environment ``full``: its Python is ``SGLRL_WORKERS_PYTHON``. Nothing here
reaches another machine: see ``network.py``.
"""

from __future__ import annotations

import os
import subprocess
import warnings
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import pytest_asyncio

import sglrl
from sglrl.gateway.serve import Gateway, GatewaySession, serve

from . import network
from .relay import Call, Relay

# These are read when the libraries are imported.
os.environ |= {
    "HF_HUB_OFFLINE": "1",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "MSWEA_SILENT_STARTUP": "1",
    "OPENAI_AGENTS_DISABLE_TRACING": "1",
}
network.watch()

PYTHON = os.environ.get("SGLRL_WORKERS_PYTHON", "")
TESTS = Path(__file__).parent.parent
_SECONDS = 300


def pytest_configure(config: pytest.Config) -> None:
    """Accept the warnings of libraries."""
    for line in ("default", "error:::sglrl"):
        config.addinivalue_line("filterwarnings", line)
    # Some never close their connections.
    warnings.simplefilter("ignore", ResourceWarning)


class Judge:
    """The program that makes the model and computes its logprobs."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        paths = [str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])]
        self._process = subprocess.Popen(
            [PYTHON, "-W", "ignore", str(TESTS / "clients/reference_program.py"), str(folder)],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._line()

    @property
    def tokenizer(self) -> Any:
        """The tokenizer of the model."""
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(self.folder)

    def logprobs(self, asked: dict[str, Any]) -> list[list[float]]:
        """Return the logprobs of the sampled tokens of each turn.

        Args:
            asked: see ``reference_program.Asked``.
        """
        assert self._process.stdin is not None
        self._process.stdin.write(msgspec.json.encode(asked).decode() + "\n")
        self._process.stdin.flush()
        found = msgspec.json.decode(self._line(), type=list[list[float]] | str)
        assert not isinstance(found, str), found
        return found

    def _line(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, "the program has ended: its error is above"
        return line

    def close(self) -> None:
        with self._process:
            assert self._process.stdin is not None
            self._process.stdin.close()
            self._process.wait(_SECONDS)


@pytest.fixture(scope="session")
def judge(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Judge]:
    assert PYTHON, "set SGLRL_WORKERS_PYTHON to a Python that has sglrl, its tests and SGLang"
    made = Judge(tmp_path_factory.mktemp("models") / "qwen3")
    yield made
    made.close()


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def pool(judge: Judge) -> AsyncIterator[sglrl.Client]:
    # A random model fills a JSON text with white space wherever the grammar allows it.
    options: dict[str, Any] = {"constrained_json_disable_any_whitespace": True}
    async with sglrl.launch(judge.folder, device="cpu", python=PYTHON, **options) as client:
        yield client


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def relay(pool: sglrl.Client) -> AsyncIterator[tuple[Gateway, Relay]]:
    async with serve(pool, name="policy") as gateway, Relay(gateway.url) as relay:
        gateway.url = relay.url
        yield gateway, relay


class Run:
    """One run of a program.

    Attributes:
        calls: what the program has sent.
        trajectory: after the block of ``runs``.
    """

    def __init__(self, session: GatewaySession, relay: Relay, judge: Judge) -> None:
        self._session, self._relay, self._judge = session, relay, judge
        self.base_url = session.base_url
        self.api_key = session.api_key
        self.trajectory: sglrl.Trajectory
        relay.calls.clear()
        relay.statuses.clear()

    @property
    def calls(self) -> list[Call]:
        return self._relay.calls

    def check(self, *, leaves: int) -> None:
        """Check that every call is a turn, and the logprob of every token.

        Args:
            leaves: expected number of conversations. The program makes the calls of one after those
                of another.
        """
        assert self._session.trajectory is not None
        self.trajectory = self._session.trajectory
        assert set(self._relay.statuses) == {200}
        conversations = self.trajectory.leaves
        assert len(conversations) == leaves
        turns = sum(len(leaf.turns) for leaf in conversations)
        assert turns == len(self.calls)
        calls = iter(self.calls)
        for leaf in conversations:
            asked = {
                "ids": leaf.input_ids.tolist(),
                "turns": [
                    {
                        "start": len(leaf.prompt_ids) + turn.start,
                        "stop": len(leaf.prompt_ids) + turn.stop,
                        "path": call.path,
                        "body": call.body,
                    }
                    for turn, call in zip(leaf.turns, calls, strict=False)
                ],
            }
            found = self._judge.logprobs(asked)
            sampled = leaf.logprobs[leaf.loss_mask]
            assert len(sampled) == sum(map(len, found)) > 0
            np.testing.assert_allclose(sampled, np.concatenate(found), atol=2e-4)


@pytest.fixture
def runs(relay: tuple[Gateway, Relay], judge: Judge) -> Any:
    """Open a session for a program: ``async with runs() as run``. Then call ``run.check``."""
    gateway, recorder = relay

    @asynccontextmanager
    async def open_run() -> AsyncIterator[Run]:
        async with gateway.session() as session:
            yield Run(session, recorder, judge)

    return open_run


@pytest.fixture(autouse=True)
def no_network() -> Iterator[None]:
    yield
    # Also those of imports, before the first test.
    found, network.attempts[:] = network.attempts[:], []
    assert not found, found


@pytest.fixture(scope="session")
def biases(pool: sglrl.Client) -> dict[str, int]:
    """Biases with which a random model soon ends its reasoning, its calls and their arguments."""
    tokenizer = pool.tokenizer
    ends = ("<tool_call>", "</tool_call>", "<|im_end|>", ",", "}")
    # Within a text, "<tool_call>" or "</tool_call>" would end the call before its arguments.
    first = ("</think>", '"')
    spaces = [i for i in range(len(tokenizer)) if tokenizer.decode([i]).isspace()]
    # Where a grammar allows nothing but white space, a bias changes nothing.
    return {
        **{str(token): -100 for token in spaces},
        **{str(tokenizer.convert_tokens_to_ids(end)): 50 for end in ends},
        **{str(tokenizer.convert_tokens_to_ids(end)): 75 for end in first},
    }
