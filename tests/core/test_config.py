"""Settings that many calls take."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from sglrl.config import check_timeout
from sglrl.errors import UsageError


@pytest.mark.parametrize("timeout", [None, 0, 0.0, 3, 1e-9, math.inf, np.float32(2), Fraction(1)])
def test_time_outs(timeout: Any) -> None:
    check_timeout(timeout)


@pytest.mark.parametrize("timeout", [-1, -1e-9, math.nan, -math.inf, True, "3", [3], 1j])
def test_what_is_no_time_out(timeout: Any) -> None:
    with pytest.raises(UsageError, match="time_to_join must be a number of seconds"):
        check_timeout(timeout, "time_to_join")
