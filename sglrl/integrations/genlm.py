"""Use genlm with sglrl: ``from sglrl.integrations.genlm import AsyncSGLTransformer``.

The class has the interface of genlm-backend's ``AsyncLM``. If genlm-backend is installed, the class
is a subclass of ``AsyncLM``. It needs neither genlm-backend nor the versions of SGLang and
transformers that genlm-backend requires.

The engine's client runs on a separate event loop or on the caller's. Queries made in one tick of a
loop are submitted together, and their results are returned together.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import gc
import inspect
import sys
import threading
import warnings
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self, TypeVar

import numpy as np
import torch

from ..api.blocking import BlockingClient, blocking
from ..core.calls import Call
from ..errors import Closed, DeadlineExceeded, InvalidRequest, SglrlError, UsageError
from ..inference.client import Client
from ..inference.completion import NextTokenLogprobs
from ..inference.tokens import check_ids
from .vocabulary import Token, token_bytes, token_strings

if TYPE_CHECKING:
    _AsyncLM: Any = object
else:
    try:
        from genlm.backend.llm.base import AsyncLM as _AsyncLM
        from genlm.backend.tokenization.token import Token
    except ImportError:
        _AsyncLM = object

_T = TypeVar("_T")
_Waiter = tuple[asyncio.AbstractEventLoop | None, Any]
"""A future and its loop. The loop is None for a ``concurrent.futures.Future``."""

_LARGE = 1 << 17
"""Number of elements from which work on tensors runs in a thread, not on the event loop."""

_AT_ONCE = 32
"""Maximum number of tasks woken, or queries sent, in one iteration of an event loop. Other tasks of
the loop run in between."""

_SWITCH_SECONDS = 1e-3
"""Switch interval of Python's threads."""

_PATIENCE = 30.0
"""Seconds to wait for the client's event loop to run a callback."""

# PyTorch warns about read-only memory once per program. Trigger the warning here and hide it:
# callers share the returned tensors and must not write to them anyway.
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    torch.from_numpy(np.frombuffer(b"\0\0\0\0", dtype=np.float32))


class _Query:
    """One pending request for a distribution, and the futures that wait for it.

    ``NextTokenReply`` uses this object in place of a future.
    """

    __slots__ = ("_model", "call", "key", "waiters")

    def __init__(self, model: AsyncSGLTransformer, key: bytes) -> None:
        self._model = model
        self.key = key
        self.waiters: list[_Waiter] = []
        self.call: Call | None = None

    def done(self) -> bool:
        return False

    def set_result(self, found: NextTokenLogprobs) -> None:
        self._model._found(self, found)

    def set_exception(self, error: SglrlError) -> None:
        self._model._answer(self, error)


