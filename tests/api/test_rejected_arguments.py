"""Fields of SGLang's ``ServerArgs`` that cannot work are rejected before a worker starts."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

import sglrl
from sglrl.api.engine_arguments import check_engine_arguments
from sglrl.api.engine_fields import COMPUTED, engine_fields
from sglrl.api.rejected_arguments import _GROUPS, REJECTED

FIELDS = engine_fields()
# Of the two versions that the tests run with, each has fields that the other one lacks.
OTHERS = 30
DOUBTFUL: dict[str, tuple[Any, str]] = {
    "pp_size": (2, "use replicas= and tp_size=, and hosts= for other machines"),
    "pipeline_parallel_size": (2, "an engine is one machine's"),
    "nnodes": (2, "hosts= for other machines"),
    "node_rank": (1, "hosts= for other machines"),
    "enable_lora": (True, "merge them into the weights"),
    "lora_paths": (["x"], "merge them into the weights"),
    "enable_memory_saver": (True, "engines cannot sleep"),
    "is_embedding": (True, "only generates text"),
    "enable_dp_attention": (True, "use tp_size="),
    "enable_return_routed_experts": (True, "a Completion has no such field"),
    "enable_return_hidden_states": (True, "a Completion has no such field"),
    "enable_metrics": (True, "use client.stats()"),
    "export_metrics_to_file": (True, "use client.stats()"),
    "tool_call_parser": ("qwen25", "use renderer="),
    "reasoning_parser": ("qwen3", "use renderer="),
    "enable_custom_logit_processor": (True, "use logit_bias"),
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


def test_the_table_names_fields_of_sglang() -> None:
    unknown = REJECTED.keys() - FIELDS.keys()
    assert len(unknown) < OTHERS, unknown
    # A field is in one group.
    assert sum(len(names.split()) for names in _GROUPS.values()) == len(REJECTED)


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
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_values(name: str) -> None:
    value, why = WRONG[name]
    with pytest.raises(sglrl.UsageError) as error:
        check_engine_arguments("sglang", {name: value})
    assert why in str(error.value)


def test_a_wrong_type_of_any_field_is_rejected() -> None:
    """The types of nearly all fields are known, and their defaults have them."""
    unknown = {name for name, field in FIELDS.items() if field.type is Any}
    assert len(unknown) < 30, unknown
    for name, field in FIELDS.items():
        if field.default is not COMPUTED and field.default is not None:
            msgspec.convert(field.default, field.type)
        if name not in unknown:
            with pytest.raises(sglrl.UsageError, match=name):
                field.check(name, object())
