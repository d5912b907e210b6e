"""Continue from a token of a sample, in a session that does not belong to the run."""

from __future__ import annotations

import asyncio
import os
from typing import Any, Final

import msgspec

from ...client.client import Client
from ...errors import SglrlError
from ...sessions.session import Session
from ...sessions.trajectory import record_of
from .store import FORKS, Store

_TOP: Final = 5
"""The number of likeliest tokens that are recorded at each position of a fork."""


class ForkRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a page asks for.

    Attributes:
        ids: the tokens before the fork.
        text: follows them, and is tokenized by itself.
        source: where the tokens are from, for people.
        sampling: fields of ``SamplingParams``.
        lora: the adapter that continues, or "" for the model.
    """

    ids: list[int]
    text: str = ""
    source: str = ""
    sampling: dict[str, Any] = {}
    lora: str = ""


class Forks:
    """The forks that are being sampled, and how those that have ended did so.

    A fork is a session of the viewer's own client, so the pool treats it like the calls of any
    other program. It takes no part in a rollout, and changes no session of one.
    """

    def __init__(self, client: Client, store: Store) -> None:
        self._client = client
        self._store = store
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._rows: dict[str, int] = {}
        self._errors: dict[str, str] = {}

    def begin(self, wanted: ForkRequest) -> str:
        """Begin a fork, and return its id, which is also that of its session.

        Raises:
            InvalidRequest: a value is wrong.
        """
        metadata = {"fork_of": wanted.source, "text": wanted.text, "sampling": wanted.sampling}
        session = self._client.session(
            input_ids=wanted.ids,
            metadata=metadata,
            lora=wanted.lora or None,
            **wanted.sampling,
        )
        if wanted.text:
            session.observe(wanted.text)
        id_ = session.live_id
        self._tasks[id_] = asyncio.create_task(self._run(id_, session))
        return id_

    async def end_of(self, id_: str) -> tuple[int | None, str]:
        """Wait until a fork has ended. Return its row, and why it failed or ""."""
        if (task := self._tasks.get(id_)) is not None:
            await asyncio.wait([task])
            if not task.cancelled():
                task.result()
        return self._rows.get(id_), self._errors.get(id_, "")

    async def _run(self, id_: str, session: Session) -> None:
        try:
            async with session:
                completion = await session.generate(top_logprobs=_TOP)
                top = completion.top_logprobs
                assert top is not None
                session.metadata["top_logprobs"] = [
                    list(zip(ids, logprobs, strict=True))
                    for ids, logprobs in zip(top.ids.tolist(), top.logprobs.tolist(), strict=True)
                ]
                self._rows[id_] = self._store.add(FORKS, record_of(session.trajectory()))
        except (SglrlError, OSError) as error:
            self._errors[id_] = str(error)

    async def cancel(self, id_: str) -> None:
        """End a fork early. What it has sampled is lost."""
        if (task := self._tasks.get(id_)) is not None:
            task.cancel()
            await asyncio.wait([task])
            self._errors.setdefault(id_, "the fork was ended")

    async def close(self) -> None:
        for id_ in list(self._tasks):
            await self.cancel(id_)


def is_fork(id_: str) -> bool:
    """Return whether a session with this id belongs to this process."""
    return id_.startswith(f"{os.getpid()}-")
