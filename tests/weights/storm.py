"""Random operations on one pool of real engines, chosen by a seed, while callers use it.

Weight updates come from this process, from files and from two trainer processes, and some are
cancelled. Workers are added, removed, killed, stopped and paused at the same time. ``Storm.run``
fails when an operation hangs or raises an error that its docstring does not promise.
``Storm.check`` compares every worker with the policy of the current version.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
from engine.policies import TOLERANCE, Lab, Policies

import sglrl
from sglrl.core.invariants import validate
from weights.trainer import Trainer, trainer

SEEDS = 3
"""Number of policies from which updates choose."""
LEAST, MOST = 2, 4
"""Smallest and largest number of workers in the pool."""
TIMEOUT = 5.0
"""The ``timeout`` of an update, in seconds."""
HANGS = 90.0
"""Seconds after which an operation counts as hanging.

An update has five phases of ``TIMEOUT`` seconds and repeats them when a worker is lost.
"""
PATIENCE = 120.0
"""Seconds that the pool may take to recover after the last operation."""
CALLERS = 6
CHECKED = 5
"""One of this many completions is compared with transformers."""

Operation = Callable[[random.Random], Awaitable[str]]


class Storm:
    """One run. ``events`` records every operation, for the report of a failure."""

    def __init__(self, client: sglrl.Client, policies: Policies, seed: int) -> None:
        self.client = client
        self.policies = policies
        self.seed = seed
        self.lab = Lab(client, policies)
        self.events: list[str] = []
        self.counts: Counter[str] = Counter()
        self._begun = time.monotonic()
        self._versions = itertools.count(1)
        self._trainers: list[Trainer] = []
        self._trainer_locks: list[asyncio.Lock] = []
        self._membership = asyncio.Lock()
        self._stopped: dict[int, int] = {}
        """A pidfd of each stopped process, by pid."""
        self._over = asyncio.Event()
        self.operations: list[tuple[int, Operation]] = [
            (5, self.update_from_memory),
            (3, self.update_from_files),
            (4, self.update_from_trainer),
            (3, self.cancel_update),
            (3, self.kill),
            (3, self.kill_replacement),
            (2, self.stop),
            (1, self.add),
            (1, self.remove),
            (1, self.pause),
        ]

    async def run(self, seconds: float) -> None:
        """Run operations for ``seconds``, three at a time. Let the pool recover, and check it."""
        try:
            async with contextlib.AsyncExitStack() as stack:
                for _ in range(2):
                    one = await stack.enter_async_context(trainer(self.client))
                    assert (await one.says())["result"] == "connected"
                    self._trainers.append(one)
                    self._trainer_locks.append(asyncio.Lock())
                async with asyncio.TaskGroup() as group:
                    callers = [group.create_task(self._call(i)) for i in range(CALLERS)]
                    actors = [group.create_task(self._act(i, seconds)) for i in range(3)]
                    await asyncio.wait(actors, return_when=asyncio.ALL_COMPLETED)
                    for handle in list(self._stopped.values()):
                        signal.pidfd_send_signal(handle, signal.SIGCONT)
                    async with asyncio.timeout(PATIENCE):
                        await self.client.resume()
                        await self._recover()
                        self._over.set()
                        await asyncio.wait(callers)
                async with asyncio.timeout(PATIENCE):
                    await self.check()
        except BaseException as error:
            error.add_note("\n".join([f"seed {self.seed}", *self.events[-150:], self._state()]))
            raise
        finally:
            for handle in self._stopped.values():
                with contextlib.suppress(ProcessLookupError):
                    signal.pidfd_send_signal(handle, signal.SIGCONT)

    async def check(self) -> None:
        """Check that all versions and weights are equal and correct, and that no call remains.

        No table of the pool may hold a call.
        """
        client, pool = self.client, self.client.pool
        await self.lab.check(count=4)
        fabric = pool.driver.fabric
        validate(fabric)
        assert fabric.calls == {}
        assert fabric.queue.waiting == 0
        live = [worker.id for worker in client.workers if worker.state == "ready"]
        assert all(not fabric.members[index].calls for index in live)
        channel = pool.weights
        assert channel.updates.run is None
        assert len(channel.updates._questions) == 0
        assert not channel.versions.lock.locked()
        async with asyncio.timeout(PATIENCE):
            # An engine drops an aborted request between two of its steps.
            while any(s.engine.running or s.engine.waiting for s in await client.stats()):
                pass

    # --- operations -------------------------------------------------------------------------------

    async def update_from_memory(self, rng: random.Random) -> str:
        seed, options = self._choose_update(rng)
        return await self._updated(
            self.client.update_weights(self.policies[seed].model, **options), options
        )

    async def update_from_files(self, rng: random.Random) -> str:
        seed, options = self._choose_update(rng)
        options = {k: v for k, v in options.items() if k not in ("mode", "bucket_bytes")}
        return await self._updated(
            self.client.update_weights_from_disk(self.policies[seed].folder, **options), options
        )

    async def update_from_trainer(self, rng: random.Random) -> str:
        index = rng.randrange(len(self._trainers))
        async with self._trainer_locks[index]:
            seed, options = self._choose_update(rng)
            folder = str(self.policies[seed].folder)

            async def ask() -> None:
                answer = await self._trainers[index].ask(update=folder, **options)
                if answer["result"] == "error":
                    raise getattr(sglrl, answer["error"])(answer["says"])

            return await self._updated(ask(), options)

    async def cancel_update(self, rng: random.Random) -> str:
        seed, options = self._choose_update(rng)
        update = asyncio.ensure_future(
            self.client.update_weights(self.policies[seed].model, **options)
        )
        done, _ = await asyncio.wait([update], timeout=rng.expovariate(8))
        if not done:
            update.cancel()
            await asyncio.wait([update])
        if update.cancelled():
            return f"cancelled version {options['version']}"
        return await self._updated(update, options)

    async def kill(self, rng: random.Random) -> str:
        found = self._processes()
        if not found:
            return "nobody to kill"
        worker = rng.choice(found)
        with contextlib.suppress(ProcessLookupError):
            os.kill(worker.pid, signal.SIGKILL)
        return f"killed worker {worker.id} ({worker.state}, pid {worker.pid})"

    async def kill_replacement(self, rng: random.Random) -> str:
        """Kill a worker. Kill its replacement shortly after the copy of the weights has begun."""
        ready = [w for w in self.client.workers if w.state == "ready"]
        if len(ready) < 2:
            return "too few workers to kill one"
        worker = rng.choice(ready)
        with contextlib.suppress(ProcessLookupError):
            os.kill(worker.pid, signal.SIGKILL)
        until = time.monotonic() + 15
        while True:
            now = next((w for w in self.client.workers if w.id == worker.id), None)
            if now is None or now.state == "retired":
                return f"worker {worker.id} was removed after a kill"
            if now.state == "syncing" and now.pid != worker.pid:
                break
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(max(0.0, until - time.monotonic())):
                    await self.client.pool.driver.change()
            if time.monotonic() >= until:
                return f"killed worker {worker.id}; its replacement does not copy weights"
        await asyncio.sleep(rng.uniform(0.0, 0.03))
        with contextlib.suppress(ProcessLookupError):
            os.kill(now.pid, signal.SIGKILL)
        return f"killed worker {worker.id} and, as it copied weights, its replacement {now.pid}"

    async def stop(self, rng: random.Random) -> str:
        """Stop a worker with SIGSTOP, and continue it later."""
        found = [w for w in self._processes() if w.pid not in self._stopped]
        if not found:
            return "nobody to stop"
        worker = rng.choice(found)
        seconds = rng.choice([0.05, 0.5, 2.0, 8.0])
        try:
            handle = os.pidfd_open(worker.pid)
        except ProcessLookupError:
            return "the worker to stop has exited"
        self._stopped[worker.pid] = handle
        try:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(handle, signal.SIGSTOP)
                await asyncio.sleep(seconds)
                signal.pidfd_send_signal(handle, signal.SIGCONT)
        finally:
            os.close(self._stopped.pop(worker.pid))
        return f"stopped worker {worker.id} ({worker.state}, pid {worker.pid}) for {seconds} s"

    async def add(self, rng: random.Random) -> str:
        async with self._membership:
            if self._size() >= MOST:
                return "the pool has enough workers"
            try:
                (added,) = await self.client.add_workers()
            except sglrl.WorkerStartError as error:
                # The new worker was killed before it served.
                return f"no worker was added: {error.message}"
            return f"added worker {added}"

    async def remove(self, rng: random.Random) -> str:
        async with self._membership:
            live = [w for w in self.client.workers if w.state == "ready"]
            if self._size() <= LEAST or not live:
                return "the pool has no worker to spare"
            worker = rng.choice(live)
            try:
                await self.client.remove_worker(worker.id, timeout=5)
            except (sglrl.UsageError, sglrl.WorkerLost) as error:
                # This worker was killed, or other workers were.
                return f"worker {worker.id} was not removed: {error}"
            return f"removed worker {worker.id}"

    async def pause(self, rng: random.Random) -> str:
        mode: Any = rng.choice(["in_place", "retract", "abort"])
        seconds = rng.uniform(0.0, 1.0)
        try:
            await self.client.pause(mode, timeout=300)
            await asyncio.sleep(seconds)
        except sglrl.DeadlineExceeded as error:
            return f"pause: {error}"
        finally:
            with contextlib.suppress(sglrl.DeadlineExceeded):
                await self.client.resume(timeout=300)
        return f"paused ({mode}) for {seconds:.2f} s"

    # --- helpers ----------------------------------------------------------------------------------

    async def _act(self, index: int, seconds: float) -> None:
        rng = random.Random(f"{self.seed}-{index}")
        weights = [weight for weight, _ in self.operations]
        until = self._begun + seconds
        while time.monotonic() < until:
            await asyncio.sleep(rng.expovariate(4))
            (chosen,) = rng.choices(self.operations, weights)
            operation = chosen[1]
            name = operation.__name__  # type: ignore[attr-defined]
            self._note(f"{index}: {name} begins")
            try:
                async with asyncio.timeout(HANGS):
                    result = await operation(rng)
            except TimeoutError as error:
                raise AssertionError(f"{name} hangs") from error
            self.counts[name] += 1
            self._note(f"{index}: {name}: {result}")

    async def _call(self, index: int) -> None:
        """Use the pool as a caller does. Every call must return its full result in all cases."""
        rng = random.Random(f"{self.seed}-caller-{index}")
        while not self._over.is_set():
            prompt = [rng.randrange(3, 500) for _ in range(rng.randrange(1, 40))]
            count = rng.randrange(1, 80)
            kind = rng.choice(["generate", "generate", "stream", "cancel", "score"])
            try:
                if kind == "score":
                    (row,) = await self.client.score(input_ids=[prompt])
                    assert len(row) == len(prompt)
                else:
                    await self._generate(kind, prompt, count, rng)
            except sglrl.WorkerLost as error:
                # The pool fails a call that loses several workers in a row.
                if "loss" not in str(error):
                    raise
            self.counts[kind] += 1

    async def _generate(self, kind: str, prompt: list[int], count: int, rng: random.Random) -> None:
        wanted: dict[str, Any] = {
            "max_new_tokens": count,
            "logprobs": True,
            "ignore_eos": True,
            "temperature": rng.choice([0.0, 1.0]),
        }
        if kind == "stream":
            stream = self.client.stream(input_ids=prompt, **wanted)
            async for _ in stream:
                pass
            completion = stream.completion
        else:
            call = asyncio.ensure_future(self.client.generate(input_ids=prompt, **wanted))
            if kind == "cancel":
                await asyncio.wait([call], timeout=rng.uniform(0.0, 0.2))
                call.cancel()
                await asyncio.wait([call])
                if call.cancelled():
                    return
            completion = await call
        self._check_completion(prompt, completion, count, wanted["temperature"], rng)

    def _check_completion(
        self,
        prompt: list[int],
        completion: sglrl.Completion,
        count: int,
        temperature: float,
        rng: random.Random,
    ) -> None:
        aborted = completion.finish_reason == "abort"
        assert aborted or len(completion.output_ids) == count, completion
        assert len(completion.logprobs) == len(completion.output_ids)
        spans = completion.versions
        assert [s.start for s in spans] == [0, *(s.stop for s in spans)][: len(spans)]
        assert all(span.version in self.lab.by_version for span in spans), spans
        if len(spans) != 1 or rng.randrange(CHECKED):
            return
        # At temperature 0 the engine picks the likeliest token and reports logprobs of temperature
        # 1.
        policy = self.lab.by_version[spans[0].version]
        expected = policy.logprobs_of(prompt, completion.output_ids)
        np.testing.assert_allclose(completion.logprobs, expected, atol=TOLERANCE, rtol=0)
        self.counts["compared with transformers"] += 1

    def _choose_update(self, rng: random.Random) -> tuple[int, dict[str, Any]]:
        """Choose a policy, and options of an update with a version that no other update has."""
        seed = rng.randrange(SEEDS)
        version = next(self._versions)
        self.lab.by_version[version] = self.policies[seed]
        return seed, {
            "version": version,
            "inflight": rng.choice(["continue", "continue", "retract", "abort", "drain"]),
            "mode": rng.choice(["auto", "auto", "bucketed"]),
            "bucket_bytes": rng.choice([None, 1 << 14, 1 << 17]),
            "timeout": TIMEOUT,
            "drain_timeout": TIMEOUT,
        }

    async def _updated(self, update: Awaitable[Any], options: dict[str, Any]) -> str:
        version = options["version"]
        try:
            await update
        except (sglrl.WeightUpdateError, sglrl.WorkerLost, sglrl.DeadlineExceeded) as error:
            return f"version {version} was given up: {error}"
        except sglrl.UsageError as error:
            # Another update with a larger version was applied first.
            if "above" not in str(error):
                raise
            return f"version {version} came too late"
        self.counts["updated"] += 1
        return f"version {version} with {options}"

    def _processes(self) -> list[sglrl.WorkerInfo]:
        states = ("starting", "syncing", "stale", "ready", "draining")
        return [w for w in self.client.workers if w.state in states and w.pid]

    def _size(self) -> int:
        return sum(w.state != "retired" for w in self.client.workers)

    async def _recover(self) -> None:
        """Wait until all workers serve. If none has the current weights, send new ones."""
        while True:
            states = {w.state for w in self.client.workers} - {"retired"}
            if states == {"ready"}:
                return
            if states == {"stale"}:
                self._note(await self.update_from_memory(random.Random(self.seed)))
                continue
            await self.client.pool.driver.change()

    def _note(self, text: str) -> None:
        self.events.append(f"{time.monotonic() - self._begun:8.3f} {text}")

    def _state(self) -> str:
        return f"{dict(self.counts)}\n{self.client.workers}"


async def storm(policies: Policies, seed: int, seconds: float) -> Storm:
    """Start a pool, run one storm on the pool and close it."""
    async with sglrl.launch(
        policies[0].folder, device="cpu", replicas=3, restarts=10_000, hang_timeout=20
    ) as client:
        found = Storm(client, policies, seed)
        await found.run(seconds)
        return found
