"""Read a data set item by item, and make the arguments of a session for an item.

At most one item is read ahead. Reading never delays a sample.
"""

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
    """The items of ``dataset`` that must be run, with their numbers in it.

    Args:
        wanted: returns whether the item of this number must be run.
        on_read: called when an item arrives later than it was requested, or when the data set
            turns out to be exhausted.

    Attributes:
        exhausted: there are no more items.
        error: the exception, if the data set raised one.
        read: number of items read so far.
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
        """The number of the item that was read and not taken."""
        return None if self._next is None else self._next[0]

    @property
    def exhausted(self) -> bool:
        return self._ended and self._next is None

    def take(self, start: StartTask) -> tuple[int, Any] | None:
        """Return the next item, or None.

        None means that the data set is exhausted, or that a task started by ``start`` now reads the
        item.
        """
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
    """Return the arguments of a session for an item of a data set.

    Raises:
        UsageError: the item does not determine the arguments.
    """
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
    """Return the number of items, or None if the data set does not know this number."""
    try:
        return len(dataset)
    except (TypeError, NotImplementedError):
        # Some data sets have the method but no length, like torch's loaders of endless data sets.
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
        # torch.utils.data.Dataset is of this kind. It may never raise an error for a missing item.
        return (dataset[i] for i in range(count))
    raise UsageError(f"dataset must be an iterable of items, got {type(dataset).__name__}")
