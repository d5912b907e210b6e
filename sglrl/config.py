"""The version, frozen and keyword-only settings, and the environment variables of sglrl."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping
from importlib.util import find_spec
from inspect import isawaitable
from numbers import Real
from pathlib import Path
from typing import Any, Final, Literal

import msgspec
from msgspec.structs import force_setattr

from .errors import UsageError

__version__ = "0.3.0"

LOCAL_MODELS: Final = {"tiny": 60.0, "smollm2": 1800.0}
"""The models that sglrl makes, so that they need no hub. The values are the maximum seconds in
which another process makes them. "smollm2" may be downloaded."""
ROUTING_STRATEGIES = ("prefix-aware", "requests", "kv-cache", "round-robin")


MIN_UNREAD_BYTES: Final = 4 << 20
"""Minimum of ``max_unread_bytes``. A remote client reports its progress each time it has read a
fourth of this number of bytes. Bytes that it has read but not reported never reach the limit."""
DROPPED_AT: Final = 4
"""A client is dropped at this multiple of ``FabricConfig.max_unread_bytes``."""


class FabricConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Limits and policy of one pool.

    Attributes:
        routing: strategies in order of preference. The first strategy that names a worker is used.
        max_queue: maximum number of calls that wait in the driver. A further call raises
            ``Overloaded``.
        max_queue_bytes: maximum bytes of the waiting calls: token ids, raw arguments and raw
            frames. A call that would exceed the limit raises ``Overloaded``.
        max_calls_per_client: maximum number of waiting calls of one client (the pool's own client,
            or a client in another process). A further call raises ``Overloaded`` in this client.
            None: ``max_queue``.
        max_unread_bytes: maximum bytes of answers that a client in another process has not read.
            At the limit, further calls of the client wait. Running calls continue. With answers
            that are rows or scores, the unread bytes may reach twice this size. With generations,
            they may reach more. At ``DROPPED_AT`` times the larger of this size and
            ``max_message_bytes``, the client is dropped and its calls end.
        max_attempts: an idempotent call fails when it has lost this many workers without a chunk
            in between, because the call may be the cause of the losses. Choose a number that
            unrelated losses do not reach.
        overload: a worker counts as overloaded for prefix affinity when it holds more than
            ``overload`` times the mean load plus ``overload_slack`` calls.
        overload_slack: see ``overload``.
        prefix_block: tokens per block of the driver's prefix index.
        prefix_entries: maximum number of prompt prefixes in the index. The least recently used
            prefixes are removed first.
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
            ("max_unread_bytes", MIN_UNREAD_BYTES),
        ):
            value = getattr(self, name)
            if name == "max_calls_per_client" and value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < low:
                raise UsageError(f"{name} must be an integer of at least {low:,}, got {value!r}")


_LONGEST: Final = 1e9
"""Maximum timeout in seconds. Event loops do not support much longer timeouts."""


def strategies(routing: Any) -> tuple[str, ...]:
    """Return the routing strategies as a tuple. ``FabricConfig`` checks their names.

    Args:
        routing: one strategy, or several in order of preference.

    Raises:
        UsageError: ``routing`` is neither text nor a list nor a tuple.
    """
    if isinstance(routing, str):
        return (routing,)
    if not isinstance(routing, (tuple, list)):
        raise UsageError(f"routing must be a list of strategies, got {routing!r}")
    return tuple(routing)


HEARTBEAT_TIMEOUT: Final = 30.0
"""Default of ``heartbeat_timeout`` in seconds."""
_LONGEST_HEARTBEAT: Final = 1e6
"""Maximum ``heartbeat_timeout`` in seconds. ZeroMQ counts milliseconds in 32 bits."""
MIN_MESSAGE_BYTES: Final = 16 << 10
"""Minimum of ``max_message_bytes``. A fourth of this number is reserved in every message for the
parts that are not the call."""


class PoolConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Settings for starting and connecting the workers of a pool. Times are in seconds.

    Attributes:
        address: "ipc" (a private folder, the default), "tcp" for the loopback interface, or
            "tcp://HOST:PORT".
        keys: a folder that ``sglrl keys`` created. Required for addresses beyond loopback, unless
            ``insecure`` is set.
        insecure: allow addresses beyond loopback without keys.
        start_timeout: maximum time to start the pool, or to start further workers.
        shutdown_timeout: time that a worker has to exit before it is killed.
        max_message_bytes: size of the largest frame that either side accepts.
        restarts: maximum number of replacements of one worker within ``restart_period``. A worker
            that exceeds it is retired.
        restart_period: see ``restarts``.
        hang_timeout: maximum time without progress of a worker that holds calls. None: no limit.
        heartbeat_timeout: time without incoming data after which a TCP connection counts as broken.
            None: no heartbeats.
        log_dir: folder that keeps the logs of all workers. None: only failed workers' logs stay.
        keep_weights: which hosts keep the current weights in memory for replacements. "auto": one
            host, while only one worker has these weights. "host": each host with workers. None: no
            host.
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
    log_dir: str | None = None
    keep_weights: Literal["auto", "host"] | None = None

    def __post_init__(self) -> None:
        timeout: object = self.hang_timeout
        number = isinstance(timeout, (int, float)) and not isinstance(timeout, bool)
        if timeout is not None and not (number and self.hang_timeout > 0):  # type: ignore[operator]
            raise UsageError(f"hang_timeout must be more than 0 seconds, or None; got {timeout!r}")
        if self.hang_timeout is not None:
            # The timeout is sent to workers, and msgpack cannot encode numpy's numbers.
            force_setattr(self, "hang_timeout", float(self.hang_timeout))
        force_setattr(self, "heartbeat_timeout", check_heartbeat(self.heartbeat_timeout))
        check_timeout(self.start_timeout, "start_timeout")
        restarts: object = self.restarts
        if isinstance(restarts, bool) or not isinstance(restarts, int) or restarts < 0:
            raise UsageError(f"restarts must be an integer of at least 0, got {restarts!r}")
        check_timeout(self.restart_period, "restart_period")
        if not self.restart_period:
            raise UsageError(
                f"restart_period must be more than 0 seconds, got {self.restart_period!r}"
            )
        size: object = self.max_message_bytes
        if isinstance(size, bool) or not isinstance(size, int) or size < MIN_MESSAGE_BYTES:
            raise UsageError(
                f"max_message_bytes must be an integer of at least {MIN_MESSAGE_BYTES:,}, got "
                f"{size!r}"
            )


ACCELERATIONS: Final = (
    "cpu_attention",
    "gpu_sampling",
    "parameter_arena",
    "shared_prefix",
    "decode_results",
    "short_prefill",
    "queries",
)
"""The accelerations of SGLang. ``workers/engine/sglang/patch_list.py`` declares them."""


def check_accelerations(value: Any) -> tuple[str, ...] | None:
    """Return the names of the wanted accelerations of SGLang, or None for all of them.

    Args:
        value: a list of names, False for none, or True for the names in ``$SGLRL_ACCELERATIONS``
            ("none", or names separated by commas). Without this variable, True means all.

    Raises:
        UsageError: a name is unknown.
    """
    if value is True:
        given = os.environ.get("SGLRL_ACCELERATIONS")
        if given is None:
            return None
        value = () if given == "none" else [name.strip() for name in given.split(",")]
    if value is False:
        return ()
    if not isinstance(value, (list, tuple)):
        raise UsageError(f"accelerations must be True, False or a list of names, got {value!r}")
    for name in value:
        if name not in ACCELERATIONS:
            known = ", ".join(ACCELERATIONS)
            raise UsageError(f"{name!r} is not an acceleration; known: {known}")
    return tuple(value)


def shows_progress(value: bool | None) -> bool:
    """Return whether to show the start of workers.

    Args:
        value: True or False. None: True, unless ``$SGLRL_PROGRESS`` is "0".
    """
    if value is None:
        return os.environ.get("SGLRL_PROGRESS") != "0"
    return flag("progress", value)


def flag(name: str, value: Any) -> bool:
    """Return the value of an argument that must be True or False.

    Raises:
        UsageError: the value is neither.
    """
    if not isinstance(value, bool):
        raise UsageError(f"{name} must be True or False, got {value!r:.200}")
    return value


def check_weight_device(device: Any) -> None:
    """Check the device from which weights are to be sent. torch need not be installed.

    Raises:
        UsageError: the device is neither the CPU nor a GPU.
    """
    if device is not None and not re.fullmatch(r"(cpu|cuda)(:\d+)?", str(device)):
        raise UsageError(f"weight_device must be 'cpu', 'cuda' or 'cuda:N', got {device!r:.200}")


def torchrl_environment() -> dict[str, str]:
    """Return all set environment variables that configure TorchRL's SGLang classes."""
    return {k: v for k, v in os.environ.items() if k.startswith("TORCHRL_SGLANG_")}


