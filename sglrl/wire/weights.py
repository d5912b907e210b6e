"""The messages of weight updates.

The driver exchanges them with every rank of every worker, and with senders in other processes.
"""

from __future__ import annotations

import msgspec

from .calls import ErrorBody


class TensorSpec(msgspec.Struct, array_like=True, gc=False, frozen=True):
    """The Hugging Face name, the dtype (such as "bfloat16") and the shape of one tensor."""

    name: str
    dtype: str
    shape: tuple[int, ...]


class RankSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of one process. Some must be equal in all processes of a group.

    device: "cpu" or "cuda".
    uuid: the UUID of the GPU, or "" on a CPU.
    torch, nccl: the versions of torch and NCCL.
    environment: NCCL's environment variables.
    host, port: the address of the store of the sender's group. In workers, which have no store,
        ``port`` is 0.
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

    A worker on the sender's GPU does not join the group (``rank`` is -1). It reads the sender's
    memory, as reader number ``reader`` of ``readers`` readers.

    On another host, only one rank (the relay) receives from the sender, and passes the tensors on
    to the other ranks in a group of the host. The relay is rank 0 of this local group. The other
    ranks are only in the local group (``rank`` is -1).

    timeout: maximum seconds until every member has joined.
    local_group: the name of the host's local group, or "" if there is none.
    local_rank, local_size: the rank in the local group, and the size of this group.
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
    local_group: str = ""
    local_rank: int = -1
    local_size: int = 0


class Prepare(msgspec.Struct, array_like=True, frozen=True, tag=22):
    """Check the manifest, and allocate memory for the update. The answer is ``Prepared``.

    mode: "auto", "full" or "bucketed".
    source: a folder of safetensors files to read instead of receiving from the group, or "".
    like: 0: ``tensors`` is the manifest. Any other value is the id of this rank's last ``Prepare``:
        ``tensors`` is empty, and the manifest of that ``Prepare`` is used again.
    check_finite: whether to refuse files that contain NaN or infinite values.
    """

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
    """Send or receive the buckets. The sender answers with ``SentStage``.

    mode: "full" or "bucketed". A worker gets the mode for which all of its ranks have memory. The
        sender gets "bucketed" if at least one worker overwrites its live weights.
    """

    id: int
    mode: str = ""


class Commit(msgspec.Struct, array_like=True, frozen=True, tag=24):
    """Make the update live between two steps, after every rank of every worker has staged it."""

    id: int


class Abort(msgspec.Struct, array_like=True, frozen=True, tag=25):
    """Discard the update. With ``leave``, also leave the group, because it may be broken."""

    id: int
    leave: bool


class Checksums(msgspec.Struct, array_like=True, frozen=True, tag=26):
    """Ask for the checksums of live shards of the tensors ``names``, or of all tensors if empty."""

    id: int
    names: list[str]


class Proposed(msgspec.Struct, array_like=True, frozen=True, tag=27):
    """The update of a sender in another process has ended. ``report`` is msgpack of the report."""

    id: int
    error: ErrorBody | None
    report: msgspec.Raw = msgspec.Raw(b"\xc0")


class SenderAccepted(msgspec.Struct, array_like=True, frozen=True, tag=28):
    """The answer to a sender's ``RankHello``: the version and the ``ModelDescription``'s fields."""

    version: int
    tensors: list[TensorSpec]
    ignored: list[str]
    tied: dict[str, str] = {}
    open: bool = False


class PeerCopyOffer(msgspec.Struct, array_like=True, frozen=True):
    """The address of the sending rank's store, and a digest of its tensors' specs."""

    host: str
    port: int
    digest: str


class SendPeerCopy(msgspec.Struct, array_like=True, frozen=True, tag=29):
    """Offer the live weights to one rank of another worker. The answer is ``PeerCopyOffer``."""

    id: int
    timeout: float


class ReceivePeerCopy(msgspec.Struct, array_like=True, frozen=True, tag=30):
    """Receive the live weights of ``version`` from the rank that made ``offer``."""

    id: int
    version: int
    offer: PeerCopyOffer
    timeout: float


class CancelCopy(msgspec.Struct, array_like=True, frozen=True, tag=31):
    """Stop running SendPeerCopy, ReceivePeerCopy, KeepWeights and RestoreWeights requests."""


class Rejoin(msgspec.Struct, array_like=True, frozen=True, tag=32):
    """The connection broke: give up all requests up to this ``id``, and send ``RankHello``."""

    id: int


