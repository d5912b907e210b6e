"""Every field of SGLang's ``ServerArgs`` is in the table, and wrong values are rejected at once."""

from __future__ import annotations

import ast
import json
import os
import random
import time
from pathlib import Path
from types import MappingProxyType
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

import sglrl
from sglrl.launching.accepted_arguments import HARMLESS, PASSED_ON, TESTED
from sglrl.launching.argument_table import ARGUMENTS, OWN_ARGUMENTS, counted, listed, markdown
from sglrl.launching.engine_arguments import check_engine_arguments
from sglrl.launching.engine_fields import COMPUTED, EngineField, engine_fields
from sglrl.launching.rejected_arguments import _GROUPS, REJECTED
from sglrl.launching.text_arguments import JSON_TEXTS, check_files

FIELDS = engine_fields()
ROOT = Path(__file__).parents[2]
# Fields of SGLang 0.5.23 that 0.5.17 lacks, and the other way round.
OTHERS = 100
DOUBTFUL: dict[str, tuple[Any, str]] = {
    "pp_size": (2, "use replicas= and tp_size=, and hosts= for other machines"),
    "pipeline_parallel_size": (2, "an engine is one machine's"),
    "nnodes": (2, "hosts= for other machines"),
    "node_rank": (1, "hosts= for other machines"),
    "enable_lora_overlap_loading": (True, "workers prepare adapters in a thread"),
    "enable_weights_cpu_backup": (True, "use keep_weights= of client.sleep"),
    "is_embedding": (True, "only generates text"),
    "enable_dp_attention": (True, "use tp_size="),
    "return_hidden_states_mode": ("last", "use enable_return_hidden_states"),
    "enable_metrics": (True, "use client.stats()"),
    "export_metrics_to_file": (True, "use client.stats()"),
    "tool_call_parser": ("qwen25", "use renderer="),
    "reasoning_parser": ("qwen3", "use renderer="),
    "enable_custom_logit_processor": (True, "use logit_processors="),
    "disaggregation_mode": ("prefill", "in the same engine"),
    "tokenizer_worker_num": (2, "the driver tokenizes"),
    "api_key": ("x", "use sglrl.serve"),
    "log_requests": (True, "use log_dir="),
    "weight_version": ("3", "use version= of update_weights"),
    "ep_size": (2, "ep_size=2 is more than tp_size=1"),
    "enable_torch_compile": (True, "needs a GPU"),
}


@pytest.mark.parametrize("name", DOUBTFUL)
def test_what_cannot_work_is_rejected(name: str) -> None:
    value, why = DOUBTFUL[name]
    with pytest.raises(sglrl.UsageError) as error:
        sglrl.launch("tiny", device="cpu", **{name: value})
    assert why in str(error.value)
    assert repr(value) in str(error.value) or name == "enable_torch_compile"


def test_every_field_has_one_state() -> None:
    assert FIELDS.keys() - ARGUMENTS.keys() == set()
    others = ARGUMENTS.keys() - FIELDS.keys()
    assert len(others) < OTHERS, others
    parts = (TESTED, PASSED_ON, OWN_ARGUMENTS, HARMLESS, REJECTED)
    assert sum(map(len, parts)) == len(ARGUMENTS)
    assert sum(len(names.split()) for names in _GROUPS.values()) == len(REJECTED)


def test_a_field_that_sglrl_does_not_know(monkeypatch: pytest.MonkeyPatch) -> None:
    """A newer SGLang may have more fields."""
    field = EngineField(1, int, "int", ())
    fields = MappingProxyType({**FIELDS, "best_field": field})
    monkeypatch.setattr("sglrl.launching.engine_arguments.engine_fields", lambda sglang: fields)
    with pytest.raises(sglrl.UsageError, match=r"'best_field' is a field .* sglrl does not know"):
        check_engine_arguments("sglang", {"best_field": 1})
    assert listed(["best_field"]) == [("best_field", ("rejected", "sglrl does not know it"))]


