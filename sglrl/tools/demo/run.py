"""Run the whole demo: model, workers, training, comparison, replay, report."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import AsyncExitStack
from itertools import pairwise
from pathlib import Path
from statistics import median

import msgspec
import uvloop
from rich.console import Console

from ... import __version__
from ...actors.spawning import spawn
from ...client.client import Client
from ...errors import UsageError
from ...launching.launch import launch
from ...launching.tiny_model import tiny_model
from ...rollouts import Group, Trajectory, rollout, save
from ..display import is_live, quiet_transformers, stage, start_up
from ..logprob_check import LogprobCheck, tolerance_for
from .replay import replay
from .report import WINDOW, Comparison, Report, Step, judge, mean_rewards, task_result
from .tasks import CHARACTERS, NAMES, TASKS, Agent, Shelf, items, session_arguments

GROUP_SIZE = 16
GROUPS_PER_TASK = 16
"""Number of groups of each task in a batch."""
DONE = 0.86
"""Training stops when the mean reward of every task reaches this. It is higher than the goal,
because the goal must still be met in the last steps."""
REPLAYED = 8
"""Number of trajectories of each batch to replay. In addition, up to this number of trajectories
that several versions sampled are replayed."""
COMPARED_STEPS = 10


class DemoSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of a demo run.

    Attributes:
        tasks: the tasks to learn: names from ``TASKS``.
        steps: maximum number of weight updates.
        max_staleness: maximum age of a token, in policy versions. 0 trains synchronously.
        goal_within: time limit for the goal, in seconds from the start of the command.
        compare: whether to time some steps with and some without rollouts that run ahead.
        trajectories: the file to save the trajectories of the training in. None: they are not
            saved.
    """

    tasks: tuple[str, ...] = TASKS
    steps: int = 150
    seed: int = 0
    replicas: int = 1
    max_staleness: int = 1
    goal_within: float = 240.0
    compare: bool = True
    trajectories: Path | None = None

    def __post_init__(self) -> None:
        for task in self.tasks:
            if task not in TASKS:
                raise UsageError(f"unknown task {task!r}; known: {', '.join(TASKS)}")
        for name, least in (("steps", 1), ("seed", 0), ("replicas", 1), ("max_staleness", 0)):
            if getattr(self, name) < least:
                raise UsageError(f"{name} must be at least {least}, got {getattr(self, name)}")

    @property
    def batch_size(self) -> int:
        """Number of groups in a batch."""
        return GROUPS_PER_TASK * len(self.tasks)


def run_demo(settings: DemoSettings, console: Console) -> Report:
    """Run the whole demo and show progress on ``console``.

    ``Report.failures`` lists the requirements that the run did not meet.
    """
    begun = time.perf_counter()
    quiet_transformers()
    console.print("model: a tiny Qwen3 with random weights", highlight=False)
    folder = str(tiny_model(characters=CHARACTERS, initializer_range=0.02, seed=settings.seed))
    return uvloop.run(_Demo(settings, console, begun).run(folder))


