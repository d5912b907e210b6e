"""The client for synchronous callers, with the real engine."""

from __future__ import annotations

from pathlib import Path

import pytest
from engine.policies import PROMPTS, Policies

import sglrl


def test_the_blocking_client_has_it_all(models: Path) -> None:
    methods = {n for n in dir(sglrl.Client) if not n.startswith("_")}
    assert methods <= set(dir(sglrl.BlockingClient))
    policies = Policies(models / "policies")
    with sglrl.blocking(policies[0].folder, device="cpu", weight_device="cpu") as client:
        assert client.weight_version == 0
        client.connect_weights()
        assert client.weights_address
        metadata = client.model_metadata()
        assert set(metadata) == set(policies[1].model.state_dict())
        report = client.update_weights(policies[1].model)
        assert (report.version, report.workers) == (1, [0])
        assert report.join_ms == 0, "connect_weights has formed the group"
        assert client.verify_weights(policies[1].model) == []
        assert client.update_weights_from_disk(policies[2].folder).version == 2
        assert client.verify_weights(policies[2].model) == []
        assert client.verify_weights(policies[1].model) != []
        made = client.generate(input_ids=PROMPTS[0], max_new_tokens=4)
        assert [span.version for span in made.versions] == [2]
        with pytest.raises(sglrl.UsageError):
            client.update_weights(3)
