"""Look a model up on the Hugging Face hub before workers start."""

from __future__ import annotations

import asyncio
import threading

from ..driver.threads import Finish, from_thread
from ..errors import ModelError
from ..inference.hub_errors import explanation
from ..transport.system_limits import start_thread

_SECONDS = 5.0
"""Seconds in which the hub must answer a request."""
_LONGEST = 9.0
"""Seconds that the whole check may take, including the DNS query for the hub's address."""
_FILES = ("config.json", "tokenizer_config.json", "tokenizer.json")
"""If a model or a tokenizer is in the cache, at least one of these files is there."""


async def check_on_hub(model: str) -> None:
    """Check that the hub has a model or a tokenizer, unless it is in the local cache of the hub.

    Without this check, each worker would make several attempts, and then fail with the same error.

    Raises:
        ModelError: the hub has no such model, or cannot be reached.
    """

    def start(finish: Finish) -> None:
        # A DNS query for the hub's address may take minutes, so it runs in a thread of its own.
        thread = threading.Thread(
            target=lambda: finish(_error(model)), name="sglrl-hub", daemon=True
        )
        start_thread(thread)

    try:
        async with asyncio.timeout(_LONGEST):
            error = await from_thread(start)
    except TimeoutError:
        error = TimeoutError(f"no answer within {_LONGEST:g} s")
    if error is not None:
        raise ModelError(explanation(model, error))


def _error(model: str) -> Exception | None:
    """Return the reason why the model cannot be fetched, or None."""
    try:
        from huggingface_hub import HfApi, errors, try_to_load_from_cache
    except ImportError:
        return None
    try:
        if any(isinstance(try_to_load_from_cache(model, file), str) for file in _FILES):
            return None
        HfApi().model_info(model, timeout=_SECONDS)
    except errors.HfHubHTTPError as error:
        # A mirror of the hub may answer this request differently and still have the files.
        status = getattr(error.response, "status_code", None)
        return error if status in (None, 401, 403, 404) else None
    except Exception as error:
        return error
    return None
