"""Errors about JSON say what is wrong with it."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglrl.errors import InvalidRequest
from sglrl.inference.sampling import SamplingParams
from sglrl.wire.codec import malformed


@given(st.dictionaries(st.text(), st.integers() | st.text() | st.none(), min_size=1), st.data())
def test_every_beginning_ends_in_the_middle(value: dict[str, object], data: st.DataObject) -> None:
    whole = msgspec.json.encode(value)
    cut = whole[: data.draw(st.integers(0, len(whole) - 1))]
    found: Exception | None = None
    try:
        msgspec.json.decode(cut)
    except msgspec.DecodeError as error:
        found = error
    if found is not None and "truncated" in str(found):
        ends = f"it ends in the middle, after {len(cut)} bytes" if cut else "it is empty"
        assert malformed(found, cut) == ends


def test_other_errors_stay() -> None:
    with pytest.raises(msgspec.DecodeError) as caught:
        msgspec.json.decode("x")
    assert malformed(caught.value, "x") == str(caught.value)


@pytest.mark.parametrize("name", ["json_schema", "structural_tag"])
def test_grammars(name: str) -> None:
    with pytest.raises(InvalidRequest, match=f"{name} is not JSON: it ends in the middle, after 8"):
        SamplingParams(**{name: '{"type":'})
    with pytest.raises(InvalidRequest, match=f"{name} is not JSON: it is empty"):
        SamplingParams(**{name: " "})
