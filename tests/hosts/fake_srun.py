"""``srun`` for tests: each task runs in a network namespace, as if on another machine.

The environment variable NAMESPACES names them. The input goes to every task, as with Slurm. SIGTERM
ends the tasks. The options are those of ``sglrl.hosts.slurm_nodes.command``; others are an error.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
from functools import partial

from pyroute2 import netns


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--nodes", type=int, required=True)
    parser.add_argument("--ntasks", type=int, required=True)
    parser.add_argument("--ntasks-per-node", type=int, required=True, choices=[1])
    parser.add_argument("--overlap", action="store_true", required=True)
    parser.add_argument("--mem", required=True, choices=["0"])
    parser.add_argument("--cpu-bind", required=True, choices=["none"])
    parser.add_argument("--kill-on-bad-exit", required=True, choices=["0"])
    parser.add_argument("--wait", required=True, choices=["0"])
    parser.add_argument("--label", action="store_true")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    options = parser.parse_args()
    namespaces = os.environ["NAMESPACES"].split(",")
    assert options.nodes == options.ntasks == len(namespaces)
    given = sys.stdin.buffer.read()
    tasks = []
    for namespace in namespaces:
        task = subprocess.Popen(
            options.command,
            stdin=subprocess.PIPE,
            preexec_fn=partial(netns.setns, namespace, flags=0),
        )
        assert task.stdin is not None
        task.stdin.write(given)
        task.stdin.close()
        tasks.append(task)

    def end(number: int, frame: object) -> None:
        for task in tasks:
            task.send_signal(number)

    signal.signal(signal.SIGTERM, end)
    sys.exit(max(task.wait() for task in tasks))


main()