def test_the_tests_of_the_table_use_the_fields() -> None:
    """Each field is a keyword, a key or a name in the test that the table names."""
    for name, test in TESTED.items():
        nodes = list(ast.walk(ast.parse((ROOT / test).read_text())))
        used = {node.value for node in nodes if isinstance(node, ast.Constant)}
        used |= {node.arg for node in nodes if isinstance(node, ast.keyword)}
        assert name in used, (name, test)


def test_passed_on_fields_are_read_by_sglang() -> None:
    """SGLang's code reads each of them outside of its HTTP server and its tokenizer's process."""
    import sglang

    source = Path(sglang.__path__[0], "srt")
    theirs = (
        *("entrypoints/http", "entrypoints/openai", "entrypoints/grpc"),
        *("managers/tokenizer", "managers/detokenizer", "parser"),
    )
    files = [f for f in source.rglob("*.py") if not str(f.relative_to(source)).startswith(theirs)]
    code = "\n".join(file.read_text() for file in files if file.name != "choices.py")
    unread = {
        name
        for name in PASSED_ON.keys() & FIELDS.keys()
        if f".{name}" not in code and f'"{name}"' not in code
    }
    assert unread == set()


def test_the_table_as_text() -> None:
    text = markdown()
    assert f"Of the {len(ARGUMENTS)} fields, " in text
    assert text.count("\n| `") == len(ARGUMENTS)
    assert "| `context_length` | tested | `tests/launching/test_accepted_arguments.py` |" in text
    assert sum(int(part.split()[0]) for part in counted(FIELDS).split(", ")) == len(FIELDS)


def test_wrong_values_of_40_arguments_are_found_at_once() -> None:
    """Of any type, and without a worker: a typed error that names the argument."""
    seed = time.time_ns()
    print("seed", seed)
    rng = random.Random(seed)
    # Those that are JSON texts may be dicts too.
    apart = {*OWN_ARGUMENTS, *JSON_TEXTS}
    known = [n for n, f in FIELDS.items() if f.type is not Any and n not in apart]
    for name in rng.sample(known, 40):
        for value in (object(), ["x", None, 3], {"x": -1}, "no such choice", -7, float("nan")):
            field = FIELDS[name]
            try:
                msgspec.convert(value, field.type)
                fits = not (field.choices and isinstance(value, str))
            except (msgspec.ValidationError, TypeError):
                fits = False
            if fits and not (isinstance(value, (int, float)) and value != abs(value)):
                continue
            with pytest.raises(sglrl.UsageError, match=name):
                sglrl.launch("tiny", device="cpu", **{name: value})


@given(st.data())
def test_values_that_ask_for_nothing_are_accepted(data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(sorted(REJECTED.keys() & FIELDS.keys())))
    field = FIELDS[name]
    values = [] if field.default is COMPUTED else [field.default]
    values += [None] * field.name.endswith(" or None") + [False] * (field.name == "bool")
    value = data.draw(st.sampled_from(values or [field.default]))
    assert check_engine_arguments("sglang", {name: value}) == {name: value}
    with pytest.raises(sglrl.UsageError, match="is not supported"):
        check_engine_arguments("sglang", {name: object()})


WRONG: dict[str, tuple[Any, str]] = {
    "mem_fraction_static": ("most", "must be float or None, got 'most'"),
    "max_running_requests": (2.5, "must be int or None"),
    "disable_cuda_graph": ("yes", "must be bool"),
    "schedule_policy": ("best", "must be one of 'lpm', 'random', 'fcfs'"),
    "attention_backend": ("fastest", "must be one of 'triton', 'torch_native'"),
    "cuda_graph_bs": (["one"], "cuda_graph_bs_decode must be List[int] or None, got ['one']"),
    "load_format": (1, "must be str"),
    "schedule_conservativeness": (None, "must be float, got None"),
    "kv_cache_dtype": ("float3", "must be one of 'auto', "),
    "cuda_graph_config": ({"decode": 1}, "must be CudaGraphConfig or None"),
    "forward_hooks": (["hook"], "must be List[dict[str, Any]] or None"),
    "json_model_override_args": ("[1]", "must be a JSON object, got '[1]'"),
    "linear_attn_verify_backend": ("fast", "must be one of 'triton', "),
    "log_level": ("loud", "must be one of 'debug', "),
    "model_impl": ("vllm", "must be one of 'auto', 'sglang', 'transformers', 'mindspore', got"),
    "tokenizer_path": ("none", "must be an existing folder, or 'owner/name' on the hub"),
}
FILES = {
    "decrypted_config_file": "must be an existing file, got 'nonsense'",
    "deepep_config": "must be a JSON object or an existing file",
    "model_checksum": "must be '', an existing file, or 'owner/name' on the hub",
    "msprobe_dump_config": "must be an existing file",
    "quantization_param_path": "must be an existing file",
    "rl_quant_profile": "must be an existing file",
}
FREE = {
    "constrained_json_whitespace_pattern",
    "debug_tensor_dump_output_folder",
    "download_dir",
    "lora_paths",
    "lora_target_modules",
}
"""Arguments that may be any text, or that another function checks."""


