"""Every struct that crosses a process boundary, in a union for each direction: ``ToWorker`` and
``ToDriver``; of weight updates ``ToRank`` and ``FromRank``; of clients in other processes
``ToClient`` and ``FromClient``; ``ToForkServer``, ``FromForkServer``.
``Beat`` has a socket of its own.

A message is one msgpack frame, optionally followed by raw frames that hold the large binary
arguments (numpy arrays, bytes) of its calls or items, in order; ``frames`` of each call or item
says how many are its own.

Rules: append fields with defaults, never retype; hot structs are ``array_like`` and ``gc=False``;
this module holds structs (and how ranks are addressed) only. (``Request`` is a tuple, which takes
less time to read; one with more fields is another ``PROTOCOL_VERSION``.)
"""

from __future__ import annotations

from typing import Final, NamedTuple

import msgspec

PROTOCOL_VERSION = 5


class CallMessage(msgspec.Struct, array_like=True, gc=False, frozen=True):
    """One call for an endpoint. ``args`` is the msgpack of the endpoint's argument struct."""

    id: int
    endpoint: str
    args: msgspec.Raw
    frames: int = 0


class Submit(msgspec.Struct, array_like=True, gc=False, frozen=True, tag=1):
    """Calls that one loop tick of the driver made for this worker: all, or some of many."""

    calls: list[CallMessage]


class Cancel(msgspec.Struct, array_like=True, gc=False, frozen=True, tag=2):
    """Stop these calls. Each is still answered, once: ``ItemKind.CANCELLED``, or its result."""

    ids: list[int]


class Shutdown(msgspec.Struct, array_like=True, gc=False, frozen=True, tag=3):
    """End the process. Calls still running are dropped; the driver has answered their callers."""


class ShareRows(msgspec.Struct, array_like=True, gc=False, frozen=True, tag=4):
    """The driver has opened what ``Ready.rows`` offers: rows may be there from now on."""


ToWorker = Submit | Cancel | Shutdown | ShareRows


class ItemKind:
    """What an item of ``Results`` is to its call. All but ``CHUNK`` end the call.

    Plain integers: to name a member of an ``IntEnum`` takes Python 3.11 longer than to decode an
    item."""

    CHUNK: Final = 0
    DONE: Final = 1
    ERROR: Final = 2
    CANCELLED: Final = 3
    FAILED: Final = 4
    """To a client in another process: an error of the driver itself (``ErrorBody``)."""


class Item(msgspec.Struct, array_like=True, gc=False, frozen=True):
    """One event in one call's life. ``body`` is msgpack of the endpoint's result type
    (``ErrorBody`` when kind is ERROR)."""

    id: int
    kind: int
    body: bytes = b"\xc0"
    frames: int = 0


class ErrorBody(msgspec.Struct, array_like=True, gc=False, frozen=True):
    kind: str
    message: str
    traceback: str = ""


class Results(msgspec.Struct, array_like=True, gc=False, frozen=True, tag=11):
    """Everything one scheduler step (or one loop tick of a plain actor) produced; or nothing, and
    how full the engine is.

    ``kv_usage`` is the share of the KV cache in use, 0..1, as the engine reports it, or -1: then
    the other two say nothing either. ``waiting``: requests that it has not begun to compute.
    ``preempted``: requests it took out of its KV cache again since it started, for want of room.
    ``slots``: of shared memory (``net/rows.py``), in which the raw frames are instead.
    """

    items: list[Item]
    kv_usage: float = -1.0
    waiting: int = 0
    preempted: int = 0
    slots: list[int] = []


class Starting(msgspec.Struct, array_like=True, gc=False, frozen=True, tag=12):
    """The first message of a worker: which stage of its start it is in (shown to the user)."""

    stage: str


class EngineInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What the driver must know of a loaded model to check requests before it sends them."""

    model: str
    architecture: str
    dtype: str
    device: str
    vocab_size: int
    context_length: int
    max_prompt_tokens: int
    max_total_tokens: int
    eos_token_ids: list[int]
    kv_cache_tokens: int
    priority_scheduling: bool = False
    sglang_version: str = ""
    tp_size: int = 1


class RowsOffer(msgspec.Struct, array_like=True, gc=False, frozen=True):
    """Memory that a worker would share: its file descriptor there, and bytes of a row. See
    ``net/rows.py``."""

    fd: int
    row_bytes: int


class Ready(msgspec.Struct, array_like=True, frozen=True, tag=13):
    """The worker serves from now on. Nothing is sent to it before this."""

    protocol: int
    pid: int
    window: int
    endpoints: list[str]
    device: str = "cpu"
    engine: EngineInfo | None = None
    rows: RowsOffer | None = None


ToDriver = Results | Starting | Ready


# --- a client in another process <-> the driver ---------------------------------------------------


class Approach(msgspec.Struct, array_like=True, frozen=True, tag=60):
    """The first message of a client in another process; answered with ``Admitted``.
    ``max_message_bytes``: the largest frame that it takes."""

    protocol: int
    max_message_bytes: int = 256 << 20


class Request(NamedTuple):
    """One call that it makes, of an engine or of the pool as a whole. ``args`` as in
    ``CallMessage``. ``timeout``: seconds that are left. ``conversation``: a number of the client's
    for one of which it is a turn; -1: of none."""

    id: int
    endpoint: str
    args: msgspec.Raw
    timeout: float | None = None
    priority: int = 0
    worker: int | None = None
    session: str | None = None
    conversation: int = -1


class Requests(msgspec.Struct, array_like=True, gc=False, frozen=True, tag=61):
    """All calls that one loop tick of the client made. (``Cancel`` takes them back.)"""

    requests: list[Request]


class Leave(msgspec.Struct, array_like=True, frozen=True, tag=62):
    """It is closed."""


class ReadSoFar(msgspec.Struct, array_like=True, gc=False, frozen=True, tag=66):
    """Reports ``bytes``: the size of all frames that the client has read since it connected. The
    driver holds back a client's calls while too many bytes are unread."""

    bytes: int


FromClient = Approach | Requests | Cancel | Leave | ReadSoFar


class WorkerNews(msgspec.Struct, array_like=True, gc=False, frozen=True):
    """One worker: see ``pool.WorkerInfo`` and ``Results``."""

    id: int
    pid: int
    state: str
    weight_version: int
    device: str
    load: int
    window: int
    kv_usage: float
    waiting: int
    preempted: int


class News(msgspec.Struct, array_like=True, gc=False, frozen=True):
    """How the pool is. ``version``: of the weights. ``queued``: calls that wait at the driver.
    ``queued_bytes``: bytes that they hold. ``queued_clients``: clients whose calls they are."""

    version: int
    queued: int
    workers: list[WorkerNews]
    queued_bytes: int = 0
    queued_clients: int = 0


class Admitted(msgspec.Struct, array_like=True, frozen=True, tag=63):
    """The client may make calls, of at most ``max_message_bytes``. ``max_queue``: calls that may
    wait at the driver, of all clients."""

    protocol: int
    model: str
    max_message_bytes: int
    weights_address: str
    engine: EngineInfo
    news: News
    max_queue: int = 100_000


class Answer(Item, array_like=True, gc=False, frozen=True):
    """An item of one of its calls, and of one that ends: on which worker it was (-1: on none), how
    many it has had, and after how many seconds it was sent to the last and heard of again (0:
    never)."""

    worker: int = -1
    attempts: int = 0
    queued: float = 0.0
    first: float = 0.0


class Answers(msgspec.Struct, array_like=True, gc=False, frozen=True, tag=64):
    """What the client's calls have come to. Those of ``again`` begin again on another worker,
    before anything that the items say."""

    items: list[Answer]
    again: list[int]
    news: News | None = None


class Dismissed(msgspec.Struct, array_like=True, frozen=True, tag=65):
    """The client is not known, or no longer: its calls have come to nothing."""

    reason: str


ToClient = Admitted | Answers | Dismissed


# --- beats: a thread of every worker -> driver ----------------------------------------------------


class Beat(msgspec.Struct, array_like=True, gc=False, frozen=True, tag=50):
    """``progress`` counts what the worker's loop has done; ``phase`` says why it may stand still,
    as ``core.hangs`` names it, or is empty."""

    progress: int
    phase: str = ""


def beat_identity(worker: bytes) -> bytes:
    """Under which a worker's beats are known to the driver's router."""
    return worker + b"/beat"


# --- endpoints of the engine worker ---------------------------------------------------------------


class Sampling(msgspec.Struct, array_like=True, gc=False, frozen=True):
    """Validated sampling values (see ``sglrl.sampling.SamplingParams`` for units and defaults)."""

    max_new_tokens: int
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    stop: tuple[str, ...]
    stop_token_ids: tuple[int, ...]
    min_new_tokens: int
    frequency_penalty: float
    presence_penalty: float
    repetition_penalty: float
    ignore_eos: bool
    seed: int | None
    json_schema: str | None
    regex: str | None
    ebnf: str | None
    skip_special_tokens: bool
    stop_regex: tuple[str, ...] = ()
    logit_bias: dict[int, float] = {}
    structural_tag: str | None = None


