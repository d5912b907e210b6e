"""The command ``sglrl serve``, which starts engines and a gateway for them."""

from __future__ import annotations

import asyncio
import os
import signal
from typing import Annotated

import typer
from rich.console import Console

from ..config import check_gateway_packages
from .display import quiet_transformers
from .options import Device, Engine, Model, Replicas, Set, TpSize, launch_arguments


def serve(
    model: Model,
    replicas: Replicas = 1,
    device: Device = "auto",
    tp_size: TpSize = 1,
    engine: Engine = "sglang",
    settings: Set = None,
    host: Annotated[str, typer.Option(help="Address to listen at.")] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(min=0, max=65_535, help="Port to listen at; 0: any free one.")
    ] = 8000,
    name: Annotated[
        list[str] | None,
        typer.Option(
            help="Name of the model for clients; may be repeated.",
            show_default="MODEL, or the last part of its path if it is a folder",
        ),
    ] = None,
    api_key: Annotated[
        str,
        typer.Option(
            envvar="SGLRL_API_KEY",
            show_default="any",
            help="Clients must send it. It is required at addresses that other machines can reach.",
        ),
    ] = "",
    tls_cert: Annotated[
        str,
        typer.Option(
            metavar="FILE", show_default="http", help="File of a certificate, PEM, for https."
        ),
    ] = "",
    tls_key: Annotated[
        str,
        typer.Option(
            metavar="FILE", show_default="http", help="File of the certificate's key, PEM."
        ),
    ] = "",
    keep: Annotated[
        bool, typer.Option(help="Sample the turns of clients that disconnect to their end.")
    ] = True,
    expire_after: Annotated[
        float, typer.Option(min=1.0, help="Seconds without a request until a session ends.")
    ] = 3600.0,
    processes: Annotated[
        int, typer.Option(min=1, help="Processes that answer requests and share the port.")
    ] = 1,
    unsupported_tools: Annotated[
        str,
        typer.Option(help="Tools that the model cannot be shown: reject, or omit."),
    ] = "reject",
    later_system: Annotated[
        str,
        typer.Option(help="System messages after the first message: keep, user or merge."),
    ] = "keep",
) -> None:
    """Serve a model to clients of OpenAI's, Anthropic's, SGLang's and vLLM's APIs, until SIGTERM.

    POST /sessions opens a session, whose calls become one trajectory.
    """
    import uvloop

    from ..gateway.serve import serve as gateway_of
    from ..launching.launch import launch
    from ..transport.http_listeners import reserved

    check_gateway_packages()
    more = launch_arguments(settings)
    quiet_transformers()
    console = Console(stderr=True)

    async def run() -> int:
        loop = asyncio.get_running_loop()
        stopped: asyncio.Future[int] = loop.create_future()

        def stop(number: int) -> None:
            if not stopped.done():
                stopped.set_result(number)

        # The engines take long to start, so an unusable port is reported first.
        reserved(host, port).close()
        client = launch(
            model, replicas=replicas, device=device, tp_size=tp_size, engine=engine, **more
        )
        gateway = gateway_of(
            client,
            host=host,
            port=port,
            name=tuple(name or [_name_of(model)]),
            api_key=api_key,
            tls_cert=tls_cert,
            tls_key=tls_key,
            keep_disconnected=keep,
            expire_after=expire_after,
            processes=processes,
            unsupported_tools=unsupported_tools,
            later_system=later_system,
        )
        async with client, gateway:
            for number in (signal.SIGINT, signal.SIGTERM):
                loop.add_signal_handler(number, stop, number)
            console.print(f"serving {model} at {gateway.url}/v1", highlight=False)
            received = await stopped
            console.print("ending", highlight=False)
        return received

    if uvloop.run(run()) == signal.SIGINT:
        raise KeyboardInterrupt


def _name_of(model: str) -> str:
    return os.path.basename(os.path.abspath(model)) if os.path.isdir(model) else model
