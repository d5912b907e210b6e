"""The joined texts of a stream's chunks are the text of the whole, for any split of its tokens."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from sglrl.inference.chunk import StreamText
from sglrl.inference.completion import Decode, cut_text
from sglrl.inference.sampling import SamplingParams
from sglrl.wire.engine import TokenChunk

from .byte_decoder import PIECES, SPECIAL, decode_bytes, decode_words

STOPS = ("ab", "a€", "b", "€€a", "�", "aab")

characters = st.lists(st.sampled_from(["a", "b", "é", "€", "😀", "�", " "]), max_size=8)
valid = characters.map(lambda found: list("".join(found).encode()))
invalid = st.lists(st.sampled_from([97, 98, 0xE2, 0x82, 0xAC, 0xF0, 0x9F, 0xFF, SPECIAL]))
words = st.lists(st.integers(PIECES, PIECES + 3) | st.just(SPECIAL), max_size=10)


def split(ids: list[int], cuts: list[int]) -> list[list[int]]:
    edges = sorted({0, len(ids), *(c % (len(ids) + 1) for c in cuts)})
    parts = [ids[a:b] for a, b in pairwise(edges)]
    return parts or [[]]


def run_until_stop(ids: list[int], stops: list[str], decode: Decode) -> tuple[list[int], str]:
    """Return the output of an engine that checks after each token: up to the first stop string."""
    for n in range(1, len(ids) + 1):
        text = decode(ids[:n], True)
        for stop in stops:
            if stop in text:
                return ids[:n], stop
    return ids, ""


def stream(
    parts: list[list[int]],
    finish: str,
    match: str | int | None,
    stops: list[str],
    decode: Decode,
    *,
    keep: bool = False,
) -> list[str]:
    params = SamplingParams(stop=stops, no_stop_trim=keep)
    stream_text = StreamText(decode, params)
    texts = [
        stream_text.add(
            TokenChunk(
                np.array(part, dtype="<i4").tobytes(),
                finish=finish if last else "",
                stop_match=match if last else None,
            )
        )
        for part, last in ((p, i == len(parts) - 1) for i, p in enumerate(parts))
    ]
    # Read the texts out of order and twice: the results must not depend on the order.
    backwards = [text() for text in reversed(texts)]
    assert [text() for text in texts] == backwards[::-1]
    return backwards[::-1]


@given(
    ids=valid | invalid,
    cuts=st.lists(st.integers(0, 100), max_size=12),
    stops=st.lists(st.sampled_from(STOPS), max_size=2, unique=True),
    keep=st.booleans(),
)
@example(ids=list("x€a".encode()), cuts=[1, 2, 3, 4], stops=["a€"], keep=False)
@example(ids=list(b"aaab"), cuts=[1, 2, 3], stops=["aab"], keep=False)
@example(ids=list(b"aaab"), cuts=[1, 2, 3], stops=["aab"], keep=True)
def test_stop_strings_in_bytes(
    ids: list[int], cuts: list[int], stops: list[str], keep: bool
) -> None:
    ids, match = run_until_stop(ids, stops, decode_bytes)
    finish = "stop" if match else "length"
    texts = stream(split(ids, cuts), finish, match or None, stops, decode_bytes, keep=keep)
    params = SamplingParams(stop=stops, no_stop_trim=keep)
    whole = cut_text(np.array(ids, np.int32), finish, match or None, decode_bytes, params)
    assert "".join(texts) == whole
    if match:
        text = decode_bytes(ids, True)
        assert whole == text[: text.index(match)] + (match if keep else "")


@given(ids=valid | invalid, cuts=st.lists(st.integers(0, 100), max_size=12))
def test_stop_tokens(ids: list[int], cuts: list[int]) -> None:
    ids = [*ids, SPECIAL]
    texts = stream(split(ids, cuts), "stop", SPECIAL, [], decode_bytes)
    assert "".join(texts) == decode_bytes(ids[:-1], True)


@given(ids=words, cuts=st.lists(st.integers(0, 100), max_size=12))
@example(ids=[PIECES, SPECIAL, PIECES, PIECES], cuts=[1, 2, 3])
@example(ids=[SPECIAL, SPECIAL, PIECES, PIECES], cuts=[1, 2, 3])
def test_a_decoder_that_drops_the_first_space(ids: list[int], cuts: list[int]) -> None:
    texts = stream(split(ids, cuts), "length", None, [], decode_words)
    assert "".join(texts) == decode_words(ids, True)


def test_a_chunk_without_tokens_changes_nothing() -> None:
    parts = [[PIECES], [], [PIECES + 1], [], [], [PIECES + 2], []]
    texts = stream(parts, "length", None, [], decode_words)
    assert texts == ["a", "", " b", "", "", " c", ""]


def test_incomplete_characters_come_with_a_later_chunk() -> None:
    texts = stream([[t] for t in "x€y".encode()], "length", None, [], decode_bytes)
    assert texts == ["x", "", "", "€", "y"]


def test_the_beginning_of_a_stop_string_is_held_back() -> None:
    parts = [list(b"ha"), list(b"l"), list(b"x"), list(b"t")]
    assert stream(parts, "length", None, ["halt"], decode_bytes) == ["", "", "halx", "t"]
    parts = [list(b"so ha"), list(b"l"), list(b"t")]
    assert stream(parts, "stop", "halt", ["halt"], decode_bytes) == ["so ", "", ""]


def test_only_the_tail_is_decoded_again() -> None:
    longest = 0

    def decode(ids: object, skip: bool) -> str:
        nonlocal longest
        longest = max(longest, len(ids))  # type: ignore[arg-type]
        return decode_bytes(ids, skip)  # type: ignore[arg-type]

    stream_text = StreamText(decode, SamplingParams())
    for _ in range(200):
        stream_text.add(TokenChunk(np.array([97], dtype="<i4").tobytes()))()
    assert longest <= 2


@pytest.mark.parametrize(
    ("text", "match", "wanted"),
    [
        ("one END", "END", "one "),
        ("END two END", "END", "END two "),
        ("ENDEND", "END", "END"),
        ("aaa", "aa", "a"),
        ("no match", "END", "no match"),
        ("END passed over", "END", "END passed over"),
        ("", "END", ""),
    ],
)
def test_cut_at_the_occurrence_that_the_last_token_completed(
    text: str, match: str, wanted: str
) -> None:
    ids = np.array(list(text.encode()), np.int32)
    assert cut_text(ids, "stop", match, decode_bytes, SamplingParams(stop=match)) == wanted


def test_cut_where_single_bytes_show_as_several_characters() -> None:
    """Byte-fallback decoders show one U+FFFD for each byte of an incomplete character."""

    def decode(ids: object, skip: bool) -> str:
        try:
            return bytes(ids).decode()  # type: ignore[call-overload, no-any-return]
        except UnicodeDecodeError as error:
            return bytes(ids)[: error.start].decode() + "�" * (len(ids) - error.start)  # type: ignore[call-overload, arg-type, no-any-return]

    ids = np.array(list("ab😀".encode()), np.int32)
    assert cut_text(ids, "stop", "😀", decode, SamplingParams(stop="😀")) == "ab"


def test_nothing_is_cut_unless_it_stopped() -> None:
    ids = np.array(list(b"END"), np.int32)
    assert cut_text(ids, "length", None, decode_bytes, SamplingParams()) == "END"
    assert cut_text(ids, "stop", None, decode_bytes, SamplingParams()) == "END"
    shown = SamplingParams(skip_special_tokens=False)
    ended = np.array([97, SPECIAL], np.int32)
    assert cut_text(ended, "length", None, decode_bytes, shown) == "a<end>"


def test_what_ended_it_stays_where_it_is_asked_for() -> None:
    ended = np.array([97, SPECIAL], np.int32)
    for keep, wanted in ((False, "a"), (True, "a<end>")):
        params = SamplingParams(skip_special_tokens=False, no_stop_trim=keep)
        assert cut_text(ended, "stop", SPECIAL, decode_bytes, params) == wanted
    ids = np.array(list(b"one ENDS"), np.int32)
    # The last token may extend past the stop string. A regex with the same text keeps all text.
    assert cut_text(ids, "stop", "END", decode_bytes, SamplingParams(stop_regex="END")) == (
        "one ENDS"
    )
