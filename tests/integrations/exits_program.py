"""Ask a genlm model that is never closed, and exit. Forks do it several times, and print statuses.

Arguments: the model's folder, and the number of forks. torch and transformers are imported once.
"""

from __future__ import annotations

import asyncio
import os
import sys

from transformers import AutoTokenizer

from sglrl.integrations.genlm import AsyncSGLTransformer


def ask(folder: str) -> AsyncSGLTransformer:
    model = AsyncSGLTransformer.from_name(folder, {"engine": "fake", "vocab_size": 512})
    prompts = [[token] for token in range(200)]
    asyncio.run(model.batch_next_token_logprobs(prompts))
    return model


# Loading a tokenizer imports 2,000 modules.
AutoTokenizer.from_pretrained(sys.argv[1])
for _ in range(int(sys.argv[2])):
    child = os.fork()
    if child == 0:
        # The fork leaves the loop and ends like any program, with its model.
        model = ask(sys.argv[1])
        break
    print(os.waitpid(child, 0)[1], flush=True)
