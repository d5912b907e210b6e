"""The engine client: ``await client.generate(...)`` and what goes with it.

One call's way through here: ``generate`` checks and encodes it, ``Driver.submit`` gives it a
worker, ``replies.GenerationReply`` collects its chunks and makes the ``Completion``.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from functools import partial
from typing import Any, Literal, Self, overload

import msgspec
from msgspec import Raw

from .actor import Actor as _Actor
from .actor import (
    EndpointSpec,
    UnaryReply,
    deadline_from,
    endpoint,
    endpoints_of,
    error_of,
)
from .codec import encode
from .completion import Chunk, Completion, Decode, NextTokenLogprobs, StreamText
from .config import positive
from .core.calls import Call
from .core.concurrency import Load
from .core.members import READY
from .core.routing import Route
from .driver import ENVELOPE_BYTES, Driver
from .errors import (
    Closed,
    InvalidRequest,
    MessageTooLarge,
    SglrlError,
    UnknownEndpoint,
    UsageError,
    WorkerLost,
)
from .gateway import Gateway
from .messages import (
    EngineInfo,
    EngineStats,
    GenerateArgs,
    ItemKind,
    NextTokenArgs,
    ScoreArgs,
    TokenChunk,
)
from .pool import Birth, Pool, WorkerInfo
from .replies import ChunkReply, GenerationReply, NextTokenReply, ScoreReply
from .rollout.session import Opening, Session
from .sampling import DEFAULT_MAX_NEW_TOKENS, Prepared, SamplingCache, SamplingParams
from .tokens import TokenIds, TokenizerBox, check_ids
from .weights.local import LocalSender, TensorMetadata
from .weights.report import UpdateReport
from .weights.request import UpdateRequest

Message = Mapping[str, Any]

_FIRST = 1 << 62
"""Priority of what a worker must be told before it gets anything else."""


class WorkerStats(msgspec.Struct, frozen=True, kw_only=True):
    """One worker's ``EngineStats`` with its index."""

    worker: int
    engine: EngineStats


class _Engine(_Actor):
    """The unary control endpoints of an engine worker, as the workers' mailbox serves them."""

    @endpoint(idempotent=True)
    async def stats(self) -> EngineStats:
        raise NotImplementedError  # served by workers/mailbox.py

    @endpoint(idempotent=True)
    async def flush_cache(self) -> bool:
        raise NotImplementedError  # served by workers/mailbox.py


class _Pausing(_Actor):
    """More of them, which the client must know of. Not to be repeated: a replacement is told when
    it serves."""

    @endpoint
    async def pause(self, mode: str) -> None:
        raise NotImplementedError  # served by workers/mailbox.py

    @endpoint
    async def resume(self) -> None:
        raise NotImplementedError  # served by workers/mailbox.py

    @endpoint
    async def abort(self) -> int:
        raise NotImplementedError  # served by workers/mailbox.py


_PAUSING = endpoints_of(_Pausing)


def _control(
    spec: EndpointSpec,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    worker: int,
    future: asyncio.Future[Any],
    timeout: float | None,
) -> Call:
    """A call to one engine that goes out at once: it may be about the calls that the engine has."""
    body, _ = spec.arguments.encode(args, kwargs)
    return Call(
        spec.name,
        Raw(body),
        UnaryReply(future, spec.result),
        deadline=deadline_from(timeout),
        priority=_FIRST,
        pinned=worker,
        idempotent=spec.idempotent,
        urgent=True,
    )


class Stream:
    """An async iterator of ``Chunk``; ``completion`` is the whole once it has ended.

    Leaving the loop early stops the engine's work on it (at the latest when the iterator is
    collected; ``await stream.aclose()`` does it at once).
    """

    def __init__(self, client: Client, arguments: dict[str, Any]) -> None:
        self._iterator = client._stream(self, arguments)
        self._completion: Completion | None = None

    @property
    def completion(self) -> Completion:
        """Raises ``Closed`` while the stream has not ended."""
        if self._completion is None:
            raise Closed("the stream has not ended; iterate over it first")
        return self._completion

    def __aiter__(self) -> AsyncIterator[Chunk]:
        return self._iterator

    async def aclose(self) -> None:
        await self._iterator.aclose()