class GenerateArgs(msgspec.Struct, array_like=True, gc=False, frozen=True):
    """``input_ids``: int32 little-endian. ``sampling``: msgpack of ``Sampling``, encoded once per
    distinct value by the client. ``resume``: int32, what another worker has generated already; it
    counts in every limit, and is not sent back."""

    input_ids: bytes
    sampling: msgspec.Raw
    logprobs: bool = False
    top_logprobs: int = 0
    stream: bool = False
    priority: int = 0
    resume: bytes = b""


class TokenChunk(msgspec.Struct, array_like=True, gc=False, frozen=True):
    """New tokens of one call since its last chunk.

    ids: int32 [t]. logprobs: float32 [t] or empty. top_ids, top_logprobs: int32, float32 [t, k].
    ``version``: of the weights that all of them were sampled with. ``finish`` is empty until the
    last chunk, then "stop", "length" or "abort".

    The answer to ``ScoreArgs`` has logprobs without ids. ``parts``: int32 [p, 2], of each part that
    one version computed the number of logprobs and the version; empty if ``version`` computed all.
    """

    ids: bytes
    logprobs: bytes = b""
    finish: str = ""
    cached_tokens: int = 0
    version: int = 0
    top_ids: bytes = b""
    top_logprobs: bytes = b""
    stop_match: str | int | None = None
    parts: bytes = b""


class ScoreArgs(msgspec.Struct, array_like=True, gc=False, frozen=True):
    """Logprobs wanted of the tokens of ``input_ids`` (int32) from position ``start`` on, and of the
    ``top_logprobs`` likeliest at each of these positions. Answered with a ``TokenChunk``."""

    input_ids: bytes
    start: int = 0
    top_logprobs: int = 0
    priority: int = 0


class NextTokenArgs(msgspec.Struct, array_like=True, gc=False, frozen=True):
    """The distribution of the token behind ``input_ids`` (int32): the ``top_k`` likeliest tokens;
    0: all. Answered with a ``TokenChunk`` that has ``top_ids`` and ``top_logprobs`` of one
    position, or has none and is followed by one raw frame, float32 [vocab_size]."""

    input_ids: bytes
    top_k: int = 0
    priority: int = 0


class PauseArgs(msgspec.Struct, array_like=True, frozen=True):
    """``mode``: "in_place", "retract" or "abort"; see ``Client.pause``."""

    mode: str


class EngineStats(msgspec.Struct, frozen=True, kw_only=True):
    """What one engine reports of itself. Rates are over the time since it was ready.

    running, waiting: requests. kv_tokens, kv_capacity: tokens. kv_usage: 0..1.
    prompt_tokens, cached_tokens, generated_tokens: totals. uptime: seconds.
    """

    running: int
    waiting: int
    kv_tokens: int
    kv_capacity: int
    prompt_tokens: int
    cached_tokens: int
    generated_tokens: int
    uptime: float
    tokens_per_second: float

    @property
    def kv_usage(self) -> float:
        return self.kv_tokens / self.kv_capacity if self.kv_capacity else 0.0

    @property
    def cache_hit_rate(self) -> float:
        """Prompt tokens served from the prefix cache, as a share of all prompt tokens."""
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else 0.0


# --- weight updates: driver <-> every rank of every worker, and a sender in another process -------


class TensorSpec(msgspec.Struct, array_like=True, gc=False, frozen=True):
    """One tensor by its Hugging Face name. ``dtype`` as torch prints it, without "torch."."""

    name: str
    dtype: str
    shape: tuple[int, ...]


class RankSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What one process has, of which some must agree before they may form a group.

    device: "cpu" or "cuda". uuid: of the GPU, "" on CPU. host: where its group's store can be
    reached. port: of that store; 0 in a worker, which has none. environment: NCCL's own variables.
    """

    device: str
    uuid: str
    torch: str
    nccl: str
    environment: dict[str, str]
    host: str = ""
    port: int = 0


class Describe(msgspec.Struct, array_like=True, frozen=True, tag=20):
    """Ask a rank for its ``ModelDescription``."""

    id: int


class Join(msgspec.Struct, array_like=True, frozen=True, tag=21):
    """Form group ``group`` over the store at ``host:port``.

    A member on the sender's own GPU is no rank (``rank`` is -1) but one of ``readers`` that read
    the sender's memory, as number ``reader``.
    """

    id: int
    group: int
    host: str
    port: int
    rank: int
    size: int
    reader: int
    readers: int
    timeout: float


class Prepare(msgspec.Struct, array_like=True, frozen=True, tag=22):
    """Check the manifest and make room. ``source``: a folder of safetensors files instead of the
    group, or "". ``mode``: "auto", "full" or "bucketed". ``like``: the id of this rank's last
    ``Prepare``, whose tensors these are: then they are left out. 0: they are here.
    ``check_finite``: refuse files that hold NaN or infinite values."""

    id: int
    version: int
    tensors: list[TensorSpec]
    bucket_bytes: int
    mode: str
    inflight: str
    partial: bool
    source: str
    like: int = 0
    check_finite: bool = True


class Stage(msgspec.Struct, array_like=True, frozen=True, tag=23):
    """Send, or receive, the buckets. ``mode``: "full" or "bucketed". Of a worker, what all of its
    ranks have room for; of the sender, "bucketed" if some worker overwrites its live weights."""

    id: int
    mode: str = ""


class Commit(msgspec.Struct, array_like=True, frozen=True, tag=24):
    """Every rank of every worker has all of it: make it live between two steps."""

    id: int


class Abort(msgspec.Struct, array_like=True, frozen=True, tag=25):
    """Forget the update, and leave the group if it may be broken."""

    id: int
    leave: bool


class Checksums(msgspec.Struct, array_like=True, frozen=True, tag=26):
    """Ask for the checksums of these tensors' live pieces (all of them if empty)."""

    id: int
    names: list[str]


class Proposed(msgspec.Struct, array_like=True, frozen=True, tag=27):
    """To a sender in another process: its update ended. ``report`` is msgpack of the report."""

    id: int
    error: ErrorBody | None
    report: msgspec.Raw = msgspec.Raw(b"\xc0")


class Welcome(msgspec.Struct, array_like=True, frozen=True, tag=28):
    """To a sender in another process: what the engines take (see ``ModelDescription``), and the
    version they have."""

    version: int
    tensors: list[TensorSpec]
    ignored: list[str]
    tied: dict[str, str] = {}


class Offer(msgspec.Struct, array_like=True, frozen=True):
    """Where a rank's store listens, and a digest of what it gives: names, dtypes and shapes."""

    host: str
    port: int
    digest: str


class Give(msgspec.Struct, array_like=True, frozen=True, tag=29):
    """Offer your live weights to one rank of another worker. Answered with ``Offer``."""

    id: int
    timeout: float


class Take(msgspec.Struct, array_like=True, frozen=True, tag=30):
    """Get the live weights, of ``version``, from the rank that made this offer."""

    id: int
    version: int
    offer: Offer
    timeout: float


class GiveUp(msgspec.Struct, array_like=True, frozen=True, tag=31):
    """What ``Give`` or ``Take`` began is not wanted any more."""


ToRank = (
    Describe
    | Join
    | Prepare
    | Stage
    | Commit
    | Abort
    | Checksums
    | Proposed
    | Welcome
    | Give
    | Take
    | GiveUp
)


class RankHello(msgspec.Struct, array_like=True, frozen=True, tag=40):
    """The first message of a rank, or of a sender in another process; of the latter also later,
    to see whether the client is there: it says ``Welcome`` again."""

    settings: RankSettings


class RankAnswer(msgspec.Struct, array_like=True, frozen=True, tag=41):
    """The end of what message ``id`` asked for in ``phase``. ``body``: msgpack, by phase."""

    id: int
    phase: str
    error: ErrorBody | None = None
    body: msgspec.Raw = msgspec.Raw(b"\xc0")


class Propose(msgspec.Struct, array_like=True, frozen=True, tag=42):
    """A sender in another process wants to update every worker. ``waited``: seconds that have
    passed of ``timeout`` since its caller called."""

    id: int
    tensors: list[TensorSpec]
    version: int | None
    inflight: str
    mode: str
    partial: bool
    bucket_bytes: int
    timeout: float
    wait: bool
    drain_timeout: float = 600.0
    waited: float = 0.0


class Withdraw(msgspec.Struct, array_like=True, frozen=True, tag=43):
    """That sender no longer wants its update. It is told the end of it all the same."""

    id: int


class Farewell(msgspec.Struct, array_like=True, frozen=True, tag=44):
    """A sender in another process is closed."""