class AsyncSGLTransformer(_AsyncLM):  # type: ignore[misc]
    """An ``AsyncLM`` on a pool of SGLang workers.

    Any number of event loops and threads may use it. Result tensors are float32 on the CPU. Callers
    with the same query share a tensor and must not change it.

    Creating an instance affects the whole program: it exempts all existing objects from Python's
    garbage collector (``gc.freeze``) and lowers the thread switch interval to one millisecond
    (``sys.setswitchinterval``).

    Attributes:
        client: the client that runs the queries.
        tokenizer: the model's Hugging Face tokenizer.
        byte_vocab: ``Token`` by id: the bytes of each token.
        str_vocab: the text of each token, by id. If the bytes are not UTF-8, the tokenizer's name
            of the token.
        cache: results by token ids, as int32 bytes; None without ``cache_size``.

    Args:
        client: a running ``sglrl.Client`` or ``BlockingClient``. The caller keeps ownership.
        cache_size: maximum number of cached results. The least recently used results are dropped
            first. A weight update and ``close`` empty the cache. 0 or less: no cache, as in
            genlm's class.
        cache_opts: accepted as in genlm's class. It has no effect, because results are on the CPU.
        top_k: send only the ``top_k`` likeliest tokens. All other tokens are -inf.
        timeout: time limit of a query in seconds. None: the client's.
    """

    def __init__(
        self,
        client: Client | BlockingClient,
        cache_size: int = 0,
        cache_opts: Mapping[str, Any] | None = None,
        *,
        top_k: int | None = None,
        timeout: float | None = None,
    ) -> None:
        self.client = client
        if isinstance(client, BlockingClient):
            loop, self._engine = client._loop, client._client
            if loop is None:
                raise Closed("the client is not running; use 'with sglrl.blocking(...) as client'")
            self._loop = loop
        else:
            self._loop, self._engine = client._running().loop, client
        self.tokenizer = client.tokenizer
        found = token_bytes(self.tokenizer)
        self.byte_vocab = [Token(id_, token) for id_, token in enumerate(found)]
        self.str_vocab = token_strings(self.tokenizer, found)
        self.cache: OrderedDict[bytes, torch.Tensor] | None = None
        if cache_size > 0:
            self.cache = OrderedDict()
        self._cache_size = cache_size
        self._top_k = top_k
        self._timeout = timeout
        self._owned = False
        self._vocab_size = client.info.vocab_size
        # By loop. Only the loop's own thread uses its entry.
        self._asked: dict[asyncio.AbstractEventLoop, list[tuple[bytes, Any]]] = {}
        """Queries of the loop's current tick."""
        self._arrived: dict[asyncio.AbstractEventLoop, deque[tuple[Any, Any]]] = {}
        """Futures and outcomes that wait for an iteration of the loop."""
        # Used only on the engine's loop:
        self._inflight: dict[bytes, _Query] = {}
        """Pending queries by prompt. Later queries with the same prompt join them."""
        self._unanswered: set[_Query] = set()
        self._answers: dict[asyncio.AbstractEventLoop, list[tuple[Any, Any]]] = {}
        self._engine._pool.weights.on_version.add(self._on_version)
        # Otherwise Python's collector repeatedly scans the objects of torch and transformers and
        # these vocabularies. Each scan stops all threads for a third of a second.
        gc.collect()
        gc.freeze()
        # The client's thread works for the callers' loops. With the default interval, it holds the
        # interpreter lock for five milliseconds at a time.
        sys.setswitchinterval(min(sys.getswitchinterval(), _SWITCH_SECONDS))

    @classmethod
    def from_name(
        cls,
        model_id: str,
        engine_opts: Mapping[str, Any] | None = None,
        gpu_id: int = 0,
        **kwargs: Any,
    ) -> Self:
        """Start an engine for this model. ``close`` shuts the engine down.

        Args:
            engine_opts: arguments of ``sglrl.launch``, including fields of SGLang's ``ServerArgs``.
            gpu_id: the GPU that the engine runs on.
            **kwargs: arguments of the class.

        Raises:
            TypeError: an argument in ``kwargs`` is unknown. Nothing was started.
            UsageError, WorkerStartError: as in ``sglrl.launch``.
        """
        inspect.signature(cls).bind(None, **kwargs)
        options = dict(engine_opts or {})
        # genlm's users pass this option. Here every worker sets it itself.
        options.pop("skip_tokenizer_init", None)
        if gpu_id:
            options.setdefault("gpus", [gpu_id])
        client = blocking(model_id, **options)
        client.__enter__()
        try:
            model = cls(client, **kwargs)
        except BaseException:
            client.close()
            raise
        model._owned = True
        return model

    def close(self) -> None:
        """Cancel all queries and drop all results. Close the engine if ``from_name`` started it."""
        self._engine._pool.weights.on_version.discard(self._on_version)
        # After this, a weight update no longer empties the cache.
        self.cache = None
        self.reset_async_queries()
        if self._owned:
            self._owned = False
            assert isinstance(self.client, BlockingClient)
            self.client.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # --- queries ----------------------------------------------------------------------------------

    async def next_token_logprobs(
        self, token_ids: Sequence[int], lora_name: str | None = None
    ) -> torch.Tensor:
        """Return the log-probabilities of the next token after these: float32 [v].

        Raises:
            ValueError: ``token_ids`` is empty, or ``lora_name`` is given. Adapters are not
                supported.
            InvalidRequest, Overloaded, DeadlineExceeded, WorkerLost, EngineError, Closed: as in
                ``Client.next_token_logprobs``.
        """
        _no_adapter(lora_name)
        found = self._ask(self._key(token_ids))
        return found if isinstance(found, torch.Tensor) else await found

    async def batch_next_token_logprobs(
        self, token_ids_list: Iterable[Sequence[int]], lora_name: str | None = None
    ) -> torch.Tensor:
        """``next_token_logprobs`` for n prompts: float32 [n, v], also for n = 0."""
        _no_adapter(lora_name)
        # Check all prompts before the first query is submitted.
        keys = [self._key(token_ids) for token_ids in token_ids_list]
        found = [self._ask(key) for key in keys]
        waiting = [f for f in found if not isinstance(f, torch.Tensor)]
        await asyncio.gather(*waiting)
        rows = [f if isinstance(f, torch.Tensor) else f.result() for f in found]
        return await self._work(len(rows) * self._vocab_size, lambda: self._stack(rows))

    def next_token_logprobs_sync(
        self, token_ids: Sequence[int], lora_name: str | None = None
    ) -> torch.Tensor:
        """``next_token_logprobs``, but blocks the calling thread."""
        _no_adapter(lora_name)
        return self._wait([token_ids])[0]

    def batch_next_token_logprobs_sync(
        self, token_ids_list: Iterable[Sequence[int]], lora_name: str | None = None
    ) -> torch.Tensor:
        """``batch_next_token_logprobs``, but blocks the calling thread."""
        _no_adapter(lora_name)
        return self._stack(self._wait(token_ids_list))

    async def sample(
        self,
        prompt_token_ids: Sequence[int],
        max_tokens: int,
        eos_token_ids: Collection[int],
        temperature: float = 1.0,
        seed: int | None = None,
        lora_name: str | None = None,
    ) -> list[int]:
        """Sample at most ``max_tokens`` tokens.

        The tokens are drawn in this process, one by one. Sampling stops at the first token in
        ``eos_token_ids``, which is not returned.

        Args:
            temperature: 0 selects the likeliest token.
            seed: seed of the random numbers.

        Raises:
            ValueError: the temperature is negative.
        """
        _no_adapter(lora_name)
        if not temperature >= 0:
            raise UsageError(f"temperature must be at least 0, got {temperature}")
        generator = None if seed is None else torch.Generator().manual_seed(seed)
        prompt = list(prompt_token_ids)
        sampled: list[int] = []
        while len(sampled) < max_tokens:
            logprobs = await self.next_token_logprobs(prompt + sampled)

            def draw(logprobs: torch.Tensor = logprobs) -> int:
                if temperature == 0:
                    return int(logprobs.argmax())
                probs = torch.softmax(logprobs / temperature, dim=-1)
                return int(torch.multinomial(probs, 1, generator=generator))

            # The factor 32: drawing takes several passes, and all samples may draw in one tick.
            token = await self._work(32 * self._vocab_size, draw)
            if token in eos_token_ids:
                break
            sampled.append(token)
        return sampled

    async def batch_sample(
        self,
        prompt_token_ids_list: Iterable[Sequence[int]],
        max_tokens: int,
        eos_token_ids: Collection[int],
        temperature: float = 1.0,
        seed: int | None = None,
        lora_name: str | None = None,
    ) -> list[list[int]]:
        """``sample`` for several prompts at the same time."""
        return await asyncio.gather(
            *(
                self.sample(prompt, max_tokens, eos_token_ids, temperature, seed, lora_name)
                for prompt in prompt_token_ids_list
            )
        )

    def clear_cache(self) -> None:
        """Drop all cached results."""
        if self.cache is not None:
            self.cache.clear()

    def clear_kv_cache(self) -> bool:
        """Empty the engines' prefix caches. This blocks the calling thread.

        Returns:
            False if an engine had requests and kept its cache.
        """
        return bool(self._on_engine(self._engine.flush_cache))

    def reset_async_queries(self) -> None:
        """Cancel all pending queries.

        Their asynchronous callers get ``asyncio.CancelledError``. Their blocking callers get
        ``concurrent.futures.CancelledError``.

        Raises:
            DeadlineExceeded: the client's event loop did not run the reset within 30 s.
        """
        for loop, asked in list(self._asked.items()):
            waiting, asked[:] = list(asked), []
            self._resolve_on(loop, [(future, None) for _, future in waiting])
        if not self._loop.is_closed():
            self._here_or_there(self._reset)

    # --- on the caller's thread -------------------------------------------------------------------

    def _key(self, token_ids: Sequence[int]) -> bytes:
        try:
            none = not len(token_ids)
        except TypeError:
            # Not a sequence: check_ids raises the error.
            none = False
        if none:
            raise InvalidRequest("there are no token ids: at least one is needed")
        return check_ids(token_ids, self._vocab_size)

    def _stack(self, rows: list[torch.Tensor]) -> torch.Tensor:
        return torch.stack(rows) if rows else torch.empty(0, self._vocab_size)

    def _cached(self, key: bytes) -> torch.Tensor | None:
        cache = self.cache
        if cache is not None:
            try:
                found = cache[key]
                cache.move_to_end(key)
            except KeyError:
                # The key is missing, or another thread has just emptied the cache.
                return None
            return found
        return None

    def _ask(self, key: bytes) -> torch.Tensor | asyncio.Future[torch.Tensor]:
        found = self._cached(key)
        if found is not None:
            return found
        loop = asyncio.get_running_loop()
        future: asyncio.Future[torch.Tensor] = loop.create_future()
        if loop is self._loop:
            self._submit([(key, (loop, future))])
        elif loop in self._asked:
            self._asked[loop].append((key, future))
        else:
            self._asked[loop] = [(key, future)]
            loop.call_soon(self._submit_tick, loop)
        return future

    def _submit_tick(self, loop: asyncio.AbstractEventLoop) -> None:
        """Submit all queries of one tick to the engine together."""
        asked: list[tuple[bytes, _Waiter]] = [
            (key, (loop, future)) for key, future in self._asked.pop(loop)
        ]
        try:
            self._loop.call_soon_threadsafe(self._submit, asked)
        except RuntimeError:
            self._arrive(loop, [(waiter[1], _closed()) for _, waiter in asked])

    def _resolve_on(self, loop: asyncio.AbstractEventLoop, outcomes: list[tuple[Any, Any]]) -> None:
        try:
            loop.call_soon_threadsafe(self._arrive, loop, outcomes)
        except RuntimeError:
            # The loop is closed, so no task waits there.
            self._arrived.pop(loop, None)

    def _arrive(self, loop: asyncio.AbstractEventLoop, outcomes: list[tuple[Any, Any]]) -> None:
        """Resolve futures in batches. Runs on ``loop``."""
        arrived = self._arrived.get(loop)
        if arrived is not None:
            arrived.extend(outcomes)
            return
        self._arrived[loop] = deque(outcomes)
        self._wake(loop)

    def _wake(self, loop: asyncio.AbstractEventLoop) -> None:
        arrived = self._arrived[loop]
        for _ in range(min(len(arrived), _AT_ONCE)):
            _resolve(*arrived.popleft())
        if arrived:
            loop.call_soon(self._wake, loop)
        else:
            del self._arrived[loop]

    def _wait(self, token_ids_list: Iterable[Sequence[int]]) -> list[torch.Tensor]:
        self._must_not_be_engine()
        found: list[Any] = []
        asked: list[tuple[bytes, _Waiter]] = []
        for token_ids in token_ids_list:
            key = self._key(token_ids)
            cached = self._cached(key)
            if cached is None:
                future: concurrent.futures.Future[torch.Tensor] = concurrent.futures.Future()
                asked.append((key, (None, future)))
            found.append(future if cached is None else cached)
        try:
            self._loop.call_soon_threadsafe(self._submit, asked)
        except RuntimeError:
            raise _closed() from None
        return [f if isinstance(f, torch.Tensor) else f.result() for f in found]

    async def _work(self, elements: int, work: Callable[[], _T]) -> _T:
        if elements < _LARGE:
            return work()
        return await asyncio.get_running_loop().run_in_executor(None, work)

    def _must_not_be_engine(self) -> None:
        try:
            here = asyncio.get_running_loop() is self._loop
        except RuntimeError:
            here = False
        if here:
            raise UsageError(
                "this would block the event loop that the client needs to answer it; await the "
                "asynchronous form, or give the class a BlockingClient"
            )

    def _on_engine(self, make: Callable[[], Any]) -> Any:
        self._must_not_be_engine()
        if self._loop.is_closed():
            raise _closed()
        return asyncio.run_coroutine_threadsafe(make(), self._loop).result()

    def _here_or_there(self, work: Callable[[], None]) -> None:
        """Run ``work`` on the engine's loop and wait until it is done.

        Runs ``work`` directly if this is the engine's loop or if that loop is not running.
        """
        try:
            here = asyncio.get_running_loop() is self._loop
        except RuntimeError:
            here = False
        if here or not self._loop.is_running():
            work()
            return
        done = threading.Event()

        def there() -> None:
            work()
            done.set()

        self._loop.call_soon_threadsafe(there)
        if not done.wait(_PATIENCE):
            raise DeadlineExceeded(
                f"the client's event loop has not come round for {_PATIENCE:.0f} s; something "
                "blocks it"
            )

    # --- on the engine's loop ---------------------------------------------------------------------

    def _submit(self, asked: list[tuple[bytes, _Waiter]]) -> None:
        self._submit_some(asked, 0)

    def _submit_some(self, asked: list[tuple[bytes, _Waiter]], begin: int) -> None:
        end = begin + _AT_ONCE
        if end < len(asked):
            # A long batch would also keep the interpreter lock from the callers' loops.
            self._loop.call_soon(self._submit_some, asked, end)
        for key, waiter in asked[begin:end]:
            query = self._inflight.get(key)
            if query is None:
                query = self._inflight[key] = _Query(self, key)
                self._unanswered.add(query)
                query.waiters.append(waiter)
                try:
                    future: Any = query
                    requests = self._engine._started()
                    query.call = requests.next_token_call(key, self._top_k, future, self._timeout)
                    requests.driver.submit(query.call)
                except SglrlError as error:
                    self._answer(query, error)
            else:
                query.waiters.append(waiter)

    def _found(self, query: _Query, found: NextTokenLogprobs) -> None:
        logprobs = torch.from_numpy(found.logprobs)
        if found.token_ids is not None:
            likeliest = logprobs
            logprobs = torch.full((self._vocab_size,), -torch.inf)
            logprobs[torch.from_numpy(found.token_ids).long()] = likeliest
        cache = self.cache
        if cache is not None and found.version == self._engine.weight_version:
            cache[query.key] = logprobs
            while len(cache) > self._cache_size:
                cache.popitem(last=False)
        self._answer(query, logprobs)

    def _answer(self, query: _Query, outcome: torch.Tensor | SglrlError | None) -> None:
        """Send the outcome to all waiters of a query. ``outcome`` None cancels them."""
        self._unanswered.discard(query)
        if self._inflight.get(query.key) is query:
            del self._inflight[query.key]
        # Break the reference cycle of call and query. Otherwise the result stays in memory until
        # the garbage collector runs.
        query.call = None
        waiters, query.waiters = query.waiters, []
        for loop, future in waiters:
            if loop is None:
                _resolve(future, outcome)
            elif loop in self._answers:
                self._answers[loop].append((future, outcome))
            else:
                self._answers[loop] = [(future, outcome)]
                if len(self._answers) == 1:
                    # Return all results of one engine message together.
                    self._loop.call_soon(self._hand_back)

    def _hand_back(self) -> None:
        answers, self._answers = self._answers, {}
        for loop, outcomes in answers.items():
            if loop is self._loop:
                self._arrive(loop, outcomes)
            else:
                self._resolve_on(loop, outcomes)

    def _reset(self) -> None:
        driver = self._engine._driver
        for query in list(self._unanswered):
            if driver is not None and query.call is not None:
                driver.cancel(query.call)
            self._answer(query, None)

    def _on_version(self) -> None:
        """Drop cached results and let new queries not join pending ones.

        Both may belong to the old weights.
        """
        self._inflight.clear()
        self.clear_cache()


