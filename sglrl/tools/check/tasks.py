"""Make the questions of the check: short word problems, some of them with follow-up questions."""

from __future__ import annotations

import random

import msgspec

SYSTEM_PROMPT = (
    "You are a careful assistant who solves short problems. Think step by step, check every "
    "number you write down, and keep the answer in one line. When a question builds on the one "
    "before, begin with the result that you had. Always end with the number alone."
)
"""All rollouts begin with this prompt, so each worker computes this prefix once."""

_PROBLEMS = (
    "What is the sum of {a} and {b}?",
    "What is {a} times {b}, minus {c}?",
    "A box holds {a} pens. How many pens are in {b} boxes when {c} pens are missing?",
    "A train leaves at {c} o'clock and takes {a} minutes for {b} stops. How long is one stop?",
    "Of {a} students, {c} are ill and {b} more join the class. How many are there today?",
)
_FOLLOW_UPS = (
    "Now double the result.",
    "Now take {c} away from that, and say how you checked it.",
)


class Task(msgspec.Struct, frozen=True):
    """One item of the data set.

    Attributes:
        questions: the messages of the user, which are asked one after the other.
    """

    name: str
    questions: tuple[str, ...]


def make_tasks(count: int, seed: int) -> list[Task]:
    """Return ``count`` tasks. The seed determines their questions.

    Every fourth task has a second question, and every eighth task also has a third.
    """
    chance = random.Random(seed)
    tasks = []
    for i in range(count):
        numbers = {name: chance.randint(2, 99) for name in "abc"}
        follow_ups = (i % 4 == 3) + (i % 8 == 7)
        lines = (chance.choice(_PROBLEMS), *_FOLLOW_UPS[:follow_ups])
        tasks.append(Task(f"task-{i}", tuple(line.format(**numbers) for line in lines)))
    return tasks
