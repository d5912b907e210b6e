"""Settings, all frozen and keyword-only. The only module that reads environment variables."""

from __future__ import annotations

import math
import os
import resource
from numbers import Real
from pathlib import Path
from typing import Any, Final

import msgspec
from msgspec.structs import force_setattr

from .errors import UsageError

ROUTING_STRATEGIES = ("prefix-aware", "requests", "kv-cache", "round-robin")


LEAST_UNREAD_BYTES: Final = 4 << 20
"""Minimum of ``max_unread_bytes``. A remote client reports each fourth of this that it has read.
So one that reads is never taken for one that does not."""
DROPPED_AT: Final = 4
"""Times ``max_unread_bytes``; see there."""


class FabricConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Limits and policy of one pool.

    Attributes:
        routing: strategies in order of preference; the first that names a worker wins.
        max_queue: calls that may wait at the driver; one more raises ``Overloaded``.
        max_queue_bytes: bytes that these may hold: token ids, raw arguments and raw frames. A call
            that would exceed them raises ``Overloaded``.
        max_calls_per_client: calls of one client (the pool's own, or one in another process) that
            may wait; one more raises ``Overloaded`` there. None: ``max_queue``.
        max_unread_bytes: with as many bytes of unread answers the calls of a client in another
            process wait. The calls that run go on, so that up to twice as many bytes of rows and
            scores come together, and more of generations. With ``DROPPED_AT`` times as many bytes,
            or as ``max_message_bytes`` if that is more, the client is dropped and its calls end.
        max_attempts: how many workers one idempotent call may lose, without a chunk between them,
            before it fails: it may be what kills them. Bad luck alone must not get so far.
        overload: a worker counts as overloaded for prefix affinity when it holds more than
            ``overload`` times the mean load plus ``overload_slack`` calls.
        prefix_block: tokens per block of the driver's prefix index.
        prefix_entries: beginnings of prompts that it remembers (least recently used go first).
    """

    routing: tuple[str, ...] = ("requests",)
    max_queue: int = 100_000
    max_queue_bytes: int = 1 << 30
    max_calls_per_client: int | None = None
    max_unread_bytes: int = 256 << 20
    max_attempts: int = 5
    overload: float = 1.25
    overload_slack: int = 2
    prefix_block: int = 64
    prefix_entries: int = 200_000

    def __post_init__(self) -> None:
        if not self.routing:
            raise UsageError("routing is empty; name at least one strategy")
        for name in self.routing:
            if name not in ROUTING_STRATEGIES:
                raise UsageError(
                    f"unknown routing strategy {name!r}; known: {', '.join(ROUTING_STRATEGIES)}"
                )
        for name, low in (
            ("max_queue", 0),
            ("max_attempts", 1),
            ("overload", 0),
            ("overload_slack", 0),
            ("prefix_block", 1),
            ("prefix_entries", 1),
        ):
            value: object = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not value >= low:
                raise UsageError(f"{name} must be at least {low}, got {value!r}")
        for name, low in (
            ("max_queue_bytes", 0),
            ("max_calls_per_client", 1),
            ("max_unread_bytes", LEAST_UNREAD_BYTES),
        ):
            value = getattr(self, name)
            if name == "max_calls_per_client" and value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < low:
                raise UsageError(f"{name} must be an integer of at least {low:,}, got {value!r}")


_LONGEST: Final = 1e9
"""Seconds: event loops do not know much longer ones."""


def strategies(routing: Any) -> tuple[str, ...]:
    """Of routing, one or several in order. ``UsageError`` if they can be none; ``FabricConfig``
    knows their names."""
    if isinstance(routing, str):
        return (routing,)
    if not isinstance(routing, (tuple, list)):
        raise UsageError(f"routing must be a list of strategies, got {routing!r}")
    return tuple(routing)


HEARTBEAT_TIMEOUT: Final = 30.0
"""Seconds."""
_LONGEST_HEARTBEAT: Final = 1e6
"""Seconds: ZeroMQ counts milliseconds in 32 bits."""
LEAST_MESSAGE_BYTES: Final = 16 << 10
"""Of which a fourth is kept for what a message is beside the call in it."""


class PoolConfig(msgspec.Struct, frozen=True, kw_only=True):
    """How worker processes are reached and started. Times are in seconds.

    Attributes:
        address: "ipc" (a private folder, the default), "tcp" for the loopback interface, or
            "tcp://HOST:PORT".
        keys: a folder that ``sglrl keys`` made; beyond loopback there must be one.
        insecure: or there need not be one.
        start_timeout: from the first fork request to the last ``Ready``.
        shutdown_timeout: how long a worker may take to leave before it is killed.
        max_message_bytes: largest frame either side accepts.
        restarts: replacements of one worker within ``restart_period``, then it is retired.
        hang_timeout: how long a worker may make no progress while it holds calls; None: for ever.
        heartbeat_timeout: a TCP connection on which nothing arrives for this long is broken; None:
            no heartbeats.
    """

    address: str = "ipc"
    keys: str | None = None
    insecure: bool = False
    start_timeout: float = 600.0
    shutdown_timeout: float = 5.0
    max_message_bytes: int = 256 << 20
    restarts: int = 5
    restart_period: float = 60.0
    hang_timeout: float | None = None
    heartbeat_timeout: float | None = HEARTBEAT_TIMEOUT

    def __post_init__(self) -> None:
        timeout: object = self.hang_timeout
        number = isinstance(timeout, (int, float)) and not isinstance(timeout, bool)
        if timeout is not None and not (number and self.hang_timeout > 0):  # type: ignore[operator]
            raise UsageError(f"hang_timeout must be more than 0 seconds, or None; got {timeout!r}")
        if self.hang_timeout is not None:
            # Workers are told of it; a number of numpy's has no encoding.
            force_setattr(self, "hang_timeout", float(self.hang_timeout))
        force_setattr(self, "heartbeat_timeout", check_heartbeat(self.heartbeat_timeout))
        check_timeout(self.start_timeout, "start_timeout")
        size: object = self.max_message_bytes
        if isinstance(size, bool) or not isinstance(size, int) or size < LEAST_MESSAGE_BYTES:
            raise UsageError(
                f"max_message_bytes must be an integer of at least {LEAST_MESSAGE_BYTES:,}, got "
                f"{size!r}"
            )


def cache_dir() -> Path:
    """Where models that sglrl makes itself are kept: ``$SGLRL_CACHE``, else the user's cache."""
    explicit = os.environ.get("SGLRL_CACHE")
    if explicit:
        return Path(explicit)
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "sglrl"


def visible_cuda_devices() -> list[str] | None:
    """The entries of ``CUDA_VISIBLE_DEVICES``, or None when it is not set."""
    value = os.environ.get("CUDA_VISIBLE_DEVICES")
    if value is None:
        return None
    return [part.strip() for part in value.split(",") if part.strip()]


_NCCL_MUST_AGREE = (
    "NCCL_ALGO",
    "NCCL_COLLNET_ENABLE",
    "NCCL_CUMEM_ENABLE",
    "NCCL_CUMEM_HOST_ENABLE",
    "NCCL_IB_DISABLE",
    "NCCL_MAX_CTAS",
    "NCCL_MAX_NCHANNELS",
    "NCCL_MIN_CTAS",
    "NCCL_MIN_NCHANNELS",
    "NCCL_NET",
    "NCCL_NVLS_ENABLE",
    "NCCL_P2P_DISABLE",
    "NCCL_P2P_LEVEL",
    "NCCL_PROTO",
    "NCCL_SHM_DISABLE",
    "NCCL_SOCKET_FAMILY",
)


def nccl_environment() -> dict[str, str]:
    """The variables of NCCL that are set here and must be equal in all processes of a group."""
    return {name: os.environ[name] for name in _NCCL_MUST_AGREE if name in os.environ}


def check_restarts(restarts: Any, period: Any) -> None:
    """Raise ``UsageError`` unless they make sense."""
    if isinstance(restarts, bool) or not isinstance(restarts, int) or restarts < 0:
        raise UsageError(f"restarts must be an integer of at least 0, got {restarts!r}")
    check_timeout(period, "restart_period")
    if not period:
        raise UsageError(f"restart_period must be more than 0 seconds, got {period!r}")


def check_timeout(timeout: Any, name: str = "timeout") -> float | None:
    """The same as Python's own number, or None. Raise ``UsageError`` unless it is a number of
    seconds, which may be 0, or None."""
    if timeout is None:
        return None
    number = isinstance(timeout, (int, float, Real)) and not isinstance(timeout, bool)
    # Of NaN this is not true either.
    if not (number and timeout >= 0):
        raise UsageError(
            f"{name} must be a number of seconds from 0 on, or None for no limit; got {timeout!r}"
        )
    if timeout > _LONGEST and timeout != math.inf:
        raise UsageError(f"{name} is longer than {_LONGEST:g} seconds; None is for no limit")
    return float(timeout)


def check_heartbeat(timeout: Any) -> float | None:
    """``heartbeat_timeout`` as Python's own number, or None. Raise ``UsageError`` unless it is a
    number of seconds above 0, or None."""
    if timeout is None:
        return None
    number = isinstance(timeout, (int, float, Real)) and not isinstance(timeout, bool)
    if not (number and 0 < timeout <= _LONGEST_HEARTBEAT):
        raise UsageError(
            "heartbeat_timeout must be a number of seconds above 0 and up to "
            f"{_LONGEST_HEARTBEAT:,.0f}, or None for no heartbeats; got {timeout!r}"
        )
    return float(timeout)


def check_target(priority: Any, worker: Any, session: Any) -> tuple[int, int | None, str | None]:
    """The same as Python's own integers and text. Raise ``UsageError`` unless these can be a
    call's."""
    if isinstance(priority, bool) or not isinstance(priority, int) or abs(priority) >> 31:
        raise UsageError(f"priority must be an integer of 32 bits, got {priority!r}")
    if worker is not None and (
        isinstance(worker, bool) or not isinstance(worker, int) or abs(worker) >> 31
    ):
        raise UsageError(f"worker must be the id of a worker, an integer; got {worker!r}")
    if session is not None and not (isinstance(session, str) and session and is_text(session)):
        raise UsageError(f"session must be a name, got {session!a}")
    return (
        int(priority),
        None if worker is None else int(worker),
        None if session is None else str(session),
    )


def is_text(text: str) -> bool:
    """It can be encoded: it has no lone surrogate."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def check_env(env: Any) -> dict[str, str]:
    """Environment variables as a dictionary. Raise ``UsageError`` if they can be none."""
    found = dict(env or {})
    for name, value in found.items():
        if not isinstance(name, str) or not isinstance(value, str):
            raise UsageError(f"env maps names to texts, got {name!r}: {value!r}")
        if not name or "=" in name or "\0" in name + value or not is_text(name + value):
            raise UsageError(f"env: there can be no variable {name!a} with value {value!a}")
    return found


def positive(name: str, value: Any) -> int:
    """Raise ``UsageError`` unless it is an integer above 0."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise UsageError(f"{name} must be an integer of at least 1, got {value!r}")
    return value


def open_standard_files() -> None:
    """Those of 0, 1 and 2 that are closed, on nothing: libuv ends a program in which it gets one of
    them for a file of its own."""
    for fd in range(3):
        try:
            os.fstat(fd)
        except OSError:
            # The lowest number that is free, which is this one.
            os.open(os.devnull, os.O_RDWR)


_MOST_FILES: Final = 1 << 16


def raise_file_limit() -> None:
    """Let this process open as many files as it may, up to 65,536: every connection is one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, _MOST_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def install(extra: str) -> str:
    """The command that installs a missing extra, for a message: of the folder of sources that this
    package is in (a clone, or an editable installation of one), else of the package."""
    folder = Path(__file__).resolve().parents[1]
    if (folder / "pyproject.toml").is_file():
        return f"pip install -e '.[{extra}]' in {folder}"
    return f"pip install 'sglrl[{extra}]'"
