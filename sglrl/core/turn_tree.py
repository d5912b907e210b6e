"""The turns of one conversation, as a tree of tokens.

A turn extends another turn if its prompt begins with all tokens of the other turn: the prompt and
the sampled tokens. A conversation that only grows is a path. If an agent goes back, compacts the
conversation or asks something else, its next turn extends an earlier turn or none, and the tree has
several leaves. The same happens if a chat template rewrites earlier turns.
"""

from __future__ import annotations

from typing import NamedTuple

ROOT = -1
"""The parent of turns that extend no other turn."""


class Leaf(NamedTuple):
    """A path of the tree from a root to a leaf.

    Attributes:
        path: the turns of the path.
        own: the turns of the path that are in no later path. Each turn is in ``own`` of exactly one
            path. In this path, the sampled tokens of the turn count in the loss.
    """

    path: tuple[int, ...]
    own: tuple[int, ...]


class TurnTree:
    """The tree of one conversation. ``add`` numbers the turns from 0. Tokens are int32 bytes."""

    def __init__(self) -> None:
        self._parents: list[int] = []
        self._children: dict[int, list[int]] = {}
        self._segments: list[tuple[bytes, bytes]] = []
        """For each turn: the tokens of its prompt that its parent lacks, and its sampled tokens."""
        self._ends: dict[int, int] = {ROOT: 0}
        """For each turn: the number of bytes of all tokens up to its end."""

    def __len__(self) -> int:
        return len(self._parents)

    def add(self, prompt: bytes, sampled: bytes, parent: int | None = None) -> int:
        """Add a turn. Return its number.

        Args:
            prompt: the tokens of the prompt.
            sampled: the sampled tokens.
            parent: the turn that the new turn extends. None: the turn that ``find`` returns.
        """
        if parent is None:
            parent = self.find(prompt)
        at = self._ends[parent]
        turn = len(self._parents)
        self._ends[turn] = len(prompt) + len(sampled)
        self._parents.append(parent)
        self._children.setdefault(parent, []).append(turn)
        self._segments.append((prompt[at:], sampled))
        return turn

    def find(self, tokens: bytes) -> int:
        """Return the turn that these tokens extend, or ``ROOT``.

        Of several such turns, return the longest one. Of equally long turns, return the last one.
        """
        best = (0, ROOT)
        candidates = [(0, turn) for turn in self._children.get(ROOT, ())]
        while candidates:
            at, turn = candidates.pop()
            between, sampled = self._segments[turn]
            end = at + len(between)
            if tokens.startswith(between, at) and tokens.startswith(sampled, end):
                end += len(sampled)
                best = max(best, (end, turn))
                candidates += [(end, child) for child in self._children.get(turn, ())]
        return best[1]

    def parent(self, turn: int) -> int:
        """Return the turn that this turn extends, or ``ROOT``."""
        return self._parents[turn]

    def path(self, turn: int) -> tuple[int, ...]:
        """Return the turns from a root to this turn."""
        turns = []
        while turn != ROOT:
            turns.append(turn)
            turn = self._parents[turn]
        return tuple(turns[::-1])

    def tokens(self, turn: int) -> bytes:
        """Return all tokens up to the end of a turn."""
        return b"".join(part for step in self.path(turn) for part in self._segments[step])

    def starts(self, turn: int) -> list[int]:
        """Return where the sampled tokens of each turn of the path to ``turn`` begin, in tokens."""
        positions, at = [], 0
        for step in self.path(turn):
            between, sampled = self._segments[step]
            positions.append((at + len(between)) // 4)
            at += len(between) + len(sampled)
        return positions

    def leaves(self) -> list[Leaf]:
        """Return the paths to the turns that no other turn extends, in the order of these turns."""
        owned: set[int] = set()
        leaves = []
        for turn in reversed(range(len(self._parents))):
            if turn not in self._children:
                path = self.path(turn)
                leaves.append(Leaf(path, tuple(step for step in path if step not in owned)))
                owned.update(path)
        return leaves[::-1]
