"""Return the routed experts of each token from the forward pass that first computed the token.

SGLang (0.5.17 to 0.5.23) keeps the experts of each token beside its KV cache, in host memory, and
looks them up when a request ends. If a request was retracted or moved to another worker, SGLang
returns the experts of its second prefill. This module collects the experts of each step together
with the results of the step. Host memory is used only for tokens from the prefix cache.

SGLang's host memory has the type int32, and is pinned, which needs a CUDA driver. This module uses
ordinary memory and a smaller type. SGLang 0.5.17 also copies from a buffer that the next step may
already have overwritten.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from sglang.srt.runtime_context import get_schedule
from sglang.srt.state_capturer.base import BaseHostCache, BaseTopkCapturer
from sglang.srt.state_capturer.routed_experts import (
    RoutedExpertsCapturer,
    get_global_experts_capturer,
)

from sglrl.errors import UsageError
from sglrl.wire.engine import RoutedShape

from .. import compat
from ..patch import Setup
from .undrawable_tokens import await_step

_COUNTS: Final = ("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts")
"""Names under which the configuration of a model may state its number of experts."""
_WIRE: Final = {torch.uint8: "|u1", torch.int16: "<i2"}

_dtype = torch.int16
"""The dtype of all expert ids in this process, which has one model."""


def install(setup: Setup) -> None:
    """Patch SGLang's capturer of routed experts."""
    create = RoutedExpertsCapturer.create

    def checked(*, model: Any, model_config: Any, **kwargs: Any) -> Any:
        global _dtype
        config = model_config.hf_text_config
        if not getattr(config, "num_experts_per_tok", None):
            raise UsageError(
                "enable_return_routed_experts=True needs a mixture of experts, and this model "
                "has none: leave the argument out"
            )
        if (get_schedule().chunked_prefill_size or 0) <= 0:
            # The size of SGLang's buffer is this number of tokens.
            raise UsageError("enable_return_routed_experts=True needs chunked_prefill_size above 0")
        _dtype = smallest_dtype([getattr(config, name, None) for name in _COUNTS])
        return create(model=model, model_config=model_config, **kwargs)

    RoutedExpertsCapturer.create = staticmethod(checked)
    RoutedExpertsCapturer.on_forward_end = _on_forward_end
    BaseHostCache.__init__ = _allocate
    # SGLang's own function (from 0.5.20 on) unregisters pinned memory, which does not exist here.
    BaseHostCache.destroy = _destroy


def smallest_dtype(counts: list[Any]) -> torch.dtype:
    """Return the dtype of expert ids. The first integer in ``counts`` is the number of experts."""
    count = next((count for count in counts if isinstance(count, int)), None)
    return torch.uint8 if count is not None and count <= 256 else torch.int16


def _allocate(
    self: Any, num_tokens: int, num_layers: int, topk_size: int, name: str, device: str = ""
) -> None:
    self.buffer = torch.zeros((num_tokens, num_layers, topk_size), dtype=_dtype, device="cpu")
    self.num_tokens = num_tokens
    self.num_layers = num_layers
    self.topk_size = topk_size
    self.name = name
    self._log_allocation()


def _destroy(self: Any) -> None:
    self.buffer = None


def _on_forward_end(
    self: Any,
    forward_batch: Any,
    can_run_graph: bool,
    cuda_graph_batch: int | None,
    no_copy_to_cpu: bool = False,
) -> Any:
    """Return the experts of a step, even if SGLang would write them to host memory instead."""
    output = BaseTopkCapturer.on_forward_end(
        self, forward_batch, can_run_graph, cuda_graph_batch, no_copy_to_cpu=True
    )
    # Copy the tensors, because the next step overwrites their buffers.
    output.topk = output.topk.to(_dtype)
    output.out_cache_loc = output.out_cache_loc.clone()
    if not no_copy_to_cpu:
        output.map_device_tensors(torch.Tensor.cpu)
    return output


def shape() -> RoutedShape | None:
    """Return the shape of the row of a token, or None if the engine does not capture experts."""
    capturer = get_global_experts_capturer()
    if capturer is None:
        return None
    return RoutedShape(capturer.num_layers, capturer.topk_size, _WIRE[_dtype])


def attach(batch: Any, result: Any) -> None:
    """Record which tokens a launched prefill computes, if the engine captures their experts."""
    captured = getattr(result, "routed_experts_output", None) is not None
    if captured and batch.forward_mode.is_extend():
        result.sglrl_spans = [*zip(batch.prefix_lens, batch.extend_lens, strict=True)]


def collect(scheduler: Any, batch: Any, result: Any) -> None:
    """Write the experts of a step to host memory, and pass them to ``Adapter.routed`` on rank 0.

    Call this before SGLang processes the step.
    """
    output = getattr(result, "routed_experts_output", None)
    if output is None:
        return
    await_step(result)
    output.finalize()
    result.routed_experts_output = None
    adapter = scheduler.sglrl_adapter
    if adapter is None:
        return
    rows, at = output.topk.numpy(), 0
    spans = getattr(result, "sglrl_spans", None)
    for i, request in enumerate(batch.reqs):
        if spans is None:
            begin, count = len(request.origin_input_ids) + len(request.output_ids) - 1, 1
        else:
            begin, count = spans[i]
        own, at = rows[at : at + count], at + count
        # SGLang discards the tokens of finished and retracted requests.
        if not (request.finished() or request.is_retracted):
            adapter.routed(request, begin, own)


def cached(scheduler: Any, request: Any, begin: int, end: int) -> Any:
    """Return a request's rows from ``begin`` to ``end``, shape [end - begin, layers, k].

    The KV cache must contain the tokens of these rows.
    """
    at, pool = compat.pool_index(request), scheduler.req_to_token_pool
    return get_global_experts_capturer().get_topk(at, end + 1, pool, begin).numpy()
