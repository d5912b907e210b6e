"""The messages between the driver and its fork server, which start and stop worker processes."""

from __future__ import annotations

import msgspec


class Environment(msgspec.Struct, frozen=True, kw_only=True):
    """The versions in an interpreter, as ``sglrl.driver.environment`` prints them in JSON.

    python: the version of Python, for example "3.12".
    sglrl: the version of sglrl.
    sglang: the folder of SGLang's package. Empty if SGLang is not installed.
    torch, nccl: the versions of the packages. Empty if they are not installed.
    """

    python: str
    sglrl: str
    sglang: str
    torch: str = ""
    nccl: str = ""


class ActorSpec(msgspec.Struct, frozen=True, kw_only=True, tag="actor"):
    """The class and the constructor arguments of a plain actor.

    target: the name by which the worker imports the class, as "module:qualname", or "".
    code: the pickled class if ``target`` is "", because the worker cannot import the class. If not,
        it is empty.
    args, frames: the constructor arguments in msgpack, and their raw frames.
    window: the maximum number of calls at the same time.
    """

    target: str
    code: bytes
    args: bytes
    frames: list[bytes]
    window: int


class EngineSpec(msgspec.Struct, frozen=True, kw_only=True, tag="engine"):
    """One tensor-parallel rank of one engine replica.

    rendezvous: a file through which the ranks of this replica find each other.
    threads: the number of CPU threads for torch.
    memory_share: the share of the host's memory that the rank may use on a CPU, from 0 to 1.
    accelerations: the names of the requested accelerations of SGLang. None requests all.
    allow_unknown_sglang: whether to start even if the source of SGLang is unknown.
    keep_weights: whether to give the rank memory that outlives the rank's process.
    kept_weights: the path of this memory, which the fork server sets.
    logit_processors: the names of the logit processors to import, as "module:Class".
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
    """CURVE keys of a connecting process in Z85: the driver's public key and its own key pair."""

    driver: str
    public: str
    secret: str

    def __repr__(self) -> str:
        return f"ClientKeys(driver={self.driver!r}, public={self.public!r})"

    def __rich_repr__(self) -> list[tuple[str, str]]:
        return [("driver", self.driver), ("public", self.public)]


class PoolEntry(msgspec.Struct, frozen=True, kw_only=True):
    """The arguments of ``sglrl.connect`` with which another process connects to a pool."""

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
    """The configuration of one worker process.

    identity, address: the identity of the worker's socket, and the address of the driver's router.
    heartbeat_interval: the seconds between heartbeats. None if the worker sends no heartbeats.
    keys: the keys of the worker. None if connections are not encrypted.
    heartbeat_timeout: the option of ``PoolConfig``.
    returns: whether the worker connects again when its connection breaks. If not, the worker exits.
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
    """Start one worker process.

    key: identifies the worker's process in answers and later messages.
    log: the path of the file for the worker's output.
    sys_path: the driver's ``sys.path``. None keeps the path of the worker's interpreter.
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
    """Check that the fork server runs. The fork server answers with ``Pong``."""


ToForkServer = Fork | Kill | Dump | Ping


class Warm(msgspec.Struct, frozen=True, tag="warm"):
    """The fork server has imported its modules in ``seconds``, or failed with ``error``."""

    seconds: float
    error: str = ""


class Forked(msgspec.Struct, frozen=True, tag="forked"):
    """The worker ``key`` runs as process ``pid``."""

    key: int
    pid: int


class Exited(msgspec.Struct, frozen=True, tag="exited"):
    """The worker ``key`` has exited. ``status`` is its exit code, or minus the signal's number."""

    key: int
    status: int


class Pong(msgspec.Struct, frozen=True, tag="pong"):
    """Answers ``Ping``: the fork server runs."""


FromForkServer = Warm | Forked | Exited | Pong
