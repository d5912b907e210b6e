"""One or more real messages of every type in ``sglrl.wire``."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, get_args

import msgspec
import numpy as np

from sglrl.inference.sampling import SamplingParams
from sglrl.transport.shared_rows import RowsWriter
from sglrl.wire.adapters import LoraCommit, LoraKeep, LoraPart, LoraPrepare
from sglrl.wire.calls import (
    PROTOCOL_VERSION,
    CallMessage,
    Cancel,
    ErrorBody,
    Heartbeat,
    Item,
    ItemKind,
    Load,
    Ready,
    Results,
    ShareRows,
    Shutdown,
    Starting,
    Submit,
    ToDriver,
    ToWorker,
)
from sglrl.wire.codec import Result, encode
from sglrl.wire.engine import (
    EngineInfo,
    GenerateArgs,
    NextTokenArgs,
    RoutedShape,
    ScoreArgs,
    TokenChunk,
)
from sglrl.wire.remote import BytesRead, FromClient, Hello, Leave, Request, Requests
from sglrl.wire.weights import (
    Abort,
    AskChecksums,
    CancelCopy,
    Checksums,
    Commit,
    Committed,
    Describe,
    FromRank,
    Join,
    KeepWeights,
    LiveChecksums,
    ModelDescription,
    PeerCopyOffer,
    Prepare,
    Prepared,
    Propose,
    Proposed,
    RankAnswer,
    RankHello,
    RankSettings,
    ReceivePeerCopy,
    Rejoin,
    RestoreWeights,
    SenderAccepted,
    SenderClosed,
    SendPeerCopy,
    SentStage,
    Shard,
    Stage,
    TensorSpec,
    ToRank,
    Withdraw,
)

SPECS = [TensorSpec("w", "float32", (4,)), TensorSpec("layers.0.v", "bfloat16", (2, 3))]
SETTINGS = RankSettings(
    device="cpu", uuid="", torch="2.9", nccl="", environment={"NCCL_ALGO": "Ring"}, host="h", port=1
)
SAMPLING = SamplingParams(
    top_p=0.9,
    stop="end",
    stop_token_ids=[2],
    stop_regex="e.d",
    logit_bias={3: -1.5},
    token_ids_logprob=[3, 7],
    custom_params={},
).to_wire(6, 7)
TRACE = {"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"}


def raw(value: Any) -> msgspec.Raw:
    return msgspec.Raw(encode(value))


def ids(*tokens: int) -> bytes:
    return np.array(tokens, dtype="<i4").tobytes()


def logprobs(count: int) -> bytes:
    return np.linspace(-1, 0, count, dtype="<f4").tobytes()


ROWS = RowsWriter(4 << 14)
LOAD = Load(0.5, 3, 1, 0.02, 0.01, 40)
ERROR = ErrorBody("WeightUpdateError", "no", "Traceback")
INFO = EngineInfo(
    model="fake",
    architecture="FakeEngine",
    dtype="float32",
    device="cpu",
    vocab_size=1000,
    context_length=64,
    max_prompt_tokens=63,
    max_total_tokens=64,
    eos_token_ids=[2],
    kv_cache_tokens=1000,
    routed_experts=RoutedShape(2, 2, "|u1"),
)
_array, _frames = Result(Any).encode({"a": np.arange(6, dtype="<f4").reshape(2, 3), "b": 1})

ARRAY = (_array, [bytes(frame) for frame in _frames])
"""A msgpack frame with one array, and its raw frame."""


def generate_args(
    prompt: bytes, sampling: Mapping[str, Any] = SAMPLING, **more: Any
) -> msgspec.Raw:
    return raw(GenerateArgs(prompt, raw(sampling), **more))


def to_driver() -> list[list[bytes]]:
    chunk = TokenChunk(ids(1, 2, 3), logprobs(3), "", 5, 1, ids(*range(6)), logprobs(6))
    last = TokenChunk(
        *(ids(4), logprobs(1), "stop", 5, 2, ids(8, 9), logprobs(2), "end", b"", ids(4, 6), ids(2)),
        given_logprobs=logprobs(2),
        hidden_states=logprobs(4),
    )
    body, frames = ARRAY
    messages: list[tuple[Any, list[bytes]]] = [
        (Starting("loading"), []),
        (
            Ready(PROTOCOL_VERSION, os.getpid(), 8, ["generate", "score"], "cpu", INFO, ROWS.offer),
            [],
        ),
        (Results([Item(7, ItemKind.DONE, encode(TokenChunk(b"")), 1)], LOAD, [3]), []),
        (
            Results(
                [Item(1, ItemKind.CHUNK, encode(chunk)), Item(1, ItemKind.DONE, encode(last))], LOAD
            ),
            [],
        ),
        (Results([Item(2, ItemKind.ERROR, encode(ERROR)), Item(3, ItemKind.CANCELLED)]), []),
        (Results([Item(4, ItemKind.DONE, body, 1)]), frames),
        (Results([Item(5, ItemKind.CHUNK, encode(TokenChunk(ids(1), routed=2)), 1)]), [bytes(8)]),
        (
            Results([Item(5, ItemKind.CHUNK, body, 1), Item(6, ItemKind.DONE, encode(True))]),
            frames,
        ),
        (Heartbeat(7, "prefill"), []),
    ]
    return _encoded(messages, ToDriver | Heartbeat)


def from_rank() -> list[list[bytes]]:
    answers = {
        "join": None,
        "prepare": Prepared("full", 1 << 30),
        "stage": SentStage(1.0, 2.0),
        "commit": Committed(0.5),
        "abort": False,
        "describe": ModelDescription(SPECS, ["tied"]),
        "checksums": [Shard("w", 0, (4,), (1,), 99)],
    }
    messages: list[tuple[Any, list[bytes]]] = [
        (RankHello(SETTINGS), []),
        *((RankAnswer(1, phase, None, raw(body)), []) for phase, body in answers.items()),
        (RankAnswer(1, "stage", ERROR), []),
        (Propose(1, SPECS, None, "continue", "auto", False, 1 << 20, 60.0, True), []),
        (Propose(2, SPECS[:1], 9, "drain", "full", True, 1, 0.5, False, 9.0, 0.25), []),
        (Withdraw(1), []),
        (SenderClosed(), []),
        (AskChecksums(3, ["w"], 1.0), []),
    ]
    return _encoded(messages, FromRank)


LORA_TENSOR = TensorSpec("base_model.model.q_proj.lora_A.weight", "float32", (1, 2))


def to_worker() -> list[list[bytes]]:
    body, frames = ARRAY
    prompt = ids(3, 1, 4)
    messages: list[tuple[Any, list[bytes]]] = [
        (ShareRows(), []),
        (Submit([CallMessage(1, "generate", generate_args(prompt))]), []),
        (
            Submit(
                [
                    CallMessage(2, "generate", generate_args(prompt, logprobs=True, stream=True)),
                    CallMessage(3, "generate", generate_args(prompt, resume=ids(3, 1))),
                    CallMessage(4, "score", raw(ScoreArgs(prompt, 1, 2))),
                    CallMessage(11, "next_token_logprobs", raw(NextTokenArgs(prompt))),
                    CallMessage(12, "next_token_logprobs", raw(NextTokenArgs(prompt, 2))),
                ]
            ),
            [],
        ),
        (
            Submit(
                [
                    CallMessage(13, "lora_part", raw(LoraPart(1, [LORA_TENSOR])), 1),
                    CallMessage(14, "lora_prepare", raw(LoraPrepare(1, 2, 0.5))),
                    CallMessage(15, "lora_commit", raw(LoraCommit(1, "a", 0))),
                    CallMessage(16, "lora_keep", raw(LoraKeep([1, 2]))),
                ]
            ),
            [b"\0" * 8],
        ),
        (Submit([CallMessage(5, "stats", raw([])), CallMessage(6, "flush_cache", raw([]))]), []),
        (Submit([CallMessage(7, "echo", raw([msgspec.Raw(body)]), 1)]), frames),
        (
            Submit(
                [
                    CallMessage(8, "count", raw([5]), 0, TRACE),
                    CallMessage(
                        9, "sum_up", raw([msgspec.Raw(_arrays(0)), msgspec.Raw(_arrays(1))]), 2
                    ),
                    CallMessage(10, "join_bytes", raw([0, ["a", "b"]]), 1),
                ]
            ),
            [*frames * 2, b"payload"],
        ),
        (Cancel([1, 2, 3]), []),
        (Shutdown(), []),
    ]
    return _encoded(messages, ToWorker)


def from_client() -> list[list[bytes]]:
    args = generate_args(ids(3, 1, 4))
    messages: list[tuple[Any, list[bytes]]] = [
        (Hello(PROTOCOL_VERSION), []),
        (
            Requests([Request(1, "generate", args), Request(2, "generate", args, 9.0, 3, 1, "s")]),
            [],
        ),
        (
            Requests(
                [
                    Request(3, "generate", generate_args(ids(3, 1), resume=ids(3), stream=True)),
                    Request(4, "score", raw(ScoreArgs(ids(3, 1, 4), 1)), 1e-9),
                    Request(9, "generate", args, None, 0, None, None, 2),
                    Request(5, "next_token_logprobs", raw(NextTokenArgs(ids(3), 2))),
                ]
            ),
            [],
        ),
        (
            Requests(
                [
                    Request(6, "wait_until_full", raw([1.0])),
                    Request(7, "describe", raw([1.0])),
                    Request(8, "checksums", raw([["w"], 1.0])),
                ]
            ),
            [],
        ),
        (Cancel([1, 2, 6]), []),
        (BytesRead(1), []),
        (Leave(), []),
    ]
    return _encoded(messages, FromClient)


def _arrays(frame: int) -> bytes:
    header = encode((frame, "<f4", (2, 3)))
    return encode(msgspec.msgpack.Ext(1, header))


def to_rank() -> list[list[bytes]]:
    messages: list[tuple[Any, list[bytes]]] = [
        (Describe(1), []),
        (Join(2, 1, "127.0.0.1", 1, 1, 2, -1, 0, 1.0), []),
        (Join(3, 1, "127.0.0.1", 1, -1, 2, 0, 1, 1.0), []),
        (Prepare(4, 1, SPECS, 1 << 20, "auto", "continue", False, ""), []),
        (Prepare(5, 2, SPECS, 64, "bucketed", "drain", True, "/no/such/folder"), []),
        (Prepare(6, 3, [], 1 << 20, "auto", "continue", False, "", 4, False), []),
        (Stage(4, "full"), []),
        (Commit(4), []),
        (Abort(5, True), []),
        (Checksums(6, ["w"]), []),
        (Proposed(7, ERROR), []),
        (Proposed(8, None, raw({"version": 1})), []),
        (SenderAccepted(1, SPECS, ["tied"]), []),
        (SendPeerCopy(9, 1.0), []),
        (ReceivePeerCopy(10, 1, PeerCopyOffer("127.0.0.1", 1, "digest"), 1.0), []),
        (CancelCopy(), []),
        (Rejoin(7), []),
        (KeepWeights(11, 1), []),
        (RestoreWeights(12, 1, 1.0), []),
        (LiveChecksums(13, [Shard("w", 0, (4,), (1,), 99)]), []),
        (LiveChecksums(14, error=ERROR), []),
    ]
    return _encoded(messages, ToRank)


def _encoded(messages: list[tuple[Any, list[bytes]]], union: Any) -> list[list[bytes]]:
    missing = set(get_args(union)) - {type(message) for message, _ in messages}
    assert not missing, f"there is no sample of {missing}"
    return [[encode(message), *frames] for message, frames in messages]
