"""Stream the chunks of one continuation as they are sampled."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from typing import Any, NoReturn

from .. import tracing
from ..actors.replies import error_of
from ..errors import Closed, InvalidRequest, SglrlError, UsageError
from ..wire.calls import ItemKind
from .chunk import Chunk, StreamText
from .completion import Completion
from .completion_parser import encode_call
from .options import RenderOptions
from .requests import Requests
from .spans import begin_call_span, end_call_span


class Stream:
    """An async iterator of ``Chunk``. ``completion`` has the whole result after the last chunk.

    If a caller exits the loop early, ``await stream.aclose()`` stops the request in the engine.
    Without ``aclose``, the request stops when the iterator is garbage-collected.
    """

    def __init__(
        self,
        started: Callable[[], Requests],
        prompt: Any,
        input_ids: Any,
        messages: Any,
        options: Mapping[str, Any],
    ) -> None:
        self._iterator = self._chunks(started, prompt, input_ids, messages, options)
        self._completion: Completion | None = None

    @property
    def completion(self) -> Completion:
        """The whole result. Raises ``Closed`` if the stream has not ended."""
        if self._completion is None:
            raise Closed("the stream has not ended; iterate over it first")
        return self._completion

    def __repr__(self) -> str:
        return "<Stream, not at its end>" if self._completion is None else "<Stream, ended>"

    def __iter__(self) -> NoReturn:
        raise UsageError("use 'async for': the chunks of a stream arrive while you iterate")

    def __await__(self) -> NoReturn:
        raise UsageError("use 'async for chunk in client.stream(...)', or await client.generate")

    def __aiter__(self) -> AsyncIterator[Chunk]:
        return self._iterator

    async def aclose(self) -> None:
        await self._iterator.aclose()

    async def _chunks(
        self,
        started: Callable[[], Requests],
        prompt: Any,
        input_ids: Any,
        messages: Any,
        options: Mapping[str, Any],
    ) -> AsyncGenerator[Chunk, None]:
        """Check the arguments, submit the call and yield its chunks.

        This is a generator, so it does nothing before the first chunk is requested.

        Args:
            started: returns the requests of the client, or raises if the client has not started.
            options: the keyword arguments of ``MessageOptions``.
        """
        requests = started()
        checked, message, prepared = requests.read(options)
        several, prompts, prepared, parser = await encode_call(
            requests, prompt, input_ids, messages, RenderOptions(**message), prepared
        )
        if several:
            raise InvalidRequest("stream takes one prompt; use generate for a list")
        call, reply = requests.stream_call(prompts[0], prepared, checked)
        texts = StreamText(requests.decode, prepared.params)
        requests.driver.submit(call)
        span = None
        if tracing.tracer is not None:
            span = begin_call_span(call, requests.info.model)
        try:
            while True:
                while reply.items:
                    items, reply.items = reply.items, []
                    for chunk in items:
                        if chunk.finish:
                            completion = reply.generation.completion(call, reply.received)
                            if parser is not None:
                                await parser.parse([completion])
                            self._completion = completion
                        yield Chunk(
                            chunk.finish or None,
                            chunk.version,
                            chunk.ids,
                            chunk.logprobs if checked.logprobs else None,
                            texts.add(chunk),
                            chunk.lora_version,
                            chunk,
                            prepared.params,
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
            # Cancelling has no effect if the call has ended.
            requests.driver.cancel(call)
            if span is not None:
                end_call_span(span, call, self._completion or sys.exception())
