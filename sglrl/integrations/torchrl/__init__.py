"""Replacements for TorchRL's SGLang classes, under the same names. Needs the extra ``torchrl``."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .balancer import LoadBalancer as LoadBalancer
    from .kl_reward import KLRewardTransform as KLRewardTransform
    from .pool_transport import SGLangCollectiveTransport as SGLangCollectiveTransport
    from .service import AsyncSGLang as AsyncSGLang
    from .service import RLSGLangEngine as RLSGLangEngine
    from .tensor_names import get_sglang_model_metadata as get_sglang_model_metadata
    from .weights import SGLangWeightReceiver as SGLangWeightReceiver
    from .weights import SGLangWeightSender as SGLangWeightSender
    from .weights import SGLangWeightSyncScheme as SGLangWeightSyncScheme
    from .wrapper import SGLangWrapper as SGLangWrapper

_HOMES = {
    "AsyncSGLang": "service",
    "KLRewardTransform": "kl_reward",
    "LoadBalancer": "balancer",
    "RLSGLangEngine": "service",
    "SGLangCollectiveTransport": "pool_transport",
    "SGLangWeightReceiver": "weights",
    "SGLangWeightSender": "weights",
    "SGLangWeightSyncScheme": "weights",
    "SGLangWrapper": "wrapper",
    "get_sglang_model_metadata": "tensor_names",
}

__all__ = [
    "AsyncSGLang",
    "KLRewardTransform",
    "LoadBalancer",
    "RLSGLangEngine",
    "SGLangCollectiveTransport",
    "SGLangWeightReceiver",
    "SGLangWeightSender",
    "SGLangWeightSyncScheme",
    "SGLangWrapper",
    "get_sglang_model_metadata",
]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