class Client:
    """Generates with a pool of engine workers. Made by ``sglrl.launch``; an async context manager.

    All methods may be called from any number of tasks of one event loop at a time.
    """

    def __init__(
        self,
        pool: Pool,
        *,
        model: str,
        timeout: float | None,
        max_message: int,
        weight_device: Any = None,
        more: Callable[[int, list[Birth]], list[Birth]] | None = None,
    ) -> None:
        self._pool = pool
        self._more = more
        self._weight_device = weight_device
        self._timeout = timeout
        self._max_body = max_message - ENVELOPE_BYTES
        self.model = model
        """Its folder, or its name on the hub."""
        self._tokenizer_box = TokenizerBox(model)
        self._info: EngineInfo | None = None
        # Of the info, because every call reads them.
        self._vocab_size = self._most_prompt_tokens = self._most_tokens = 0
        self._driver: Driver | None = None
        self._gateway: Gateway | None = None
        self._paused = False
        self._samplings: SamplingCache | None = None
        self._controls: dict[str, EndpointSpec] = endpoints_of(_Engine)
        self._weights = LocalSender(pool.weights)
        self._encode = msgspec.msgpack.Encoder().encode
        # Once, and not a bound method for every call that waits.
        self._decode: Decode = self._decode_ids

    async def __aenter__(self) -> Self:
        await self._pool.__aenter__()
        self._driver = self._pool.driver
        self._driver.before_serving = self._before_serving
        self._info = self._pool.ready(0).engine
        assert self._info is not None
        self._vocab_size = self._info.vocab_size
        self._most_prompt_tokens = self._info.max_prompt_tokens
        self._most_tokens = self._info.max_total_tokens
        self._samplings = SamplingCache(self._vocab_size)
        self._open_gateway()
        if self._weight_device is not None:
            try:
                await self.connect_weights(device=self._weight_device)
            except BaseException:
                await self.close()
                raise
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    def _open_gateway(self) -> None:
        """Let in clients of other processes."""
        self._gateway = Gateway(self, self._running(), self._pool, self._max_body, self._controls)

    async def close(self, *, drain: bool = False, timeout: float = 600.0) -> None:
        """End every call with ``Closed`` and every worker; safe to call again.

        Args:
            drain: first wait for the calls that there are, at most ``timeout`` seconds; new ones
                are refused with ``Closed``.
        """
        await self._pool.close(drain=drain, timeout=timeout)
        self._weights.close()
        if self._gateway is not None:
            await self._gateway.close()

    async def add_workers(self, n: int = 1) -> list[int]:
        """Start ``n`` more workers, with the same arguments; returns their ids when they serve,
        with the current weights.

        Raises:
            NotEnoughDevices: no GPUs are left for them.
            WorkerStartError: one failed; none of the new ones is left.
        """
        self._running()
        assert self._more is not None
        return await self._pool.add(self._more(positive("n", n), self._pool.births))

    async def wait_until_full(self, timeout: float = 60.0) -> None:
        """Wait until all workers serve that have not been removed or retired: after a loss, until
        the replacement does.

        Raises:
            DeadlineExceeded: some do not within ``timeout`` seconds; says which.
            WorkerLost: none is left.
        """
        self._running()
        await self._pool.full(timeout)

    async def remove_worker(self, worker: int, *, timeout: float = 600.0) -> None:
        """Let a worker finish the calls it has, then end it; it gets no new ones. What it has not
        finished after ``timeout`` seconds goes on at others, from the tokens that it had.

        Raises:
            UsageError: there is no such worker, or it is the last one.
        """
        self._running()
        await self._pool.remove(worker, timeout)

    # --- what there is ----------------------------------------------------------------------------

    @property
    def info(self) -> EngineInfo:
        """The loaded model: vocabulary, context length, dtype, device, ..."""
        if self._info is None:
            raise _not_started()
        return self._info

    @property
    def workers(self) -> list[WorkerInfo]:
        """``id``, ``pid``, ``state``, ``weight_version``, ``device``, load of every worker."""
        return self._pool.workers

    @property
    def tokenizer(self) -> Any:
        """The model's Hugging Face tokenizer, loaded when first asked for."""
        return self._tokenizer_box.tokenizer

    async def stats(self) -> list[WorkerStats]:
        """What every live engine reports of itself, in worker order."""
        found = await self._ask_all(self._controls["stats"])
        return [WorkerStats(worker=w, engine=s) for w, s in found.items()]

    async def flush_cache(self) -> bool:
        """Empty every worker's prefix cache. False if some worker had requests and kept it."""
        return all((await self._ask_all(self._controls["flush_cache"])).values())

    async def broadcast(
        self, endpoint: str, *args: Any, timeout: float | None = None, **kwargs: Any
    ) -> list[Any]:
        """Call one of the engines' control endpoints (``stats``, ``flush_cache``, ...) on every
        worker that serves; the results in worker order.

        Raises:
            UnknownEndpoint: there is none of that name.
        """
        spec = self._controls.get(endpoint)
        if spec is None:
            raise UnknownEndpoint(
                f"the engines declare no endpoint {endpoint!r} to be called on all of them "
                f"(endpoints: {', '.join(sorted(self._controls))})"
            )
        found = await self._ask_all(spec, args, kwargs, timeout)
        return [*found.values()]

    # --- pausing ----------------------------------------------------------------------------------

    async def pause(
        self, mode: Literal["in_place", "retract", "abort"] = "in_place", *, timeout: float = 60.0
    ) -> None:
        """Stop all engines between two steps. Calls may still be made, and wait; deadlines go on
        counting, and weights may be updated (with inflight="drain" when ``resume`` was called, as
        nothing ends before). A worker that comes later is paused too. Pausing twice is harmless.
        It stays so until ``resume``, also if the client was in another process that is gone.

        Args:
            mode: what becomes of running ``generate`` calls. "in_place": they keep their KV cache,
                and go on with it after ``resume``; "retract": they give it back, and it is computed
                again after ``resume``; "abort": they return what they have, with finish_reason
                "abort".
            timeout: seconds that an engine may take.

        Raises:
            DeadlineExceeded: an engine was not paused in time; call ``resume``, or pause again.
        """
        self._running()
        if mode not in ("in_place", "retract", "abort"):
            raise UsageError(f"mode must be 'in_place', 'retract' or 'abort', got {mode!r}")
        self._paused = True
        await self._ask_all(_PAUSING["pause"], (mode,), timeout=timeout)

    async def resume(self, *, timeout: float = 60.0) -> None:
        """Let the engines go on after ``pause``. Without one: nothing.

        Raises:
            DeadlineExceeded: an engine did not say within ``timeout`` seconds that it does.
        """
        self._running()
        self._paused = False
        await self._ask_all(_PAUSING["resume"], timeout=timeout)

    async def abort(self, *, worker: int | None = None, timeout: float = 60.0) -> int:
        """End all ``generate`` calls and streams that have been made, also those that wait: each
        returns what it has, with finish_reason "abort"; a session's turn then goes on. To be rid of
        one call, cancel its task.

        Args:
            worker: only what this worker holds, or is pinned to it.
            timeout: seconds that an engine may take to say how many they are.

        Returns:
            how many they were.

        Raises:
            UsageError: there is no such worker.
            WorkerLost: that worker is lost.
        """
        driver = self._running()
        body = encode(TokenChunk(b"", finish="abort", version=self.weight_version))
        # First: they would get the places of those that end.
        waiting = driver.answer_waiting("generate", Raw(body), worker)
        ended = await self._ask_all(_PAUSING["abort"], timeout=timeout, worker=worker)
        return waiting + sum(map(int, ended.values()))

    async def _ask_all(
        self,
        spec: EndpointSpec,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
        timeout: float | None = None,
        worker: int | None = None,
    ) -> dict[int, Any]:
        """Call a control endpoint of the engines that serve, or of this one. The answers by worker,
        in order; one that is lost meanwhile has none."""
        driver = self._running()
        workers = driver.ready if worker is None else [worker]
        if timeout is None:
            timeout = self._timeout
        calls, futures = [], []
        for index in workers:
            future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
            calls.append(_control(spec, args, kwargs or {}, index, future, timeout))
            futures.append(future)
        found = await _submit_all(driver, calls, futures, return_exceptions=worker is None)
        answers = {}
        for index, one in zip(workers, found, strict=True):
            if not isinstance(one, BaseException):
                answers[index] = one
            elif not isinstance(one, WorkerLost):
                raise one
        return answers

    def _before_serving(self, worker: int) -> None:
        if self._paused:
            future = self._running().loop.create_future()
            # Should it be lost first, its replacement is told.
            future.add_done_callback(lambda done: done.cancelled() or done.exception())
            with contextlib.suppress(Closed):
                self._running().submit(
                    _control(_PAUSING["pause"], ("in_place",), {}, worker, future, None)
                )

    # --- weights ----------------------------------------------------------------------------------

    @property
    def weight_version(self) -> int:
        """Policy version of the workers' weights: 0 as loaded, then that of the last update."""
        return self._pool.weights.version

    @property
    def address(self) -> str:
        """For ``sglrl.connect`` in other processes. It holds a secret."""
        if self._gateway is None:
            raise _not_started()
        return self._gateway.address

    @property
    def weights_address(self) -> str:
        """For ``sglrl.weights.Sender.connect`` in a trainer's process. It holds a secret."""
        self._running()
        return self._pool.weights.address

    async def update_weights(
        self,
        weights: Any,
        *,
        version: int | None = None,
        inflight: str = "continue",
        mode: str = "auto",
        partial: bool = False,
        bucket_bytes: int | None = None,
        timeout: float = 60.0,
        drain_timeout: float = 600.0,
        wait: bool = True,
        device: Any = None,
        host: str = "127.0.0.1",
    ) -> UpdateReport:
        """Give all workers new weights, while they go on generating.

        Either every worker has all of them when this returns, or it raises and every worker that
        serves has what it had. Tokens sampled before and after are told apart by
        ``Completion.versions``; KV cache is not shared between versions.

        Args:
            weights: a ``torch.nn.Module``, a mapping or TensorDict, or an iterable of (name,
                tensor), with Hugging Face names; on any device, in any float dtype. They are cast
                to the engine's dtype and DTensors are gathered here, on the sender. They must not
                change until this returns.
            version: a larger number than ``weight_version``; None: one more.
            inflight: what happens to running requests when the new weights become live:
                "continue": they go on, on the KV cache they have; "retract": they go on, and their
                KV cache is computed again with the new weights; "abort": they return what they
                have, with finish_reason "abort"; "drain": they are awaited first.
            mode: "full": staged beside the live weights, which takes as much GPU memory again;
                "bucketed": received piece by piece with the engine paused, into the live weights,
                so a worker that does not get all of it is ended; "auto": "full" where there is
                room.
            partial: tensors that are not given keep their values.
            bucket_bytes: tensors are sent in buckets of so many bytes, of which the sender holds
                two; None: 256 MB to 1 GB, by the size of the model.
            timeout: seconds that a worker may take for any phase before it is given up.
            drain_timeout: seconds that "drain" may take.
            wait: behind an update that is running; False: raise ``UpdateInProgress`` instead.
            device: the GPU (or "cpu") that sends; None: where the tensors are, else the current
                one.
            host: address of this process that the workers can reach.

        Raises:
            InvalidWeights: names, shapes or dtypes do not fit the model, or there is no room.
            SettingsMismatch, UpdateInProgress, UsageError: see ``sglrl.errors``.
            WeightUpdateError: it was given up.
            WorkerLost: no worker is left.
        """
        self._running()
        request = UpdateRequest(
            specs=[],
            version=version,
            inflight=inflight,
            mode=mode,
            partial=partial,
            bucket_bytes=bucket_bytes,
            timeout=timeout,
            drain_timeout=drain_timeout,
            wait=wait,
        )
        return await self._weights.update(weights, request, device=device, host=host)

    async def update_weights_from_disk(
        self,
        path: str | os.PathLike[str],
        *,
        version: int | None = None,
        inflight: str = "continue",
        partial: bool = False,
        timeout: float = 300.0,
        drain_timeout: float = 600.0,
        wait: bool = True,
    ) -> UpdateReport:
        """As ``update_weights``, from a folder of safetensors files that every worker reads itself.

        Raises:
            ModelError: there are no such files.
        """
        self._running()
        request = UpdateRequest(
            specs=[],
            version=version,
            inflight=inflight,
            partial=partial,
            timeout=timeout,
            drain_timeout=drain_timeout,
            wait=wait,
        )
        return await self._weights.update_from_disk(path, request)

    async def connect_weights(
        self, *, device: Any = None, host: str = "127.0.0.1", timeout: float = 60.0
    ) -> float:
        """Form the group of this process and the workers now, so that the first update does not pay
        for it. Milliseconds that it took. ``launch(weight_device=...)`` does it at the start."""
        self._running()
        return await self._weights.connect(device, host, timeout)

    async def model_metadata(self, *, timeout: float = 60.0) -> dict[str, TensorMetadata]:
        """dtype and shape of every tensor that the loaded model takes, by Hugging Face name. The
        dtype is the one that the engine keeps it in."""
        self._running()
        found = await self._pool.weights.describe(timeout)
        return {spec.name: TensorMetadata(spec.dtype, spec.shape) for spec in found.tensors}

    async def verify_weights(self, weights: Any, *, timeout: float = 300.0) -> list[str]:
        """Names of those of the given tensors whose live values differ, on whatever worker, in any
        bit after the cast to the engine's dtype: [] when all is well. Compares checksums; no
        weights are sent.

        Raises:
            InvalidWeights: names or shapes do not fit the model.
        """
        self._running()
        return await self._weights.verify(weights, timeout)

    # --- generate ---------------------------------------------------------------------------------

    @overload
    async def generate(
        self, prompt: str | None = None, *, n: Literal[1] = 1, **kwargs: Any
    ) -> Completion: ...
    @overload
    async def generate(
        self, prompt: Sequence[str] | None = None, *, n: int = 1, **kwargs: Any
    ) -> Any: ...

    async def generate(
        self,
        prompt: str | Sequence[str] | None = None,
        *,
        input_ids: TokenIds | Sequence[TokenIds] | None = None,
        messages: Sequence[Message] | Sequence[Sequence[Message]] | None = None,
        n: int = 1,
        logprobs: bool = False,
        top_logprobs: int = 0,
        session: str | None = None,
        priority: int = 0,
        timeout: float | None = None,
        worker: int | None = None,
        sampling: SamplingParams | None = None,
        **values: Any,
    ) -> Any:
        """Sample continuations.

        Exactly one of ``prompt`` (text), ``input_ids`` (ints, or an integer array [length]) and
        ``messages`` (the model's chat template is applied) is given: one of it, or a list.

        Args:
            n: samples per prompt. They share the prompt's prefix cache on one worker.
            logprobs: return the logprob of every output token.
            top_logprobs: also return so many likeliest tokens at each position.
            session: turns with the same name go to the worker that holds their prefix.
            priority: calls that wait at the driver go out highest first.
            timeout: seconds; then ``DeadlineExceeded`` and the engine stops. None: the client's.
            worker: only this worker.
            sampling: a ``SamplingParams``; the keyword arguments below override its fields.
            **values: the fields of ``SamplingParams`` (``max_new_tokens``, ``temperature``, ...);
                vLLM's and OpenAI's names (``max_tokens``, ...) are understood.

        Returns:
            A ``Completion`` for one prompt (a list of n if n > 1); for a list of prompts a list of
            that, in order.

        Raises:
            InvalidRequest: something above is wrong; nothing was sent.
            Overloaded, DeadlineExceeded, WorkerLost, EngineError, Closed: see ``sglrl.errors``.
        """
        driver, samplings = self._driver, self._samplings
        if driver is None or samplings is None:
            raise _not_started()
        if timeout is None:
            timeout = self._timeout
        deadline = None if timeout is None else deadline_from(timeout)
        prepared = samplings.prepare(sampling, values)
        if logprobs is not True and logprobs is not False:
            raise InvalidRequest(
                f"logprobs must be True or False, got {logprobs!r}; for the "
                "likeliest tokens use top_logprobs=k"
            )
        if type(top_logprobs) is not int or not 0 <= top_logprobs <= 1000:
            raise InvalidRequest(f"top_logprobs must be in 0..1000, got {top_logprobs!r}")
        if type(n) is not int or n < 1:
            raise InvalidRequest(f"n must be an integer of at least 1, got {n!r}")
        if prompt is not None or messages is not None or input_ids is None:
            several, prompts = await self._encode_input(prompt, input_ids, messages)
        elif type(input_ids) is list and input_ids and type(input_ids[0]) is int:
            several, prompts = False, [check_ids(input_ids, self._vocab_size)]
        else:
            several, prompts = self._check_input_ids(input_ids)
        logprobs = logprobs or top_logprobs > 0
        if n == 1 and len(prompts) == 1:
            # The path of almost every call: no lists, no gather.
            ids = prompts[0]
            max_new = self._max_new_tokens(prepared, len(ids) // 4)
            route = Route(ids, self._pool.weights.version, session)
            completion = await self._sample(
                ids, prepared, max_new, logprobs, top_logprobs, route, deadline, priority, worker
            )
            return [completion] if several else completion
        loop = asyncio.get_running_loop()
        calls: list[Call] = []
        futures: list[asyncio.Future[Completion]] = []
        for ids in prompts:
            max_new = self._max_new_tokens(prepared, len(ids) // 4)
            route = Route(ids, self._pool.weights.version, session)
            seed = prepared.params.seed
            args: Raw | None = None
            for i in range(n):
                if args is None or seed is not None:
                    args = self._generate_args(
                        ids,
                        prepared.wire(max_new, None if seed is None else seed + i),
                        logprobs,
                        top_logprobs,
                        False,
                        priority,
                    )
                future: asyncio.Future[Completion] = loop.create_future()
                futures.append(future)
                calls.append(
                    Call(
                        "generate",
                        args,
                        GenerationReply(
                            self._decode, future, ids, prepared, logprobs, top_logprobs
                        ),
                        deadline=deadline,
                        priority=priority,
                        pinned=worker,
                        route=route,
                        idempotent=True,
                        resumable=True,
                    )
                )
        results = await _submit_all(driver, calls, futures)
        groups: list[Any] = [results[i : i + n] for i in range(0, len(results), n)]
        if n == 1:
            groups = results
        return groups if several else groups[0]

    def stream(
        self,
        prompt: str | None = None,
        *,
        input_ids: TokenIds | None = None,
        messages: Sequence[Message] | None = None,
        logprobs: bool = False,
        session: str | None = None,
        priority: int = 0,
        timeout: float | None = None,
        worker: int | None = None,
        sampling: SamplingParams | None = None,
        **values: Any,
    ) -> Stream:
        """``async for chunk in client.stream(...)``: tokens as they are sampled, one prompt.

        Takes what ``generate`` takes, and raises what it raises, when iteration begins. The chunks'
        ids, logprobs and texts, joined, equal those of ``generate``.
        """
        return Stream(
            self,
            {
                "prompt": prompt,
                "input_ids": input_ids,
                "messages": messages,
                "logprobs": logprobs,
                "session": session,
                "priority": priority,
                "timeout": timeout,
                "worker": worker,
                "sampling": sampling,
                "values": values,
            },
        )

    async def _stream(self, stream: Stream, a: dict[str, Any]) -> AsyncGenerator[Chunk, None]:
        driver = self._running()
        timeout = a["timeout"]
        deadline = deadline_from(self._timeout if timeout is None else timeout)
        assert self._samplings is not None
        prepared = self._samplings.prepare(a["sampling"], a["values"])
        several, prompts = await self._encode_input(a["prompt"], a["input_ids"], a["messages"])
        if several:
            raise InvalidRequest("stream takes one prompt; use generate for a list")
        (ids,) = prompts
        max_new = self._max_new_tokens(prepared, len(ids) // 4)
        logprobs = bool(a["logprobs"])
        wire = prepared.wire(max_new, prepared.params.seed)
        generation = GenerationReply(
            self._decode, asyncio.get_running_loop().create_future(), ids, prepared, logprobs, 0
        )
        reply = ChunkReply(generation)
        call = Call(
            "generate",
            self._generate_args(ids, wire, logprobs, 0, True, a["priority"]),
            reply,
            deadline=deadline,
            priority=a["priority"],
            pinned=a["worker"],
            route=Route(ids, self._pool.weights.version, a["session"]),
            idempotent=True,
            stream=True,
            resumable=True,
        )
        texts = StreamText(self._decode, prepared.stop_strings, prepared.params.skip_special_tokens)
        driver.submit(call)
        try:
            while True:
                while reply.items:
                    items, reply.items = reply.items, []
                    for chunk in items:
                        if chunk.finish:
                            stream._completion = generation.completion(call, reply.received)
                        yield Chunk(
                            chunk.finish or None,
                            chunk.version,
                            chunk.ids,
                            chunk.logprobs if logprobs else None,
                            texts.add(chunk),
                        )
                outcome = reply.outcome
                if outcome is not None:
                    if isinstance(outcome, SglrlError):
                        raise outcome
                    if outcome.kind != ItemKind.DONE:
                        raise error_of(outcome)
                    return
                reply.waiter = asyncio.get_running_loop().create_future()
                await reply.waiter
        finally:
            if reply.outcome is None:
                driver.cancel(call)

    async def score(
        self,
        input_ids: TokenIds | Sequence[TokenIds],
        *,
        start: int = 0,
        top_logprobs: int = 0,
        timeout: float | None = None,
        worker: int | None = None,
        priority: int = 0,
    ) -> Any:
        """Logprobs that the model gives to given tokens, without generating.

        Args:
            input_ids: tokens [length], or a list of such.
            start: first position of interest; earlier ones are context only.
            top_logprobs: also return so many likeliest tokens at each position.

        Returns:
            float32 [length - start]: ``log p(token i | tokens before i)`` at temperature 1.
            Position 0 has no context and is NaN. With ``top_logprobs``: ``Scores``. A list of that
            for a list.
        """
        driver = self._running()
        deadline = deadline_from(self._timeout if timeout is None else timeout)
        several, prompts = self._check_input_ids(input_ids)
        if isinstance(start, bool) or not isinstance(start, int) or start < 0:
            raise InvalidRequest(f"start must be an integer of at least 0, got {start!r}")
        most = min(1000, self._vocab_size)
        if type(top_logprobs) is not int or not 0 <= top_logprobs <= most:
            raise InvalidRequest(f"top_logprobs must be in 0..{most}, got {top_logprobs!r}")
        loop = asyncio.get_running_loop()
        calls: list[Call] = []
        futures: list[asyncio.Future[Any]] = []
        for ids in prompts:
            count = len(ids) // 4
            if start >= count:
                raise InvalidRequest(f"start={start} is beyond the {count} tokens given")
            self._max_prompt(count)
            future: asyncio.Future[Any] = loop.create_future()
            futures.append(future)
            body = encode(ScoreArgs(ids, start, top_logprobs))
            self._check_size(body)
            calls.append(
                Call(
                    "score",
                    Raw(body),
                    ScoreReply(future, count - start, top_logprobs),
                    deadline=deadline,
                    priority=priority,
                    pinned=worker,
                    route=Route(ids, self._pool.weights.version),
                    idempotent=True,
                )
            )
        results = await _submit_all(driver, calls, futures)
        return results if several else results[0]

    async def next_token_logprobs(
        self,
        ids: TokenIds,
        top_k: int | None = None,
        *,
        worker: int | None = None,
        priority: int = 0,
        timeout: float | None = None,
    ) -> NextTokenLogprobs:
        """The distribution of the token behind ``ids``: float32 log-softmax of the model's logits.

        Calls that are made at the same time are computed together, also with what ``generate``
        prefills; what ``ids`` share with earlier calls comes from the prefix cache.

        Args:
            ids: tokens [length].
            top_k: only the so many likeliest tokens; None: all of them, in one raw frame.
            worker, priority, timeout: as for ``generate``.

        Raises:
            InvalidRequest: something above is wrong; nothing was sent.
            Overloaded, DeadlineExceeded, WorkerLost, EngineError, Closed: see ``sglrl.errors``.
        """
        driver = self._running()
        checked = check_ids(ids, self._vocab_size)
        future: asyncio.Future[NextTokenLogprobs] = asyncio.get_running_loop().create_future()
        call = self._next_token_call(checked, top_k, future, timeout, worker, priority)
        driver.submit(call)
        try:
            return await future
        except asyncio.CancelledError:
            driver.cancel(call)
            raise

    def _next_token_call(
        self,
        ids: bytes,
        top_k: int | None,
        future: asyncio.Future[NextTokenLogprobs],
        timeout: float | None,
        worker: int | None = None,
        priority: int = 0,
    ) -> Call:
        """For checked ids."""
        if len(ids) // 4 > self._most_prompt_tokens:
            self._max_prompt(len(ids) // 4)
        if top_k is not None and (type(top_k) is not int or not 1 <= top_k <= self._vocab_size):
            raise InvalidRequest(f"top_k must be None or in 1..{self._vocab_size}, got {top_k!r}")
        body = self._encode(NextTokenArgs(ids, top_k or 0))
        if len(body) > self._max_body:
            self._check_size(body)
        return Call(
            "next_token_logprobs",
            Raw(body),
            NextTokenReply(future, top_k or 0, self._vocab_size),
            (),
            deadline_from(self._timeout if timeout is None else timeout),
            priority,
            worker,
            Route(ids, self._pool.weights.version),
            True,
        )

    def session(
        self,
        prompt: str | None = None,
        *,
        messages: Sequence[Message] | None = None,
        input_ids: TokenIds | None = None,
        tools: Sequence[Any] | None = None,
        template: Mapping[str, Any] | None = None,
        allow_rewrite: bool = False,
        timeout: float | None = None,
        priority: int = 0,
        metadata: Mapping[str, Any] | None = None,
        sampling: SamplingParams | None = None,
        **values: Any,
    ) -> Session:
        """A conversation of several turns: ``async with client.session(messages=...) as s``.

        Exactly one of ``prompt``, ``input_ids`` and ``messages`` is given, as for ``generate``.

        Args:
            tools: descriptions of tools, for the chat template.
            template: what else the chat template is given (``enable_thinking``, ...).
            allow_rewrite: some templates render earlier turns otherwise once the conversation goes
                on (they leave reasoning out, say). A session appends only, so such a template is
                refused; True: append what it puts behind the answer, and keep the turns as sampled.
            timeout: seconds for each turn; None: the client's.
            priority: of its turns, as for ``generate``.
            metadata: goes into the trajectory.
            sampling, **values: how its turns are sampled, unless a turn says otherwise.

        Raises:
            InvalidRequest: something above is wrong.
        """
        return Session(
            Opening(
                self,
                prompt,
                messages=messages,
                input_ids=input_ids,
                tools=tools,
                template=template,
                allow_rewrite=allow_rewrite,
                timeout=timeout,
                priority=priority,
                metadata=metadata,
                sampling=sampling,
                **values,
            )
        )

    # --- inside -----------------------------------------------------------------------------------

    @property
    def _is_alive(self) -> bool:
        """Whether a worker is there, or is to come."""
        return (
            self._driver is not None
            and not self._driver.fabric.closed
            and any(w.state != "retired" for w in self.workers)
        )

    def _loads(self) -> tuple[list[Load], int]:
        """How full each engine says it is, and how many calls wait here for one with room."""
        fabric = self._running().fabric
        loads = [
            Load(m.kv_usage, m.waiting, m.preempted)
            for m in fabric.members.values()
            if m.state is READY
        ]
        return loads, fabric.waiting

    def _prepare(self, sampling: SamplingParams | None, values: dict[str, Any]) -> Prepared:
        if self._samplings is None:
            raise _not_started()
        return self._samplings.prepare(sampling, values)

    async def _sample(
        self,
        ids: bytes,
        prepared: Prepared,
        max_new_tokens: int,
        logprobs: bool,
        top: int,
        route: Route,
        deadline: float | None,
        priority: int,
        worker: int | None = None,
        begun: Completion | None = None,
    ) -> Completion:
        """One continuation of checked ids; of ``begun``, which was returned unfinished, if it is
        given: then limits, stop strings, penalties and seeds count from its beginning."""
        driver = self._running()
        wire = prepared.wire(max_new_tokens, prepared.seed)
        resume = b"" if begun is None else begun.output_ids.tobytes()
        body = self._encode(GenerateArgs(ids, wire, logprobs, top, False, priority, resume))
        if len(body) > self._max_body:
            self._check_size(body)
        future: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        reply = GenerationReply(self._decode, future, ids, prepared, logprobs, top)
        if begun is not None:
            reply.chunks, reply.resumed_at = list(begun._chunks), begun.resumed_at
        call = Call(
            "generate",
            Raw(body),
            reply,
            (),
            deadline,
            priority,
            worker,
            route,
            True,
            False,
            True,
        )
        driver.submit(call)
        try:
            return await future
        except asyncio.CancelledError:
            driver.cancel(call)
            raise

    def _running(self) -> Driver:
        if self._driver is None:
            raise _not_started()
        return self._driver

    def _decode_ids(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        return self._tokenizer_box.decode(ids, skip_special_tokens)

    def _generate_args(
        self, ids: bytes, wire: Raw, logprobs: bool, top: int, stream: bool, priority: int
    ) -> Raw:
        body = self._encode(GenerateArgs(ids, wire, logprobs, top, stream, priority))
        self._check_size(body)
        return Raw(body)

    def _check_size(self, body: bytes) -> None:
        if len(body) > self._max_body:
            raise MessageTooLarge(
                f"the request has {len(body):,} bytes; at most {self._max_body:,} fit one message "
                "(max_message_bytes)"
            )

    def _max_prompt(self, count: int) -> None:
        info = self.info
        if count > info.max_prompt_tokens:
            raise InvalidRequest(
                f"the prompt has {count} tokens; at most {info.max_prompt_tokens} fit the context "
                f"of {info.context_length}"
            )

    def _max_new_tokens(self, prepared: Prepared, prompt_tokens: int) -> int:
        if prompt_tokens > self._most_prompt_tokens:
            self._max_prompt(prompt_tokens)
        room = self._most_tokens - prompt_tokens
        wanted = prepared.max_new_tokens
        if wanted is None:
            return min(DEFAULT_MAX_NEW_TOKENS, room)
        if wanted > room:
            raise InvalidRequest(
                f"max_new_tokens={wanted} does not fit: the prompt has {prompt_tokens} tokens, and "
                f"together at most {self.info.max_total_tokens} are possible, so at most {room}"
            )
        return wanted

    def _check_input_ids(self, input_ids: Any) -> tuple[bool, list[bytes]]:
        vocab_size = self._vocab_size
        if isinstance(input_ids, (list, tuple)):
            first: Any = input_ids[0] if input_ids else 0
            # Arrays and tensors have __index__, too.
            if getattr(first, "ndim", 0) or not hasattr(first, "__index__"):
                return True, [check_ids(ids, vocab_size) for ids in input_ids]
        elif getattr(input_ids, "ndim", 1) == 2:
            return True, [check_ids(ids, vocab_size) for ids in input_ids]
        return False, [check_ids(input_ids, vocab_size)]

    async def _encode_input(
        self,
        prompt: Any,
        input_ids: Any,
        messages: Any,
        template: Mapping[str, Any] | None = None,
    ) -> tuple[bool, list[bytes]]:
        given = [
            name
            for name, value in (
                ("prompt", prompt),
                ("input_ids", input_ids),
                ("messages", messages),
            )
            if value is not None
        ]
        if len(given) != 1:
            what = " and ".join(given) or "nothing"
            raise InvalidRequest(f"give exactly one of prompt, input_ids, messages; got {what}")
        if input_ids is not None:
            return self._check_input_ids(input_ids)
        box = self._tokenizer_box
        work: Callable[[Sequence[Any]], list[list[int]]]
        if messages is not None:
            several, inputs = _one_or_more(messages, "messages", Mapping)
            work = partial(box.encode_messages, template=template)
        else:
            several, inputs = (False, [prompt]) if isinstance(prompt, str) else (True, prompt)
            if not isinstance(inputs, (list, tuple)) or not all(isinstance(p, str) for p in inputs):
                raise InvalidRequest(
                    f"prompt must be text or a list of texts, got {type(prompt).__name__}; for "
                    "tokens use input_ids"
                )
            work = box.encode_texts
        # The tokenizer is native code: off the event loop, which goes on meanwhile.
        encoded = await asyncio.get_running_loop().run_in_executor(None, work, inputs)
        vocab_size = self.info.vocab_size
        return several, [check_ids(ids, vocab_size) for ids in encoded]


def _not_started() -> Closed:
    return Closed("the client has not been started; use 'async with sglrl.launch(...)'")


def _one_or_more(value: Any, name: str, kind: type) -> tuple[bool, list[Any]]:
    if isinstance(value, (list, tuple)) and value:
        if all(isinstance(v, kind) for v in value):
            return False, [value]
        if all(
            isinstance(v, (list, tuple)) and v and all(isinstance(m, kind) for m in v)
            for v in value
        ):
            return True, list(value)
    raise InvalidRequest(
        f"{name} must be a non-empty list of {{'role': ..., 'content': ...}}, or a list of such"
    )


async def _submit_all(
    driver: Driver,
    calls: list[Call],
    futures: Sequence[asyncio.Future[Any]],
    *,
    return_exceptions: bool = False,
) -> list[Any]:
    """All results in order. The first failure cancels the rest and is raised, or
    (``return_exceptions``) is a result."""
    submitted = 0
    try:
        for call in calls:
            driver.submit(call)
            submitted += 1
        return await asyncio.gather(*futures, return_exceptions=return_exceptions)
    finally:
        for call, future in zip(calls[:submitted], futures, strict=False):
            if not future.done() or future.cancelled():
                driver.cancel(call)
