"""The cases of ``bench.weights``: a model's shapes, and the load that decodes meanwhile."""

from __future__ import annotations

from typing import Any, NamedTuple

from .cases import Case, engine_arguments, model_folder


class WeightCase(NamedTuple):
    """A model, and the load that decodes while its weights are updated.

    Attributes:
        model: as in ``cases``.
        static: share of a GPU's memory for weights and KV cache. The rest has to hold a second
            copy of the weights.
        prompt: prompt tokens of each request.
        new: tokens that each request generates.
        in_flight: requests in flight at one worker.
        target_ms: milliseconds allowed for an update end to end, while decoding.
        paused_target_ms: milliseconds allowed with the engine paused.
    """

    name: str
    model: str
    device: str
    static: float
    prompt: int
    new: int
    in_flight: int
    updates: int
    target_ms: float | None = None
    paused_target_ms: float | None = None

    @property
    def engine_case(self) -> Case:
        dtype, vocab = ("float32", 512) if self.device == "cpu" else ("bfloat16", 151_936)
        return Case(
            self.name, self.model, self.device, dtype, vocab, self.prompt, self.new,
            self.in_flight, 0, 0,
        )  # fmt: skip

    @property
    def folder(self) -> str:
        return str(model_folder(self.engine_case))

    def arguments(self) -> dict[str, Any]:
        """Return SGLang's arguments for every system."""
        found = engine_arguments(self.engine_case, {})
        if self.device == "cuda":
            found["mem_fraction_static"] = self.static
        return found


CASES = {
    case.name: case
    for case in (
        WeightCase("tiny-cpu", "tiny", "cpu", 0.0, 32, 512, 16, 10),
        WeightCase("0.6b", "qwen3-0.6b", "cuda", 0.5, 128, 2048, 96, 10, 12),
        WeightCase("8b", "qwen3-8b", "cuda", 0.5, 128, 2048, 96, 10, 60, 50),
        WeightCase("32b", "qwen3-32b", "cuda", 0.5, 64, 256, 96, 5, 240),
    )
}
