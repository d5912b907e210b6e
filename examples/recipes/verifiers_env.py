"""Recipe 6: GRPO on an environment of verifiers. A small model learns to write a word and no more.

The taskset, its rewards and its harness are verifiers' own. SGLang needs another version of openai
than verifiers, so the engine runs in another environment, whose Python is an option. Both need the
same version of torch::

    pip install 'sglrl[sglang,smollm2]'                                    # in one environment
    pip install 'sglrl[gateway,verifiers,smollm2]' torch==2.11.0 tensordict uv  # in another one
    python verifiers_env.py --python ONE/bin/python

The harness "null" starts a process for each sample, which takes a second of a core.
"""

import itertools
import random
from pathlib import Path

import verifiers.v1 as vf
from recipe import learn, options

import sglrl
from sglrl.integrations.verifiers import VerifiersEnv

# verifiers imports this file by its name, and takes the taskset from it.
__all__ = ["WordTaskset"]

WORDS = ["river", "stone", "candle", "window", "garden", "pencil", "mirror", "bridge"]


class WordData(vf.TaskData):
    word: str


class WordTask(vf.Task[WordData, vf.State, vf.TaskConfig]):
    @vf.reward
    async def repeats(self, trace: vf.Trace) -> float:
        return float(self.data.word in trace.last_reply.lower())

    @vf.reward(weight=0.5)
    async def brief(self, trace: vf.Trace) -> float:
        return len(self.data.word) / max(len(trace.last_reply), len(self.data.word))

    @vf.metric
    async def characters(self, trace: vf.Trace) -> float:
        return float(len(trace.last_reply))


class WordTaskset(vf.Taskset[WordTask, vf.TasksetConfig]):
    INFINITE = True

    def load(self):
        chance = random.Random(0)
        while True:
            word = chance.choice(WORDS)
            prompt = f"Repeat this word and write nothing else: {word}"
            yield WordTask(WordData(prompt=prompt, word=word), self.config.task)


ENVIRONMENT = {
    "taskset": {"id": Path(__file__).stem},
    "agent": {"harness": {"id": "null"}, "runtime": {"type": "subprocess"}},
}


def main():
    chosen = options(
        __doc__,
        steps=30,
        groups=8,
        lr=1e-5,
        heldout=8,
        more={"python": ("", "the Python of the environment with SGLang")},
    )
    if chosen.python:
        chosen.engine["python"] = chosen.python
    env = VerifiersEnv(ENVIRONMENT)
    tasks = env.tasks()
    heldout = [*itertools.islice(tasks, chosen.heldout)]
    # The agent starts a process for each sample, and the engines do not notice the load.
    limits = {"gateway": True, "max_new_tokens": 24, "timeout": 300, "concurrency": 32}
    sglrl.run(learn(chosen, env.agent, tasks, heldout, **limits))


if __name__ == "__main__":
    main()
