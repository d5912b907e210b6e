"""Use sglrl as the rollout engine of TRL: ``GRPOTrainer(..., rollout_func=SGLangRollouts(model))``.

In each training process, TRL calls ``rollout_func`` with the prompts of this process, before it
computes rewards (https://huggingface.co/docs/trl/grpo_trainer; TRL 1.16). ``SGLangRollouts`` first
sends the trainer's weights to the engines, and then samples. In an evaluation, it sends unchanged
weights only once.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, Self

import torch

from ..errors import RolloutFailed, UsageError
from ..inference.completion import Completion
from ..launching.blocking import BlockingClient, blocking
from ..rollouts.agent import Agent
from ..sessions.trajectory import Trajectory

__all__ = ["SGLangRollouts", "agent_reward"]


class SGLangRollouts:
    """A ``rollout_func`` for TRL's ``GRPOTrainer``.

    Each prompt gives one completion. TRL's sampler repeats each prompt ``num_generations`` times.
    The sampling parameters are taken from the trainer's ``GRPOConfig`` (``temperature``, ``top_p``,
    ``top_k``, ``min_p``, ``repetition_penalty``, ``max_completion_length``,
    ``generation_kwargs``). The chat template is taken from the trainer's ``processing_class``, and
    its arguments are the config's ``chat_template_kwargs``.

    The trainer weights the loss with the ratio of its own probabilities to the engines'
    probabilities. TRL's settings for vLLM (``vllm_importance_sampling_correction``, ``..._mode``,
    ...) apply.

    PEFT adapters (``peft_config``) are merged into the weights that the engines receive.

    With several accelerate processes, the main process starts the workers and sends the weights.
    The other processes connect to its pool.

    Reward functions receive two further keyword arguments. ``policy_versions`` has the policy
    version of the first sampled token of each completion or, with ``agent``, the oldest policy
    version in each episode. With ``agent``, ``agent_rewards`` has the reward of each episode; see
    ``agent_reward``.

    Args:
        model: a folder or hub name: the workers start at the first step. Or a running
            ``BlockingClient``: it stays open. Or the address of a running pool.
        agent: ``await agent(session, prompt)`` runs an episode of several turns, for example with
            tools or an environment, and returns its reward, as for ``sglrl.rollout``. Observations
            are masked out of the loss. None: sample one turn for each prompt.
        rollout: the arguments of ``sglrl.rollout`` for the agent (``timeout``, ``processes``, ...).
        update: the arguments of ``Client.update_weights``.
        **launch: the arguments of ``sglrl.launch``.

    Raises:
        UsageError: an argument is wrong.
    """

    def __init__(
        self,
        model: str | os.PathLike[str] | BlockingClient,
        *,
        agent: Agent | None = None,
        rollout: dict[str, Any] | None = None,
        update: dict[str, Any] | None = None,
        **launch: Any,
    ) -> None:
        if rollout and agent is None:
            raise UsageError("rollout= has the arguments of an agent's runs, and agent is None")
        self._is_ours = not isinstance(model, BlockingClient)
        if launch and not isinstance(model, (str, os.PathLike)):
            raise UsageError(f"a client runs already, so {next(iter(launch))}= has no effect")
        self._model = model
        self._agent = agent
        self._rollout = rollout or {}
        self._update = update or {}
        self._launch = launch
        self._client: BlockingClient | None = None
        self._sent: object = None
        """A value that identifies the weights that were sent last."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the client, which stops workers that it has started. A given client stays open."""
        client, self._client = self._client, None
        if client is not None and self._is_ours:
            client.close()

    @property
    def client(self) -> BlockingClient:
        """The client of the engines. Raises ``UsageError`` before the first step."""
        if self._client is None:
            raise UsageError("the trainer has made no step, so no worker has started")
        return self._client

    def __call__(self, prompts: Sequence[Any], trainer: Any) -> dict[str, list[Any]]:
        """Sample one completion for each prompt, with the trainer's current weights.

        Args:
            prompts: texts or conversations.
            trainer: the ``GRPOTrainer``.

        Returns:
            A dict with "prompt_ids", "completion_ids" and "logprobs", which have a list for each
            prompt, and with the keyword arguments of the reward functions. With an agent, it also
            has "env_mask": 1 for sampled tokens and 0 for observations.

        Raises:
            UsageError: a setting of the trainer is not supported.
            RolloutFailed: an agent failed more often than ``retries`` allows.
        """
        _check(trainer)
        if self._client is None:
            self._client = self._start(trainer.accelerator)
        self._send_weights(trainer)
        _correct(trainer)
        options = _sampling(trainer.args)
        template = _template(trainer)
        is_chat = not isinstance(prompts[0], str)
        if self._agent is None:
            given: dict[str, Any] = {"messages" if is_chat else "prompt": list(prompts)}
            if is_chat:
                given["template"] = template
            return _of_completions(self._client.generate(**given, **options, logprobs=True))
        if is_chat:
            options["template"] = template
        return self._play(prompts, options)

    def _start(self, accelerator: Any) -> BlockingClient:
        """Return the client. In the main process, start the workers if ``model`` is not running."""
        if isinstance(self._model, BlockingClient):
            return self._model
        model = os.fspath(self._model)
        if "://" in model:
            return blocking.connect(model).__enter__()
        if accelerator.num_processes == 1:
            return blocking(model, **self._launch).__enter__()
        from accelerate.utils import broadcast_object_list

        client = None
        if accelerator.is_main_process:
            client = blocking(model, **self._launch).__enter__()
        (address,) = broadcast_object_list([client.address if client else None])
        return client or blocking.connect(address).__enter__()

    def _send_weights(self, trainer: Any) -> None:
        """Send the trainer's weights. In an evaluation, do not send unchanged weights again."""
        accelerator = trainer.accelerator
        model = accelerator.unwrap_model(trainer.model)
        # All batches of an evaluation use the same weights, so send them only for the first batch.
        # A step or a loaded checkpoint changes the weights. torch counts changes in _version.
        changes = [parameter._version for parameter in model.parameters()]
        current = [(id(model), trainer.state.global_step, changes)]
        if accelerator.num_processes > 1:
            from accelerate.utils import broadcast_object_list

            # The main process decides for all processes, which must gather the shards together.
            broadcast_object_list(current)
        if current == self._sent and not trainer.model.training:
            return
        if _is_sharded(accelerator):
            model = accelerator.get_state_dict(trainer.model_wrapped)
        if accelerator.is_main_process:
            if hasattr(model, "peft_config"):
                with _merged_adapters(model) as weights:
                    self.client.update_weights(weights, **self._update)
            else:
                self.client.update_weights(model, **self._update)
        accelerator.wait_for_everyone()
        self._sent = current

    def _play(self, prompts: Sequence[Any], options: dict[str, Any]) -> dict[str, list[Any]]:
        assert self._agent is not None
        trajectories: dict[int, Trajectory] = {}
        run = self.client.rollout(self._agent, list(prompts), **{**options, **self._rollout})
        for group in run:
            (trajectories[group.index],) = group.trajectories
        missing = [i for i in range(len(prompts)) if i not in trajectories]
        if missing:
            raise RolloutFailed(
                f"the agent failed for {len(missing)} of {len(prompts)} prompts, also when it ran "
                f"again: {run.metrics.samples_lost}"
            )
        return _of_trajectories([trajectories[i] for i in range(len(prompts))])


