"""Claude Code and Codex, unmodified, in loops of three turns with tools.

The engine is the fake one, which answers with calls that are written here: a random model would
call no tools. Each program must make one conversation, with exactly the sampled tokens.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import sglrl
from sglrl.gateway.serve import serve

from .conftest import PYTHON, Judge
from .relay import Relay

pytestmark = pytest.mark.asyncio(loop_scope="session")

FOLDER = os.environ.get("SGLRL_PROGRAMS", "")
"""The folder ``node_modules`` in which npm has installed the programs."""
CONTEXT = 400_000
"""The prompts have about one token for each character."""
NO_NETWORK = {
    # Nothing listens at this port.
    **dict.fromkeys(("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy"), "http://127.0.0.1:9"),
    **dict.fromkeys(("NO_PROXY", "no_proxy"), "127.0.0.1,localhost"),
}  # fmt: skip
CODEX = """
model_provider = "sglrl"
check_for_update_on_startup = false
[analytics]
enabled = false
[model_providers.sglrl]
name = "sglrl"
base_url = "{url}"
env_key = "SGLRL_KEY"
wire_api = "responses"
request_max_retries = 0
stream_max_retries = 0
"""


def program(pattern: str) -> Path:
    """Return the executable of a program. npm installs the one for this machine."""
    assert FOLDER, "set SGLRL_PROGRAMS to the folder node_modules of the programs: see tox.ini"
    (found,) = Path(FOLDER).glob(pattern)
    return found


def claude_code(url: str, key: str, home: Path) -> tuple[list[str], dict[str, str]]:
    executable = program("@anthropic-ai/claude-code-linux-*/claude")
    options = ["--dangerously-skip-permissions", "--model", "any", "--output-format", "json"]
    environment = {
        "ANTHROPIC_BASE_URL": url,
        "ANTHROPIC_API_KEY": key,
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "DISABLE_AUTOUPDATER": "1",
        "DISABLE_ERROR_REPORTING": "1",
        "DISABLE_TELEMETRY": "1",
        "IS_SANDBOX": "1",
    }
    return [str(executable), "-p", "Count.", *options], environment


def codex(url: str, key: str, home: Path, model: str = "any") -> tuple[list[str], dict[str, str]]:
    executable = program("@openai/codex-linux-*/vendor/*/bin/codex")
    (home / ".codex").mkdir()
    (home / ".codex/config.toml").write_text(CODEX.format(url=url))
    options = ["--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", "--json"]
    return [str(executable), "exec", *options, "-m", model, "Count."], {"SGLRL_KEY": key}


def codex_with_patches(url: str, key: str, home: Path) -> tuple[list[str], dict[str, str]]:
    """Codex gives custom tools to the models of OpenAI that it knows."""
    return codex(url, key, home, "gpt-5.5")


async def run(command: Sequence[str], environment: dict[str, str], home: Path) -> str:
    """Run a program in an empty folder. Return its output."""
    work = home / "work"
    work.mkdir()
    process = await asyncio.create_subprocess_exec(
        *command,
        cwd=work,
        env={"PATH": os.environ["PATH"], "HOME": str(home), **NO_NETWORK, **environment},
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        out, error = await asyncio.wait_for(process.communicate(), 200)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert process.returncode == 0, (out[-2000:], error[-2000:])
    return out.decode()


def call(name: str, **arguments: Any) -> str:
    """Return how the model thinks and calls a tool."""
    text = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
    return f"<think>\nHm.\n</think>\n\n<tool_call>\n{text}\n</tool_call>"


DONE = "<think>\nHm.\n</think>\n\nAll done."
PATCH = "*** Begin Patch\n*** Add File: made.txt\n+written by a patch\n*** End Patch"


@pytest.mark.parametrize(
    ("agent", "calls", "results"),
    [
        pytest.param(
            claude_code,
            [call("Bash", command="echo o; echo ne", description="One"),
             call("Bash", command="echo two >&2; exit 3", description="Two")],
            ["o\nne", "Exit code 3"],
            id="claude",
        ),
        pytest.param(
            claude_code,
            [call("ToolSearch", query="select:CronList,TaskStop"), call("CronList")],
            ["<functions>", "No scheduled jobs."],
            id="claude-deferred-tools",
        ),
        pytest.param(
            codex,
            [call("exec_command", cmd="echo o; echo ne"),
             call("multi_agent_v1__close_agent", target="x")],
            ["o\nne", "invalid agent id x"],
            id="codex",
        ),
        pytest.param(
            codex_with_patches,
            [call("apply_patch", input=PATCH), call("exec_command", cmd="cat made.txt")],
            ["Success.", "written by a patch"],
            id="codex-custom-tools",
        ),
    ],
)  # fmt: skip
async def test_three_turns_are_one_conversation(
    judge: Judge, tmp_path: Path, agent: Any, calls: list[str], results: list[str]
) -> None:
    options: dict[str, Any] = {"engine": "fake", "python": PYTHON, "context_length": CONTEXT}
    tokenizer = judge.tokenizer
    answers = [tokenizer.encode(f"{text}<|im_end|>") for text in (*calls, DONE)]
    allowed: Any = {"unsupported_tools": "omit", "later_system": "user"}
    async with (
        sglrl.launch(judge.folder, answers=answers, **options) as client,
        serve(client, **allowed) as gateway,
        Relay(gateway.url) as relay,
    ):
        gateway.url = relay.url
        async with gateway.session() as session:
            command, environment = agent(session.base_url, session.api_key, tmp_path)
            output = await run(command, environment, tmp_path)
    assert "All done." in output
    assert set(relay.statuses) == {200}
    trajectory = session.trajectory
    assert trajectory is not None
    assert trajectory.branches == ()
    sampled = [
        trajectory.response_ids[turn.start : turn.stop].tolist() for turn in trajectory.turns
    ]
    assert sampled == answers
    assert trajectory.loss_mask.sum() == sum(map(len, answers))
    assert trajectory.messages is not None
    found = [one["content"] for one in trajectory.messages if one["role"] == "tool"]
    for result, text in zip(results, found, strict=True):
        assert result in text
    # What the model saw between its turns is what the chat template makes of the results.
    observed = tokenizer.decode(trajectory.response_ids[~trajectory.loss_mask])
    for text in found:
        assert f"<tool_response>\n{text}\n</tool_response>" in observed