FromRank = RankHello | RankAnswer | Propose | Withdraw | Farewell


def rank_identity(worker: bytes, rank: int) -> bytes:
    """Under which a rank's end of the weight channel is known to the driver's router."""
    return worker + b"/%d" % rank


class ModelDescription(msgspec.Struct, array_like=True, frozen=True):
    """Every tensor that the loaded model takes, with the dtype it is kept in; and names that belong
    to the architecture and are not kept. ``tied``: of these, the ones of which the model keeps
    another tensor in its place, and which one."""

    tensors: list[TensorSpec]
    ignored: list[str]
    tied: dict[str, str] = {}


class Prepared(msgspec.Struct, array_like=True, frozen=True):
    """mode: "full" or "bucketed". room: bytes that were free for staging."""

    mode: str
    room: int


class SentStage(msgspec.Struct, array_like=True, frozen=True):
    """Of the sender: milliseconds of gathering and casting, and from the first bucket's broadcast
    to the last one's end."""

    gather_ms: float
    broadcast_ms: float


class Committed(msgspec.Struct, array_like=True, frozen=True):
    """pause_ms: for how long no step could run."""

    pause_ms: float


class Piece(msgspec.Struct, array_like=True, frozen=True):
    """A part of a named tensor that one rank keeps: in elements, as ``torch.as_strided`` takes it,
    of the whole contiguous tensor."""

    name: str
    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    checksum: int


# --- starting workers: driver <-> fork server, over a private unix socket -------------------------


class ActorSpec(msgspec.Struct, frozen=True, kw_only=True, tag="actor"):
    """A plain actor. ``target`` is "module:qualname"; a class that cannot be imported by name
    (defined in ``__main__`` or in a function) travels in ``code`` instead, by value."""

    target: str
    code: bytes
    args: bytes
    frames: list[bytes]
    window: int


class EngineSpec(msgspec.Struct, frozen=True, kw_only=True, tag="engine"):
    """One tensor-parallel rank of one engine replica. ``threads``: CPU threads for torch.
    ``memory_share``: what share of the host's memory it may plan with, on CPU. ``rendezvous``: a
    file by which the ranks of the replica find each other, and nobody else."""

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


class ClientKeys(msgspec.Struct, frozen=True, kw_only=True):
    """What an end that connects needs for CURVE, in Z85: the driver's public key, its own pair."""

    driver: str
    public: str
    secret: str

    def __repr__(self) -> str:
        return f"ClientKeys(driver={self.driver!r}, public={self.public!r})"

    def __rich_repr__(self) -> list[tuple[str, str]]:
        return [("driver", self.driver), ("public", self.public)]


class WorkerSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker process is told at birth. ``beat_interval``: seconds; None: it need not.
    ``keys``: None where connections are plain. ``heartbeat_timeout``: see ``PoolConfig``."""

    index: int
    identity: bytes
    address: str
    max_message_bytes: int
    body: ActorSpec | EngineSpec
    beat_interval: float | None = None
    keys: ClientKeys | None = None
    heartbeat_timeout: float | None = None


class Fork(msgspec.Struct, frozen=True, kw_only=True, tag="fork"):
    """Fork one worker process. ``key`` names it in the answers; ``log`` takes its output."""

    key: int
    spec: WorkerSpec
    env: dict[str, str]
    log: str
    cwd: str
    sys_path: list[str]


class Kill(msgspec.Struct, frozen=True, tag="kill"):
    """SIGKILL the process group of a worker, unless it has ended already."""

    key: int


class Dump(msgspec.Struct, frozen=True, tag="dump"):
    """Have a worker write the stacks of all its threads to its log."""

    key: int


class Ping(msgspec.Struct, frozen=True, tag="ping"):
    """Asks whether the fork server runs; answered with ``Pong``."""


ToForkServer = Fork | Kill | Dump | Ping


class Warm(msgspec.Struct, frozen=True, tag="warm"):
    """What had to be imported first is imported, or failed with ``error``."""

    seconds: float
    error: str = ""


class Forked(msgspec.Struct, frozen=True, tag="forked"):
    key: int
    pid: int


class Exited(msgspec.Struct, frozen=True, tag="exited"):
    """``status``: the exit code, or minus the signal that ended the process."""

    key: int
    status: int


class Pong(msgspec.Struct, frozen=True, tag="pong"):
    """The fork server runs."""


FromForkServer = Warm | Forked | Exited | Pong
