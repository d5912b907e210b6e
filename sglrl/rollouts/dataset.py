"""A data set, item by item: one is read ahead at most, and never in anybody's way; and what a
session begins with for an item."""

from __future__ import annotations

import asyncio
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

from ..errors import SglrlError, UsageError

StartTask = Callable[[Coroutine[Any, Any, None]], "asyncio.Task[None]"]


class Items:
    """The items of ``dataset`` that are to be run, with their numbers in it.

    Args:
        wanted: whether the item of this number is to be run.
        on_read: called when an item has come that was not there when it was asked for, or when it
            turns out that there is none.

    ``exhausted``: there are no more. ``error``: why, if the data set raised. ``read``: how many
    items were read.
    """

    def __init__(
        self, dataset: Any, wanted: Callable[[int], bool], on_read: Callable[[], None]
    ) -> None:
        self._source = _iterator(dataset)
        self._wanted = wanted
        self._on_read = on_read
        self._next: tuple[int, Any] | None = None
        self._reading: asyncio.Task[None] | None = None
        self._ended = False
        self.error: Exception | None = None
        self.read = 0

    @property
    def read_ahead(self) -> int | None:
        """The number of the item that is here and was not taken."""
        return None if self._next is None else self._next[0]

    @property
    def exhausted(self) -> bool:
        return self._ended and self._next is None

    def take(self, start: StartTask) -> tuple[int, Any] | None:
        """The next item, if it is here; else it is being read now, by a task that ``start`` begins,
        or there is none."""
        self.look(start)
        found, self._next = self._next, None
        return found

    def look(self, start: StartTask) -> None:
        """Read the next item, or find out that there is none."""
        source = self._source
        if isinstance(source, AsyncIterator):
            if self._next is None and not self._ended and self._reading is None:
                self._reading = start(self._read(source))
            return
        while self._next is None and not self._ended:
            try:
                self._came(next(source))
            except StopIteration:
                self._ended = True
            except Exception as error:
                self.error, self._ended = error, True

    async def _read(self, source: AsyncIterator[Any]) -> None:
        try:
            while self._next is None:
                self._came(await anext(source))
        except StopAsyncIteration:
            self._ended = True
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

    def _came(self, item: Any) -> None:
        index, self.read = self.read, self.read + 1
        if self._wanted(index):
            self._next = (index, item)


def session_arguments(item: Any) -> Mapping[str, Any]:
    """What a session for an item of a data set begins with. ``UsageError`` if that is unclear."""
    if isinstance(item, str):
        return {"prompt": item}
    if isinstance(item, list) and item and all(isinstance(m, Mapping) for m in item):
        return {"messages": item}
    if isinstance(item, Mapping):
        found = {k: item[k] for k in ("prompt", "messages", "input_ids") if k in item}
        if len(found) == 1:
            prompt = found.get("prompt")
            return {"messages": prompt} if isinstance(prompt, list) else found
    raise UsageError(
        "cannot tell what a session begins with for this item of the data set; give it one of "
        f"'prompt', 'messages' and 'input_ids', or pass open_session=. The item: {item!r:.200}"
    )


def length(dataset: Any) -> int | None:
    """How many items there are, if the data set knows."""
    try:
        return len(dataset)
    except (TypeError, NotImplementedError):
        # Some have the method and not the answer, as torch's loaders of endless data sets.
        return None


def _iterator(dataset: Any) -> Iterator[Any] | AsyncIterator[Any]:
    if isinstance(dataset, AsyncIterable):
        return aiter(dataset)
    if isinstance(dataset, (str, bytes, Mapping)):
        raise UsageError(f"dataset must be an iterable of items, got {type(dataset).__name__}")
    if isinstance(dataset, Iterable):
        return iter(dataset)
    count = length(dataset)
    if count is not None and hasattr(dataset, "__getitem__"):
        # As torch.utils.data.Dataset is, which may never say that there is no such item.
        return (dataset[i] for i in range(count))
    raise UsageError(f"dataset must be an iterable of items, got {type(dataset).__name__}")
