"""A ``KLRewardTransform`` of TorchRL that also supports results without padding."""

from __future__ import annotations

from typing import Any, NoReturn

from tensordict import TensorDictBase
from torchrl.envs.llm.transforms import KLRewardTransform as TorchRLKLRewardTransform

from ...errors import UsageError


def _reject_ray(*args: Any, **kwargs: Any) -> NoReturn:
    raise UsageError(
        "a KLRewardTransform as a Ray service does not reach its environment; append it to the "
        "environment without use_ray_service=True"
    )


class KLRewardTransform(TorchRLKLRewardTransform):  # type: ignore[misc]
    """TorchRL's transform, extended to responses of several lengths with ``pad_output=False``.

    TorchRL 0.14 fails for such responses, because it stacks the assistant masks of the results.
    This class removes the masks. TorchRL then uses the tokens after the prompt, which are the same
    tokens for a generated response.

    Arguments and results are the same as in TorchRL, except that ``use_ray_service=True`` raises
    ``UsageError``.
    """

    _RayServiceClass = _reject_ray

    def _step(self, tensordict: TensorDictBase, next_tensordict: TensorDictBase) -> TensorDictBase:
        masks = tensordict.get("masks", None)
        if masks is not None and not self.pad_output:
            tensordict = tensordict.copy()
            tensordict["masks"] = masks.exclude("all_assistant_mask")
        return super()._step(tensordict, next_tensordict)
