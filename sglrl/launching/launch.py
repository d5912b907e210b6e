"""Start SGLang workers on CPU or GPUs and make a client for them: ``launch``."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from functools import partial
from inspect import signature
from pathlib import Path
from typing import Any, Literal

from ..client.client import Client
from ..config import (
    HEARTBEAT_TIMEOUT,
    LOCAL_MODELS,
    FabricConfig,
    PoolConfig,
    cache_dir,
    check_accelerations,
    check_env,
    check_timeout,
    check_weight_device,
    flag,
    path_of,
    positive,
    shows_progress,
    strategies,
    visible_cuda_devices,
)
from ..control.pool_control import PoolControl
from ..driver.launcher import Launcher, LaunchSpec, LocalLauncher
from ..driver.pool import Pool
from ..errors import NotEnoughDevices, UsageError
from ..hosts.hosts import Hosts
from ..hosts.launcher import HostLauncher
from ..hosts.started import hosts_from
from ..remote.running_pools import serve_and_announce
from ..transport.addresses import check_address
from ..transport.curve_keys import read_driver_keys
from ..wire.processes import EngineSpec
from .engine_arguments import (
    FAKE_VOCAB_SIZE,
    check_dtype,
    check_engine,
    check_engine_arguments,
    check_on_cpu,
    set_deterministic,
    take_logit_processors,
)
from .hub import check_on_hub
from .interpreter import examine, find_python
from .local_models import own_model
from .lora_arguments import take_adapters
from .metrics_port import metrics_server
from .model_folder import check_model, own_dtype
from .start_display import StartDisplay
from .text_arguments import check_files


def launch(
    model: str | os.PathLike[str],
    *,
    replicas: int = 1,
    tp_size: int = 1,
    dtype: Any = "auto",
    device: str = "auto",
    routing: tuple[str, ...] | list[str] | str = ("prefix-aware", "requests"),
    timeout: float | None = None,
    window: int | None = None,
    max_queue: int = 100_000,
    max_queue_bytes: int = 1 << 30,
    max_calls_per_client: int | None = None,
    max_unread_bytes: int = 256 << 20,
    address: str = "ipc",
    keys: str | os.PathLike[str] | None = None,
    insecure: bool = False,
    start_timeout: float = 600.0,
    restarts: int = 5,
    restart_period: float = 60.0,
    hang_timeout: float | None = 120.0,
    heartbeat_timeout: float | None = HEARTBEAT_TIMEOUT,
    max_message_bytes: int = 256 << 20,
    env: Mapping[str, str] | None = None,
    gpus: Sequence[int] | None = None,
    weight_device: Any = None,
    keep_weights: Literal["auto", "host"] | None = "auto",
    engine: str = "sglang",
    accelerations: bool | Sequence[str] = True,
    deterministic: bool = False,
    allow_unknown_sglang: bool = False,
    logit_processors: Sequence[str] = (),
    progress: bool | None = None,
    log_dir: str | os.PathLike[str] | None = None,
    metrics_port: int | str | None = None,
    python: str | os.PathLike[str] | None = None,
    hosts: Hosts | Literal["ray", "slurm"] | None = None,
    **engine_args: Any,
) -> Client:
    """Start workers that each own an SGLang scheduler: ``async with sglrl.launch(...) as client``.

    Entering the client raises this process's soft limit of open files to its hard limit, at most
    to 65,536.

    Args:
        model: a folder with a Hugging Face model, or a name on the hub. "tiny" is a random Qwen3,
            and "smollm2" is SmolLM2-135M-Instruct, with the extra ``smollm2``. Neither needs a hub:
            this machine makes the model once and keeps it in ``$SGLRL_CACHE``.
        replicas: number of independent copies of the model. Calls are routed among them.
        tp_size: number of ranks that share one copy, as processes. Each rank has a GPU: replica i
            runs on ``tp_size`` visible GPUs, from index ``i * tp_size`` on. On a CPU, the ranks
            share its cores, which is slower than one rank.
        dtype: "float32", "bfloat16" or "float16", a short name ("fp32", "bf16", "fp16"), or a torch
            dtype. "auto" uses the dtype of the saved model.
        device: "cuda" or "cpu". "auto" is "cuda" if a GPU is visible, else "cpu". Serving workers
            on a CPU run with niceness 5, so that other processes get the cores first.
        routing: strategies in order of preference: "prefix-aware", "requests", "kv-cache",
            "round-robin".
        timeout: default timeout of every call, in seconds. None: no limit.
        window: maximum number of calls at one worker at a time. Further calls wait at the driver.
            None: twice the number of calls that the worker's engine runs at once.
        max_queue: maximum number of calls that wait at the driver. A further call raises
            ``Overloaded``.
        max_queue_bytes: maximum bytes of the calls that wait at the driver. A call that would
            exceed this limit raises ``Overloaded``. Token ids (4 bytes each) and raw frames count.
            A prompt that several samples share counts once.
        max_calls_per_client: maximum number of calls of one client that wait at the driver. A
            further call raises ``Overloaded`` in that client. The client that ``launch`` returns is
            one client. Each client of ``sglrl.connect`` is another. None: ``max_queue``. Clients
            always take turns.
        max_unread_bytes: limit on unread bytes of answers for one client of ``sglrl.connect``. At
            the limit, the driver sends this client no more answers, and further calls of this
            client wait until it reads. At 4 times the limit (or 4 times ``max_message_bytes``, if
            that is more), the client is dropped and its calls end. The limit is at least 4 MiB.
        address: the address on which the driver listens: "ipc" for a private folder, "tcp" for the
            loopback interface, or "tcp://HOST:PORT". HOST is an IP address, an interface of this
            machine, or "0.0.0.0" for all interfaces. PORT may be "*". An address beyond the
            loopback interface needs ``keys``.
        keys: a folder made with ``sglrl keys``. Connections over tcp are encrypted, and peers
            without one of its keys are rejected.
        insecure: listen beyond the loopback interface without keys. Any peer may connect.
        start_timeout: seconds until all workers must be ready.
        restarts: maximum number of replacements of a lost worker within ``restart_period``
            seconds. After that, the pool continues without this worker. 0: never replace a worker.
            A replacement serves once it has the current weights.
        hang_timeout: seconds without progress after which a worker that holds calls is killed. It
            is then handled like a crashed worker, and the stacks of its threads are logged. A step
            that prefills may take ten times as long. A weight update has its own time limit. None:
            no limit.
        heartbeat_timeout: with ``address="tcp..."``, a connection without incoming data for this
            many seconds counts as broken, and its peer as lost. A lost worker is replaced. The
            calls of a lost client in another process are cancelled. Both ends send heartbeats when
            they have nothing else to send, also while Python is busy. A shorter outage loses
            nothing if TCP resends the lost packets within this time. TCP may need as long as the
            outage lasted to resend them. The transfer of the largest message must take less than
            this time. None: no heartbeats.
        max_message_bytes: size of the largest message that either side accepts.
        env: environment variables of the workers, in addition to the driver's. For variables that
            no earlier pool had, one more fork server starts and imports SGLang again. It keeps its
            memory until the program ends.
        gpus: indices of the visible GPUs that the workers use. None: all visible GPUs, from the
            first on. With ``gpus=[1, 2, 3]``, GPU 0 stays free for a trainer.
        weight_device: the device from which this process will send weights ("cuda:0", "cpu"). The
            group for weight updates is then formed at the start, not at the first update.
        keep_weights: which hosts keep a copy of the current weights in their memory. The
            replacement of a lost worker loads this copy. "auto": if only one worker has the current
            weights, its host keeps a copy. A single replica can then continue after a crash without
            the trainer. ``update_weights`` returns after the copy is complete. "host": one worker
            on each host copies its weights. None: no host keeps a copy. A copy needs as much memory
            as the model. If a host has too little, a warning is logged.
        engine: "sglang", or "fake" for a deterministic engine without torch, for tests. The fake
            engine repeats the prompt, or returns ``answers=``: lists of token ids, one list for
            each request. Its weight updates need torch and change only the version.
        accelerations: which of sglrl's faster replacements for parts of SGLang to use. True: all
            that fit. False: none. Or a list of names from ``sglrl doctor``. An acceleration stays
            off if it does not fit the installed SGLang. With deterministic inference or
            ``rl_on_policy_target``, an acceleration that may change a kernel or rounding stays off
            too. ``client.info.accelerations`` names the accelerations that are on. The environment
            variable ``SGLRL_ACCELERATIONS`` ("none", or names separated by commas) is used in place
            of True.
        deterministic: give the same tokens and logprobs for a request, bit for bit, whatever other
            requests are in its batch. This holds also if the request is retracted or continues on
            another worker. The request needs a seed or ``temperature=0``. This sets SGLang's
            ``enable_deterministic_inference`` and ``attention_backend="fa3"``, so it needs GPUs of
            one kind that have FA3 (measured on H200s). Requests take more time, and accelerations
            that may change rounding stay off.
        allow_unknown_sglang: start also if sglrl's corrections were not tested with the source of
            the installed SGLang. Results may be wrong.
        logit_processors: names ("module:Class") of subclasses of SGLang's ``CustomLogitProcessor``
            that requests may select with ``logit_processor=``. Workers import them at the start.
        progress: show the start on stderr: a status line on a terminal, otherwise one line. None:
            True, unless the environment variable ``SGLRL_PROGRESS`` is "0". The tokenizer is loaded
            at its first use. Loading that takes longer than a second is shown too.
        log_dir: folder that keeps the output of every worker, one file for each process. None: only
            the output of a worker that fails is kept, in ``logs`` in ``$SGLRL_CACHE``. Errors and
            log lines name the file.
        metrics_port: port at which this program serves the metrics of the pool for Prometheus, at
            ``/metrics`` (extra ``metrics``). An integer is a port of the loopback interface;
            "0.0.0.0:9100" is a port of all interfaces. None: no metrics are served.
        python: the interpreter of the workers ("/venv/bin/python"), in which the same version of
            sglrl is installed. This program then needs neither SGLang nor SGLang's version of
            torch. The interpreter starts with this program's environment variables. None: this
            program's own interpreter.
        hosts: other machines on which the workers run: the nodes of a ``Hosts``, or all machines of
            a Ray cluster ("ray") or of an allocation of Slurm ("slurm"). The pool then uses the
            ``address``, ``keys``, ``insecure`` and ``heartbeat_timeout`` of the hosts. None: this
            machine.
        **engine_args: fields of SGLang's ``ServerArgs`` (``mem_fraction_static``,
            ``max_running_requests``, ...). Their names are checked. SGLang's command-line aliases
            (``disable_piecewise_cuda_graph``, ...) are accepted too. ``random_seed`` (in
            0..2**32-1) is the seed of worker 0 for requests without a seed. Every other worker and
            every replacement uses a different seed derived from it. A request with its own
            ``seed`` gets the same tokens on every worker.

    Raises:
        UsageError: an argument is wrong. ``ModelError`` and ``NotEnoughDevices`` are subclasses.
        ModelError: when the client is entered, if the hub does not have the model or cannot be
            reached.
        WorkerStartError: when the client is entered, if a worker exits before it is ready.
    """
    path = os.fspath(model) if isinstance(model, (str, os.PathLike)) else None
    if not path or not isinstance(path, str):
        raise UsageError(f"model must be a folder or a name on the hub, got {model!r}")
    machines = hosts_from(hosts)
    if machines is not None:
        _check_alone("hosts", gpus=gpus, python=python, keys=keys, insecure=insecure or None)
        if address != "ipc":
            raise UsageError("hosts= and address= exclude each other: the hosts have an address")
    interpreter = sglang = None
    if python is not None:
        interpreter = find_python(python)
        sglang = examine(interpreter, needs_sglang=engine == "sglang").sglang
    name, path = path, own_model(path, interpreter)
    positive("replicas", replicas)
    if window is not None:
        positive("window", window)
    timeout = check_timeout(timeout)
    if timeout == 0:
        raise UsageError(f"timeout must be more than 0 seconds, got {timeout}")
    flag("deterministic", deterministic)
    if keep_weights not in ("auto", "host", None):
        raise UsageError(f"keep_weights must be 'auto', 'host' or None, got {keep_weights!r}")
    check_engine(engine)
    fabric = FabricConfig(
        routing=strategies(routing),
        max_queue=max_queue,
        max_queue_bytes=max_queue_bytes,
        max_calls_per_client=max_calls_per_client,
        max_unread_bytes=max_unread_bytes,
    )
    if "tensor_parallel_size" in engine_args:
        if tp_size != 1:
            raise UsageError("tp_size and tensor_parallel_size are the same: give one of them")
        tp_size = engine_args.pop("tensor_parallel_size")
    positive("tp_size", tp_size)
    engine_args = check_engine_arguments(engine, engine_args, sglang, signature(launch).parameters)
    if deterministic and engine == "sglang":
        set_deterministic(engine_args)
    processors = take_logit_processors(engine, logit_processors, engine_args)
    adapters = take_adapters(engine_args) if engine == "sglang" else {}
    dtype = check_dtype(dtype)
    wanted = check_accelerations(accelerations)
    if engine == "sglang":
        path = check_model(path)
        dtype = own_dtype(path) if dtype == "auto" else dtype
        if dtype is not None:
            engine_args["dtype"] = dtype
        if machines is None:
            check_files(engine_args)
            groups = _place(device, replicas, tp_size, gpus)
        else:
            _check_device(device)
            groups = [None] * replicas
        if device == "cpu" or (machines is None and groups[0] is None):
            check_on_cpu(engine_args)
        if (ep_size := engine_args.get("ep_size") or 1) > tp_size:
            raise UsageError(f"ep_size={ep_size} is more than tp_size={tp_size}")
        if engine_args.get("enable_return_hidden_states") and tp_size > 1:
            raise UsageError(f"enable_return_hidden_states needs tp_size=1, got {tp_size}")
    else:
        _check_device(device)
        if device == "cuda" or gpus is not None or tp_size > 1:
            raise UsageError("engine='fake' has no use for GPUs: no device='cuda', gpus=, tp_size=")
        if accelerations is not True or allow_unknown_sglang:
            raise UsageError(
                "engine='fake' is not SGLang: no accelerations=, allow_unknown_sglang="
            )
        groups = [None] * replicas
        engine_args.setdefault("vocab_size", FAKE_VOCAB_SIZE)
    metrics = metrics_server(metrics_port)
    worker_env = check_env(env)
    check_address(address, keys=keys is not None, insecure=insecure)
    check_weight_device(weight_device)
    if keys is not None:
        read_driver_keys(keys)

    # Each host makes "tiny" or "smollm2" in its own cache.
    there = name if machines is not None and path != name in LOCAL_MODELS else path

    def launch_spec(group: list[str] | None) -> LaunchSpec:
        return _launch_spec(
            engine,
            there,
            engine_args,
            tp_size,
            group,
            replicas,
            window,
            worker_env,
            wanted,
            allow_unknown_sglang,
            keep_weights is not None,
            processors,
        )

    def more(count: int, present: list[LaunchSpec]) -> list[LaunchSpec]:
        if groups[0] is None:
            return [launch_spec(None) for _ in range(count)]
        taken = {gpu for b in present for gpu in b.env["CUDA_VISIBLE_DEVICES"].split(",")}
        free = [gpu for gpu in _usable(gpus) if gpu not in taken]
        if len(free) < count * tp_size:
            raise NotEnoughDevices(
                f"{count} more workers with tp_size={tp_size} need {count * tp_size} GPUs; "
                f"{len(free)} are free"
            )
        return [launch_spec(free[i : i + tp_size]) for i in range(0, count * tp_size, tp_size)]

    launch_specs = [launch_spec(group) for group in groups]
    own = Path(path).parent == cache_dir()
    label = Path(path).name.partition("-")[0] if own else os.path.basename(os.path.normpath(model))
    what = f"{replicas} worker{'s' if replicas > 1 else ''} of {label}"
    if engine == "fake" and label != "fake":
        what += " (fake engine)"
    config = PoolConfig(
        address=address,
        keys=None if keys is None else os.fspath(keys),
        insecure=insecure,
        start_timeout=start_timeout,
        restarts=restarts,
        restart_period=restart_period,
        max_message_bytes=max_message_bytes,
        hang_timeout=hang_timeout,
        heartbeat_timeout=heartbeat_timeout,
        log_dir=path_of("log_dir", log_dir),
        keep_weights=keep_weights,
    )
    launcher: Launcher
    if machines is None:
        launcher = LocalLauncher(_preload(engine, groups), interpreter, start_timeout, worker_env)
    else:
        config = machines.reachable(config)
        kind = "plain" if engine == "fake" else "sglang"
        launcher = HostLauncher(machines, kind, device, start_timeout, worker_env)
    tokenizer = engine_args.get("tokenizer_path") or ""
    on_hub = [
        name for name in dict.fromkeys((path, tokenizer)) if name and not os.path.exists(name)
    ]
    shown = shows_progress(progress)
    pool = Pool(
        launch_specs,
        more=more,
        name=f"the Client of {os.path.basename(path)}",
        launcher=launcher,
        fabric=fabric,
        config=config,
        progress=StartDisplay(what, shown=shown),
    )
    client = Client(
        pool,
        PoolControl(pool, adapters),
        model=path,
        tokenizer=tokenizer,
        trust_tokenizer=bool(engine_args.get("trust_remote_code")),
        timeout=timeout,
        weight_device=weight_device,
        serve=partial(serve_and_announce, pool),
        prepare=partial(_prepare, on_hub) if engine == "sglang" else None,
        metrics=metrics,
    )
    client.tokenizer_box.shown = shown
    return client


async def _prepare(on_hub: Sequence[str], client: Client) -> None:
    for name in on_hub:
        await check_on_hub(name)
    client.tokenizer_box.load_early()


def _preload(engine: str, groups: list[list[str] | None]) -> str:
    """Return the name of the fork server's preload set: see ``workers/preloads.py``."""
    if engine == "fake":
        return "plain"
    return "sglang" if groups[0] is None else "sglang-cuda"


