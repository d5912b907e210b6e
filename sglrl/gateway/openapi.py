"""The OpenAPI document of a gateway, made from its routes and the structs of their bodies."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

import msgspec
from starlette.routing import Mount, Route

from ..config import __version__
from .errors import HttpError

_JSON: Final = "application/json"
_KEYS: Final = {
    "bearer": {"type": "http", "scheme": "bearer"},
    "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
}
"""The headers in which ``key_of`` finds the key of a request."""


class ApiRoute(Route):  # type: ignore[misc]
    """An endpoint, with the facts that the OpenAPI document states about it.

    Args:
        path: the path of the endpoint.
        handler: answers the requests.
        methods: the HTTP methods of the endpoint.
        error: makes the body of an answer from an error.
        body: the struct with the fields of a request. None: the body of a request is not read.
        query: for each parameter of the query, its possible values.
        media_type: the media type of an answer.
        public: whether requests need no key.
    """

    def __init__(
        self,
        path: str,
        handler: Any,
        methods: Sequence[str],
        *,
        error: Callable[[HttpError], Any],
        body: type[msgspec.Struct] | None = None,
        query: Mapping[str, Sequence[str]] | None = None,
        media_type: str = _JSON,
        public: bool = False,
    ) -> None:
        super().__init__(path, handler, methods=methods)
        self.error = error
        self.body = body
        self.query = query or {}
        self.media_type = media_type
        self.public = public

    async def handle(self, scope: Any, receive: Any, send: Any) -> None:
        # If the method is not allowed, the application makes the answer with this function.
        scope["error_body"] = self.error
        await super().handle(scope, receive, send)


def document(routes: Sequence[Any], needs_key: bool) -> dict[str, Any]:
    """Return an OpenAPI 3.1 document.

    Args:
        routes: the routes of the application. Each is an ``ApiRoute``, or a ``Mount`` of routes.
        needs_key: whether requests without a key are rejected.
    """
    flat = list(_flat(routes))
    bodies = sorted(
        {route.body for _, route in flat if route.body is not None},
        key=lambda body: (body.__name__, body.__module__),
    )
    schemas, components = msgspec.json.schema_components(
        bodies, ref_template="#/components/schemas/{name}"
    )
    by_body = dict(zip(bodies, schemas, strict=True))
    paths: dict[str, Any] = {}
    for path, route in flat:
        item = paths.setdefault(path, {})
        for method in sorted(route.methods - {"HEAD"}):
            item[method.lower()] = _operation(route, by_body)
        if names := _names(path):
            item["parameters"] = [_parameter(name, "path", {"type": "string"}) for name in names]
    return {
        "openapi": "3.1.0",
        "info": {"title": "sglrl gateway", "version": __version__},
        "paths": paths,
        "components": {"schemas": components, "securitySchemes": _KEYS},
        "security": [{name: []} for name in _KEYS] + [{}] * (not needs_key),
    }


def _flat(routes: Sequence[Any], prefix: str = "") -> Iterator[tuple[str, ApiRoute]]:
    """Yield all routes with their whole paths."""
    for route in routes:
        if isinstance(route, Mount):
            yield from _flat(route.routes, prefix + route.path)
        else:
            # ``path_format`` is the path without the types of its parameters.
            yield prefix + route.path_format, route


def _names(path: str) -> list[str]:
    """Return the names of the parameters in a path."""
    return [part[1:-1] for part in path.split("/") if part.startswith("{")]


def _operation(route: ApiRoute, schemas: Mapping[Any, Any]) -> dict[str, Any]:
    success: dict[str, Any] = {route.media_type: {}}
    error = {_JSON: {"schema": _schema_of(route.error(HttpError(400, "")))}}
    made: dict[str, Any] = {
        "responses": {
            "2XX": {"description": "success", "content": success},
            "4XX": {"description": "the request is wrong", "content": error},
            "5XX": {"description": "the request failed", "content": error},
        }
    }
    if route.public:
        made["security"] = []
    if route.query:
        made["parameters"] = [
            _parameter(name, "query", {"enum": list(values)})
            for name, values in route.query.items()
        ]
    if route.body is not None:
        fields = msgspec.structs.fields(route.body)
        made["requestBody"] = {
            "required": any(field.required for field in fields),
            "content": {_JSON: {"schema": schemas[route.body]}},
        }
        if any(field.name == "stream" for field in fields):
            success["text/event-stream"] = {}
    return made


def _parameter(name: str, place: str, schema: Mapping[str, Any]) -> dict[str, Any]:
    return {"name": name, "in": place, "required": place == "path", "schema": schema}


def _schema_of(value: Any) -> dict[str, Any]:
    """Return the schema of JSON with the structure of ``value``. None stands for any value."""
    match value:
        case dict():
            fields = {name: _schema_of(field) for name, field in value.items()}
            return {"type": "object", "properties": fields, "required": list(fields)}
        case bool():
            return {"type": "boolean"}
        case int():
            return {"type": "integer"}
        case str():
            return {"type": "string"}
    return {}
