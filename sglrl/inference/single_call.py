"""End a turn after its first call of a tool: ``parallel_tool_calls=False``.

No sampled token is changed or removed. The token that ends the call also ends the turn.
"""

from __future__ import annotations

import re

from ..driver.threads import in_thread
from ..errors import InvalidRequest
from .renderer import Renderer
from .sampling_cache import Prepared, SamplingCache


async def stop_after_call(
    samplings: SamplingCache, prepared: Prepared, renderer: Renderer | None
) -> Prepared:
    """Return sampling values with which a turn ends after its first call.

    Args:
        renderer: of the conversation. None: its calls are not parsed, so there are none.

    Raises:
        InvalidRequest: no token ends a call in the format of the model.
    """
    if renderer is None or not renderer.tools:
        return prepared
    end = await in_thread(end_of_call, renderer)
    if end is None:
        return prepared
    tokens = [*prepared.params.stop_token_ids, end]
    return samplings.prepare(prepared.params, {"stop_token_ids": tokens})


def end_of_call(renderer: Renderer) -> int | None:
    """Return the token that ends a call. None: a turn has one call at most.

    Raises:
        InvalidRequest: calls end without a token of their own.
    """
    one, two = renderer.example(1), renderer.example(2)
    if one is None or two is None or two.count("add") < 2:
        return None
    same = [a == b for a, b in zip(one, two, strict=False)]
    call = one[: same.index(False) if False in same else len(same)]
    call = call[call.find("add") :]
    tokens = renderer.added_tokens
    longest_first = sorted(tokens, key=len, reverse=True)
    found = re.findall("|".join(map(re.escape, longest_first)), call) if tokens else []
    # Within a call, other tokens may separate its arguments.
    if not found or found.count(found[-1]) > 1 or "2" in call[call.rfind(found[-1]) :]:
        raise InvalidRequest(
            f"parallel_tool_calls=false is not possible with the renderer {renderer.name!r}: no "
            "token of their own ends its calls; tool_choice with the name of a tool makes a "
            "single call"
        )
    return tokens[found[-1]]
