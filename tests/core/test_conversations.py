"""Lists of messages are accepted, or refused with an error that names the message and the fault."""

from __future__ import annotations

import re
from typing import Any

import pytest

from sglrl.errors import InvalidRequest
from sglrl.inference.prompts import check_messages

ASK = {"role": "user", "content": "2 + 2?"}
CALL = {"role": "assistant", "tool_calls": [{"function": {"name": "add", "arguments": {}}}]}
RESULT = {"role": "tool", "content": "4"}
TEXT = {"type": "text", "text": "2 + "}
PARTS = {"role": "user", "content": [TEXT, {"type": "text", "text": "2?"}]}


def test_one_or_several() -> None:
    assert check_messages([ASK]) == (False, [[ASK]])
    assert check_messages((ASK, CALL, RESULT)) == (False, [[ASK, CALL, RESULT]])
    assert check_messages([{**CALL, "content": None}]) == (False, [[{**CALL, "content": None}]])
    assert check_messages([PARTS]) == (False, [[ASK]])
    empty = {"role": "user", "content": ""}
    assert check_messages([{"role": "user", "content": ()}]) == (False, [[empty]])
    assert len(PARTS["content"]) == 2, "the given message is not changed"
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


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ([TEXT, {"type": "image_url", "image_url": {"url": "x"}}], "[1] is of type 'image_url'"),
        ([{"type": "image", "image": "x.png"}], "[0] is of type 'image'"),
        ([{"type": "input_audio", "input_audio": {}}], "[0] is of type 'input_audio'"),
        ([{"type": "video_url", "video_url": {}}], "[0] is of type 'video_url'"),
        ([{"type": "refusal", "refusal": "no"}], "[0] is of type 'refusal'"),
        ([{"type": "thought", "text": "hm"}], "[0] is of type 'thought'"),
        ([{"text": "hi"}], "[0] has no 'type'"),
        ([{"type": 3, "text": "hi"}], "[0] has no 'type'"),
        (["hi"], "[0] is str, not a mapping"),
        ((TEXT, None), "[1] is NoneType, not a mapping"),
        ([{"type": "text"}], "[0] is of type 'text', and its 'text' is NoneType"),
        ([TEXT, {"type": "text", "text": 3}], "[1] is of type 'text', and its 'text' is int"),
    ],
)
def test_parts_that_are_no_text(content: Any, says: str) -> None:
    message = {"role": "user", "content": content}
    with pytest.raises(InvalidRequest, match="^" + re.escape(f"messages[1]['content']{says}")):
        check_messages([ASK, message])
    with pytest.raises(InvalidRequest, match="^" + re.escape(f"messages[1][0]['content']{says}")):
        check_messages([[ASK], [message]])


@pytest.mark.parametrize("content", [3, 0, False, {"type": "text", "text": "hi"}, b"hi", re])
def test_content_of_another_type(content: Any) -> None:
    error = re.escape(f"messages[0] has a 'content' of type {type(content).__name__}; give text")
    with pytest.raises(InvalidRequest, match=error):
        check_messages([{"role": "user", "content": content}])
