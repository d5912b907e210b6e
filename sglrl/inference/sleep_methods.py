"""The methods of ``Client`` that give the memory of engines back, and take it again."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from .client_base import ClientBase
from .sleeping import Sleeping


class SleepMethods(ClientBase):
    """The sleep methods of ``Client``. The client sets these attributes."""

    _sleeping: Sleeping
    _timeout: float | None

    async def sleep(
        self,
        tags: Iterable[str] = ("kv_cache", "weights"),
        *,
        inflight: Literal["retract", "drain", "abort"] = "retract",
        keep_weights: bool = True,
        timeout: float | None = 60.0,
    ) -> None:
        """Let all engines give memory back, for example to a trainer on the same GPUs.

        New calls are accepted and wait for ``wake``. Deadlines keep running. Calling this again
        with other tags gives more memory back. CUDA graphs stay valid. A worker that is lost
        meanwhile is replaced when all engines are awake.

        The engines must be launched with ``enable_memory_saver=True``.

        Args:
            tags: "kv_cache", "weights", or both. Prefix caches are lost with the KV cache.
            inflight: the treatment of running requests.
                "retract": they continue after ``wake``, and their KV cache is recomputed.
                "drain": the engines finish them first.
                "abort": ``generate`` calls return their tokens so far, with finish_reason "abort".
                Other calls are computed after ``wake``.
            keep_weights: keep the weights in the memory of the host. With False they are lost: the
                engines continue after ``wake(["weights"])`` and an update of all weights.
            timeout: seconds from this call until all engines must sleep.

        Raises:
            UsageError: the engines cannot give this back.
            DeadlineExceeded: an engine does not sleep yet. Call ``wake``, or ``sleep`` again.
            UpdateInProgress: an update or copy of the weights was still running. This call has
                changed nothing.
            WeightsLost: a worker waits for the next update, because no process has the current
                weights any more. This call has changed nothing.
            EngineError: a host has too little memory to keep the weights. Call ``wake``.
        """
        self._running(urgent=True)
        timeout = self._timeout if timeout is None else timeout
        await self._sleeping.sleep(tags, inflight, keep_weights, timeout)

    async def wake(
        self, tags: Iterable[str] | None = None, *, timeout: float | None = 60.0
    ) -> None:
        """Let all engines take their memory again, and continue. See ``sleep``.

        To update weights before the KV cache has memory again, wake the weights first::

            await client.wake(["weights"])
            await client.update_weights(model)
            await client.wake(["kv_cache"])

        Args:
            tags: what to take again. None: everything.
            timeout: seconds from this call until all engines must be awake.

        Raises:
            EngineError: a GPU has too little free memory. Its engine stays asleep, and this may be
                called again.
            DeadlineExceeded: an engine is not awake yet.
        """
        self._running(urgent=True)
        await self._sleeping.wake(tags, self._timeout if timeout is None else timeout)
