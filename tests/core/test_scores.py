"""The result of ``score``: an array with the version of the weights that computed it."""

from __future__ import annotations

import asyncio
import pickle
from typing import Any

import msgspec
import numpy as np
import pytest

from sglrl.core.calls import Call
from sglrl.errors import ProtocolError
from sglrl.inference.completion import ScoreLogprobs, Scores, VersionSpan
from sglrl.inference.replies import ScoreReply
from sglrl.wire.calls import Item, ItemKind
from sglrl.wire.codec import encode
from sglrl.wire.engine import TokenChunk

VALUES = np.array([np.nan, -1.0, -2.5, -0.25, -3.0], dtype="<f4")


def parts(*pairs: tuple[int, int]) -> bytes:
    return np.array(pairs, dtype="<i4").tobytes()


def scored(chunk: TokenChunk, top: int = 0) -> Any:
    """Return the caller's result for five tokens when a worker answers with this chunk."""

    async def answered() -> Any:
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        call = Call("score", msgspec.Raw(), None)
        ScoreReply(future, len(VALUES), top).end(call, Item(1, ItemKind.DONE, encode(chunk)), ())
        return await future

    return asyncio.run(answered())


def test_a_score_of_one_version() -> None:
    found = scored(TokenChunk(b"", VALUES.tobytes(), "stop", version=7))
    assert found.version == 7
    assert found.versions == (VersionSpan(0, 5, 7),)


def test_a_score_of_several_versions() -> None:
    found = scored(
        TokenChunk(b"", VALUES.tobytes(), "stop", version=9, parts=parts((2, 7), (3, 9)))
    )
    assert found.version == 9
    assert found.versions == ((0, 2, 7), (2, 5, 9))


def test_it_is_an_array_as_before() -> None:
    found = scored(TokenChunk(b"", VALUES.tobytes(), "stop", version=7))
    assert isinstance(found, np.ndarray)
    assert (found.dtype, found.shape, len(found)) == (np.float32, (5,), 5)
    assert not found.flags.writeable
    np.testing.assert_array_equal(found, VALUES)
    assert found[1:].sum() == VALUES[1:].sum()
    assert found.tolist()[1:] == VALUES.tolist()[1:]
    np.testing.assert_array_equal(np.stack([found, found])[0], VALUES)
    # A slice has other positions, so it must not keep the original's versions.
    assert not hasattr(found[1:], "versions")


def test_top_logprobs_are_a_tuple_of_three_as_before() -> None:
    ids, top = np.arange(10, dtype="<i4"), np.zeros(10, "<f4")
    chunk = TokenChunk(
        b"",
        VALUES.tobytes(),
        "stop",
        0,
        9,
        ids.tobytes(),
        top.tobytes(),
        parts=parts((1, 7), (4, 9)),
    )
    found = scored(chunk, 2)
    assert isinstance(found, Scores)
    logprobs, top_ids, top_logprobs = found
    np.testing.assert_array_equal(logprobs, VALUES)
    assert top_ids.tolist() == ids.reshape(5, 2).tolist()
    assert top_logprobs.shape == (5, 2)
    assert found.version == logprobs.version == 9
    assert found.versions == ((0, 1, 7), (1, 5, 9))


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_it_survives_pickle(protocol: int) -> None:
    found = scored(TokenChunk(b"", VALUES.tobytes(), "stop", version=7))
    again = pickle.loads(pickle.dumps(found, protocol))
    assert type(again) is ScoreLogprobs
    np.testing.assert_array_equal(again, VALUES)
    assert again.versions == found.versions
    part = pickle.loads(pickle.dumps(found[1:], protocol))
    np.testing.assert_array_equal(part, VALUES[1:])


@pytest.mark.parametrize(
    "wrong",
    [
        parts((2, 7)),
        parts((2, 7), (4, 9)),
        parts((5, 7), (0, 9)),
        parts((6, 7), (-1, 9)),
        parts((2, 7), (3, 9))[:-4],
        b"\0",
    ],
)
def test_parts_that_are_not_of_this_score(wrong: bytes) -> None:
    with pytest.raises(ProtocolError, match="in other parts"):
        scored(TokenChunk(b"", VALUES.tobytes(), "stop", version=9, parts=wrong))
