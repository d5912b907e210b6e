"""The weight sync scheme: TorchRL's names, and updates that reach the engine."""

from __future__ import annotations

import copy
import gc
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict
from torchrl.weight_update.weight_sync_schemes import WeightSyncScheme

import sglrl
from sglrl.integrations.torchrl import (
    AsyncSGLang,
    SGLangCollectiveTransport,
    SGLangWeightReceiver,
    SGLangWeightSender,
    SGLangWeightSyncScheme,
    get_sglang_model_metadata,
)
from sglrl.integrations.torchrl.environment import pause_mode
from sglrl.integrations.torchrl.folder_transport import FolderTransport

URL = "tcp://127.0.0.1:1#token"


@pytest.fixture(scope="module")
def learner(tiny: Path) -> Iterator[AsyncSGLang]:
    """Launch a service whose weights tests may change."""
    service = AsyncSGLang.from_pretrained(str(tiny), device="cpu")
    yield service
    service.shutdown()


@pytest.fixture
def model(hf_model: Any) -> Any:
    return copy.deepcopy(hf_model)


def train(model: torch.nn.Module, seed: int) -> None:
    """Change the model's weights randomly."""
    random = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter *= 0.9 + 0.2 * torch.rand(parameter.shape, generator=random)


def agree(service: AsyncSGLang, model: Any) -> None:
    """Check that the engine has the model's weights and computes the same log-probs."""
    assert service.client.verify_weights(model) == []
    ids = [3, 1, 4, 1, 5, 9, 2, 6]
    with torch.no_grad():
        logits = model(torch.tensor([ids])).logits[0, :-1].float()
    expected = torch.log_softmax(logits, -1)[range(len(ids) - 1), ids[1:]]
    found = service.client.score(ids, start=1)
    np.testing.assert_allclose(found, expected.numpy(), atol=1e-3)


class Collector:
    version = 0

    def increment_version(self) -> None:
        self.version += 1


class Broken:
    def increment_version(self) -> None:
        raise RuntimeError("gone")


# --- TorchRL's own tests --------------------------------------------------------------------------


def test_the_scheme_and_what_it_makes() -> None:
    scheme = SGLangWeightSyncScheme(
        server_url="http://localhost:30000",
        master_address="localhost",
        master_port=29500,
        num_gpus=1,
        strategy="tensordict",
        device=0,
    )
    assert isinstance(scheme, WeightSyncScheme)
    assert scheme.server_url == "http://localhost:30000"
    assert (scheme.master_address, scheme.master_port) == ("localhost", 29500)
    assert scheme.num_gpus == 1
    assert scheme.strategy_name == "tensordict"
    assert scheme.world_size == 2
    assert scheme.flush_cache_on_update is None
    assert isinstance(SGLangWeightSyncScheme(URL).create_sender(), SGLangWeightSender)
    assert isinstance(scheme.create_transport(), SGLangCollectiveTransport)
    assert scheme.create_receiver() is None
    assert 0 < SGLangWeightSyncScheme(URL, num_gpus=2).master_port <= 55535


def test_wrong_arguments() -> None:
    with pytest.raises(ValueError, match="pause_mode='abort'"):
        SGLangWeightSyncScheme(URL, flush_cache_on_update=True, pause_mode="retract")
    SGLangWeightSyncScheme(URL, flush_cache_on_update=True, pause_mode="abort")
    with pytest.raises(ValueError, match="pause_mode must be"):
        SGLangWeightSyncScheme(URL, pause_mode="later")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="strategy must be"):
        SGLangWeightSyncScheme(URL, strategy="luck")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="server_url"):
        SGLangWeightSyncScheme()
    for nonsense in ("http://localhost:1", "http://localhost:1#token", "tcp://127.0.0.1:1", ""):
        with pytest.raises(ValueError, match="address"):
            SGLangWeightSyncScheme(nonsense).create_sender()
    for nothing in (7, object(), torch.nn.Linear(1, 1)):
        with pytest.raises(TypeError, match="server_url must be the address of a pool"):
            SGLangWeightSyncScheme(nothing).create_sender()


