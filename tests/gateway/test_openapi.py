"""The OpenAPI document of a gateway."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import schemathesis
from starlette.routing import Mount, Route

import sglrl
from sglrl.gateway.app import DIALECTS, Endpoints
from sglrl.gateway.chat import ChatRequest
from sglrl.gateway.errors import HttpError
from sglrl.gateway.registry import Registry
from sglrl.gateway.serve import serve
from sglrl.gateway.settings import Settings


@pytest.fixture
async def endpoints() -> Any:
    async with sglrl.launch("tiny", engine="fake") as client:
        registry = Registry(client, expire_after=60, most=10)
        yield Endpoints(client, registry, Settings(names=("tiny",), api_key="x"))


def routes(given: Any, prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield the path and the method of each route, below sessions too."""
    for route in given:
        if isinstance(route, Mount):
            yield from routes(route.routes, prefix + route.path)
            continue
        assert isinstance(route, Route)
        for method in route.methods or ():
            if method != "HEAD":
                yield prefix + route.path.replace(":path}", "}"), method.lower()


async def test_document(endpoints: Endpoints) -> None:
    made = endpoints._document
    schema = schemathesis.openapi.from_dict(made)
    schema.validate()
    listed = {(one.ok().path, one.ok().method) for one in schema.get_all_operations()}
    assert listed == set(routes(endpoints.app.routes))
    assert ("/sessions/{session}/v1/chat/completions", "post") in listed

    schemas = made["components"]["schemas"]
    for dialect in DIALECTS:
        operation = made["paths"][dialect.path]["post"]
        content = operation["requestBody"]["content"]["application/json"]
        fields = schemas[content["schema"]["$ref"].rpartition("/")[2]]["properties"]
        assert set(fields) == set(dialect.body.__struct_fields__)
        assert "text/event-stream" in operation["responses"]["2XX"]["content"]
        error = operation["responses"]["4XX"]["content"]["application/json"]["schema"]
        assert set(error["properties"]) == set(dialect.error(HttpError(400, "")))
    assert schemas["ChatRequest"]["required"] == ["messages"]
    assert "top_k" in ChatRequest.__struct_fields__
    names = [one["name"] for one in made["paths"]["/sessions/{session}/reward"]["parameters"]]
    assert names == ["session"]
    assert made["security"] == [{"bearer": []}, {"x-api-key": []}]
    for path in ("/health", "/openapi.json"):
        assert made["paths"][path]["get"]["security"] == []


async def test_it_is_public() -> None:
    async with (
        sglrl.launch("tiny", engine="fake") as client,
        serve(client, name="tiny", api_key="secret") as gateway,
        httpx.AsyncClient(base_url=gateway.url) as http,
    ):
        answer = await http.get("/openapi.json")
        assert answer.status_code == 200
        assert answer.json()["openapi"] == "3.1.0"
        assert (await http.get("/v1/models")).status_code == 401


async def test_a_wrong_method(endpoints: Endpoints) -> None:
    """The error has the form of its API, and lists the methods."""
    transport = httpx.ASGITransport(endpoints.app)
    async with httpx.AsyncClient(transport=transport, base_url="http://x") as http:
        for path, form in (
            ("/v1/messages", {"type", "error"}),
            ("/sessions/1/v1/messages", {"type", "error"}),
            ("/v1/chat/completions", {"error"}),
            ("/update_weights_from_disk", {"success", "message"}),
        ):
            answer = await http.get(path)
            assert answer.status_code == 405
            assert answer.headers["allow"] == "POST"
            assert form <= set(answer.json())
        answer = await http.post("/health")
        assert answer.status_code == 405
        assert set(answer.headers["allow"].split(", ")) == {"GET", "HEAD"}
