"""Check the requests of remote clients and turn them into calls of the driver.

Clients are not trusted. ``remote/forwarding.py`` sends them the answers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import msgspec

from ..control.operations import Operation
from ..core.calls import Call
from ..core.prefixes import Route
from ..driver.driver import ENVELOPE_BYTES, Driver, now
from ..errors import DeadlineExceeded, InvalidRequest, SglrlError, UnknownEndpoint
from ..inference.number_checks import check_number, max_top_logprobs
from ..inference.requests import Requests as EngineRequests
from ..inference.routed_experts import check_begin
from ..inference.sampling import SentSampling
from ..inference.sampling_cache import SamplingCache
from ..inference.tokens import in_range
from ..wire.codec import MALFORMED
from ..wire.engine import GenerateArgs, NextTokenArgs, ScoreArgs, TokenChunk
from ..wire.remote import Request
from .forwarding import ForwardingReply, Peer, Relay

_LONGEST_NAME: Final = 1024
_KNOWN_SAMPLINGS: Final = 256
"""The size of the cache of checked sampling values. Clients use few different values."""

_decode_generate: Final = msgspec.msgpack.Decoder(GenerateArgs).decode
_decode_score: Final = msgspec.msgpack.Decoder(ScoreArgs).decode
_decode_next_token: Final = msgspec.msgpack.Decoder(NextTokenArgs).decode
_decode_sampling: Final = msgspec.msgpack.Decoder(SentSampling).decode


class Admission:
    """Checks the requests of remote clients, which are not trusted, and turns them into calls.

    Args:
        relay: sends the answers to the clients.
        driver: the driver of the pool, to which the calls are submitted.
        requests: ``Client.requests`` of the client that owns the pool. It has the engine's limits,
            the current versions and the adapters.
        operations: the operations on the pool by name.
        ask: ``ask(peer, request, operation)`` runs an operation for a client.
    """

    def __init__(
        self,
        relay: Relay,
        driver: Driver,
        requests: EngineRequests,
        operations: Mapping[str, Operation],
        ask: Callable[[Peer, Request, Operation], None],
    ) -> None:
        info = requests.info
        self._relay = relay
        self._driver = driver
        self._operations = operations
        self._ask = ask
        self._requests = requests
        self._vocab_size: int = info.vocab_size
        self._max_prompt: int = info.max_prompt_tokens
        self._max_total: int = info.max_total_tokens
        self._limits = SamplingCache.of(info)
        self._max_top = max_top_logprobs(info.vocab_size)
        self._max_body = driver.max_message_bytes - ENVELOPE_BYTES
        self._samplings: dict[bytes, tuple[int, msgspec.Raw]] = {}
        """The results of ``_check_sampling``, by the bytes that a client sent."""

    def begin(self, peer: Peer, requests: Sequence[Request]) -> bool:
        """Start the requests of a client, except requests whose id is still in use.

        Returns:
            False if the id of a request is still in use.
        """
        taken = True
        for request in requests:
            id_ = request[0]
            if id_ in peer.calls or id_ in peer.tasks:
                taken = False
                continue
            try:
                spec = self._operations.get(request[1])
                if spec is not None:
                    self._ask(peer, request, spec)
                else:
                    call = self._call(peer, request)
                    try:
                        self._driver.submit(call)
                    except SglrlError:
                        call.reply.let_go()
                        raise
                    peer.calls[id_] = call
            except SglrlError as error:
                self._relay.fail(peer, id_, error)
        return taken

    def _call(self, peer: Peer, request: Request) -> Call:
        """Return the call for a request.

        Raises:
            InvalidRequest: the request is wrong. A correct client never sends such a request.
            DeadlineExceeded: the deadline has passed.
        """
        fields: tuple[int, str, Any, float | None, int, int | None, str | None, int] = request
        id_, endpoint, raw, timeout, priority, worker, session, number = fields
        deadline: float | None = None
        if timeout is not None:
            if not timeout > 0:
                raise DeadlineExceeded("the deadline had passed before the call was here")
            deadline = now() + timeout if math.isfinite(timeout) else None
        generate = endpoint == "generate"
        forward = ForwardingReply(self._relay, peer, id_, generate)
        args: GenerateArgs | ScoreArgs | NextTokenArgs
        answer = 0
        try:
            if generate:
                args, ids = self._generate(raw, forward)
            elif endpoint == "score":
                args, ids, answer = self._score(raw)
            elif endpoint == "next_token_logprobs":
                args, ids, answer = self._next_token(raw)
            else:
                raise UnknownEndpoint(f"the engine has no endpoint {endpoint!r}")
        except MALFORMED as error:
            raise InvalidRequest(f"{endpoint}: {error}") from None
        self._check_ids(ids, self._max_total if endpoint == "score" else self._max_prompt)
        if len(raw) > self._max_body:
            raise InvalidRequest("the request does not fit one message to a worker")
        if session is not None and len(session) > _LONGEST_NAME:
            raise InvalidRequest(f"a session's name has at most {_LONGEST_NAME} characters")
        if args.lora:
            self._requests.lora(args.lora)
        version = self._requests.version(args.lora)
        if number < 0 or session is not None:
            route = Route(ids, version, session)
        else:
            # The number may be of an unrelated conversation. This is not checked, because a wrong
            # number only costs a miss in a prefix cache.
            forward.conversation = route = peer.conversation(number)
            route.extend(ids, version)
        call = Call(
            endpoint,
            args,
            forward,
            deadline=deadline,
            priority=priority,
            pinned=worker,
            route=route,
            idempotent=True,
            resumable=generate,
            client=peer.state,
        )
        call.answer_bytes = answer
        call.extra_bytes = len(raw) - len(ids)
        return call

    def _check_ids(self, ids: bytes, most: int) -> None:
        """Check the token ids of a prompt, which has at most ``most`` tokens."""
        size = len(ids)
        if not size or size % 4:
            raise InvalidRequest("token ids are int32, at least one")
        if not in_range(ids, self._vocab_size):
            raise InvalidRequest("token ids are outside the vocabulary")
        if size // 4 > most:
            raise InvalidRequest(f"the prompt has {size // 4} tokens, which is too many")

    def _generate(self, raw: Any, forward: ForwardingReply) -> tuple[GenerateArgs, bytes]:
        wanted = _decode_generate(raw)
        ids: bytes = wanted.input_ids
        begun = wanted.resume
        if begun:
            if not in_range(begun, self._vocab_size):
                raise InvalidRequest("token ids are outside the vocabulary, or no int32")
            forward.begun = [TokenChunk(begun, routed=wanted.resume_rows)]
        received = bytes(wanted.sampling)
        new, sampling = self._samplings.get(received) or self._check_sampling(received)
        if not 1 <= new <= self._max_total - len(ids) // 4:
            raise InvalidRequest(
                f"max_new_tokens={new} does not fit a prompt of {len(ids) // 4} tokens"
            )
        _check_top(wanted.top_logprobs, self._max_top)
        check_begin(wanted)
        args = GenerateArgs(
            ids,
            sampling,
            wanted.logprobs,
            wanted.top_logprobs,
            wanted.stream,
            wanted.priority,
            begun,
            wanted.lora,
            wanted.routed_from,
            wanted.resume_rows,
        )
        return args, ids

    def _score(self, raw: Any) -> tuple[ScoreArgs, bytes, int]:
        """Return the arguments, the token ids and the size of the answer in bytes."""
        wanted = _decode_score(raw)
        ids: bytes = wanted.input_ids
        count = len(ids) // 4
        if not 0 <= wanted.start < count:
            raise InvalidRequest(f"start={wanted.start} is beyond the tokens given")
        check_number("temperature", wanted.temperature, 0.0, math.inf, open_low=True)
        _check_top(wanted.top_logprobs, self._max_top)
        return wanted, ids, (count - wanted.start) * (4 + 8 * wanted.top_logprobs)

    def _next_token(self, raw: Any) -> tuple[NextTokenArgs, bytes, int]:
        wanted = _decode_next_token(raw)
        ids: bytes = wanted.input_ids
        _check_top(wanted.top_k, self._vocab_size)
        return wanted, ids, 8 * wanted.top_k if wanted.top_k else 4 * self._vocab_size

    def _check_sampling(self, raw: bytes) -> tuple[int, msgspec.Raw]:
        """Return ``max_new_tokens`` and the encoded sampling parameters for the engine.

        The values are decoded, checked and encoded again, so that engines never receive bytes that
        a client has encoded.

        Args:
            raw: the sampling parameters as encoded by the client.
        """
        params = _decode_sampling(raw)
        checked = self._limits.check(params)
        made = params.max_new_tokens, checked.wire(params.max_new_tokens, params.seed)
        if len(self._samplings) >= _KNOWN_SAMPLINGS:
            self._samplings.clear()
        if len(raw) < 1024:
            self._samplings[raw] = made
        return made


def _check_top(count: int, most: int) -> None:
    if not 0 <= count <= most:
        raise InvalidRequest(f"{count} likeliest tokens are too many, or too few")


def arguments(spec: Operation, request: Request) -> dict[str, Any]:
    """Return the arguments of a request by name.

    Raises:
        InvalidRequest: the arguments do not match the endpoint.
    """
    try:
        return spec.arguments.decode(request.args, ())
    except msgspec.ValidationError as error:
        raise InvalidRequest(f"{spec.name}(): {error}") from None