def agent_reward(
    completions: Sequence[Any], agent_rewards: Sequence[float], **_: Any
) -> list[float]:
    """A reward function for ``GRPOTrainer`` that returns the rewards of the agent."""
    return list(agent_rewards)


def _check(trainer: Any) -> None:
    """Raise ``UsageError`` for settings of the trainer that would have no effect or fail later."""
    if trainer.args.use_vllm:
        raise UsageError("GRPOConfig(use_vllm=True) starts vLLM too; leave it False")
    if getattr(trainer, "tools", None) or getattr(trainer, "environment_factories", None):
        raise UsageError(
            "tools= and environment_factory= of the trainer sample with its own model; use "
            "SGLangRollouts(agent=...), whose agent calls the tools"
        )
    adapters = getattr(trainer.model, "peft_config", None)
    if adapters and _is_sharded(trainer.accelerator):
        raise UsageError(
            "adapters of sharded models are not supported; train without FSDP or DeepSpeed"
        )
    if adapters and any(adapter.is_prompt_learning for adapter in adapters.values()):
        raise UsageError("the engines have no prompt tuning; use an adapter that can be merged")
    if getattr(trainer.model, "is_quantized", False):
        raise UsageError("quantized weights are not supported; load the model without quantization")
    values = trainer.args.generation_kwargs or {}
    if values.get("return_sampling_mask"):
        raise UsageError("return_sampling_mask has no effect: TRL's loss takes no masks")
    if values.get("return_routed_experts"):
        raise UsageError("return_routed_experts has no effect: TRL's loss takes no experts")
    for name in ("token_ids_logprob", "return_hidden_states"):
        if values.get(name):
            raise UsageError(f"{name} has no effect: TRL's loss does not use it")


