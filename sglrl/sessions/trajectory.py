"""Trajectories: the tokens of an agent run, with their policy versions, logprobs and rewards."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from copy import copy
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final

import msgspec
import numpy as np
from msgspec.structs import force_setattr
from numpy.typing import NDArray

from ..core.policy_versions import MODEL
from ..errors import ProtocolError, UsageError
from ..inference.completion import Completion, Decode
from ..inference.display import html, preview
from ..inference.sampling_mask import SamplingMask, mask_from
from .arrays import (
    checked_loras,
    checked_mask,
    checked_rows,
    is_consistent,
    joined_loras,
    joined_masks,
    oldest_of_leaves,
    oldest_of_turns,
    read_only,
)
from .record import Record, record_of_rows, rows_of
from .rewards import Reward, number
from .tensors import Layout, stack
from .turn import TrajectoryTiming, Turn, checked_turns

if TYPE_CHECKING:
    from tensordict import TensorDict


_INT32: Final = np.dtype("<i4")
_FLOAT32: Final = np.dtype("<f4")
_BOOL: Final = np.dtype("?")
_DTYPES: Final = {
    "prompt_ids": _INT32,
    "response_ids": _INT32,
    "loss_mask": _BOOL,
    "logprobs": _FLOAT32,
    "versions": _INT32,
}
_NO_VERSION: Final = (-1).to_bytes(4, "little", signed=True)
_NAN: Final = np.array(np.nan, _FLOAT32).tobytes()


def record_of(trajectory: Trajectory) -> Record:
    """Return the record of a trajectory, for encoding. Its arrays are views, not copies."""
    arrays: list[Any] = [getattr(trajectory, name).data for name in _DTYPES]
    prompt, response, mask, logprobs, versions = arrays
    allowed, loras = trajectory.sampling_mask, trajectory.lora_versions
    rows = trajectory.routed_experts
    return Record(
        prompt,
        response,
        mask,
        logprobs,
        versions,
        trajectory.turns,
        trajectory.timing,
        trajectory.metadata,
        trajectory.messages,
        tuple(map(record_of, trajectory.branches)),
        b"" if allowed is None else allowed.ids.tobytes(),
        None if allowed is None else allowed.lengths.tobytes(),
        None if loras is None else loras.tobytes(),
        None if rows is None else record_of_rows(rows),
    )


class Trajectory(msgspec.Struct, frozen=True, kw_only=True, dict=True, weakref=True, eq=False):
    """One agent run over one prompt, with exact tokens and a mask of the sampled ones.

    The constructor takes arrays or sequences. It checks all properties listed here and raises
    ``UsageError`` if one is violated. The arrays are read-only. ``replace`` makes a changed copy.

    Attributes:
        prompt_ids: int32 [p], at least one token.
        response_ids: int32 [r], all tokens after the prompt: sampled tokens and observations.
        loss_mask: bool [r], True where the policy sampled the token. Always False outside of turns.
        logprobs: float32 [r], the behaviour policy's logprob of each sampled token (see
            ``Completion.logprobs``). NaN where logprobs were not requested, and 0 where
            ``loss_mask`` is False.
        versions: int32 [r], the policy version that sampled the token. -1 where ``loss_mask`` is
            False.
        turns: the turns in order, without overlap.
        timing: see ``TrajectoryTiming``.
        metadata: values of the agent. To save the trajectory, msgpack must be able to encode them.
        messages: the conversation, with the assistant's answers, if the session began with
            messages; otherwise None.
        branches: the other conversations of the same run, in the order in which they ended. A run
            has several conversations if the agent went back or began anew, or if the chat template
            rewrote earlier turns. Each turn is in exactly one of the ``leaves``.
        sampling_mask: the tokens that could be drawn at each position of the response, or None. The
            set is empty where ``loss_mask`` is False, and in turns without
            ``return_sampling_mask``.
        lora_versions: int32 [r], the version of the adapter that sampled the token, or None if no
            turn had an adapter. -1 where ``loss_mask`` is False, and in turns without an adapter.
        routed_experts: the experts that tokens were routed to, uint8 or int16 [n, layers, k], or
            None. Row i belongs to ``input_ids[i]``. The last token has no row, because it was never
            an input of a forward pass. Turns at the end without ``return_routed_experts`` have no
            rows either.
    """

    prompt_ids: NDArray[np.int32]
    response_ids: NDArray[np.int32]
    loss_mask: NDArray[np.bool_]
    logprobs: NDArray[np.float32]
    versions: NDArray[np.int32]
    turns: tuple[Turn, ...] = ()
    timing: TrajectoryTiming = TrajectoryTiming()
    metadata: dict[str, Any] = {}
    messages: list[dict[str, Any]] | None = None
    branches: tuple[Trajectory, ...] = ()
    sampling_mask: SamplingMask | None = None
    lora_versions: NDArray[np.int32] | None = None
    routed_experts: NDArray[Any] | None = None

    def __post_init__(self) -> None:
        for name, dtype in _DTYPES.items():
            force_setattr(self, name, read_only(name, getattr(self, name), dtype))
        if not len(self.prompt_ids):
            raise UsageError("prompt_ids is empty; a trajectory begins with at least one token")
        size = len(self.response_ids)
        for name in ("loss_mask", "logprobs", "versions"):
            if len(getattr(self, name)) != size:
                raise UsageError(
                    f"{name} has {len(getattr(self, name))} positions, response_ids {size}; "
                    "they must agree"
                )
        for name in ("prompt_ids", "response_ids"):
            if (getattr(self, name) < 0).any():
                raise UsageError(f"{name} holds a negative token id")
        sampled = self.loss_mask
        force_setattr(self, "turns", checked_turns(self.turns, sampled))
        if (self.versions[sampled] < 0).any() or (self.versions[~sampled] != -1).any():
            raise UsageError("versions must be >= 0 where loss_mask is True, -1 where it is False")
        if (self.logprobs[~sampled] != 0).any():
            raise UsageError("logprobs must be 0 where loss_mask is False")
        allowed = checked_mask(self.sampling_mask, self.response_ids, sampled)
        force_setattr(self, "sampling_mask", allowed)
        force_setattr(self, "lora_versions", checked_loras(self.lora_versions, sampled))
        rows = checked_rows(self.routed_experts, len(self.prompt_ids) + size)
        force_setattr(self, "routed_experts", rows)
        try:
            timing = TrajectoryTiming(*self.timing)
        except TypeError as error:
            raise UsageError(f"timing is not a TrajectoryTiming: {error}") from None
        fields = timing._asdict().items()
        checked = (number(f"timing.{name}", value) for name, value in fields)
        force_setattr(self, "timing", TrajectoryTiming(*checked))
        if not isinstance(self.metadata, dict):
            raise UsageError(f"metadata must be a dict, not {type(self.metadata).__name__}")
        if self.messages is not None and not isinstance(self.messages, list):
            raise UsageError(f"messages must be a list, not {type(self.messages).__name__}")
        force_setattr(self, "branches", tuple(self.branches))
        if not all(isinstance(branch, Trajectory) for branch in self.branches):
            raise UsageError("branches must be trajectories")
        if any(branch.branches for branch in self.branches):
            raise UsageError("a branch has no branches of its own")

    @classmethod
    def from_turns(
        cls,
        prompt: bytes,
        response: bytes,
        starts: Sequence[int],
        turns: Sequence[Completion],
        rewards: Sequence[tuple[float, tuple[Reward, ...]]],
        *,
        total: float,
        generating: float,
        metadata: dict[str, Any],
        messages: list[dict[str, Any]] | None = None,
        routed: NDArray[Any] | None = None,
    ) -> Trajectory:
        """Make a trajectory from the state of a session, without checks.

        Args:
            prompt, response: the tokens as little-endian int32 bytes.
            starts: for each turn, the position in the response at which its tokens begin.
            turns: the completion of each turn.
            rewards: for each turn, its reward and its named rewards.
            total, generating: as in ``TrajectoryTiming``. The session began ``total`` seconds ago.
            routed: the routed experts of the whole conversation.
        """
        size, prompt_tokens = len(response) // 4, len(prompt) // 4
        marked: list[Turn] = []
        # The pieces of each array, for sampled tokens and for the gaps between them.
        mask: list[bytes] = []
        logprobs: list[bytes] = []
        versions: list[bytes] = []
        version = -1
        word = _NO_VERSION
        at = 0
        ended = turns[0].submitted_at if turns else 0.0
        for start, completion, (reward, named) in zip(starts, turns, rewards, strict=True):
            gap = start - at
            if gap:
                mask.append(bytes(gap))
                logprobs.append(bytes(4 * gap))
                versions.append(_NO_VERSION * gap)
                at = start
            for chunk in completion.chunks:
                new = len(chunk.ids) // 4
                if not new:
                    continue
                if chunk.version != version:
                    version = chunk.version
                    word = version.to_bytes(4, "little")
                mask.append(b"\1" * new)
                logprobs.append(chunk.logprobs if completion.wants_logprobs else _NAN * new)
                versions.append(word * new)
                at += new
            last = completion.chunks[-1]
            marked.append(
                Turn(
                    start=start,
                    stop=at,
                    reward=reward,
                    finish_reason=last.finish,
                    worker=completion.worker,
                    cached_tokens=last.cached_tokens,
                    prompt_tokens=prompt_tokens + start,
                    resumed=completion.resumed,
                    seconds=completion.finished_at - completion.submitted_at,
                    seconds_before=completion.submitted_at - ended,
                    rewards=named,
                    lora=completion.lora or "",
                    waiting=max(0.0, completion.sent_at - completion.submitted_at),
                )
            )
            ended = completion.finished_at
        if size > at:
            mask.append(bytes(size - at))
            logprobs.append(bytes(4 * (size - at)))
            versions.append(_NO_VERSION * (size - at))
        timing = TrajectoryTiming(time.time() - total, total, generating)
        return cls._unchecked(
            prompt,
            response,
            b"".join(mask),
            b"".join(logprobs),
            b"".join(versions),
            tuple(marked),
            timing,
            metadata,
            messages,
            oldest_of_turns(turns),
            joined_masks(size, starts, turns),
            joined_loras(size, starts, turns),
            routed,
        )

    @classmethod
    def from_record(cls, record: Record, oldest: dict[str, int] | None = None) -> Trajectory:
        """Make a trajectory from a record that another process of this run has sent.

        The sender made the record from a valid trajectory, so only the lengths are checked.

        Args:
            oldest: ``oldest_versions`` of the trajectory, if they are known.

        Raises:
            ProtocolError: the lengths of the arrays do not match.
        """
        size = len(record.response_ids)
        sizes = (4 * len(record.loss_mask), len(record.logprobs), len(record.versions))
        lengths = record.mask_lengths
        allowed = None if lengths is None else mask_from(record.mask_ids, lengths)
        loras = record.lora_versions
        try:
            routed = rows_of(record)
        except ValueError as error:
            raise ProtocolError(f"a trajectory with {error}") from None
        if (
            not record.prompt_ids
            or len(record.prompt_ids) % 4
            or sizes != (size, size, size)
            or (allowed is not None and not is_consistent(allowed, size // 4))
            or (loras is not None and len(loras) != size)
            or (routed is not None and 4 * len(routed) > len(record.prompt_ids) + size)
        ):
            raise ProtocolError("a trajectory whose arrays do not belong together")
        return cls._unchecked(
            record.prompt_ids,
            record.response_ids,
            record.loss_mask,
            record.logprobs,
            record.versions,
            record.turns,
            record.timing,
            record.metadata,
            record.messages,
            oldest,
            allowed,
            None if loras is None else np.frombuffer(loras, _INT32),
            routed,
        ).with_branches([cls.from_record(branch) for branch in record.branches])

    @classmethod
    def _unchecked(
        cls,
        prompt: bytes,
        response: bytes,
        mask: bytes,
        logprobs: bytes,
        versions: bytes,
        turns: tuple[Turn, ...],
        timing: TrajectoryTiming,
        metadata: dict[str, Any],
        messages: list[dict[str, Any]] | None,
        oldest: dict[str, int] | None,
        allowed: SamplingMask | None,
        loras: NDArray[np.int32] | None,
        routed: NDArray[Any] | None,
    ) -> Trajectory:
        # Copying a blank instance avoids the checks of the constructor.
        self = copy(_BLANK)
        force_setattr(self, "prompt_ids", np.frombuffer(prompt, _INT32))
        force_setattr(self, "response_ids", np.frombuffer(response, _INT32))
        force_setattr(self, "loss_mask", np.frombuffer(mask, _BOOL))
        force_setattr(self, "logprobs", np.frombuffer(logprobs, _FLOAT32))
        force_setattr(self, "versions", np.frombuffer(versions, _INT32))
        force_setattr(self, "turns", turns)
        force_setattr(self, "timing", timing)
        force_setattr(self, "metadata", metadata)
        force_setattr(self, "messages", messages)
        force_setattr(self, "sampling_mask", allowed)
        force_setattr(self, "lora_versions", loras)
        force_setattr(self, "routed_experts", routed)
        if oldest is not None:
            self.__dict__["oldest_versions"] = oldest
        return self

    def with_branches(self, branches: Sequence[Trajectory]) -> Trajectory:
        """Set the branches. Return the trajectory."""
        if branches:
            force_setattr(self, "branches", tuple(branches))
            self.__dict__.pop("oldest_versions", None)
        return self

    def __repr__(self) -> str:
        text = ""
        with contextlib.suppress(UsageError):
            text = f"{preview(self.text)}, "
        return (
            f"<Trajectory {text}{len(self.prompt_ids)} prompt + {len(self.response_ids)} response "
            f"tokens, {int(self.loss_mask.sum())} of them sampled, {len(self.turns)} turns, "
            f"{f'{len(self.branches)} branches, ' if self.branches else ''}reward={self.reward:g}>"
        )

    def _repr_html_(self) -> str | None:
        spans = [("prompt", self.prompt_ids)]
        at = 0
        for turn in self.turns:
            spans.append(("observed", self.response_ids[at : turn.start]))
            spans.append(("sampled", self.response_ids[turn.start : turn.stop]))
            at = turn.stop
        spans.append(("observed", self.response_ids[at:]))
        try:
            return html(repr(self), [(kind, self._text_of(ids)) for kind, ids in spans])
        except UsageError:
            return None

    @property
    def _decode(self) -> Decode | None:
        """The decoder that the client or ``load`` has set. It is not a field of the struct."""
        decode: Decode | None = self.__dict__.get("decode_with")
        return decode

    @property
    def text(self) -> str:
        """The response as text: sampled tokens and observations, with special tokens.

        Raises:
            UsageError: the trajectory has no tokenizer, for example because it was loaded without
                one. The error is the subclass ``InvalidRequest`` if the model has no usable one.
        """
        return self._text_of(self.response_ids)

    def _text_of(self, ids: NDArray[np.int32]) -> str:
        if self._decode is None:
            raise UsageError(
                "this trajectory has no tokenizer: load it with load(path, tokenizer=...)"
            )
        return self._decode(ids.tolist(), False)

    def replace(self, **changes: Any) -> Trajectory:
        """Return a copy with changed fields. The copy is checked as in the constructor."""
        # Before msgspec 0.21, msgspec.structs.replace does not call __post_init__.
        made = Trajectory(**{**msgspec.structs.asdict(self), **changes})
        return made if self._decode is None else made.with_decode(self._decode)

    def with_decode(self, decode: Decode) -> Trajectory:
        """Set the decoder for ``text``. Return the trajectory."""
        for leaf in (self, *self.branches):
            leaf.__dict__["decode_with"] = decode
        return self

    @property
    def leaves(self) -> tuple[Trajectory, ...]:
        """One trajectory for each conversation of this run: the ``branches``, then this one.

        Leaves have no branches. Each sampled token is in the loss mask of exactly one leaf.
        """
        if not self.branches:
            return (self,)
        # ``copy`` does not copy the decoder, because it is not a field.
        last = copy(self)
        force_setattr(last, "branches", ())
        last.__dict__.pop("oldest_versions", None)
        return (*self.branches, last if self._decode is None else last.with_decode(self._decode))

    @property
    def finish_reason(self) -> str:
        """The finish reason of the last turn, or "" without turns."""
        return self.turns[-1].finish_reason if self.turns else ""

    @property
    def rewards(self) -> NDArray[np.float32]:
        """The reward of each turn, float32 [turns]."""
        return np.array([turn.reward for turn in self.turns], np.float32)

    @property
    def reward(self) -> float:
        """The sum of the rewards of all turns, including the turns of branches."""
        own = sum([turn.reward for turn in self.turns], 0.0)
        return own + sum([branch.reward for branch in self.branches]) if self.branches else own

    @property
    def named_rewards(self) -> dict[str, float]:
        """The sum of the unweighted rewards of each name, including the rewards in branches."""
        totals: dict[str, float] = {}
        for leaf in (*self.branches, self):
            for reward in [reward for turn in leaf.turns for reward in turn.rewards]:
                totals[reward.name] = totals.get(reward.name, 0.0) + reward.value
        return totals

    @property
    def oldest_version(self) -> int:
        """The oldest model version that sampled a token, including branches. -1: none sampled.

        ``oldest_versions`` also has the versions of adapters.
        """
        return self.oldest_versions.get(MODEL, -1)

    @cached_property
    def oldest_versions(self) -> dict[str, int]:
        """``oldest_version`` by adapter name (see ``Turn.lora``), where "" is the model."""
        return oldest_of_leaves([self, *self.branches])

    @property
    def newest_version(self) -> int:
        """The newest model version that sampled a token, including branches. -1: none sampled."""
        return max(int(leaf.versions.max(initial=-1)) for leaf in (self, *self.branches))

    @property
    def sampled_tokens(self) -> int:
        """The number of sampled tokens, including those of branches."""
        return sum(int(leaf.loss_mask.sum()) for leaf in (self, *self.branches))

    @cached_property
    def input_ids(self) -> NDArray[np.int32]:
        """The tokens of the prompt and the response, int32 [p + r], read-only."""
        ids = np.concatenate([self.prompt_ids, self.response_ids])
        ids.flags.writeable = False
        return ids

    def to_tensordict(self, layout: Layout = "padded", **options: Any) -> TensorDict:
        """Return the trajectory as a TensorDict without a batch dimension.

        Tensors have the shape [t] or []. Without options nothing is padded, and both layouts are
        the same. Options, keys and errors are those of ``stack``.

        Raises:
            UsageError: the trajectory has branches. Use ``stack`` or ``leaves`` for these.
        """
        if self.branches:
            raise UsageError("a trajectory with branches has several rows: use stack, or leaves")
        return stack([self], layout, **options)[0]


_BLANK: Final = Trajectory(
    prompt_ids=np.zeros(1, _INT32),
    response_ids=np.zeros(0, _INT32),
    loss_mask=np.zeros(0, _BOOL),
    logprobs=np.zeros(0, _FLOAT32),
    versions=np.zeros(0, _INT32),
)
