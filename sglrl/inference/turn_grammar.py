"""The grammar of an assistant's whole turn: reasoning, then tool calls or the caller's grammar.

The reasoning is free text. In all APIs, the caller's grammar applies only to the content, which
follows the reasoning. The content begins at the token at which the renderer's parser begins it.

With ``parallel_tool_calls=False``, the token that ends the first tool call is a stop token. So the
turn ends there, and no sampled token is changed or removed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

import numpy as np
from msgspec.structs import asdict

from ..driver.threads import in_thread
from ..errors import InvalidRequest
from .engine_grammar import newer_tag
from .formats import Format, literal, optional, sequence
from .renderer import Renderer
from .sampling import SamplingParams
from .sampling_cache import Prepared, SamplingCache
from .thought import Thought, thought_after
from .tool_choice import ToolChoice, calls_are_marked, calls_format


async def turn_grammar(
    samplings: SamplingCache,
    prepared: Prepared,
    choice: ToolChoice,
    renderers: Sequence[Renderer | None],
    prompts: Sequence[bytes],
) -> Prepared:
    """Return sampling values with a grammar for whole turns.

    * The reasoning of the turns is free text.
    * If ``choice`` is not "auto", the turns consist of reasoning and tool calls. In this case a
      model always reasons if its format has reasoning. With a caller's grammar, the model decides
      whether it reasons.
    * In a conversation with tools, a ``json_schema`` allows either the JSON or tool calls.
    * A ``regex``, ``ebnf`` or ``structural_tag`` that contains a token of the model's format for
      reasoning or calls is used unchanged, because it describes a whole turn.

    Args:
        renderers: the renderers of the conversations, which have the same tools and template.
        prompts: the prompts of the same conversations, int32 bytes.

    Raises:
        InvalidRequest: the grammar cannot be combined with ``choice`` or with the format of the
            model's calls, or the prompts need different grammars.
    """
    params = prepared.params
    if choice == "auto" and not params.grammars:
        return prepared
    if choice != "auto" and params.grammars:
        raise InvalidRequest(f"tool_choice is a grammar too: omit {params.grammars[0]}")
    known = [renderer for renderer in renderers if renderer is not None]
    if not known or len(known) < len(renderers):
        if choice == "auto":
            # Reasoning and calls are not parsed from these turns, so use the grammar unchanged.
            return prepared
        raise InvalidRequest(
            "tool_choice needs a model whose format for calls of tools is known, and no renderer "
            "fits this model's chat template"
        )

    def find() -> list[Format | None]:
        pairs = zip(known, prompts, strict=True)
        return [turn_format(one, _ids(prompt), choice, params) for one, prompt in pairs]

    form, *others = await in_thread(find)
    if any(other != form for other in others):
        raise InvalidRequest(
            "a grammar for several conversations needs the same beginning of all turns, and some "
            "of the prompts open the model's reasoning; give these conversations separately"
        )
    if form is None:
        return prepared
    values = {**asdict(params), **dict.fromkeys(params.grammars)}
    values["structural_tag"] = {"type": "structural_tag", "format": form}
    return samplings.prepare(SamplingParams(**values), {})


def turn_format(
    renderer: Renderer, prompt: list[int], choice: ToolChoice, params: SamplingParams
) -> Format | None:
    """Return the format of a turn after a prompt, or None to use the given grammar unchanged.

    Raises:
        InvalidRequest: see ``turn_grammar``.
    """
    if choice != "auto":
        content = calls_format(renderer, choice)
    else:
        content = given_format(params)
        if params.json_schema is None and _describes_turns(renderer, content):
            return None
    thought = thought_after(renderer, prompt)
    if thought and choice == "auto":
        thought = thought._replace(opening=thought.opening.rstrip())
    elements = _thought_format(renderer, thought) if thought else []
    if choice != "auto":
        return sequence([*elements, content])
    if thought and thought.opening:
        elements = optional(elements)
    space = literal(thought.space, renderer.added_tokens) if thought else []
    content = sequence([*optional(space), content])
    if renderer.tools and params.json_schema is not None:
        if not calls_are_marked(renderer):
            raise InvalidRequest(
                f"json_schema together with tools is not possible with the renderer "
                f"{renderer.name!r}: its calls are JSON too; omit one of the two"
            )
        content = {"type": "or", "elements": [content, calls_format(renderer, "required")]}
    elif thought is None:
        return None
    return sequence([*elements, content])


def given_format(params: SamplingParams) -> Format:
    """Return the format of the grammar that is given in sampling parameters."""
    (name,) = params.grammars
    value = getattr(params, name)
    if name == "regex":
        return {"type": "regex", "pattern": value}
    if name == "ebnf":
        return {"type": "grammar", "grammar": value}
    decoded = json.loads(value) if isinstance(value, str) else value
    if name == "json_schema":
        return {"type": "json_schema", "json_schema": decoded}
    form: Format = newer_tag(decoded)["format"]
    return form


def _describes_turns(renderer: Renderer, form: Format) -> bool:
    """Return whether a grammar contains a token of the model's format for reasoning or calls."""
    example = renderer.example(1) or "<think></think>"
    text = json.dumps(form, ensure_ascii=False)
    return any(token in example and token in text for token in renderer.added_tokens)


def _thought_format(renderer: Renderer, thought: Thought) -> list[Format]:
    tokens = renderer.added_tokens
    if thought.closing in tokens:
        closing: Format = {"type": "token", "token": tokens[thought.closing]}
        # Exclude the tokens of calls, because some parsers would read a call within the reasoning.
        calls = (renderer.example(1) or "").rpartition(thought.closing)[2]
        marks = {id_ for token, id_ in tokens.items() if token in calls}
        without = sorted({*marks, tokens[thought.closing], *renderer.end_tokens})
        free: Format = {"type": "any_tokens", "exclude_tokens": without}
    else:
        closing = {"type": "const_string", "value": thought.closing}
        free = {"type": "any_text", "excludes": [thought.closing]}
    return [*literal(thought.opening, tokens), free, closing]


def _ids(prompt: bytes) -> list[int]:
    ids: list[int] = np.frombuffer(prompt, "<i4").tolist()
    return ids


async def stop_after_call(
    samplings: SamplingCache, prepared: Prepared, renderer: Renderer | None
) -> Prepared:
    """Return sampling values with which a turn ends after its first call.

    Args:
        renderer: the renderer of the conversation. Without a renderer no calls are parsed, so the
            values are returned unchanged.

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
    """Return the token that ends a call, or None if a turn has at most one call.

    Raises:
        InvalidRequest: the format has no token whose only use is to end a call.
    """
    one, two = renderer.example(1), renderer.example(2)
    if one is None or two is None or two.count("add") < 2:
        return None
    same = [a == b for a, b in zip(one, two, strict=False)]
    call = one[: same.index(False) if False in same else len(same)]
    call = call[call.find("add") :]
    tokens = renderer.added_tokens
    longest_first = sorted(tokens, key=len, reverse=True)
    marks = re.findall("|".join(map(re.escape, longest_first)), call) if tokens else []
    # The last special token must not also separate arguments, or be before the last argument.
    if not marks or marks.count(marks[-1]) > 1 or "2" in call[call.rfind(marks[-1]) :]:
        raise InvalidRequest(
            f"parallel_tool_calls=false is not possible with the renderer {renderer.name!r}: no "
            "token of their own ends its calls; tool_choice with the name of a tool makes a "
            "single call"
        )
    return tokens[marks[-1]]
