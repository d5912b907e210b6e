"""Sample the turns of one session, one at a time, each with its own seed."""

from __future__ import annotations

import asyncio

from ..actors.actor import deadline_from
from ..core.calls import Call
from ..core.policy_versions import MODEL
from ..core.prefixes import Route
from ..core.seeds import MAX_SEED, derived_seed
from ..errors import Closed, ContextFull, UsageError
from ..inference.completion import Completion
from ..inference.number_checks import check_integer
from ..inference.options import CallOptions
from ..inference.replies import OnChunk
from ..inference.sampling import DEFAULT_MAX_NEW_TOKENS
from ..inference.sampling_cache import Prepared
from .gate import Gate, TimeLimit
from .session_spec import SessionSpec
from .shared import Shared


class TurnSampler:
    """Samples the turns of a session on the engines, and can end a running turn early.

    Args:
        gate: the gate at which turns wait while a run is paused, or None.

    Attributes:
        limit: the time limit of the whole session. Time spent waiting at the gate does not count.
        closed: whether the session is closed. No turn begins afterwards.
        call: the call of the turn that is being sampled, or None.
        continues: whether a turn that an engine returns unfinished (finish reason "abort") is sent
            again and sampled to its end.
    """

    def __init__(self, spec: SessionSpec, shared: Shared, gate: Gate | None) -> None:
        self._spec = spec
        self._shared = shared
        self._gate = gate
        self.limit: TimeLimit | None = None
        self.closed = False
        self._route = Route(b"")
        self._at_gate: asyncio.Future[None] | None = None
        self.call: Call | None = None
        self.continues = True

    @property
    def busy(self) -> bool:
        """Whether a turn is being sampled."""
        return self in self._shared.running

    @property
    def has_closed(self) -> bool:
        return self.closed or self._shared.closed

    def end_turn(self) -> None:
        """End the turn that is being sampled: it raises ``Closed``."""
        if self._at_gate is not None and not self._at_gate.done():
            self._at_gate.set_result(None)
        if self.call is not None:
            future = self.call.reply.future
            if not future.done():
                self._spec.requests.driver.cancel(self.call)
                future.set_exception(Closed("the session was closed"))

    async def begin(self) -> None:
        """Wait at the gate, and begin a turn. ``end`` must be called when the turn ends.

        Raises:
            Closed: the session is closed.
            UsageError: a turn is being sampled.
        """
        if self.has_closed:
            raise Closed("the session is closed")
        if self.busy:
            raise UsageError("a turn of this session is being sampled; await it first")
        shared, gate = self._shared, self._gate
        shared.running[self] = None
        if gate is not None:
            if gate.opening is not None:
                try:
                    await self._enter(gate)
                except BaseException:
                    del shared.running[self]
                    raise
            gate.inside += 1
        shared.enter()

    def end(self) -> None:
        """End a turn that has begun."""
        del self._shared.running[self]
        self.call = None
        self._shared.leave()
        if self._gate is not None:
            self._gate.leave()

    async def _enter(self, gate: Gate) -> None:
        self._at_gate = asyncio.get_running_loop().create_future()
        try:
            await gate.wait(self.limit, self._at_gate)
            if self.has_closed:
                raise Closed("the session was closed")
        finally:
            self._at_gate = None

    async def sample(
        self,
        ids: bytes,
        prepared: Prepared,
        top_logprobs: int,
        on_chunk: OnChunk | None,
        routed_from: int,
    ) -> Completion:
        """Sample a turn after the prompt ``ids``.

        Args:
            routed_from: the first position without routed experts in earlier turns.

        Raises:
            ContextFull: the context is full.
            Closed: the session was closed.
        """
        spec, running = self._spec, self._shared.running
        size = len(ids) // 4
        limit = min(prepared.max_new_tokens or DEFAULT_MAX_NEW_TOKENS, spec.max_tokens - size)
        if limit < 1:
            raise ContextFull(
                f"the context is full: the prompt has {size} tokens, with what was observed, and "
                f"together with its response at most {spec.max_tokens} are possible; see "
                "Session.room and Session.unobserve"
            )
        own, lora = spec.options, spec.options.lora or ""
        timeout = spec.requests.timeout if own.timeout is None else own.timeout
        deadline = None if timeout is None else deadline_from(timeout)
        options = CallOptions(True, top_logprobs, None, deadline, own.priority, None, lora)
        completion = None
        while completion is None or completion.chunks[-1].finish == "abort":
            if self.has_closed:
                raise Closed("the session was closed")
            if completion is None or not len(completion.output_ids):
                # The turn has no token yet. No token will come from versions older than these.
                running[self] = spec.requests.versions(lora)
            if not ids.startswith(self._route.tokens):
                self._route = Route(b"")
            self._route.extend(ids, spec.requests.version(lora))
            call, future = spec.requests.sample(
                ids,
                prepared,
                limit,
                options,
                self._route,
                completion,
                self._shared.telling(on_chunk),
                routed_from,
            )
            self.call = call
            try:
                completion = await future
            except BaseException:
                spec.requests.driver.cancel(call)
                raise
            if not self.continues:
                break
        first = next((chunk for chunk in completion.chunks if chunk.ids), None)
        if first is not None:
            version = {lora: first.lora_version} if lora else {}
            self._shared.sampled({MODEL: first.version, **version})
        elif (bound := running[self]) is not None:
            self._shared.sampled(bound)
        return completion


class TurnSeeds:
    """Derives a seed for each turn, so that sessions with the same seed sample different texts.

    Args:
        path: numbers or texts that identify this session among the sessions with the same seed.
    """

    def __init__(self, path: tuple[int | str, ...]) -> None:
        self.path = path
        self._turns = 0
        """The number of turns that were sampled with the seeds of this path."""
        self._forks = 0

    def of_turn(self, seed: int) -> int:
        """Derive the seed of the next turn from the user's seed.

        Raises:
            InvalidRequest: the user's seed is not an integer in ``0..MAX_SEED``.
        """
        check_integer("seed", seed, 0, MAX_SEED)
        return derived_seed(seed, *self.path, self._turns)

    def turn_ended(self) -> None:
        """Count a turn, so that the next turn gets another seed, also after ``go_back``."""
        self._turns += 1

    def select(self, *path: int | str) -> None:
        """Derive the seeds of all later turns from this path."""
        self.path, self._turns = path, 0

    def fork(self) -> tuple[int | str, ...]:
        """Return the path for a new fork. It differs from the paths of all other forks."""
        self._forks += 1
        return (*self.path, self._forks)
