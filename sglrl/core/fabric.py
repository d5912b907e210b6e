"""The whole state of the driver: calls, members, queue, deadlines.

Methods mutate the state and append effects to ``outbox``. They never block, wait, or call back.

Invariants (checked by ``invariants.validate``, which the tests run after every step):

* Every submitted call ends exactly once, with one ``End`` effect.
* A member never holds more calls than its window. Urgent calls are exempt.
* A call waits in the queue only while no member that may take it has room, or while its client has
  too many unread bytes.
* The sum of all loads equals the number of calls that are SENT, RUNNING or CANCELLING.

``call_queue.py`` defines the order in which calls leave the queue, and the limits of the queue.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from ..config import FabricConfig
from ..errors import Closed, DeadlineExceeded, SglrlError, UsageError, WorkerLost
from ..wire.calls import Item, ItemKind
from .call_queue import CallQueue
from .calls import CANCELLING, ENDED, QUEUED, RUNNING, SENT, Call, Deadlines
from .clients import ClientState
from .effects import Chunk, Drained, Effect, End, Restart, Send, SendCancel, Waiting
from .holds import Holds
from .members import AWAY, DRAINING, GONE, LOST, READY, RETIRED, SYNCING, LoadIndex, Member
from .routing import Router

if TYPE_CHECKING:
    from collections.abc import Sequence


_CHUNK = 0


class Fabric:
    """The state of one pool: see the module's docstring. Only one thread may use it."""

    def __init__(self, config: FabricConfig | None = None) -> None:
        self.config = config or FabricConfig()
        self.members: dict[int, Member] = {}
        self.calls: dict[int, Call] = {}
        self.loads = LoadIndex()
        self.router = Router(self.config, self.loads)
        self.outbox: list[Effect] = []
        self.stray_items = 0
        self.moved: Counter[int] = Counter()
        """By worker: the number of its calls that were queued again when it was lost or away."""
        self.closed = False
        self._why_closed = ""
        self.refusing = False
        """Whether the pool accepts no new calls. Calls submitted earlier run to their end."""
        self.last_loss = ""
        """The reason for which the last worker was lost; "" while a worker is left."""
        self._next_id = 0
        self.queue = CallQueue(self.config, self.router, self.members)
        self._woken = False
        """Whether a client was unblocked since the last ``_pump``. Its calls may wait although
        members have room."""
        self._deadlines = Deadlines(self.calls)
        self.holds = Holds()

    # --- members ----------------------------------------------------------------------------------

    def add_member(self, index: int) -> Member:
        """Add a new worker, or the replacement of a lost worker."""
        before = self.members.get(index)
        if before is not None and before.state is not LOST:
            raise SglrlError(f"worker {index} is already a member")
        member = self.members[index] = Member(index)
        if before is not None:
            member.pinned = before.pinned
        return member

    def member_arrived(self, index: int, window: int) -> None:
        """Record that the worker sent ``Ready`` and needs the current weights before it serves.

        The worker is new, or it was away.
        """
        self._move_up(index, SYNCING, window)

    def member_ready(self, index: int, window: int, now: float) -> None:
        """Send calls to the worker from now on, at most ``window`` at a time."""
        member = self._move_up(index, READY, window)
        self.loads.join(member)
        self.router.join(member)
        self._pump(now, member)

    def drain_member(self, index: int, now: float) -> None:
        """Send this worker no new calls. After its last held call, ``Drained`` follows."""
        member = self.members[index]
        member.move(DRAINING)
        self._withdraw(member)
        self._fail_pinned(member, "draining")
        if not member.load:
            self.outbox.append(Drained(member))

    def member_lost(self, index: int, reason: str, now: float, *, returns: bool = False) -> None:
        """Remove a lost worker and requeue or end its calls.

        Idempotent calls are queued again, except bound calls and begun streams that are not
        resumable. All other calls end with ``WorkerLost``. A queued call keeps its place ahead of
        younger calls of its client. A call that loses ``max_attempts`` workers without a chunk in
        between also ends with ``WorkerLost``, because the call may be the cause.

        Args:
            returns: whether a replacement is expected. If so, idempotent calls that are pinned to
                the worker wait for the replacement. If no replacement follows after all, call
                ``member_retired``.
        """
        member = self.members[index]
        if member.state in GONE:
            return
        self._leave(member, LOST if returns else RETIRED, reason)
        self._fail_pinned(member, f"lost ({reason})", keep_idempotent=returns)
        self._pump(now)
        self._end_if_alone(reason)

    def member_away(self, index: int, reason: str, now: float) -> None:
        """Record that the connection to a worker is broken. The worker may return.

        The calls that the worker holds are requeued or ended, as after its loss. A call may be
        requeued in this way any number of times, because calls do not break connections. Waiting
        calls that are pinned to the worker wait for its return.
        """
        self._leave(self.members[index], AWAY, reason)
        self._pump(now)

    def _leave(self, member: Member, state: str, reason: str) -> None:
        """Move a member to a state in which it holds no calls, and requeue or end its calls."""
        if member.state is READY:
            self._withdraw(member)
        member.move(state)
        held = list(member.calls.values())
        member.calls.clear()
        member.load = 0
        for call in held:
            if call.answer_bytes:
                self._subtract_unread(call.client, call.answer_bytes)
            if call.state == CANCELLING:
                call.move(ENDED)
                continue
            losses = call.losses + 1
            if state is not AWAY:
                call.losses = losses
            begun = call.stream and call.state == RUNNING and not call.resumable
            # A bound call needs the state in its process. A replacement does not have this state.
            stays = call.bound_to is None or state is AWAY
            if call.idempotent and stays and not begun and call.losses < self.config.max_attempts:
                call.move(QUEUED)
                call.worker = None
                if not call.resumable:
                    call.first_at = 0.0
                self.moved[member.index] += 1
                self.outbox.append(Restart(call))
                self.queue.push(call, limited=False)
            else:
                why = "it had already streamed" if begun else f"loss {losses}"
                error = WorkerLost(
                    f"worker {member.index} was lost ({reason}) while it held this call "
                    f"({call.endpoint}, {why})",
                    worker=member.index,
                    state_lost=call.bound_to is not None,
                )
                del self.calls[call.id]
                call.move(ENDED)
                self.outbox.append(End(call, error))

    def member_retired(self, index: int, reason: str) -> None:
        """Record that the lost worker gets no replacement, and end the calls pinned to it."""
        member = self.members[index]
        if member.state is LOST:
            member.move(RETIRED)
            self._fail_pinned(member, f"lost ({reason})")
            self._end_if_alone(reason)

    # --- calls ------------------------------------------------------------------------------------

    def check_open(self, *, urgent: bool = False) -> None:
        """Raise ``Closed`` if the pool accepts no more calls.

        Urgent calls are accepted until the pool is closed, because running calls may wait for them.
        """
        if self.closed or (self.refusing and not urgent):
            raise Closed(self._why_closed if self.closed else "the pool is being closed")

    def submit(self, call: Call, now: float) -> None:
        """Accept the call. Send it to a worker if one has room; otherwise queue it.

        Raises:
            Closed: the pool is closed or about to close.
            Overloaded: ``max_queue`` calls already wait, ``max_calls_per_client`` calls of this
                client already wait, or the queue would exceed ``max_queue_bytes`` with this call.
            WorkerLost: no worker is left, or the worker to which the call is pinned is gone.
            UsageError: the call is pinned to a worker that never existed.
        """
        if self.closed or self.refusing:
            self.check_open(urgent=call.urgent)
        self._next_id = id_ = self._next_id + 1
        call.id = id_
        call.submitted_at = now
        member: Member | None = None
        if call.pinned is not None:
            member = self._pinned_member(call)
        elif call.client is None or not call.client.blocked:
            member = self.router.choose(call)
        if member is None:
            lost = not self.loads.members and self.members and not self.alive
            if lost and call.pinned is None:
                raise WorkerLost(f"no worker is left in this pool: {self.last_loss}")
            self.queue.push(call, limited=not call.urgent)
            self.calls[id_] = call
        else:
            self.calls[id_] = call
            self._dispatch(call, member, now)
        if call.deadline is not None:
            self._deadlines.add(id_, call.deadline)
        if self.holds.reasons:
            self.holds.waiting(now)

    def cancel(self, call: Call, now: float) -> None:
        """Cancel the call for its caller. No ``End`` follows. Ignore a call that has ended."""
        if self.calls.get(call.id) is call:
            self._end(call, None)

    def read_by_client(self, client: ClientState, size: int, now: float) -> None:
        """Subtract ``size`` bytes, which the client has read, from its unread bytes.

        Dispatch the calls that waited because the client had too many unread bytes.
        """
        self._subtract_unread(client, size)
        if self._woken:
            self._pump(now)

    def results(self, member: Member, items: Sequence[Item], now: float) -> None:
        """Process items from a worker.

        An item of a call that the worker does not hold is only counted, in ``stray_items``.
        """
        held = member.calls
        outbox = self.outbox
        calls = self.calls
        ended = 0
        for item in items:
            call = held.get(item.id)
            if call is None:
                self.stray_items += 1
            elif item.kind == _CHUNK:
                state = call.state
                if state == SENT:
                    call.move(RUNNING)
                    call.first_at = call.first_at or now
                    if call.resumable:
                        call.losses = 0
                elif state == CANCELLING:
                    continue
                outbox.append(Chunk(call, item))
            else:
                del held[item.id]
                if call.answer_bytes:
                    # These bytes count only while a worker computes the answer.
                    self._subtract_unread(call.client, call.answer_bytes)
                if call.state != CANCELLING:
                    del calls[item.id]
                    outbox.append(End(call, item))
                # This change is legal from each of the three states of a held call.
                call.state = ENDED
                ended += 1
        if ended:
            member.served += ended
            if member.state is READY:
                self.loads.release(member, ended)
            else:
                member.load -= ended
                if member.state is DRAINING and not member.load:
                    outbox.append(Drained(member))
            if self.queue.waiting:
                self._pump(now, member)

    def next_deadline(self) -> float | None:
        """Return the time at which ``tick`` must run next, or None if nothing has a time limit."""
        deadline, due = self._deadlines.next(), self.holds.due
        return deadline if due is None else due if deadline is None else min(deadline, due)

    def tick(self, now: float) -> None:
        """End each call with ``DeadlineExceeded`` if its deadline has passed.

        If calls have waited for some seconds, also report the reasons in ``holds``.
        """
        if reason := self.holds.report(self.calls.values(), now):
            self.outbox.append(Waiting(reason))
        while (call := self._deadlines.pop(now)) is not None:
            waited = now - call.submitted_at
            where = self.queue.describe(call) if call.state == QUEUED else "at a worker"
            why = "" if call.urgent or not self.holds.reasons else f": {self.holds}"
            error = DeadlineExceeded(
                f"{call.endpoint} did not finish within its deadline "
                f"({waited:.3f} s since it was submitted, last {where}){why}"
            )
            self._end(call, error)

    def close(self, reason: str = "the pool was closed") -> None:
        """End every call with ``Closed``. Accept no more calls."""
        self.closed = True
        self._why_closed = reason
        for call in list(self.calls.values()):
            self._end(call, Closed(f"{reason} before this call finished"))

    def answer_waiting(self, endpoint: str, body: bytes, worker: int | None) -> int:
        """End the queued calls for this endpoint with the answer ``body``, as a worker would.

        Args:
            worker: end only the calls that are pinned to this worker. None: end all of them.

        Returns:
            the number of ended calls.
        """
        waiting = [
            call
            for call in self.calls.values()
            if call.state == QUEUED
            and call.endpoint == endpoint
            and (worker is None or call.pinned == worker)
        ]
        for call in waiting:
            self._end(call, Item(call.id, ItemKind.DONE, body))
        return len(waiting)

    # --- inside -----------------------------------------------------------------------------------

    def _move_up(self, index: int, state: str, window: int) -> Member:
        if window < 1:
            raise SglrlError(f"worker {index} offers a window of {window}; at least 1 is needed")
        member = self.members[index]
        member.move(state)
        member.window = window
        return member

    @property
    def alive(self) -> bool:
        """Whether any worker serves or may still serve."""
        return any(m.state is not RETIRED for m in self.members.values())

    def _end_if_alone(self, reason: str) -> None:
        """End all queued calls if the last worker is retired."""
        if self.alive:
            return
        self.last_loss = reason
        for call in [c for c in self.calls.values() if c.state == QUEUED]:
            self._end(call, WorkerLost(f"no worker is left; the last one was lost: {reason}"))

    def _pinned_member(self, call: Call) -> Member | None:
        """Return the worker to which a call is pinned, or None if the call must wait for it."""
        assert call.pinned is not None
        target = self.members.get(call.pinned)
        if target is None:
            raise UsageError(f"there is no worker {call.pinned}; workers: {sorted(self.members)}")
        if call.bound_to is not None and (call.bound_to is not target or target.state in GONE):
            raise WorkerLost(
                f"the process of worker {call.pinned} was lost, and the state of its object with "
                f"it; begin again with another one ({call.endpoint})",
                worker=call.pinned,
                state_lost=True,
            )
        gone = target.state in (DRAINING, RETIRED)
        if gone or (target.state is LOST and not call.idempotent):
            raise WorkerLost(
                f"worker {call.pinned} is {target.state}",
                worker=call.pinned,
                state_lost=call.bound_to is not None,
            )
        if call.urgent and target.state is READY:
            return target
        client = call.client
        blocked = client is not None and client.blocked
        return target if target.has_room and not blocked else None

    def _dispatch(self, call: Call, member: Member, now: float) -> None:
        self.loads.reserve(member)
        if call.state != QUEUED:
            call.move(SENT)
        call.state = SENT
        call.worker = member
        call.attempts += 1
        if not call.first_at:
            call.sent_at = now
        if call.answer_bytes and call.client is not None:
            call.client.unread += call.answer_bytes
        member.calls[call.id] = call
        self.outbox.append(Send(member, call))

    def _subtract_unread(self, client: ClientState | None, size: int) -> None:
        """Subtract bytes that a client has read, or that no worker computes any more."""
        if client is not None:
            client.unread -= size
            if client.wake():
                self._woken = True

    def _end(self, call: Call, outcome: Item | SglrlError | None) -> None:
        """End a call for its caller before a worker has ended it.

        Args:
            outcome: the answer, or the error. None: the caller does not wait any more.
        """
        del self.calls[call.id]
        if call.state == QUEUED:
            call.move(ENDED)
            self.queue.remove(call)
        else:
            # Keep the reservation until the worker confirms.
            call.move(CANCELLING)
            assert isinstance(call.worker, Member)
            self.outbox.append(SendCancel(call.worker, call.id))
        if outcome is not None:
            self.outbox.append(End(call, outcome))

    def _withdraw(self, member: Member) -> None:
        self.loads.leave(member)
        self.router.leave(member)
        self.queue.withdraw(member)

    def _fail_pinned(self, member: Member, why: str, *, keep_idempotent: bool = False) -> None:
        """End the waiting calls that are pinned to this worker.

        Args:
            keep_idempotent: whether idempotent calls wait for a replacement. Bound calls and calls
                that are not idempotent never wait for a replacement, because they may depend on the
                state of the lost worker.
        """
        for call in member.pinned:
            bound = call.bound_to is not None
            if call.state == QUEUED and not (keep_idempotent and call.idempotent and not bound):
                self._end(
                    call,
                    WorkerLost(
                        f"worker {member.index} is {why} and this call was pinned to it",
                        worker=member.index,
                        state_lost=bound,
                    ),
                )
        if not keep_idempotent:
            member.pinned.clear()

    def _pump(self, now: float, member: Member | None = None) -> None:
        """Send waiting calls to members with room.

        Args:
            member: the member that gained room, if any.
        """
        for call, chosen in self.queue.assign(member):
            self._dispatch(call, chosen, now)
        if self._woken:
            # Calls of unblocked clients may wait for members that already had room.
            self._woken = False
            for other in self.members.values() if self.loads.with_room else ():
                if other.has_room:
                    for call, chosen in self.queue.assign(other):
                        self._dispatch(call, chosen, now)
