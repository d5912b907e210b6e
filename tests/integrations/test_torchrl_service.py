"""``AsyncSGLang``: TorchRL's tests of its own service, and features that its service lacks."""

from __future__ import annotations

import asyncio
import os
import pickle
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict
from torchrl.modules.llm.backends import RLSGLangEngine
from torchrl.modules.llm.policies import Tokens

import sglrl
from sglrl.integrations.torchrl import AsyncSGLang, LoadBalancer, SGLangWrapper
from sglrl.integrations.torchrl.service_client import launch_arguments

PROMPTS = ["What is 1+1?", "What is 2+2?", "What is 3+3?"]
GREEDY = {"max_new_tokens": 10, "temperature": 0.0}


@pytest.fixture(scope="module")
def service(pool: sglrl.BlockingClient) -> Iterator[AsyncSGLang]:
    service = AsyncSGLang.connect(pool.address)
    yield service
    service.shutdown()


@pytest.fixture(scope="module")
def replicas(tiny: Path) -> Iterator[AsyncSGLang]:
    """Launch a service with two replicas of the fake engine."""
    service = AsyncSGLang.from_pretrained(
        str(tiny), dp_size=2, engine="fake", vocab_size=1000, step_seconds=0.002, tokens_per_step=4
    )
    yield service
    service.shutdown()


# --- TorchRL's own tests --------------------------------------------------------------------------


def test_it_is_torchrls_engine(service: AsyncSGLang, pool: sglrl.BlockingClient) -> None:
    assert isinstance(service, RLSGLangEngine)
    assert service.server_url == pool.address
    assert service.get_tp_size() == 1
    assert service.get_dp_size() == 1
    assert isinstance(service.get_master_address(), str)
    port = service.get_master_port()
    assert 1024 <= port < 65536
    assert service.get_master_port() == port


def test_model_metadata_is_the_models(service: AsyncSGLang, tiny: Path) -> None:
    from safetensors.torch import load_file

    metadata = service.get_model_metadata()
    saved = load_file(tiny / "model.safetensors")
    assert metadata == {name: (t.dtype, t.shape) for name, t in saved.items()}
    assert all(isinstance(shape, torch.Size) for _, shape in metadata.values())


def test_text_of_one_and_of_several(service: AsyncSGLang) -> None:
    one = service.generate(PROMPTS[0], **GREEDY)
    several = service.generate(prompts=PROMPTS, **GREEDY)
    batch = service.generate_batch(PROMPTS, GREEDY)
    assert isinstance(one, dict)
    assert [r["output_ids"] for r in several] == [r["output_ids"] for r in batch]
    assert several[0]["output_ids"] == one["output_ids"]
    assert several[0]["text"] == one["text"]
    assert one["meta_info"]["completion_tokens"] == len(one["output_ids"]) <= 10
    assert one["meta_info"]["finish_reason"]["type"] in ("stop", "length")
    assert isinstance(service.generate([PROMPTS[0]], **GREEDY), list)
    assert service.generate([], **GREEDY) == []


def test_token_ids_of_one_and_of_several(service: AsyncSGLang, pool: sglrl.BlockingClient) -> None:
    ids = [pool.tokenizer(prompt)["input_ids"] for prompt in PROMPTS]
    expected = service.generate(PROMPTS, **GREEDY)
    one = service.generate(input_ids=ids[0], sampling_params=GREEDY)
    assert one["output_ids"] == expected[0]["output_ids"]
    assert one["meta_info"]["prompt_tokens"] == len(ids[0])
    for given in (ids, [np.array(i) for i in ids], [torch.tensor(i) for i in ids]):
        several = service.generate(input_ids=given, sampling_params=GREEDY)
        assert [r["output_ids"] for r in several] == [r["output_ids"] for r in expected]
        # Token ids are also accepted in the place of texts.
        again = service.generate(given, GREEDY)
        assert [r["output_ids"] for r in again] == [r["output_ids"] for r in expected]
    assert service.generate(ids[0], GREEDY)["output_ids"] == expected[0]["output_ids"]


def test_one_kind_of_input(service: AsyncSGLang) -> None:
    with pytest.raises(ValueError, match="Cannot provide both"):
        service.generate(prompts="Hello", input_ids=[1])
    with pytest.raises(ValueError, match="Must provide either"):
        service.generate()
    with pytest.raises(ValueError, match="stream"):
        service.generate("Hello", stream=True)
    with pytest.raises(ValueError, match="temperatur"):
        service.generate("Hello", temperatur=1.0)
    for wrong in ([("max_new_tokens", 4)], [], 7, "greedy"):
        with pytest.raises(TypeError, match="sampling_params must be a mapping"):
            service.generate("Hello", wrong)