def _launch_spec(
    engine: str,
    model: str,
    args: dict[str, Any],
    tp_size: int,
    gpus: list[str] | None,
    replicas: int,
    window: int | None,
    env: Mapping[str, str],
    accelerations: tuple[str, ...] | None,
    allow_unknown_sglang: bool,
    keep_weights: bool,
    logit_processors: tuple[str, ...],
) -> LaunchSpec:
    # One core stays free for the driver, whose process may also run a trainer.
    threads = max(1, ((os.cpu_count() or 1) - 1) // (replicas * tp_size))
    worker_env = dict(env)
    if gpus is not None:
        worker_env["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
    fake = engine == "fake"
    bodies = [
        EngineSpec(
            engine=engine,
            model=model,
            args=args,
            device="cpu" if gpus is None else "cuda",
            rank=rank,
            tp_size=tp_size,
            gpu_id=rank,
            rendezvous="",
            threads=threads,
            memory_share=1 / (replicas * tp_size),
            window=window or (2 * int(args.get("max_running_requests", 512)) if fake else 0),
            accelerations=accelerations,
            allow_unknown_sglang=allow_unknown_sglang,
            keep_weights=keep_weights,
            logit_processors=logit_processors,
        )
        for rank in range(tp_size)
    ]
    return LaunchSpec(bodies=bodies, env=worker_env)


def _check_alone(name: str, **others: object) -> None:
    """Raise ``UsageError`` if an argument that excludes ``name`` is given."""
    for other, value in others.items():
        if value is not None:
            raise UsageError(f"{name}= and {other}= exclude each other")


def _check_device(device: str) -> None:
    if device not in ("auto", "cuda", "cpu"):
        raise UsageError(f"device must be 'auto', 'cuda' or 'cpu', got {device!r}")


def _place(
    device: str, replicas: int, tp_size: int, gpus: Sequence[int] | None
) -> list[list[str] | None]:
    """Return for each replica the list of its GPUs, or None if it runs on the CPU."""
    _check_device(device)
    usable = [] if device == "cpu" else cuda_devices()
    if gpus is not None:
        if device == "cpu":
            raise UsageError("gpus= is for workers on GPUs, and device is 'cpu'")
        usable = _usable(gpus)
    if device == "cpu" or (device == "auto" and not usable):
        return [None] * replicas
    needed = replicas * tp_size
    if len(usable) < needed:
        raise NotEnoughDevices(
            f"replicas={replicas} with tp_size={tp_size} need {needed} GPUs; "
            f"{len(usable)} are there (CUDA_VISIBLE_DEVICES and gpus= limit them); without a GPU, "
            "use device='cpu'"
        )
    return [usable[i : i + tp_size] for i in range(0, needed, tp_size)]


def _usable(gpus: Sequence[int] | None) -> list[str]:
    """Return the visible GPUs, restricted to the indices in ``gpus`` if given."""
    devices = cuda_devices()
    if gpus is None:
        return devices
    wrong = [g for g in gpus if isinstance(g, bool) or g not in range(len(devices))]
    if wrong or len(set(gpus)) != len(gpus):
        raise NotEnoughDevices(
            f"gpus={list(gpus)!r} must name different ones of the {len(devices)} visible GPUs, "
            "from 0 on"
        )
    return [devices[g] for g in gpus]


def cuda_devices() -> list[str]:
    """Return the visible GPUs as entries for ``CUDA_VISIBLE_DEVICES``. No CUDA library is used."""
    present = [p.name.removeprefix("nvidia") for p in Path("/dev").glob("nvidia[0-9]*")]
    visible = visible_cuda_devices()
    if visible is not None:
        return visible if present else []
    return sorted((p for p in present if p.isdigit()), key=int)
