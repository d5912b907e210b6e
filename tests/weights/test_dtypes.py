"""The dtypes of weights, compared with torch."""

from __future__ import annotations

import pytest
import torch

from sglrl.core.manifest import FLOAT_BYTES, tensor_bytes
from sglrl.wire.weights import TensorSpec


@pytest.mark.parametrize("dtype", FLOAT_BYTES)
def test_every_dtype_is_a_float_of_torch_with_this_size(dtype: str) -> None:
    tensor = torch.empty(3, 5, dtype=getattr(torch, dtype))
    assert tensor.is_floating_point()
    assert tensor_bytes(TensorSpec("w", dtype, (3, 5))) == tensor.nbytes