def test_flush_cache(service: AsyncSGLang) -> None:
    assert service.flush_cache() is True


# --- results match the request --------------------------------------------------------------------


def test_logprobs_and_samples(service: AsyncSGLang, pool: sglrl.BlockingClient) -> None:
    ids = pool.tokenizer(PROMPTS[0])["input_ids"]
    result = service.generate(
        input_ids=ids, return_logprobs=True, max_tokens=6, top_logprobs_num=2, ignore_eos=True
    )
    rows = result["meta_info"]["output_token_logprobs"]
    assert [token for _, token, _ in rows] == result["output_ids"]
    scored = pool.score(ids + result["output_ids"], start=len(ids))
    np.testing.assert_allclose([logprob for logprob, _, _ in rows], scored, atol=1e-4)
    tops = result["meta_info"]["output_top_logprobs"]
    assert [len(row) for row in tops] == [2] * 6
    assert (
        service.generate(input_ids=ids, max_tokens=1)["meta_info"]
        .keys()
        .isdisjoint({"output_token_logprobs", "output_top_logprobs"})
    )
    limited = service.generate(
        input_ids=ids, max_tokens=6, top_k=4, ignore_eos=True, return_sampling_mask=True
    )
    masks = limited["meta_info"]["output_token_sampling_mask"]
    assert [len(mask) for mask in masks] == [4] * 6
    assert all(token in mask for token, mask in zip(limited["output_ids"], masks, strict=True))
    given = service.generate(
        input_ids=ids, max_tokens=6, temperature=0, ignore_eos=True, token_ids_logprob=[7, 9]
    )
    scored = [pool.score([*ids, *given["output_ids"][:i], 9])[-1] for i in range(6)]
    rows = given["meta_info"]["output_token_ids_logprobs"]
    assert [[token for _, token, _ in row] for row in rows] == [[7, 9]] * 6
    np.testing.assert_allclose([row[1][0] for row in rows], scored, atol=1e-4)
    samples = service.generate(PROMPTS[:2], n=3, max_new_tokens=4, temperature=1.0)
    assert len(samples) == 6
    assert len(service.generate(PROMPTS[0], n=2, max_new_tokens=1)) == 2
    assert "text" not in service.generate("Hello", max_new_tokens=1, return_text=False)


def test_every_name_of_a_sampling_value_counts(service: AsyncSGLang) -> None:
    assert len(service.generate("Hello", {"max_tokens": 9}, max_new_tokens=2)["output_ids"]) <= 2
    forced = service.generate("Hello", logit_bias={"7": 100}, max_new_tokens=3)
    assert forced["output_ids"] == [7] * 3
    made = service.generate("Hello", {"do_sample": False, "logprobs": 2}, max_new_tokens=3)
    tops = made["meta_info"]["output_top_logprobs"]
    assert [row[0][1] for row in tops] == made["output_ids"]
    assert [len(row) for row in tops] == [2] * len(tops)
    assert "output_token_logprobs" in service.generate("Hello", logprobs=True)["meta_info"]
    for wrong in (
        {"bad_words": ["a"]},
        {"custom_params": {"a": 1}},
        {"best_of": 3},
        {"stream": True},
    ):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            service.generate("Hello", wrong)
    seeded = {"sampling_seed": 7, "max_new_tokens": 8, "ignore_eos": True}
    first, again = (service.generate("Hello", dict(seeded)) for _ in range(2))
    assert first["output_ids"] == again["output_ids"]
    assert len(service.generate("Hello", seeded, max_tokens=3)["output_ids"]) == 3
    only = service.generate("Hello", regex="(ab)+", max_new_tokens=4)["text"]
    assert set(only) <= {"a", "b"}
    assert service.generate("Hello", top_k=0, max_new_tokens=1, stop=None)["output_ids"]


def test_batches_run_at_the_same_time(service: AsyncSGLang) -> None:
    results = service.generate(["Hello"] * 8, max_new_tokens=40, ignore_eos=True)
    latencies = [r["meta_info"]["e2e_latency"] for r in results]
    # In sequence, the last call would wait for seven others. All latencies count from submission.
    assert max(latencies) < sum(latencies) / 2


# --- several replicas, with AsyncVLLM's names -----------------------------------------------------


