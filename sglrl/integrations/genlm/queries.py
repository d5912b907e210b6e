"""Send the queries of all callers to the engine, and the results back to the callers.

Queries made in one tick of an event loop are submitted together, and their results are returned
together. Equal queries that wait at the same time share one request to the engine.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from ...client.client import Client
from ...core.calls import Call
from ...errors import Closed, SglrlError
from ...inference.completion import NextTokenLogprobs
from .deliveries import Deliveries, Outcome, Waiter
from .engine_loop import EngineLoop

_AT_ONCE = 32
"""The maximum number of queries that are sent in one iteration of the engine's loop. So other tasks
of the loop are not delayed for long."""

# PyTorch warns about read-only memory once per program. Trigger the warning here and hide it:
# callers share the returned tensors and must not write to them anyway.
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    torch.from_numpy(np.frombuffer(b"\0\0\0\0", dtype=np.float32))


Key = bytes | tuple[bytes, str, int]
"""The token ids of a prompt as int32 bytes. With a LoRA adapter, a tuple of the token ids, the name
of the LoRA adapter, and a number that differs for each version of the LoRA adapter."""


class _Query:
    """One pending request for a distribution, and the futures that wait for it.

    ``NextTokenReply`` uses this object in place of a future.
    """

    __slots__ = ("_queries", "call", "key", "waiters")

    def __init__(self, queries: Queries, key: Key) -> None:
        self._queries = queries
        self.key = key
        self.waiters: list[Waiter] = []
        self.call: Call | None = None

    def done(self) -> bool:
        return False

    def set_result(self, answer: NextTokenLogprobs) -> None:
        self._queries._found(self, answer)

    def set_exception(self, error: SglrlError) -> None:
        self._queries._answer(self, error)


class Queries:
    """The pending queries of a model.

    Attributes:
        inflight: the pending queries by key. Later queries with the same key join them.
        unanswered: all pending queries, including queries from before a weight update, which new
            queries must not join.

    Args:
        engine: the client that runs the queries.
        loop: the event loop of the client.
        keep: called on ``loop`` with the token ids and the result of each query that the current
            weights have answered without a LoRA adapter.
        top_k: as in ``AsyncSGLTransformer``.
        timeout: as in ``AsyncSGLTransformer``.
    """

    def __init__(
        self,
        engine: Client,
        loop: EngineLoop,
        keep: Callable[[bytes, torch.Tensor], None],
        top_k: int | None,
        timeout: float | None,
    ) -> None:
        self._engine = engine
        self._loop = loop
        self._keep = keep
        self._top_k = top_k
        self._timeout = timeout
        self._vocab_size = engine.info.vocab_size
        self._deliveries = Deliveries(loop.loop)
        self._asked: dict[asyncio.AbstractEventLoop, list[tuple[Key, Any]]] = {}
        """For each loop, the keys and futures of its current tick. Only the thread of a loop uses
        the entry of the loop."""
        # The two attributes below are used only on the engine's loop.
        self.inflight: dict[Key, _Query] = {}
        self.unanswered: set[_Query] = set()

    # --- on the caller's thread -------------------------------------------------------------------

    def ask(self, key: Key) -> asyncio.Future[torch.Tensor]:
        """Submit a query together with the other queries of this tick of the running loop."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[torch.Tensor] = loop.create_future()
        if loop is self._loop.loop:
            self._submit([(key, Waiter(loop, future))])
        elif loop in self._asked:
            self._asked[loop].append((key, future))
        else:
            self._asked[loop] = [(key, future)]
            loop.call_soon(self._submit_tick, loop)
        return future

    def _submit_tick(self, loop: asyncio.AbstractEventLoop) -> None:
        asked = [(key, Waiter(loop, future)) for key, future in self._asked.pop(loop)]
        try:
            self._loop.post(self._submit, asked)
        except Closed as error:
            self._deliveries.arrive(loop, [(waiter.future, error) for _, waiter in asked])

    def ask_from_thread(self, keys: Sequence[Key]) -> list[concurrent.futures.Future[torch.Tensor]]:
        """Submit queries together. The caller may block until they are answered.

        Raises:
            Closed: the client is closed.
        """
        futures: list[concurrent.futures.Future[torch.Tensor]] = [
            concurrent.futures.Future() for _ in keys
        ]
        waiters = [Waiter(None, future) for future in futures]
        self._loop.post(self._submit, list(zip(keys, waiters, strict=True)))
        return futures

    def reset(self) -> None:
        """Cancel all pending queries; see ``AsyncSGLTransformer.reset_async_queries``."""
        for loop, asked in list(self._asked.items()):
            waiting, asked[:] = list(asked), []
            self._deliveries.send(loop, [(future, None) for _, future in waiting])
        if not self._loop.loop.is_closed():
            self._loop.run(self._cancel)

    # --- on the engine's loop ---------------------------------------------------------------------

    def forget(self) -> None:
        """Let no new query join the pending queries, because old weights may answer them."""
        self.inflight.clear()

    def _submit(self, asked: list[tuple[Key, Waiter]], begin: int = 0) -> None:
        end = begin + _AT_ONCE
        if end < len(asked):
            # Split long batches, which would hold the interpreter lock for long.
            self._loop.loop.call_soon(self._submit, asked, end)
        for key, waiter in asked[begin:end]:
            query = self.inflight.get(key)
            if query is not None:
                query.waiters.append(waiter)
                continue
            query = self.inflight[key] = _Query(self, key)
            self.unanswered.add(query)
            query.waiters.append(waiter)
            try:
                future: Any = query
                requests = self._engine.requests
                ids, lora, _ = (key, "", 0) if isinstance(key, bytes) else key
                options = requests.options(timeout=self._timeout, lora=lora or None)
                query.call = requests.next_token_call(ids, self._top_k, future, options)
                requests.driver.submit(query.call)
            except SglrlError as error:
                self._answer(query, error)

    def _found(self, query: _Query, answer: NextTokenLogprobs) -> None:
        logprobs = torch.from_numpy(answer.logprobs)
        if answer.token_ids is not None:
            likeliest = logprobs
            logprobs = torch.full((self._vocab_size,), -torch.inf)
            logprobs[torch.from_numpy(answer.token_ids).long()] = likeliest
        if answer.version == self._engine.weight_version and isinstance(query.key, bytes):
            self._keep(query.key, logprobs)
        self._answer(query, logprobs)

    def _answer(self, query: _Query, outcome: Outcome) -> None:
        """Send the outcome to all waiters of a query."""
        self.unanswered.discard(query)
        if self.inflight.get(query.key) is query:
            del self.inflight[query.key]
        # Break the reference cycle of call and query. Otherwise the result stays in memory until
        # the garbage collector runs.
        query.call = None
        waiters, query.waiters = query.waiters, []
        for waiter in waiters:
            self._deliveries.add(waiter, outcome)

    def _cancel(self) -> None:
        driver = self._engine.requests.driver
        for query in list(self.unanswered):
            if driver is not None and query.call is not None:
                driver.cancel(query.call)
            self._answer(query, None)
