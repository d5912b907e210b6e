"""``Client``: the object with which a program uses a pool of engines.

A call of ``generate`` takes these steps:

1. ``generate`` checks its arguments and encodes the prompt (``prompts.py``).
2. ``Requests.sample`` (``requests.py``) makes a ``Call``.
3. ``Driver.submit`` assigns the call to a worker.
4. ``replies.GenerationReply`` collects the chunks and makes the ``Completion``.
"""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, Generator, Sequence
from typing import Any, Literal, Self, Unpack, overload

from ..control.adapters import LoraMethods
from ..control.client_base import Closable, Control, RemoteServer, not_started
from ..control.engines import EngineMethods
from ..control.observing import SnapshotMethods
from ..control.pausing import PauseMethods
from ..control.sleeping import SleepMethods
from ..control.weights import WeightMethods
from ..control.workers import WorkerMethods
from ..core.prefixes import Route
from ..driver.port import PoolPort
from ..driver.worker_info import describe
from ..errors import InvalidRequest
from ..inference.completion import Completion
from ..inference.completion_parser import CompletionParser, encode_call
from ..inference.options import GenerateOptions, MessageOptions, RenderOptions
from ..inference.prompts import Message, check_given_ids
from ..inference.requests import Requests
from ..inference.stream import Stream
from ..inference.tokens import TokenIds, TokenizerBox, check_ids
from ..sessions.options import SessionKeywords, SessionOptions
from ..sessions.session import Session
from ..sessions.session_spec import SessionSpec
from ..wire.processes import PoolEntry
from .live import LiveMethods
from .scores import ScoreMethods


