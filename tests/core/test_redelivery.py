"""Messages of both sides arrive once and in order, whatever connections lose."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from sglrl.core.redelivery import Redelivery
from sglrl.errors import ProtocolError

side = st.integers(0, 1)


class Connections(RuleBasedStateMachine):
    """Two sides and a connection that delivers in order until it breaks, and then nothing more."""

    @initialize()
    def begin(self) -> None:
        self.sides = (Redelivery(), Redelivery())
        self.sent: tuple[list[bytes], list[bytes]] = ([], [])
        self.got: tuple[list[bytes], list[bytes]] = ([], [])
        self.wires: tuple[list[tuple[int, int, bytes]], list[tuple[int, int, bytes]]] = ([], [])
        """By sender: number, acknowledgement and body of the messages in transit."""
        self.connected = True

    @rule(sender=side)
    def send(self, sender: int) -> None:
        body = b"%d" % len(self.sent[sender])
        self.sent[sender].append(body)
        number = self.sides[sender].send(body)
        if self.connected:
            self.wires[sender].append((number, self.sides[sender].received, body))

    @rule(sender=side)
    def arrive(self, sender: int) -> None:
        if not self.wires[sender]:
            return
        number, acknowledged, body = self.wires[sender].pop(0)
        receiver = self.sides[1 - sender]
        receiver.acknowledge(acknowledged)
        if receiver.receive(number):
            self.got[1 - sender].append(body)

    @rule()
    def break_off(self) -> None:
        """Lose everything that is in transit."""
        self.connected = False
        for wire in self.wires:
            wire.clear()

    @rule()
    def connect(self) -> None:
        if self.connected:
            return
        self.connected = True
        for sender, wire in enumerate(self.wires):
            me, other = self.sides[sender], self.sides[1 - sender]
            wire += [(number, me.received, body) for number, body in me.missing(other.received)]

    @invariant()
    def in_order_and_once(self) -> None:
        for sender in (0, 1):
            got, sent = self.got[1 - sender], self.sent[sender]
            assert got == sent[: len(got)]

    @invariant()
    def nothing_undelivered_is_forgotten(self) -> None:
        for sender in (0, 1):
            undelivered = len(self.sent[sender]) - len(self.got[1 - sender])
            assert self.sides[sender].unacknowledged >= undelivered

    def teardown(self) -> None:
        if not hasattr(self, "sides"):
            return
        self.break_off()
        self.connect()
        for sender in (0, 1):
            while self.wires[sender]:
                self.arrive(sender)
            assert self.got[1 - sender] == self.sent[sender]


TestConnections = Connections.TestCase


def test_numbers_that_cannot_be() -> None:
    one = Redelivery()
    one.send(b"a")
    with pytest.raises(ProtocolError, match="message 2 follows message 0"):
        one.receive(2)
    with pytest.raises(ProtocolError, match="message 2 is acknowledged, of 1 sent"):
        one.acknowledge(2)
    one.acknowledge(1)
    assert one.missing(1) == []
