"""The entry point of a worker process: run the host for this kind of worker."""

from __future__ import annotations

from sglrl.wire.processes import ActorSpec, EngineSpec, WorkerSpec


def run(spec: WorkerSpec) -> None:
    """Serve until ``Shutdown``.

    An exception ends the process. Its traceback is the worker's last output, which the driver
    shows.
    """
    match spec.body:
        case ActorSpec():
            from .actor_worker import run_actor

            run_actor(spec, spec.body)
        case EngineSpec(engine="sglang"):
            from .engine.sglang.hub import explained
            from .engine.sglang.run import run_scheduler

            with explained(spec.body.model):
                run_scheduler(spec, spec.body)
        case EngineSpec(engine="fake"):
            from .engine.fake import FakeEngine
            from .engine.loop import run_engine

            run_engine(spec, spec.body, FakeEngine(spec.body))
        case EngineSpec(engine=other):
            raise ValueError(f"unknown engine {other!r}")
