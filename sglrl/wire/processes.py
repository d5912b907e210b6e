"""Starting workers: the driver and its fork server, over a private unix socket."""

from __future__ import annotations

import msgspec


class Environment(msgspec.Struct, frozen=True, kw_only=True):
    """What an interpreter has, as ``sglrl.driver.environment`` prints it, in JSON.

    python: its version, as in "3.12".
    sglrl: the version of sglrl.
    sglang: the folder of SGLang's package; empty if SGLang is not installed.
    torch, nccl: versions of the packages; empty if they are not installed.
    """

    python: str
    sglrl: str
    sglang: str
    torch: str = ""
    nccl: str = ""


class ActorSpec(msgspec.Struct, frozen=True, kw_only=True, tag="actor"):
    """A plain actor.

    target: "module:qualname" of its class.
    code: the class by value, if it cannot be imported by name (it is defined in ``__main__`` or in
        a function); else empty.
    args, frames: msgpack of the constructor's arguments, and their raw frames.
    window: the largest number of calls at a time.
    """

    target: str
    code: bytes
    args: bytes
    frames: list[bytes]
    window: int


class EngineSpec(msgspec.Struct, frozen=True, kw_only=True, tag="engine"):
    """One tensor-parallel rank of one engine replica.

    rendezvous: a file through which the ranks of this replica find each other.
    threads: CPU threads for torch.
    memory_share: the share of the host's memory that the rank may use on a CPU, 0..1.
    accelerations: names of the wanted accelerations of SGLang; None: all.
    allow_unknown_sglang: start also on an SGLang whose source is unknown.
    keep_weights: give the rank memory that outlives it.
    kept_weights: the path of this memory, which the fork server fills in.
    logit_processors: the names of the logit processors to import ("module:Class").
    """

    engine: str
    model: str
    args: dict[str, object]
    device: str
    rank: int
    tp_size: int
    gpu_id: int
    rendezvous: str
    threads: int
    memory_share: float
    window: int
    accelerations: tuple[str, ...] | None = None
    allow_unknown_sglang: bool = False
    keep_weights: bool = False
    kept_weights: str = ""
    logit_processors: tuple[str, ...] = ()


class ClientKeys(msgspec.Struct, frozen=True, kw_only=True):
    """CURVE keys of the side that connects, in Z85: the driver's public key and its own pair."""

    driver: str
    public: str
    secret: str

    def __repr__(self) -> str:
        return f"ClientKeys(driver={self.driver!r}, public={self.public!r})"

    def __rich_repr__(self) -> list[tuple[str, str]]:
        return [("driver", self.driver), ("public", self.public)]


class PoolEntry(msgspec.Struct, frozen=True, kw_only=True):
    """How a process connects to a pool. The fields are the arguments of ``sglrl.connect``."""

    address: str
    keys: ClientKeys | None
    insecure: bool
    heartbeat_timeout: float | None
    max_message_bytes: int

    def __repr__(self) -> str:
        # The address and the keys hold secrets.
        return "<PoolEntry>"

    def __rich_repr__(self) -> list[tuple[str, str]]:
        return []


class WorkerSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One worker process.

    identity, address: of its socket, and of the driver's router.
    heartbeat_interval: seconds between heartbeats; None: the worker sends none.
    keys: None if connections are not encrypted.
    heartbeat_timeout: see ``PoolConfig``.
    returns: when its connection breaks, the worker connects again. False: it exits.
    """

    index: int
    identity: bytes
    address: str
    max_message_bytes: int
    body: ActorSpec | EngineSpec
    heartbeat_interval: float | None = None
    keys: ClientKeys | None = None
    heartbeat_timeout: float | None = None
    returns: bool = False


class Fork(msgspec.Struct, frozen=True, kw_only=True, tag="fork"):
    """Fork one worker process.

    key: its name in answers.
    log: the file for its output.
    sys_path: the driver's; None: the worker keeps that of its interpreter.
    """

    key: int
    spec: WorkerSpec
    env: dict[str, str]
    log: str
    cwd: str
    sys_path: list[str] | None


class Kill(msgspec.Struct, frozen=True, tag="kill"):
    """Send SIGKILL to the process group of a worker that has not exited."""

    key: int


class Dump(msgspec.Struct, frozen=True, tag="dump"):
    """Make a worker write the stacks of all its threads to its log."""

    key: int


class Ping(msgspec.Struct, frozen=True, tag="ping"):
    """Check that the fork server runs. Answered with ``Pong``."""


ToForkServer = Fork | Kill | Dump | Ping


class Warm(msgspec.Struct, frozen=True, tag="warm"):
    """The fork server has imported its modules, or failed with ``error``."""

    seconds: float
    error: str = ""


class Forked(msgspec.Struct, frozen=True, tag="forked"):
    """The worker ``key`` runs as process ``pid``."""

    key: int
    pid: int


class Exited(msgspec.Struct, frozen=True, tag="exited"):
    """The worker ``key`` has exited. ``status``: its exit code, or minus a signal's number."""

    key: int
    status: int


class Pong(msgspec.Struct, frozen=True, tag="pong"):
    """The fork server runs."""


FromForkServer = Warm | Forked | Exited | Pong
