"""The engine client: ``await client.generate(...)`` and what goes with it.

One call's way: ``generate`` checks what it is given and encodes the prompt (``prompts.py``),
``Requests.sample`` (``requests.py``) makes it a ``Call``, ``Driver.submit`` gives it a worker, and
``replies.GenerationReply`` collects its chunks and makes the ``Completion``.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, NoReturn, Protocol, Self, overload

import numpy as np
from numpy.typing import NDArray

from ..config import check_target, positive
from ..core.concurrency import Load
from ..core.members import READY
from ..core.prefixes import Route
from ..driver.driver import Driver
from ..driver.gathering import submit_all
from ..driver.pool import Birth, Pool, QueueInfo, WorkerInfo, describe
from ..errors import Closed, InvalidRequest, UsageError
from ..weights.local_sender import LocalSender, TensorMetadata
from ..weights.update_report import UpdateReport
from ..weights.update_request import UpdateRequest
from ..wire.engine import EngineInfo
from ..wire.processes import ClientKeys
from .completion import Completion, NextTokenLogprobs
from .engine_controls import Controls, WorkerStats
from .prompts import Message, check_given_ids
from .requests import Requests
from .sampling import SamplingParams
from .stream import Stream
from .tokens import TokenIds, TokenizerBox, check_ids

if TYPE_CHECKING:
    from ..sessions.session import Session


OneIds = list[int] | tuple[int, ...] | range | NDArray[np.integer[Any]]
"""The token ids of one prompt."""
ManyIds = list[list[int]] | list[NDArray[np.integer[Any]]] | tuple[Sequence[int], ...]
"""The token ids of several prompts."""


class RemoteServer(Protocol):
    """Serves clients in other processes."""

    address: str
    """For ``sglrl.connect``. It holds a secret."""

    async def close(self) -> None: ...


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
        weight_device: Any = None,
        more: Callable[[int, list[Birth]], list[Birth]] | None = None,
        serve: Callable[[Client, Driver], RemoteServer] | None = None,
    ) -> None:
        self._pool = pool
        self._more = more
        self._weight_device = weight_device
        self._timeout = timeout
        self.model = model
        """Its folder, or its name on the hub."""
        self._tokenizer_box = TokenizerBox(model)
        self._driver: Driver | None = None
        self._requests: Requests | None = None
        self._serve = serve
        self._server: RemoteServer | None = None
        self._controls = Controls(pool, timeout)
        self._weights = LocalSender(pool.weights)

    async def __aenter__(self) -> Self:
        await self._pool.__aenter__()
        self._driver = self._pool.driver
        self._driver.add_listener(self._controls)
        info = self._pool.ready(0).engine
        assert info is not None
        self._tokenizer_box.fake = not info.sglang_version
        self._requests = Requests(
            self._driver, info, self._tokenizer_box, self._pool.weights, self._timeout
        )
        if self._serve is not None:
            self._server = self._serve(self, self._driver)
        if self._weight_device is not None:
            try:
                await self.connect_weights(device=self._weight_device)
            except BaseException:
                await self.close()
                raise
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    def __enter__(self) -> NoReturn:
        raise UsageError(
            "use 'async with', or 'with sglrl.blocking(...)' where there is no asyncio"
        )

    def __exit__(self, *exc: object) -> None: ...

    def __repr__(self) -> str:
        name = type(self).__name__
        if self._driver is None or self._requests is None:
            return f"<{name}, not started>"
        model = os.path.basename(self._requests.info.model) or self._requests.info.model
        if self._driver.fabric.closed:
            return f"<{name} of {model}, closed>"
        return (
            f"<{name} of {model}, {describe(self.workers)}, weights version {self.weight_version}>"
        )

    def __reduce__(self) -> NoReturn:
        raise UsageError(
            "a client stays in the process that made it and cannot be pickled or copied; give the "
            "other process client.address, and call sglrl.connect(address) there"
        )

    async def close(self, *, drain: bool = False, timeout: float = 600.0) -> None:
        """End every call with ``Closed`` and every worker; safe to call again.

        Args:
            drain: first wait for the calls that there are, at most ``timeout`` seconds; new ones
                are refused with ``Closed``.
        """
        if self._driver is not None and self._driver.is_copied:
            return
        await self._pool.close(drain=drain, timeout=timeout)
        self._weights.close()
        if self._server is not None:
            await self._server.close()

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

    async def wait_until_full(self, timeout: float | None = 60.0) -> None:
        """Wait until all workers serve that have not been removed or retired: after a loss, until
        the replacement does.

        Raises:
            DeadlineExceeded: some do not within ``timeout`` seconds; says which.
            WorkerLost: none is left.
        """
        self._running()
        await self._pool.full(timeout)

    async def remove_worker(self, worker: int, *, timeout: float | None = 600.0) -> None:
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
        return self._started().info

    @property
    def workers(self) -> list[WorkerInfo]:
        """``id``, ``pid``, ``state``, ``weight_version``, ``device``, load of every worker."""
        return self._pool.workers

    @property
    def queue(self) -> QueueInfo:
        """The calls of all clients that wait at the driver: ``calls``, ``bytes``, ``clients``. In a
        client of ``sglrl.connect``: as the pool last said, at most every 0.1 s."""
        return self._pool.queue

    @property
    def tokenizer(self) -> Any:
        """The model's Hugging Face tokenizer, loaded when first asked for."""
        return self._tokenizer_box.tokenizer

    async def stats(self) -> list[WorkerStats]:
        """What every live engine reports of itself, in worker order."""
        self._running(urgent=True)
        return await self._controls.stats()

    async def flush_cache(self) -> bool:
        """Empty every worker's prefix cache. False if some worker had requests and kept it."""
        self._running(urgent=True)
        return await self._controls.flush_cache()

    async def broadcast(
        self, endpoint: str, *args: Any, timeout: float | None = None, **kwargs: Any
    ) -> list[Any]:
        """Call one of the engines' control endpoints (``stats``, ``flush_cache``, ...) on every
        worker that serves; the results in worker order.

        Raises:
            UnknownEndpoint: there is none of that name.
        """
        self._running(urgent=True)
        return await self._controls.broadcast(endpoint, args, kwargs, timeout)

    # --- pausing ----------------------------------------------------------------------------------

    async def pause(
        self,
        mode: Literal["in_place", "retract", "abort"] = "in_place",
        *,
        timeout: float | None = 60.0,
    ) -> None:
        """Stop all engines between two steps. Calls may still be made, and wait; deadlines go on
        counting, and weights may be updated (with inflight="drain" when ``resume`` was called, as
        nothing ends before). A worker that comes later is paused too. Pausing twice is harmless.
        It stays so until ``resume``, also if the client was in another process that is gone.

        Args:
            mode: what becomes of running ``generate`` calls. "in_place": they keep their KV cache,
                and go on with it after ``resume``; "retract": they give it back, and it is computed
                again after ``resume``; "abort": they return what they have, with finish_reason
                "abort", and other calls are computed again after ``resume``.
            timeout: seconds that an engine may take.

        Raises:
            DeadlineExceeded: an engine was not paused in time; call ``resume``, or pause again.
        """
        self._running(urgent=True)
        await self._controls.pause(mode, timeout)

    async def resume(self, *, timeout: float | None = 60.0) -> None:
        """Let the engines go on after ``pause``. Without one: nothing.

        Raises:
            DeadlineExceeded: an engine did not say within ``timeout`` seconds that it does.
        """
        self._running(urgent=True)
        await self._controls.resume(timeout)

    async def abort(self, *, worker: int | None = None, timeout: float | None = 60.0) -> int:
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
        self._running(urgent=True)
        check_target(0, worker, None)
        return await self._controls.abort(worker, timeout)

    # --- weights ----------------------------------------------------------------------------------

    @property
    def weight_version(self) -> int:
        """Policy version of the workers' weights: 0 as loaded, then that of the last update."""
        return self._pool.weights.version

    @property
    def address(self) -> str:
        """For ``sglrl.connect`` in other processes. It holds a secret."""
        if self._server is None:
            raise _not_started()
        return self._server.address

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
        check_finite: bool = True,
        device: Any = None,
        host: str = "127.0.0.1",
    ) -> UpdateReport:
        """Give all workers new weights, while they go on generating.

        Either every worker has all of them when this returns, or it raises and every worker that
        serves has what it had. Tokens sampled before and after are told apart by
        ``Completion.versions``; KV cache is not shared between versions.

        Args:
            weights: a ``torch.nn.Module``, a mapping or TensorDict, or an iterable of (name,
                tensor), with Hugging Face names: those of the model's checkpoint, or of its module
                where transformers merges all experts of a layer into one tensor; on any device, in
                any float dtype. They are cast to the engine's dtype and DTensors are gathered here,
                on the sender. They must not change until this returns.
            version: a larger number than ``weight_version``; None: one more.
            inflight: what happens to running requests when the new weights become live:
                "continue": they go on, on the KV cache they have; "retract": they go on, and their
                KV cache is computed again with the new weights; "abort": they return what they
                have, with finish_reason "abort" (other calls, as with "retract", are computed again
                with the new weights); "drain": they are awaited first, and new ones
                wait from then on until the update has ended.
            mode: "full": staged beside the live weights, which takes as much GPU memory again (kept
                for the next update while 4 GiB are free);
                "bucketed": received piece by piece with the engine paused, into the live weights,
                so a worker that does not get all of it is ended; "auto": "full" where there is
                room.
            partial: tensors that are not given keep their values.
            bucket_bytes: tensors are sent in buckets of so many bytes, of which the sender holds
                two; None: 256 MB to 1 GB, by the size of the model.
            timeout: seconds from this call until the update must have begun. Another update, or the
                copy of the weights to a new worker, may be running until then. Afterwards a worker
                has as many seconds for each phase before the update is given up. (At least one for
                the commit, in which a worker that is late is killed.)
            drain_timeout: seconds that "drain" may take; then the update is given up.
            wait: wait for another update or copy that is running; False: raise
                ``UpdateInProgress`` at once.
            check_finite: refuse weights that hold NaN or infinite values, or values that overflow
                the engine's dtype. False: commit them as they are.
            device: the GPU (or "cpu") that sends; None: where the tensors are, else the current
                one.
            host: address of this process that the workers can reach.

        Raises:
            InvalidWeights: names, shapes or dtypes do not fit the model, there is no room, or some
                value is not finite. Every worker keeps its weights, with one exception: in mode
                "bucketed", a DTensor is gathered and checked after tensors before it were written.
            UpdateInProgress: another update or copy was still running when ``timeout`` had passed;
                nothing has begun.
            SettingsMismatch, UsageError: see ``sglrl.errors``.
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
            check_finite=check_finite,
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
        check_finite: bool = True,
    ) -> UpdateReport:
        """As ``update_weights``, from a folder of safetensors files that every worker reads itself:
        those that ``model.safetensors.index.json`` names, if there is one, else all. A worker that
        comes later reads them again, while they are what they were.

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
            check_finite=check_finite,
        )
        return await self._weights.update_from_disk(path, request)

    async def connect_weights(
        self, *, device: Any = None, host: str = "127.0.0.1", timeout: float = 60.0
    ) -> float:
        """Form the group of this process and the workers now, so that the first update does not pay
        for it. Milliseconds that it took. ``launch(weight_device=...)`` does it at the start.

        Args:
            timeout: seconds from this call.

        Raises:
            UpdateInProgress: another update or copy was still running when ``timeout`` had passed.
            SettingsMismatch, WeightUpdateError, WorkerLost: as for ``update_weights``.
        """
        self._running()
        return await self._weights.connect(device, host, timeout)

    async def model_metadata(self, *, timeout: float = 60.0) -> dict[str, TensorMetadata]:
        """dtype and shape of every tensor that the loaded model takes, by Hugging Face name. The
        dtype is the one that the engine keeps it in.

        Args:
            timeout: seconds from this call until a worker must have answered.
        """
        self._running()
        found = await self._pool.weights.describe(timeout)
        return {spec.name: TensorMetadata(spec.dtype, spec.shape) for spec in found.tensors}

    async def verify_weights(self, weights: Any, *, timeout: float = 300.0) -> list[str]:
        """Names of those of the given tensors whose live values differ, on whatever worker, in any
        bit after the cast to the engine's dtype: [] when all is well. Compares checksums; no
        weights are sent.

        Args:
            timeout: seconds from this call until the workers must have answered. An update that is
                running is awaited.

        Raises:
            UpdateInProgress: another update or copy was still running when ``timeout`` had passed.
            InvalidWeights: names or shapes do not fit the model.
        """
        self._running()
        return await self._weights.verify(weights, timeout)

    # --- generate ---------------------------------------------------------------------------------

    @overload
    async def generate(self, prompt: str, *, n: Literal[1] = 1, **kwargs: Any) -> Completion: ...
    @overload
    async def generate(self, prompt: str, *, n: int, **kwargs: Any) -> list[Completion]: ...
    @overload
    async def generate(
        self, *, input_ids: OneIds, n: Literal[1] = 1, **kwargs: Any
    ) -> Completion: ...
    @overload
    async def generate(self, *, input_ids: OneIds, n: int, **kwargs: Any) -> list[Completion]: ...
    @overload
    async def generate(
        self, *, messages: Sequence[Message], n: Literal[1] = 1, **kwargs: Any
    ) -> Completion: ...
    @overload
    async def generate(
        self, *, messages: Sequence[Message], n: int, **kwargs: Any
    ) -> list[Completion]: ...
    @overload
    async def generate(
        self, prompt: list[str] | tuple[str, ...], *, n: Literal[1] = 1, **kwargs: Any
    ) -> list[Completion]: ...
    @overload
    async def generate(
        self, prompt: list[str] | tuple[str, ...], *, n: int, **kwargs: Any
    ) -> list[list[Completion]]: ...
    @overload
    async def generate(
        self, *, input_ids: ManyIds, n: Literal[1] = 1, **kwargs: Any
    ) -> list[Completion]: ...
    @overload
    async def generate(
        self, *, input_ids: ManyIds, n: int, **kwargs: Any
    ) -> list[list[Completion]]: ...
    @overload
    async def generate(
        self, *, messages: Sequence[Sequence[Message]], n: Literal[1] = 1, **kwargs: Any
    ) -> list[Completion]: ...
    @overload
    async def generate(
        self, *, messages: Sequence[Sequence[Message]], n: int, **kwargs: Any
    ) -> list[list[Completion]]: ...

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
        ``messages`` (the model's chat template is applied) is given: one of it, or a list. A
        message's content is text or a list of OpenAI's text parts, which are joined without a
        separator; any other part (an image, audio, ...) is an ``InvalidRequest``.

        Args:
            n: samples per prompt. They share the prompt's prefix cache on one worker. All samples
                of all prompts are submitted at once, or none: at most as many as the workers'
                windows hold and may wait at the driver (``max_queue``); more is an
                ``InvalidRequest``.
            logprobs: return the logprob of every output token.
            top_logprobs: also return so many likeliest tokens at each position.
            session: turns with the same name go to the worker that holds their prefix.
            priority: calls that wait at the driver go out highest first.
            timeout: seconds; then ``DeadlineExceeded`` and the engine stops. None: the client's.
                Less than 0 is a ``UsageError``.
            worker: only this worker.
            sampling: a ``SamplingParams``; the keyword arguments below override its fields.
            **values: the fields of ``SamplingParams`` (``max_new_tokens``, ``temperature``, ...);
                vLLM's and OpenAI's names (``max_tokens``, ...) are understood.

        Returns:
            A ``Completion`` for one prompt (a list of n if n > 1); for a list of prompts a list of
            that, in order.

        Raises:
            UsageError: something above is wrong, and nothing was sent: ``InvalidRequest`` for a
                prompt or a sampling value.
            Overloaded, DeadlineExceeded, WorkerLost, EngineError, Closed: see ``sglrl.errors``.
        """
        requests = self._started()
        deadline = None
        if timeout is not None or self._timeout is not None:
            deadline = requests.deadline(timeout)
        prepared = requests.samplings.prepare(sampling, values)
        if logprobs is not True and logprobs is not False:
            requests.check_logprobs(logprobs)
        if top_logprobs or type(top_logprobs) is not int:
            requests.check_top(top_logprobs)
        if type(n) is not int or n < 1:
            raise InvalidRequest(f"n must be an integer of at least 1, got {n!r}")
        if worker is not None or session is not None or priority or type(priority) is not int:
            priority, worker, session = check_target(priority, worker, session)
        if n > 1:
            # Before the prompts are encoded, which may take long.
            requests.check_count(n, 1, worker)
        prompts: Sequence[bytes]
        if prompt is not None or messages is not None or input_ids is None:
            several, prompts = await requests.encode_prompts(prompt, input_ids, messages)
        elif type(input_ids) is list and input_ids and type(input_ids[0]) is int:
            several, prompts = False, (check_ids(input_ids, requests.vocab_size),)
        else:
            several, prompts = check_given_ids(input_ids, requests.vocab_size)
        logprobs = logprobs or top_logprobs > 0
        if n == 1 and len(prompts) == 1:
            # The path of almost every call: no lists, no gather.
            (ids,) = prompts
            max_new = requests.max_new_tokens(prepared, len(ids) // 4)
            route = Route(ids, self._pool.weights.version, session)
            call, future = requests.sample(
                ids, prepared, max_new, logprobs, top_logprobs, route, deadline, priority, worker
            )
            # A call that waits holds its prompt once, as bytes.
            del prompt, input_ids, messages, prompts, values
            try:
                completion = await future
            except BaseException:
                # If it has not ended: an answer that was malformed may have more to come.
                requests.driver.cancel(call)
                raise
            return [completion] if several else completion
        calls, futures = requests.samples(
            prompts, n, prepared, logprobs, top_logprobs, session, deadline, priority, worker
        )
        made = await submit_all(requests.driver, calls, futures)
        groups = made if n == 1 else [made[i : i + n] for i in range(0, len(made), n)]
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
            self._started,
            prompt=prompt,
            input_ids=input_ids,
            messages=messages,
            logprobs=logprobs,
            session=session,
            priority=priority,
            timeout=timeout,
            worker=worker,
            sampling=sampling,
            values=values,
        )

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
            input_ids: tokens [length], or a list of such, of the same length at most as for
                ``generate``.
            start: first position of interest; earlier ones are context only.
            top_logprobs: also return so many likeliest tokens at each position.

        Returns:
            ``ScoreLogprobs``, an array float32 [length - start]: ``log p(token i | tokens before
            i)`` at temperature 1. Position 0 has no context and is NaN. With ``top_logprobs``:
            ``Scores``. A list of that for a list.

            ``.version`` of either is the version of the weights that the forward pass which
            computed the score was launched with. It may be older than ``weight_version`` when the
            score arrives. A score that is submitted after ``update_weights`` has returned has the
            new version. Where a text is prefilled in several parts and a weight update with
            inflight="continue" comes in between, each part is of the weights that it met, which
            ``.versions`` tells; with "retract", "abort" or "drain" all is of one version.
        """
        requests = self._started()
        deadline = requests.deadline(timeout)
        several, prompts = check_given_ids(input_ids, requests.vocab_size)
        if isinstance(start, bool) or not isinstance(start, int) or start < 0:
            raise InvalidRequest(f"start must be an integer of at least 0, got {start!r}")
        priority, worker, _ = check_target(priority, worker, None)
        requests.check_top(top_logprobs)
        calls, futures = requests.scores(prompts, start, top_logprobs, deadline, priority, worker)
        results = await submit_all(requests.driver, calls, futures)
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

        Returns:
            ``NextTokenLogprobs``, whose ``version`` is the version of the weights that the forward
            pass which computed the distribution was launched with. It may be older than
            ``weight_version`` when the result arrives. A call that is submitted after
            ``update_weights`` has returned has the new version.

        Raises:
            UsageError: something above is wrong, and nothing was sent: ``InvalidRequest`` for a
                prompt or a sampling value.
            Overloaded, DeadlineExceeded, WorkerLost, EngineError, Closed: see ``sglrl.errors``.
        """
        requests = self._started()
        if worker is not None or priority or type(priority) is not int:
            priority, worker, _ = check_target(priority, worker, None)
        checked = check_ids(ids, requests.vocab_size)
        future: asyncio.Future[NextTokenLogprobs] = asyncio.get_running_loop().create_future()
        call = requests.next_token_call(checked, top_k, future, timeout, worker, priority)
        requests.driver.submit(call)
        try:
            return await future
        except BaseException:
            requests.driver.cancel(call)
            raise

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
        from ..sessions.session import Session
        from ..sessions.session_spec import SessionSpec

        return Session(
            SessionSpec(
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
    def _way_in(self) -> tuple[str, ClientKeys | None, bool, float | None]:
        """For processes of this machine: address, keys, insecure and heartbeat_timeout of
        ``sglrl.connect``."""
        if self._server is None:
            raise _not_started()
        _, _, token = self._server.address.partition("#")
        address = self._running().transport.address
        config = self._pool._config
        keys = self._pool._worker_keys
        return f"{address}#{token}", keys, config.insecure, config.heartbeat_timeout

    @property
    def _is_connected(self) -> bool:
        return self._driver is not None and not self._driver.fabric.closed

    @property
    def _is_alive(self) -> bool:
        """Whether a worker is there, or is to come."""
        return self._is_connected and any(w.state != "retired" for w in self.workers)

    def _loads(self) -> tuple[list[Load], int]:
        """How full each engine says it is, and how many calls wait here for one with room."""
        assert self._driver is not None
        fabric = self._driver.fabric
        loads = [
            Load(m.kv_usage, m.waiting, m.preempted)
            for m in fabric.members.values()
            if m.state is READY
        ]
        return loads, fabric.waiting

    def _running(self, *, urgent: bool = False) -> Driver:
        if self._driver is None:
            raise _not_started()
        self._driver.fabric.check_open(urgent=urgent)
        return self._driver

    def _started(self) -> Requests:
        if self._requests is None:
            raise _not_started()
        return self._requests


def _not_started() -> Closed:
    return Closed("the client has not been started; use 'async with sglrl.launch(...)'")
