"""Make the sampling fields of request bodies from the declaration of ``SamplingParams``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar, TypeVar

import msgspec

from ..errors import InvalidRequest
from ..inference.sampling import FIELDS

_Body = TypeVar("_Body", bound="SamplingBody")


class SamplingBody(msgspec.Struct, frozen=True, kw_only=True):
    """A part of a request that has sampling fields. The decorator ``sampling_fields`` adds them.

    Attributes:
        dialect: one of ``DIALECTS`` of ``sampling_fields.py``.
        first_names: for each of our names of a sampling parameter, the client's first name.
        other_names: for each of the client's further names of a parameter, our name.
    """

    dialect: ClassVar[str] = ""
    first_names: ClassVar[Mapping[str, str]] = {}
    other_names: ClassVar[Mapping[str, str]] = {}

    def given_sampling(self, min_tokens: int = 1) -> dict[str, Any]:
        """Return the fields of ``SamplingParams`` that the request gives.

        Args:
            min_tokens: the minimum of ``max_new_tokens``.

        Raises:
            InvalidRequest: two names of a parameter have different values, or ``max_new_tokens`` is
                too small.
        """
        sampling = {}
        for ours, name in self.first_names.items():
            value = getattr(self, name)
            if value is not None:
                sampling[ours] = value
        for name, ours in self.other_names.items():
            value = getattr(self, name)
            if value not in (None, []) and sampling.setdefault(ours, value) != value:
                raise InvalidRequest(
                    f"{self.first_names[ours]} and {name} differ: give one of them"
                )
        limit = sampling.get("max_new_tokens")
        if limit is not None and limit < min_tokens:
            name = self.sampling_names()["max_new_tokens"]
            raise InvalidRequest(f"{name} must be at least {min_tokens}, got {limit}")
        if sampling.get("top_k") == 0 and self.dialect != "sglang":
            # To vLLM's clients, 0 means all tokens. SGLang rejects 0.
            sampling["top_k"] = -1
        return sampling

    def sampling_names(self) -> dict[str, str]:
        """Return ``TurnRequest.names``: for each of our names, the name that the client uses."""
        given = {
            ours: name for name, ours in self.other_names.items() if getattr(self, name) is not None
        }
        return {**self.first_names, **given}


def sampling_fields(dialect: str) -> Callable[[type[_Body]], type[_Body]]:
    """Add the sampling fields of a dialect to a struct, so that they are decoded and documented.

    A type checker does not know these attributes, so ``given_sampling`` returns their values.
    """
    names = {name: field.in_dialect(dialect) for name, field in FIELDS.items()}
    namespace = {
        "dialect": dialect,
        "first_names": {ours: clients[0] for ours, clients in names.items() if clients},
        "other_names": {name: ours for ours, clients in names.items() for name in clients[1:]},
    }
    fields = [
        (name, FIELDS[ours].type | None, None)
        for ours, clients in names.items()
        for name in clients
    ]

    def add(body: type[_Body]) -> type[_Body]:
        return msgspec.defstruct(  # type: ignore[return-value]
            body.__name__,
            fields,
            bases=(body,),
            module=body.__module__,
            namespace={"__doc__": body.__doc__, **namespace},
            frozen=True,
            kw_only=True,
        )

    return add