def test_actor_index_and_what_is_known_of_actors(replicas: AsyncSGLang) -> None:
    assert replicas.num_replicas == replicas.get_dp_size() == 2
    for index in (0, 1):
        made = replicas.generate(input_ids=[1, 2], max_new_tokens=2, actor_index=index)
        assert made["meta_info"]["actor_index"] == index
    assert replicas.get_num_unfinished_requests() == [0, 0]
    assert replicas.get_num_unfinished_requests(1) == 0
    assert replicas.get_cache_usage() == [0.0, 0.0]
    assert replicas.get_random_actor_index() in (0, 1)
    for ask in (replicas.get_cache_usage, replicas.get_num_unfinished_requests):
        with pytest.raises(IndexError, match=r"Actor index 2 out of range \[0, 2\)"):
            ask(2)
    with pytest.raises(IndexError):
        replicas.generate(input_ids=[1], actor_index=5)


def test_busy_actors_say_so_and_a_time_limit_ends_requests(replicas: AsyncSGLang) -> None:
    def hold() -> None:
        with pytest.raises(TimeoutError):
            replicas.generate(
                input_ids=[[1]] * 3, max_new_tokens=30_000, actor_index=1, timeout_seconds=1.0
            )

    holder = threading.Thread(target=hold)
    holder.start()
    seen = []
    while holder.is_alive():
        seen.append((replicas.get_num_unfinished_requests(), replicas.get_cache_usage(1)))
    holder.join()
    assert ([0, 3], pytest.approx(0, abs=1)) in seen
    assert max(usage for _, usage in seen) > 0
    while replicas.get_num_unfinished_requests(1):
        replicas.generate(input_ids=[1], max_new_tokens=1, actor_index=1)


@pytest.mark.parametrize("name", ["timeout", "timeout_seconds"])
def test_no_time_at_all_is_a_time_limit(replicas: AsyncSGLang, name: str) -> None:
    limit: dict[str, Any] = {name: 0}
    with pytest.raises(sglrl.DeadlineExceeded):
        replicas.generate(input_ids=[1, 2], max_new_tokens=30_000, **limit)


def test_collective_rpc_is_for_declared_endpoints(replicas: AsyncSGLang) -> None:
    assert replicas.collective_rpc("flush_cache") == [True, True]
    found = replicas.collective_rpc("stats", timeout=10.0)
    assert [type(stats) for stats in found] == [sglrl.EngineStats] * 2
    for method in ("__class__", "generate", "load_weights", "close"):
        with pytest.raises(sglrl.UnknownEndpoint):
            replicas.collective_rpc(method)
    with pytest.raises(sglrl.UsageError):
        replicas.collective_rpc("stats", args=(1,))


