"""genlm over sglrl: ``from sglrl.integrations.genlm import AsyncSGLTransformer``.

The class has the interface of genlm-backend's ``AsyncLM``, and is one where genlm-backend is
installed. It does not need it, or the versions of SGLang and transformers that it asks for.

The engine's client runs on an event loop of its own, or on the caller's. Queries that are made in
one tick of a loop go to it together, and come back together.
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
"""A future and its loop; None: a ``concurrent.futures.Future``."""

_LARGE = 1 << 17
"""Elements. Work on larger tensors takes so long that it is not for an event loop."""

_AT_ONCE = 32
"""So many tasks are woken, or queries sent, in one iteration of an event loop; others get their
turn."""

_SWITCH_SECONDS = 1e-3
"""Threads of this program take turns after so long."""

_PATIENCE = 30.0
"""Seconds that the client's event loop may take to come round."""

# PyTorch warns of read-only memory once in a program. What is given out here is shared by all who
# asked for it anyway, so it is not to be written to.
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    torch.from_numpy(np.frombuffer(b"\0\0\0\0", dtype=np.float32))


class _Query:
    """One distribution that the engine was asked for, and who waits for it. Stands where
    ``NextTokenReply`` has a future."""

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
    """An ``AsyncLM`` on a pool of SGLang workers. May be used from any number of event loops and
    threads. Tensors are float32 on the CPU, shared between all who asked for the same, and must
    not be changed. What the program holds when it is made is exempt from Python's garbage collector
    (``gc.freeze``), and its threads take turns every millisecond (``sys.setswitchinterval``).

    Attributes:
        client: what it asks.
        tokenizer: the model's Hugging Face tokenizer.
        byte_vocab: ``Token`` by id: the bytes that a token stands for.
        str_vocab: the same as text; where that is none, what the tokenizer calls the token.
        cache: results by token ids, as int32 bytes; None without ``cache_size``.

    Args:
        client: a running ``sglrl.Client``, or ``BlockingClient``; it stays the caller's.
        cache_size: so many results are kept, those that were last used. A weight update and
            ``close`` empty the cache. 0 or less, as in genlm's class: none.
        cache_opts: as of genlm's class; of no effect, because results are on the CPU.
        top_k: only the so many likeliest tokens are sent; all others are -inf.
        timeout: seconds that a query may take; None: the client's.
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
        # By loop; each entry is its own thread's:
        self._asked: dict[asyncio.AbstractEventLoop, list[tuple[bytes, Any]]] = {}
        """What its tick has asked for so far."""
        self._arrived: dict[asyncio.AbstractEventLoop, deque[tuple[Any, Any]]] = {}
        """Futures and outcomes that wait for an iteration of it."""
        # On the engine's loop:
        self._inflight: dict[bytes, _Query] = {}
        """By prompt, those that others who ask may wait for, too."""
        self._unanswered: set[_Query] = set()
        self._answers: dict[asyncio.AbstractEventLoop, list[tuple[Any, Any]]] = {}
        self._engine._pool.weights.on_version.add(self._on_version)
        # Python's collector would walk what torch and transformers brought, and these vocabularies,
        # again and again: a third of a second in which no thread runs.
        gc.collect()
        gc.freeze()
        # The client's thread works for the callers' loops, and would keep Python from them for five
        # milliseconds at a time.
        sys.setswitchinterval(min(sys.getswitchinterval(), _SWITCH_SECONDS))

    @classmethod
    def from_name(
        cls,
        model_id: str,
        engine_opts: Mapping[str, Any] | None = None,
        gpu_id: int = 0,
        **kwargs: Any,
    ) -> Self:
        """Start an engine for this model; ``close`` ends it.

        Args:
            engine_opts: what ``sglrl.launch`` takes, fields of SGLang's ``ServerArgs`` included.
            gpu_id: the GPU that it runs on.
            **kwargs: as of the class.

        Raises:
            TypeError: the class has no such argument; nothing was started.
            UsageError, WorkerStartError: as ``sglrl.launch``.
        """
        inspect.signature(cls).bind(None, **kwargs)
        options = dict(engine_opts or {})
        # What genlm's users pass and every worker of ours does by itself.
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
        """Forget all queries and results; end the engine, if ``from_name`` started it."""
        self._engine._pool.weights.on_version.discard(self._on_version)
        # Nothing would empty it when the weights change.
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
        """The log-probabilities of the token behind these: float32 [v].

        Raises:
            ValueError: there are none, or an adapter is named: there are none of these either.
            InvalidRequest, Overloaded, DeadlineExceeded, WorkerLost, EngineError, Closed: as
                ``Client.next_token_logprobs``.
        """
        _no_adapter(lora_name)
        found = self._ask(self._key(token_ids))
        return found if isinstance(found, torch.Tensor) else await found

    async def batch_next_token_logprobs(
        self, token_ids_list: Iterable[Sequence[int]], lora_name: str | None = None
    ) -> torch.Tensor:
        """The same of several: float32 [n, v]; of none, [0, v]."""
        _no_adapter(lora_name)
        # Nothing is asked for unless all of them are right.
        keys = [self._key(token_ids) for token_ids in token_ids_list]
        found = [self._ask(key) for key in keys]
        waiting = [f for f in found if not isinstance(f, torch.Tensor)]
        await asyncio.gather(*waiting)
        rows = [f if isinstance(f, torch.Tensor) else f.result() for f in found]
        return await self._work(len(rows) * self._vocab_size, lambda: self._stack(rows))

    def next_token_logprobs_sync(
        self, token_ids: Sequence[int], lora_name: str | None = None
    ) -> torch.Tensor:
        """``next_token_logprobs`` that blocks the calling thread."""
        _no_adapter(lora_name)
        return self._wait([token_ids])[0]

    def batch_next_token_logprobs_sync(
        self, token_ids_list: Iterable[Sequence[int]], lora_name: str | None = None
    ) -> torch.Tensor:
        """``batch_next_token_logprobs`` that blocks the calling thread."""
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
        """At most ``max_tokens`` tokens, drawn here one by one; up to the first of
        ``eos_token_ids``, which is left out.

        Args:
            temperature: 0 takes the likeliest token.
            seed: of the numbers drawn.

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

            # Several passes over it, and as many tasks as there are samples do this in one tick.
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
        """``sample`` of several prompts at the same time."""
        return await asyncio.gather(
            *(
                self.sample(prompt, max_tokens, eos_token_ids, temperature, seed, lora_name)
                for prompt in prompt_token_ids_list
            )
        )

    def clear_cache(self) -> None:
        """Forget all results."""
        if self.cache is not None:
            self.cache.clear()

    def clear_kv_cache(self) -> bool:
        """Empty the engines' prefix caches. False if one had requests and kept it. Blocks."""
        return bool(self._on_engine(self._engine.flush_cache))

    def reset_async_queries(self) -> None:
        """Cancel all queries that wait: who awaits one gets ``asyncio.CancelledError``, who blocks
        for one ``concurrent.futures.CancelledError``.

        Raises:
            DeadlineExceeded: the client's event loop has not come round for 30 s.
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
            # No sequence, which is said below.
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
                # Another thread may have emptied it.
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
            loop.call_soon(self._hand_over, loop)
        return future

    def _hand_over(self, loop: asyncio.AbstractEventLoop) -> None:
        """What one tick has asked for goes to the engine together."""
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
            # It is closed: nobody waits there any more.
            self._arrived.pop(loop, None)

    def _arrive(self, loop: asyncio.AbstractEventLoop, outcomes: list[tuple[Any, Any]]) -> None:
        """On this loop."""
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
        """On the engine's loop; done when this returns."""
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
            # Work of many milliseconds would keep Python from the callers' loops, too.
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
        """``outcome`` None: it was cancelled."""
        self._unanswered.discard(query)
        if self._inflight.get(query.key) is query:
            del self._inflight[query.key]
        # The call refers to the query: what was found would wait for Python's garbage collector.
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
                    # Everything that one message of the engine brings goes back together.
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
        """What is under way may be of the old weights: who asks now does not wait for that."""
        self._inflight.clear()
        self.clear_cache()


def _resolve(future: Any, outcome: torch.Tensor | SglrlError | None) -> None:
    if future.done():
        # Who asked was cancelled.
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
    """As genlm-backend's function of this name: ``backend`` "sgl", which is also the default, is
    the class above; any other is genlm-backend's own."""
    if backend in (None, "sgl"):
        return AsyncSGLTransformer.from_name(name, **(llm_opts or {}))
    from genlm.backend.llm import load_model_by_name as load

    return load(name, backend=backend, llm_opts=llm_opts)


__all__ = ["AsyncSGLTransformer", "Token", "load_model_by_name"]