@pytest.mark.parametrize("name", WRONG)
def test_wrong_values(name: str) -> None:
    value, why = WRONG[name]
    with pytest.raises(sglrl.UsageError) as error:
        check_engine_arguments("sglang", {name: value})
    assert why in str(error.value)


def test_text_that_means_nothing_is_rejected() -> None:
    for name in FIELDS.keys() - FREE - FILES.keys():
        with pytest.raises(sglrl.UsageError, match=name):
            check_engine_arguments("sglang", {name: "nonsense"})


@pytest.mark.parametrize("name", FILES)
def test_a_file_that_does_not_exist(name: str) -> None:
    with pytest.raises(sglrl.UsageError, match=f"^{name} {FILES[name]}"):
        sglrl.launch("tiny", device="cpu", **{name: "nonsense"})
    # It may exist on the hosts of the workers.
    hosts = sglrl.Hosts("tcp://127.0.0.1:7999", insecure=True)
    sglrl.launch("tiny", device="cpu", hosts=hosts, **{name: "nonsense"})


TEXTS: list[tuple[str, Any]] = [
    ("cuda_graph_config", {"decode": {"backend": "full"}}),
    ("deepep_config", '{"normal_dispatch": {"num_sms": 96}}'),
    ("deepep_config", __file__),
    ("forward_hooks", [{"name": "hook"}]),
    ("linear_attn_verify_backend", "nv_cutedsl"),
    ("deepep_config", ""),
    ("json_model_override_args", '{"a": NaN}'),
    ("kv_canary_real_data", "ALL"),
    ("log_level", "INFO"),
    ("model_checksum", ""),
    ("model_impl", "transformers"),
    ("modelopt_quant", "fp8"),
    ("msprobe_dump_config", __file__),
    ("quantization_param_path", __file__),
    ("tokenizer_path", "owner/name"),
    ("tokenizer_path", os.path.dirname(__file__)),
]


@pytest.mark.parametrize(("name", "value"), TEXTS)
def test_text_that_means_something(name: str, value: Any) -> None:
    assert check_engine_arguments("sglang", {name: value}) == {name: value}
    check_files({name: value})


@pytest.mark.parametrize("name", ["json_model_override_args", "model_loader_extra_config"])
def test_json_may_be_a_dict(name: str) -> None:
    found = check_engine_arguments("sglang", {name: {"rope_theta": 5.5, "a": [None, "ü"]}})
    assert json.loads(found[name]) == {"rope_theta": 5.5, "a": [None, "ü"]}
    with pytest.raises(sglrl.UsageError, match=f"{name} must be a dict of JSON values"):
        check_engine_arguments("sglang", {name: {"a": object()}})


def test_a_wrong_type_of_any_field_is_rejected() -> None:
    """The types of nearly all fields are known, and their defaults have them."""
    unknown = {name for name, field in FIELDS.items() if field.type is Any}
    assert len(unknown) < 10, unknown
    for name, field in FIELDS.items():
        if field.default is not COMPUTED and field.default is not None:
            msgspec.convert(field.default, field.type)
        if name not in unknown:
            with pytest.raises(sglrl.UsageError, match=name):
                field.check(name, object())
