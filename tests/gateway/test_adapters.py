"""HTTP requests select LoRA adapters, with the fake engine."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio
from control.test_lora import CONFIG, tensors
from safetensors.torch import save_file

import sglrl
from sglrl.gateway.app import split_model
from sglrl.gateway.serve import Gateway, serve

from .made import client_of

pytestmark = pytest.mark.asyncio(loop_scope="module")

HI = [{"role": "user", "content": "Hi"}]
CHAT: dict[str, Any] = {"messages": HI, "max_tokens": 3}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pool() -> AsyncIterator[sglrl.Client]:
    async with sglrl.launch(
        "tiny", engine="fake", max_lora_rank=4, lora_target_modules=["q_proj"]
    ) as client:
        await client.load_lora("a", tensors(), config=CONFIG)
        await client.load_lora("b:c", tensors(), config=CONFIG)
        yield client


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def gateway(pool: sglrl.Client) -> AsyncIterator[Gateway]:
    async with serve(pool, name=("tiny", "org:tiny")) as gateway:
        yield gateway


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def http(gateway: Gateway) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=gateway.url, timeout=300) as http:
        yield http


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        ("tiny", ("tiny", "")),
        ("tiny:a", ("tiny", "a")),
        ("tiny:a:b", ("tiny", "a:b")),
        ("tiny: a ", ("tiny", "a")),
        ("tiny:", ("tiny", "")),
        ("org:tiny", ("org:tiny", "")),
        ("org:tiny:a", ("org:tiny", "a")),
        ("org", ("org", "")),
        ("gpt:a", ("gpt:a", "")),
        ("", ("", "")),
    ],
)
async def test_names(model: str, expected: tuple[str, str]) -> None:
    assert split_model(model, ("tiny", "org:tiny")) == expected


async def test_models(pool: sglrl.Client, gateway: Gateway, http: httpx.AsyncClient) -> None:
    cards = (await http.get("/v1/models")).json()["data"]
    assert [(card["id"], card["root"], card["parent"]) for card in cards] == [
        ("tiny", "tiny", None),
        ("org:tiny", "org:tiny", None),
        ("tiny:a", "a", "tiny"),
        ("tiny:b:c", "b:c", "tiny"),
    ]
    card = (await http.get("/v1/models/org:tiny:a")).json()
    assert (card["id"], card["root"], card["parent"]) == ("org:tiny:a", "a", "org:tiny")
    async with client_of(gateway) as client:
        listed = await client.models.list()
    assert [model.id for model in listed.data] == [card["id"] for card in cards]
    await pool.load_lora("later", tensors(), config=CONFIG)
    assert (await http.get("/v1/models/tiny:later")).status_code == 200
    await pool.unload_lora("later")
    for name in ("tiny:later", "gpt:a", "a"):
        assert (await http.get(f"/v1/models/{name}")).status_code == 404


@pytest.mark.parametrize("root", ["", "/v1"])
async def test_load_and_unload(
    pool: sglrl.Client, tmp_path: Path, root: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The gateway has processes of its own, where the client is one of ``sglrl.connect``."""
    monkeypatch.setenv("HOME", str(tmp_path))

    async def post(path: str, **body: Any) -> tuple[int, dict[str, Any]]:
        answer = await http.post(f"{root}{path}", json=body)
        return answer.status_code, answer.json()

    async with (
        sglrl.serve(pool, name="tiny", processes=2) as gateway,
        httpx.AsyncClient(base_url=gateway.url, timeout=300) as http,
    ):
        await load_and_unload(pool, gateway, http, tmp_path, post)
    folder = str(tmp_path / "adapter")
    async with sglrl.connect(pool.address) as remote:
        assert (await remote.load_lora("f", "~/adapter")).name == "f"
        with pytest.raises(sglrl.UsageError, match="adapter= must be a folder"):
            await remote.load_lora("g", tensors(), config=CONFIG)
        with pytest.raises(sglrl.UsageError, match="'f'"):
            await remote.load_lora("f", Path(folder))
        await remote.unload_lora("f")
        with pytest.raises(sglrl.UnknownAdapter):
            await remote.unload_lora("f")


async def load_and_unload(
    pool: sglrl.Client, gateway: Any, http: httpx.AsyncClient, home: Path, post: Any
) -> None:
    tmp_path = home / "adapter"
    tmp_path.mkdir()
    save_file(tensors(), tmp_path / "adapter_model.safetensors")
    (tmp_path / "adapter_config.json").write_text(json.dumps(CONFIG))
    folder = {"lora_name": "d", "lora_path": str(tmp_path), "pinned": True}
    status, made = await post("/load_lora_adapter", **folder)
    assert (status, made["success"]) == (200, True), made
    assert pool.loras["d"].version == made["version"]
    completion = {"model": "tiny:d", "prompt": [1, 2], "max_tokens": 2}
    assert (await http.post("/v1/completions", json=completion)).status_code == 200
    status, made = await post("/load_lora_adapter", **folder)
    assert (status, made["success"]) == (400, False)
    assert "'d'" in made["error_message"]
    status, made = await post("/load_lora_adapter", lora_name="e", lora_path="/no/such")
    assert status == 400
    assert "/no/such" in made["error_message"]
    status, made = await post("/load_lora_adapter", **{**folder, "load_inplace": True})
    assert (status, "load_inplace" in made["error_message"]) == (400, True)
    assert (await post("/load_lora_adapter", lora_name="e", lora_path=""))[0] == 400
    assert (await post("/load_lora_adapter", lora_name="e", lora_path="~/adapter"))[0] == 200
    assert (await post("/unload_lora_adapter", lora_name="e"))[0] == 200
    assert (await post("/unload_lora_adapter", lora_name="d"))[0] == 200
    assert "d" not in pool.loras
    status, made = await post("/unload_lora_adapter", lora_name="d")
    assert (status, made["success"]) == (404, False)
    async with gateway.session() as session:
        key = {"Authorization": f"Bearer {session.api_key}"}
        for path in ("/load_lora_adapter", "/unload_lora_adapter"):
            assert (await http.post(path, json=folder, headers=key)).status_code == 403