def test_calls_out_of_order(model: Any) -> None:
    scheme = SGLangWeightSyncScheme(URL)
    sender = scheme.create_sender()
    sender.register_model(model)
    assert sender._model_ref is not None
    assert sender._model_ref() is model
    sender = scheme.create_sender()
    with pytest.raises(RuntimeError, match="No model registered"):
        sender.update_weights()
    gone = torch.nn.Linear(1, 1)
    sender.register_model(gone)
    del gone
    gc.collect()
    with pytest.raises(RuntimeError, match=r"no longer valid.* Keep one of your own"):
        sender.update_weights()
    sender.shutdown()
    with pytest.raises(RuntimeError, match=r"Transport not initialized: .* is shut down"):
        sender.update_weights()
    transport = scheme.create_transport()
    assert transport.check_connection() is False
    with pytest.raises(RuntimeError, match="Communication group not initialized"):
        transport.send_weights("model", {"param": torch.zeros(10)})


@pytest.mark.parametrize(
    ("device", "expected"),
    [
        (None, 0),
        (2, 2),
        ("cuda", 0),
        ("cuda:1", 1),
        (torch.device("cuda:2"), 2),
        ("cpu", "cpu"),
    ],
)
def test_a_transport_of_its_own(device: Any, expected: Any) -> None:
    transport = SGLangCollectiveTransport(
        server_url="http://localhost:30000/",
        master_address="localhost",
        master_port=29500,
        rank=0,
        world_size=2,
        device=device,
    )
    assert transport.server_url == "http://localhost:30000"
    assert (transport.master_address, transport.master_port) == ("localhost", 29500)
    assert (transport.rank, transport.world_size) == (0, 2)
    assert transport.device == expected
    assert transport.check_connection() is False


def test_wrong_transports() -> None:
    with pytest.raises(ValueError, match="pause_mode='abort'"):
        SGLangCollectiveTransport(URL, flush_cache_on_update=True, pause_mode="retract")
    with pytest.raises(RuntimeError, match="Only rank 0"):
        SGLangCollectiveTransport(URL, "localhost", 29500, 1, 2).init_all_workers_group({})


