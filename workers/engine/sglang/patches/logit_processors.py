"""Run custom logit processors, which are named by import path and imported when the engine starts.

SGLang (0.5.17 to 0.5.23) accepts a pickled class in each request. With this patch, a request names
a declared class, and each process has one instance of each class.

With overlap, SGLang samples a token before it has processed the result of the previous step, so a
processor gets a request without its last token. With this patch, sampling waits for the result of
the previous step, as for requests with a grammar.

A processor that raises would end the worker. With this patch, only the request for which it raises
ends, with an error.
"""

from __future__ import annotations

import importlib
import logging
import traceback
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from sglang.srt.model_executor.forward_batch_info import ForwardBatch
from sglang.srt.sampling.custom_logit_processor import CustomLogitProcessor

from sglrl.errors import EngineError
from sglrl.inference.logit_processors import REQUEST_PARAM

from ..patch import Setup

logger = logging.getLogger("sglrl.worker")

_processors: dict[str, Guarded] = {}
"""The processors of this process by name."""


def install(setup: Setup) -> None:
    """Import the declared processors, and let SGLang look them up by their names.

    Raises:
        EngineError: a name cannot be imported, is not a processor, or cannot be instantiated.
    """
    for name in setup.logit_processors:
        _processors[name] = Guarded(name, _load(name))
    CustomLogitProcessor.from_str = staticmethod(_processors.__getitem__)
    init_new = ForwardBatch.init_new.__func__

    def with_late_sampling(cls: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
        made = init_new(cls, batch, *args, **kwargs)
        info = made.sampling_info
        if info is not None and info.has_custom_logit_processor and info.grammars is None:
            # SGLang delays sampling if there is a list of grammars, even an empty list.
            info.grammars = []
        return made

    ForwardBatch.init_new = classmethod(with_late_sampling)


def attach(request: Any) -> None:
    """Make the reference from a request's parameters to the request weak, as in SGLang 0.5.23.

    A reference cycle would keep the request alive until Python's garbage collector runs.
    """
    params = request.sampling_params.custom_params
    if params is not None and REQUEST_PARAM in params:
        params[REQUEST_PARAM] = weakref.proxy(request)


def names() -> tuple[str, ...]:
    """Return the names of the processors that requests may use."""
    return tuple(_processors)


def _load(name: str) -> CustomLogitProcessor:
    module, _, class_ = name.partition(":")
    try:
        processor = getattr(importlib.import_module(module), class_)
    except Exception as error:
        raise EngineError(
            f"the logit processor {name!r} cannot be imported: {_text(error)}"
        ) from error
    if not (isinstance(processor, type) and issubclass(processor, CustomLogitProcessor)):
        raise EngineError(
            f"the logit processor {name!r} is not a subclass of CustomLogitProcessor "
            "(sglang.srt.sampling.custom_logit_processor)"
        )
    try:
        return processor()
    except Exception as error:
        raise EngineError(
            f"the logit processor {name!r} cannot be instantiated: {_text(error)}"
        ) from error


def _text(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


class Guarded:
    """Calls a processor, and marks the requests for which the processor fails.

    A failed row allows no token, so ``undrawable_tokens`` ends its request.
    """

    def __init__(self, name: str, processor: CustomLogitProcessor) -> None:
        self._name = name
        self._processor = processor

    def __call__(self, logits: torch.Tensor, params: Sequence[dict[str, Any]]) -> torch.Tensor:
        """Change the logits, float [n, vocabulary], of n requests.

        A row does not change if its request has ended or is still being prefilled, because the
        sampled token is not used.
        """
        rows = [row for row, own in enumerate(params) if _is_used(own[REQUEST_PARAM])]
        if len(rows) == len(params):
            return self._changed(logits, list(params))
        if rows:
            index = torch.tensor(rows, device=logits.device)
            changed = self._changed(logits[index], [params[row] for row in rows])
            logits.index_copy_(0, index, changed)
        return logits

    def _changed(self, logits: torch.Tensor, params: list[dict[str, Any]]) -> torch.Tensor:
        try:
            # The processor may change its argument before it fails.
            return self._checked(self._processor(logits.clone(), params), logits)
        except Exception as error:
            if len(params) > 1:
                # Find the requests for which the processor fails.
                pairs = zip(logits.split(1), params, strict=True)
                return torch.cat([self._changed(row, [own]) for row, own in pairs])
            request = params[0][REQUEST_PARAM]
            request.sglrl_processor_error = (
                f"the logit processor {self._name!r} failed: {_text(error)}"
            )
            logger.warning("%s\n%s", request.sglrl_processor_error, traceback.format_exc())
            return torch.full_like(logits, -torch.inf)

    @staticmethod
    def _checked(changed: Any, before: torch.Tensor) -> torch.Tensor:
        if not isinstance(changed, torch.Tensor):
            raise TypeError(f"it returned {type(changed).__name__}, not a tensor")
        if changed.shape != before.shape:
            raise ValueError(
                f"it returned shape {[*changed.shape]} for logits of shape {[*before.shape]}"
            )
        return changed.to(before)


def _is_used(request: Any) -> bool:
    """Return whether the token that is sampled next becomes output of the request."""
    return not request.finished() and request.inflight_middle_chunks <= 0
