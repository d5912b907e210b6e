"""Environment variables that SGLang reads when it is imported."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

import sglrl

pytestmark = pytest.mark.asyncio(loop_scope="session")


async def test_a_variable_of_one_client(client: sglrl.Client, qwen: Path) -> None:
    """SGLang retracts all requests again and again with this variable, which is for its tests."""
    variables = {"SGLANG_TEST_RETRACT": "1"}
    async with sglrl.launch(qwen, device="cpu", env=variables) as other:
        async with asyncio.timeout(300):
            # The engine reports its load now and then.
            while not retracted(other):
                made = await other.generate(["One", "Two"], max_new_tokens=40, ignore_eos=True)
                assert [len(completion.output_ids) for completion in made] == [40, 40]
    before = retracted(client)
    await client.generate(["One", "Two"], max_new_tokens=400, ignore_eos=True)
    assert retracted(client) == before


def retracted(client: sglrl.Client) -> int:
    (load,), _ = client.pool.loads()
    return load.preempted
