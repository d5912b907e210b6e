"""The cases of the benches: models with a load, and the engine arguments of every system."""

from __future__ import annotations

import json
import os
import random
import tempfile
from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import Any, NamedTuple

import sglrl
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


def _shape(hidden: int, layers: int, heads: int, middle: int, tied: bool) -> dict[str, Any]:
    return {
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "max_window_layers": layers,
        "num_attention_heads": heads,
        "intermediate_size": middle,
        "tie_word_embeddings": tied,
    }


_SHAPES = {
    "qwen3-0.6b": _shape(1024, 28, 16, 3072, True),
    "qwen3-8b": _shape(4096, 36, 32, 12_288, False),
    "qwen3-32b": _shape(5120, 64, 64, 25_600, False),
}
_RECIPE = 1
"""Change this number when the written files change, so that no old folder is used."""


class Case(NamedTuple):
    """A model and the load on it.

    Attributes:
        model: "tiny", or a key of ``_SHAPES``. For these keys, SGLang makes random weights.
        vocab: number of token ids from which prompts are drawn.
        prompt: number of prompt tokens of each request.
        new: number of tokens that each request generates.
        in_flight: number of requests that run at the same time.
        requests: number of requests in one repetition.
        repeats: number of repetitions.
        samples: number of requests that have the same prompt. A system makes them in one call if it
            can.
        extra: engine arguments for every system, which override the case's other arguments.
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
    extra: Mapping[str, Any] = {}

    @property
    def on_gpu(self) -> bool:
        return self.device == "cuda"

    @property
    def environment(self) -> dict[str, str]:
        """The environment variables for every system.

        On a CPU, the engine's threads share the cores with its clients. If waiting threads spun,
        the bench would measure the operating system's scheduler.
        """
        return {} if self.on_gpu else {"OMP_WAIT_POLICY": "PASSIVE"}

    @property
    def arguments(self) -> dict[str, Any]:
        """SGLang's ``ServerArgs`` for every system, without model, device, dtype and tokenizer."""
        arguments: dict[str, Any] = {"random_seed": 1}
        if self.on_gpu:
            # Capture a CUDA graph for the case's own batch size, so that a full batch decodes in a
            # single graph.
            arguments |= gpu_arguments(cuda_graph_max_bs_decode=self.in_flight)
        return {**arguments, **self.extra}

    @property
    def folder(self) -> str:
        """The model's folder with its configuration and tokenizer.

        The folder is made on first use, without a network. Only the folder of the tiny model has
        weights.
        """
        from sglrl.launching.tiny_model import make_tokenizer, tiny_model

        if self.model == "tiny":
            return str(tiny_model())
        folder = cache_dir() / f"bench-{_RECIPE}-{self.model}"
        if not (folder / "config.json").is_file():
            folder.parent.mkdir(parents=True, exist_ok=True)
            scratch = Path(tempfile.mkdtemp(prefix=".making-", dir=folder.parent))
            make_tokenizer(scratch, 512)
            (scratch / "config.json").write_text(
                json.dumps(_QWEN3 | _SHAPES[self.model], indent=2), encoding="utf-8"
            )
            os.replace(scratch, folder)
        return str(folder)

    def launch(self, folder: str | None = None, **arguments: Any) -> sglrl.Client:
        """Return a pool with the case's engine arguments and further arguments of ``launch``."""
        given = {"device": self.device, "dtype": self.dtype, **self.arguments, **arguments}
        return sglrl.launch(folder or self.folder, **given)

    def server_arguments(self, folder: str | None = None, **arguments: Any) -> dict[str, Any]:
        """Return all ``ServerArgs`` for systems that run SGLang's own engine or server."""
        from .sglang_cpu import cpu_arguments

        return {
            "model_path": folder or self.folder,
            "device": self.device,
            "dtype": self.dtype,
            "log_level": "warning",
            **({} if self.on_gpu else cpu_arguments()),
            **self.arguments,
            **arguments,
        }


CASES = {
    case.name: case
    for case in (
        Case("tiny-cpu", "tiny", "cpu", "float32", 512, 64, 32, 64, 256, 3),
        Case("0.6b", "qwen3-0.6b", "cuda", "bfloat16", 151_936, 64, 64, 1024, 4096, 5),
        Case("8b", "qwen3-8b", "cuda", "bfloat16", 151_936, 512, 256, 256, 512, 3),
    )
}
CaseName = StrEnum("CaseName", {name: name for name in CASES})  # type: ignore[misc]


def gpu_arguments(**more: Any) -> dict[str, Any]:
    """Return engine arguments for a GPU, except arguments that this SGLang version lacks."""
    from sglrl.launching.engine_fields import engine_fields

    known = engine_fields()
    wanted = {
        "load_format": "dummy",
        "attention_backend": "triton",
        "sampling_backend": "pytorch",
        "disable_prefill_cuda_graph": True,
        **more,
    }
    return {name: value for name, value in wanted.items() if name in known}


def prompts(case: Case, repetition: int, count: int) -> list[list[int]]:
    """Return distinct random prompts: equal for every system, different in every repetition.

    The prefix cache is on, but it can find only prompts that several samples share. Repetition -1
    is the warm-up.
    """
    draw = random.Random(f"{case.name} {repetition}")
    return [[draw.randrange(case.vocab) for _ in range(case.prompt)] for _ in range(count)]
