"""The command ``sglrl view``."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
import webbrowser
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer
from rich.console import Console

from ...errors import UsageError
from ..display import quiet_warnings
from ..pools import POOL_VARIABLE, KeysOption, connect_to

if TYPE_CHECKING:
    from ...client.client import Client
    from .store import Store

_STOP_SECONDS: Final = 2.0


def view(
    sources: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[FILE | POOL]...",
            help="Files that sglrl.rollouts.save wrote, folders of *.traj, and a running pool.",
            show_default="the pool that runs on this machine, or that in SGLRL_POOL",
        ),
    ] = None,
    keys: KeysOption = None,
    tokenizer: Annotated[
        str | None,
        typer.Option(
            metavar="MODEL",
            help="Model whose tokenizer decodes the tokens.",
            show_default="the pool's, else token ids",
        ),
    ] = None,
    read_only: Annotated[
        bool, typer.Option("--read-only", help="Do not allow forks, which use the engines.")
    ] = False,
    port: Annotated[
        int, typer.Option(min=0, max=65_535, help="Port on 127.0.0.1; 0: any free port.")
    ] = 8766,
    browser: Annotated[
        bool, typer.Option("--browser", help="Open the page in the default browser.")
    ] = False,
) -> None:
    """Show trajectories token by token in a web page, saved or while they are sampled.

    POOL is client.address, or the process id of a program of yours. With a pool, the page shows its
    running samples, and can continue from any token of any trajectory: a fork, which is no part of
    the run.

    \b
    Examples:
      sglrl view step_*.traj --tokenizer Qwen/Qwen3-0.6B
      sglrl view step_*.traj 1234
    """
    paths, pool = _split(sources or [])
    client = None
    if pool is not None or not paths:
        client = connect_to(pool or os.environ.get(POOL_VARIABLE), keys)
    elif keys is not None:
        raise UsageError("--keys needs a pool")
    import uvloop

    quiet_warnings()
    with contextlib.suppress(KeyboardInterrupt):
        uvloop.run(_serve(paths, client, tokenizer, read_only, port, browser))


def _split(sources: Sequence[str]) -> tuple[list[Path], str | None]:
    """Return the files, and the pool if one is given."""
    paths: list[Path] = []
    pools = []
    for source in sources:
        path = Path(source)
        if path.is_dir():
            found = sorted(path.glob("*.traj"))
            if not found:
                raise UsageError(f"the folder {path} has no files *.traj")
            paths += found
        elif path.exists():
            paths.append(path)
        elif path.suffix == ".traj":
            raise UsageError(f"there is no file {path}")
        else:
            pools.append(source)
    if len(pools) > 1:
        raise UsageError(f"give one pool; no files have the names {', '.join(pools)}")
    return paths, pools[0] if pools else None


async def _serve(
    paths: list[Path],
    client: Client | None,
    tokenizer: str | None,
    read_only: bool,
    port: int,
    browser: bool,
) -> None:
    import uvicorn

    from ...transport.http_listeners import reserved
    from .app import Viewer
    from .store import Store
    from .watching import Watching

    listener = reserved("127.0.0.1", port)
    async with contextlib.AsyncExitStack() as stack:
        watching = None
        store = Store()
        if client is not None:
            await stack.enter_async_context(client)
            watching = Watching(client, store)
        stack.callback(store.close)
        stack.callback(_loading(store, paths, _tokenizer(tokenizer, client)))
        viewer = Viewer(store, watching, read_only=read_only)
        config = uvicorn.Config(
            viewer.app, log_level="warning", access_log=False, timeout_graceful_shutdown=1
        )
        # A program that reads the address may connect at once.
        listener.listen()
        url = f"http://127.0.0.1:{listener.getsockname()[1]}/?key={viewer.secret}"
        console = Console()
        console.print(f"sglrl view: {url}  (Ctrl-C ends it)", soft_wrap=True, highlight=False)
        if browser:
            await asyncio.to_thread(webbrowser.open, url)
        await uvicorn.Server(config).serve([listener])


def _loading(store: Store, paths: Sequence[Path], tokenizer: Any) -> Callable[[], Any]:
    """Load the files and the tokenizer in a thread. Return a function that stops it."""
    stopped = threading.Event()
    store.loading = "files"
    arguments = paths, tokenizer, stopped.is_set
    thread = threading.Thread(target=store.load, args=arguments, daemon=True)
    thread.start()

    def stop() -> None:
        stopped.set()
        thread.join(_STOP_SECONDS)

    return stop


def _tokenizer(model: str | None, client: Client | None) -> Callable[[], Any] | None:
    """Return a function that loads the tokenizer, and returns the function that decodes ids."""
    if model is None and client is None:
        return None

    def load() -> Any:
        from ...inference.tokens import TokenizerBox
        from ...launching.local_models import local_model

        box = client.tokenizer_box if client is not None else None
        if model is not None or box is None:
            box = TokenizerBox(local_model(model or ""))
        box.decode([0], False)
        return box.decode

    return load
