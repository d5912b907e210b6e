"""Messages of both ends of a session arrive once and in order, whatever connections lose."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from sglrl.core.node_session import MessageMissing, Session
from sglrl.errors import ProtocolError
from sglrl.wire.codec import decode_of_connection, decode_to_node
from sglrl.wire.nodes import Acknowledge, ClosePool, Numbered

end = st.integers(0, 1)


class Connections(RuleBasedStateMachine):
    """Two ends and a connection that delivers in order until it breaks, and then nothing more.

    Each end may notice a break at another time.
    """

    @initialize()
    def begin(self) -> None:
        self.transit: tuple[list[list[bytes]], list[list[bytes]]] = ([], [])
        """The messages in transit, by sender."""
        self.ends = tuple(Session("s", wire.append) for wire in self.transit)
        self.sent = [0, 0]
        self.got: tuple[list[int], list[int]] = ([], [])
        self.connected = False
        self.connect()

    @rule(sender=end)
    def send(self, sender: int) -> None:
        self.sent[sender] += 1
        self.ends[sender].send(ClosePool(self.sent[sender]))

    @rule(sender=end)
    def acknowledge(self, sender: int) -> None:
        self.ends[sender].acknowledge()

    @rule(sender=end)
    def arrive(self, sender: int) -> None:
        if not self.connected:
            self.transit[sender].clear()
        elif self.transit[sender]:
            first, *more = self.transit[sender].pop(0)
            message = decode_of_connection(first)
            assert isinstance(message, (Numbered, Acknowledge))
            if self.ends[1 - sender].receive(message):
                body = decode_to_node(more[0])
                assert isinstance(body, ClosePool)
                self.got[1 - sender].append(body.pool)

    @rule()
    def break_off(self) -> None:
        self.connected = False

    @rule(which=end)
    def notice(self, which: int) -> None:
        if not self.connected:
            self.ends[which].disconnect()

    @rule()
    def connect(self) -> None:
        if self.connected:
            return
        for wire in self.transit:
            wire.clear()
        self.connected = True
        one, two = self.ends
        numbers = one.received, two.received
        one.connect(numbers[1])
        two.connect(numbers[0])

    @invariant()
    def in_order_and_once(self) -> None:
        for sender in (0, 1):
            got = self.got[1 - sender]
            assert got == list(range(1, len(got) + 1))
            # What has not arrived is kept.
            assert self.ends[sender].unacknowledged >= self.sent[sender] - len(got)

    def teardown(self) -> None:
        if not hasattr(self, "ends"):
            return
        self.break_off()
        self.connect()
        for sender in (0, 1):
            while self.transit[sender]:
                self.arrive(sender)
            assert len(self.got[1 - sender]) == self.sent[sender]


TestConnections = Connections.TestCase


def test_what_is_acknowledged_is_forgotten() -> None:
    sent: list[list[bytes]] = []
    session = Session("s", sent.append)
    session.send(ClosePool(1))
    session.send(ClosePool(2))
    assert sent == []
    session.connect(1)
    assert [decode_to_node(body) for _, body in sent] == [ClosePool(2)]
    session.receive(Acknowledge(2))
    assert session.unacknowledged == 0


def test_numbers_that_cannot_be() -> None:
    session = Session("s", lambda frames: None)
    with pytest.raises(ProtocolError, match="did not begin it"):
        session.receive(Acknowledge(0))
    session.connect(0)
    session.send(ClosePool(1))
    with pytest.raises(MessageMissing, match="message 2 follows message 0"):
        session.receive(Numbered(2, 0))
    with pytest.raises(ProtocolError, match="message 2 is acknowledged, of 1 sent"):
        session.receive(Acknowledge(2))
    with pytest.raises(ProtocolError, match="message 3 is acknowledged"):
        session.connect(3)
