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
from .task_ending import Owner

StartTask = Callable[[Coroutine[Any, Any, None], Owner], "asyncio.Task[None]"]


class Items:
    """The items of ``dataset`` that must be run, with their numbers in it.

    Args:
        state: the ``state_dict`` of an earlier run, whose finished items are skipped.
        on_read: called when an item arrives later than it was requested, or when the data set
            turns out to be exhausted.

    Attributes:
        error: the exception, if the data set raised one.
        total: number of items that must be run, or None if the data set does not know it.

    Raises:
        UsageError: the data set cannot be iterated, or ``state`` is wrong.
    """

    title = "the data set"

    def __init__(
        self, dataset: Any, state: Mapping[str, Any] | None, on_read: Callable[[], None]
    ) -> None:
        self._source = _iterator(dataset)
        self._begun_before, self._unfinished_before = _checked_state(state)
        """The earlier run began the items below this number, and left some of them unfinished."""
        self._on_read = on_read
        self._next: tuple[int, Any] | None = None
        self._reading: asyncio.Task[None] | None = None
        self._read = 0
        self._ended = False
        self.error: Exception | None = None
        self.total = _length(dataset)
        if self.total is not None:
            finished = self._begun_before - len(self._unfinished_before)
            self.total -= min(self.total, finished)

    @property
    def read_ahead(self) -> int | None:
        """The number of the item that was read and not taken."""
        return None if self._next is None else self._next[0]

    @property
    def exhausted(self) -> bool:
        """Whether there are no more items."""
        return self._ended and self._next is None

    def state_dict(self, next_index: int, unfinished: set[int]) -> dict[str, Any]:
        """Return the ``state`` for a later run over the same data set.

        Args:
            next_index: the items from this number on were not taken from here.
            unfinished: numbers of the items that were taken and are not finished.
        """
        unread = {index for index in self._unfinished_before if index >= self._read}
        if (ahead := self.read_ahead) is not None and ahead < self._begun_before:
            unread.add(ahead)
        return {
            "next": max(next_index, self._begun_before),
            "unfinished": sorted(unfinished | unread),
        }

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
                self._reading = start(self._read_next(source), self)
            return
        while self._next is None and not self._ended:
            try:
                self._came(next(source))
            except StopIteration:
                self._ended = True
            except Exception as error:
                self.error, self._ended = error, True

    async def _read_next(self, source: AsyncIterator[Any]) -> None:
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

    def abandoned(self, reason: str) -> None:
        """Do nothing: the run ends without the next item."""

    def _came(self, item: Any) -> None:
        index, self._read = self._read, self._read + 1
        if index >= self._begun_before or index in self._unfinished_before:
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
        found = prompts_of(item)
        if len(found) > 1:
            raise UsageError(
                f"this item of the data set has several prompts: {' and '.join(map(repr, found))}; "
                "remove all but one of them, or set the others to None, or pass open_session=. "
                f"The item: {item!r:.200}"
            )
        if found:
            prompt = found.get("prompt")
            return {"messages": prompt} if isinstance(prompt, list) else found
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

    A key whose value is None is not there: data sets fill missing columns with None.
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
        # torch.utils.data.Dataset is of this kind. It may never raise an error for a missing item.
        return (dataset[i] for i in range(count))
    raise UsageError(f"dataset must be an iterable of items, got {type(dataset).__name__}")


def _length(dataset: Any) -> int | None:
    """Return the number of items, or None if the data set does not know this number."""
    try:
        return len(dataset)
    except (TypeError, NotImplementedError):
        # Some data sets have the method but no length, like torch's loaders of endless data sets.
        return None


def _checked_state(state: Mapping[str, Any] | None) -> tuple[int, set[int]]:
    if state is None:
        return 0, set()
    try:
        return int(state["next"]), {int(i) for i in state["unfinished"]}
    except (KeyError, TypeError, ValueError) as error:
        raise UsageError(f"state was not made by state_dict(): {error!r}") from None
