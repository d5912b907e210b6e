"""What the fork server imports before it forks: everything slow, nothing that touches a GPU."""

from __future__ import annotations

import warnings

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    # The registry imports every model that SGLang knows: as slow as all the rest together.
    import sglang.srt.models.registry as registry  # noqa: F401

    from . import scheduler as scheduler
