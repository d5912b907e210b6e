"""Run environments with Gymnasium's interface over text in ``sglrl.rollout``.

An environment has ``reset(seed=, options=)`` and ``step(action)``, as in
https://gymnasium.farama.org/api/env. The package gymnasium is not needed.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
from collections.abc import AsyncIterator, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Any

from ..config import positive, type_of
from ..errors import ContextFull, UsageError
from ..inference.completion import Completion
from ..sessions.session import Session

__all__ = ["GymnasiumAgent"]


def _text_of(turn: Completion) -> str:
    return turn.text


def _unchanged(observation: Any) -> Any:
    return observation


class GymnasiumAgent:
    """An agent for ``sglrl.rollout`` that plays one episode of an environment for each sample.

    ::

        agent = GymnasiumAgent(make_env, max_turns=20)
        rules = [{"role": "system", "content": "Answer with one word."}]
        items = [{"messages": rules, "seed": n} for n in range(100)]
        run = sglrl.rollout(client, agent, items, group_size=8, max_new_tokens=64)

    Each observation becomes a message of the user, and each turn an action. The reward of a step is
    the reward of its turn. The episode ends when the environment terminates or truncates it, after
    ``max_turns``, or when the context is full. ``metadata`` gets ``terminated`` and ``truncated``:
    the latter is also True if the agent has ended the episode.

    The item of a sample is a mapping. Its ``seed`` and ``options`` are the arguments of ``reset``,
    so all samples of a group begin in the same state. Without an instruction in the item, pass
    ``open_session=lambda item: {}`` to ``rollout``; the first observation is then the prompt.

    The methods of an environment run in a thread of its own, and may block. They may also be
    coroutine functions, which run on the event loop.

    Args:
        make: returns a new environment, which is closed at the end of its episode. It runs in the
            thread, too.
        max_turns: the largest number of steps of an episode. None: no limit.
        action: returns the action of a turn. None: its text.
        observation: returns the text of an observation. None: the observation is a text.

    Raises:
        UsageError: an argument is wrong. During an episode: an observation is not a text, a reward
            is not a number, or the item is not a mapping.
    """

    def __init__(
        self,
        make: Callable[[], Any],
        *,
        max_turns: int | None = None,
        action: Callable[[Completion], Any] | None = None,
        observation: Callable[[Any], str] | None = None,
    ) -> None:
        for name, given in (("make", make), ("action", action), ("observation", observation)):
            if not callable(given) and (given is not None or name == "make"):
                raise UsageError(f"{name} must be a function, got {given!r:.200}")
        self._make = make
        self._max_turns = None if max_turns is None else positive("max_turns", max_turns)
        self._action = action or _text_of
        self._observation = observation or _unchanged

    async def __call__(self, session: Session, item: Mapping[str, Any]) -> float | None:
        """Play an episode.

        Returns:
            None, because the rewards are those of the turns.
        """
        if not isinstance(item, Mapping):
            raise UsageError(f"an item must be a mapping, which may have a seed; got {item!r:.200}")
        arguments = {"seed": item.get("seed"), "options": item.get("options")}
        episode = _Episode()
        async with episode.open(self._make):
            observation, _ = await episode.call("reset", **arguments)
            turns, terminated, truncated = 0, False, False
            while not (terminated or truncated):
                self._observe(session, observation)
                try:
                    turn = await session.generate()
                except ContextFull:
                    if not turns:
                        raise
                    truncated = True
                    break
                result = await episode.call("step", self._action(turn))
                observation, reward, terminated, truncated, _ = result
                session.reward(reward)
                turns += 1
                truncated = truncated or turns == self._max_turns
        session.metadata.update(terminated=bool(terminated), truncated=bool(truncated))
        return None

    def _observe(self, session: Session, observation: Any) -> None:
        text = self._observation(observation)
        if not isinstance(text, str):
            raise UsageError(
                f"an observation must be a text, got {type_of(text)}: pass observation=, which "
                "returns the text of an observation"
            )
        session.observe({"role": "user", "content": text})


class _Episode:
    """An environment of one episode, and the thread in which its methods run."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "gymnasium")
        self._env: Any = None

    @asynccontextmanager
    async def open(self, make: Callable[[], Any]) -> AsyncIterator[None]:
        """Make the environment, and close it at the end."""
        try:
            self._env = await self._run(make)
            try:
                yield
            finally:
                task = asyncio.current_task()
                if task is not None and task.cancelling():
                    # A step that runs cannot be interrupted, so do not wait for it. The thread
                    # closes the environment after the step.
                    self._close_later()
                else:
                    await self.call("close")
        finally:
            self._thread.shutdown(wait=False)

    async def call(self, name: str, *arguments: Any, **named: Any) -> Any:
        """Call a method of the environment in its thread. If it returns an awaitable, await it."""
        result = await self._run(functools.partial(getattr(self._env, name), *arguments, **named))
        return await result if inspect.isawaitable(result) else result

    async def _run(self, work: Callable[[], Any]) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    def _close_later(self) -> None:
        loop = asyncio.get_running_loop()

        def close() -> None:
            result = self._env.close()
            if inspect.iscoroutine(result):
                asyncio.run_coroutine_threadsafe(result, loop)

        self._thread.submit(close)
