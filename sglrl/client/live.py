"""The methods of ``Client`` with which a program watches samples while they run."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable
from typing import Final, TypeVar

from ..control.operations import operation
from ..errors import SglrlError
from ..sessions.live import EndedSamples, LiveSample, LiveState, live_samples, live_state
from .with_requests import WithRequests

_One = TypeVar("_One")
_SECONDS: Final = 2.0
"""Seconds that another process may take to describe its sessions."""
_MOST: Final = 64
"""The largest number of ended samples in one answer."""


class LiveMethods(WithRequests):
    """The methods of ``Client`` that show sessions and samples."""

    @operation(urgent=True, http=False)
    async def live_samples(self) -> list[LiveSample]:
        """Return the open sessions of the program that launched the pool, and of its agents.

        These are the running samples of its rollouts, the sessions of gateways in its process, and
        its other sessions. Nothing is collected before this is called.
        """
        others = await asyncio.gather(
            *[_limited(source.live_samples(), _SECONDS) for source in self.observed.live]
        )
        own = live_samples(self.requests.sessions, time.time())
        return own + [sample for found in others if found is not None for sample in found]

    @operation(urgent=True, http=False)
    async def live_state(
        self, id: str, turns: int = -1, tokens: int = -1, timeout: float = 10.0
    ) -> LiveState | None:
        """Return an open session with its tokens, as soon as it differs from what is known.

        For the next minute, the session's turns are streamed, so that each token can be seen.
        Apart from this, the session is not disturbed.

        Args:
            id: ``LiveSample.id``.
            turns, tokens: the numbers of the last known state. -1: nothing is known.
            timeout: the longest time to wait, in seconds.

        Returns:
            The state, without ``LiveState.trajectory`` if ``turns`` is still right. None if no open
            session has this id.
        """
        known = id, turns, tokens, timeout
        state = await live_state(self.requests.sessions, *known, time.time())
        if state is None:
            others = [source.live_state(*known) for source in self.observed.live]
            found = await asyncio.gather(*[_limited(one, timeout + _SECONDS) for one in others])
            state = next((one for one in found if one is not None), None)
        return state

    @operation(urgent=True, http=False)
    async def ended_samples(self, after: int | None = None, timeout: float = 10.0) -> EndedSamples:
        """Return samples of rollouts that have ended, as soon as there are any.

        While this is called at least once a minute, the latest 1,024 samples are kept. Before the
        first call, none are.

        Args:
            after: ``EndedSamples.next`` of the previous answer. 0: all samples that are kept. None:
                samples that end from now on.
            timeout: the longest time to wait, in seconds.
        """
        number, samples = await self.observed.ended.after(after, timeout, _MOST)
        return EndedSamples(samples=samples, next=number)


async def _limited(made: Awaitable[_One], seconds: float) -> _One | None:
    """Return a value of another process, or None if the process does not answer."""
    with contextlib.suppress(SglrlError, TimeoutError):
        async with asyncio.timeout(seconds):
            return await made
    return None
