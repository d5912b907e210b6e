"""Which prompts wait for which, compared with prompts matched token by token."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from sglrl.core.prefix_groups import LEAST, Prompt, followers

pieces = st.lists(st.tuples(st.integers(0, 2), st.sampled_from([1, 40, 64, 130, 700])), max_size=5)
"""Prompts are runs of a few tokens, so they often share a prefix."""


def tokens_of(runs: list[tuple[int, int]]) -> bytes:
    return b"".join(bytes([token]) * count for token, count in runs)


def common(a: bytes, b: bytes) -> int:
    same = 0
    while same < min(len(a), len(b)) and a[same] == b[same]:
        same += 1
    return same


@given(
    asked=st.lists(st.tuples(pieces, st.integers(0, 1), st.integers(0, 2000)), max_size=8),
    begun=st.integers(0, 2),
    cache=st.lists(pieces, max_size=3),
)
@settings(deadline=None)
def test_who_waits_saves_tokens_and_who_would_save_many_waits(
    asked: list[tuple[list[tuple[int, int]], int, int]],
    begun: int,
    cache: list[list[tuple[int, int]]],
) -> None:
    texts = [tokens_of(runs) for runs, _, _ in asked]
    kinds = [kind for _, kind, _ in asked]
    mosts = [
        min(most, max(0, len(text) - 1)) for text, (_, _, most) in zip(texts, asked, strict=True)
    ]
    prompts = [
        Prompt(text, 1, most, kind) for text, most, kind in zip(texts, mosts, kinds, strict=True)
    ]
    held = [tokens_of(runs) for runs in cache]
    questions: list[int] = []

    def cached(index: int) -> int:
        questions.append(index)
        return max((common(texts[index], text) for text in held), default=0)

    later = {begun + i for i in followers(prompts[:begun], prompts[begun:], cached)}
    assert len(questions) == len(set(questions))
    for index in range(begun, len(texts)):
        leaders = [n for n in range(index) if n not in later and kinds[n] == kinds[index]]
        shared = [common(texts[index], texts[n]) for n in leaders]
        there = max((common(texts[index], text) for text in held), default=0)
        most = mosts[index]
        saved = max((min(s, most) - min(s, there) for s in shared), default=0)
        if index in later:
            assert saved >= LEAST
        seen = [s - max(LEAST, s // 8) for s in shared]
        surely = max((min(s, most) - min(s, there) for s in seen if s > 0), default=0)
        if surely >= LEAST:
            assert index in later


def test_all_but_one_of_several_samples_wait() -> None:
    one = Prompt(bytes(300), 1, 299, "")
    assert followers([], [one] * 8, lambda index: 0) == {1, 2, 3, 4, 5, 6, 7}
    assert followers([one], [one] * 8, lambda index: 0) == set(range(8))
    assert followers([], [one] * 8, lambda index: 300) == set(), "it is in the cache"


def test_nobody_waits_for_a_system_prompt_that_is_in_the_cache() -> None:
    prompts = [Prompt(bytes(1000) + bytes([n]) * 100, 1, 1099, "") for n in range(1, 9)]
    assert followers([], prompts, lambda index: 1000) == set()
    assert followers([], prompts, lambda index: 0) == {1, 2, 3, 4, 5, 6, 7}


def test_nobody_waits_for_a_few_tokens() -> None:
    prompts = [Prompt(bytes(LEAST), 1, LEAST - 1, "")] * 3
    assert followers([], prompts, lambda index: 0) == set()
    prompts = [Prompt(bytes(500), 1, 20, "")] * 3
    assert followers([], prompts, lambda index: 0) == set(), "of which 480 have to be computed"