class _Demo:
    def __init__(self, settings: DemoSettings, console: Console, begun: float) -> None:
        self.settings = settings
        self.console = console
        self.begun = begun
        self.steps: list[Step] = []
        self.kept: list[Trajectory] = []
        self.groups: list[Group] = []
        """The groups that are saved at the end."""

    async def run(self, folder: str) -> Report:
        # ``trainer`` imports torch. The command line must not import torch before a run starts.
        from .trainer import Trainer

        settings = self.settings
        async with AsyncExitStack() as stack:
            with start_up(self.console):
                client = await stack.enter_async_context(
                    launch(
                        folder,
                        replicas=settings.replicas,
                        device="cpu",
                        weight_device="cpu",
                        progress=is_live(self.console),
                    )
                )
                shelf = await stack.enter_async_context(spawn(Shelf, window=1024))
            self.client: Client = client
            names = client.tokenizer.convert_tokens_to_ids(list(NAMES))
            self.agent = Agent(shelf, names)
            self.trainer = Trainer(folder, settings.seed)
            ready = time.perf_counter()
            with stage(self.console, "training", settings.steps) as advance:
                await self.learn(
                    settings.steps,
                    settings.max_staleness,
                    lambda step: self._on_step(step, advance),
                )
            learnt = time.perf_counter()
            if (file := settings.trajectories) is not None:
                file.parent.mkdir(parents=True, exist_ok=True)
                await asyncio.to_thread(save, file, self.groups)
                look = f"sglrl view {file} --tokenizer {folder}"
                self.console.print(f"trajectories: {look}", highlight=False, soft_wrap=True)
            comparison = await self.compare() if settings.compare else None
            logprobs = await asyncio.to_thread(self.check)
            return judge(
                Report(
                    sglrl_version=__version__,
                    sglang_version=client.info.sglang_version,
                    seed=settings.seed,
                    replicas=settings.replicas,
                    group_size=GROUP_SIZE,
                    batch_size=settings.batch_size,
                    max_staleness=settings.max_staleness,
                    goal_within=settings.goal_within,
                    start_seconds=ready - self.begun,
                    learn_seconds=learnt - ready,
                    seconds=time.perf_counter() - self.begun,
                    steps=self.steps,
                    tasks=[task_result(self.steps, task) for task in settings.tasks],
                    comparison=comparison,
                    logprobs=logprobs,
                )
            )

    async def learn(self, steps: int, max_staleness: int, on_step: Callable[[Step], bool]) -> None:
        """Train for ``steps`` steps, or until ``on_step`` returns True.

        A program that trains with sglrl looks like this method.
        """
        client, trainer = self.client, self.trainer
        run = rollout(
            client,
            self.agent,
            items(self.settings.tasks, self.settings.seed),
            group_size=GROUP_SIZE,
            batch_size=self.settings.batch_size,
            max_staleness=max_staleness,
            open_session=session_arguments,
            seed=self.settings.seed,
            progress=False,
        )
        async with run:
            for _ in range(steps):
                groups = await run.take(self.settings.batch_size, timeout=300)
                # The trainer runs in a separate thread, so rollouts continue meanwhile.
                trained = await asyncio.to_thread(trainer.step, groups)
                # Unfinished rollouts continue with the new weights.
                update = await client.update_weights(trainer.model)
                trainer.remember(update.version)
                step = Step(
                    version=groups[0].version,
                    rewards=_rewards(groups),
                    staleness=sum(g.staleness for g in groups) / len(groups),
                    tokens=sum(g.tokens for g in groups),
                    entropy=trained.entropy,
                    clipped=trained.policy.clipped,
                    train_seconds=trained.seconds,
                    update_seconds=update.total_ms / 1000,
                    seconds=time.perf_counter() - self.begun,
                )
                self._keep(groups)
                if on_step(step):
                    break

    async def compare(self) -> Comparison:
        """Measure the time of a step with and without rollouts that run ahead.

        The policy continues to learn meanwhile. Questions and samples cost the same in both cases.
        """
        taken: tuple[list[float], list[float]] = [], []
        half = COMPARED_STEPS // 2
        with stage(self.console, "comparing", 2 * COMPARED_STEPS + 3) as advance:
            # This order favours neither case if the machine becomes slower.
            for ahead, steps in ((0, half), (1, COMPARED_STEPS), (0, half)):
                ends: list[float] = []

                def on_step(step: Step, ahead: int = ahead, ends: list[float] = ends) -> bool:
                    ends.append(step.seconds)
                    advance("running ahead" if ahead else "synchronous")
                    return False

                await self.learn(steps + 1, ahead, on_step)
                taken[ahead].extend(b - a for a, b in pairwise(ends))
        return Comparison(
            steps=COMPARED_STEPS, asynchronous=median(taken[1]), synchronous=median(taken[0])
        )

    def check(self) -> LogprobCheck:
        self.console.print(f"replaying {len(self.kept)} trajectories", highlight=False)
        return replay(
            self.trainer.model, self.trainer.versions, self.kept, tolerance_for("float32")
        )

    def _on_step(self, step: Step, advance: Callable[[str], None]) -> bool:
        self.steps.append(step)
        means = {task: mean_rewards(self.steps, task)[-1] for task in self.settings.tasks}
        taken = step.seconds - self.steps[-2].seconds if len(self.steps) > 1 else step.seconds
        advance(
            f"reward {', '.join(f'{task} {mean:.2f}' for task, mean in means.items())}; "
            f"{step.tokens / taken:,.0f} tokens/s, staleness {step.staleness:.1f}"
        )
        return len(self.steps) >= WINDOW and min(means.values()) >= DONE

    def _keep(self, groups: list[Group]) -> None:
        """Keep trajectories for the replay.

        It keeps the first trajectory of ``REPLAYED`` groups, and up to ``REPLAYED`` trajectories
        that several versions sampled.
        """
        if self.settings.trajectories is not None:
            self.groups += groups
        made = [t for group in groups for t in group.trajectories]
        mixed = [t for t in made if t.oldest_version != t.newest_version]
        self.kept += [g.trajectories[0] for g in groups[:REPLAYED]] + mixed[:REPLAYED]


def _rewards(groups: list[Group]) -> dict[str, float]:
    by_task: dict[str, list[float]] = {}
    for group in groups:
        by_task.setdefault(group.item["task"], []).extend(group.rewards.tolist())
    return {task: sum(rewards) / len(rewards) for task, rewards in sorted(by_task.items())}
