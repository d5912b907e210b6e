"""Check the arguments that ``launch`` passes on to the engine, before a worker starts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from typing import Any

from ..core.seeds import SEEDS
from ..errors import InvalidRequest, UsageError
from ..inference.logit_processors import is_processor_name
from ..inference.tokens import check_ids
from .argument_table import check_argument
from .engine_aliases import without_aliases
from .engine_fields import engine_fields
from .text_arguments import JSON_TEXTS, json_text

FOREIGN_ARGUMENTS = {
    "n_gpus": "tp_size= or replicas=",
    "num_gpus": "tp_size= or replicas=",
    "num_devices": "tp_size= or replicas=",
    "data_parallel_size": "replicas=",
    "num_replicas": "replicas=",
    "num_workers": "replicas=",
    "gpu_memory_utilization": "mem_fraction_static=, the share for weights and KV cache",
    "max_model_len": "context_length=",
    "max_num_seqs": "max_running_requests=",
    "max_num_batched_tokens": "chunked_prefill_size= and max_prefill_tokens=",
    "enforce_eager": "disable_cuda_graph=",
    "enable_prefix_caching": "disable_radix_cache=",
    "seed": "random_seed=",
    "torch_dtype": "dtype=",
    "model_dtype": "dtype=",
    "precision": "dtype=",
    "attn_implementation": "attention_backend=",
    "device_map": "device= and gpus=",
    "load_in_4bit": "quantization=",
    "load_in_8bit": "quantization=",
    "cache_dir": "download_dir=",
    "max_length": "context_length=",
    "max_seq_len": "context_length=",
    "max_seq_length": "context_length=",
    "max_context_len": "context_length=",
    "tokenizer": "tokenizer_path=",
    "max_tokens": "max_new_tokens= of generate",
    "max_new_tokens": "max_new_tokens= of generate",
    "temperature": "temperature= of generate",
}
"""Arguments of vLLM and other libraries that ``launch`` rejects, each with what to use instead."""

DTYPES = {
    "auto": "auto",
    "float32": "float32",
    "float": "float32",
    "fp32": "float32",
    "bfloat16": "bfloat16",
    "bf16": "bfloat16",
    "float16": "float16",
    "half": "float16",
    "fp16": "float16",
}

FAKE_VOCAB_SIZE = 1 << 17
FAKE_ARGUMENTS = {
    "tokens_per_step",
    "request_seconds",
    "step_seconds",
    "max_running_requests",
    "vocab_size",
    "context_length",
    "fail_start",
    "hang_file",
    "answers",
    "max_lora_rank",
    "lora_target_modules",
    "max_loaded_loras",
    "fail_lora",
    "hidden_size",
    "enable_return_routed_experts",
    "routed_experts",
}


def check_engine(engine: str) -> None:
    """Raise ``UsageError`` unless there is an engine of this name."""
    if engine not in ("sglang", "fake"):
        raise UsageError(f"unknown engine {engine!r}; known: sglang, fake")


def check_engine_arguments(
    engine: str, args: dict[str, Any], sglang: str | None = None, own: Iterable[str] = ()
) -> dict[str, Any]:
    """Check an engine's arguments and return them without SGLang's aliases.

    Args:
        engine: "sglang" or "fake".
        args: the arguments by name.
        sglang: the folder of the workers' SGLang. None: the driver's SGLang.
        own: the names of the caller's other arguments, for suggestions.

    Raises:
        UsageError: the engine has no argument of this name, the argument has no use here or is set
            by sglrl, two names set the same field, or a value is wrong.
    """
    fields = engine_fields(sglang) if engine == "sglang" else {}
    known = fields.keys() or FAKE_ARGUMENTS
    args = without_aliases(args, known)
    for name in JSON_TEXTS:
        if isinstance(args.get(name), dict):
            args[name] = json_text(name, args[name])
    seed = args.get("random_seed")
    if seed is not None and (type(seed) is not int or not 0 <= seed < SEEDS):
        raise UsageError(f"random_seed must be None or an integer in 0..{SEEDS - 1}, got {seed!r}")
    for name in args:
        if name in FOREIGN_ARGUMENTS and name not in known:
            raise UsageError(
                f"{name!r} is not an argument of launch; use {FOREIGN_ARGUMENTS[name]}"
            )
        if name not in known:
            near = get_close_matches(name, [*own, *known], n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            theirs = "SGLang's ServerArgs" if fields else f"engine={engine!r}"
            raise UsageError(f"{name!r} is neither an argument of launch nor of {theirs}{hint}")
        if name in fields:
            check_argument(name, args[name], fields[name])
    if not fields:
        _check_answers(args)
    return args


def _check_answers(args: Mapping[str, Any]) -> None:
    """Check the argument ``answers`` of the fake engine.

    Raises:
        UsageError: an answer is not a list of token ids. The error contains its index.
    """
    answers = args.get("answers", ())
    if not isinstance(answers, (list, tuple)):
        raise UsageError(f"answers must be lists of token ids, got {answers!r:.200}")
    for at, ids in enumerate(answers):
        try:
            check_ids(ids, args.get("vocab_size", FAKE_VOCAB_SIZE))
        except InvalidRequest:
            raise UsageError(
                f"answers[{at}] must be a list of token ids of the vocabulary, got {ids!r:.200}"
            ) from None


def set_deterministic(args: dict[str, Any]) -> None:
    """Set the arguments that make the result of a request independent of other requests.

    The result is then the same bit for bit. A request that is retracted, or continues on another
    worker, prefills the tokens that it had already decoded. FA3 computes the same bits when it
    prefills and when it decodes. triton does not, and other backends were not measured.

    Raises:
        UsageError: an argument contradicts ``deterministic``, or the attention backend is not FA3.
    """
    if args.get("enable_deterministic_inference") is False:
        raise UsageError("deterministic=True and enable_deterministic_inference=False contradict")
    backend = args.get("attention_backend")
    if backend not in (None, "fa3"):
        raise UsageError(
            f"deterministic=True needs attention_backend='fa3', got {backend!r}, which may "
            "give other bits after a retraction. enable_deterministic_inference=True accepts it, "
            "and makes results independent of the batch only"
        )
    for name in ("prefill_attention_backend", "decode_attention_backend"):
        if args.get(name) not in (None, "fa3"):
            raise UsageError(f"deterministic=True and {name}={args[name]!r} exclude each other")
    args["attention_backend"] = "fa3"
    args["enable_deterministic_inference"] = True


def take_logit_processors(engine: str, names: Any, args: dict[str, Any]) -> tuple[str, ...]:
    """Check the names of logit processors, and set SGLang's argument that enables them.

    Raises:
        UsageError: a name does not have the form "module:Class", or the engine is not SGLang.
    """
    if isinstance(names, str) or not isinstance(names, Sequence):
        raise UsageError(f"logit_processors must be a list of names, got {names!r:.200}")
    for name in names:
        if not is_processor_name(name):
            raise UsageError(
                f"logit_processors must name classes of modules, as 'module:Class', got {name!r}"
            )
    if names and engine != "sglang":
        raise UsageError(f"engine={engine!r} has no logits: no logit_processors=")
    if names:
        args["enable_custom_logit_processor"] = True
    return tuple(dict.fromkeys(map(str, names)))


def check_on_cpu(args: Mapping[str, Any]) -> None:
    """Raise ``UsageError`` for an argument of SGLang that needs a GPU."""
    if args.get("enable_torch_compile"):
        raise UsageError("enable_torch_compile needs a GPU: SGLang compiles no model for a CPU")
    if args.get("enable_deterministic_inference") or args.get("rl_on_policy_target"):
        raise UsageError(
            "deterministic=True and rl_on_policy_target= need a GPU: on a CPU, SGLang has no "
            "kernels whose rounding does not depend on the batch"
        )
    backend = args.get("lora_backend", "torch_native")
    if backend != "torch_native":
        raise UsageError(f"lora_backend={backend!r} needs a GPU: use 'torch_native' on a CPU")
    if args.get("page_size") not in (None, 1):
        raise UsageError(
            f"page_size={args['page_size']} needs a GPU: SGLang's published wheels have no kernel "
            "for a CPU that allots the KV cache by pages"
        )


def check_dtype(dtype: object) -> str | None:
    """Return SGLang's name of a dtype. ``dtype`` is any common name of it, or a torch dtype.

    Raises:
        UsageError: the engine does not support the dtype.
    """
    if dtype is None:
        return None
    name = DTYPES.get(str(dtype).removeprefix("torch."))
    if name is None:
        raise UsageError(f"dtype must be 'auto', 'float32', 'bfloat16' or 'float16', got {dtype!r}")
    return name
