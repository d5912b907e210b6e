"""A model of ``sglrl.core.fabric`` that is as simple as possible: sets and lists, no indexes.

The model decides nothing about routing. It computes the effects that a step must have. Then it
checks every ``Send``: the call may go to that member, and no other call had to go first. For each
waiting call the model knows the member of the previous call of its session or conversation.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from sglrl.config import FabricConfig
from sglrl.core.calls import Call
from sglrl.core.effects import Chunk, Drained, End, Restart, Send, SendCancel
from sglrl.core.members import Member
from sglrl.errors import Closed, DeadlineExceeded, Overloaded, UsageError, WorkerLost
from sglrl.wire.calls import Item, ItemKind

WAITING, SENT, RUNNING, CANCELLING, ENDED = "waiting", "sent", "running", "cancelling", "ended"


@dataclass
class ModelMember:
    index: int
    state: str = "starting"
    window: int = 0
    held: set[int] = field(default_factory=set)

    @property
    def has_room(self) -> bool:
        return self.state == "ready" and len(self.held) < self.window


@dataclass(eq=False)
class ModelClient:
    """A client.

    Attributes:
        turn: the time at which a waiting call of the client was last sent, as an increasing number.
        unread: bytes that the client has not read.
    """

    turn: int
    max_unread: int
    unread: int = 0


@dataclass
class ModelCall:
    call: Call
    client: ModelClient
    state: str = WAITING
    attempts: int = 0
    losses: int = 0
    breaks: int = 0
    """Broken connections of workers that held it."""
    answers: int = 0
    cancelled: bool = False
    home: int | None = None
    """The member to which the call returns, while the call waits."""
    waited: bool = False
    passed: int = 0
    """How often another call went before this one, while this one waits."""

    @property
    def pinned(self) -> int | None:
        return self.call.pinned

    @property
    def is_bound(self) -> bool:
        return self.call.bound_to is not None

    @property
    def order(self) -> tuple[int, int, int]:
        return -self.call.priority, self.client.turn, self.call.id

    @property
    def conversation(self) -> object:
        """The conversation that the call continues, with a name or without."""
        route = self.call.route
        if route is None:
            return None
        return route.session or (route if route.sticky else None)


class Model:
    def __init__(self, config: FabricConfig, max_unread: list[int]) -> None:
        self.config = config
        self.max_attempts = config.max_attempts
        self.clients = [ModelClient(turn, most) for turn, most in enumerate(max_unread)]
        self.turns = len(max_unread)
        self.prompts: dict[object, int] = {}
        """Size of the prompt that waiting calls share, by their route."""
        self.members: dict[int, ModelMember] = {}
        self.processes: dict[Member, ModelMember] = {}
        """All processes that any worker has had. A replacement is another process."""
        self.calls: dict[int, ModelCall] = {}
        self.homes: dict[object, int] = {}
        """The member of the last call of each session or conversation."""
        self.closed = False

    def add_process(self, member: Member) -> None:
        """Add a new worker, or the replacement of a lost one."""
        self.members[member.index] = self.processes[member] = ModelMember(member.index)

    # --- facts ------------------------------------------------------------------------------------

    def alive(self) -> bool:
        return any(m.state != "retired" for m in self.members.values())

    def in_state(self, *states: str) -> list[ModelCall]:
        return [c for c in self.calls.values() if c.state in states]

    def room_for(self, pinned: int | None) -> bool:
        if pinned is not None:
            return self.members[pinned].has_room
        return any(m.has_room for m in self.members.values())

    def unread(self, client: ModelClient) -> int:
        """Return the client's unread bytes, with answers of known size that are on their way."""
        held = {id_ for member in self.members.values() for id_ in member.held}
        mine = (self.calls[id_] for id_ in held if self.calls[id_].client is client)
        return client.unread + sum(c.call.answer_bytes for c in mine)

    def blocked(self, client: ModelClient) -> bool:
        return self.unread(client) >= client.max_unread

    def may_go(self) -> list[ModelCall]:
        """Return the calls that only wait for a member with room."""
        found = self.in_state(WAITING)
        blocked = [client for client in self.clients if self.blocked(client)]
        return [c for c in found if c.client not in blocked]

    def queued_bytes(self, *more: Call) -> int:
        """Return the bytes of all waiting calls, as if ``more`` waited, too."""
        calls = [c.call for c in self.in_state(WAITING)] + list(more)
        own = sum(c.extra_bytes + len(c.args) + sum(map(len, c.frames)) for c in calls)
        return own + sum(
            self.prompts.get(route, len(route.tokens))
            for route in {c.route for c in calls if c.route is not None}
        )

    def refusal(self, call: Call, client: ModelClient) -> type[Exception] | None:
        """Return the error that ``submit`` must raise for this call now."""
        if self.closed:
            return Closed
        if call.pinned is not None:
            if call.pinned not in self.members:
                return UsageError
            state = self.members[call.pinned].state
            if state in ("draining", "retired") or (state == "lost" and not call.idempotent):
                return WorkerLost
            if call.bound_to is not None and (
                self.processes[call.bound_to] is not self.members[call.pinned] or state == "lost"
            ):
                return WorkerLost
        elif self.members and not self.alive():
            return WorkerLost
        if not self.room_for(call.pinned) or self.blocked(client):
            waiting, config = self.in_state(WAITING), self.config
            most = config.max_calls_per_client
            if (
                len(waiting) >= config.max_queue
                or (most is not None and sum(c.client is client for c in waiting) >= most)
                or self.queued_bytes(call) > config.max_queue_bytes
            ):
                return Overloaded
        return None

    def has_choice(self) -> bool:
        return sum(m.state == "ready" for m in self.members.values()) > 1

    def submitted(self, call: Call, client: ModelClient) -> None:
        waits = not self.room_for(call.pinned) or self.blocked(client)
        new = self.calls[call.id] = ModelCall(call, client)
        if waits:
            self._waits(new)

    def _waits(self, call: ModelCall) -> None:
        self.forget_prompts()
        call.state = WAITING
        call.home = None
        call.waited = True
        call.passed = 0
        route = call.call.route
        if route is not None:
            self.prompts.setdefault(route, len(route.tokens))
        if call.pinned is None and self.has_choice():
            call.home = self.homes.get(call.conversation)

    def forget_prompts(self) -> None:
        """Forget the prompts that no waiting call has."""
        routes = {c.call.route for c in self.in_state(WAITING)}
        self.prompts = {route: size for route, size in self.prompts.items() if route in routes}

    def _left(self, index: int) -> None:
        """Remove the member as home of conversations and of waiting calls."""
        self.homes = {what: home for what, home in self.homes.items() if home != index}
        for call in self.in_state(WAITING):
            if call.home == index:
                call.home = None

    # --- events: each returns the effects wanted, except SENDs -----------------------------------

    def results(self, index: int, items: list[Item]) -> tuple[list[Any], int]:
        """Return the effects, and how many of the items are strays."""
        member = self.members[index]
        wanted: list[Any] = []
        strays = 0
        for item in items:
            if item.id not in member.held:
                strays += 1
                continue
            call = self.calls[item.id]
            if item.kind == ItemKind.CHUNK:
                if call.state != CANCELLING:
                    if call.state == SENT and call.call.resumable:
                        call.losses = 0
                    call.state = RUNNING
                    wanted.append((Chunk, item.id, id(item)))
                continue
            member.held.remove(item.id)
            if call.state != CANCELLING:
                wanted.append((End, item.id, id(item)))
            call.state = ENDED
        if member.state == "draining" and not member.held and strays < len(items):
            wanted.append((Drained, index, None))
        return wanted, strays

    def abandon(self, call: ModelCall) -> list[Any]:
        """Abandon a call that was answered, or whose caller is gone.

        A worker that holds the call gets a ``SendCancel``, and keeps the call.
        """
        if call.state == WAITING:
            call.state = ENDED
            return []
        call.state = CANCELLING
        assert call.call.worker is not None
        return [(SendCancel, call.call.worker.index, call.call.id)]

    def cancel(self, call: ModelCall) -> list[Any]:
        if call.state not in (WAITING, SENT, RUNNING):
            return []
        call.cancelled = True
        return self.abandon(call)

    def tick(self, now: float) -> list[Any]:
        due = [
            c
            for c in self.in_state(WAITING, SENT, RUNNING)
            if c.call.deadline is not None and c.call.deadline <= now
        ]
        return self._end_all(due, DeadlineExceeded)

    def close(self) -> list[Any]:
        self.closed = True
        return self._end_all(self.in_state(WAITING, SENT, RUNNING), Closed)

    def drain(self, index: int) -> list[Any]:
        self.members[index].state = "draining"
        self._left(index)
        idle = [] if self.members[index].held else [(Drained, index, None)]
        stranded = [c for c in self.in_state(WAITING) if c.pinned == index]
        return idle + self._end_all(stranded, WorkerLost)

    def retire(self, index: int) -> list[Any]:
        """Retire a lost worker that gets no replacement."""
        self.members[index].state = "retired"
        stranded = [c for c in self.in_state(WAITING) if c.pinned == index or not self.alive()]
        return self._end_all(stranded, WorkerLost)

    def lose(self, index: int, returns: bool = False) -> list[Any]:
        wanted = self._leave(index, "lost" if returns else "retired")
        stranded = [
            c
            for c in self.in_state(WAITING)
            if (c.pinned == index and not (returns and c.call.idempotent and not c.is_bound))
            or not self.alive()
        ]
        return wanted + self._end_all(stranded, WorkerLost)

    def away(self, index: int) -> list[Any]:
        return self._leave(index, "away")

    def _leave(self, index: int, state: str) -> list[Any]:
        member = self.members[index]
        member.state = state
        self._left(index)
        wanted: list[Any] = []
        for id_ in member.held:
            call = self.calls[id_]
            if call.state == CANCELLING:
                call.state = ENDED
                continue
            if state == "away":
                call.breaks += 1
            else:
                call.losses += 1
            begun = call.call.stream and call.state == RUNNING and not call.call.resumable
            stays = state == "away" or not call.is_bound
            if call.call.idempotent and stays and not begun and call.losses < self.max_attempts:
                self._waits(call)
                wanted.append((Restart, id_, None))
            else:
                call.state = ENDED
                wanted.append((End, id_, WorkerLost))
        member.held.clear()
        return wanted

    def _end_all(self, calls: list[ModelCall], error: type[Exception]) -> list[Any]:
        wanted: list[Any] = []
        for call in calls:
            wanted += self.abandon(call)
            wanted.append((End, call.call.id, error))
        return wanted

    # --- checks of the effects --------------------------------------------------------------------

    def judge(self, effects: list[Any], wanted: list[Any]) -> None:
        """Compare the effects of one step with those wanted, and check each Send on its own."""
        seen: list[Any] = []
        for effect in effects:
            match effect:
                case Send(member, call):
                    self._judge_send(member.index, call)
                case SendCancel(member, call_id):
                    assert self.members[member.index].state in ("ready", "draining")
                    seen.append((SendCancel, member.index, call_id))
                case End(call, outcome):
                    known = self.calls[call.id]
                    known.answers += 1
                    assert known.answers == 1, f"{call} was answered twice"
                    assert not known.cancelled, f"{call} was answered after its caller left"
                    what = id(outcome) if isinstance(outcome, Item) else type(outcome)
                    seen.append((End, call.id, what))
                case Drained(member):
                    seen.append((Drained, member.index, None))
                case Chunk(call, item):
                    seen.append((Chunk, call.id, id(item)))
                case Restart(call):
                    seen.append((Restart, call.id, None))
        chunks = [e for e in seen if e[0] is Chunk]
        assert chunks == [e for e in wanted if e[0] is Chunk], "chunks keep their order"
        assert sorted(map(str, seen)) == sorted(map(str, wanted))
        for call in self.may_go():
            assert not self.room_for(call.pinned), f"{call.call} waits beside a free place"
        self.forget_prompts()

    def _judge_send(self, index: int, sent: Call) -> None:
        member = self.members[index]
        call = self.calls[sent.id]
        assert member.has_room, f"{member} got a call"
        assert call.state == WAITING, f"{call} was sent"
        assert call.pinned in (None, index)
        waiting = self.may_go()
        assert call in waiting, f"{call.client} has not read enough"
        if call.pinned is None:
            assert not any(c.pinned == index for c in waiting), "pinned calls come first"
            self._judge_turn(call, index, [c for c in waiting if c.pinned is None])
            if self.has_choice() and call.conversation is not None:
                self.homes[call.conversation] = index
        else:
            rivals = [c for c in waiting if c.pinned == index]
            assert min(rivals, key=lambda c: c.order) is call
        if call.waited:
            call.client.turn = self.turns
            self.turns += 1
        call.waited = False
        call.state = SENT
        call.attempts += 1
        assert call.losses < self.max_attempts
        assert call.call.resumable or call.attempts - call.breaks <= self.max_attempts
        member.held.add(sent.id)

    def _judge_turn(self, call: ModelCall, index: int, rivals: list[ModelCall]) -> None:
        """Check that this call may go to this member before its rivals.

        Calls that return to another member are left to that member. The next call goes
        nevertheless if it has a higher priority, or was passed too often, or if there are no other
        calls. (The next call is called the oldest here. With one client it is the oldest.)
        """
        oldest = min(rivals, key=lambda c: c.order)
        waiting = self.in_state(WAITING)
        same = sum(c.client is oldest.client for c in waiting)
        clients = len({id(c.client) for c in waiting})
        patient = oldest.passed < 64 + 2 * min(len(waiting), same * clients)

        def may_pass(one: ModelCall) -> bool:
            return patient and one.call.priority == oldest.call.priority

        # For other calls, the model does not know which members hold a prefix of their prompts.
        certain = [c for c in rivals if c.home == index or c.call.route is None]
        first = min(filter(may_pass, certain), key=lambda c: c.order, default=None)
        if call.home not in (None, index):
            assert call is oldest, f"{call} belongs to another"
            assert first is None, f"{first} should have gone before {call}"
        else:
            assert call is oldest or may_pass(call), f"{call} has passed {oldest} too often"
            assert first is None or call.order <= first.order, f"{first} should have gone before"
        if call is not oldest:
            oldest.passed += 1
