"""The cases of ``bench.engine``: a model, a load and the engine arguments of every system."""

from __future__ import annotations

import json
import os
import random
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

from sglrl.config import cache_dir

_QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 151_643,
    "eos_token_id": 151_645,
    "head_dim": 128,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "max_position_embeddings": 40_960,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-6,
    "rope_scaling": None,
    "rope_theta": 1_000_000,
    "sliding_window": None,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 151_936,
}
_SHAPES: dict[str, dict[str, Any]] = {
    "qwen3-0.6b": {
        "hidden_size": 1024,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "intermediate_size": 3072,
        "max_window_layers": 28,
        "tie_word_embeddings": True,
    },
    "qwen3-8b": {
        "hidden_size": 4096,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "intermediate_size": 12_288,
        "max_window_layers": 36,
        "tie_word_embeddings": False,
    },
    "qwen3-32b": {
        "hidden_size": 5120,
        "num_hidden_layers": 64,
        "num_attention_heads": 64,
        "intermediate_size": 25_600,
        "max_window_layers": 64,
        "tie_word_embeddings": False,
    },
}
_RECIPE = 1
"""Change this number when the files written change. It keeps an old folder from being used."""


class Case(NamedTuple):
    """A model and the load on it.

    Attributes:
        model: "tiny", or a key of the shapes above. SGLang makes up the weights of a shape.
        prompt: prompt tokens of each request.
        new: tokens that each request generates.
        requests: requests in one repetition.
        samples: requests that have the same prompt. A system makes them in one call if it can.
    """

    name: str
    model: str
    device: str
    dtype: str
    vocab: int
    prompt: int
    new: int
    in_flight: int
    requests: int
    repeats: int
    samples: int = 1

    @property
    def tokens(self) -> int:
        """Tokens generated in one repetition."""
        return self.requests * self.new


CASES = {
    case.name: case
    for case in (
        Case("tiny-cpu", "tiny", "cpu", "float32", 512, 64, 32, 64, 256, 3),
        Case("0.6b", "qwen3-0.6b", "cuda", "bfloat16", 151_936, 64, 64, 1024, 4096, 5),
        Case("8b", "qwen3-8b", "cuda", "bfloat16", 151_936, 512, 256, 256, 512, 3),
    )
}

GPU_ARGUMENTS: dict[str, Any] = {
    "load_format": "dummy",
    "attention_backend": "triton",
    "sampling_backend": "pytorch",
    "disable_prefill_cuda_graph": True,
}


def environment(case: Case) -> dict[str, str]:
    """Return the environment variables for every system.

    On a CPU, the engine's threads share the cores with its clients. If waiting threads spun, the
    bench would measure the operating system's scheduler.
    """
    return {"OMP_WAIT_POLICY": "PASSIVE"} if case.device == "cpu" else {}


def engine_arguments(case: Case, extra: dict[str, Any]) -> dict[str, Any]:
    """Return SGLang's ``ServerArgs`` for every system, without model, device, dtype and tokenizer.

    Arguments that this SGLang version does not have are omitted. ``extra`` overrides the rest.
    """
    from sglrl.api.engine_fields import engine_fields

    arguments: dict[str, Any] = {"random_seed": 1}
    if case.device == "cuda":
        known = engine_fields()
        # Capture a CUDA graph for the case's own batch size, so that full batches decode in one.
        wanted = GPU_ARGUMENTS | {"cuda_graph_max_bs_decode": case.in_flight}
        arguments |= {name: value for name, value in wanted.items() if name in known}
    return arguments | extra


def model_folder(case: Case) -> Path:
    """Return a folder with config and tokenizer. The first call makes it, without a network.

    Only the tiny model's folder has weights.
    """
    from sglrl.api.tiny_model import make_tokenizer, tiny_model

    if case.model == "tiny":
        return tiny_model()
    folder = cache_dir() / f"bench-{_RECIPE}-{case.model}"
    if (folder / "config.json").is_file():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=".making-", dir=folder.parent))
    make_tokenizer(scratch, 512)
    (scratch / "config.json").write_text(
        json.dumps(_QWEN3 | _SHAPES[case.model], indent=2), encoding="utf-8"
    )
    os.replace(scratch, folder)
    return folder


def prompts(case: Case, repetition: int, count: int) -> list[list[int]]:
    """Return distinct random prompts: equal for every system, different in every repetition.

    So the prefix cache is on, and finds only the prompts that samples share. Repetition -1 is the
    warm-up.
    """
    draw = random.Random(f"{case.name} {repetition}")
    return [[draw.randrange(case.vocab) for _ in range(case.prompt)] for _ in range(count)]
