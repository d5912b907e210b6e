"""Messages in the place of the prompt."""

from __future__ import annotations

from typing import Any

import pytest

import sglrl

pytestmark = pytest.mark.timeout(180)


async def test_messages_may_be_the_first_argument() -> None:
    ask: Any = [{"role": "user", "content": "Hi"}]
    async with sglrl.launch("tiny", engine="fake") as client:
        expected = (await client.generate(messages=ask, max_new_tokens=3)).prompt_ids.tolist()
        assert (await client.generate(ask, max_new_tokens=3)).prompt_ids.tolist() == expected
        several = await client.generate([ask, ask], max_new_tokens=3, n=2)
        assert [[c.prompt_ids.tolist() for c in group] for group in several] == [[expected] * 2] * 2
        stream = client.stream(ask, max_new_tokens=3)
        _ = [chunk async for chunk in stream]
        assert stream.completion is not None
        assert stream.completion.prompt_ids.tolist() == expected
        async with client.session(ask) as session:
            assert (await session.generate(max_new_tokens=3)).prompt_ids.tolist() == expected
        template = {"enable_thinking": False}
        made = await client.generate(ask, template=template, max_new_tokens=3)
        assert made.prompt_ids.tolist()[-3:] == expected[-3:]
        with pytest.raises(sglrl.InvalidRequest, match="got prompt and messages"):
            await client.generate(ask, messages=ask)
        with pytest.raises(sglrl.InvalidRequest, match=r"messages\[1\] is str"):
            await client.generate([*ask, "x"])
