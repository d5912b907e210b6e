"""Fields of SGLang's ``ServerArgs`` that cannot work are rejected before a worker starts."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import sglrl
from sglrl.api.engine_arguments import COMPUTED, check_engine_arguments, engine_fields
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
    values = [None, False] + ([] if FIELDS[name] is COMPUTED else [FIELDS[name]])
    value = data.draw(st.sampled_from(values))
    assert check_engine_arguments("sglang", {name: value}) == {name: value}
    with pytest.raises(sglrl.UsageError, match="is not supported"):
        check_engine_arguments("sglang", {name: object()})
