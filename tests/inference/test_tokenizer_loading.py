"""The tokenizer is loaded at its first use, which is shown if it takes long."""

from __future__ import annotations

import io
import logging
import sys
import threading
from typing import Any

import pytest

import sglrl
from sglrl.inference import slow_stage
from sglrl.inference.tokens import TokenizerBox


class Noticed(io.StringIO):
    """Notices a text that is written."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self._text = text
        self.event = threading.Event()

    def write(self, text: str) -> int:
        written = super().write(text)
        if self._text in self.getvalue():
            self.event.set()
        return written


@pytest.mark.parametrize("progress", [True, False])
async def test_slow_loading_is_shown_once(
    progress: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    stderr, log = Noticed("sglrl: loading the tokenizer ...\n"), Noticed("loading the tokenizer\n")
    handler = logging.StreamHandler(log)
    monkeypatch.setattr(slow_stage.logger, "handlers", [handler])
    caplog.set_level(logging.INFO, logger=slow_stage.logger.name)
    monkeypatch.setattr(slow_stage, "SLOW_SECONDS", 0.0)
    load = TokenizerBox._load

    def slow(box: TokenizerBox) -> Any:
        assert (stderr if progress else log).event.wait(60)
        return load(box)

    monkeypatch.setattr(TokenizerBox, "_load", slow)
    async with sglrl.launch("tiny", engine="fake", progress=progress) as client:
        monkeypatch.setattr(sys, "stderr", stderr)
        for _ in range(2):
            await client.generate("Hi", max_new_tokens=1)
    assert stderr.getvalue() == ("sglrl: loading the tokenizer ...\n" if progress else "")
    assert log.getvalue().count("loading the tokenizer\n") == (not progress)
