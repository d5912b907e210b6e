"""Stack trajectories into a TensorDict, for a trainer or TorchRL's ReplayBuffer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from ..config import install
from ..errors import UsageError
from ..inference.sampling_mask import SamplingMask
from .whole_groups import Given, each_trajectory

if TYPE_CHECKING:
    from tensordict import TensorDict

Layout = Literal["padded", "jagged"]
PaddingSide = Literal["right", "left"]

_PADDING: Final[dict[str, float]] = {
    "attention_mask": False,
    "loss_mask": False,
    "logprobs": 0.0,
    "versions": -1,
    "turn_ids": -1,
    "rewards": 0.0,
    "mask_lengths": 0,
    "lora_versions": -1,
}
"""The padding by key. ``input_ids`` and ``routed_experts`` have other padding; see ``stack``."""


class TrajectoryArrays(Protocol):
    """The parts of ``Trajectory`` that become tensors."""

    @property
    def leaves(self) -> Sequence[TrajectoryArrays]: ...

    @property
    def prompt_ids(self) -> NDArray[np.int32]: ...
    @property
    def response_ids(self) -> NDArray[np.int32]: ...
    @property
    def turns(self) -> Sequence[Any]: ...
    @property
    def metadata(self) -> Mapping[str, Any]: ...
    @property
    def reward(self) -> float: ...
    @property
    def finish_reason(self) -> str: ...
    @property
    def sampling_mask(self) -> SamplingMask | None: ...
    @property
    def lora_versions(self) -> NDArray[np.int32] | None: ...
    @property
    def routed_experts(self) -> NDArray[Any] | None: ...


def stack(
    trajectories: Given[TrajectoryArrays],
    layout: Layout = "padded",
    *,
    pad_token_id: int = 0,
    pad_to: int | None = None,
    pad_to_multiple_of: int = 1,
    padding_side: PaddingSide = "right",
    metadata: Sequence[str] = (),
) -> TensorDict:
    """Stack trajectories into a TensorDict on the CPU, with batch size [n].

    Each trajectory is one of the n rows. A trajectory with branches gives one row for each of its
    ``leaves``. A ``Group`` gives the rows of all its trajectories, of which there are fewer
    than ``group_size`` if the group has lost samples.

    The following keys have the shape [n, t]: one value for each token of the prompt and the
    response. ``layout`` explains t. Nothing is shifted: the value at a position describes the token
    at this position. The logits that predict this token are at the previous position.

    ================ ======= ======= ============================================================
    key              dtype   padding meaning
    ================ ======= ======= ============================================================
    input_ids        int64   given   the prompt and the response
    attention_mask   bool    False   True where there is a token
    loss_mask        bool    False   True where the policy sampled the token
    logprobs         float32 0       behaviour policy's logprob of a sampled token, otherwise 0
    versions         int64   -1      policy version of a sampled token, otherwise -1
    turn_ids         int64   -1      index of the turn that generated the token, otherwise -1
    rewards          float32 0       the turn's reward, at the last token of each turn (for a turn
                                     without tokens: at the token before it)
    mask_lengths     int64   0       number of tokens that could be drawn at this position; 0 if
                                     it was not sampled, or its sampling mask is not known
    lora_versions    int64   -1      version of the LoRA adapter of a sampled token, otherwise -1
    ================ ======= ======= ============================================================

    ``lora_versions`` exists if at least one trajectory has ``lora_versions``. ``mask_lengths`` and
    ``mask_ids`` exist if at least one trajectory has a ``sampling_mask``. ``mask_ids``, int64 [n,
    m], has the drawable tokens of all positions of a row, one position after the other. In the
    padded layout, m is the largest number of drawable tokens of any row, and shorter rows are
    padded with -1 on the right. In the jagged layout ``mask_ids`` is a nested tensor.
    ``sglrl.rl.apply_sampling_mask`` accepts both layouts.

    ``routed_experts``, uint8 or int16 [n, t, layers, k], has the experts that each token was routed
    to. It exists if at least one trajectory has routed experts. Padding and positions without
    routed experts, such as the last one, have the experts 0 to k - 1. ``routed_length``, int64 [n],
    counts the tokens with routed experts, which are the first tokens of each trajectory.

    Keys per row have the shape [n]:

    * reward: float32, the sum of rewards. All leaves of a trajectory have its reward.
    * sample: int64, the index of the trajectory that the row comes from. Use
      ``advantages[batch["sample"]]`` to get advantages of rows from advantages of trajectories.
    * prompt_length, response_length, turn_count: int64.
    * truncated: bool, whether the last turn was cut off ("length" or "abort").
    * ("metadata", name) for each requested name: a tensor if all values are numbers, otherwise the
      values unchanged.

    Args:
        layout: "padded": t is the length of the longest trajectory, or larger (see ``pad_to`` and
            ``pad_to_multiple_of``). "jagged": per-token keys are nested tensors in torch's jagged
            layout, without padding. They share their offsets, so that operations can combine them.
            Of TorchRL's storages, only LazyStackStorage accepts nested tensors. Read its samples
            with ``get(key, as_nested_tensor=True, layout=torch.jagged)``.
        pad_token_id: the padding of input_ids.
        pad_to: the value of t, for batches that must all have the same width.
        pad_to_multiple_of: t is rounded up to a multiple of this.
        padding_side: "right" or "left". With "left", every trajectory ends at the last position.
        metadata: names of metadata to include. Every trajectory must have them.

    Raises:
        UsageError: there are no trajectories, an item is neither a trajectory nor a group, a
            trajectory is longer than ``pad_to`` or lacks a requested metadata name, or padding is
            requested in the jagged layout.
        ImportError: tensordict is not installed.
    """
    whole = list(each_trajectory(trajectories))
    for index, one in enumerate(whole):
        if not hasattr(one, "leaves"):
            kind = type(one).__name__
            raise UsageError(f"item {index} is a {kind}, not a Trajectory or a Group")
    if not whole:
        raise UsageError("there are no trajectories to stack")
    rows = [(i, leaf) for i, trajectory in enumerate(whole) for leaf in trajectory.leaves]
    batch = [leaf for _, leaf in rows]
    try:
        import torch
        from tensordict import TensorDict
    except ImportError as error:
        raise ImportError(f"tensordict is needed: {install('torchrl')}") from error
    if padding_side not in ("right", "left"):
        raise UsageError(f'padding_side must be "right" or "left", not {padding_side!r}')
    for name, given in (("pad_to", pad_to), ("pad_to_multiple_of", pad_to_multiple_of)):
        if given is not None and (isinstance(given, bool) or not isinstance(given, int)):
            raise UsageError(f"{name} must be an integer, not {given!r}")
    lengths = np.array([len(t.prompt_ids) + len(t.response_ids) for t in batch])
    flat = _flat(batch, lengths)
    masked = any(t.sampling_mask is not None for t in batch)
    if masked:
        masks = [None if t.sampling_mask is None else t.sampling_mask.lengths for t in batch]
        flat["mask_lengths"] = _flat_optional(masks, lengths, 0)
    loras = [trajectory.lora_versions for trajectory in batch]
    if any(versions is not None for versions in loras):
        flat["lora_versions"] = _flat_optional(loras, lengths, -1)
    routed = _routed(batch, lengths)
    if routed is not None:
        flat["routed_experts"] = routed
    values: dict[str, Any]
    if layout == "padded":
        width = _width(int(lengths.max()), pad_to, pad_to_multiple_of)
        positions = np.arange(width)
        if padding_side == "right":
            filled = positions < lengths[:, None]
        else:
            filled = positions >= width - lengths[:, None]
        padding = {**_PADDING, "input_ids": pad_token_id}
        values = {}
        for key, tokens in flat.items():
            padded = np.empty((*filled.shape, *tokens.shape[1:]), tokens.dtype)
            padded[:] = np.arange(tokens.shape[-1]) if tokens.ndim > 1 else padding[key]
            # Indexing with ``filled`` assigns row by row, in the order of the tokens in ``flat``.
            padded[filled] = tokens
            values[key] = torch.from_numpy(padded)
    elif layout == "jagged":
        if pad_to is not None or pad_to_multiple_of != 1:
            raise UsageError("the jagged layout has no padding; leave out pad_to and its multiple")
        offsets = torch.from_numpy(np.concatenate([[0], lengths.cumsum()]))
        values = {
            key: torch.nested.nested_tensor_from_jagged(
                torch.from_numpy(tokens),
                offsets,
                min_seqlen=int(lengths.min()),
                max_seqlen=int(lengths.max()),
            )
            for key, tokens in flat.items()
        }
    else:
        raise UsageError(f'layout must be "padded" or "jagged", not {layout!r}')
    if masked:
        values["mask_ids"] = _mask_ids(batch, layout)
    if routed is not None:
        counts = [0 if t.routed_experts is None else len(t.routed_experts) for t in batch]
        values["routed_length"] = torch.tensor(counts, dtype=torch.int64, device="cpu")
    for key, numbers, dtype in (
        ("reward", [whole[i].reward for i, _ in rows], torch.float32),
        ("sample", [i for i, _ in rows], torch.int64),
        ("prompt_length", [len(t.prompt_ids) for t in batch], torch.int64),
        ("response_length", [len(t.response_ids) for t in batch], torch.int64),
        ("turn_count", [len(t.turns) for t in batch], torch.int64),
        ("truncated", [t.finish_reason in ("length", "abort") for t in batch], torch.bool),
    ):
        # Name the CPU explicitly: the program may have changed torch's default device.
        values[key] = torch.tensor(numbers, dtype=dtype, device="cpu")
    if metadata:
        named = {name: _metadata(batch, name) for name in metadata}
        values["metadata"] = TensorDict(named, batch_size=[len(batch)])
    return TensorDict(values, batch_size=[len(batch)])


def _width(longest: int, pad_to: int | None, multiple: int) -> int:
    if multiple < 1:
        raise UsageError(f"pad_to_multiple_of must be at least 1, not {multiple}")
    width = longest if pad_to is None else pad_to
    if width < longest:
        raise UsageError(f"a trajectory has {longest} tokens, more than pad_to={pad_to}")
    return -(-width // multiple) * multiple


def _flat(batch: Sequence[TrajectoryArrays], lengths: NDArray[np.int64]) -> dict[str, NDArray[Any]]:
    """Return each per-token key as one array that concatenates all trajectories."""
    size = int(lengths.sum())
    flat: dict[str, NDArray[Any]] = {
        "input_ids": np.empty(size, np.int64),
        "attention_mask": np.ones(size, np.bool_),
        "loss_mask": np.zeros(size, np.bool_),
        "logprobs": np.zeros(size, np.float32),
        "versions": np.full(size, -1, np.int64),
        "turn_ids": np.full(size, -1, np.int64),
        "rewards": np.zeros(size, np.float32),
    }
    begin = 0
    for trajectory, length in zip(batch, lengths.tolist(), strict=True):
        response = begin + len(trajectory.prompt_ids)
        end = begin + length
        flat["input_ids"][begin:response] = trajectory.prompt_ids
        flat["input_ids"][response:end] = trajectory.response_ids
        for key in ("loss_mask", "logprobs", "versions"):
            flat[key][response:end] = getattr(trajectory, key)
        for index, turn in enumerate(trajectory.turns):
            flat["turn_ids"][response + turn.start : response + turn.stop] = index
            # Add, because a turn without tokens may end at the same token as another turn. The
            # prompt is never empty, so even the first turn has a token before it.
            flat["rewards"][response + turn.stop - 1] += turn.reward
        begin = end
    return flat


def _flat_optional(
    arrays: Sequence[NDArray[np.int32] | None], lengths: NDArray[np.int64], missing: int
) -> NDArray[np.int64]:
    """Return one array that has a value for each token of all trajectories.

    Args:
        arrays: for each trajectory, the values of its response, int32 [r], or None.
        missing: the value of all other tokens.
    """
    flat = np.full(int(lengths.sum()), missing, np.int64)
    for values, end in zip(arrays, lengths.cumsum().tolist(), strict=True):
        if values is not None:
            flat[end - len(values) : end] = values
    return flat


def _routed(batch: Sequence[TrajectoryArrays], lengths: NDArray[np.int64]) -> NDArray[Any] | None:
    """Return the routed experts at each position of all trajectories, or None if none has any.

    Raises:
        UsageError: the routed experts have different shapes, so they are of different models.
    """
    given = [t.routed_experts for t in batch if t.routed_experts is not None]
    if not given:
        return None
    kinds = {(rows.shape[1:], rows.dtype) for rows in given}
    if len(kinds) > 1:
        raise UsageError(f"the routed experts of the trajectories have different shapes: {kinds}")
    ((shape, dtype),) = kinds
    routed = np.empty((int(lengths.sum()), *shape), dtype)
    routed[:] = np.arange(shape[-1])
    for trajectory, end, length in zip(batch, lengths.cumsum(), lengths, strict=True):
        rows = trajectory.routed_experts
        if rows is not None:
            routed[end - length : end - length + len(rows)] = rows
    return routed


def _mask_ids(batch: Sequence[TrajectoryArrays], layout: Layout) -> Any:
    """Return ``mask_ids`` of each trajectory: the tokens that could be drawn."""
    import torch

    masks = [trajectory.sampling_mask for trajectory in batch]
    rows = [
        torch.from_numpy(np.zeros(0, np.int64) if mask is None else mask.ids.astype(np.int64))
        for mask in masks
    ]
    if layout == "jagged":
        return torch.nested.nested_tensor(rows, layout=torch.jagged)
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=-1)


def _metadata(batch: Sequence[TrajectoryArrays], name: str) -> Any:
    import torch
    from tensordict import NonTensorStack

    try:
        values = [trajectory.metadata[name] for trajectory in batch]
    except KeyError:
        raise UsageError(f"not every trajectory has {name!r} in its metadata") from None
    values = [v.item() if isinstance(v, np.generic) else v for v in values]
    if all(isinstance(value, int | float) for value in values):
        try:
            if any(isinstance(value, float) for value in values):
                return torch.tensor(values, dtype=torch.float32, device="cpu")
            return torch.tensor(values, device="cpu")
        except (ValueError, OverflowError, RuntimeError) as error:
            raise UsageError(f"the metadata {name!r} is not a tensor: {error}") from None
    return NonTensorStack(*values)