def record_workers(service: AsyncSGLang, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that records the workers of all prompts from now on."""
    client = service.client.source
    generate = client.generate
    found: list[int] = []

    async def recorded(*args: Any, **kwargs: Any) -> Any:
        given = kwargs["input_ids"]
        found.extend([kwargs["worker"]] * (len(given) if isinstance(given, list) else 1))
        return await generate(*args, **kwargs)

    monkeypatch.setattr(client, "generate", recorded)
    return found


def test_load_balancer(replicas: AsyncSGLang, monkeypatch: pytest.MonkeyPatch) -> None:
    def where(prompts: list[list[int]]) -> list[int]:
        made = replicas.generate(input_ids=prompts, max_new_tokens=1)
        return [result["meta_info"]["actor_index"] for result in made]

    try:
        balancer = replicas.create_load_balancer("round-robin")
        assert where([[1]] * 4) == [0, 1, 0, 1]
        assert balancer.get_stats()["round_robin_index"] == 0
        balancer = replicas.create_load_balancer()
        assert balancer.strategies == ["prefix-aware", "requests"]
        same = {balancer.select_actor([5] * 8 + [i]) for i in range(20)}
        assert len(same) == 1
        assert {balancer.select_actor([i] * 8) for i in range(20)} == {0, 1}
        assert balancer.select_actor("a b c") == balancer.select_actor("a b c")
        # A large batch is never sent to one replica only.
        assert set(where([[5] * 9] * 30)) == {0, 1}
        # A policy also uses the balancer, unless its arguments choose a worker.
        balancer = replicas.create_load_balancer("round-robin")
        chosen = record_workers(replicas, monkeypatch)
        ids = torch.full((5, 3), 7)
        for kwargs, workers in (({}, [0, 1, 0, 1, 0]), ({"worker": 1}, [1] * 5)):
            policy = SGLangWrapper(
                replicas, input_mode="tokens", generate_kwargs={"max_new_tokens": 1, **kwargs}
            )
            found = policy(TensorDict(tokens=Tokens(prompt=ids), batch_size=5))
            assert found["tokens", "response"].shape == (5, 1)
            assert chosen == workers
            chosen.clear()
        balancer = replicas.create_load_balancer(
            ["kv-cache"], prefix_length=4, overload_threshold=2.0
        )
        assert balancer.select_actor() in (0, 1)
        stats = balancer.get_stats()
        assert stats["num_actors"] == 2
        assert stats["prefix_length"] == 4
        assert stats["overload_threshold"] == 2.0
        assert [s["actor_index"] for s in stats["actor_stats"]] == [0, 1]
        assert stats["primary_strategy"] == "kv-cache"
        with pytest.raises(ValueError, match="Invalid strategy 'luck'"):
            replicas.create_load_balancer("luck")
        with pytest.raises(ValueError, match="At least one"):
            replicas.create_load_balancer([])
    finally:
        replicas._load_balancer = None


def test_the_load_balancer_refuses_ids_of_no_vocabulary(replicas: AsyncSGLang) -> None:
    balancer = replicas.create_load_balancer("prefix-aware")
    replicas._load_balancer = None
    for wrong in (1 << 31, -(1 << 40)):
        with pytest.raises(ValueError, match="outside of every vocabulary"):
            balancer.select_actor([5, wrong])


def test_equally_loaded_replicas_are_chosen_at_random(replicas: AsyncSGLang) -> None:
    for strategy in ("requests", "kv-cache"):
        balancer = LoadBalancer(replicas, strategy)
        assert {balancer.select_actor() for _ in range(40)} == {0, 1}


def test_a_load_balancer_needs_a_service() -> None:
    for wrong in ([1, 2], [], None, object()):
        with pytest.raises(ValueError, match="LoadBalancer needs an AsyncSGLang"):
            LoadBalancer(wrong)  # type: ignore[arg-type]


# --- names of vLLM --------------------------------------------------------------------------------


def test_vllms_prompts(replicas: AsyncSGLang) -> None:
    def outputs(*prompts: Any, **values: Any) -> Any:
        found = replicas.generate(*prompts, max_new_tokens=3, **values)
        return [r["output_ids"] for r in found] if isinstance(found, list) else found["output_ids"]

    one, two = {"prompt_token_ids": [1, 2]}, {"prompt_token_ids": [3, 4], "prompt": "three four"}
    assert outputs(one) == outputs(prompt_token_ids=[1, 2]) == [1, 2, 1]
    for both in ([one, two], [one, [3, 4]], (one, two)):
        assert outputs(both) == [[1, 2, 1], [3, 4, 3]]
    assert outputs(prompt_token_ids=[[1, 2], [3, 4]]) == [[1, 2, 1], [3, 4, 3]]
    text = {"prompt": "What is 1+1?", "prompt_token_ids": None}
    assert outputs(text, use_tqdm=True) == outputs("What is 1+1?")
    balancer = LoadBalancer(replicas)
    assert balancer.select_actor(one) == balancer.select_actor([1, 2])
    for wrong, message in (
        ({}, "needs 'prompt' or 'prompt_token_ids'"),
        ({"prompt_token_ids": [1], "multi_modal_data": {"image": 1}}, "multi_modal_data"),
        ([one, "text"], "texts and token ids"),
    ):
        with pytest.raises(ValueError, match=message):
            replicas.generate(wrong)
    with pytest.raises(ValueError, match="Cannot provide both 'input_ids' and 'prompt_token_ids'"):
        replicas.generate(input_ids=[1], prompt_token_ids=[1])
    with pytest.raises(ValueError, match="has no lora_name"):
        replicas.generate(prompt_token_ids=[1], lora_request=object())
    for request in ("poems", SimpleNamespace(lora_name="poems", lora_int_id=1, lora_path="x")):
        with pytest.raises(sglrl.UnknownAdapter, match="no adapter 'poems' is loaded"):
            replicas.generate(prompt_token_ids=[1], lora_request=request)


def test_vllms_names_start_the_same_replicas(tiny: Path) -> None:
    service = AsyncSGLang.from_pretrained(
        str(tiny), num_replicas=2, num_devices=1, engine="fake", vocab_size=1000
    )
    try:
        assert (service.get_dp_size(), service.get_tp_size()) == (2, 1)
    finally:
        service.shutdown()
    arguments = launch_arguments(
        1,
        1,
        300.0,
        {
            "tensor_parallel_size": 4,
            "max_model_len": 512,
            "max_num_seqs": 64,
            "enforce_eager": True,
        },
    )
    assert arguments["tp_size"] == 4
    assert arguments["context_length"] == 512
    assert arguments["max_running_requests"] == 64
    assert arguments["disable_cuda_graph"] is True


@pytest.mark.parametrize(
    ("given", "ours"),
    [
        ({"gpu_memory_utilization": 0.9}, "mem_fraction_static="),
        ({"enable_prefix_caching": True}, "disable_radix_cache="),
        ({"max_num_batched_tokens": 8192}, "chunked_prefill_size="),
        ({"num_workers": 2}, "replicas="),
        ({"dp_size": 2, "num_replicas": 3}, "dp_size and num_replicas are the same"),
        ({"tp_size": 2, "num_devices": 2}, "tp_size and num_devices are the same"),
    ],
)
def test_names_that_are_rejected_with_ours(given: dict[str, Any], ours: str, tiny: Path) -> None:
    with pytest.raises(ValueError, match=ours):
        AsyncSGLang.from_pretrained(str(tiny), **given)


def test_a_running_pool_takes_no_engine_arguments(replicas: AsyncSGLang) -> None:
    with pytest.raises(ValueError, match="max_num_seqs: a running pool keeps its settings"):
        AsyncSGLang.connect(replicas.server_url, max_num_seqs=4)


# --- start and shutdown ---------------------------------------------------------------------------


def test_errors_before_there_is_a_server(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="Server URL not set"):
        AsyncSGLang(model_path="x").server_url  # noqa: B018
    with pytest.raises(RuntimeError, match="Server URL not set"):
        AsyncSGLang().generate("Hello")
    with pytest.raises(ValueError, match="model_path is required"):
        AsyncSGLang()._launch_server()
    for url in ("http://localhost:1", "nonsense"):
        with pytest.raises(ConnectionError, match="Cannot connect to SGLang server at"):
            AsyncSGLang.connect(url)


def test_a_lost_pools_error_has_the_callers_limit_and_no_secret() -> None:
    with pytest.raises(ConnectionError, match=r"within 0\.2 s") as caught:
        AsyncSGLang.connect("tcp://127.0.0.1:1#secret", timeout=0.2)
    assert "tcp://127.0.0.1:1" in str(caught.value)
    assert "secret" not in "".join(traceback.format_exception_only(caught.value))
    assert "secret" not in str(caught.value.__cause__)


def test_a_copy_connects_to_the_same_replicas(replicas: AsyncSGLang) -> None:
    copy = pickle.loads(pickle.dumps(replicas))
    assert copy.get_dp_size() == 2
    assert copy.server_url == replicas.server_url
    assert "external" in repr(copy)
    assert "managed" in repr(replicas)
    assert replicas.server_url.partition("#")[2] not in repr(replicas)
    assert copy.generate(input_ids=[1, 2], max_new_tokens=4)["output_ids"] == [1, 2, 1, 2]
    assert copy.get_num_unfinished_requests() == [0, 0]
    assert copy.collective_rpc("flush_cache") == [True, True]
    copy.shutdown()
    copy.shutdown()
    assert copy.server_url == replicas.server_url
    with pytest.raises(RuntimeError, match="this AsyncSGLang is shut down"):
        copy.generate(input_ids=[1])
    assert replicas.generate(input_ids=[1], max_new_tokens=1)["output_ids"] == [1]


def test_a_copy_in_another_process(replicas: AsyncSGLang) -> None:
    code = (
        "import pickle, sys; service = pickle.loads(sys.stdin.buffer.read()); "
        "print(service.generate(input_ids=[1, 2], max_new_tokens=3)['output_ids'])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], input=pickle.dumps(replicas), capture_output=True, timeout=300
    )
    assert done.stdout.decode().strip() == "[1, 2, 1]", done.stderr.decode()


def test_a_killed_replica_is_no_loss(tiny: Path) -> None:
    service = AsyncSGLang.from_pretrained(
        str(tiny), dp_size=2, engine="fake", vocab_size=1000, step_seconds=0.002, tokens_per_step=4
    )
    try:
        victim = service.client.workers[0].pid

        async def kill() -> None:
            os.kill(victim, signal.SIGKILL)

        killing = asyncio.run_coroutine_threadsafe(kill(), service.client.loop)
        made = service.generate(input_ids=[[i] for i in range(8)], max_new_tokens=2000)
        killing.result(10)
        assert [r["output_ids"] for r in made] == [[i] * 2000 for i in range(8)]
    finally:
        service.shutdown()