def traces_setup() -> str:
    """Return ``$SGLRL_TRACES``, the function that sets OpenTelemetry's provider, or ""."""
    return os.environ.get("SGLRL_TRACES", "")


def cache_dir() -> Path:
    """Return the folder for sglrl's models and logs: ``$SGLRL_CACHE``, else in the user's cache."""
    explicit = os.environ.get("SGLRL_CACHE")
    if explicit:
        return Path(explicit)
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "sglrl"


def visible_cuda_devices() -> list[str] | None:
    """Return the entries of ``CUDA_VISIBLE_DEVICES``, or None if it is not set."""
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
    """Return the NCCL variables of this process that must be equal in all members of a group."""
    return {name: os.environ[name] for name in _NCCL_MUST_AGREE if name in os.environ}


def check_timeout(timeout: Any, name: str = "timeout") -> float | None:
    """Return a timeout as Python's own float, or None.

    Raises:
        UsageError: the timeout is neither a number of seconds of at least 0 nor None.
    """
    if timeout is None:
        return None
    number = isinstance(timeout, (int, float, Real)) and not isinstance(timeout, bool)
    # The comparison is also false for NaN.
    if not (number and timeout >= 0):
        raise UsageError(
            f"{name} must be a number of seconds from 0 on, or None for no limit; got {timeout!r}"
        )
    if timeout > _LONGEST and timeout != math.inf:
        raise UsageError(f"{name} is longer than {_LONGEST:g} seconds; None is for no limit")
    return float(timeout)


