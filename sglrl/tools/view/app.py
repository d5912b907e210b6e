"""The HTTP server of the viewer: the page, its data as JSON, and events."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from importlib.resources import files
from typing import Any, Final

import msgspec
import numpy as np
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from ...errors import SglrlError, UsageError
from ...sessions.live import LiveState, live_state
from .details import details, patch
from .forks import ForkRequest, Forks, is_fork
from .rows import FINISH, Filter, parse
from .store import FORKS, Store
from .timeline import timeline
from .watching import Watching

_PAGE: Final = files(__package__) / "static"
_TYPES: Final = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
}
_HEADERS: Final = {
    # The page loads nothing from other hosts, and text of a model is never run.
    "Content-Security-Policy": "default-src 'self'; img-src data:; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}
_SEARCH_SECONDS: Final = 0.3
_MOST_ROWS: Final = 1000
_EVENT_SECONDS: Final = 0.05
"""The shortest time between two events for a page."""
_encoder = msgspec.json.Encoder(enc_hook=repr)

Endpoint = Callable[[Request], Awaitable[Response]]


class Viewer:
    """Answers the requests of pages.

    Args:
        store: the trajectories.
        watching: the running pool, or None.
        read_only: whether pages may not fork.

    Attributes:
        secret: is part of the page's address, and then a cookie. Other users of the machine and
            other web sites do not know it.
        app: the ASGI application.
    """

    def __init__(self, store: Store, watching: Watching | None, *, read_only: bool) -> None:
        self.secret = secrets.token_urlsafe(16)
        self._store = store
        self._watching = watching
        self._forks: Forks | None = None
        if watching is not None and not read_only:
            self._forks = Forks(watching.client, store)
        self._searches: dict[tuple[str, str, int], _Search] = {}
        self.app = Starlette(
            routes=[
                self._route("/", self._index),
                self._route("/static/{name}", self._static),
                self._route("/api/about", self._about),
                self._route("/api/rows", self._rows),
                self._route("/api/rows/{row:int}", self._row),
                self._route("/api/groups", self._groups),
                self._route("/api/timeline/{row:int}", self._timeline),
                self._route("/api/state", self._state),
                self._route("/api/live/{id}", self._live),
                self._route("/api/forks", self._fork, "POST"),
                self._route("/api/forks/{id}", self._end_fork, "DELETE"),
            ],
            lifespan=self._lifespan,
        )

    @contextlib.asynccontextmanager
    async def _lifespan(self, app: Starlette) -> AsyncIterator[None]:
        task = None
        if self._watching is not None:
            task = asyncio.create_task(self._watching.run())
        try:
            yield
        finally:
            if self._forks is not None:
                await self._forks.close()
            if task is not None:
                task.cancel()
                await asyncio.wait([task])

    def _route(self, path: str, endpoint: Endpoint, method: str = "GET") -> Route:
        """Return a route for requests that know the secret, with errors as JSON."""

        async def answer(request: Request) -> Response:
            cookie = f"sglrl_view_{request.url.port}"
            given = request.query_params.get("key") or request.cookies.get(cookie, "")
            if not hmac.compare_digest(given.encode(), self.secret.encode()):
                raise HTTPException(403, "open the address that sglrl view has printed")
            try:
                response = await endpoint(request)
            except (SglrlError, msgspec.MsgspecError) as error:
                response = _json({"error": str(error)}, 400)
            except IndexError:
                response = _json({"error": "no trajectory has this number"}, 404)
            response.headers.update(_HEADERS)
            if "key" in request.query_params:
                response.set_cookie(cookie, self.secret, httponly=True, samesite="strict")
            return response

        return Route(path, answer, methods=[method])

    async def _index(self, request: Request) -> Response:
        return _file("index.html")

    async def _static(self, request: Request) -> Response:
        return _file(request.path_params["name"])

    async def _about(self, request: Request) -> Response:
        store, watching = self._store, self._watching
        pool = None
        if watching is not None:
            pool = {"model": watching.client.model, "version": watching.client.weight_version}
        return _json(
            {
                "sources": store.rows.sources,
                "loading": store.loading,
                "rows": store.rows.count,
                "groups": len(store.rows.items),
                "problems": store.problems,
                "tokenizer": store.decode is not None,
                "pool": pool,
                "forks": self._forks is not None,
            }
        )

    # --- trajectories -----------------------------------------------------------------------------

    async def _rows(self, request: Request) -> Response:
        """Return some rows that fulfil a filter, in an order.

        A search for words continues with each request, until ``searched`` is ``of``.
        """
        query = request.query_params
        search = self._search(query.get("filter", ""), query.get("sort", ""))
        await run_in_threadpool(search.go_on, self._store)
        begin = int(query.get("offset", 0))
        end = begin + min(_MOST_ROWS, int(query.get("limit", 100)))
        found = search.found[begin:end]
        return _json(
            {
                "total": self._store.rows.count,
                "loading": self._store.loading,
                "matched": len(search.found),
                "searched": search.at,
                "of": len(search.numbers),
                "rows": await run_in_threadpool(lambda: [self._row_of(int(n)) for n in found]),
            }
        )

    def _search(self, text: str, sort: str) -> _Search:
        """Return the search with this filter and order among the present rows."""
        key = (text, sort, self._store.rows.count)
        search = self._searches.get(key)
        if search is None:
            wanted = parse(text)
            search = _Search(wanted, self._ordered(wanted, sort))
            # Keep the latest searches only.
            self._searches = {**dict(list(self._searches.items())[-3:]), key: search}
        return search

    def _ordered(self, wanted: Filter, sort: str) -> Any:
        rows = self._store.rows
        numbers = rows.matching(wanted)
        name = sort.lstrip("-")
        return rows.order(numbers, name, sort.startswith("-")) if name else numbers

    def _row_of(self, number: int) -> dict[str, Any]:
        rows = self._store.rows
        row = rows.values[number]
        names = rows.values.dtype.names or ()
        values = {name: row[name].item() for name in names if name not in ("offset", "bytes")}
        values.update(
            row=number,
            item=rows.items[row["group"]],
            source=rows.sources[row["source"]],
            finish=FINISH[row["finish"]],
            preview=self._store.preview(number),
        )
        return values

    async def _row(self, request: Request) -> Response:
        number = request.path_params["row"]
        record = await run_in_threadpool(self._store.record, number)
        shown = await run_in_threadpool(details, record, (), self._store.pieces)
        row = await run_in_threadpool(self._row_of, number)
        error = self._store.errors.get(number, "")
        return _json({**shown, "row": row, "error": error})

    async def _groups(self, request: Request) -> Response:
        """Return the mean, the least and the largest reward of each group, for the plot."""
        rows = self._store.rows
        numbers = rows.matching(parse(request.query_params.get("filter", "")))
        chosen = rows.values[numbers]
        # A fork has no reward.
        forks = rows.sources.index(FORKS) if FORKS in rows.sources else -1
        rewarded = ~chosen["failed"] & (chosen["source"] != forks)
        numbers, chosen = numbers[rewarded], chosen[rewarded]
        groups, first, at = np.unique(chosen["group"], return_index=True, return_inverse=True)
        count = np.bincount(at, minlength=len(groups))
        least = np.full(len(groups), np.inf)
        most = np.full(len(groups), -np.inf)
        np.minimum.at(least, at, chosen["reward"])
        np.maximum.at(most, at, chosen["reward"])
        total = np.bincount(at, weights=chosen["reward"], minlength=len(groups))
        return _json(
            {
                "group": groups.tolist(),
                "row": numbers[first].tolist(),
                "version": chosen["oldest"][first].tolist(),
                "count": count.tolist(),
                "mean": (total / np.maximum(count, 1)).tolist(),
                "least": least.tolist(),
                "most": most.tolist(),
            }
        )

    async def _timeline(self, request: Request) -> Response:
        number = request.path_params["row"]
        found = None if self._watching is None else self._watching.snapshot
        updates = [] if found is None else found.updates
        if not 0 <= number < self._store.rows.count:
            raise IndexError(number)
        return _json(await run_in_threadpool(timeline, self._store, number, updates))

    # --- a running pool ---------------------------------------------------------------------------

    async def _state(self, request: Request) -> Response:
        if self._watching is None:
            raise UsageError("no pool is watched")
        return _events(self._watching.states())

    async def _live(self, request: Request) -> Response:
        if self._watching is None:
            raise UsageError("no pool is watched")
        return _events(self._states_of(request.path_params["id"]))

    async def _states_of(self, id_: str) -> AsyncGenerator[dict[str, Any], None]:
        """Yield what changes in a running sample or fork, and at last how it has ended."""
        assert self._watching is not None
        turns = tokens = -1
        shown: dict[str, Any] | None = None
        record = sample = before = row = None
        why = ""
        try:
            while (state := await self._state_of(id_, turns, tokens)) is not None:
                if sample is None:
                    before = self._watching.ended_row(state.sample)
                sample = state.sample
                if (turns, tokens) != (sample.turns, sample.tokens) or shown is None:
                    turns, tokens = sample.turns, sample.tokens
                    record = state.trajectory or record
                    shows = record, state.running, self._store.pieces
                    made = await run_in_threadpool(details, *shows)
                    yield {**patch(shown, made), "sample": sample}
                    shown = made
            if self._forks is not None and is_fork(id_):
                row, why = await self._forks.end_of(id_)
            elif sample is not None:
                row = await self._watching.row_after(sample, before)
        except SglrlError as error:
            why = str(error)
        yield {"ended": True, "error": why, "row": row, "sample": sample}

    async def _state_of(self, id_: str, turns: int, tokens: int) -> LiveState | None:
        assert self._watching is not None
        client = self._watching.client
        if is_fork(id_):
            sessions = client.requests.sessions
            return await live_state(sessions, id_, turns, tokens, 10.0, time.time())
        return await client.live_state(id_, turns, tokens)

    async def _fork(self, request: Request) -> Response:
        if self._forks is None:
            raise UsageError(
                "this page only shows: start sglrl view with a running pool, without --read-only"
            )
        wanted = msgspec.json.decode(await request.body(), type=ForkRequest)
        return _json({"id": self._forks.begin(wanted)})

    async def _end_fork(self, request: Request) -> Response:
        if self._forks is not None:
            await self._forks.cancel(request.path_params["id"])
        return _json({})


class _Search:
    """The rows that fulfil a filter, as far as they have been searched.

    Attributes:
        numbers: the rows that fulfil the terms of the filter, in order.
        at: how many of them have been searched for the words of the filter.
        found: those that contain the words.
    """

    def __init__(self, wanted: Filter, numbers: Any) -> None:
        self._wanted = wanted
        self.numbers = numbers
        self.at = 0 if wanted.words else len(numbers)
        self.found: Any = [] if wanted.words else numbers

    def go_on(self, store: Store) -> None:
        if self.at < len(self.numbers):
            rest = self.numbers[self.at :]
            found, read = store.find(rest, self._wanted, _SEARCH_SECONDS)
            self.found += found
            self.at += read


def _json(value: Any, status: int = 200) -> Response:
    return Response(_encoder.encode(value), status, media_type="application/json")


def _file(name: str) -> Response:
    found = _PAGE / name
    kind = _TYPES.get("." + name.rpartition(".")[2])
    if kind is None or "/" in name or not found.is_file():
        raise HTTPException(404)
    return Response(found.read_bytes(), headers={"Content-Type": kind})


def _events(values: AsyncGenerator[dict[str, Any], None]) -> Response:
    """Return a stream of server-sent events.

    A page that does not read delays only its own generator.
    """

    async def stream() -> AsyncGenerator[bytes, None]:
        async with contextlib.aclosing(values):
            async for value in values:
                yield b"data: " + _encoder.encode(value) + b"\n\n"
                # Several changes within this time become one event.
                await asyncio.sleep(_EVENT_SECONDS)

    return StreamingResponse(stream(), media_type="text/event-stream")
