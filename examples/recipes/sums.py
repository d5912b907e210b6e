"""Recipe 1: GRPO teaches SmolLM2-135M to add numbers up to 20.

``pip install 'sglrl[sglang,smollm2,recipes]' && python sums.py`` takes a few minutes on a GPU. Only
a right answer is rewarded, and the held-out pairs of numbers are never trained on. ``recipe.py``
has the trainer.
"""

import random

from recipe import learn, options

import sglrl

SYSTEM = {"role": "system", "content": "You are a calculator. You answer with the number only."}
EXAMPLES = [(2, 3), (20, 1), (7, 5)]
PAIRS = [(a, b) for a in range(1, 21) for b in range(1, 21)]
random.Random(0).shuffle(PAIRS)


def exchange(a, b):
    return [
        {"role": "user", "content": f"{a} + {b} = ?"},
        {"role": "assistant", "content": str(a + b)},
    ]


def item(pair):
    shown = [message for example in EXAMPLES for message in exchange(*example)]
    question, answer = exchange(*pair)
    return {"messages": [SYSTEM, *shown, question], "answer": answer["content"]}


def exact(item, text):
    """Return 1 for the right answer. ``sglrl eval --score sums:exact`` uses it too."""
    return float(text.strip() == item["answer"])


async def agent(session, item):
    turn = await session.generate(max_new_tokens=8)
    return exact(item, turn.text)


def split(chosen):
    """Return the items to train on, without end, and the held-out items."""
    chance, trained = random.Random(chosen.seed), PAIRS[chosen.heldout :]
    items = (item(chance.choice(trained)) for _ in iter(int, 1))
    return items, [item(pair) for pair in PAIRS[: chosen.heldout]]


def main():
    chosen = options(__doc__)
    if chosen.heldout >= len(PAIRS):
        raise SystemExit(f"--heldout must be less than the {len(PAIRS)} pairs of numbers")
    sglrl.run(learn(chosen, agent, *split(chosen)))


if __name__ == "__main__":
    main()
