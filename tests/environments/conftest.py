"""Environments of verifiers, with an engine that runs in the environment ``full``.

The tasksets are modules of this folder. verifiers imports them by name, also in other processes.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from clients.conftest import biases, judge, no_network, pool, pytest_configure

__all__ = ["biases", "judge", "no_network", "pool", "pytest_configure"]

_FOLDER = str(Path(__file__).parent)
sys.path.insert(0, _FOLDER)
os.environ["PYTHONPATH"] = os.pathsep.join([_FOLDER, *filter(None, [os.environ.get("PYTHONPATH")])])
