"""What is accepted as an adapter is computed as PEFT computes it, however it is given.

The engine has the model of ``Policies[0]``. Each case makes a ``PeftModel`` of it. The model itself
is given, the folder that PEFT saves, and the tensors with a configuration. Each way either raises
``InvalidAdapter``, or the engine's logprobs are those of PEFT.
"""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Callable
from copy import deepcopy
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import peft
import pytest
import pytest_asyncio
import torch
from engine.policies import Policies
from peft.tuners.lora.config import MontecloraConfig

import sglrl

from .adapters import ALL, PROMPT, check, logprobs

pytestmark = [
    pytest.mark.asyncio(loop_scope="session"),
    # PEFT warns about unusual configurations.
    pytest.mark.filterwarnings("ignore::UserWarning"),
]

WAYS = ("PeftModel", "folder", "tensors")
BOTH = ["q_proj", "down_proj"]


class Lab(NamedTuple):
    client: sglrl.Client
    policies: Policies

    def model(self, seed: int = 1, base: int = 0, name: str = "default", **options: Any) -> Any:
        """Return a ``PeftModel`` with random values in everything that PEFT has added."""
        torch.manual_seed(seed)
        options = {"r": 4, "lora_alpha": 8, "target_modules": BOTH, **options}
        config = peft.LoraConfig(**options)
        model = peft.get_peft_model(
            deepcopy(self.policies[base].model), config, adapter_name=name
        ).eval()
        fill(model)
        return model

    async def outcome(self, given: Any, model: Any, config: Any = None) -> str:
        """Load an adapter. Return the error, or "" if the engine computes the same as ``model``."""
        try:
            await self.client.load_lora("x", given, config=config)
        except sglrl.InvalidAdapter as error:
            return str(error)
        try:
            made = await self.client.generate(
                input_ids=PROMPT, max_new_tokens=8, logprobs=True, ignore_eos=True, lora="x"
            )
        finally:
            await self.client.unload_lora("x")
        training = model.training
        check(made, model.eval())
        model.train(training)
        return ""


def fill(model: Any) -> None:
    """Give everything that PEFT has added random values, so that each part has an effect."""
    inner = (".base_layer.", ".original_module.")
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            is_added = any(
                part in name for part in ("lora_", "modules_to_save", "trainable_tokens_delta")
            )
            if is_added and not any(part in name.replace("lora_A", "") for part in inner):
                tensor.add_(torch.randn(tensor.shape) * 0.2)


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def lab(models: Path) -> AsyncIterator[Lab]:
    policies = Policies(models / "peft")
    async with sglrl.launch(
        policies[0].folder,
        device="cpu",
        enable_lora=True,
        max_lora_rank=16,
        lora_target_modules=["all"],
    ) as client:
        yield Lab(client, policies)


def given_as(way: str, model: Any, folder: Path) -> tuple[Any, Any]:
    """Return the adapter as one of ``WAYS``, and its ``config=``."""
    if way == "PeftModel":
        return model, None
    name = model.active_adapters[0]
    if way == "folder":
        model.save_pretrained(folder, selected_adapters=[name])
        return folder if name == "default" else folder / name, None
    return peft.get_peft_model_state_dict(model, adapter_name=name), model.peft_config[name]


# --- accepted -------------------------------------------------------------------------------------


def random_options(rng: random.Random) -> dict[str, Any]:
    """Return a random configuration that engines can compute."""
    modules = rng.sample(ALL, rng.randint(1, len(ALL)))
    options: dict[str, Any] = {
        "r": rng.choice([1, 2, 3, 8, 16]),
        "lora_alpha": rng.choice([1, 7, 16]),
        "use_rslora": rng.random() < 0.4,
        "lora_dropout": rng.choice([0.0, 0.5]),
        "bias": "none",
        "task_type": rng.choice([None, "CAUSAL_LM"]),
        "init_lora_weights": rng.choice([True, False, "gaussian", "orthogonal"]),
        "fan_in_fan_out": rng.random() < 0.3,
        "target_modules": rng.choice([modules, rf".*\.({'|'.join(modules)})"]),
    }
    if options["init_lora_weights"] == "orthogonal":
        options["r"] = rng.choice([2, 8, 16])
    if isinstance(options["target_modules"], list):
        if rng.random() < 0.4:
            options["layers_to_transform"] = rng.choice([0, [1], [0, 1]])
            options["layers_pattern"] = rng.choice([None, "layers"])
        if rng.random() < 0.3:
            options["exclude_modules"] = ["layers.0.self_attn." + m for m in ("q_proj", "k_proj")]
            options["target_modules"] = [*modules, "o_proj"]
    # PEFT takes layers only with a list of modules.
    if rng.random() < 0.2 and "layers_to_transform" not in options:
        options["target_modules"] = "all-linear"
    return options


