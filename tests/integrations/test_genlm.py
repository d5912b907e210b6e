"""genlm's interface, with the checks of its own backend tests, against transformers.

Also tests which callers share a query, and which wait.
"""

from __future__ import annotations

import asyncio
import gc
import importlib
import itertools
import subprocess
import sys
import threading
import types
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from readme import README, example
from safetensors.torch import load_file, save_file

import sglrl
from sglrl.core.seeds import derived_seed
from sglrl.integrations import genlm
from sglrl.integrations.genlm import AsyncSGLTransformer, Token
from sglrl.integrations.genlm.deliveries import Deliveries
from sglrl.integrations.genlm.vocabulary import token_bytes, token_strings
from sglrl.launching.tiny_model import make_character_tokenizer, make_model
from sglrl.wire.engine import NextTokenArgs

TEXTS = [
    "There might be something wrong, it may be because ",
    "with the language model code",
    "It's probably this or that",
    "with the language model code",
]
ODD = "’•¶∂ƒ˙∆£Ħ爨ൠᅘ∰፨ \n\t\x00 zero"


class Counted:
    """Records the requests to the engine."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.keys: list[bytes] = []
        self._changed = threading.Condition()

        def counted(ids: bytes, *args: Any) -> NextTokenArgs:
            with self._changed:
                self.keys.append(ids)
                self._changed.notify_all()
            return NextTokenArgs(ids, *args)

        monkeypatch.setattr("sglrl.inference.requests.NextTokenArgs", counted)

    def wait(self, count: int) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.keys) >= count, timeout=300)


@pytest.fixture(scope="module")
def model(pool: sglrl.BlockingClient) -> Iterator[AsyncSGLTransformer]:
    with AsyncSGLTransformer(pool) as model:
        yield model
    # The model did not create the client, so the client stays open.
    assert pool.workers[0].state == "ready"


@pytest.fixture
def fake(tiny: Path) -> Iterator[sglrl.BlockingClient]:
    with sglrl.blocking(tiny, engine="fake", vocab_size=512) as client:
        yield client


@pytest.fixture
async def client(tiny: Path) -> AsyncIterator[sglrl.Client]:
    async with sglrl.launch(tiny, engine="fake", vocab_size=512) as client:
        yield client


@pytest.fixture(scope="module")
def prompts(model: AsyncSGLTransformer) -> list[list[int]]:
    return [model.tokenizer.encode(text) for text in TEXTS]


def expected(hf_model: Any, ids: Sequence[int]) -> torch.Tensor:
    with torch.inference_mode():
        logits = hf_model(torch.tensor([list(ids)])).logits[0, -1]
    return torch.log_softmax(logits.float(), dim=-1)


def error(have: torch.Tensor, want: torch.Tensor) -> float:
    """Return the largest relative error."""
    return float(((have - want).abs() / want.abs()).max())


def test_every_way_to_ask(model: AsyncSGLTransformer, hf_model: Any, prompts: Any) -> None:
    """Each ``asyncio.run`` uses another event loop."""
    wants = torch.stack([expected(hf_model, ids) for ids in prompts])
    for ids, want in zip(prompts, wants, strict=True):
        have = asyncio.run(model.next_token_logprobs(ids))
        assert have.dtype == torch.float32
        assert have.shape == (512,)
        assert error(have, want) < 1e-3
        assert error(model.next_token_logprobs_sync(ids), want) < 1e-3
    have = asyncio.run(model.batch_next_token_logprobs(prompts))
    assert have.shape == (len(prompts), 512)
    assert error(have, wants) < 1e-3
    assert error(model.batch_next_token_logprobs_sync(prompts), wants) < 1e-3

    async def blocked() -> torch.Tensor:
        return model.batch_next_token_logprobs_sync(prompts)

    assert error(asyncio.run(blocked()), wants) < 1e-3
    assert model.clear_kv_cache()


def test_in_bfloat16_cut_up_and_with_new_weights(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "bf16", dtype="bfloat16", seed=1)
    weights = load_file(folder / "model.safetensors")
    # The random model's logits are large: their rounding error alone reaches the tolerance.
    weights["lm_head.weight"] /= 4
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    from transformers import AutoModelForCausalLM

    reference = AutoModelForCausalLM.from_pretrained(folder, dtype="auto").eval()
    options = {"device": "cpu", "chunked_prefill_size": 64, "skip_tokenizer_init": False}
    with AsyncSGLTransformer.from_name(
        str(folder), engine_opts=options, cache_size=100, cache_opts={"move_to_cpu": True}
    ) as model:
        prompts = [model.tokenizer.encode(t) for t in ("Cat " + "meow " * 50, "Dog " * 60, *TEXTS)]
        assert max(map(len, prompts)) > 128
        first = asyncio.run(model.batch_next_token_logprobs(prompts))
        for have, ids in zip(first, prompts, strict=True):
            assert error(have, expected(reference, ids)) < 2e-2
        assert model.cache is not None
        assert len(model.cache) == len(prompts) - 1
        assert model.next_token_logprobs_sync(prompts[0]).equal(first[0])
        with torch.no_grad():
            reference.lm_head.weight *= 0.5
        model.client.update_weights(reference)
        assert not model.cache
        for ids in prompts:
            have = model.next_token_logprobs_sync(ids)
            assert error(have, expected(reference, ids)) < 2e-2
        assert model.client.workers[0].load == 0
    with pytest.raises(sglrl.Closed):
        model.next_token_logprobs_sync(prompts[-1][:2])
    with pytest.raises(sglrl.Closed):
        asyncio.run(model.next_token_logprobs(prompts[-1][:2]))
    model.reset_async_queries()


def test_nothing_is_no_prompt(model: AsyncSGLTransformer) -> None:
    with pytest.raises(ValueError, match="no token ids"):
        asyncio.run(model.next_token_logprobs([]))
    with pytest.raises(ValueError, match="no token ids"):
        model.next_token_logprobs_sync([])
    with pytest.raises(sglrl.InvalidRequest, match="outside"):
        model.next_token_logprobs_sync([512])
    wrong: list[Any] = [None, 5, [1.5], [None], [[1], [2]], torch.tensor(1), iter([1])]
    for ids in wrong:
        with pytest.raises(sglrl.InvalidRequest, match="integers"):
            asyncio.run(model.next_token_logprobs(ids))
        with pytest.raises(sglrl.InvalidRequest, match="integers"):
            model.batch_next_token_logprobs_sync([[1], ids])
    with pytest.raises(sglrl.InvalidRequest, match=r"mapping of \['prompt_token_ids'\]"):
        model.next_token_logprobs_sync({"prompt_token_ids": [1]})  # type: ignore[arg-type]
    for none in (
        asyncio.run(model.batch_next_token_logprobs([])),
        model.batch_next_token_logprobs_sync([]),
    ):
        assert none.shape == (0, 512)
        assert none.dtype == torch.float32
    assert asyncio.run(model.batch_sample([], 3, [])) == []


def test_unknown_adapters_are_refused(model: AsyncSGLTransformer) -> None:
    """genlm passes adapter names, and None for the model itself."""
    asks: list[Callable[..., Any]] = [
        lambda name: asyncio.run(model.next_token_logprobs([1], lora_name=name)),
        lambda name: asyncio.run(model.batch_next_token_logprobs([[1]], lora_name=name)),
        lambda name: asyncio.run(model.sample([1], 1, [], lora_name=name)),
        lambda name: asyncio.run(model.batch_sample([[1]], 1, [], lora_name=name)),
        lambda name: model.next_token_logprobs_sync([1], lora_name=name),
        lambda name: model.batch_next_token_logprobs_sync([[1]], lora_name=name),
    ]
    for ask in asks:
        ask(None)
        with pytest.raises(sglrl.UnknownAdapter, match="no adapter 'poems' is loaded"):
            ask("poems")


def test_samples_are_those_of_the_model(
    model: AsyncSGLTransformer, hf_model: Any, prompts: Any
) -> None:
    def sampled(ids: list[int], temperature: float, seed: int, eos: set[int]) -> list[int]:
        generator = torch.Generator().manual_seed(seed)
        found: list[int] = []
        for _ in range(8):
            logprobs = expected(hf_model, [*ids, *found])
            probs = torch.softmax(logprobs / temperature, dim=-1)
            token = int(torch.multinomial(probs, 1, generator=generator))
            if token in eos:
                break
            found.append(token)
        return found

    alone = asyncio.run(model.sample(prompts[0], 8, [], temperature=0.7, seed=3))
    assert alone == sampled(prompts[0], 0.7, 3, set())
    assert len(alone) == 8
    several = asyncio.run(model.batch_sample(prompts, 8, {alone[4]}, temperature=0.7, seed=3))
    assert several[0] == alone[:4]
    assert several == [
        sampled(ids, 0.7, derived_seed(3, number), {alone[4]}) for number, ids in enumerate(prompts)
    ]
    same = asyncio.run(model.batch_sample([prompts[0]] * 4, 8, [], temperature=0.7, seed=3))
    assert same[0] == alone
    assert len(set(map(tuple, same))) == 4
    assert len(asyncio.run(model.sample(prompts[0], 3, []))) == 3
    greedy = list(prompts[0])
    for token in asyncio.run(model.sample(greedy, 4, [], temperature=0)):
        assert token == int(expected(hf_model, greedy).argmax())
        greedy.append(token)
    for temperature in (-1.0, float("nan")):
        with pytest.raises(ValueError, match="temperature"):
            asyncio.run(model.sample(prompts[0], 4, [], temperature=temperature))


def test_only_the_likeliest(pool: sglrl.BlockingClient, model: Any, prompts: Any) -> None:
    few = AsyncSGLTransformer(pool, top_k=7).next_token_logprobs_sync(prompts[0])
    every = model.next_token_logprobs_sync(prompts[0])
    best = every.topk(7)
    assert few.shape == every.shape
    assert int(few.isfinite().sum()) == 7
    assert error(few[best.indices], best.values) < 1e-3


# --- shared queries and waiting -------------------------------------------------------------------


def test_identical_queries_in_flight_are_one(
    fake: sglrl.BlockingClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = Counted(monkeypatch)
    model = AsyncSGLTransformer(fake)

    async def run() -> list[torch.Tensor]:
        fake.pause()
        same = [asyncio.ensure_future(model.next_token_logprobs([1, 2, 3])) for _ in range(20)]
        other = asyncio.ensure_future(model.next_token_logprobs([1, 2, 4]))
        await asyncio.sleep(0)
        # One tick later the first requests are already sent.
        late = asyncio.ensure_future(model.next_token_logprobs([1, 2, 3]))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        same[0].cancel()
        same[7].cancel()
        fake.resume()
        found = await asyncio.gather(*same, late, other, return_exceptions=True)
        for cancelled in (found.pop(7), found.pop(0)):
            assert isinstance(cancelled, asyncio.CancelledError)
        return found  # type: ignore[return-value]

    *same, other = asyncio.run(run())
    assert len(asked.keys) == 2
    assert all(one is same[0] for one in same)
    assert int(same[0].argmax()) == 3
    assert int(other.argmax()) == 4
    # Without a cache the engine computes the answer again.
    assert int(model.next_token_logprobs_sync([1, 2, 3]).argmax()) == 3
    assert len(asked.keys) == 3
    assert not model._queries.inflight


def test_what_was_asked_is_kept(
    fake: sglrl.BlockingClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = Counted(monkeypatch)
    model = AsyncSGLTransformer(fake, cache_size=3)
    first = model.next_token_logprobs_sync([1])
    model.batch_next_token_logprobs_sync([[2], [3], [1]])
    assert model.next_token_logprobs_sync([1]) is first
    assert len(asked.keys) == 3
    # The least recently used entry is evicted: 2, because 1 was used after it.
    model.next_token_logprobs_sync([4])
    assert asyncio.run(model.next_token_logprobs([1])) is first
    assert asyncio.run(model.batch_next_token_logprobs([[1], [3], [4]])).shape == (3, 512)
    assert len(asked.keys) == 4
    model.next_token_logprobs_sync([2])
    assert len(asked.keys) == 5
    model.clear_cache()
    assert model.next_token_logprobs_sync([1]) is not first
    assert len(asked.keys) == 6


def test_a_cache_of_less_than_nothing_is_none(fake: sglrl.BlockingClient) -> None:
    """The behavior is that of genlm's class. No caller waits forever."""
    model = AsyncSGLTransformer(fake, cache_size=-1)
    assert model.cache is None
    assert model.batch_next_token_logprobs_sync([[1], [2]]).shape == (2, 512)


