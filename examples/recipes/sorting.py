"""Recipe 4: an agent that knows nothing of sglrl learns to sort words, over OpenAI's API.

``python sorting.py`` takes a few minutes on a GPU. The agent is ordinary code for the package
openai: it gets a URL and a key, and keeps the conversation itself. sglrl turns its HTTP requests
into trajectories with the tokens that were sampled.
"""

import random

from openai import AsyncOpenAI, DefaultAsyncHttpxClient
from recipe import learn, options

import sglrl

SYSTEM = {
    "role": "system",
    "content": "Sort the words by the alphabet. Answer with the words only.",
}
EXAMPLES = ["tree, apple", "cat, zebra", "moon, house"]
WORDS = [
    *("actor", "bread", "cloud", "dance", "eagle", "flute", "grape", "horse", "ivory", "jewel"),
    *("knife", "lemon", "night", "ocean", "piano", "queen", "river", "smile", "tiger", "uncle"),
]


def in_order(text):
    return ", ".join(sorted(text.split(", ")))


async def sort_twice(base_url, api_key, first, second):
    """Let the model sort the words of two questions, in one conversation."""
    http = DefaultAsyncHttpxClient(verify=False)  # the URL is http: read no certificates
    async with AsyncOpenAI(base_url=base_url, api_key=api_key, http_client=http) as client:
        messages, answers = [SYSTEM], []
        for text in EXAMPLES:
            messages.append({"role": "user", "content": text})
            messages.append({"role": "assistant", "content": in_order(text)})
        for text in (first, second):
            messages.append({"role": "user", "content": text})
            made = await client.chat.completions.create(
                model="any", messages=messages, max_tokens=12
            )
            answers.append(made.choices[0].message.content or "")
            messages.append({"role": "assistant", "content": answers[-1]})
    return answers


async def agent(session, item):
    answers = await sort_twice(session.base_url, session.api_key, *item["questions"])
    right = [a.strip() == in_order(q) for a, q in zip(answers, item["questions"], strict=True)]
    return sum(right) / 2


def item(chance):
    return {"questions": [", ".join(chance.sample(WORDS, 2)) for _ in range(2)]}


def main():
    chosen = options(__doc__, steps=60)
    held = random.Random("held out")  # the seeds of training are numbers
    heldout = [item(held) for _ in range(chosen.heldout)]
    chance = random.Random(chosen.seed)
    items = (item(chance) for _ in iter(int, 1))
    sglrl.run(learn(chosen, agent, items, heldout, gateway=True))


if __name__ == "__main__":
    main()