async def test_random_adapters(lab: Lab, tmp_path: Path) -> None:
    seed = random.randrange(1 << 20)
    for case in range(8):
        print(f"seed {seed}, case {case}")
        rng = random.Random(seed * 100 + case)
        options = random_options(rng)
        print(options)
        model = lab.model(seed, name=rng.choice(["default", "x1"]), **options)
        model.train(rng.random() < 0.5)
        other = logprobs(lab.policies[0].model, PROMPT, [7])
        assert np.abs(logprobs(model, PROMPT, [7]) - other).max() > 1e-3
        for way in WAYS:
            given, config = given_as(way, model, tmp_path / str(case))
            assert await lab.outcome(given, model, config) == "", way


def second(model: Any, **options: Any) -> Any:
    """Add an adapter that is not active."""
    config = peft.LoraConfig(**{"r": 2, "lora_alpha": 4, "target_modules": ["v_proj"], **options})
    model.add_adapter("other", config)
    fill(model)
    return model


def scaled(model: Any, count: int | None = None) -> Any:
    layers = [layer for layer in model.modules() if hasattr(layer, "set_scale")]
    for layer in layers[:count]:
        layer.set_scale(next(iter(layer.scaling)), 0.3)
    return model


async def test_the_state_of_a_peft_model(lab: Lab) -> None:
    """The engine computes what the modules compute now, also where the configuration differs."""
    assert await lab.outcome(model := scaled(lab.model()), model) == ""
    assert await lab.outcome(model := second(lab.model(), r=8), model) == ""
    assert await lab.outcome(model := second(lab.model(), modules_to_save=["lm_head"]), model) == ""
    model = second(lab.model())
    model.set_adapter("other")
    assert await lab.outcome(model, model) == ""
    model.delete_adapter("other")
    model.set_adapter("default")
    model.merge_adapter()
    model.unmerge_adapter()
    same = deepcopy(lab.policies[0].model.state_dict())
    model.get_base_model().load_state_dict(
        {n.replace("_proj.", "_proj.base_layer."): t for n, t in same.items()}, strict=False
    )
    fewer = {n: t for n, t in same.items() if not any(f"{m}.weight" in n for m in BOTH)}
    model.get_base_model().load_state_dict(fewer, strict=False)
    assert await lab.outcome(model, model) == ""


async def test_a_base_model_in_another_dtype(lab: Lab) -> None:
    """Rounded weights cannot be compared, so they are not refused."""
    model = lab.model()
    rounded = deepcopy(model)
    rounded.get_base_model().to(torch.bfloat16)
    for name, tensor in rounded.named_parameters():
        if ".lora_" in name:
            tensor.data = model.get_parameter(name).data
    assert await lab.outcome(rounded, model) == ""
    for name, tensor in rounded.named_parameters():
        tensor.data = model.get_parameter(name).data
        if ".lora_" not in name:
            tensor.data = tensor.data.double()
    assert await lab.outcome(rounded, model) == ""


async def test_peft_models_in_wrappers(lab: Lab) -> None:
    model = lab.model()
    torch.distributed.init_process_group(
        "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
    )
    try:
        wrapped = torch.nn.parallel.DistributedDataParallel(model)
        assert await lab.outcome(wrapped, model) == ""
    finally:
        torch.distributed.destroy_process_group()
    own = deepcopy(lab.policies[0].model)
    own.add_adapter(model.peft_config["default"])
    fill(own)
    assert await lab.outcome(own, own) == ""


# --- rejected -------------------------------------------------------------------------------------

FIELDS: dict[str, dict[str, Any]] = {
    "modules_to_save": {"modules_to_save": ["lm_head"]},
    "use_dora": {"use_dora": True},
    "lora_bias": {"lora_bias": True},
    "rank_pattern": {"rank_pattern": {"q_proj": 2}},
    "alpha_pattern": {"alpha_pattern": {"q_proj": 2}},
    "bias='all'": {"bias": "all"},
    "bias='lora_only'": {"bias": "lora_only"},
    "trainable_token_indices": {"trainable_token_indices": [3, 4, 24]},
    "target_parameters": {"target_parameters": ["self_attn.k_proj.weight"]},
    "layer_replication": {"layer_replication": [(0, 2), (0, 2)]},
    "alora_invocation_tokens": {"alora_invocation_tokens": [3], "task_type": "CAUSAL_LM"},
    "monteclora_config": {"monteclora_config": MontecloraConfig()},
    "init_lora_weights='pissa'": {"init_lora_weights": "pissa"},
    "init_lora_weights='olora'": {"init_lora_weights": "olora"},
    "embed_tokens": {"target_modules": ["q_proj", "embed_tokens"]},
    "lm_head": {"target_modules": ["q_proj", "lm_head"]},
}


@pytest.mark.parametrize("field", FIELDS)
async def test_rejected_fields(lab: Lab, tmp_path: Path, field: str) -> None:
    options = FIELDS[field]
    model = lab.model(**options)
    for way in WAYS:
        given, config = given_as(way, model, tmp_path / way)
        found = await lab.outcome(given, model, config)
        assert field in found or (field in ("embed_tokens", "lm_head") and "lora_" in found), way


def disabled(model: Any) -> Any:
    model.base_model.disable_adapter_layers()
    return model


def merged(model: Any) -> Any:
    model.merge_adapter()
    return model


def both(model: Any) -> Any:
    second(model).base_model.set_adapter(["default", "other"])
    return model


