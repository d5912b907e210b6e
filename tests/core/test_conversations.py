"""Messages on their way in: lists of them, or an error that says which one lacks what."""

from __future__ import annotations

import re
from typing import Any

import pytest

from sglrl.errors import InvalidRequest
from sglrl.prompts import check_messages

ASK = {"role": "user", "content": "2 + 2?"}
CALL = {"role": "assistant", "tool_calls": [{"function": {"name": "add", "arguments": {}}}]}
RESULT = {"role": "tool", "content": "4"}
PICTURE = {"role": "user", "content": [{"type": "text", "text": "what is it?"}]}


def test_one_or_several() -> None:
    assert check_messages([ASK]) == (False, [[ASK]])
    assert check_messages((ASK, CALL, RESULT)) == (False, [[ASK, CALL, RESULT]])
    assert check_messages([{**CALL, "content": None}]) == (False, [[{**CALL, "content": None}]])
    assert check_messages([PICTURE]) == (False, [[PICTURE]])
    assert check_messages([{"role": "assistant", "content": ""}])[0] is False
    assert check_messages([[ASK], (ASK, RESULT)]) == (True, [[ASK], [ASK, RESULT]])


@pytest.mark.parametrize(
    ("messages", "says"),
    [
        ([ASK, {"content": "hi"}], "messages[1] has no 'role'"),
        ([{"role": None, "content": "hi"}], "messages[0] has no 'role'"),
        ([{"role": "user"}], "messages[0] has no 'content'"),
        ([ASK, {"role": "user", "text": "hi"}], "messages[1] has no 'content'"),
        ([{"role": "assistant", "content": None}], "messages[0] has no 'content'"),
        ([{"role": "assistant", "tool_calls": []}], "messages[0] has no 'content'"),
        ([ASK, "hi"], "messages[1] is str, not a mapping"),
        (["hi"], "messages[0] is str, not a mapping"),
        ([[ASK], [ASK, {"role": "user"}]], "messages[1][1] has no 'content'"),
        ([[ASK], ["hi"]], "messages[1][0] is str, not a mapping"),
        ([[ASK], ASK], "messages[0] is list, not a mapping"),
        ([], "must be a non-empty list"),
        ([[ASK], []], "must be a non-empty list"),
        ("hi", "must be a non-empty list"),
        (ASK, "must be a non-empty list"),
        (3, "must be a non-empty list"),
    ],
)
def test_what_is_wrong(messages: Any, says: str) -> None:
    with pytest.raises(InvalidRequest, match=re.escape(says)):
        check_messages(messages)
