"""A client for synchronous callers. Its event loop runs in a separate thread."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import functools
import os
import threading
import weakref
from collections.abc import Callable, Coroutine, Iterator
from typing import TYPE_CHECKING, Any, NoReturn, Self, TypeVar

from ..client.client import Client
from ..errors import Closed, UsageError
from ..inference.chunk import Chunk
from ..remote.client import connect
from ..rollouts.agent import Agent
from ..rollouts.evaluation import Evaluation, Score, evaluate
from ..rollouts.run import Rollout, rollout
from ..sessions.session import Session
from ..transport.system_limits import open_standard_files, start_thread
from ..weights.update_report import UpdateReport
from .blocking_rollout import BlockingRollout
from .client_thread import ClientThread, plain
from .launch import launch
from .without_await import without_await

_T = TypeVar("_T")


@without_await(Client)
class BlockingClient:
    """``Client`` without ``await``. Several threads may use it.

    A blocking client has all public methods and properties of ``Client``. ``sglrl.blocking``
    returns a blocking client. Ctrl-C while a method waits cancels the call at the workers.
    """

    def __init__(self, client: Client) -> None:
        self.source = client
        """The client whose methods this client calls."""
        self.loop: asyncio.AbstractEventLoop | None = None
        self.thread: ClientThread | None = None
        self._lock = threading.Lock()
        """Held to submit a coroutine and to stop the loop. A stopped loop receives no coroutine."""
        self.runs: set[Rollout] = set()
        """The rollouts that were entered and are not yet closed."""

    def __enter__(self) -> Self:
        if self.loop is not None:
            raise UsageError("this client is running already; make another one")
        open_standard_files()
        thread = ClientThread(self.source, self.runs)
        try:
            start_thread(thread)
        except BaseException:
            thread.loop.close()
            raise
        self.loop, self.thread = thread.loop, thread
        # At interpreter exit, the finalizer of the thread runs in place of this one.
        weakref.finalize(self, thread.end_unclosed).atexit = False
        try:
            self.wait(self.source.__aenter__())
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Blocking{repr(self.source)[1:]}"

    def __reduce__(self) -> NoReturn:
        raise UsageError(
            "a client stays in the process that made it and cannot be pickled or copied; give the "
            "other process client.address, and call sglrl.blocking.connect(address) there"
        )

    def close(self, **kwargs: Any) -> None:
        """Close the client and its rollouts. See ``Client.close``."""
        thread = self.thread
        if thread is not None:
            try:
                self.wait(thread.close_client(**kwargs))
            finally:
                self._stop()

    def stream(self, *args: Any, **kwargs: Any) -> Iterator[Chunk]:
        """Yield the chunks of an answer as a plain iterator. See ``Client.stream``."""
        stream = self.source.stream(*args, **kwargs)
        iterator = aiter(stream)
        end = object()

        async def step() -> Any:
            return await anext(iterator, end)

        try:
            while (chunk := self.wait(step())) is not end:
                yield chunk
        finally:
            self.wait(stream.aclose())

    def session(self, *args: Any, **kwargs: Any) -> BlockingSession:
        """Return a session without ``await``. See ``Client.session``."""
        return BlockingSession(self, self.source.session(*args, **kwargs))

    def rollout(self, agent: Agent, dataset: Any, **kwargs: Any) -> BlockingRollout:
        """Return a rollout without ``await``. See ``sglrl.rollout``.

        The agent is still a coroutine function or a class. It runs on the client's thread, or in
        separate ``processes``, and continues while the caller trains.
        """
        return BlockingRollout(self, rollout(self.source, agent, dataset, **kwargs))

    def evaluate(self, items: Any, score: Score | None = None, **kwargs: Any) -> Evaluation:
        """Sample and score every item. See ``sglrl.evaluate``."""
        return self.wait(evaluate(self.source, items, score, **kwargs))

    def update_weights(self, weights: Any, **kwargs: Any) -> UpdateReport:
        """Update the weights of all workers. See ``Client.update_weights``."""
        from ..weights.tensor_source import take

        # ``take`` records the current CUDA stream of the thread that calls it. That must be the
        # caller's thread, because the caller computes the weights there.
        return self.wait(self.source.update_weights(take(weights), **kwargs))

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...

    def wait(self, work: Coroutine[Any, Any, _T]) -> _T:
        """Run a coroutine on the client's event loop, and return its result.

        Raises:
            Closed: the client is not running.
            UsageError: the calling thread is the thread of the loop, or the process was forked from
                the process of the client.
        """
        loop, thread = self.loop, self.thread
        if loop is None or thread is None:
            work.close()
            raise Closed("the client is not running; use 'with sglrl.blocking(...) as client'")
        if thread is threading.current_thread():
            work.close()
            raise UsageError(
                "a blocking method was called on the client's own event loop, which would wait for "
                "itself; an agent awaits the methods of its session"
            )
        if not thread.is_alive():
            work.close()
            raise UsageError(
                "this client's event loop is in the process that this one was forked from; give it "
                "client.address, and call sglrl.blocking.connect(address) here"
            )
        with self._lock:
            if self.loop is not loop:
                work.close()
                raise Closed("the client was closed")
            future: concurrent.futures.Future[_T] = asyncio.run_coroutine_threadsafe(work, loop)
        try:
            return future.result()
        except concurrent.futures.CancelledError:
            # Only closing the client cancels this future.
            raise Closed("the client was closed") from None
        except BaseException:
            future.cancel()
            raise

    def _stop(self) -> None:
        with self._lock:
            thread = self.thread
            self.loop = self.thread = None
        if thread is not None:
            thread.end()
            thread.join()


@without_await(Session)
class BlockingSession:
    """``Session`` without ``await``. Only one thread at a time may use it.

    A blocking session has all public methods and properties of ``Session``.
    ``BlockingClient.session`` makes one.
    """

    def __init__(self, client: BlockingClient, session: Session) -> None:
        self._client = client
        self.source = session
        self.wait = client.wait

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the session. See ``Session.close``."""
        # When the client is closed, no turn is left to release.
        with contextlib.suppress(Closed):
            self.wait(plain(self.source.close))

    def fork(self) -> BlockingSession:
        """Return a fork of the session, which another thread may use. See ``Session.fork``."""
        return BlockingSession(self._client, self.source.fork())

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...


class _Maker:
    """The function ``blocking``, with ``connect`` as an attribute."""

    def __init__(self, launch: Callable[..., BlockingClient]) -> None:
        self._launch = launch
        functools.update_wrapper(self, launch)

    def __call__(self, model: str | os.PathLike[str], **kwargs: Any) -> BlockingClient:
        return self._launch(model, **kwargs)

    @staticmethod
    def connect(address: str, **kwargs: Any) -> BlockingClient:
        """Connect to the pool of another process.

        Takes the arguments of ``sglrl.connect``. Usage: ``with sglrl.blocking.connect(address) as
        client``.
        """
        return BlockingClient(connect(address, **kwargs))


@_Maker
def blocking(model: str | os.PathLike[str], **kwargs: Any) -> BlockingClient:
    """Start workers and return a client without ``await``.

    Takes the arguments of ``sglrl.launch``. ``sglrl.blocking.connect`` connects to the pool of
    another process. Usage: ``with sglrl.blocking(model, ...) as client: client.generate(...)``.
    """
    return BlockingClient(launch(model, **kwargs))