def partly_active(model: Any) -> Any:
    second(model, target_modules=["q_proj"])
    next(m for m in model.modules() if hasattr(m, "lora_A")).set_adapter("other")
    return model


def none_active(model: Any) -> Any:
    model.base_model.set_adapter([])
    return model


def trained_norm(model: Any) -> Any:
    with torch.no_grad():
        model.get_base_model().model.norm.weight.mul_(1.5)
    return model


def trained_projection(model: Any) -> Any:
    with torch.no_grad():
        model.get_base_model().model.layers[1].self_attn.q_proj.base_layer.weight.add_(0.1)
    return model


STATES: dict[str, tuple[Callable[[Any], Any], str]] = {
    "disabled": (disabled, "are disabled"),
    "merged": (merged, "'default' is merged"),
    "two": (both, "'default', 'other' at once"),
    "partly active": (partly_active, "'default', 'other' at once"),
    "none active": (none_active, "no active adapter"),
    "scaled in part": (lambda model: scaled(model, 1), "scaling 0.6 and .* scaling 2"),
    "norm": (trained_norm, "differs from the engine's weights in model.norm.weight"),
    "projection": (trained_projection, "differs .* model.layers.1.self_attn.q_proj.weight;"),
}


@pytest.mark.parametrize("state", STATES)
async def test_rejected_states(lab: Lab, state: str) -> None:
    change, text = STATES[state]
    model = lab.model()
    assert await lab.outcome(model, model) == ""
    with pytest.raises(sglrl.InvalidAdapter, match=text):
        await lab.client.load_lora("x", change(model))
    await lab.client.load_lora("x", lab.model(2))
    with pytest.raises(sglrl.InvalidAdapter, match=text):
        await lab.client.update_weights(model, lora="x")
    await lab.client.unload_lora("x")


async def test_another_base_model(lab: Lab) -> None:
    """The adapter fits as soon as the engine has the base model."""
    model = lab.model(base=1)
    with pytest.raises(sglrl.InvalidAdapter, match=r"engine's weights in .* more;"):
        await lab.client.load_lora("x", model)
    await lab.client.update_weights(lab.policies[1].model)
    try:
        assert await lab.outcome(model, model) == ""
    finally:
        await lab.client.update_weights(lab.policies[0].model)
    with pytest.raises(sglrl.InvalidAdapter, match="differs from the engine's weights"):
        await lab.client.load_lora("x", model)


async def test_other_methods(lab: Lab) -> None:
    base = lab.policies[0].model
    for config in (
        peft.IA3Config(target_modules=["k_proj"], feedforward_modules=[]),
        peft.VeraConfig(target_modules=["q_proj", "o_proj"], r=2),
        peft.AdaLoraConfig(target_modules=BOTH, total_step=10),
        peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2),
    ):
        model = peft.get_peft_model(deepcopy(base), config)
        with pytest.raises(sglrl.InvalidAdapter, match=f"peft_type is '{config.peft_type.value}'"):
            await lab.client.load_lora("x", model)
    mixed = peft.get_peft_model(deepcopy(base), peft.LoraConfig(target_modules=BOTH), mixed=True)
    mixed.add_adapter("other", peft.LoHaConfig(target_modules=BOTH, init_weights=False))
    mixed.set_adapter(["default", "other"])
    with pytest.raises(sglrl.InvalidAdapter, match="'default', 'other' at once"):
        await lab.client.load_lora("x", mixed)


async def test_tensors_that_the_configuration_leaves_out(lab: Lab, tmp_path: Path) -> None:
    """PEFT ignores such tensors when it loads an adapter."""
    model = lab.model()
    tensors = peft.get_peft_model_state_dict(model)
    fields = {**model.peft_config["default"].to_dict(), "target_modules": ["q_proj"]}
    for change, text in (
        ({}, "down_proj, which target_modules"),
        ({"target_modules": "("}, r"target_modules='\(' of the adapter cannot be read"),
        ({"target_modules": None, "exclude_modules": ["q_proj"]}, "which exclude_modules"),
        ({"target_modules": BOTH, "layers_to_transform": 0}, "layers.1.* which layers_to_trans"),
        ({"use_rs_lora": True}, "use_rs_lora=True of the adapter is not a known field"),
        ({"use_qalora": True}, "use_qalora=True of the adapter is not supported"),
        ({"megatron_config": {"a": 1}}, "megatron_config={'a': 1} of the adapter is not supp"),
        ({"task_type": "SEQ_CLS"}, "task_type is 'SEQ_CLS'; engines generate text"),
        ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights='pissa_niter_4' of the"),
        ({"init_lora_weights": "loftq"}, "init_lora_weights='loftq' of the adapter changes"),
        ({"use_rslora": "yes"}, "use_rslora of the adapter must be a bool, got 'yes'"),
    ):
        with pytest.raises(sglrl.InvalidAdapter, match=text):
            await lab.client.load_lora("x", tensors, config={**fields, **change})
    with pytest.raises(
        sglrl.InvalidAdapter, match="config= has rank 4 and scaling 4, and the Peft"
    ):
        await lab.client.load_lora("x", model, config={"r": 4, "lora_alpha": 16})
