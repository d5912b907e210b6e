"""Cache checked sampling parameters together with their encoded forms."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec
import numpy as np

from ..errors import InvalidRequest
from ..wire.codec import encode
from ..wire.engine import EngineInfo
from .logit_processors import check_declared
from .number_checks import max_top_logprobs
from .routed_experts import NO_EXPERTS
from .sampling import NO_HIDDEN_STATES, SamplingParams, from_kwargs, merged


class Prepared:
    """A checked ``SamplingParams`` that encodes each of its wire forms only once."""

    __slots__ = ("_latest", "_latest_tokens", "_wire", "max_new_tokens", "params", "seed")

    def __init__(self, params: SamplingParams) -> None:
        self.params = params
        self.seed = None if params.seed is None else int(params.seed)
        self.max_new_tokens = None if params.max_new_tokens is None else int(params.max_new_tokens)
        self._wire: dict[tuple[int, int | None], msgspec.Raw] = {}
        self._latest = msgspec.Raw()
        self._latest_tokens = -1
        """``max_new_tokens`` in ``_latest``, the latest wire form with the seed of ``params``."""

    def wire(self, max_new_tokens: int, seed: int | None) -> msgspec.Raw:
        own = seed == self.seed
        if own and max_new_tokens == self._latest_tokens:
            return self._latest
        key = (max_new_tokens, seed)
        raw = self._wire.get(key)
        if raw is None:
            if len(self._wire) > 64:
                self._wire.clear()
            raw = self._wire[key] = msgspec.Raw(encode(self.params.to_wire(max_new_tokens, seed)))
        if own:
            self._latest, self._latest_tokens = raw, max_new_tokens
        return raw


_CONSTANT: Final = (int, float, str, bytes, type(None), np.generic, tuple, list, Mapping)


def _constant(value: Any) -> bool:
    """Return whether the check of this value may be cached.

    The checks of mutable objects that compare by identity, such as tensors, are not cached. Lists
    and dicts are assumed not to change after they were given.
    """
    return isinstance(value, _CONSTANT)


class SamplingCache:
    """Checks the sampling arguments of calls. Arguments that were checked before cost one look-up.

    Args:
        vocab_size, hidden_size: the fields of ``EngineInfo``.
        experts: whether the engine can return routed experts.
        processors: the logit processors with which the engine was launched.
    """

    def __init__(
        self,
        vocab_size: int,
        hidden_size: int = 0,
        experts: bool = False,
        processors: Sequence[str] = (),
    ) -> None:
        self._vocab_size = vocab_size
        self._hidden_size = hidden_size
        self._experts = experts
        self._processors = processors
        self._by_kwargs: dict[Any, Prepared] = {}
        self._by_params: dict[int, Prepared] = {}
        self._latest: Prepared | None = None
        self._latest_kwargs: dict[str, Any] = {}

    @classmethod
    def of(cls, info: EngineInfo) -> SamplingCache:
        """Return a cache for an engine."""
        return cls(
            info.vocab_size,
            info.hidden_size,
            info.routed_experts is not None,
            info.logit_processors,
        )

    def prepare(self, params: SamplingParams | None, kwargs: dict[str, Any]) -> Prepared:
        """Check sampling arguments. Keyword arguments override the fields of ``params``.

        Raises:
            InvalidRequest: a name is unknown (the error suggests a similar one), or a value is
                wrong.
        """
        latest = self._latest_kwargs
        if params is None and self._latest is not None and len(kwargs) == len(latest):
            for name, value in kwargs.items():
                if latest.get(name, self) is not value:
                    break
            else:
                # A loop of calls often passes the same objects in each call.
                return self._latest
        if params is not None:
            if not isinstance(params, SamplingParams):
                raise InvalidRequest(
                    f"sampling must be a sglrl.SamplingParams, got {type(params).__name__}"
                )
            if not kwargs:
                prepared = self._by_params.get(id(params))
                if prepared is not None and prepared.params is params:
                    return prepared
            prepared = self.check(merged(params, kwargs) if kwargs else params)
            if not kwargs and all(map(_constant, msgspec.structs.astuple(params))):
                self._bound(self._by_params)[id(params)] = prepared
            return prepared
        try:
            # Include the types: True == 1 and hash(True) == hash(1), but True is not a token count.
            key = (*kwargs.items(), *map(type, kwargs.values()))
            prepared = self._by_kwargs.get(key)
        except TypeError:
            # A value is unhashable (a list or a dict), so the result cannot be cached.
            return self.check(from_kwargs(kwargs))
        if prepared is None:
            prepared = self.check(from_kwargs(kwargs))
            if not all(map(_constant, kwargs.values())):
                return prepared
            self._bound(self._by_kwargs)[key] = prepared
        self._latest, self._latest_kwargs = prepared, dict(kwargs)
        return prepared

    def check(self, params: SamplingParams) -> Prepared:
        """Check that the engine supports parameters that are otherwise valid.

        Raises:
            InvalidRequest: a token is outside the vocabulary, or the engine was launched without a
                feature that the parameters need.
        """
        for name in ("stop_token_ids", "token_ids_logprob", "logit_bias"):
            tokens = getattr(params, name)
            for token in () if tokens is None else tokens:
                if int(token) >= self._vocab_size:
                    raise InvalidRequest(
                        f"{name} holds {token}; the vocabulary has {self._vocab_size} tokens"
                    )
        count, most = len(params.token_ids_logprob), max_top_logprobs(self._vocab_size)
        if count > most:
            raise InvalidRequest(f"token_ids_logprob has {count} token ids; at most {most} can be")
        if params.return_hidden_states and not self._hidden_size:
            raise InvalidRequest(NO_HIDDEN_STATES)
        if params.return_routed_experts and not self._experts:
            raise InvalidRequest(NO_EXPERTS)
        check_declared(params.logit_processor, self._processors)
        return Prepared(params)

    @staticmethod
    def _bound(cache: dict[Any, Prepared]) -> dict[Any, Prepared]:
        if len(cache) >= 1024:
            cache.clear()
        return cache