def test_threads_take_turns_often(fake: sglrl.BlockingClient) -> None:
    """A shorter switch interval that the program has set is kept."""
    before = sys.getswitchinterval()
    try:
        for had, has in ((0.005, 0.001), (0.0002, 0.0002)):
            sys.setswitchinterval(had)
            AsyncSGLTransformer(fake).close()
            assert sys.getswitchinterval() == pytest.approx(has, rel=0.01)
    finally:
        sys.setswitchinterval(before)


def test_a_closed_model_keeps_nothing(
    fake: sglrl.BlockingClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A closed model is no longer notified of new weights."""
    asked = Counted(monkeypatch)
    model = AsyncSGLTransformer(fake, cache_size=3)
    model.next_token_logprobs_sync([1])
    model.next_token_logprobs_sync([1])
    assert len(asked.keys) == 1
    model.close()
    model.next_token_logprobs_sync([1])
    model.clear_cache()
    assert len(asked.keys) == 2


def test_new_weights_end_what_may_be_shared(
    fake: sglrl.BlockingClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = Counted(monkeypatch)
    model = AsyncSGLTransformer(fake, cache_size=3)
    weights = fake.source.pool.weights

    async def run() -> None:
        fake.pause()
        old = asyncio.ensure_future(model.next_token_logprobs([1]))
        await asyncio.to_thread(asked.wait, 1)
        weights.versions.current = 1
        for told in list(weights.on_version):
            fake.loop.call_soon_threadsafe(told)
        new = asyncio.ensure_future(model.next_token_logprobs([1]))
        await asyncio.to_thread(asked.wait, 2)
        fake.resume()
        await asyncio.gather(old, new)

    asyncio.run(asyncio.wait_for(run(), 300))
    # The fake engine reports version 0 for both answers.
    assert not model.cache


def test_queries_can_be_reset(fake: sglrl.BlockingClient) -> None:
    model = AsyncSGLTransformer(fake)

    async def run() -> None:
        fake.pause()
        tasks = [asyncio.ensure_future(model.next_token_logprobs([1, i])) for i in range(5)]
        await asyncio.sleep(0)
        tasks += [asyncio.ensure_future(model.next_token_logprobs([2, i])) for i in range(5)]
        # No loop has been notified of these requests yet.
        tasks[5].cancel()
        await asyncio.sleep(0)
        model.reset_async_queries()
        fake.resume()
        for ended in await asyncio.gather(*tasks, return_exceptions=True):
            assert isinstance(ended, asyncio.CancelledError)
        assert int((await model.next_token_logprobs([1, 9])).argmax()) == 9

    asyncio.run(asyncio.wait_for(run(), 300))
    assert not model._queries.inflight
    assert fake.workers[0].load == 0


def test_queries_from_before_an_update_are_reset_too(
    fake: sglrl.BlockingClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = Counted(monkeypatch)
    model = AsyncSGLTransformer(fake)

    async def run() -> None:
        fake.pause()
        old = asyncio.ensure_future(model.next_token_logprobs([1]))
        await asyncio.to_thread(asked.wait, 1)
        for told in list(fake.source.pool.weights.on_version):
            fake.loop.call_soon_threadsafe(told)
        model.reset_async_queries()
        with pytest.raises(asyncio.CancelledError):
            await old

    asyncio.run(asyncio.wait_for(run(), 300))
    fake.resume()
    assert not model._queries.unanswered


@pytest.mark.parametrize("own_loop", [False, True])
def test_other_callbacks_get_their_turn_between_answers(
    fake: sglrl.BlockingClient, own_loop: bool
) -> None:
    """This holds however many tasks are answered at the same time."""
    model = AsyncSGLTransformer(fake)
    woken: list[int] = []

    async def ask(i: int) -> None:
        await model.next_token_logprobs([1, 2])
        woken.append(i)

    async def run() -> None:
        loop = asyncio.get_running_loop()
        await asyncio.to_thread(fake.pause) if not own_loop else await fake.source.pause()
        tasks = [asyncio.ensure_future(ask(i)) for i in range(100)]
        await asyncio.sleep(0)
        turns: list[int] = []

        def look() -> None:
            turns.append(len(woken))
            if len(woken) < len(tasks):
                loop.call_soon(look)

        look()
        await fake.source.resume() if own_loop else await asyncio.to_thread(fake.resume)
        await asyncio.gather(*tasks)
        assert woken == list(range(100))
        steps = [after - before for before, after in itertools.pairwise([*turns, len(woken)])]
        assert max(steps) <= 32
        assert sum(steps) == 100

    if own_loop:
        assert fake.loop is not None
        asyncio.run_coroutine_threadsafe(run(), fake.loop).result(30)
    else:
        asyncio.run(asyncio.wait_for(run(), 300))


def test_batches_that_arrive_in_one_iteration_share_its_limit() -> None:
    """The rest of one batch and a second batch wake at most 32 tasks together."""

    async def run() -> None:
        loop = asyncio.get_running_loop()
        deliveries = Deliveries(loop)
        futures = [loop.create_future() for _ in range(100)]
        outcomes = [(future, torch.zeros(1)) for future in futures]
        done = [0]

        def look() -> None:
            done.append(sum(future.done() for future in futures))
            if done[-1] < len(futures):
                loop.call_soon(look)

        look()
        deliveries.arrive(loop, outcomes[:36])
        # These two run in the iteration after the first 32, and in the one of the other 4.
        loop.call_soon(deliveries.arrive, loop, outcomes[36:68])
        loop.call_soon(loop.call_soon, deliveries.arrive, loop, outcomes[68:])
        await asyncio.gather(*futures)
        assert max(after - before for before, after in itertools.pairwise(done)) <= 32

    asyncio.run(asyncio.wait_for(run(), 300))


def test_no_distribution_waits_for_the_garbage_collector(fake: sglrl.BlockingClient) -> None:
    model = AsyncSGLTransformer(fake)

    async def ask() -> None:
        await asyncio.gather(*(model.next_token_logprobs([1, i]) for i in range(20)))

    gc.collect()
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        asyncio.run(ask())
        gc.collect()
        assert [found for found in gc.garbage if isinstance(found, torch.Tensor)] == []
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()


def test_a_loop_that_is_blocked_is_not_waited_for_without_end(
    fake: sglrl.BlockingClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = AsyncSGLTransformer(fake)
    monkeypatch.setattr("sglrl.integrations.genlm.engine_loop._PATIENCE", 0.01)
    go_on = threading.Event()
    assert fake.loop is not None
    fake.loop.call_soon_threadsafe(go_on.wait, 30)
    try:
        with pytest.raises(sglrl.DeadlineExceeded, match="event loop"):
            model.reset_async_queries()
    finally:
        go_on.set()


def test_errors_reach_who_waits(fake: sglrl.BlockingClient) -> None:
    model = AsyncSGLTransformer(fake, timeout=0.5)
    fake.pause()
    with pytest.raises(sglrl.DeadlineExceeded):
        asyncio.run(model.next_token_logprobs([1]))
    with pytest.raises(sglrl.DeadlineExceeded):
        asyncio.run(model.batch_next_token_logprobs([[1], [2]]))
    with pytest.raises(sglrl.DeadlineExceeded):
        model.next_token_logprobs_sync([1])
    fake.resume()
    with pytest.raises(sglrl.InvalidRequest, match="context"):
        model.next_token_logprobs_sync([1] * 40_000)
    with pytest.raises(sglrl.Closed):
        AsyncSGLTransformer(sglrl.blocking("fake", engine="fake"))


async def test_on_the_clients_own_loop(client: sglrl.Client) -> None:
    model = AsyncSGLTransformer(client, cache_size=10)
    found = await asyncio.gather(*(model.next_token_logprobs([1, i % 4]) for i in range(40)))
    for i, one in enumerate(found):
        assert int(one.argmax()) == i % 4
    assert (await model.batch_next_token_logprobs([[1, 2], [5]])).argmax(dim=1).tolist() == [2, 5]
    blocking: list[Callable[[], Any]] = [
        lambda: model.next_token_logprobs_sync([1]),
        lambda: model.batch_next_token_logprobs_sync([[1]]),
        model.clear_kv_cache,
    ]
    for call in blocking:
        with pytest.raises(sglrl.UsageError, match="await"):
            call()
        # From another thread the blocking calls work.
        await asyncio.to_thread(call)
    await client.pause()
    waiting = asyncio.ensure_future(model.next_token_logprobs([1, 400]))
    await asyncio.sleep(0)
    model.reset_async_queries()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    await client.resume()
    model.close()


# --- the vocabulary -------------------------------------------------------------------------------


def test_the_bytes_of_a_byte_level_tokenizer(model: AsyncSGLTransformer) -> None:
    ids = model.tokenizer.encode(ODD, add_special_tokens=False)
    assert b"".join(model.byte_vocab[i] for i in ids) == ODD.encode()
    assert len(model.byte_vocab) == len(model.str_vocab) == len(model.tokenizer)
    end = model.tokenizer.eos_token_id
    assert model.byte_vocab[end].byte_string == model.tokenizer.eos_token.encode()
    assert model.str_vocab[end] == model.tokenizer.eos_token
    assert [t.token_id for t in model.byte_vocab] == list(range(len(model.byte_vocab)))


def test_the_bytes_of_other_tokenizers(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    pieces = ["<unk>", "▁", "a", "▁a", "<0xE2>", "<0x0A>", "é", "</s>"]
    backend = Tokenizer(models.BPE({p: i for i, p in enumerate(pieces)}, []))
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>")
    found = token_bytes(tokenizer)
    assert found == [b"<unk>", b" ", b"a", b" a", b"\xe2", b"\n", "é".encode(), b"</s>"]
    assert token_strings(tokenizer, found) == ["<unk>", " ", "a", " a", "<0xE2>", "\n", "é", "</s>"]
    characters = make_character_tokenizer(tmp_path, "ab▁")
    assert token_bytes(characters)[-3:] == [b"a", b"b", "▁".encode()]
    backend.decoder = decoders.WordPiece()
    with pytest.raises(ValueError, match="WordPiece"):
        token_bytes(PreTrainedTokenizerFast(tokenizer_object=backend))


def test_tokens_are_equal_by_id() -> None:
    one, same, other = Token(1, b"a"), Token(1, b"b"), Token(2, b"a")
    assert one == same
    assert one != other
    assert one < other
    assert len({one, same, other}) == 2
    assert one == b"a"
    assert same != b"a"
    assert b"".join([one, same]) == b"ab"
    import copy
    import pickle

    for again in (copy.deepcopy(one), pickle.loads(pickle.dumps(one))):
        assert again == one
        assert bytes(again) == b"a"


def test_it_is_an_asynclm_where_there_is_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The test does not depend on an installed genlm-backend."""

    class AsyncLM(ABC):
        @abstractmethod
        async def next_token_logprobs(self, token_ids: Any) -> Any: ...

        def add_new_lora(self) -> str:
            return "theirs"

    class TheirToken(bytes):
        pass

    asked: list[Any] = []
    contents: dict[str, dict[str, Any]] = {
        "genlm": {},
        "genlm.backend": {},
        "genlm.backend.llm": {"load_model_by_name": lambda *a, **k: asked.append((a, k))},
        "genlm.backend.llm.base": {"AsyncLM": AsyncLM},
        "genlm.backend.tokenization": {},
        "genlm.backend.tokenization.token": {"Token": TheirToken},
    }
    for name, values in contents.items():
        module = types.ModuleType(name)
        vars(module).update(values)
        module.__path__ = []
        monkeypatch.setitem(sys.modules, name, module)
    # Import the package again. The test's end brings back the modules of the first import.
    monkeypatch.setattr("sglrl.integrations.genlm", genlm)
    for name in [name for name in sys.modules if name.startswith(genlm.__name__)]:
        monkeypatch.delitem(sys.modules, name)
    again = importlib.import_module(genlm.__name__)
    assert issubclass(again.AsyncSGLTransformer, AsyncLM)
    assert again.Token is TheirToken
    assert again.AsyncSGLTransformer.add_new_lora(None) == "theirs"
    assert not again.AsyncSGLTransformer.__abstractmethods__
    again.load_model_by_name("a/model", "hf", {"batch_size": 2})
    assert asked == [(("a/model",), {"backend": "hf", "llm_opts": {"batch_size": 2}})]


def test_by_name(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = {"engine": "fake", "vocab_size": 512}
    with monkeypatch.context() as patch:
        patch.setattr("sglrl.integrations.genlm.model.blocking", None)
        with pytest.raises(TypeError, match="'foo'"):
            # The error is raised before any worker is started.
            AsyncSGLTransformer.from_name(str(tiny), options, foo=1)
    for name, ours in (
        ("gpu_memory_utilization", "mem_fraction_static="),
        ("num_devices", "tp_size="),
        ("enable_prefix_caching", "disable_radix_cache="),
        ("max_num_seqs", "max_running_requests="),
        ("max_num_batched_tokens", "chunked_prefill_size="),
        ("enforce_eager", "disable_cuda_graph="),
    ):
        with pytest.raises(ValueError, match=ours):
            AsyncSGLTransformer.from_name(str(tiny), {name: 1})
    with genlm.load_model_by_name(str(tiny), llm_opts={"engine_opts": options}) as model:
        assert int(model.next_token_logprobs_sync(np.array([5, 6])).argmax()) == 6
    model.close()


def test_a_program_that_never_closes_its_model_exits(tiny: Path) -> None:
    """uvloop ran timers after the interpreter was finalized, which is a SIGSEGV (status 11)."""
    done = subprocess.run(
        [sys.executable, "-m", f"{__package__}.exits_program", str(tiny), "5"],
        cwd=Path(__file__).parents[1],
        capture_output=True,
        text=True,
        check=False,
        timeout=280,
    )
    assert done.stdout.split() == ["0"] * 5, done.stderr
    assert done.returncode == 0


def test_what_the_document_shows(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    document = README.parent / "docs" / "genlm.md"
    assert document.read_text().count("```python") == 1
    code = example("from_name", document)
    model = '"Qwen/Qwen3-0.6B"'
    assert code.count(model) == 1
    names: dict[str, Any] = {}
    exec(compile(code.replace(model, repr(str(tiny))), str(document), "exec"), names)
    first, second, report, *again = capsys.readouterr().out.splitlines()
    assert report.startswith("weights v1: ")
    # The weights were the same, so the answers are equal.
    assert again == [first, second]
    with pytest.raises(sglrl.Closed):
        names["llm"].next_token_logprobs_sync([1])