class KeepWeights(msgspec.Struct, array_like=True, frozen=True, tag=33):
    """Copy the live weights to the memory of the host. The answer is the number of bytes.

    version: the version of the weights.
    """

    id: int
    version: int


class RestoreWeights(msgspec.Struct, array_like=True, frozen=True, tag=34):
    """Load the weights of ``version`` that a process of this rank has kept on this host.

    The answer is True, or False if the weights are not kept there.
    """

    id: int
    version: int
    timeout: float


class LiveChecksums(msgspec.Struct, array_like=True, frozen=True, tag=35):
    """The answer to ``AskChecksums`` with this ``id``: the shards of all ranks."""

    id: int
    shards: list[Shard] = []
    error: ErrorBody | None = None


ToRank = (
    Describe
    | Join
    | Prepare
    | Stage
    | Commit
    | Abort
    | Checksums
    | Proposed
    | SenderAccepted
    | SendPeerCopy
    | ReceivePeerCopy
    | CancelCopy
    | Rejoin
    | KeepWeights
    | RestoreWeights
    | LiveChecksums
)


class RankHello(msgspec.Struct, array_like=True, frozen=True, tag=40):
    """The first message of a rank, or of a sender in another process, on every connection.

    The driver answers a sender with ``SenderAccepted``. A sender sends this message again later to
    find out whether the driver still runs.

    connection: number of connections that the rank had before this one.
    dirty: whether the rank gave up an update after some of its live weights had changed.
    """

    settings: RankSettings
    connection: int = 0
    dirty: bool = False


class RankAnswer(msgspec.Struct, array_like=True, frozen=True, tag=41):
    """The answer to request ``id``. ``body`` is msgpack of a type that ``phase`` determines."""

    id: int
    phase: str
    error: ErrorBody | None = None
    body: msgspec.Raw = msgspec.Raw(b"\xc0")


class Propose(msgspec.Struct, array_like=True, frozen=True, tag=42):
    """A sender in another process requests an update of every worker.

    timeout, drain_timeout: time limits in seconds, see ``Client.update_weights``.
    waited: seconds of ``timeout`` that have passed before this message was sent.
    wait: whether to wait for a running update, instead of failing with ``UpdateInProgress``.
    same_version: see ``UpdateRequest``.
    """

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
    same_version: bool = False


class Withdraw(msgspec.Struct, array_like=True, frozen=True, tag=43):
    """The sender cancels its update ``id``. ``Proposed`` still follows as the answer to it."""

    id: int


class SenderClosed(msgspec.Struct, array_like=True, frozen=True, tag=44):
    """A sender in another process is closed."""


class AskChecksums(msgspec.Struct, array_like=True, frozen=True, tag=45):
    """A sender in another process asks for checksums of live tensors.

    timeout: seconds that the driver may wait for a running update.
    """

    id: int
    names: list[str]
    timeout: float


FromRank = RankHello | RankAnswer | Propose | Withdraw | SenderClosed | AskChecksums


def rank_identity(worker: bytes, rank: int) -> bytes:
    """Return the identity of a rank's weight channel at the driver's router."""
    return worker + b"/%d" % rank


class ModelDescription(msgspec.Struct, array_like=True, frozen=True):
    """The tensors of a loaded model.

    tensors: every tensor that the model loads, with the dtype in which it is kept.
    ignored: names of the architecture's tensors that the model does not keep.
    tied: ignored names for which the model uses another tensor, each with that tensor's name.
    open: whether the tensors are not known yet. The first update of all tensors determines them.
    """

    tensors: list[TensorSpec]
    ignored: list[str]
    tied: dict[str, str] = {}
    open: bool = False


class Prepared(msgspec.Struct, array_like=True, frozen=True):
    """The answer to ``Prepare``.

    mode: "full" or "bucketed".
    room: bytes of free memory for staging.
    """

    mode: str
    room: int


class SentStage(msgspec.Struct, array_like=True, frozen=True):
    """The sender's answer to ``Stage``.

    gather_ms: milliseconds spent on gathering and casting tensors.
    broadcast_ms: milliseconds from the first broadcast to the end of the last one.
    """

    gather_ms: float
    broadcast_ms: float


class Committed(msgspec.Struct, array_like=True, frozen=True):
    """The answer to ``Commit``. No step could run for ``pause_ms`` milliseconds."""

    pause_ms: float


class Shard(msgspec.Struct, array_like=True, frozen=True):
    """The part of a tensor that one rank keeps, and its checksum.

    offset, size, stride: the arguments of ``torch.as_strided`` that return this part of the whole
        contiguous tensor, in elements.
    """

    name: str
    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    checksum: int
