"""Read a data set item by item, and derive the arguments of a session from an item.

At most one item is read ahead, except at the start of a resumed run, which first reads all items
that the earlier run has read. An asynchronous data set is read in a task, so it does not delay
samples.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import (
    AsyncIterable,
    AsyncIterator,
    Callable,
    Coroutine,
    Iterable,
    Iterator,
    Mapping,
)
from typing import Any

import msgspec

from ..errors import SglrlError, UsageError
from .fingerprint import Fingerprint
from .state_file import State
from .task_ending import Owner

StartTask = Callable[[Coroutine[Any, Any, None], Owner], "asyncio.Task[None]"]


class Items:
    """The items of a data set that a run must process, with their indices in the data set.

    Args:
        dataset: an iterable, an async iterable, or a sequence of items.
        state: the ``state_dict`` of an earlier run, whose finished items are skipped.
        on_read: called when the task that reads an async iterable has read an item or has ended.

    Attributes:
        error: the exception of the data set, or the reason why it does not match ``state``.
        total: the number of items that the run must process, or None if it is not known.

    Raises:
        UsageError: the data set cannot be iterated, or ``state`` is wrong or is from a data set of
            another length.
    """

    title = "the data set"

    def __init__(
        self, dataset: Any, state: Mapping[str, Any] | None, on_read: Callable[[], None]
    ) -> None:
        self._source = _iterator(dataset)
        self._before = _checked_state(state)
        self._unfinished_before = set(self._before.unfinished)
        self._on_read = on_read
        self._next: deque[tuple[int, Any]] = deque()
        """The items that were read and not taken, with their indices."""
        self._fingerprint = Fingerprint()
        self._reading: asyncio.Task[None] | None = None
        self._read = 0
        self._ended = False
        self.error: Exception | None = None
        self.total = self._length = _length(dataset)
        if self._length is not None:
            before = self._before
            known = before.length
            if known not in (None, self._length) or self._length < before.next:
                had = f"at least {before.next}" if known is None else str(known)
                raise _mismatch(f"it was saved over {had} items, and this one has {self._length}")
            finished = before.next - len(self._unfinished_before)
            self.total = self._length - min(self._length, finished)

    @property
    def exhausted(self) -> bool:
        """Whether there are no more items."""
        return self._ended and not self._next

    def state_dict(self, next_index: int, unfinished: set[int]) -> dict[str, Any]:
        """Return the ``state`` for a later run over the same data set.

        Args:
            next_index: the index of the first item after all items that were taken.
            unfinished: the indices of the items that were taken and are not finished.
        """
        before = self._before
        unread = {index for index in self._unfinished_before if index >= self._read}
        unread |= {index for index, _ in self._next if index < before.next}
        known = self._read >= before.read
        return {
            "next": max(next_index, before.next),
            "unfinished": sorted(unfinished | unread),
            "length": before.length if self._length is None else self._length,
            "read": self._read if known else before.read,
            "fingerprint": self._fingerprint.text if known else before.fingerprint,
        }

    def take(self, start: StartTask) -> tuple[int, Any] | None:
        """Return the next item, or None.

        None means that the data set is exhausted, or that a task is still reading the item.

        Args:
            start: starts the task that reads an async iterable.
        """
        self.request_next(start)
        return self._next.popleft() if self._is_ready else None

    @property
    def _is_ready(self) -> bool:
        """Whether an item was read, and all items that the earlier run has read were compared."""
        return bool(self._next) and (self._ended or self._read >= self._before.read)

    def request_next(self, start: StartTask) -> None:
        """Read the next item, or start the task that reads it, unless an item is ready."""
        source = self._source
        if isinstance(source, AsyncIterator):
            if not self._is_ready and not self._ended and self._reading is None:
                self._reading = start(self._read_next(source), self)
            return
        while not self._is_ready and not self._ended:
            try:
                self._came(next(source))
            except StopIteration:
                self._end()
            except Exception as error:
                self.error, self._ended = error, True

    async def _read_next(self, source: AsyncIterator[Any]) -> None:
        try:
            while not self._is_ready and not self._ended:
                self._came(await anext(source))
        except StopAsyncIteration:
            self._end()
        except Exception as error:
            self.error, self._ended = error, True
        except asyncio.CancelledError as error:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            self._ended = True
            self.error = SglrlError("the data set was cancelled by something that it awaited")
            self.error.__cause__ = error
        finally:
            self._reading = None
        self._on_read()

    def abandoned(self, reason: str) -> None:
        """Do nothing, because the run has ended and does not need the next item."""

    def _came(self, item: Any) -> None:
        index, self._read = self._read, self._read + 1
        self._fingerprint.add(item)
        before = self._before
        if index >= before.next or index in self._unfinished_before:
            self._next.append((index, item))
        if self._read == before.read and before.fingerprint not in ("", self._fingerprint.text):
            self._reject(
                f"the fingerprint of its first {before.read} items is {before.fingerprint}, and "
                f"that of this one {self._fingerprint.text}"
            )

    def _end(self) -> None:
        self._ended = True
        needed = max(self._before.read, self._before.next)
        if self._read < needed:
            self._reject(
                f"it was saved over at least {needed} items, and this one has {self._read}"
            )

    def _reject(self, reason: str) -> None:
        """Fail without running an item, because this is not the data set of the earlier run."""
        self.error, self._ended = _mismatch(reason), True
        self._next.clear()


def session_arguments(item: Any) -> Mapping[str, Any]:
    """Return the arguments of a session for an item of a data set.

    Raises:
        UsageError: the item does not determine the arguments.
    """
    if isinstance(item, str):
        return {"prompt": item}
    if isinstance(item, list) and item and all(isinstance(m, Mapping) for m in item):
        return {"messages": item}
    if isinstance(item, Mapping):
        prompts = prompts_of(item)
        if len(prompts) > 1:
            raise UsageError(
                "this item of the data set has several prompts: "
                f"{' and '.join(map(repr, prompts))}; remove all but one of them, or set "
                "the others to None, or pass open_session=. "
                f"The item: {item!r:.200}"
            )
        if prompts:
            prompt = prompts.get("prompt")
            return {"messages": prompt} if isinstance(prompt, list) else prompts
    raise UsageError(
        "this item of the data set has no prompt; give it one of "
        f"'prompt', 'messages' and 'input_ids', or pass open_session=. The item: {item!r:.200}"
    )


def optional_prompt(item: Any) -> Mapping[str, Any]:
    """Return the arguments of a session for an item that may have no prompt.

    Raises:
        UsageError: the item has several prompts.
    """
    if isinstance(item, Mapping) and prompts_of(item):
        return session_arguments(item)
    try:
        return session_arguments(item)
    except UsageError:
        return {}


def prompts_of(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the prompts in an item, or in the arguments of a session.

    Ignore keys whose value is None, because data sets fill missing columns with None.
    """
    return {k: given[k] for k in ("prompt", "messages", "input_ids") if given.get(k) is not None}


