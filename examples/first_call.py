"""A first call: sample a text, stream one, and compare several samples of one prompt.

``pip install -e '.[sglang]' && python examples/first_call.py`` runs on a CPU without a download.
"tiny" is a random model, so its text is nonsense. Replace it by a folder or a name on the Hugging
Face hub. ``examples/first_call.ipynb`` has the same calls in a notebook.
"""

import sglrl


async def main():
    # The workers start here, and end with the block.
    async with sglrl.launch("tiny", device="cpu") as client:
        completion = await client.generate("2 + 2 =", max_new_tokens=8)
        print(f"text: {completion.text!r}, {completion.finish_reason}")

        # A conversation is rendered with the model's chat template.
        messages = [{"role": "user", "content": "What is 2 + 2?"}]
        stream = client.stream(messages=messages, max_new_tokens=8)
        print("chunks:", [chunk.text async for chunk in stream])

        # Samples of one prompt share its KV cache. Arrays are numpy arrays, one value per token.
        samples = await client.generate("2 + 2 =", n=3, max_new_tokens=8, logprobs=True)
        for sample in samples:
            print(f"{len(sample.output_ids)} tokens, logprob {sample.logprobs.sum():.2f}")


if __name__ == "__main__":
    sglrl.run(main())
