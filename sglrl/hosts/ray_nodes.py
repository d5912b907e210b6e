"""Start nodes as actors of Ray, one on each machine of the cluster.

A placement group of strategy STRICT_SPREAD reserves all GPUs and one CPU of each machine. When a
machine is lost, Ray starts its actor again on another machine that has room.
"""

from __future__ import annotations

import asyncio
import importlib.util
import os
import socket
from collections.abc import Callable
from typing import Any, Final

import msgspec

from ..config import HEARTBEAT_TIMEOUT
from ..driver.environment import environment
from ..errors import SglrlError, UsageError
from ..wire.processes import ClientKeys
from .node import Node, NodeSettings

_ORPHAN_TIMEOUT: Final = 30.0


class RayNodes:
    """Starts a node on each machine of the cluster (``hosts.started.NodeStarter``)."""

    name = "Ray"

    def check(self) -> None:
        if importlib.util.find_spec("ray") is None:
            raise UsageError("hosts='ray' needs Ray: pip install 'sglrl[ray]'")

    def own_host(self) -> str:
        import ray

        ip: str = ray.util.get_node_ip_address()
        return ip

    async def run(self, address: str, keys: ClientKeys, expect: Callable[[int], None]) -> str:
        import ray
        from ray.util.placement_group import placement_group, remove_placement_group
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        if not ray.is_initialized():
            try:
                # This runs on the thread of the event loop, because Ray sets signal handlers.
                ray.init(address="auto", log_to_driver=False)
            except ConnectionError:
                raise SglrlError(
                    "no Ray cluster runs here; start one with 'ray start --head', or call "
                    "ray.init() first"
                ) from None
        bundles = _bundles()
        group = placement_group(bundles, strategy="STRICT_SPREAD")
        actors: list[Any] = []
        try:
            await group.ready()
            expect(len(bundles))
            for at, bundle in enumerate(bundles):
                strategy = PlacementGroupSchedulingStrategy(group, at)
                options = {
                    "num_cpus": bundle["CPU"],
                    "num_gpus": bundle.get("GPU", 0),
                    "scheduling_strategy": strategy,
                    "max_restarts": -1,
                    "max_task_retries": -1,
                }
                actors.append(ray.remote(_RayNode).options(**options).remote())
            body = msgspec.json.encode(keys)
            runs = [asyncio.wrap_future(a.run.remote(address, body).future()) for a in actors]
            for run in runs:
                # Read each exception, or asyncio logs the end of each actor that is killed below.
                run.add_done_callback(lambda run: run.cancelled() or run.exception())
            done, _ = await asyncio.wait(runs, return_when=asyncio.FIRST_COMPLETED)
            return f"a node ended: {done.pop().exception()}"
        finally:
            for actor in actors:
                ray.kill(actor)
            remove_placement_group(group)


def _bundles() -> list[dict[str, float]]:
    """Return the resources to reserve on each machine."""
    import ray

    bundles: list[dict[str, float]] = []
    for node in ray.nodes():
        if node["Alive"]:
            gpus = node["Resources"].get("GPU", 0)
            bundles.append({"CPU": 1, "GPU": gpus} if gpus else {"CPU": 1})
    return bundles


class _RayNode:
    """The actor of Ray that runs a node."""

    async def run(self, address: str, keys: bytes) -> None:
        """Serve the driver until the actor is killed."""
        import ray

        # Ray sets this variable to the GPUs that it has reserved for the actor.
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
        gpus = visible.split(",") if ray.get_gpu_ids() else []
        settings = NodeSettings(
            address=address,
            keys=msgspec.json.decode(keys, type=ClientKeys),
            name=socket.gethostname(),
            gpus=tuple(gpus),
            cores=len(os.sched_getaffinity(0)),
            orphan_timeout=_ORPHAN_TIMEOUT,
            heartbeat_timeout=HEARTBEAT_TIMEOUT,
        )
        await Node(settings, environment()).run()
