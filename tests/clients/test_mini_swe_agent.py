"""mini-swe-agent, in a folder of its own: with calls of a tool, and with code blocks."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import yaml
from minisweagent import package_dir
from minisweagent.agents.default import DefaultAgent
from minisweagent.environments.local import LocalEnvironment
from minisweagent.models.litellm_model import LitellmModel
from minisweagent.models.litellm_response_model import LitellmResponseModel
from minisweagent.models.litellm_textbased_model import LitellmTextbasedModel

pytestmark = pytest.mark.asyncio(loop_scope="session")

COMMAND = r"(echo [a-z]{1,8}|echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT)"
CALL = r'\{"name": "bash", "arguments": \{"command": "COMMAND"\}\}'.replace("COMMAND", COMMAND)
CALL = rf"<tool_call>\n{CALL}\n</tool_call>"
BLOCK = rf"THOUGHT: [a-z]{{4,12}}\n\n```mswea_bash_command\n{COMMAND}\n```"


@pytest.mark.parametrize("form", ["calls", "text", "responses"])
async def test_an_agent(runs: Any, biases: Any, pool: Any, tmp_path: Path, form: str) -> None:
    if form == "text":
        # The template removes reasoning from earlier turns, so each turn would begin a branch.
        biases = {**biases, str(pool.tokenizer.convert_tokens_to_ids("<think>")): -100}
    file, model_class, pattern = {
        "calls": ("mini.yaml", LitellmModel, CALL),
        "responses": ("mini.yaml", LitellmResponseModel, CALL),
        "text": ("mini_textbased.yaml", LitellmTextbasedModel, BLOCK),
    }[form]
    config = yaml.safe_load((package_dir / "config" / file).read_text())

    def program(run: Any) -> Any:
        model = model_class(
            **{
                **config["model"],
                "model_name": "openai/any",
                "cost_tracking": "ignore_errors",
                "model_kwargs": {
                    **config["model"].get("model_kwargs", {}),
                    "api_base": run.base_url,
                    "api_key": run.api_key,
                    "extra_body": {"regex": pattern, "logit_bias": biases},
                },
            }
        )
        options = {name: config["agent"][name] for name in ("system_template", "instance_template")}
        agent = DefaultAgent(model, LocalEnvironment(cwd=str(tmp_path)), **options, step_limit=4)
        return agent, agent.run("Say something.")

    async with runs() as run:
        agent, made = await asyncio.to_thread(program, run)
    assert made["exit_status"] in ("Submitted", "LimitsExceeded")
    assert len(run.calls) == agent.n_calls
    run.check(leaves=1)
