"""What the fork server imports before it forks: everything slow, nothing that touches a GPU."""

from __future__ import annotations

import warnings

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from . import scheduler as scheduler
