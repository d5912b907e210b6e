"""SGLang's command-line aliases, compared with the declarations in SGLang's source."""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sglrl.errors import UsageError
from sglrl.launching.engine_aliases import ALIASES, FLAGS, without_aliases
from sglrl.launching.engine_arguments import check_engine_arguments
from sglrl.launching.engine_fields import engine_fields

CONSTANTS = {
    "Backend.BREAKABLE": "breakable",
    "Backend.DISABLED": "disabled",
    "Backend.TC_PIECEWISE": "tc_piecewise",
}
OTHERS = {
    "model": "the first argument of launch",
    "tensor_parallel_size": "launch accepts it as tp_size",
    "data_parallel_size": "launch rejects it and names replicas=",
    "monokernel_backend": "for AMD's GPUs only",
    "prefill_round_robin_balance": "without effect in SGLang",
    "collect_tokens_histogram": "without effect in SGLang",
}


def declared() -> Iterator[tuple[str, tuple[str, Any]]]:
    """Yield each option that is not a field, with its field and the value that it sets.

    The value is None if the option takes one.
    """
    spec = importlib.util.find_spec("sglang")
    assert spec is not None
    assert spec.submodule_search_locations
    source = Path(spec.submodule_search_locations[0], "srt")
    files = [source / "server_args.py", *source.glob("arg_groups/fields/*.py")]
    for tree in (ast.parse(file.read_text()) for file in files):
        for node in ast.walk(tree):
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                for keyword in ast.walk(node.annotation):
                    if isinstance(keyword, ast.keyword) and keyword.arg == "aliases":
                        for option in ast.literal_eval(keyword.value):
                            yield name_of(option), (node.target.id, None)
            elif isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "add_argument":
                given = {k.arg: ast.unparse(k.value).strip("'") for k in node.keywords}
                action = given.get("action", "")
                if action.startswith("Deprecated"):
                    value: Any = None
                    if action == "DeprecatedStoreTrueAction":
                        value = True
                    elif action == "DeprecatedStoreConstAction":
                        value = CONSTANTS.get(given["const_value"], given["const_value"])
                    name = name_of(ast.literal_eval(node.args[0]))
                    yield name, (given.get("dest", name), value)


def name_of(option: str) -> str:
    return option.removeprefix("--").replace("-", "_")


def test_every_alias_of_sglang_is_known() -> None:
    fields = engine_fields()
    options = {name: found for name, found in declared() if name not in fields}
    assert len(options) > 10
    for name, (field, value) in options.items():
        if name not in OTHERS:
            expected = (ALIASES.get(name), None) if value is None else FLAGS.get(name)
            assert expected == (field, value), name


def test_aliases_become_fields() -> None:
    found = check_engine_arguments(
        "sglang",
        {
            "disable_piecewise_cuda_graph": True,
            "cuda_graph_max_bs": 8,
            "pipeline_parallel_size": 1,
            "disable_radix_cache": False,
        },
    )
    assert found == {
        "cuda_graph_backend_prefill": "disabled",
        "cuda_graph_max_bs_decode": 8,
        "pp_size": 1,
        "disable_radix_cache": False,
    }
    flags = {"disable_piecewise_cuda_graph": False, "enforce_piecewise_cuda_graph": False}
    assert check_engine_arguments("sglang", flags) == {}


def test_names_of_one_field_contradict_each_other() -> None:
    for given in (
        {"ep": 1, "expert_parallel_size": 1},
        {"disable_piecewise_cuda_graph": True, "cuda_graph_backend_prefill": "full"},
        {"enable_breakable_cuda_graph": True, "disable_piecewise_cuda_graph": True},
    ):
        first, second = given
        with pytest.raises(UsageError, match=f"{first} and {second} set the same field"):
            check_engine_arguments("sglang", given)
    with pytest.raises(UsageError, match="disable_piecewise_cuda_graph must be True or False"):
        check_engine_arguments("sglang", {"disable_piecewise_cuda_graph": "yes"})


def test_an_alias_of_a_missing_field_stays() -> None:
    given = {"cuda_graph_max_bs": 8, "disable_piecewise_cuda_graph": False}
    assert without_aliases(given, {"tp_size"}) == given
    with pytest.raises(UsageError, match="'ep' is neither an argument"):
        check_engine_arguments("fake", {"ep": 1})
