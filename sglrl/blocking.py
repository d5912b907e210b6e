"""The same client for synchronous callers, on an event loop in a thread of its own."""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
import threading
from collections.abc import Coroutine, Iterator
from typing import Any, Self, TypeVar

import uvloop

from .client import Client, WorkerStats
from .completion import Chunk
from .errors import Closed
from .launch import launch
from .messages import EngineInfo
from .pool import WorkerInfo
from .weights.local import TensorMetadata
from .weights.report import UpdateReport

_T = TypeVar("_T")


class BlockingClient:
    """``Client`` without ``await``; made by ``sglrl.blocking``. May be used from several threads.

    A Ctrl-C while a method waits cancels the call at the workers.
    """

    def __init__(self, client: Client) -> None:
        self._client = client
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Self:
        self._loop = uvloop.new_event_loop()
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="sglrl-blocking", daemon=True
        )
        self._thread.start()
        try:
            self._wait(self._client.__aenter__())
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self, **kwargs: Any) -> None:
        """See ``Client.close``."""
        if self._loop is not None:
            try:
                self._wait(self._client.close(**kwargs))
            finally:
                self._stop()

    def add_workers(self, n: int = 1) -> list[int]:
        """See ``Client.add_workers``."""
        return self._wait(self._client.add_workers(n))

    def remove_worker(self, worker: int, **kwargs: Any) -> None:
        """See ``Client.remove_worker``."""
        self._wait(self._client.remove_worker(worker, **kwargs))

    def wait_until_full(self, timeout: float = 60.0) -> None:
        """See ``Client.wait_until_full``."""
        self._wait(self._client.wait_until_full(timeout))

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """See ``Client.generate``."""
        return self._wait(self._client.generate(*args, **kwargs))

    def stream(self, *args: Any, **kwargs: Any) -> Iterator[Chunk]:
        """See ``Client.stream``; a plain iterator."""
        stream = self._client.stream(*args, **kwargs)
        iterator = aiter(stream)
        end = object()

        async def step() -> Any:
            return await anext(iterator, end)

        try:
            while (chunk := self._wait(step())) is not end:
                yield chunk
        finally:
            self._wait(stream.aclose())

    def score(self, *args: Any, **kwargs: Any) -> Any:
        """See ``Client.score``."""
        return self._wait(self._client.score(*args, **kwargs))

    def update_weights(self, weights: Any, **kwargs: Any) -> UpdateReport:
        """See ``Client.update_weights``."""
        from .weights.source import take

        # Here, because what is awaited on a GPU is the calling thread's current stream.
        return self._wait(self._client.update_weights(take(weights), **kwargs))

    def update_weights_from_disk(self, path: str | os.PathLike[str], **kwargs: Any) -> UpdateReport:
        """See ``Client.update_weights_from_disk``."""
        return self._wait(self._client.update_weights_from_disk(path, **kwargs))

    def connect_weights(self, **kwargs: Any) -> float:
        """See ``Client.connect_weights``."""
        return self._wait(self._client.connect_weights(**kwargs))

    def verify_weights(self, weights: Any, **kwargs: Any) -> list[str]:
        """See ``Client.verify_weights``."""
        return self._wait(self._client.verify_weights(weights, **kwargs))

    def model_metadata(self, **kwargs: Any) -> dict[str, TensorMetadata]:
        """See ``Client.model_metadata``."""
        return self._wait(self._client.model_metadata(**kwargs))

    @property
    def weight_version(self) -> int:
        """See ``Client.weight_version``."""
        return self._client.weight_version

    @property
    def weights_address(self) -> str:
        """See ``Client.weights_address``."""
        return self._client.weights_address

    def stats(self) -> list[WorkerStats]:
        """See ``Client.stats``."""
        return self._wait(self._client.stats())

    def flush_cache(self) -> bool:
        """See ``Client.flush_cache``."""
        return self._wait(self._client.flush_cache())

    @property
    def info(self) -> EngineInfo:
        """See ``Client.info``."""
        return self._client.info

    @property
    def workers(self) -> list[WorkerInfo]:
        """See ``Client.workers``."""
        return self._client.workers

    @property
    def tokenizer(self) -> Any:
        """See ``Client.tokenizer``."""
        return self._client.tokenizer

    def _wait(self, work: Coroutine[Any, Any, _T]) -> _T:
        loop = self._loop
        if loop is None:
            work.close()
            raise Closed("the client is not running; use 'with sglrl.blocking(...) as client'")
        future: concurrent.futures.Future[_T] = asyncio.run_coroutine_threadsafe(work, loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def _stop(self) -> None:
        loop, thread = self._loop, self._thread
        self._loop = self._thread = None
        if loop is not None and thread is not None:
            loop.call_soon_threadsafe(loop.stop)
            thread.join()
            loop.close()


def blocking(model: str | os.PathLike[str], **kwargs: Any) -> BlockingClient:
    """``with sglrl.blocking(model, ...) as client: client.generate(...)``. Takes what
    ``sglrl.launch`` takes."""
    return BlockingClient(launch(model, **kwargs))
