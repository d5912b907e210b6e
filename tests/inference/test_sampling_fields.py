"""Every declared sampling field reaches the engines from every place where users can give it."""

from __future__ import annotations

import asyncio
import json
import typing
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import pytest_asyncio
from typer.testing import CliRunner

import sglrl
from sglrl.gateway.app import DIALECTS
from sglrl.inference import sampling_fields as kinds
from sglrl.inference.sampling import (
    FIELDS,
    SamplingOptions,
    SamplingParams,
    UnseededOptions,
)
from sglrl.tools.cli import app
from sglrl.tools.eval import run as eval_run
from sglrl.tools.sampling_options import OPTIONS, option_names

from .sampling_examples import (
    BODIES,
    IDS,
    NOT_FAKE,
    WITH,
    example,
    http_body,
    received_sampling,
    sent,
)

pytestmark = pytest.mark.timeout(120)
module = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client() -> AsyncIterator[sglrl.Client]:
    async with sglrl.launch(
        "tiny", engine="fake", hidden_size=8, enable_return_routed_experts=True
    ) as client:
        yield client


async def generate(client: sglrl.Client, values: dict[str, Any]) -> None:
    await client.generate(input_ids=IDS, **values)


async def generate_struct(client: sglrl.Client, values: dict[str, Any]) -> None:
    await client.generate(input_ids=IDS, sampling=SamplingParams(**values))


async def stream(client: sglrl.Client, values: dict[str, Any]) -> None:
    async for _ in client.stream(input_ids=IDS, **values):
        pass


async def session(client: sglrl.Client, values: dict[str, Any]) -> None:
    async with client.session(input_ids=IDS, **values) as session:
        await session.generate()


async def turn(client: sglrl.Client, values: dict[str, Any]) -> None:
    async with client.session(input_ids=IDS) as session:
        await session.generate(**values)


async def rollout(client: sglrl.Client, values: dict[str, Any]) -> None:
    async def agent(session: sglrl.Session, item: Any) -> float:
        await session.generate()
        return 0.0

    run = sglrl.rollout(
        client, agent, [0], open_session=lambda item: {"input_ids": IDS}, on_error="raise", **values
    )
    assert len([group async for group in run]) == 1


async def remote(client: sglrl.Client, values: dict[str, Any]) -> None:
    async with sglrl.connect(client.address) as other:
        await other.generate(input_ids=IDS, **values)


async def blocking(client: sglrl.Client, values: dict[str, Any]) -> None:
    def call() -> None:
        with sglrl.blocking.connect(client.address) as other:
            other.generate(input_ids=IDS, **values)

    await asyncio.to_thread(call)


@module
@pytest.mark.parametrize(
    "call",
    [generate, generate_struct, stream, session, turn, rollout, remote, blocking],
    ids=lambda call: call.__name__,
)
async def test_every_method_of_clients(client: sglrl.Client, call: Any) -> None:
    for name in FIELDS.keys() - set(NOT_FAKE):
        with received_sampling() as received:
            await call(client, {name: example(FIELDS[name]), **WITH.get(name, {})})
        assert received[0].get(name) == sent(FIELDS[name]), name


@module
async def test_every_alias(client: sglrl.Client) -> None:
    for field in FIELDS.values():
        for alias in field.names.aliases:
            with received_sampling() as received:
                await client.generate(input_ids=IDS, **{alias: example(field)})
            assert received[0].get(field.name) == sent(field), alias


def test_the_typed_keywords_are_the_declared_fields() -> None:
    """An editor completes the fields and their aliases, with the types of the declaration."""
    types = {
        name: field.type for field in FIELDS.values() for name in (field.name, *field.names.aliases)
    }
    assert typing.get_type_hints(SamplingOptions) == types
    seeds = {"seed", *FIELDS["seed"].names.aliases}
    assert UnseededOptions.__annotations__.keys() == types.keys() - seeds


@pytest.mark.parametrize("dialect", kinds.DIALECTS)
def test_every_dialect_decodes_every_field(dialect: str) -> None:
    path, _ = BODIES[dialect]
    (api,) = [one for one in DIALECTS if one.path == path]
    for field in FIELDS.values():
        for name in field.in_dialect(dialect):
            value = ["a"] if name == "stop_sequences" else example(field)
            body = api.parse(json.dumps(http_body(dialect, name, value)).encode())
            (made,) = body.turns()
            assert made.sampling[field.name] == value, name
            assert made.names.get(field.name, field.name) == name
        if not field.in_dialect(dialect) and dialect in ("sglang", "vllm"):
            body = http_body(dialect, field.name, example(field))
            with pytest.raises(sglrl.InvalidRequest, match=r"field '\w+' is not supported"):
                api.parse(json.dumps(body).encode()).turns()


@pytest.mark.parametrize("command", ["generate", "eval"])
def test_every_option_of_commands(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, command: str
) -> None:
    found: list[SamplingParams] = []

    class Stop(Exception):
        pass

    class Recorder:
        async def __aenter__(self) -> Recorder:
            return self

        async def __aexit__(self, *args: object) -> None: ...

        async def generate(self, *, sampling: SamplingParams, **values: Any) -> None:
            found.append(sampling)
            raise Stop

    def run_eval(settings: eval_run.EvalSettings, console: Any) -> None:
        found.append(settings.sampling)
        raise Stop

    monkeypatch.setattr("sglrl.launching.launch.launch", lambda *args, **values: Recorder())
    monkeypatch.setattr(eval_run, "run_eval", run_eval)
    (tmp_path / "in").touch()
    files = ["--input", str(tmp_path / "in"), "--output", str(tmp_path / "out")]
    arguments = {"generate": ["generate", "m", "Hi"], "eval": ["eval", "m", *files]}[command]
    assert {field.name for field in OPTIONS} == {
        field.name for field in FIELDS.values() if field.names.option
    }
    for field in OPTIONS:
        value, options = example(field), []
        for name, one in {field.name: value, **WITH.get(field.name, {})}.items():
            *_, flag = option_names(FIELDS[name])
            text = one if isinstance(one, str) else msgspec.json.encode(one).decode()
            match one:
                case bool():
                    options += [flag]
                case [first]:
                    options += [flag, str(first)]
                case _:
                    options += [flag, text]
        found.clear()
        result = CliRunner().invoke(app, [*arguments, *options])
        assert isinstance(result.exception, Stop), (result.output, result.exception)
        expected = SamplingParams(**{field.name: value, **WITH.get(field.name, {})})
        assert found[0].to_wire(1, None) == expected.to_wire(1, None)
