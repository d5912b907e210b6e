"""A policy whose samples another model judges. Each model has its own pool of workers.

``pip install -e '.[sglang]' && python examples/llm_judge.py [questions]`` runs on a CPU without a
download. The models are random, so the scores are too. With GPUs, give each pool its own:
``launch(policy, gpus=[0, 1], replicas=2)`` and ``launch(judge, gpus=[2])``.
"""

import math
import sys

import sglrl

RUBRIC = "Question: {question}\nAnswer: {answer}\nIs the answer correct? Reply yes or no."


class Judge:
    """Scores an answer with the probability of "yes" as the judge's next token.

    This needs one forward pass and no parsing of a text. The judge's pool batches all requests.
    """

    def __init__(self, client):
        self.client = client
        self.tokenizer = client.tokenizer
        encode = self.tokenizer.encode
        self.yes, self.no = (encode(word, add_special_tokens=False)[0] for word in ("yes", "no"))

    async def score(self, question, answer):
        text = RUBRIC.format(question=question, answer=answer)
        messages = [{"role": "user", "content": text}]
        ids = self.tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_dict=False
        )
        found = await self.client.next_token_logprobs(ids)
        # The probability of "yes", given that the judge replies with one of the two.
        return 1 / (1 + math.exp(found.logprobs[self.no] - found.logprobs[self.yes]))


async def main(count):
    async with (
        sglrl.launch("tiny", device="cpu") as policy,
        sglrl.launch("tiny", device="cpu") as judging,
    ):
        judge = Judge(judging)

        async def agent(session, item):
            turn = await session.generate(max_new_tokens=16)
            return await judge.score(item["question"], turn.text)

        items = [
            {"messages": [{"role": "user", "content": text}], "question": text}
            for text in (f"What is {i} + {i}?" for i in range(count))
        ]
        async for group in sglrl.rollout(policy, agent, items, group_size=4, timeout=60.0):
            print(group.item["question"], *(f"{reward:.2f}" for reward in group.rewards))


if __name__ == "__main__":
    sglrl.run(main(int(sys.argv[1]) if len(sys.argv) > 1 else 8))
