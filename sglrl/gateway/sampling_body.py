"""Sampling fields of request bodies, which follow from the declaration of ``SamplingParams``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar, TypeVar

import msgspec

from ..errors import InvalidRequest
from ..inference.sampling import FIELDS

_Body = TypeVar("_Body", bound="SamplingBody")


class SamplingBody(msgspec.Struct, frozen=True, kw_only=True):
    """A part of a request that has sampling fields. ``sampling_fields`` adds them.

    Attributes:
        dialect: one of ``DIALECTS``.
        clients_names: by our name of a sampling parameter, the fields of the dialect.
    """

    dialect: ClassVar[str] = ""
    clients_names: ClassVar[Mapping[str, tuple[str, ...]]] = {}

    def given_sampling(self, least_tokens: int = 1) -> dict[str, Any]:
        """Return the fields of ``SamplingParams`` that are given.

        Args:
            least_tokens: minimum of ``max_new_tokens``.

        Raises:
            InvalidRequest: two fields of the same meaning differ, or the output is too short.
        """
        sampling = {}
        for name, given in self._given().items():
            first, *others = given.values()
            if any(other != first for other in others):
                raise InvalidRequest(f"{' and '.join(given)} differ: give one of them")
            sampling[name] = first
        limit = sampling.get("max_new_tokens")
        if limit is not None and limit < least_tokens:
            name = self.sampling_names()["max_new_tokens"]
            raise InvalidRequest(f"{name} must be at least {least_tokens}, got {limit}")
        if sampling.get("top_k") == 0 and self.dialect != "sglang":
            # vLLM's clients mean all tokens. SGLang rejects 0.
            sampling["top_k"] = -1
        return sampling

    def sampling_names(self) -> dict[str, str]:
        """Return ``TurnRequest.names``: the fields that are given, or else the first ones."""
        given = self._given()
        return {
            name: [names[0], *given.get(name, ())][-1] for name, names in self.clients_names.items()
        }

    def _given(self) -> dict[str, dict[str, Any]]:
        """Return the given values by our name and by the client's names."""
        found: dict[str, dict[str, Any]] = {}
        for name, names in self.clients_names.items():
            for one in names:
                value = getattr(self, one)
                # An empty list has no effect beside another field of the same meaning.
                if value is not None and (value != [] or len(names) == 1):
                    found.setdefault(name, {})[one] = value
        return found


def sampling_fields(dialect: str) -> Callable[[type[_Body]], type[_Body]]:
    """Add the sampling fields of a dialect to a struct, by which they are decoded and documented.

    They are not attributes that a type checker knows: ``given_sampling`` returns them.
    """
    names = {name: ours for name, field in FIELDS.items() if (ours := field.in_dialect(dialect))}

    def add(body: type[_Body]) -> type[_Body]:
        return msgspec.defstruct(  # type: ignore[return-value]
            body.__name__,
            [(one, FIELDS[name].type | None, None) for name in names for one in names[name]],
            bases=(body,),
            module=body.__module__,
            namespace={"__doc__": body.__doc__, "dialect": dialect, "clients_names": names},
            frozen=True,
            kw_only=True,
        )

    return add