ENDPOINTS: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", {"model": "tiny:x", **CHAT}),
    ("/v1/chat/completions", {"model": "tiny:x", **CHAT, "stream": True}),
    ("/v1/chat/completions", {"model": "tiny", "lora_path": "x", **CHAT}),
    ("/v1/completions", {"model": "tiny:x", "prompt": [1, 2]}),
    ("/v1/completions", {"model": "tiny", "prompt": [1, 2], "lora_path": "x"}),
    ("/v1/responses", {"model": "tiny:x", "input": "Hi"}),
    ("/v1/messages", {"model": "tiny:x", "max_tokens": 3, "messages": HI}),
    ("/inference/v1/generate", {"model": "tiny:x", "token_ids": [1, 2], "sampling_params": {}}),
    ("/generate", {"input_ids": [[1, 2], [3]], "lora_path": ["a", "x"]}),
    ("/generate", {"input_ids": [1, 2], "lora_path": "x", "stream": True}),
]


@pytest.mark.parametrize(("path", "body"), ENDPOINTS)
async def test_unknown_adapters(http: httpx.AsyncClient, path: str, body: dict[str, Any]) -> None:
    answer = await http.post(path, json=body)
    assert answer.status_code == 404, answer.text
    says = answer.json()["error"]["message"]
    assert says == "no adapter 'x' is loaded (loaded: 'a', 'b:c')"
    replaced: dict[Any, Any] = {"tiny:x": "tiny:a", "x": "a"}
    known = {name: replaced.get(str(value), value) for name, value in body.items()}
    if isinstance(body.get("lora_path"), list):
        known["lora_path"] = ["a", None]
    assert (await http.post(path, json=known)).status_code == 200


async def test_wrong_requests(http: httpx.AsyncClient) -> None:
    both = await http.post(
        "/v1/chat/completions", json={"model": "tiny:a", "lora_path": "b", **CHAT}
    )
    assert both.status_code == 400
    assert "model selects the adapter 'a', and lora_path 'b': omit one" in both.text
    other = await http.post("/v1/chat/completions", json={"model": "gpt:a", **CHAT})
    assert other.status_code == 404
    assert "there is no model 'gpt:a'; there is: tiny, org:tiny" in other.text
    wrong = await http.post(
        "/v1/chat/completions", json={"model": "tiny", "lora_path": ["a"], **CHAT}
    )
    assert wrong.status_code == 400


async def test_a_session(pool: sglrl.Client, http: httpx.AsyncClient) -> None:
    """Each conversation has its own adapter, and each token the version that sampled it."""
    made = (await http.post("/sessions")).json()
    url = f"/sessions/{made['id']}/v1/chat/completions"

    async def ask(model: str, messages: list[Any], **more: Any) -> list[Any]:
        body = {"model": model, **CHAT, "messages": messages, **more}
        answer = await http.post(url, json=body)
        assert answer.status_code == 200, answer.text
        assert answer.json()["model"] == model
        return [*messages, answer.json()["choices"][0]["message"], {"role": "user", "content": "?"}]

    begun = pool.loras["a"].version
    after = await ask("tiny:a", HI)
    version = (await pool.update_weights(tensors(), lora="a")).version
    assert version == begun + 1
    await ask("tiny:a", after)
    await ask("any", after)
    await ask("any", HI, lora_path="b:c")
    ended = (await http.delete(f"/sessions/{made['id']}")).json()["trajectories"]
    found = [
        None if one["lora_versions"] is None else [v for v in one["lora_versions"] if v >= 0]
        for one in ended
    ]
    assert sorted(found, key=str) == sorted([[begun] * 3 + [version] * 3, None, [0] * 3], key=str)


async def test_a_rollout_with_an_adapter(pool: sglrl.Client) -> None:
    """Requests that select no adapter have the one of the session."""

    async def agent(session: sglrl.Session, item: Any) -> float:
        key = {"authorization": f"Bearer {session.api_key}"}
        url = session.base_url
        async with httpx.AsyncClient(headers=key, timeout=300) as http:
            cards = (await http.get(f"{url}/models")).json()["data"]
            for model in ("any", cards[-1]["id"]):
                answer = await http.post(f"{url}/chat/completions", json={"model": model, **CHAT})
                assert answer.status_code == 200, answer.text
        assert [turn.lora for turn in session.turns] == ["a", "b:c"]
        return 1.0

    async with sglrl.rollout(pool, agent, [{}], group_size=1, gateway=True, lora="a") as run:
        (group,) = [group async for group in run]
    (trajectory,) = group.trajectories
    versions = [int(leaf.lora_versions.max()) for leaf in trajectory.leaves]
    assert sorted(versions) == [0, pool.loras["a"].version]


async def test_clients_in_other_processes(pool: sglrl.Client) -> None:
    async with sglrl.connect(pool.address) as remote:
        with pytest.raises(sglrl.UsageError, match="listed by the process that launched"):
            _ = remote.loras
        assert {one.name: one for one in await remote.list_loras()} == pool.loras