class Client(
    ScoreMethods,
    LoraMethods,
    WeightMethods,
    PauseMethods,
    SleepMethods,
    EngineMethods,
    WorkerMethods,
    SnapshotMethods,
    LiveMethods,
):
    """A client that generates with a pool of engine workers. ``sglrl.launch`` returns it.

    ``async with sglrl.launch(...) as client`` closes the client at the end of the block. After
    ``client = await sglrl.launch(...)``, for example in a notebook, call ``await client.close()``.

    Any number of tasks of one event loop may call the methods of a client at the same time.
    """

    def __init__(
        self,
        pool: PoolPort,
        control: Control,
        *,
        model: str,
        tokenizer: str = "",
        trust_tokenizer: bool = False,
        timeout: float | None,
        weight_device: Any = None,
        serve: Callable[[Client], RemoteServer] | None = None,
        prepare: Callable[[Client], Awaitable[None]] | None = None,
        metrics: Callable[[Client], Closable] | None = None,
    ) -> None:
        super().__init__(pool, control, timeout)
        self._prepare = prepare
        self._weight_device = weight_device
        self.model = model
        """The model's folder, or its name on the Hugging Face hub."""
        self.tokenizer_box = TokenizerBox(tokenizer or model, trust_tokenizer)
        self._serve = serve
        self._serve_metrics = metrics
        self._metrics: Closable | None = None

    async def __aenter__(self) -> Self:
        if self._prepare is not None:
            await self._prepare(self)
        await self.pool.enter()
        self._driver = self.pool.driver
        info = self.pool.engine
        assert info is not None
        if not self.model:
            self.model = info.model
            self.tokenizer_box.model = info.tokenizer or info.model
        self.tokenizer_box.fake = not info.sglang_version
        adapters = self._control.adapters
        self._requests = Requests(
            self._driver, info, self.tokenizer_box, self.pool.weights, self.timeout, adapters
        )
        if self._serve is not None:
            self._server = self._serve(self)
        try:
            if self._serve_metrics is not None:
                self._metrics = self._serve_metrics(self)
            await self._control.start()
            if self._weight_device is not None:
                await self.connect_weights(device=self._weight_device)
        except BaseException:
            await self.close()
            raise
        return self

    def __await__(self) -> Generator[Any, None, Self]:
        """Start the client without a block. ``close()`` or the exit of the program closes it."""
        yield from self.__aenter__().__await__()
        self.pool.closes_at_exit()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

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

    async def close(self, *, drain: bool = False, timeout: float = 600.0) -> None:
        """Fail every pending call with ``Closed`` and stop every worker. Safe to call again.

        Args:
            drain: whether to wait for the pending calls first. New calls raise ``Closed`` during
                this wait.
            timeout: the maximum number of seconds to wait with ``drain``.
        """
        if self._driver is not None and self._driver.is_copied:
            return
        if self._metrics is not None:
            metrics, self._metrics = self._metrics, None
            await metrics.close()
        await self.pool.close(drain=drain, timeout=timeout)
        await self._control.sender.close()
        if self._server is not None:
            await self._server.close()

    # --- state ------------------------------------------------------------------------------------

    @property
    def tokenizer(self) -> Any:
        """The model's Hugging Face tokenizer, loaded on first use."""
        return self.tokenizer_box.tokenizer

    @property
    def address(self) -> str:
        """The address for ``sglrl.connect`` in other processes. It contains a secret."""
        if self._server is None:
            raise not_started()
        return self._server.address

    @property
    def entry(self) -> PoolEntry:
        """The values with which another process connects to the pool; see ``RemoteServer``.

        Raises:
            Closed: the client is not open.
        """
        if self._server is None:
            raise not_started()
        self._running()
        return self._server.entry

    # --- generate ---------------------------------------------------------------------------------

    @overload
    async def generate(  # type: ignore[overload-overlap]
        self, prompt: str, *, n: Literal[1] = 1, **kwargs: Unpack[GenerateOptions]
    ) -> Completion: ...
    @overload
    async def generate(
        self, prompt: str, *, n: int, **kwargs: Unpack[GenerateOptions]
    ) -> list[Completion]: ...
    @overload
    async def generate(  # type: ignore[overload-overlap]
        self, *, input_ids: TokenIds, n: Literal[1] = 1, **kwargs: Unpack[GenerateOptions]
    ) -> Completion: ...
    @overload
    async def generate(
        self, *, input_ids: TokenIds, n: int, **kwargs: Unpack[GenerateOptions]
    ) -> list[Completion]: ...
    @overload
    async def generate(  # type: ignore[overload-overlap]
        self, *, messages: Sequence[Message], n: Literal[1] = 1, **kwargs: Unpack[MessageOptions]
    ) -> Completion: ...
    @overload
    async def generate(
        self, *, messages: Sequence[Message], n: int, **kwargs: Unpack[MessageOptions]
    ) -> list[Completion]: ...
    @overload
    async def generate(  # type: ignore[overload-overlap]
        self,
        prompt: list[str] | tuple[str, ...],
        *,
        n: Literal[1] = 1,
        **kwargs: Unpack[GenerateOptions],
    ) -> list[Completion]: ...
    @overload
    async def generate(
        self, prompt: list[str] | tuple[str, ...], *, n: int, **kwargs: Unpack[GenerateOptions]
    ) -> list[list[Completion]]: ...
    @overload
    async def generate(  # type: ignore[overload-overlap]
        self, *, input_ids: Sequence[TokenIds], n: Literal[1] = 1, **kwargs: Unpack[GenerateOptions]
    ) -> list[Completion]: ...
    @overload
    async def generate(
        self, *, input_ids: Sequence[TokenIds], n: int, **kwargs: Unpack[GenerateOptions]
    ) -> list[list[Completion]]: ...
    @overload
    async def generate(  # type: ignore[overload-overlap]
        self,
        *,
        messages: Sequence[Sequence[Message]],
        n: Literal[1] = 1,
        **kwargs: Unpack[MessageOptions],
    ) -> list[Completion]: ...
    @overload
    async def generate(
        self, *, messages: Sequence[Sequence[Message]], n: int, **kwargs: Unpack[MessageOptions]
    ) -> list[list[Completion]]: ...

    async def generate(
        self,
        prompt: str | Sequence[str] | None = None,
        *,
        input_ids: TokenIds | Sequence[TokenIds] | None = None,
        messages: Sequence[Message] | Sequence[Sequence[Message]] | None = None,
        n: int = 1,
        **options: Unpack[MessageOptions],
    ) -> Any:
        """Sample continuations of one prompt or of several.

        Give one of ``prompt``, ``input_ids`` and ``messages``: one prompt or a list of prompts.

        Args:
            prompt: a text, or messages.
            input_ids: token ids, as a sequence of ints or an integer array [length].
            messages: a conversation, rendered with the model's chat template. The content of a
                message is text or a list of OpenAI's text parts, which are joined without a
                separator. Any other part (an image, audio, ...) raises ``InvalidRequest``.
            n: the number of samples per prompt. They share the prompt's prefix cache on one worker.
                All samples of all prompts are submitted at once. Their number is limited to the
                calls in the workers' windows plus ``max_queue``, the calls that may wait at the
                driver. Beyond this limit, none is submitted, and ``InvalidRequest`` is raised.

        Keyword Args:
            tools: the tools that the chat template describes. A tool is a JSON schema as in
                OpenAI's API, or a Python function with type hints and a docstring.
            template, chat_template_kwargs: arguments for the template (``enable_thinking``, ...).
            continue_final_message: continue the last message, which must be a message of the
                assistant, instead of beginning a new one. The completion has only the new tokens.
            renderer: the parser of ``Completion.message``, as in ``session``. None: the renderer
                that fits the chat template if there are ``tools`` or a grammar for ``messages``,
                otherwise no renderer.
            tool_choice: whether the model must call a tool, as in ``session``.
            logprobs: return the logprob of every output token. See ``Completion.logprobs``.
            top_logprobs: also return this number of most likely tokens at each position.
            session: a name. Calls with the same name go to the worker that holds their prefix.
            priority: the priority of the call. Among the calls that wait at the driver, those with
                the highest priority are sent first.
            timeout: seconds until the call raises ``DeadlineExceeded`` and the engine stops its
                request. None: the client's timeout.
            worker: the index of the only worker that may run the call. None: any worker.
            lora: the name of a LoRA adapter, see ``load_lora``.
            sampling: a ``SamplingParams``. Other keyword arguments override its fields.
            Others: the fields of ``SamplingParams`` (``max_new_tokens``, ``temperature``, ...). The
                names of vLLM and OpenAI (``max_tokens``, ...) are accepted too.

        Returns:
            For one prompt, a ``Completion``, or a list of ``n`` completions if ``n > 1``. For a
            list of prompts, a list with this result for each prompt, in order.

        Raises:
            UsageError: an argument is wrong, and nothing was sent. The subclass ``InvalidRequest``
                is raised for a wrong prompt or sampling value.
            Overloaded, DeadlineExceeded, WorkerLost, EngineError, Closed: see ``sglrl.errors``.
        """
        requests = self.requests
        call_options, message, prepared = requests.read(options)
        if type(n) is not int or n < 1:
            raise InvalidRequest(f"n must be an integer of at least 1, got {n!r}")
        if n > 1:
            # Check before the prompts are encoded, because encoding may take long.
            requests.check_count(n, 1, call_options.worker)
        prompts: Sequence[bytes]
        parser: CompletionParser | None = None
        if prompt is not None or messages is not None or input_ids is None or message:
            several, prompts, prepared, parser = await encode_call(
                requests, prompt, input_ids, messages, RenderOptions(**message), prepared
            )
        elif type(input_ids) is list and input_ids and type(input_ids[0]) is int:
            several, prompts = False, (check_ids(input_ids, requests.vocab_size),)
        else:
            several, prompts = check_given_ids(input_ids, requests.vocab_size)
        if n == 1 and len(prompts) == 1:
            (ids,) = prompts  # Almost every call takes this path, so it makes no lists.
            max_new = requests.max_new_tokens(prepared, len(ids) // 4)
            route = Route(ids, requests.version(call_options.lora), call_options.session)
            call, future = requests.sample(ids, prepared, max_new, call_options, route)
            # While the call waits, keep only one form of the prompt, the bytes, in memory.
            del prompt, input_ids, messages, prompts, options, message
            try:
                completion = await future
            except BaseException:
                # After a malformed answer the worker may still send more, so cancel the call.
                requests.driver.cancel(call)
                raise
            if parser is not None:
                await parser.parse([completion])
            return [completion] if several else completion
        calls, futures = requests.samples(prompts, n, prepared, call_options)
        made = await requests.submit_all(calls, futures)
        if parser is not None:
            await parser.parse(made)
        groups = made if n == 1 else [made[i : i + n] for i in range(0, len(made), n)]
        return groups if several else groups[0]

    def stream(
        self,
        prompt: str | None = None,
        *,
        input_ids: TokenIds | None = None,
        messages: Sequence[Message] | None = None,
        **options: Unpack[MessageOptions],
    ) -> Stream:
        """Stream the tokens of one prompt: ``async for chunk in client.stream(...)``.

        The arguments and the errors are the same as for ``generate``. Errors are raised when the
        iteration begins. The joined ids, logprobs and texts of all chunks equal those of the
        completion that ``generate`` would return.
        """
        return Stream(lambda: self.requests, prompt, input_ids, messages, options)

    def session(
        self,
        prompt: str | None = None,
        *,
        messages: Sequence[Message] | None = None,
        input_ids: TokenIds | None = None,
        **options: Unpack[SessionKeywords],
    ) -> Session:
        """Return a conversation of several turns: ``async with client.session(...) as s``.

        Give one of ``prompt``, ``input_ids`` and ``messages``. If none is given, the first
        ``observe`` gives the prompt.

        Keyword Args:
            tools, template, chat_template_kwargs, continue_final_message: as for ``generate``.
            allow_rewrite: whether to keep the turns as sampled if the chat template changes them.
                Some templates change earlier turns when the conversation continues, for example
                remove their reasoning. False: the session branches at such a change (see
                ``Trajectory.branches``). True: the session ignores the change, and appends only
                the text that the template writes after the last answer.
            renderer: the renderer that parses the turns (``Completion.message``) and extends the
                conversation. It is a name such as "qwen3", or a class of your own, as
                "module:Class". "template": use no renderer. None: the renderer that fits the chat
                template.
            tool_choice: whether the turns must call tools. "auto", the default: the model decides.
                "required": a grammar makes each turn call one or several tools. The name of a tool:
                a grammar makes each turn call this tool once.
            timeout: seconds for each turn. None: the client's timeout.
            priority: the priority of each turn, as for ``generate``.
            metadata: values to store in the trajectory.
            reward_weights: the weights of rewards (``Session.reward``) by name. Rewards with other
                names have the weight 1.
            lora: the name of the LoRA adapter that samples the turns.
            sampling: a ``SamplingParams``, the defaults of the turns. A turn can override them.
            Others: the fields of ``SamplingParams``, which override the fields of ``sampling``.

        Raises:
            InvalidRequest: an argument is wrong.
        """
        spec = SessionSpec(
            self.requests,
            SessionOptions.of(options),
            prompt=prompt,
            messages=messages,
            input_ids=input_ids,
        )
        return Session(spec)