def test_torchrls_variables(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    SGLangWeightSyncScheme(URL)
    monkeypatch.setenv("TORCHRL_SGLANG_PAUSE_GENERATION_MODE", "in_place")
    SGLangWeightSyncScheme(URL)
    AsyncSGLang()
    assert caplog.messages == []
    assert pause_mode() == "in_place"
    for name, reason in (
        ("GENERATE_RETRIES", "continue on another replica"),
        ("GENERATE_RETRY_DELAY", "continue on another replica"),
        ("WEIGHT_SYNC_FLUSH_CACHE", "needs no flush"),
        ("LUCK", "does not know this variable"),
    ):
        with monkeypatch.context() as patch:
            patch.setenv(f"TORCHRL_SGLANG_{name}", "1")
            for make in (AsyncSGLang, lambda: SGLangWeightSyncScheme(URL)):
                make()
                (message,) = caplog.messages
                assert message.startswith(f"TORCHRL_SGLANG_{name} has no effect")
                assert reason in message
                caplog.clear()
    monkeypatch.setenv("TORCHRL_SGLANG_PAUSE_GENERATION_MODE", "later")
    with pytest.raises(ValueError, match=r"TORCHRL_SGLANG_PAUSE_GENERATION_MODE .* got 'later'"):
        pause_mode()


# --- weights that reach the engine ----------------------------------------------------------------


@pytest.mark.parametrize("strategy", ["tensordict", "state_dict"])
@pytest.mark.parametrize("where", ["address", "service"])
@pytest.mark.parametrize("ahead", [True, False], ids=["group-ahead", "group-with-first"])
def test_a_models_weights_arrive(
    learner: AsyncSGLang, model: Any, strategy: Any, where: str, ahead: bool
) -> None:
    """Send from this process over the pool's own channel, or by address like another process."""
    pool = learner.server_url if where == "address" else learner
    scheme = SGLangWeightSyncScheme(pool, strategy=strategy, timeout=300)
    sender = scheme.create_sender()
    sender.register_model(model)
    collector = Collector()
    sender.register_collector(Broken())
    sender.register_collector(collector)
    if ahead:
        sender.init_all_workers_group(get_sglang_model_metadata(model))
    for seed in (1, 2):
        train(model, seed)
        before = learner.client.weight_version
        report = sender.update_weights()
        assert report.version == learner.client.weight_version == before + 1
        agree(learner, model)
    assert collector.version == 2
    assert sender.flush_cache()
    sender.shutdown()
    with pytest.raises(RuntimeError, match="is shut down"):
        sender.update_weights()


def test_metadata_of_a_module_and_of_a_service(learner: AsyncSGLang, model: Any) -> None:
    taken = get_sglang_model_metadata(learner)
    assert taken == learner.get_model_metadata()
    saved = get_sglang_model_metadata(model)
    assert {name: saved[name] for name in taken} == taken


def test_weights_that_are_given(learner: AsyncSGLang, model: Any) -> None:
    """Weights come as a TensorDict, a nested dict, a part, and with TorchRL's module names."""
    sender = SGLangWeightSyncScheme(learner, pause_mode="in_place").create_sender()
    sender.init_all_workers_group()
    wrapped = torch.nn.ModuleDict({"module": torch.nn.ModuleList([model])})
    state = model.state_dict()
    forms = [
        lambda: TensorDict.from_module(model),
        lambda: TensorDict(state, []).unflatten_keys(".").to_dict(),
        lambda: dict(state),
        lambda: wrapped,
        lambda: TensorDict.from_module(wrapped),
    ]
    for seed, form in enumerate(forms, start=10):
        train(model, seed)
        sender.update_weights(form())
        assert learner.client.verify_weights(model) == []
    with torch.no_grad():
        model.model.norm.weight *= 2
    sender.update_weights({"model.norm.weight": model.model.norm.weight})
    agree(learner, model)
    version = learner.client.weight_version
    for wrong in (
        {"model.norm.weight": torch.zeros(3)},
        {"nothing.weight": torch.zeros(3)},
    ):
        with pytest.raises(sglrl.InvalidWeights):
            sender.update_weights(wrong)
    size = model.model.norm.weight.shape
    for name, dtype, shape, says in (
        ("model.norm.weight", torch.float32, torch.Size([3]), "shape"),
        ("model.norm.weight", torch.int64, size, "floating-point"),
        ("model.norm.wait", torch.float32, size, "unknown: model.norm.wait"),
        ("module.0.model.norm.wait", torch.float32, size, "unknown: module.0.model.norm.wait"),
    ):
        with pytest.raises(ValueError, match=says):
            sender.init_all_workers_group({name: (dtype, shape)})
    # Weights are cast to the engine's dtype. Buffers that no checkpoint holds are skipped.
    sender.init_all_workers_group(
        {
            "module.0.model.norm.weight": (torch.float64, size),
            "module.0.model.rotary_emb.inv_freq": (torch.float32, torch.Size([8])),
        }
    )
    assert learner.client.weight_version == version
    agree(learner, model)
    sender.shutdown()


def test_weights_that_are_not_finite(learner: AsyncSGLang, model: Any) -> None:
    name = "model.norm.weight"
    part = {name: model.model.norm.weight.detach().clone()}
    version = learner.client.weight_version
    good = part[name][3].item()
    part[name][3] = float("nan")
    sender = SGLangWeightSyncScheme(learner).create_sender()
    for refused in (sender.update_weights, learner.update_weights):
        with pytest.raises(sglrl.InvalidWeights, match=f"{name} holds NaN"):
            refused(part)
    assert learner.client.weight_version == version
    sender.shutdown()
    sender = SGLangWeightSyncScheme(learner, check_finite=False).create_sender()
    assert sender.update_weights(part).version == version + 1
    assert learner.client.verify_weights(part) == []
    part[name][3] = good
    sender.update_weights(part)
    sender.shutdown()


def test_the_services_own_update(learner: AsyncSGLang, model: Any) -> None:
    learner.init_weight_update_group()
    name = "model.norm.weight"
    shape = tuple(model.model.norm.weight.shape)
    for dtype in (torch.float32, "float32", "torch.bfloat16"):
        learner.update_weights_from_distributed(name, dtype, shape)
    for unknown in ("fp4", "nn", None):
        with pytest.raises(ValueError, match="dtype"):
            learner.update_weights_from_distributed(name, unknown, shape)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="int32 is not a tensor of this model"):
        learner.update_weights_from_distributed(name, "int32", shape)
    for wrong in ((name, torch.float32, (1, 2)), ("no", torch.float32, shape)):
        with pytest.raises(ValueError, match="not a tensor of this model"):
            learner.update_weights_from_distributed(*wrong)
    train(model, 30)
    learner.update_weights(iter(model.state_dict().items()))
    agree(learner, model)
    other = AsyncSGLang.connect(learner.server_url)
    with pytest.raises(RuntimeError, match="Weight update group not initialized"):
        other.update_weights_from_distributed(name, torch.float32, shape)
    other.init_weight_update_group()
    train(model, 31)
    other.update_weights(model.state_dict())
    agree(learner, model)
    other.shutdown()


