"""TorchRL's ``AsyncSGLang`` on an sglrl pool.

The service starts the pool, or connects to the pool of another process. In addition to TorchRL's
methods, it has the methods of ``AsyncVLLM`` for several replicas.
"""

from __future__ import annotations

import random
import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Self

import torch
from torchrl.modules.llm.backends import RLSGLangEngine as RLSGLangEngine
from torchrl.modules.llm.backends.sglang.sglang_utils import get_local_ip_address, get_open_port

from ...inference.sampling import SamplingParams
from ...launching.blocking import BlockingClient, blocking
from .balancer import LoadBalancer
from .environment import warn_of_unused
from .service_client import CONNECTION, close, connect, launch_arguments, without_secret
from .sglang_format import call_arguments, is_one, is_text, plain_prompts, result


class AsyncSGLang(RLSGLangEngine):  # type: ignore[misc]
    """TorchRL's service of SGLang replicas.

    ::

        service = AsyncSGLang.from_pretrained("Qwen/Qwen3-8B", dp_size=4)   # starts the replicas
        service = AsyncSGLang.connect(service.server_url)                   # in another process

    Args:
        server_url: the address of a running pool: ``service.server_url`` or ``client.address`` of
            the process that started the pool. The address contains a secret.
        model_path: the model that ``from_pretrained`` starts.
        tp_size: the number of GPUs of each replica.
        dp_size: the number of replicas. Calls are routed among them by cached prefix and load.
        timeout: the default time limit of a call in seconds. Connecting takes at most 10 s.
        **server_kwargs: arguments of ``sglrl.launch``, including SGLang's server arguments. These
            names of TorchRL are accepted too: ``cuda_devices``, ``host``, ``port``, ``num_devices``
            (GPUs of each replica) and ``num_replicas``. So are these names of vLLM:
            ``tensor_parallel_size``, ``max_model_len``, ``max_num_seqs`` and ``enforce_eager``.
            With ``server_url``, only ``keys``, ``insecure`` and ``heartbeat_timeout`` are accepted.

    A pickled service keeps the address. The copy connects to the same pool, and its shutdown does
    not stop the pool.

    Raises:
        ConnectionError: no pool answers at ``server_url``.
        UsageError: an argument does not apply to a running pool.
    """

    def __init__(
        self,
        server_url: str | None = None,
        model_path: str | None = None,
        tp_size: int = 1,
        dp_size: int = 1,
        timeout: float = 300.0,
        **server_kwargs: Any,
    ) -> None:
        warn_of_unused()
        self._client: BlockingClient | None = None
        self._managed = False
        self._server_url = server_url
        self._model_path = model_path
        self._tp_size = tp_size
        self._dp_size = dp_size
        self._timeout = timeout
        self._server_kwargs = server_kwargs
        self._master_address: str | None = None
        self._master_port: int | None = None
        self._group_ready = False
        self._load_balancer: LoadBalancer | None = None
        if server_url is not None:
            self._connect()

    @classmethod
    def connect(cls, server_url: str, **kwargs: Any) -> Self:
        """Connect to a running pool.

        Raises:
            ConnectionError: no pool answers at ``server_url``.
        """
        return cls(server_url=server_url, **kwargs)

    @classmethod
    def from_pretrained(
        cls, model_name: str, tp_size: int = 1, dp_size: int = 1, **kwargs: Any
    ) -> Self:
        """Start the replicas. Raises the errors of ``sglrl.launch`` and of entering its client."""
        service = cls(model_path=model_name, tp_size=tp_size, dp_size=dp_size, **kwargs)
        service._launch_server()
        return service

    def _connect(self) -> None:
        client = connect(self.server_url, self._timeout, self._server_kwargs)
        self._keep(client)
        self._model_path = client.info.model
        self._tp_size = client.info.tp_size
        self._dp_size = self.num_replicas

    def _launch_server(self) -> None:
        if self._model_path is None:
            raise ValueError("model_path is required to launch a managed SGLang server")
        arguments = launch_arguments(
            self._tp_size, self._dp_size, self._timeout, self._server_kwargs
        )
        client = blocking(self._model_path, **arguments)
        client.__enter__()
        self._keep(client)
        self._managed = True
        self._server_url = client.address
        self._tp_size = client.info.tp_size
        self._dp_size = self.num_replicas

    def _keep(self, client: BlockingClient) -> None:
        self._client = client
        # Without shutdown(), the client is closed at garbage collection or at program exit.
        self._end = weakref.finalize(self, close, client)

    @property
    def client(self) -> BlockingClient:
        """The client of the pool.

        Raises:
            RuntimeError: the service was neither connected nor started, or is shut down.
        """
        if self._client is None:
            if self._server_url is not None:
                raise RuntimeError(
                    "this AsyncSGLang is shut down; make another with connect() or "
                    "from_pretrained()"
                )
            raise RuntimeError("Server URL not set. Call connect() or from_pretrained().")
        return self._client

    @property
    def server_url(self) -> str:
        """The pool's address, for ``connect``. It contains a secret."""
        if self._server_url is None:
            raise RuntimeError("Server URL not set. Call connect() or from_pretrained().")
        return self._server_url

    # --- generation -------------------------------------------------------------------------------

    def generate(
        self,
        prompts: Any = None,
        sampling_params: Mapping[str, Any] | SamplingParams | None = None,
        *,
        input_ids: Any = None,
        prompt_token_ids: Any = None,
        return_logprobs: bool = False,
        return_text: bool = True,
        timeout: float | None = None,
        timeout_seconds: float | None = None,
        actor_index: int | None = None,
        **kwargs: Any,
    ) -> dict[str, Any] | list[dict[str, Any]]:
        """Generate for one prompt, or for a list of prompts at the same time.

        Args:
            prompts: one prompt or a list of prompts. A prompt is a text, token ids as in
                ``input_ids``, or vLLM's ``TextPrompt`` or ``TokensPrompt``.
            sampling_params: parameters under the names of SGLang, vLLM or OpenAI; see
                ``sglrl.SamplingParams``. SGLang's ``n``, ``return_logprob`` and
                ``top_logprobs_num`` and vLLM's ``logprobs`` are accepted too.
            input_ids, prompt_token_ids: the token ids of one prompt or of a list of prompts,
                instead of ``prompts``. Both names have the same meaning.
            return_logprobs: whether to fill ``meta_info["output_token_logprobs"]``.
            return_text: whether the results have "text".
            timeout, timeout_seconds: the time limit in seconds, after which the engine stops the
                requests. If both are given, ``timeout_seconds`` applies.
            actor_index: the index of the replica to use.
            **kwargs: more sampling parameters, which override ``sampling_params``.

        Returns:
            For one prompt with ``n=1``, a dict with "text", "output_ids" and "meta_info".
            Otherwise a list with ``n`` of these dicts for each prompt, in order.

        Raises:
            ValueError: no prompt or more than one kind of prompt is given, or a prompt or a
                sampling value is wrong.
            TypeError: ``sampling_params`` is not a mapping.
            sglrl.DeadlineExceeded: the time limit has passed (a ``TimeoutError``).
        """
        if input_ids is None:
            input_ids = prompt_token_ids
        elif prompt_token_ids is not None:
            raise ValueError("Cannot provide both 'input_ids' and 'prompt_token_ids'")
        if prompts is None and input_ids is None:
            raise ValueError("Must provide either 'prompts' or 'input_ids'")
        if prompts is not None and input_ids is not None:
            raise ValueError("Cannot provide both 'prompts' and 'input_ids'")
        values = call_arguments(sampling_params, kwargs)
        n = values.pop("n", 1)
        arguments: dict[str, Any] = {
            "n": n,
            "logprobs": bool(values.pop("return_logprob", False) or return_logprobs),
            "top_logprobs": values.pop("top_logprobs_num", 0),
            "timeout": next(
                (t for t in (timeout_seconds, timeout, self._timeout) if t is not None), None
            ),
            **values,
        }
        given: Any = plain_prompts(prompts) if input_ids is None else input_ids
        what = "prompt" if input_ids is None and is_text(given) else "input_ids"
        single = is_one(given)
        inputs = [given] if single else list(given)
        if not inputs:
            return []
        if actor_index is not None:
            self._check_actor(actor_index)
            arguments["worker"] = actor_index
        arguments[what] = inputs
        groups = self.completions(**arguments)
        results = [
            result(completion, return_text)
            for group in groups
            for completion in (group if n > 1 else [group])
        ]
        return results[0] if single and n == 1 else results

    def completions(
        self,
        prompt: list[str] | None = None,
        *,
        input_ids: Any = None,
        worker: int | None = None,
        **arguments: Any,
    ) -> list[Any]:
        """Call ``client.generate`` for a list of prompts.

        If a load balancer was created and ``worker`` is None, the load balancer selects the replica
        of each prompt.
        """
        client, balancer = self.client, self._load_balancer
        what, inputs = ("prompt", prompt) if input_ids is None else ("input_ids", input_ids)
        if balancer is None or worker is not None or not inputs:
            return list(client.generate(**{what: inputs}, worker=worker, **arguments))
        return balancer.generate(what, inputs, arguments)

    def generate_batch(
        self, prompts: list[str], sampling_params: Mapping[str, Any] | None = None, **kwargs: Any
    ) -> Any:
        """Call ``generate`` with a list of prompts."""
        return self.generate(prompts, sampling_params, **kwargs)

    def flush_cache(self) -> bool:
        """Empty every replica's prefix cache.

        This is not needed after a weight update, because cache entries of old weights are never
        used with new weights.

        Returns:
            False if a replica had requests and kept its cache.
        """
        emptied: bool = self.client.flush_cache()
        return emptied

    reset_prefix_cache = flush_cache

    # --- weights ----------------------------------------------------------------------------------

    def get_tp_size(self) -> int:
        """Return the number of GPUs of each replica."""
        return self._tp_size

    def get_dp_size(self) -> int:
        """Return the number of replicas."""
        return self._dp_size

    def get_model_metadata(self) -> dict[str, tuple[torch.dtype, torch.Size]]:
        """Return dtype and shape of every tensor of a weight update, by Hugging Face name."""
        return {
            name: (getattr(torch, tensor.dtype), torch.Size(tensor.shape))
            for name, tensor in self.client.model_metadata().items()
        }

    def get_master_address(self) -> str:
        """Return the address at which the replicas reach the process that sends weights."""
        if self._master_address is None:
            self._master_address = get_local_ip_address()
        return self._master_address

    def get_master_port(self) -> int:
        """Return a free port, for programs that need a port. The weight channel does not use it."""
        if self._master_port is None:
            self._master_port = int(get_open_port())
        return self._master_port

    def init_weight_update_group(
        self, master_address: str | None = None, master_port: int | None = None
    ) -> None:
        """Form the group of this process and the replicas before the first update.

        Without this call, or if this service did not start the pool, the first update forms it.

        Args:
            master_address: the address at which the replicas reach this process. None: the replicas
                run on this machine.
            master_port: the value that ``get_master_port`` returns later. It is not used otherwise.
        """
        if master_address is not None:
            self._master_address = master_address
        if master_port is not None:
            self._master_port = master_port
        if self._managed:
            self.client.connect_weights(**self._host(master_address))
        else:
            # For a pool of another process, the first update forms the group.
            self.client.model_metadata()
        self._group_ready = True

    def update_weights(self, weights: Iterable[tuple[str, torch.Tensor]] | Any) -> None:
        """Send new weights to all replicas. They become live on every replica or on none.

        Args:
            weights: pairs of name and tensor, or a mapping, TensorDict or module. Tensors that are
                not given keep their values.

        Raises:
            sglrl.InvalidWeights: the weights do not fit the model (a ``ValueError``).
        """
        self.client.update_weights(weights, partial=True, **self._host(self._master_address))

    def update_weights_from_distributed(
        self, name: str, dtype: torch.dtype | str, shape: tuple[int, ...]
    ) -> None:
        """Check that the model has a tensor of this name and shape.

        TorchRL announces every tensor with this method before it broadcasts the tensor. sglrl needs
        no announcement.

        Args:
            dtype: a torch dtype, or its name ("float32", "torch.float32").

        Raises:
            RuntimeError: ``init_weight_update_group`` was not called.
            ValueError: the model has no tensor of this name and shape, or the dtype is unknown or
                not floating-point.
        """
        torch_dtype = getattr(torch, str(dtype).removeprefix("torch."), None)
        if not isinstance(torch_dtype, torch.dtype):
            raise ValueError(f"dtype must be a torch dtype or its name, got {dtype!r}")
        if not self._group_ready:
            raise RuntimeError(
                "Weight update group not initialized. Call init_weight_update_group() first."
            )
        known = self.get_model_metadata().get(name)
        if known is None or known[1] != torch.Size(shape) or not torch_dtype.is_floating_point:
            raise ValueError(
                f"{name} {tuple(shape)} {torch_dtype} is not a tensor of this model: {known}"
            )

    @staticmethod
    def _host(address: str | None) -> dict[str, str]:
        return {} if address is None else {"host": address}

    # --- several replicas, with AsyncVLLM's names -------------------------------------------------

    @property
    def num_replicas(self) -> int:
        """The number of replicas that are not retired."""
        return sum(worker.state != "retired" for worker in self.client.workers)

    def get_num_unfinished_requests(self, actor_index: int | None = None) -> int | list[int]:
        """Return the number of running and waiting requests of one replica, or of each replica."""
        counts: int | list[int] = self._of_engines(
            lambda engine: engine.running + engine.waiting, actor_index
        )
        return counts

    def get_cache_usage(self, actor_index: int | None = None) -> float | list[float]:
        """Return the used share (0 to 1) of the KV cache of one replica, or of each replica."""
        shares: float | list[float] = self._of_engines(lambda engine: engine.kv_usage, actor_index)
        return shares

    def _of_engines(self, what: Any, actor_index: int | None) -> Any:
        if actor_index is not None:
            self._check_actor(actor_index)
        stats = {replica.worker: what(replica.engine) for replica in self.client.stats()}
        if actor_index is not None:
            return stats[actor_index]
        return [stats[index] for index in sorted(stats)]

    def _check_actor(self, actor_index: int) -> None:
        known = [worker.id for worker in self.client.workers if worker.state != "retired"]
        if actor_index not in known:
            raise IndexError(f"Actor index {actor_index} out of range [0, {len(known)})")

    def collective_rpc(
        self,
        method: str,
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> list[Any]:
        """Call a declared endpoint of the engines on every replica. Return the results in order.

        Raises:
            sglrl.UnknownEndpoint: ``method`` is not a declared endpoint.
        """
        results: list[Any] = self.client.broadcast(method, *args, timeout=timeout, **(kwargs or {}))
        return results

    def create_load_balancer(
        self,
        strategy: str | Sequence[str] | None = None,
        prefix_length: int = 8,
        overload_threshold: float = 1.5,
    ) -> LoadBalancer:
        """Create a load balancer that selects the replicas for all later calls of ``generate``.

        The load balancer replaces the pool's own routing, which is set with ``routing=`` at the
        start of the pool.
        """
        balancer = LoadBalancer(self, strategy, prefix_length, overload_threshold)
        self._load_balancer = balancer
        return balancer

    def get_random_actor_index(self) -> int:
        """Return the index of a random ready replica."""
        ready: list[int] = [w.id for w in self.client.workers if w.state == "ready"]
        return random.choice(ready)

    # --- life -------------------------------------------------------------------------------------

    def shutdown(self) -> None:
        """Stop the replicas if this object started them; otherwise disconnect.

        A second call does nothing.
        """
        if self._client is not None:
            self._client = None
            self._end()

    def __getstate__(self) -> dict[str, Any]:
        kwargs = {k: v for k, v in self._server_kwargs.items() if k in CONNECTION}
        return {
            "server_url": self._server_url,
            "model_path": self._model_path,
            "tp_size": self._tp_size,
            "dp_size": self._dp_size,
            "timeout": self._timeout,
            **kwargs,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc]

    def __repr__(self) -> str:
        return (
            f"AsyncSGLang(url={without_secret(self._server_url)!r}, model={self._model_path!r}, "
            f"tp={self._tp_size}, dp={self._dp_size}, "
            f"mode={'managed' if self._managed else 'external'})"
        )
