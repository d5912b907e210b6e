"""The figures in the README are those of the files in ``bench/baselines``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
FIGURES = (
    ("{:.0f} us", "fabric-h100", "results/sglrl ipc/latency/p50_us"),
    ("HTTP {:.0f} us", "fabric-h100", "results/HTTP/latency/p50_us"),
    ("{:,.0f}", "fabric-h100", "results/sglrl ipc/rates/512/rate"),
    ("HTTP {:,.0f}", "fabric-h100", "results/HTTP/rates/512/rate"),
    ("{:,.0f} bytes", "fabric-h100", "asked/a waiting call/measured"),
    ("{:,.0f}", "engine-0.6b-h100", "cases/0.6b/systems/sglrl/tokens_per_s"),
    ("alone {:,.0f}", "engine-0.6b-h100", "cases/0.6b/systems/bare/tokens_per_s"),
    ("`sglang.Engine` {:,.0f}", "engine-0.6b-h100", "cases/0.6b/systems/engine/tokens_per_s"),
    ("HTTP server {:,.0f}", "engine-0.6b-h100", "cases/0.6b/systems/http/tokens_per_s"),
    ("{:,.0f}", "rollout-fake-h100", "asked/turns\\s of a driver core, all threads/measured"),
    (
        "{:.1%}",
        "rollout-fake-h100",
        "asked/engines busy, 1 of 4 agents 4 times slower/measured",
    ),
    (
        "{:.1f} ms",
        "weights-8b-2xh100",
        "cases/8b/systems/sglrl/modes/decoding/total_ms",
    ),
    ("{:.1f} ms", "weights-8b-2xh100", "cases/8b/systems/sglrl/modes/decoding/pause_ms"),
    ("{:.1f} ms", "weights-8b-2xh100", "cases/8b/systems/sglrl/modes/paused/pause_ms"),
)


def value(file: str, path: str) -> Any:
    """Return a value of a baseline. Entries of a list are found by their name."""
    found = json.loads((ROOT / "bench" / "baselines" / f"{file}.json").read_text())
    for part in path.split("/"):
        key = part.replace("\\", "/")
        if isinstance(found, list):
            (found,) = [entry for entry in found if entry["name"] == key]
        else:
            found = found[key]
    return found


@pytest.mark.parametrize(("form", "file", "path"), FIGURES, ids=[path for *_, path in FIGURES])
def test_a_figure_of_the_readme_was_measured(form: str, file: str, path: str) -> None:
    text = form.format(value(file, path)).replace("%", " %")
    table = (ROOT / "README.md").read_text().split("## Figures")[1]
    figures = [part.strip() for cell in table.split("|") for part in cell.split(", ")]
    assert any(figure == text or figure.endswith(f" {text}") for figure in figures), text
