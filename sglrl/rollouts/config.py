"""The settings of a run, checked before anything starts."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any, Literal

from ..config import GatewayOptions, check_gateway_packages, check_timeout
from ..core.rollout_plan import Plan
from ..core.seeds import MAX_SEED
from ..errors import UsageError
from ..inference.number_checks import check_integer
from ..sessions.options import RolloutSessionKeywords, turn_values
from .agent import Agent
from .dataset import session_arguments
from .group import Group

OnError = Literal["retry", "drop", "raise"]


@dataclass(frozen=True, kw_only=True)
class RolloutConfig:
    """The checked arguments of ``rollout``, whose docstring describes them.

    Attributes:
        session: the arguments of ``Client.session`` for all items, including ``seed``. Sampling
            parameters have the names of the fields of ``SamplingParams``.

    Raises:
        UsageError: an argument is wrong.
    """

    agent: Agent
    dataset: Any
    group_size: int = 1
    concurrency: int | None = None
    batch_size: int | None = None
    max_staleness: int | None = None
    timeout: float | None = None
    on_error: OnError = "retry"
    retries: int = 2
    max_failure_rate: float | None = 0.9
    min_group: int | None = None
    keep: Callable[[Group], bool] | None = None
    open_session: Callable[[Any], Mapping[str, Any]] = session_arguments
    ahead: int | None = None
    processes: int | None = None
    gateway: bool | GatewayOptions = False
    progress: bool | None = None
    state: Mapping[str, Any] | None = None
    seed: int | None = None
    session: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, minimum in (
            ("group_size", 1),
            ("concurrency", 1),
            ("batch_size", 1),
            ("max_staleness", 0),
            ("retries", 0),
            ("min_group", 1),
            ("ahead", 1),
            ("processes", 1),
        ):
            value = getattr(self, name)
            if value is not None and (type(value) is not int or value < minimum):
                raise UsageError(f"{name} must be an integer of at least {minimum}, got {value!r}")
        if self.on_error not in ("retry", "drop", "raise"):
            raise UsageError(f"on_error must be 'retry', 'drop' or 'raise', got {self.on_error!r}")
        if self.max_staleness is not None and self.batch_size is None:
            raise UsageError("max_staleness needs batch_size: the groups of one weight update")
        if self.min_group is not None and self.min_group > self.group_size:
            raise UsageError(
                f"min_group={self.min_group} is more than group_size={self.group_size}"
            )
        if not callable(self.agent):
            raise UsageError(f"agent must be callable, got {self.agent!r}")
        if not isinstance(self.gateway, (bool, GatewayOptions)):
            raise UsageError(
                f"gateway must be a bool or sglrl.GatewayOptions(...), got {self.gateway!r:.99}"
            )
        if self.gateway:
            check_gateway_packages()
        _check_rate(self.max_failure_rate)
        for name in ("keep", "open_session"):
            given = getattr(self, name)
            if not callable(given) and not (name == "keep" and given is None):
                raise UsageError(f"{name} must be callable, got {given!r}")
            if inspect.iscoroutinefunction(given):
                raise UsageError(f"{name} must be a plain function, not async")
        if self.seed is not None:
            check_integer("seed", self.seed, 0, MAX_SEED)
        timeout = check_timeout(self.timeout)
        if timeout == 0:
            raise UsageError(f"timeout must be more than 0 seconds, got {timeout!r}")
        object.__setattr__(self, "timeout", timeout)
        session = turn_values(self.session)
        for name in session:
            if name not in RolloutSessionKeywords.__annotations__:
                known = [*RolloutSessionKeywords.__annotations__, *self.__dataclass_fields__]
                near = get_close_matches(name, known, n=1, cutoff=0.75)
                hint = f"; did you mean {near[0]!r}?" if near else ""
                raise UsageError(f"unknown argument {name!r} of rollout{hint}")
        if self.seed is not None:
            session["seed"] = self.seed
        object.__setattr__(self, "session", session)

    def plan(self) -> Plan:
        """Return the plan of a new run."""
        return Plan(
            group_size=self.group_size,
            min_group=min(2, self.group_size) if self.min_group is None else self.min_group,
            retries=self.retries,
            batch_size=self.batch_size,
            max_staleness=self.max_staleness,
            ahead=self.ahead,
            most_ready=max(64, 2 * (self.batch_size or 1)),
        )


def _check_rate(rate: object) -> None:
    number = isinstance(rate, (int, float)) and not isinstance(rate, bool)
    if rate is not None and not (number and 0 < rate <= 1):  # type: ignore[operator]
        raise UsageError(f"max_failure_rate must be None or in (0, 1], got {rate!r}")
