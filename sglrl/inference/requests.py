"""Make the calls of an engine: check the options, and build each ``Call`` with its reply."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Mapping, Sequence
from typing import Any, Final
from weakref import WeakSet

from msgspec import Raw

from .. import tracing
from ..actors.actor import deadline_from
from ..config import check_target
from ..control.client_base import AdapterNames
from ..core.calls import Call
from ..core.policy_versions import MODEL
from ..core.prefixes import Route
from ..core.seeds import derived_seed
from ..driver.driver import ENVELOPE_BYTES, Driver
from ..errors import InvalidRequest, MessageTooLarge
from ..weights.port import WeightsPort
from ..wire.codec import encode
from ..wire.engine import EngineInfo, GenerateArgs, NextTokenArgs, ScoreArgs
from .completion import Completion, Decode, NextTokenLogprobs
from .number_checks import max_top_logprobs
from .options import CALL, MESSAGE, CallOptions
from .prompts import encode_prompts
from .replies import ChunkReply, GenerationReply, NextTokenReply, OnChunk, ScoreReply
from .routed_experts import RoutedRows
from .sampling import DEFAULT_MAX_NEW_TOKENS
from .sampling_cache import Prepared, SamplingCache
from .spans import trace_call
from .tokens import TokenizerBox

_BESIDE_IDS: Final = 256
"""An upper bound of the encoded size of a call's arguments without their byte strings.