@pytest.mark.parametrize("where", ["argument", "variable"])
def test_running_requests_are_treated_as_told(
    where: str, learner: AsyncSGLang, model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    if where == "variable":
        monkeypatch.setenv("TORCHRL_SGLANG_PAUSE_GENERATION_MODE", "abort")
        scheme = SGLangWeightSyncScheme(learner)
    else:
        scheme = SGLangWeightSyncScheme(learner, pause_mode="abort")
    sender = scheme.create_sender()
    sender.register_model(model)
    sender.init_all_workers_group()
    room = learner.client.info.max_total_tokens - 2
    running = learner.client.stream(input_ids=[5, 6], max_new_tokens=room, ignore_eos=True)
    next(running)
    sender.update_weights()
    *_, last = running
    assert last.finish_reason == "abort"
    sender.shutdown()


def test_memory_mapped_updates(learner: AsyncSGLang, model: Any, tmp_path: Path) -> None:
    folder = tmp_path / "weights"
    scheme = SGLangWeightSyncScheme(remote_addr=folder, num_threads=2)
    receiver = scheme.create_receiver(learner)
    assert isinstance(receiver, SGLangWeightReceiver)
    assert receiver.poll_and_apply() is False
    sender = scheme.create_sender()
    sender.register_model(model)
    for seed in (40, 41, 42):
        train(model, seed)
        sender.update_weights()
        assert receiver.poll_and_apply() is True
        assert receiver.poll_and_apply() is False
        assert learner.client.verify_weights(model) == []
    agree(learner, model)
    assert sorted(path.name for path in folder.iterdir()) == ["2", "3", "latest"]
    with pytest.raises(ValueError, match="out of place"):
        receiver.apply_weights({}, inplace=False)
    receiver.shutdown()
    sender.shutdown()


def test_a_receiver_that_comes_late_misses_no_part(
    learner: AsyncSGLang, model: Any, tmp_path: Path
) -> None:
    folder = tmp_path / "weights"
    scheme = SGLangWeightSyncScheme(remote_addr=folder)
    receiver = scheme.create_receiver(learner)
    assert receiver is not None
    sender = scheme.create_sender()
    sender.register_model(model)
    names = [name for name, _ in model.named_parameters()]

    def send(some: list[str]) -> None:
        sender.update_weights({n: p for n, p in model.named_parameters() if n in some})

    train(model, 50)
    sender.update_weights()
    # Several updates arrive between two polls. The second has tensors that the first has, too.
    for seed, some in ((51, names[:4]), (52, names[2:6]), (53, names[8:9])):
        before = {n: p.clone() for n, p in model.named_parameters()}
        train(model, seed)
        with torch.no_grad():
            for n, p in model.named_parameters():
                if n not in some:
                    p.copy_(before[n])
        send(some)
        assert (folder / "1").exists()
    assert receiver.poll_and_apply() is True
    assert receiver.poll_and_apply() is False
    agree(learner, model)
    # Applied tensors are not sent to the engine again.
    send(names[:1])
    received = receiver._folder.receive_weights()  # type: ignore[union-attr]
    assert list(received) == names[:1]
    # Tensors that could not be applied are received again.
    sender.update_weights({names[0]: torch.zeros(3)})
    for _ in range(2):
        with pytest.raises(ValueError, match="shape"):
            receiver.poll_and_apply()
    train(model, 54)
    sender.update_weights()
    assert receiver.poll_and_apply() is True
    agree(learner, model)
    # A receiver that starts now gets all tensors. Old folders are deleted.
    late = scheme.create_receiver(learner, "something of TorchRL's", kwarg=1)
    assert late is not None
    received = late._folder.receive_weights()  # type: ignore[union-attr]
    assert sorted(received) == sorted(names)
    sender.update_weights()
    number = late._folder.read + 1  # type: ignore[union-attr]
    assert sorted(path.name for path in folder.iterdir()) == [
        *sorted([str(number - 1), str(number)]),
        "latest",
    ]
    receiver.shutdown()
    late.shutdown()
    sender.shutdown()


def test_a_folder_that_is_begun_anew_is_read_from_its_beginning(tmp_path: Path) -> None:
    receiver = FolderTransport(tmp_path / "weights")
    trainer = FolderTransport(tmp_path / "weights")
    for value in (1.0, 2.0):
        trainer.send_weights("model", {"a.b": torch.full((2,), value)})
        assert receiver.receive_weights()["a.b"].tolist() == [value, value]
    shutil.rmtree(tmp_path / "weights")
    trainer.send_weights("model", {"a.b": torch.full((2,), 3.0)})
    assert receiver.receive_weights()["a.b"].tolist() == [3.0, 3.0]
    assert receiver.receive_weights() is None
