"""A client for synchronous callers. Its event loop runs in a separate thread."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import functools
import os
import threading
import weakref
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from typing import Any, NoReturn, Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from ..config import open_standard_files
from ..driver.worker_info import QueueInfo, WorkerInfo
from ..errors import Closed, UsageError
from ..inference.adapters import LoraInfo
from ..inference.chunk import Chunk
from ..inference.client import Client
from ..inference.completion import Completion, NextTokenLogprobs
from ..inference.engine_controls import WorkerStats
from ..inference.message import ToolCall
from ..inference.prompts import Message
from ..remote.client import connect
from ..rollouts.agent import Agent
from ..rollouts.run import Rollout, rollout
from ..sessions.rewards import RewardValue
from ..sessions.session import Session
from ..sessions.tools import Tool
from ..sessions.trajectory import Trajectory
from ..system_limits import start_thread
from ..weights.local_sender import TensorMetadata
from ..weights.update_report import UpdateReport
from ..wire.engine import EngineInfo
from .blocking_rollout import BlockingRollout
from .client_thread import ClientThread, plain
from .launching import launch

_T = TypeVar("_T")


class BlockingClient:
    """``Client`` without ``await``. Several threads may use it.

    ``sglrl.blocking`` makes it. Ctrl-C while a method waits cancels the call at the workers.
    """

    def __init__(self, client: Client) -> None:
        self._client = client
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: ClientThread | None = None
        self._lock = threading.Lock()
        """Held to submit work to the loop, so that the loop is not stopped before it has it."""
        self._runs: set[Rollout] = set()
        """The rollouts that were entered and are not closed."""

    def __enter__(self) -> Self:
        if self._loop is not None:
            raise UsageError("this client is running already; make another one")
        open_standard_files()
        thread = ClientThread(self._client, self._runs)
        try:
            start_thread(thread)
        except BaseException:
            thread.loop.close()
            raise
        self._loop, self._thread = thread.loop, thread
        # At interpreter exit, the thread has a finalizer of its own.
        weakref.finalize(self, thread.end_unclosed).atexit = False
        try:
            self._wait(self._client.__aenter__())
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Blocking{repr(self._client)[1:]}"

    def __reduce__(self) -> NoReturn:
        raise UsageError(
            "a client stays in the process that made it and cannot be pickled or copied; give the "
            "other process client.address, and call sglrl.blocking.connect(address) there"
        )

    def close(self, **kwargs: Any) -> None:
        """See ``Client.close``."""
        thread = self._thread
        if thread is not None:
            try:
                self._wait(thread.close_client(**kwargs))
            finally:
                self._stop()

    def add_workers(self, n: int = 1) -> list[int]:
        """See ``Client.add_workers``."""
        return self._wait(self._client.add_workers(n))

    def remove_worker(self, worker: int, **kwargs: Any) -> None:
        """See ``Client.remove_worker``."""
        self._wait(self._client.remove_worker(worker, **kwargs))

    def wait_until_full(self, timeout: float | None = 60.0) -> None:
        """See ``Client.wait_until_full``."""
        self._wait(self._client.wait_until_full(timeout))

    @property
    def loras(self) -> dict[str, LoraInfo]:
        """See ``Client.loras``."""
        return self._client.loras

    def load_lora(self, name: str, adapter: Any, **kwargs: Any) -> LoraInfo:
        """See ``Client.load_lora``."""
        return self._wait(self._client.load_lora(name, adapter, **kwargs))

    def unload_lora(self, name: str, **kwargs: Any) -> None:
        """See ``Client.unload_lora``."""
        self._wait(self._client.unload_lora(name, **kwargs))

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """See ``Client.generate``."""
        return self._wait(self._client.generate(*args, **kwargs))

    def stream(self, *args: Any, **kwargs: Any) -> Iterator[Chunk]:
        """See ``Client.stream``. Returns a plain iterator."""
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

    def session(self, *args: Any, **kwargs: Any) -> BlockingSession:
        """See ``Client.session``."""
        return BlockingSession(self, self._client.session(*args, **kwargs))

    def rollout(self, agent: Agent, dataset: Any, **kwargs: Any) -> BlockingRollout:
        """See ``sglrl.rollout``.

        The agent is the same: a coroutine function or a class. It runs on the client's thread, or
        in separate ``processes``, and continues while the caller trains.
        """
        return BlockingRollout(self, rollout(self._client, agent, dataset, **kwargs))

    def score(self, *args: Any, **kwargs: Any) -> Any:
        """See ``Client.score``."""
        return self._wait(self._client.score(*args, **kwargs))

    def next_token_logprobs(self, *args: Any, **kwargs: Any) -> NextTokenLogprobs:
        """See ``Client.next_token_logprobs``."""
        return self._wait(self._client.next_token_logprobs(*args, **kwargs))

    def sleep(self, *args: Any, **kwargs: Any) -> None:
        """See ``Client.sleep``."""
        self._wait(self._client.sleep(*args, **kwargs))

    def wake(self, *args: Any, **kwargs: Any) -> None:
        """See ``Client.wake``."""
        self._wait(self._client.wake(*args, **kwargs))

    def pause(self, *args: Any, **kwargs: Any) -> None:
        """See ``Client.pause``."""
        self._wait(self._client.pause(*args, **kwargs))

    def resume(self, **kwargs: Any) -> None:
        """See ``Client.resume``."""
        self._wait(self._client.resume(**kwargs))

    def abort(self, **kwargs: Any) -> int:
        """See ``Client.abort``."""
        return self._wait(self._client.abort(**kwargs))

    def update_weights(self, weights: Any, **kwargs: Any) -> UpdateReport:
        """See ``Client.update_weights``."""
        from ..weights.tensor_source import take

        # The calling thread's current CUDA stream is the one to wait for, so take them here.
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
    def policy_versions(self) -> dict[str, int]:
        """See ``Client.policy_versions``."""
        return self._client.policy_versions

    @property
    def address(self) -> str:
        """See ``Client.address``."""
        return self._client.address

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

    def server_info(self) -> list[dict[str, Any]]:
        """See ``Client.server_info``."""
        return self._wait(self._client.server_info())

    def start_profile(self, folder: str | os.PathLike[str], **options: Any) -> None:
        """See ``Client.start_profile``."""
        self._wait(self._client.start_profile(folder, **options))

    def stop_profile(self, *, timeout: float = 600.0) -> list[str]:
        """See ``Client.stop_profile``."""
        return self._wait(self._client.stop_profile(timeout=timeout))

    def get_weights(
        self, names: Sequence[str], *, worker: int | None = None, timeout: float = 60.0
    ) -> dict[str, Any]:
        """See ``Client.get_weights``."""
        return self._wait(self._client.get_weights(names, worker=worker, timeout=timeout))

    def broadcast(self, endpoint: str, *args: Any, **kwargs: Any) -> list[Any]:
        """See ``Client.broadcast``."""
        return self._wait(self._client.broadcast(endpoint, *args, **kwargs))

    @property
    def info(self) -> EngineInfo:
        """See ``Client.info``."""
        return self._client.info

    @property
    def workers(self) -> list[WorkerInfo]:
        """See ``Client.workers``."""
        return self._client.workers

    @property
    def queue(self) -> QueueInfo:
        """See ``Client.queue``."""
        return self._client.queue

    @property
    def tokenizer(self) -> Any:
        """See ``Client.tokenizer``."""
        return self._client.tokenizer

    def _wait(self, work: Coroutine[Any, Any, _T]) -> _T:
        loop, thread = self._loop, self._thread
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
            if self._loop is not loop:
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
            thread = self._thread
            self._loop = self._thread = None
        if thread is not None:
            thread.end()
            thread.join()


class BlockingSession:
    """``Session`` without ``await``. Only one thread at a time may use it.

    ``BlockingClient.session`` makes it.
    """

    def __init__(self, client: BlockingClient, session: Session) -> None:
        self._client = client
        self._session = session

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """See ``Session.close``."""
        # After the client is closed, there is no turn to release.
        with contextlib.suppress(Closed):
            self._client._wait(plain(self._session.close))

    def generate(self, **values: Any) -> Completion:
        """See ``Session.generate``."""
        return self._client._wait(self._session.generate(**values))

    def run_tools(self, tools: Mapping[str, Tool] | Sequence[Tool], **values: Any) -> Completion:
        """See ``Session.run_tools``."""
        return self._client._wait(self._session.run_tools(tools, **values))

    def observe(self, what: Any) -> None:
        """See ``Session.observe``."""
        self._session.observe(what)

    def unobserve(self) -> None:
        """See ``Session.unobserve``."""
        self._session.unobserve()

    def go_back(self, turns: int = 1) -> None:
        """See ``Session.go_back``."""
        self._session.go_back(turns)

    def fork(self) -> BlockingSession:
        """See ``Session.fork``. Another thread may use the fork."""
        return BlockingSession(self._client, self._session.fork())

    def rewrite(self, messages: Sequence[Message]) -> None:
        """See ``Session.rewrite``."""
        self._session.rewrite(messages)

    def reward(
        self, value: RewardValue, name: str = "", *, call: ToolCall | str | None = None
    ) -> None:
        """See ``Session.reward``."""
        self._session.reward(value, name, call=call)

    def trajectory(self, reward: RewardValue | None = None) -> Trajectory:
        """See ``Session.trajectory``."""
        return self._session.trajectory(reward)

    def trajectories(self, reward: RewardValue | None = None) -> list[Trajectory]:
        """See ``Session.trajectories``."""
        return self._session.trajectories(reward)

    @property
    def ids(self) -> NDArray[np.int32]:
        """See ``Session.ids``."""
        return self._session.ids

    @property
    def turns(self) -> list[Completion]:
        """See ``Session.turns``."""
        return self._session.turns

    @property
    def room(self) -> int:
        """See ``Session.room``."""
        return self._session.room

    @property
    def text(self) -> str:
        """See ``Session.text``."""
        return self._session.text

    @property
    def metadata(self) -> dict[str, Any]:
        """See ``Session.metadata``."""
        return self._session.metadata


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