The size of arguments is measured only if it could exceed the message limit according to this bound.
"""


class Requests:
    """Makes the calls of one client. The client creates it when its pool has started.

    Arguments named ``ids`` are checked token ids, int32. Arguments of type ``Any`` are not checked
    yet.

    Every method that makes a call raises ``InvalidRequest`` if the prompt does not fit into the
    context, and ``MessageTooLarge`` if the request exceeds ``max_message_bytes``.
    """

    def __init__(
        self,
        driver: Driver,
        info: EngineInfo,
        box: TokenizerBox,
        weights: WeightsPort,
        timeout: float | None,
        adapters: AdapterNames,
    ) -> None:
        self.driver = driver
        self.info = info
        self.box = box
        self.samplings = SamplingCache.of(info)
        # Every call reads these values, so keep them as attributes.
        self.vocab_size = info.vocab_size
        self._max_prompt_tokens = info.max_prompt_tokens
        self._max_tokens = info.max_total_tokens
        self._max_body = driver.max_message_bytes - ENVELOPE_BYTES
        self._max_ids = self._max_body - _BESIDE_IDS
        self.weights = weights
        self.timeout = timeout
        self.adapters = adapters
        self.sessions: WeakSet[Any] = WeakSet()
        """The sessions that sample with these requests. They are in a higher folder."""
        # Bind the method once. Otherwise each waiting call would hold its own bound method.
        self.decode: Decode = box.decode

    def options(
        self,
        logprobs: Any = False,
        top_logprobs: Any = 0,
        session: Any = None,
        priority: Any = 0,
        timeout: Any = None,
        worker: Any = None,
        lora: Any = None,
    ) -> CallOptions:
        """Check the options of a call. ``Client.generate`` documents them.

        Args:
            timeout: the time limit in seconds. None: the client's timeout.

        Raises:
            UsageError: a value is wrong. The subclass ``UnknownAdapter``: the LoRA adapter is not
                loaded.
            DeadlineExceeded: the timeout is 0.
        """
        deadline = None
        if timeout is not None or self.timeout is not None:
            deadline = deadline_from(self.timeout if timeout is None else timeout)
        if logprobs is not True and logprobs is not False:
            self._check_logprobs(logprobs)
        if top_logprobs or type(top_logprobs) is not int:
            self.check_top(top_logprobs)
        if worker is not None or session is not None or priority or type(priority) is not int:
            priority, worker, session = check_target(priority, worker, session)
        name = "" if lora is None else self.adapters.check(lora)
        wanted = logprobs or top_logprobs > 0
        return CallOptions(wanted, top_logprobs, session, deadline, priority, worker, name)

    def read(self, options: Mapping[str, Any]) -> tuple[CallOptions, dict[str, Any], Prepared]:
        """Split the keyword arguments of ``Client.generate``, and check them.

        Returns:
            The options of the call, the unchecked arguments of ``RenderOptions``, and the sampling
            values.

        Raises:
            UsageError: a value is wrong. The subclass ``InvalidRequest``: a sampling value is
                wrong.
        """
        call: dict[str, Any] = {}
        message: dict[str, Any] = {}
        values: dict[str, Any] = {}
        for name, value in options.items():
            (call if name in CALL else message if name in MESSAGE else values)[name] = value
        checked = self.options(**call)
        return checked, message, self.samplings.prepare(values.pop("sampling", None), values)

    def check_top(self, top_logprobs: Any) -> None:
        """Raise ``InvalidRequest`` unless ``top_logprobs`` is an allowed number of tokens."""
        most = max_top_logprobs(self.vocab_size)
        if type(top_logprobs) is not int or not 0 <= top_logprobs <= most:
            raise InvalidRequest(f"top_logprobs must be in 0..{most}, got {top_logprobs!r}")

    def _check_logprobs(self, logprobs: Any) -> None:
        """Raise ``InvalidRequest`` unless ``logprobs`` is a bool."""
        if not isinstance(logprobs, bool):
            raise InvalidRequest(
                f"logprobs must be True or False, got {logprobs!r}; for the "
                "likeliest tokens use top_logprobs=k"
            )

    def check_count(self, n: int, prompts: int, worker: int | None) -> None:
        """Raise ``InvalidRequest`` if ``n`` calls for each prompt exceed the pool's capacity.

        The capacity is the number of calls that an idle pool accepts at a time. Call this method
        before any of the calls is made.

        Args:
            n: the number of calls per prompt.
            prompts: the number of prompts.
            worker: the worker to which the calls are pinned, or None.
        """
        windows, max_queue = self.driver.capacity(worker)
        most = windows + max_queue
        if n * prompts > most:
            calls = f"n={n:,}" if prompts == 1 else f"n={n:,} for each of {prompts:,} prompts"
            raise InvalidRequest(
                f"{calls} makes {n * prompts:,} calls; at most {most:,} can be taken at a time: "
                f"{windows:,} by the workers (window) and {max_queue:,} that wait at the "
                "driver (max_queue). Make fewer at a time, or launch with a larger max_queue"
            )

    def lora(self, name: Any) -> str:
        """Return the name of a LoRA adapter, or "" for None.

        Raises:
            UnknownAdapter: the LoRA adapter is not loaded.
        """
        return "" if name is None else self.adapters.check(name)

    def version(self, lora: str) -> int:
        """Return a version number for routes. Routes with different numbers share no KV cache."""
        version = self.weights.version
        return self.adapters.route_version(lora, version) if lora else version

    def versions(self, lora: str) -> dict[str, int]:
        """Return the current versions of the model and of a LoRA adapter, by name.

        An unknown version of the LoRA adapter is missing. ``core/policy_versions.py`` describes the
        names.
        """
        versions = {MODEL: self.weights.version}
        version = self.adapters.versions.get(lora) if lora else None
        return versions if version is None else {**versions, lora: version}

    def encode_prompts(
        self,
        prompt: Any,
        input_ids: Any,
        messages: Any,
        template: Mapping[str, Any] | None = None,
    ) -> Awaitable[tuple[bool, list[bytes]]]:
        """Encode prompts. See ``prompts.encode_prompts``."""
        return encode_prompts(self.box, self.vocab_size, prompt, input_ids, messages, template)

    # --- calls ------------------------------------------------------------------------------------

    def sample(
        self,
        ids: bytes,
        prepared: Prepared,
        max_new_tokens: int,
        options: CallOptions,
        route: Route,
        begun: Completion | None = None,
        on_chunk: OnChunk | None = None,
        routed_from: int = 0,
    ) -> tuple[Call, asyncio.Future[Completion]]:
        """Submit a call for one continuation.

        A caller that stops waiting for the future must cancel the call. This method is not a
        coroutine, because a coroutine would take 400 more bytes per waiting call.

        Args:
            begun: an unfinished completion to continue. Limits, stop strings, penalties and seeds
                apply from its first token on.
            on_chunk: called with each chunk as it arrives. None: the worker does not stream chunks.
            routed_from: the first position whose routed experts are requested. Not used with
                ``begun``.
        """
        wire = prepared.wire(max_new_tokens, prepared.seed)
        resume = b"" if begun is None else begun.output_ids.tobytes()
        streams = on_chunk is not None
        routed = self._routed(prepared, routed_from)
        if routed is not None and begun is not None and begun.routed_rows is not None:
            routed = begun.routed_rows.copy()
        start, rows = (0, 0) if routed is None else (routed.start, routed.count)
        logprobs, top, priority = options.logprobs, options.top, options.priority
        args = GenerateArgs(
            ids, wire, logprobs, top, streams, priority, resume, options.lora, start, rows
        )
        if len(ids) + len(wire) + len(resume) > self._max_ids:
            self._check_size(args)
        future: asyncio.Future[Completion] = self.driver.loop.create_future()
        reply = GenerationReply(self.decode, future, ids, prepared, logprobs, top, on_chunk, routed)
        if begun is not None:
            reply.chunks, reply.resumed_at = list(begun.chunks), begun.resumed_at
            reply.begun = begun
        call = Call(
            "generate",
            args,
            reply,
            (),
            options.deadline,
            priority,
            options.worker,
            route,
            True,
            streams,
            True,
        )
        self.driver.submit(call)
        if tracing.tracer is not None:
            trace_call(call, future, self.info.model)
        return call, future

    async def submit_all(
        self, calls: list[Call], futures: Sequence[asyncio.Future[Any]]
    ) -> list[Any]:
        """Submit the calls of ``samples`` or ``scores``, and return their results in order."""
        if tracing.tracer is not None:
            for call, future in zip(calls, futures, strict=True):
                trace_call(call, future, self.info.model)
        return await self.driver.submit_all(calls, futures)

    def samples(
        self,
        prompts: Sequence[bytes],
        n: int,
        prepared: Prepared,
        options: CallOptions,
    ) -> tuple[list[Call], list[asyncio.Future[Completion]]]:
        """Make ``n`` calls for each prompt, without submitting them.

        Returns:
            The calls and the futures of their answers.

        Raises:
            InvalidRequest: there are too many calls.
        """
        self.check_count(n, len(prompts), options.worker)
        loop = asyncio.get_running_loop()
        calls: list[Call] = []
        futures: list[asyncio.Future[Completion]] = []
        for ids in prompts:
            max_new = self.max_new_tokens(prepared, len(ids) // 4)
            route = self._route(ids, options)
            seed = prepared.seed
            args: GenerateArgs | None = None
            for _ in range(n):
                if args is None or seed is not None:
                    own = None if seed is None else derived_seed(seed, len(calls))
                    wire = prepared.wire(max_new, own)
                    args = self._generate_args(ids, wire, options, False)
                future: asyncio.Future[Completion] = loop.create_future()
                futures.append(future)
                calls.append(
                    Call(
                        "generate",
                        args,
                        self._reply(future, ids, prepared, options),
                        deadline=options.deadline,
                        priority=options.priority,
                        pinned=options.worker,
                        route=route,
                        idempotent=True,
                        resumable=True,
                    )
                )
        return calls, futures

    def stream_call(
        self, ids: bytes, prepared: Prepared, options: CallOptions
    ) -> tuple[Call, ChunkReply]:
        """Make a streaming call, without submitting it.

        Returns:
            The call and the reply that receives its chunks.
        """
        max_new = self.max_new_tokens(prepared, len(ids) // 4)
        wire = prepared.wire(max_new, prepared.seed)
        future: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        reply = ChunkReply(self._reply(future, ids, prepared, options))
        call = Call(
            "generate",
            self._generate_args(ids, wire, options, True),
            reply,
            deadline=options.deadline,
            priority=options.priority,
            pinned=options.worker,
            route=self._route(ids, options),
            idempotent=True,
            stream=True,
            resumable=True,
        )
        return call, reply

    def scores(
        self,
        prompts: Sequence[bytes],
        start: int,
        temperature: float,
        options: CallOptions,
    ) -> tuple[list[Call], list[asyncio.Future[Any]]]:
        """Make one ``score`` call for each prompt, without submitting them.

        Returns:
            The calls and the futures of their answers.

        Raises:
            InvalidRequest: there are too many calls, or ``start`` is beyond the tokens.
        """
        self.check_count(1, len(prompts), options.worker)
        top = options.top
        loop = asyncio.get_running_loop()
        calls: list[Call] = []
        futures: list[asyncio.Future[Any]] = []
        for ids in prompts:
            count = len(ids) // 4
            if start >= count:
                raise InvalidRequest(f"start={start} is beyond the {count} tokens given")
            if count > self._max_tokens:
                raise InvalidRequest(
                    f"the text has {count} tokens; at most {max(0, self._max_tokens)} are "
                    f"possible with a context of {self.info.context_length} and a KV cache of "
                    f"{self.info.kv_cache_tokens} tokens"
                )
            answer = 4 * (count - start) * (1 + 2 * top)
            if answer > self._max_body:
                raise MessageTooLarge(
                    f"the logprobs of {count - start} tokens have {answer:,} bytes; at most "
                    f"{self._max_body:,} fit one message (max_message_bytes): score parts of the "
                    "text with start=, or ask for less top_logprobs"
                )
            future: asyncio.Future[Any] = loop.create_future()
            futures.append(future)
            args = ScoreArgs(ids, start, top, options.priority, temperature, options.lora)
            if len(ids) > self._max_ids:
                self._check_size(args)
            calls.append(
                Call(
                    "score",
                    args,
                    ScoreReply(future, count - start, top, options.lora != ""),
                    deadline=options.deadline,
                    priority=options.priority,
                    pinned=options.worker,
                    route=self._route(ids, options),
                    idempotent=True,
                )
            )
        return calls, futures

    def next_token_call(
        self,
        ids: bytes,
        top_k: Any,
        future: asyncio.Future[NextTokenLogprobs],
        options: CallOptions,
    ) -> Call:
        """Check ``top_k``, and make a ``next_token_logprobs`` call without submitting it."""
        if len(ids) // 4 > self._max_prompt_tokens:
            self._check_length(len(ids) // 4)
        if top_k is not None and (type(top_k) is not int or not 1 <= top_k <= self.vocab_size):
            raise InvalidRequest(f"top_k must be None or in 1..{self.vocab_size}, got {top_k!r}")
        args = NextTokenArgs(ids, top_k or 0, options.priority, options.lora)
        if len(ids) > self._max_ids:
            self._check_size(args)
        return Call(
            "next_token_logprobs",
            args,
            NextTokenReply(future, top_k or 0, self.vocab_size),
            (),
            options.deadline,
            options.priority,
            options.worker,
            self._route(ids, options),
            True,
        )

    # --- limits -----------------------------------------------------------------------------------

    def max_new_tokens(self, prepared: Prepared, prompt_tokens: int) -> int:
        """Return the maximum number of new tokens after a prompt of this length.

        Raises:
            InvalidRequest: the prompt is too long, or the requested ``max_new_tokens`` do not fit.
        """
        if prompt_tokens > self._max_prompt_tokens:
            self._check_length(prompt_tokens)
        room = self._max_tokens - prompt_tokens
        wanted = prepared.max_new_tokens
        if wanted is None:
            return min(DEFAULT_MAX_NEW_TOKENS, room)
        if wanted > room:
            raise InvalidRequest(
                f"max_new_tokens={wanted} does not fit: the prompt has {prompt_tokens} tokens, and "
                f"together at most {self._max_tokens} are possible with a context of "
                f"{self.info.context_length} and a KV cache of {self.info.kv_cache_tokens} tokens, "
                f"so at most {room}"
            )
        return wanted

    def _check_length(self, count: int) -> None:
        info = self.info
        if count > info.max_prompt_tokens:
            raise InvalidRequest(
                f"the prompt has {count} tokens; at most {max(0, info.max_prompt_tokens)} are "
                f"possible with a context of {info.context_length} and a KV cache of "
                f"{info.kv_cache_tokens} tokens"
            )

    def _check_size(self, args: GenerateArgs | ScoreArgs | NextTokenArgs) -> None:
        size = len(encode(args))
        if size > self._max_body:
            raise MessageTooLarge(
                f"the request has {size:,} bytes; at most {self._max_body:,} fit one message "
                "(max_message_bytes)"
            )

    def _generate_args(
        self, ids: bytes, wire: Raw, options: CallOptions, stream: bool
    ) -> GenerateArgs:
        logprobs, top, priority = options.logprobs, options.top, options.priority
        args = GenerateArgs(ids, wire, logprobs, top, stream, priority, b"", options.lora)
        if len(ids) + len(wire) > self._max_ids:
            self._check_size(args)
        return args

    def _reply(
        self,
        future: asyncio.Future[Completion],
        ids: bytes,
        prepared: Prepared,
        options: CallOptions,
    ) -> GenerationReply:
        routed, logprobs, top = self._routed(prepared), options.logprobs, options.top
        return GenerationReply(self.decode, future, ids, prepared, logprobs, top, None, routed)

    def _routed(self, prepared: Prepared, start: int = 0) -> RoutedRows | None:
        """Return an object for the routed experts of a call, or None if they are not requested."""
        shape = self.info.routed_experts
        wanted = prepared.params.return_routed_experts
        return RoutedRows(shape, start) if wanted and shape is not None else None

    def _route(self, ids: bytes, options: CallOptions) -> Route:
        return Route(ids, self.version(options.lora), options.session)