def check_heartbeat(timeout: Any) -> float | None:
    """Return ``heartbeat_timeout`` as Python's own float, or None.

    Raises:
        UsageError: the timeout is neither a number of seconds above 0 nor None.
    """
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
    """Return the priority, worker and session of a call as Python's own integers and text.

    Raises:
        UsageError: a value cannot be used for a call.
    """
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


def type_of(value: Any) -> str:
    """Return the name of a value's type for an error, with a hint if it was not awaited."""
    name = type(value).__name__
    return f"{name}: an 'await' is missing" if isawaitable(value) else name


def is_text(text: str) -> bool:
    """Return whether the text can be encoded as UTF-8: it has no lone surrogate."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def path_of(name: str, given: Any) -> str | None:
    """Return a path as text, or None. Raise ``UsageError`` if ``given`` is neither."""
    if given is None:
        return None
    if not isinstance(given, (str, os.PathLike)) or not isinstance(path := os.fspath(given), str):
        raise UsageError(f"{name} must be a path, got {given!r:.80}")
    return path


def check_env(env: Any) -> dict[str, str]:
    """Return environment variables as a dictionary.

    Raises:
        UsageError: a name or a value cannot be used for an environment variable.
    """
    if env is not None and not isinstance(env, Mapping):
        raise UsageError(f"env maps names to texts, got {env!r:.80}")
    variables = dict(env or {})
    for name, value in variables.items():
        if not isinstance(name, str) or not isinstance(value, str):
            raise UsageError(f"env maps names to texts, got {name!r}: {value!r}")
        if not name or "=" in name or "\0" in name + value or not is_text(name + value):
            raise UsageError(f"env: there can be no variable {name!a} with value {value!a}")
    return variables


def positive(name: str, value: Any) -> int:
    """Return ``value``. Raise ``UsageError`` unless it is an integer above 0."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise UsageError(f"{name} must be an integer of at least 1, got {value!r}")
    return value


def install(extra: str) -> str:
    """Return the command that installs a missing extra, for an error message.

    In a clone, or an editable installation of a clone, the command installs from the clone's
    folder. Otherwise it installs the published package.
    """
    folder = Path(__file__).resolve().parents[1]
    if (folder / "pyproject.toml").is_file():
        return f"pip install -e '.[{extra}]' in {folder}"
    return f"pip install 'sglrl[{extra}]'"


class GatewayOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How the gateway treats parts of requests that it cannot show to the model.

    Attributes:
        unsupported_tools: treatment of tools that a provider's servers define or run (web search,
            code execution, MCP servers). "reject": the request is an error. "omit": the model does
            not see these tools, and a warning names each of them once.
        later_system: treatment of system messages after the first message. "keep": the chat
            template writes them where they are; if it cannot, the request is an error. "user":
            system messages directly after the first message are joined to it, and the others become
            user messages. "merge": all are joined to the first message. A new system message in the
            middle of a conversation then begins a branch.

    Raises:
        UsageError: an option has any other value.
    """

    unsupported_tools: str = "reject"
    later_system: str = "keep"

    def __post_init__(self) -> None:
        for name, known in (
            ("unsupported_tools", ("reject", "omit")),
            ("later_system", ("keep", "user", "merge")),
        ):
            value = getattr(self, name)
            if value not in known:
                allowed = ", ".join(map(repr, known))
                raise UsageError(f"{name} must be one of {allowed}, got {value!r:.99}")


def check_gateway_packages() -> None:
    """Check that the packages of the extra ``gateway`` are installed.

    Raises:
        UsageError: a package is missing.
    """
    packages = ("httpx", "jinja2", "prometheus_client", "starlette", "transformers", "uvicorn")
    for module in packages:
        if find_spec(module) is None:
            raise UsageError(f"the gateway needs {module}: {install('gateway')}")
