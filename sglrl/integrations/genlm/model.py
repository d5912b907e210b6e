"""``AsyncSGLTransformer``: genlm's interface to a pool of SGLang workers."""

from __future__ import annotations

import asyncio
import gc
import inspect
import sys
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self, TypeVar

import torch

from ...client.client import Client
from ...core.seeds import derived_seed
from ...errors import Closed, InvalidRequest, UsageError
from ...inference.tokens import check_ids
from ...launching.blocking import BlockingClient, blocking
from .engine_loop import EngineLoop
from .queries import Key, Queries
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

_LARGE = 1 << 17
"""Work on tensors of at least this number of elements runs in a thread, not on the event loop."""

_SWITCH_SECONDS = 1e-3
"""The switch interval of Python's threads in seconds."""


class AsyncSGLTransformer(_AsyncLM):  # type: ignore[misc]
    """An ``AsyncLM`` that runs its queries on a pool of SGLang workers.

    Any number of event loops and threads may use it. Result tensors are float32 on the CPU. Callers
    with the same query share a tensor and must not change it.

    Creating an instance affects the whole program: it exempts all existing objects from Python's
    garbage collector (``gc.freeze``) and lowers the thread switch interval to one millisecond
    (``sys.setswitchinterval``).

    Attributes:
        client: the client that runs the queries.
        tokenizer: the model's Hugging Face tokenizer.
        byte_vocab: by token id, the ``Token`` with the bytes of the token.
        str_vocab: by token id, the text of the token, or the tokenizer's name of the token if its
            bytes are not UTF-8.
        cache: the results of queries without a LoRA adapter, by the prompt's token ids as int32
            bytes. None without ``cache_size`` and after ``close``.

    Args:
        client: a running ``sglrl.Client`` or ``BlockingClient``. The caller keeps ownership.
        cache_size: the maximum number of cached results. The least recently used results are
            dropped first. A weight update and ``close`` empty the cache. 0 or less: no cache, as in
            genlm's class.
        cache_opts: accepted as in genlm's class. It has no effect, because results are on the CPU.
        top_k: return logprobs of only this number of most likely tokens. Other tokens have -inf.
        timeout: the time limit of a query in seconds. None: the client's timeout.
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
            loop, self._engine = client.loop, client.source
            if loop is None:
                raise Closed("the client is not running; use 'with sglrl.blocking(...) as client'")
        else:
            client.check_open()
            loop, self._engine = client.requests.driver.loop, client
        self.tokenizer = client.tokenizer
        vocabulary = token_bytes(self.tokenizer)
        self.byte_vocab = [Token(id_, token) for id_, token in enumerate(vocabulary)]
        self.str_vocab = token_strings(self.tokenizer, vocabulary)
        self.cache: OrderedDict[bytes, torch.Tensor] | None = None
        if cache_size > 0:
            self.cache = OrderedDict()
        self._cache_size = cache_size
        self._owned = False
        self._vocab_size = client.info.vocab_size
        self._loop = EngineLoop(loop)
        self._queries = Queries(self._engine, self._loop, self._keep, top_k, timeout)
        self._engine.pool.weights.on_version.add(self._on_version)
        # Exclude the objects of torch, transformers and these vocabularies from garbage collection.
        # A scan of these objects would stop all threads for a third of a second.
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
            engine_opts: the arguments of ``sglrl.launch``, including fields of SGLang's
                ``ServerArgs``.
            gpu_id: the GPU that the engine runs on.
            **kwargs: the arguments of the class.

        Raises:
            TypeError: an argument in ``kwargs`` is unknown. Nothing was started.
            UsageError, WorkerStartError: as in ``sglrl.launch``.
        """
        inspect.signature(cls).bind(None, **kwargs)
        options = dict(engine_opts or {})
        # genlm's users pass this option, but every worker of sglrl sets it itself.
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
        self._engine.pool.weights.on_version.discard(self._on_version)
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
        """Return the log-probabilities of the next token after ``token_ids``, float32 [v].

        Raises:
            ValueError: ``token_ids`` is empty.
            UnknownAdapter: ``lora_name`` is not None, and ``client.load_lora`` has loaded no
                LoRA adapter of this name.
            InvalidRequest, Overloaded, DeadlineExceeded, WorkerLost, EngineError, Closed: as in
                ``Client.next_token_logprobs``.
        """
        logprobs = self._ask(self._key(token_ids, lora_name))
        return logprobs if isinstance(logprobs, torch.Tensor) else await logprobs

    async def batch_next_token_logprobs(
        self, token_ids_list: Iterable[Sequence[int]], lora_name: str | None = None
    ) -> torch.Tensor:
        """Run ``next_token_logprobs`` for n prompts. Return float32 [n, v], also for n = 0."""
        # Check all prompts before the first query is submitted.
        keys = [self._key(token_ids, lora_name) for token_ids in token_ids_list]
        answers = [self._ask(key) for key in keys]
        waiting = [f for f in answers if not isinstance(f, torch.Tensor)]
        await asyncio.gather(*waiting)
        rows = [f if isinstance(f, torch.Tensor) else f.result() for f in answers]
        return await self._work(len(rows) * self._vocab_size, lambda: self._stack(rows))

    def next_token_logprobs_sync(
        self, token_ids: Sequence[int], lora_name: str | None = None
    ) -> torch.Tensor:
        """Run ``next_token_logprobs`` and block the calling thread."""
        return self._wait([token_ids], lora_name)[0]

    def batch_next_token_logprobs_sync(
        self, token_ids_list: Iterable[Sequence[int]], lora_name: str | None = None
    ) -> torch.Tensor:
        """Run ``batch_next_token_logprobs`` and block the calling thread."""
        return self._stack(self._wait(token_ids_list, lora_name))

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
            temperature: the temperature. 0 selects the most likely token.
            seed: the seed of the random numbers, or None.

        Raises:
            ValueError: the temperature is negative.
        """
        if not temperature >= 0:
            raise UsageError(f"temperature must be at least 0, got {temperature}")
        generator = None if seed is None else torch.Generator().manual_seed(seed)
        prompt = list(prompt_token_ids)
        sampled: list[int] = []
        while len(sampled) < max_tokens:
            logprobs = await self.next_token_logprobs(prompt + sampled, lora_name)

            def draw(logprobs: torch.Tensor = logprobs) -> int:
                if temperature == 0:
                    return int(logprobs.argmax())
                probs = torch.softmax(logprobs / temperature, dim=-1)
                return int(torch.multinomial(probs, 1, generator=generator))

            # Multiply by 32, because drawing takes several passes and all samples may draw in one
            # tick.
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
        """Run ``sample`` for several prompts at the same time.

        Args:
            seed: the seed of the first prompt. The seeds of the other prompts are derived from it.
        """
        return await asyncio.gather(
            *(
                self.sample(
                    prompt,
                    max_tokens,
                    eos_token_ids,
                    temperature,
                    None if seed is None else derived_seed(seed, number),
                    lora_name,
                )
                for number, prompt in enumerate(prompt_token_ids_list)
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
        return self._loop.call(self._engine.flush_cache)

    def reset_async_queries(self) -> None:
        """Cancel all pending queries.

        Their asynchronous callers get ``asyncio.CancelledError``. Their blocking callers get
        ``concurrent.futures.CancelledError``.

        Raises:
            DeadlineExceeded: the client's event loop did not run the reset within 30 s.
        """
        self._queries.reset()

    def _on_version(self) -> None:
        """Drop results that the old weights may have computed. Runs on the engine's loop."""
        self._queries.forget()
        self.clear_cache()

    def _key(self, token_ids: Sequence[int], lora_name: str | None) -> Key:
        try:
            none = not len(token_ids)
        except TypeError:
            # The value is not a sequence, so check_ids raises the error.
            none = False
        if none:
            raise InvalidRequest("there are no token ids: at least one is needed")
        ids = check_ids(token_ids, self._vocab_size)
        if lora_name is None:
            return ids
        requests = self._engine.requests
        return ids, lora_name, requests.version(requests.lora(lora_name))

    def _stack(self, rows: list[torch.Tensor]) -> torch.Tensor:
        return torch.stack(rows) if rows else torch.empty(0, self._vocab_size)

    def _cached(self, key: Key) -> torch.Tensor | None:
        cache = self.cache
        if cache is not None and isinstance(key, bytes):
            try:
                logprobs = cache[key]
                cache.move_to_end(key)
            except KeyError:
                # The key is missing, or another thread has just emptied the cache.
                return None
            return logprobs
        return None

    def _keep(self, key: bytes, logprobs: torch.Tensor) -> None:
        """Put a result into the cache. Runs on the engine's loop."""
        cache = self.cache
        if cache is not None:
            cache[key] = logprobs
            while len(cache) > self._cache_size:
                cache.popitem(last=False)

    def _ask(self, key: Key) -> torch.Tensor | asyncio.Future[torch.Tensor]:
        cached = self._cached(key)
        return self._queries.ask(key) if cached is None else cached

    def _wait(
        self, token_ids_list: Iterable[Sequence[int]], lora_name: str | None
    ) -> list[torch.Tensor]:
        self._loop.check_not_here()
        keys = [self._key(token_ids, lora_name) for token_ids in token_ids_list]
        known = [self._cached(key) for key in keys]
        asked = [key for key, cached in zip(keys, known, strict=True) if cached is None]
        waiting = iter(self._queries.ask_from_thread(asked))
        return [next(waiting).result() if cached is None else cached for cached in known]

    async def _work(self, elements: int, work: Callable[[], _T]) -> _T:
        if elements < _LARGE:
            return work()
        return await asyncio.get_running_loop().run_in_executor(None, work)


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
