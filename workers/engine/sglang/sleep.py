"""Free the GPU or host memory of one rank while its engine sleeps.

The KV cache is in memory of torch_memory_saver (https://github.com/fzyzcjy/torch_memory_saver), as
in SGLang's own server. The weights are in ``double_buffer.Pages``. Both keep their addresses, so
CUDA graphs stay valid.
"""

from __future__ import annotations

from typing import Any

import torch

from sglrl.errors import EngineError

from . import compat
from .commands import SleepCommand
from .model_weights import ModelWeights


class Sleep:
    """The sleep state of one rank.

    Args:
        enabled: whether the engine was launched with ``enable_memory_saver=True``.

    Attributes:
        asleep: the members of ``SLEEP_TAGS`` whose memory is freed now.
        empty: whether the weights were not kept, and no update has sent new ones since.
    """

    def __init__(self, scheduler: Any, weights: ModelWeights, *, enabled: bool) -> None:
        self._scheduler = scheduler
        self._weights = weights
        self._enabled = enabled
        self._kv_bytes = 0
        self.asleep: set[str] = set()
        self.empty = False

    @property
    def possible(self) -> tuple[str, ...]:
        """The members of ``SLEEP_TAGS`` whose memory this engine can free."""
        if not self._enabled:
            return ()
        return ("kv_cache", "weights") if self._weights.pages is not None else ("kv_cache",)

    @property
    def stops(self) -> bool:
        """Whether the engine can make no steps."""
        return bool(self.asleep) or self.empty

    def change(self, command: SleepCommand) -> None:
        """Free memory, or allocate it again. No request may run.

        Raises:
            EngineError: the GPU or the host has too little memory. ``asleep`` still has exactly the
                tags whose memory is freed.
        """
        wanted = set(command.asleep)
        if not wanted <= set(self.possible):
            raise EngineError(f"this engine cannot give back {sorted(wanted)}")
        new = wanted - self.asleep
        if "kv_cache" in new:
            compat.clear_kv_cache(self._scheduler)
            self._release_kv_cache()
            self.asleep.add("kv_cache")
        if "weights" in new:
            self._weights.release_memory(keep=command.keep_weights)
            self.empty |= not command.keep_weights
            self.asleep.add("weights")
        if new:
            self._weights.drop_spare()
            if self._weights.device.type == "cuda":
                torch.cuda.empty_cache()
        # Restore the weights first, so that an update can arrive before the KV cache returns.
        if "weights" in self.asleep - wanted:
            self._weights.restore_memory()
            self.asleep.remove("weights")
        if "kv_cache" in self.asleep - wanted:
            self._restore_kv_cache()
            self.asleep.remove("kv_cache")

    def _release_kv_cache(self) -> None:
        if self._weights.device.type == "cuda":
            torch.cuda.synchronize(self._weights.device)
            before: int = torch.cuda.mem_get_info()[0]
            self._scheduler.memory_saver_adapter.pause("kv_cache")
            self._kv_bytes = torch.cuda.mem_get_info()[0] - before
            return
        from . import cpu

        cache = self._scheduler.token_to_kv_pool_allocator.get_kvcache()
        # The kernel allocates this memory again on first use.
        cpu.discard([*cache.k_buffer, *cache.v_buffer])

    def _restore_kv_cache(self) -> None:
        if self._weights.device.type == "cuda":
            torch.cuda.empty_cache()
            free: int = torch.cuda.mem_get_info()[0]
            # Check this first, because ``resume`` would end the process if memory is short.
            if free < self._kv_bytes:
                raise EngineError(
                    f"the KV cache takes {self._kv_bytes:,} bytes of the GPU, and {free:,} are free"
                )
        self._scheduler.memory_saver_adapter.resume("kv_cache")


def enable_memory_saver() -> None:
    """Let SGLang allocate its KV cache with torch_memory_saver. Call this before the allocation.

    SGLang's own server preloads a library that replaces ``cudaMalloc``. A forked process cannot do
    this, so torch_memory_saver uses an allocator of PyTorch instead.
    """
    from torch_memory_saver import torch_memory_saver

    torch_memory_saver.hook_mode = "torch"
