"""Recipe 2: GRPO teaches SmolLM2-135M to use a calculator, in its own chat format.

``python calculator.py`` takes a few minutes on a GPU. The model reads a small story, writes a call
such as ``CALC 12 * 31``, gets the result in a message, and answers. Only a right answer is
rewarded. The model could not compute most of the answers by itself.
"""

import operator
import random
import re

from recipe import learn, options

import sglrl

OPERATORS = {"+": operator.add, "-": operator.sub, "*": operator.mul}
STORIES = {
    "+": "Ann has {a} {things} and gets {b} more. How many {things} does she have?",
    "-": "Ann has {a} {things} and gives away {b}. How many {things} does she have?",
    "*": "Ann has {a} boxes with {b} {things} each. How many {things} does she have?",
}
THINGS = ["apples", "books", "coins", "eggs", "flowers", "keys", "lamps", "nuts", "pens", "stones"]
SYSTEM = {
    "role": "system",
    "content": "You use a calculator. Then you answer with the number only.",
}
EXAMPLES = [("*", 14, 23, "cards"), ("+", 231, 48, "cups"), ("-", 312, 57, "cakes")]


def conversation(operation, a, b, things):
    """Return the question, the call, the result and the answer."""
    result = str(OPERATORS[operation](a, b))
    return [
        {"role": "user", "content": STORIES[operation].format(a=a, b=b, things=things)},
        {"role": "assistant", "content": f"CALC {a} {operation} {b}"},
        {"role": "tool", "content": result},
        {"role": "assistant", "content": result},
    ]


def item(chance):
    operation = chance.choice("+-*")
    high = 99 if operation == "*" else 999
    a, b = sorted((chance.randint(10, high), chance.randint(10, high)), reverse=True)
    question, *_, answer = conversation(operation, a, b, chance.choice(THINGS))
    shown = [message for example in EXAMPLES for message in conversation(*example)]
    return {"messages": [SYSTEM, *shown, question], "answer": answer["content"]}


def calculate(text):
    """Return the result of a call, or an error as a calculator would show it."""
    call = re.fullmatch(r"\s*CALC (\d{1,6}) ([-+*]) (\d{1,6})\s*", text)
    return str(OPERATORS[call[2]](int(call[1]), int(call[3]))) if call else "error"


async def agent(session, item):
    call = await session.generate(max_new_tokens=16)
    session.observe({"role": "tool", "content": calculate(call.text)})
    answer = await session.generate(max_new_tokens=10)
    return float(answer.text.strip() == item["answer"])


def main():
    chosen = options(__doc__, steps=20)
    held = random.Random("held out")  # the seeds of training are numbers
    heldout = [item(held) for _ in range(chosen.heldout)]
    chance = random.Random(chosen.seed)
    sglrl.run(learn(chosen, agent, (item(chance) for _ in iter(int, 1)), heldout))


if __name__ == "__main__":
    main()
