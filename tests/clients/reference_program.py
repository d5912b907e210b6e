"""Make a model, and compute what its engine should sample with: logprobs by transformers.

It runs in the environment that has torch, SGLang's grammars and the chat templates: the
environments of the client libraries have none of them. It takes the folder of the model. On each
line of stdin is a JSON object with one conversation (``Asked``). It answers with a line: the
logprobs of the sampled tokens of each turn, or the text of an error.
"""

from __future__ import annotations

import json
import sys
import traceback
from pathlib import Path
from typing import Any

import msgspec
import torch
import xgrammar
from engine.reference import Reference
from sessions.families import FAMILIES, family_tokenizer

from sglrl.gateway.app import DIALECTS
from sglrl.gateway.dialect import TurnRequest
from sglrl.inference.engine_grammar import engine_grammar
from sglrl.inference.renderer import find_renderer
from sglrl.inference.sampling import from_kwargs
from sglrl.inference.tokens import TokenizerBox
from sglrl.inference.turn_grammar import turn_format
from sglrl.launching.tiny_model import make_model

CONTEXT = 32_768
"""The prompts of agents are long, and have about one token for each character."""


class AskedTurn(msgspec.Struct, frozen=True):
    """One turn: ``ids[start:stop]`` of its conversation, and the request that it answers."""

    start: int
    stop: int
    path: str
    body: dict[str, Any]


class Asked(msgspec.Struct, frozen=True):
    """One conversation."""

    ids: list[int]
    turns: list[AskedTurn]


class Sampler:
    """What the engine adds to the model's logits, for any request."""

    def __init__(self, folder: Path) -> None:
        self._reference = Reference(folder)
        self._box = TokenizerBox(str(folder))
        tokenizer = self._reference.tokenizer
        self._size = self._reference.model.config.vocab_size
        info = xgrammar.TokenizerInfo.from_huggingface(
            tokenizer, vocab_size=self._size, stop_token_ids=[tokenizer.eos_token_id]
        )
        self._compiler = xgrammar.GrammarCompiler(info)

    def logprobs(self, asked: Asked) -> list[list[float]]:
        logits = self._reference.logits(asked.ids)
        return [
            self._of_turn(logits[turn.start - 1 : turn.stop - 1], turn, asked.ids)
            for turn in asked.turns
        ]

    def _of_turn(self, logits: torch.Tensor, turn: AskedTurn, ids: list[int]) -> list[float]:
        (dialect,) = (one for one in DIALECTS if one.path == turn.path)
        (request,) = dialect.parse(json.dumps(turn.body).encode()).turns()
        sampling = dict(request.sampling)
        bias = torch.zeros(self._size)
        for token, value in sampling.get("logit_bias", {}).items():
            bias[int(token)] = value
        grammar = self._grammar(request, ids[: turn.start])
        matcher = None if grammar is None else xgrammar.GrammarMatcher(grammar)
        mask = xgrammar.allocate_token_bitmask(1, self._size)
        found = []
        sampled = ids[turn.start : turn.stop]
        for row, token in zip(logits, sampled, strict=True):
            row = (row + bias)[None]
            if matcher is not None:
                matcher.fill_next_token_bitmask(mask)
                xgrammar.apply_token_bitmask_inplace(row, mask)
            row /= sampling.get("temperature", 1.0)
            found.append(float(torch.log_softmax(row[0], dim=-1)[token]))
            assert matcher is None or matcher.accept_token(token)
        return found

    def _grammar(self, request: TurnRequest, prompt: list[int]) -> Any:
        params, choice = from_kwargs(dict(request.sampling)), request.tool_choice
        if not params.grammars and choice in ("auto", None):
            return None
        template = {**(request.chat_template_kwargs or {}), "tools": list(request.tools or ())}
        renderer = find_renderer(None, self._box, template)
        assert renderer is not None
        # A prompt that is text or tokens has no tool choice, and its grammar begins at once.
        form = None if choice is None else turn_format(renderer, prompt, choice, params)
        if form is not None:
            name, given = "structural_tag", json.dumps({"type": "structural_tag", "format": form})
        else:
            (name,) = params.grammars
            value = getattr(params, name)
            given = value if isinstance(value, str) else json.dumps(value)
        # The engine is started without any white space in JSON.
        name, text = engine_grammar(name, given, spaces=False)
        if name == "regex":
            return self._compiler.compile_regex(text)
        if name == "ebnf":
            return self._compiler.compile_grammar(text)
        return self._compiler.compile_structural_tag(text)


def main() -> None:
    folder = Path(sys.argv[1])
    make_model(folder, context_length=CONTEXT)
    family_tokenizer(folder, FAMILIES["qwen3"])
    print(flush=True)
    sampler = Sampler(folder)
    for line in sys.stdin:
        found: Any
        try:
            found = sampler.logprobs(msgspec.json.decode(line, type=Asked))
        except Exception:
            found = traceback.format_exc()
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