def _is_sharded(accelerator: Any) -> bool:
    kind = str(accelerator.distributed_type).rpartition(".")[2]
    return kind in ("DEEPSPEED", "FSDP", "MEGATRON_LM")


def _correct(trainer: Any) -> None:
    """Make the trainer use the engines' logprobs in the same way as logprobs of vLLM."""
    if trainer.use_vllm or not trainer.args.vllm_importance_sampling_correction:
        return
    trainer.use_vllm = True
    # With use_vllm, TRL would also send weights before each rollout. SGLangRollouts sends them.
    trainer.vllm_generation = SimpleNamespace(sync_weights=lambda: None)
    trainer._last_loaded_step = -1


def _template(trainer: Any) -> dict[str, Any]:
    """Return the arguments of the chat template, including the trainer's own template."""
    own = getattr(trainer.processing_class, "chat_template", None)
    template = {"chat_template": own} if isinstance(own, str) else {}
    return {**template, **trainer.chat_template_kwargs}


def _sampling(args: Any) -> dict[str, Any]:
    """Return the sampling parameters of a ``GRPOConfig``."""
    values: dict[str, Any] = {
        "temperature": args.temperature,
        "top_p": args.top_p,
        "top_k": args.top_k or -1,
        "min_p": args.min_p or 0.0,
        "repetition_penalty": args.repetition_penalty,
        "max_new_tokens": args.max_completion_length,
    }
    return {**values, **(args.generation_kwargs or {})}


def _of_completions(made: Sequence[Completion]) -> dict[str, list[Any]]:
    return {
        "prompt_ids": [c.prompt_ids.tolist() for c in made],
        "completion_ids": [c.output_ids.tolist() for c in made],
        "logprobs": [[] if c.logprobs is None else c.logprobs.tolist() for c in made],
        "policy_versions": [c.versions[0].version if c.versions else -1 for c in made],
    }


def _of_trajectories(made: Sequence[Trajectory]) -> dict[str, list[Any]]:
    if any(t.branches for t in made):
        raise UsageError(
            "an episode has branches, and TRL trains on one conversation for each prompt: open "
            "the sessions with allow_rewrite=True if the chat template rewrites earlier turns"
        )
    return {
        "prompt_ids": [t.prompt_ids.tolist() for t in made],
        "completion_ids": [t.response_ids.tolist() for t in made],
        "logprobs": [t.logprobs.tolist() for t in made],
        "env_mask": [t.loss_mask.astype(int).tolist() for t in made],
        "policy_versions": [t.oldest_version for t in made],
        "agent_rewards": [t.reward for t in made],
    }


@contextmanager
def _merged_adapters(model: Any) -> Iterator[dict[str, torch.Tensor]]:
    """Merge the active adapters of a ``PeftModel``, and restore its weights at the end.

    PEFT unmerges by subtraction, which rounds. So this function restores the weights from a copy,
    and they are exactly the same afterwards.

    Yields:
        The tensors of the base model by name. They share the memory of ``model``.
    """
    from peft.tuners.tuners_utils import BaseTunerLayer

    layers = [module for module in model.modules() if isinstance(module, BaseTunerLayer)]
    kept = [
        (parameter, parameter.detach().clone())
        for layer in layers
        for parameter in layer.get_base_layer().parameters()
    ]
    model.merge_adapter()
    try:
        yield _base_weights(model, {name for layer in layers for name in layer.adapter_layer_names})
    finally:
        model.unmerge_adapter()
        for parameter, before in kept:
            parameter.data.copy_(before)


def _base_weights(model: Any, adapter_names: set[str]) -> dict[str, torch.Tensor]:
    """Return the base model's tensors by their names, without the parts that PEFT adds to names."""
    tensors = {}
    for name, tensor in model.get_base_model().state_dict().items():
        # PEFT stores trained copies of whole modules under modules_to_save. Use these copies.
        name = name.replace(f".modules_to_save.{model.active_adapter}", "")
        is_other_copy = ".original_module." in name or ".modules_to_save." in name
        if not is_other_copy and adapter_names.isdisjoint(name.split(".")):
            tensors[name.replace(".base_layer", "")] = tensor
    return tensors
