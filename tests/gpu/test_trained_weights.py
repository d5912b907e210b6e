"""TorchRL's client of SGLang's server, unchanged, sends weights to a gateway with NCCL."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch
from torchrl.modules.llm.backends.sglang import AsyncSGLang  # type: ignore[import-not-found]
from torchrl.weight_update.llm import SGLangWeightSyncScheme  # type: ignore[import-not-found]
from torchrl.weight_update.llm.sglang_nccl import (  # type: ignore[import-not-found]
    get_model_metadata,
)

import sglrl

from .conftest import ARGUMENTS
from .test_nodes import needs_two, policies
from .test_weights import check

pytestmark = [pytest.mark.gpu, pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(300)]
OPTIONS: dict[str, Any] = {**ARGUMENTS, "cuda_graph_max_bs": 4}


@needs_two
async def test_torchrls_client(
    gpu_model: Path, other_gpu_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # TorchRL's client sets them too, and NCCL needs them to be equal in all ranks.
    for name in ("NCCL_P2P_DISABLE", "NCCL_SHM_DISABLE"):
        monkeypatch.setenv(name, "1")
    (new, _), (old, _) = policies(other_gpu_model, gpu_model)
    async with (
        sglrl.launch(gpu_model, device="cuda", gpus=[1], **OPTIONS) as client,
        sglrl.serve(client, name="policy", weight_device="cuda:1") as gateway,
    ):
        model = new.model.to("cuda:0")

        def train() -> Any:
            service = AsyncSGLang.connect(gateway.url)
            scheme = SGLangWeightSyncScheme(gateway.url, master_address="127.0.0.1", device=0)
            sender = scheme.create_sender()
            sender.register_model(model)
            sender.init_all_workers_group(get_model_metadata(model))
            for _ in range(3):
                sender.update_weights(dict(model.state_dict()))
            answer = service.generate(input_ids=[5, 6], sampling_params={"max_new_tokens": 4})
            sender.shutdown()
            return answer

        await check(client, old)
        running = asyncio.ensure_future(
            client.generate(input_ids=[5, 6], max_new_tokens=400, ignore_eos=True)
        )
        answer = await asyncio.to_thread(train)
        assert client.weight_version == 3
        assert answer["meta_info"]["weight_version"] == "3"
        versions = [span.version for span in (await running).versions]
        assert versions == sorted(versions)
        model.cpu()
        torch.cuda.empty_cache()
        await check(client, new)