def _iterator(dataset: Any) -> Iterator[Any] | AsyncIterator[Any]:
    if isinstance(dataset, AsyncIterable):
        return aiter(dataset)
    if isinstance(dataset, (str, bytes, Mapping)):
        raise UsageError(f"dataset must be an iterable of items, got {type(dataset).__name__}")
    if isinstance(dataset, Iterable):
        return iter(dataset)
    count = _length(dataset)
    if count is not None and hasattr(dataset, "__getitem__"):
        # A torch.utils.data.Dataset may not raise IndexError at its end, so iterate by its length.
        return (dataset[i] for i in range(count))
    raise UsageError(f"dataset must be an iterable of items, got {type(dataset).__name__}")


def _length(dataset: Any) -> int | None:
    """Return the number of items, or None if the data set has no length."""
    try:
        return len(dataset)
    except (TypeError, NotImplementedError):
        # Some data sets, such as torch's loaders of endless data, have a ``__len__`` that raises.
        return None


def _mismatch(reason: str) -> UsageError:
    return UsageError(
        f"state= is of another data set: {reason}. Pass the data set of the earlier run, with its "
        "items in the same order, or leave state out to run all items. If the data set is the same "
        "and its items differ in each program, remove 'length' and 'fingerprint' from the state"
    )


def _checked_state(state: Mapping[str, Any] | None) -> State:
    if state is None:
        return State(0, [])
    try:
        return msgspec.convert(dict(state), State)
    except (TypeError, ValueError, msgspec.MsgspecError) as error:
        raise UsageError(f"state was not made by state_dict(): {error!r}") from None
