"""Each sampled token is in the loss of one leaf: ``core.turn_tree`` against brute force."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglrl.core.turn_tree import ROOT, TurnTree

# So few tokens that many prompts begin alike by chance.
_tokens = st.lists(st.integers(0, 2), max_size=4)


def as_bytes(tokens: list[int]) -> bytes:
    return np.array(tokens, "<i4").tobytes()


def begins(tokens: list[int], beginning: list[int]) -> bool:
    return tokens[: len(beginning)] == beginning


@st.composite
def conversations(draw: st.DrawFn) -> list[tuple[list[int], list[int]]]:
    """Turns, as (prompt, sampled): they grow, go back, drop tokens, compact, or begin anew."""
    turns: list[tuple[list[int], list[int]]] = []
    for _ in range(draw(st.integers(1, 8))):
        what = draw(st.sampled_from(["grow", "back", "drop", "compact", "other"])) if turns else ""
        new = draw(_tokens)
        if what == "grow":
            prompt = [*turns[-1][0], *turns[-1][1], *new]
        elif what == "back":
            earlier = draw(st.sampled_from(turns))
            prompt = [*earlier[0], *earlier[1], *new]
        elif what == "drop":
            whole = [*turns[-1][0], *turns[-1][1], *new]
            at = draw(st.integers(0, len(whole)))
            prompt = whole[:at] + whole[at + 1 :]
        elif what == "compact":
            whole = [*turns[-1][0], *turns[-1][1]]
            prompt = [*whole[: draw(st.integers(0, len(whole)))], *new]
        else:
            prompt = new
        turns.append((prompt, draw(_tokens)))
    return turns


def parents_by_brute_force(turns: list[tuple[list[int], list[int]]]) -> list[int]:
    """Return the earlier turn with the most tokens that each prompt begins with.

    A turn counts only if each turn of its own path counts, which follows from its prompt.
    """
    found = []
    for index, (prompt, _) in enumerate(turns):
        fitting = [
            (len(before) + len(sampled), earlier)
            for earlier, (before, sampled) in enumerate(turns[:index])
            if begins(prompt, [*before, *sampled])
        ]
        found.append(max(fitting, default=(0, ROOT))[1])
    return found


@settings(max_examples=500)
@given(conversations())
def test_each_sampled_token_is_in_the_loss_of_one_leaf(
    turns: list[tuple[list[int], list[int]]],
) -> None:
    tree = TurnTree()
    for index, (prompt, sampled) in enumerate(turns):
        assert tree.add(as_bytes(prompt), as_bytes(sampled)) == index
    assert len(tree) == len(turns)
    parents = parents_by_brute_force(turns)
    assert [tree.parent(turn) for turn in range(len(turns))] == parents
    for turn, (prompt, sampled) in enumerate(turns):
        assert tree.tokens(turn) == as_bytes([*prompt, *sampled])
        path = tree.path(turn)
        assert path[-1] == turn
        assert [ROOT, *path[:-1]] == [parents[step] for step in path]
        assert tree.starts(turn) == [len(turns[step][0]) for step in path]
    leaves = tree.leaves()
    assert [leaf.path[-1] for leaf in leaves] == [
        turn for turn in range(len(turns)) if turn not in parents
    ]
    assert sorted(turn for leaf in leaves for turn in leaf.own) == [*range(len(turns))]
    seen: set[int] = set()
    for leaf in reversed(leaves):
        assert leaf.path == tree.path(leaf.path[-1])
        assert leaf.own == tuple(turn for turn in leaf.path if turn not in seen)
        seen.update(leaf.path)
        # What a leaf trains on is there, token by token, at the place where it was sampled.
        whole = tree.tokens(leaf.path[-1])
        for turn in leaf.own:
            prompt, sampled = turns[turn]
            assert begins(np.frombuffer(whole, "<i4").tolist(), [*prompt, *sampled])


def test_a_conversation_that_grows_is_one_leaf() -> None:
    tree = TurnTree()
    tokens: list[int] = [1]
    for turn in range(50):
        parent = turn - 1 if turn % 2 else None
        assert tree.add(as_bytes(tokens), as_bytes([turn, 7]), parent) == turn
        assert tree.parent(turn) == turn - 1
        tokens += [turn, 7, 8]
    (leaf,) = tree.leaves()
    assert leaf.path == leaf.own == tuple(range(50))


@pytest.mark.parametrize(
    ("prompt", "parent"),
    [
        ([1, 2, 3, 4, 5, 6], 1),  # goes on after the last turn
        ([1, 2, 3, 9], 0),  # goes back to the first
        ([1, 2], ROOT),  # without a sampled token of the first: it is not extended
        ([9, 2, 3], ROOT),
    ],
)
def test_the_parent(prompt: list[int], parent: int) -> None:
    tree = TurnTree()
    tree.add(as_bytes([1, 2]), as_bytes([3]))
    tree.add(as_bytes([1, 2, 3, 4]), as_bytes([5, 6]))
    assert tree.parent(tree.add(as_bytes(prompt), as_bytes([]))) == parent
