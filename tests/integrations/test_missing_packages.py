"""The errors of integrations whose package is not installed."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

import sglrl
from sglrl.integrations.verifiers import VerifiersEnv


@pytest.mark.skipif(find_spec("verifiers") is not None, reason="verifiers is installed")
def test_verifiers() -> None:
    with pytest.raises(sglrl.UsageError, match=r"verifiers 0\.4 .*: pip install .*\[verifiers\]"):
        VerifiersEnv({"taskset": {"id": "letters"}})