def _resolve(future: Any, outcome: torch.Tensor | SglrlError | None) -> None:
    if future.done():
        # The caller was cancelled.
        return
    if outcome is None:
        future.cancel()
    elif isinstance(outcome, torch.Tensor):
        future.set_result(outcome)
    else:
        future.set_exception(outcome)


def _no_adapter(lora_name: str | None) -> None:
    if lora_name is not None:
        raise UsageError(f"lora_name must be None, got {lora_name!r}: adapters are not served")


def _closed() -> Closed:
    return Closed("the client that this model asks is closed")


def load_model_by_name(
    name: str, backend: str | None = None, llm_opts: Mapping[str, Any] | None = None
) -> Any:
    """Load a model, like genlm-backend's function of this name.

    Args:
        backend: "sgl" or None: ``AsyncSGLTransformer``. Any other backend is loaded by
            genlm-backend.
        llm_opts: arguments of ``AsyncSGLTransformer.from_name``, or of genlm-backend's function.
    """
    if backend in (None, "sgl"):
        return AsyncSGLTransformer.from_name(name, **(llm_opts or {}))
    from genlm.backend.llm import load_model_by_name as load

    return load(name, backend=backend, llm_opts=llm_opts)


__all__ = ["AsyncSGLTransformer", "Token", "load_model_by_name"]
