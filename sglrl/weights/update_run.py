"""One running update: it executes the effects of the state machine in ``core.weight_update``.

The run sends messages, waits for answers and measures the phases. The state machine decides the
next step.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from ..core.weight_update import (
    ABORT,
    COMMIT,
    DONE,
    JOIN,
    PREPARE,
    SENDER,
    STAGE,
    Ask,
    Effect,
    Ended,
    Expel,
    Limits,
    Member,
    WeightUpdate,
)
from ..errors import (
    Closed,
    InvalidWeights,
    ProtocolError,
    SglrlError,
    WeightUpdateError,
    WorkerLost,
)
from ..wire.weights import (
    Abort,
    Commit,
    Committed,
    Join,
    Prepare,
    Prepared,
    RankAnswer,
    SentStage,
    Stage,
    ToRank,
)
from .questions import body_of, error_of
from .ranks import Rank, Ranks
from .sender_group import SenderGroup
from .update_report import PhaseTimes, UpdateReport
from .update_request import Source, UpdateRequest

logger = logging.getLogger("sglrl.weights")

ABORT_SECONDS = 5.0
MIN_COMMIT_SECONDS = 1.0
"""The minimum time limit of the commit, even if the update's timeout is shorter.

If a rank is late in the commit, its worker is killed. If a rank is late in an earlier phase, the
run gives up the update.
"""

_prepared = msgspec.msgpack.Decoder(Prepared)
_sent = msgspec.msgpack.Decoder(SentStage)
_committed = msgspec.msgpack.Decoder(Committed)
_dirty = msgspec.msgpack.Decoder(bool)


class UpdateRun:
    """One running update.

    Args:
        version: the version of the workers after the update.
        source: the sender of the tensors. None if the workers read files.
        ranks: every rank of every worker that takes part.
        pool: all ranks of the pool. It sends messages to ranks, and kills workers.
        group: the current group. The run forms another group if necessary.
        join_only: whether to only form the group.

    Attributes:
        id: the id of the messages of the current attempt. Each attempt has another id, so a late
            answer to an earlier attempt is not mistaken for an answer to the current attempt.
        machine: the state machine, which decides the next step.
    """

    def __init__(
        self,
        request: UpdateRequest,
        version: int,
        source: Source | None,
        ranks: Sequence[Rank],
        *,
        pool: Ranks,
        group: SenderGroup,
        join_only: bool = False,
    ) -> None:
        self.id = pool.new_id()
        self.request = request
        self.version = version
        self.source = source
        self.machine = WeightUpdate(
            [rank.member for rank in ranks],
            joined=source is not None and group.consists_of(source, ranks),
            sender=source is not None,
            limits=Limits(
                request.timeout,
                max(request.timeout, MIN_COMMIT_SECONDS),
                ABORT_SECONDS,
                prepare=request.drain_timeout if request.inflight == "drain" else None,
            ),
            now=time.monotonic(),
            join_only=join_only,
        )
        self._ranks = {rank.member: rank for rank in ranks}
        self._group = group
        self._pool = pool
        self._phase = ""
        self._times = PhaseTimes(request.begun)
        self._joins: dict[Member, Join] = {}
        """The ``Join`` message of each member, if this run forms a group."""
        self._bodies: dict[tuple[Member, str], Any] = {}
        """The decoded answers, by member and phase."""
        self._unanswered: set[tuple[int, str, Member]] = set()
        """The id, phase and member of each request without an answer."""
        self._ended: asyncio.Future[Ended] = asyncio.get_running_loop().create_future()
        self._timer: asyncio.TimerHandle | None = None

    @property
    def left(self) -> list[Rank]:
        """The processes that still take part."""
        return [self._ranks[member] for member in self.machine.members]

    @property
    def is_done(self) -> bool:
        """True if the workers have new weights."""
        return self.machine.state == DONE and not self.machine.join_only

    # --- from beginning to end --------------------------------------------------------------------

    async def until_ended(self) -> SglrlError | None:
        """Run the update until it has ended, and return its error, if any.

        If the caller is cancelled, the update is first given up, or finished if it is too late to
        give up. Then ``CancelledError`` is raised.
        """
        cancelled: asyncio.CancelledError | None = None
        try:
            self._execute()
            while not self._ended.done():
                try:
                    await asyncio.shield(self._ended)
                except asyncio.CancelledError as error:
                    cancelled = error
                    if not self._overwrites:
                        self.machine.cancel(time.monotonic())
                        self._execute()
            ended = self._ended.result()
        finally:
            self._cancel_timer()
        self._update_group()
        if cancelled is not None:
            raise cancelled
        return self._error(ended)

    def close(self) -> None:
        """Give up the update, because the client is closed."""
        self.machine.cancel(time.monotonic())
        if not self._ended.done():
            self._ended.set_exception(Closed("the client was closed"))
            # Avoid asyncio's warning when no task awaits the future.
            self._ended.exception()
        self._cancel_timer()

    def report(self) -> UpdateReport:
        """Return the report of an update that has just finished."""
        machine = self.machine
        modes = {self._mode(member) for member in machine.members}
        sent = self._bodies[SENDER, STAGE] if self.source is not None else SentStage(0.0, 0.0)
        return UpdateReport(
            version=self.version,
            bytes=self.request.total,
            workers=sorted(machine.workers),
            mode="disk" if self.request.folder else "bucketed" if "bucketed" in modes else "full",
            gather_ms=sent.gather_ms,
            broadcast_ms=sent.broadcast_ms,
            pause_ms=[
                max(self._bodies[m, COMMIT].pause_ms for m in machine.members if m[0] == worker)
                for worker in sorted(machine.workers)
            ],
            attempts=machine.attempts,
            lora="",
            ended=time.time(),
            **self._times.ended(),
        )

    @property
    def _overwrites(self) -> bool:
        """True if a worker may have overwritten some of its live weights.

        This happens on a worker without room for a second copy. If such a worker does not receive
        the remaining weights, it must be killed.
        """
        return self._phase == STAGE and any(
            self._bodies[member, PREPARE].mode == "bucketed" for member in self.machine.members
        )

    def _error(self, ended: Ended) -> SglrlError | None:
        """Return the error for the caller, or None if the update is done."""
        if ended.state == DONE:
            return None
        refusals = [error for _, error in ended.errors]
        if ended.why == "refused":
            return refusals[0]
        if ended.why == "broken":
            # The sender finds ``InvalidWeights`` when it reads the values. The other errors are
            # consequences of this error.
            for error in refusals:
                if isinstance(error, InvalidWeights):
                    return error
        text = "; ".join(dict.fromkeys(str(e) for e in refusals)) or ended.why
        if not self.machine.members:
            return WorkerLost("no worker is left to update" + (f": {text}" if refusals else ""))
        return WeightUpdateError(f"the weight update was given up: {text}")

    def _update_group(self) -> None:
        """Record the group that exists after this run."""
        if self.source is None:
            return
        if self.machine.joined:
            self._group.formed(self.source, self.left)
        elif self._joins:
            self._group.dissolve()
        else:
            self._group.forget(self.source)

    # --- events -----------------------------------------------------------------------------------

    def rank_answered(self, rank: Rank, answer: RankAnswer) -> bool:
        """Handle an answer of a rank. Return False if the answer was not requested."""
        return self._ranks.get(rank.member) is rank and self._answered(rank.member, answer)

    def sender_answered(self, source: Source, answer: RankAnswer) -> bool:
        """Handle an answer of a sender. Return False if the answer was not requested."""
        return self.source is source and self._answered(SENDER, answer)

    def lost(self, worker: int, ranks: Iterable[Rank]) -> None:
        """Handle the loss of a worker, which had these ranks."""
        if any(self._ranks.get(rank.member) is rank for rank in ranks):
            self.machine.lost(worker, time.monotonic())
            self._execute()

    def sender_lost(self, source: Source) -> None:
        """Handle the loss of a sender."""
        if self.source is source:
            self.machine.lost_sender(WeightUpdateError("the sender is gone"), time.monotonic())
            self._execute()

    def _on_timer(self) -> None:
        self.machine.tick(time.monotonic())
        self._execute()

    def _answered(self, member: Member, answer: RankAnswer) -> bool:
        machine, phase = self.machine, answer.phase
        if (answer.id, phase, member) not in self._unanswered:
            return False
        self._unanswered.discard((answer.id, phase, member))
        if answer.id != self.id or phase != machine.state or member not in machine.waiting:
            # The phase has already failed, for example because two ranks reject the same tensor.
            machine.late_answers += 1
            return True
        dirty = False
        error = None if answer.error is None else error_of(answer.error, member)
        if error is None:
            try:
                dirty = self._read(member, answer)
            except ProtocolError as malformed:
                error = malformed
        machine.answered(member, phase, error, time.monotonic(), dirty)
        self._execute()
        return True

    def _read(self, member: Member, answer: RankAnswer) -> bool:
        """Decode and store the content of an answer.

        Returns:
            True if the rank has aborted while only some of its live weights were new.

        Raises:
            ProtocolError: the answer is malformed.
        """
        phase = answer.phase
        if phase == PREPARE:
            self._bodies[member, phase] = body_of(_prepared, answer)
            self._ranks[member].manifest = (self.request.specs, self.id)
        elif phase == STAGE and member == SENDER:
            self._bodies[member, phase] = body_of(_sent, answer)
        elif phase == COMMIT:
            self._bodies[member, phase] = body_of(_committed, answer)
        elif phase == ABORT and member != SENDER:
            return body_of(_dirty, answer)
        return False

    # --- effects ----------------------------------------------------------------------------------

    def _execute(self) -> None:
        machine = self.machine
        # An effect may add further effects.
        while machine.outbox:
            effects, machine.outbox = machine.outbox, []
            for effect in effects:
                try:
                    self._do(effect)
                except Exception as error:
                    # The other effects and the timer must still run.
                    logger.exception("a weight update")
                    if isinstance(effect, Ask):
                        failed = WeightUpdateError(f"{effect.phase} could not be asked: {error!r}")
                        machine.answered(effect.member, effect.phase, failed, time.monotonic())
        if not machine.ended:
            self._cancel_timer()
            wait = max(0.0, machine.deadline - time.monotonic())
            self._timer = asyncio.get_running_loop().call_later(wait, self._on_timer)

    def _do(self, effect: Effect) -> None:
        match effect:
            case Ask(phase=phase, member=member):
                self._ask(phase, member)
            case Expel(worker=worker, reason=reason):
                self._pool.expel(worker, reason)
            case Ended():
                if not self._ended.done():
                    self._ended.set_result(effect)

    def _ask(self, phase: str, member: Member) -> None:
        if phase != self._phase:
            self._enter(phase)
        message = self._message(phase, member)
        self._unanswered.add((self.id, phase, member))
        if member != SENDER:
            self._pool.send(self._ranks[member], message)
        elif self.source is not None:
            self.source.ask(message)

    def _enter(self, phase: str) -> None:
        if self._phase == ABORT:
            # The attempt was aborted, so this phase belongs to a new attempt.
            self.id = self._pool.new_id()
        self._phase = phase
        self._times.enter(phase)
        if phase == JOIN:
            assert self.source is not None
            ranks = {member: self._ranks[member] for member in self.machine.members}
            self._joins = self._group.joins(self.id, self.source, ranks, self.request.timeout)

    def _message(self, phase: str, member: Member) -> ToRank:
        if phase == JOIN:
            return self._joins[member]
        if phase == PREPARE:
            return self._prepare(self._ranks[member])
        if phase == STAGE:
            return Stage(self.id, self._mode(member))
        if phase == COMMIT:
            return Commit(self.id)
        assert phase == ABORT
        return Abort(self.id, self.machine.leave)

    def _prepare(self, rank: Rank) -> Prepare:
        request = self.request
        (specs, like), rank.manifest = rank.manifest, (None, 0)
        if specs is not request.specs:
            like = 0
        return Prepare(
            self.id,
            self.version,
            [] if like else list(request.specs),
            request.bucket_bytes or 0,
            request.mode,
            request.inflight,
            request.partial,
            request.folder,
            like,
            request.check_finite,
        )

    def _mode(self, member: Member) -> str:
        """Return the mode of one member: "full" or "bucketed".

        If a rank has reported "bucketed", all ranks of its worker are "bucketed", and the sender
        is too.
        """
        modes = {
            self._bodies[rank, PREPARE].mode
            for rank in self.machine.members
            if member == SENDER or rank[0] == member[0]
        }
        return "bucketed" if "bucketed" in modes else "full"

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
