"""Abort requests that SGLang has not yet received, that wait in SGLang, or that run."""

from __future__ import annotations

from typing import Any

from sglang.srt.managers.io_struct import AbortReq, TokenizedGenerateReqInput

from sglrl.wire.calls import ItemKind
from sglrl.wire.engine import TokenChunk

from . import convert
from .commands import ABOUT_REQUESTS, PauseCommand
from .request_table import RequestTable

_REQUESTS = (TokenizedGenerateReqInput, *ABOUT_REQUESTS)


class Aborts:
    """Aborts the requests of a table."""

    def __init__(self, table: RequestTable) -> None:
        self._table = table

    def take_unsent(self, id_: int) -> bool:
        """Drop a request that SGLang has not received. SGLang would ignore an early abort.

        Returns:
            False if SGLang has already received the request.
        """
        table, rid = self._table, convert.request_id(id_)
        for unsent in (table.incoming, table.held_back):
            others = [r for r in unsent if not (isinstance(r, _REQUESTS) and r.rid == rid)]
            if len(others) < len(unsent):
                unsent[:] = others
                del table.requests[id_]
                table.next_tokens.wanted.pop(rid, None)
                return True
        return False

    def all(self, before: str) -> int:
        """Abort all ``generate`` requests. Return their number.

        Args:
            before: the mode of the ``PauseCommand`` that precedes the aborts, as in ``running``.
        """
        table = self._table
        ended: set[str] = set()
        table.incoming = self._return_unsent(table.incoming, ended)
        table.held_back = self._return_unsent(table.held_back, ended)
        aborts = self.running(set(), before)
        table.incoming += aborts
        return len(ended) + sum(isinstance(request, AbortReq) for request in aborts)

    def _return_unsent(self, requests: list[Any], ended: set[str]) -> list[Any]:
        """Answer the ``generate`` requests that SGLang has not received. Return the others."""
        table = self._table
        others = []
        for asked in requests:
            if isinstance(asked, _REQUESTS):
                id_ = convert.call_id(asked.rid)
                request = table.requests.get(id_)
                if request is not None and request.generates and id_ not in table.cancelled:
                    del table.requests[id_]
                    ended.add(asked.rid)
                    chunk = TokenChunk(b"", finish="abort", version=request.version[0])
                    table.mailbox.put(id_, ItemKind.DONE, chunk)
                if asked.rid in ended:
                    continue
            others.append(asked)
        return others

    def running(self, except_for: set[str], before: str, lora: str | None = None) -> list[Any]:
        """Return commands that abort the ``generate`` requests in SGLang.

        SGLang then returns each request with its tokens so far. It returns waiting requests at
        once. It returns running requests in the next decode step, which comes when no other request
        waits for its prefill.

        Args:
            except_for: SGLang ids of requests to keep.
            before: the mode of the ``PauseCommand`` that returns running requests to the queue.
            lora: SGLang's id of a LoRA adapter, to abort only the requests that use it. None aborts
                the requests with and without LoRA adapters.
        """
        table = self._table
        aborts: list[Any] = [PauseCommand(-1, before)]
        for id_, request in table.requests.items():
            rid = convert.request_id(id_)
            known = id_ in table.cancelled or id_ in table.returned
            other = lora is not None and request.lora != lora
            if request.generates and not (known or other) and rid not in except_for:
                table.returned.add(id_)
                aborts.append(AbortReq(rid=rid))
        return aborts
