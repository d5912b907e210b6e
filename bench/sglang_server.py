"""SGLang's own HTTP server, run as by ``python -m sglang.launch_server``.

Writes one byte to a pipe when it is ready, so that its client need not poll.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any


def main() -> None:
    arguments, descriptor = json.loads(sys.argv[1]), int(sys.argv[2])
    os.set_inheritable(descriptor, False)
    from sglang.srt.entrypoints.http_server import launch_server
    from sglang.srt.server_args import ServerArgs
    from sglang.srt.utils import kill_process_tree

    from . import sglang_cpu

    options: dict[str, Any] = {}
    if arguments["device"] == "cpu":
        options["run_scheduler_process_func"] = sglang_cpu.run_scheduler_process
    try:
        launch_server(
            ServerArgs(**arguments),
            launch_callback=lambda: os.write(descriptor, b"\n"),
            **options,
        )
    finally:
        kill_process_tree(os.getpid(), include_parent=False)


if __name__ == "__main__":
    main()
