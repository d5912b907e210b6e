"""Calls of the driver that concern LoRA adapters, on rank 0 of a replica.

Each version of an adapter has a serial number, which is never used again. SGLang's id of an adapter
(``uid``) is the serial number of its first version. An adapter is dropped when no request uses it
any more.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

from sglang.srt.managers.io_struct import AbortReq

from sglrl.errors import InvalidRequest, SglrlError, UnknownAdapter
from sglrl.wire.adapters import LoraCommit, LoraKeep, LoraPart, LoraPrepare

from . import convert
from .aborts import Aborts
from .commands import CommitAdapter, DropAdapters, PauseCommand, PrepareAdapter
from .request_table import RequestTable

if TYPE_CHECKING:
    from .lora import Adapters

LoraArgs = LoraPart | LoraPrepare | LoraCommit | LoraKeep


class _Live:
    """The current version of an adapter."""

    def __init__(self, uid: str, serial: int, version: int) -> None:
        self.uid = uid
        self.serial = serial
        self.version = version


class LoraCalls:
    """Turns calls of the driver into commands for all ranks, and answers the calls.

    Attributes:
        live: the adapters by name, as if all created commands were already executed.
    """

    def __init__(self, table: RequestTable, aborts: Aborts) -> None:
        self._table = table
        self._aborts = aborts
        self._adapters: Adapters | None = None
        """The adapters of this rank. None if the engine accepts no adapters."""
        self.live: dict[str, _Live] = {}
        self._parts: dict[int, list[LoraPart]] = {}
        self._preparing: set[int] = set()
        self._prepared: deque[tuple[PrepareAdapter, Exception | None]] = deque()
        self._dropping: list[DropAdapters] = []

    def start(self, adapters: Adapters) -> None:
        """Accept adapters from now on. Called when the scheduler is built."""
        self._adapters = adapters
        adapters.on_prepared = self._on_prepared

    @property
    def limits(self) -> dict[str, Any]:
        """The fields of ``EngineInfo`` that concern adapters."""
        if self._adapters is None:
            return {}
        return {
            "max_lora_rank": self._adapters.max_rank,
            "lora_target_modules": self._adapters.target_modules,
            "max_loaded_loras": self._table.scheduler.server_args.max_loaded_loras or 0,
        }

    def uid(self, name: str) -> str:
        """Return SGLang's id of an adapter. Raise ``UnknownAdapter`` if it is not loaded."""
        adapter = self.live.get(name)
        if adapter is None:
            raise UnknownAdapter(f"no adapter {name!r} is loaded: use client.load_lora")
        return adapter.uid

    def version(self, uid: str) -> int:
        """Return the version of an adapter, as if all created commands were already executed."""
        return next((one.version for one in self.live.values() if one.uid == uid), 0)

    def cache_key(self, uid: str | None) -> str:
        """Return the key as ``Adapters.cache_key`` does, for the versions in ``live``."""
        if uid is None:
            return ""
        return f"/{next(one.serial for one in self.live.values() if one.uid == uid)}/"

    def receive(self, id_: int, args: LoraArgs) -> None:
        """Start to handle a call of the driver.

        Raises:
            InvalidRequest: the engine accepts no adapters, or the adapter was not prepared before
                its commit.
        """
        if self._adapters is None:
            raise InvalidRequest("the engine takes no adapters: launch it with enable_lora=True")
        mailbox = self._table.mailbox
        match args:
            case LoraPart(serial=serial):
                if not self._knows(serial):
                    self._parts.setdefault(serial, []).append(args)
                mailbox.put_value(id_, None)
            case LoraPrepare(serial=serial) if self._knows(serial):
                mailbox.put_value(id_, None)
            case LoraPrepare(serial=serial):
                parts = self._parts.pop(serial, [])
                self._preparing.add(serial)
                self._table.incoming.append(
                    PrepareAdapter(id_, serial, args.rank, args.scaling, parts)
                )
            case LoraCommit():
                self._commit(id_, args)
            case LoraKeep():
                self._keep(id_, args)

    def _knows(self, serial: int) -> bool:
        return serial in self._preparing or any(o.serial == serial for o in self.live.values())

    def _commit(self, id_: int, args: LoraCommit) -> None:
        old = self.live.get(args.name)
        if old is not None and old.serial == args.serial:
            self._table.mailbox.put_value(id_, 0.0)
            return
        if args.serial not in self._preparing:
            raise InvalidRequest(f"the adapter {args.name!r} was not prepared")
        self._preparing.discard(args.serial)
        uid = str(args.serial) if old is None else old.uid
        incoming = self._table.incoming
        if args.inflight == "abort" and old is not None:
            incoming += self._aborts.running(set(), "back", uid)
        self.live[args.name] = _Live(uid, args.serial, args.version)
        incoming.append(
            CommitAdapter(id_, uid, args.serial, args.name, args.version, args.inflight)
        )

    def _keep(self, id_: int, args: LoraKeep) -> None:
        kept = set(args.serials)
        uids = {name: o.uid for name, o in self.live.items() if o.serial not in kept}
        given_up = [serial for serial in (*self._preparing, *self._parts) if serial not in kept]
        for serial in given_up:
            self._preparing.discard(serial)
            self._parts.pop(serial, None)
        for name, uid in uids.items():
            del self.live[name]
            self._end_requests(uid, name)
        self._dropping.append(DropAdapters(id_, [*uids.values()], given_up))

    def _end_requests(self, uid: str, name: str) -> None:
        table = self._table
        table.incoming.append(PauseCommand(-1, "wait"))
        for id_, request in [*table.requests.items()]:
            if request.lora != uid:
                continue
            error = f"the adapter {name!r} was unloaded"
            if self._aborts.take_unsent(id_):
                table.mailbox.put_error(id_, UnknownAdapter.__name__, error)
            else:
                request.unloaded = error
                table.incoming.append(AbortReq(rid=convert.request_id(id_)))

    def turn(self) -> None:
        """Answer finished preparations, and drop the adapters that no request uses any more."""
        while self._prepared:
            command, error = self._prepared.popleft()
            mailbox = self._table.mailbox
            if error is None:
                mailbox.put_value(command.call, None)
                continue
            # The driver then sends ``lora_keep``, which drops the preparation on all workers.
            kind = type(error).__name__ if isinstance(error, SglrlError) else "InvalidAdapter"
            mailbox.put_error(command.call, kind, str(error))
        if self._dropping:
            used = {request.lora for request in self._table.requests.values()}
            used |= self._table.scheduler.sglrl_used_adapters()
            free = [c for c in self._dropping if used.isdisjoint(c.uids)]
            self._dropping = [c for c in self._dropping if c not in free]
            self._table.incoming += free

    def executed(self, command: CommitAdapter | DropAdapters, milliseconds: float) -> None:
        """Answer the call of an executed command."""
        mailbox = self._table.mailbox
        mailbox.put_value(
            command.call, milliseconds if isinstance(command, CommitAdapter) else None
        )
        # The loop may have no other reason to flush.
        mailbox.flush()

    def _on_prepared(self, command: PrepareAdapter, error: Exception | None) -> None:
        """Pass the result to the scheduler's thread. Called on the thread of the preparation."""
        self._prepared.append((command, error))
        self._table.mailbox.wake()
