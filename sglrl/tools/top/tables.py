"""A snapshot of a pool as tables of text. Each table fits 80 columns with its first columns."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import PurePath
from typing import NamedTuple

from ...control.snapshot import RolloutSnapshot, Snapshot, WorkerSnapshot
from ...core.rollout_metrics import Distribution
from ...driver.worker_info import describe
from ...weights.update_report import UpdateReport


class Table(NamedTuple):
    """A table of text.

    Attributes:
        columns: the names of the columns, the most important ones first. Without rows, one column
            whose name says what is missing.
        rows: the cells of each row. A row may have an empty first cell.
        keys: a key for each row, which stays the same from snapshot to snapshot.
    """

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    keys: Sequence[str]


def tables_of(snapshot: Snapshot) -> dict[str, Table]:
    """Return the tables of a snapshot by title."""
    tables = {
        "Workers": (_workers(snapshot), "no worker is left"),
        "Weights": (_weights(snapshot), "no weights were updated yet"),
        "Rollouts": (_rollouts(snapshot), "no rollout runs in the program of the pool"),
        "Gateway": (_gateways(snapshot), "no gateway runs in the program of the pool"),
        "Hosts": (_hosts(snapshot), "all workers run on the machine of the pool"),
    }
    return {
        title: table if table.rows else Table((missing,), (), ())
        for title, (table, missing) in tables.items()
    }


def fitting(table: Table, width: int) -> Table:
    """Return the first columns of a table that fit a width in characters, but at least two."""
    cells = [table.columns, *table.rows]
    count = used = 0
    while count < len(table.columns):
        used += max(len(row[count]) for row in cells) + 2
        if used > width + 1 and count >= 2:
            break
        count += 1
    return Table(table.columns[:count], [row[:count] for row in table.rows], table.keys)


def headline(snapshot: Snapshot) -> str:
    """Return the state of the pool in at most two lines."""
    queue = snapshot.queue
    line = (
        f"{PurePath(snapshot.model).name or snapshot.model} · pid {snapshot.pid} on "
        f"{snapshot.host} · up {_seconds(snapshot.seconds)} · "
        f"weights v{snapshot.weight_version} · {describe(w.info for w in snapshot.workers)} · "
        f"{_tokens_per_second(snapshot)} tokens/s · {queue.calls} calls queued"
    )
    return f"{line}\nheld: {snapshot.held}" if snapshot.held else line


def _workers(snapshot: Snapshot) -> Table:
    columns = (
        *("id", "state", "ver", "run", "queue", "tok/s", "kv", "hits", "age", "beat", "rst"),
        *("moved", "preempt", "pid", "device", "host"),
    )
    workers = [one for one in snapshot.workers if one.info.state != "retired"]
    rows = [_worker(one, snapshot.host) for one in workers]
    return Table(columns, rows, [str(one.info.id) for one in workers])


def _worker(one: WorkerSnapshot, here: str) -> list[str]:
    info, history, engine = one.info, one.history, one.engine
    return [
        str(info.id),
        info.state,
        str(info.weight_version),
        *(
            [
                str(engine.running),
                str(engine.waiting),
                f"{engine.tokens_per_second:,.0f}",
                f"{engine.kv_usage:.0%}",
                f"{engine.cache_hit_rate:.0%}",
            ]
            if engine is not None
            else [str(info.load), "", "", "", ""]
        ),
        _seconds(history.seconds),
        "" if history.silence is None else f"{history.silence:.1f}",
        str(history.restarts),
        str(history.moved_calls),
        str(history.preempted),
        str(info.pid),
        info.device,
        info.host or here,
    ]


def _weights(snapshot: Snapshot) -> Table:
    columns = (
        *("ver", "ago", "size", "total ms", "GB/s", "pause ms", "slowest", "mode", "stage ms"),
        *("commit ms", "prepare ms", "join ms", "attempts", "workers"),
    )
    latest = snapshot.updates[::-1]
    rows = [_update(report, snapshot.time) for report in latest]
    return Table(columns, rows, [f"{one.lora}/{one.version}/{one.ended}" for one in latest])


def _update(report: UpdateReport, now: float) -> list[str]:
    pause = max(report.pause_ms, default=0.0)
    slowest = report.workers[report.pause_ms.index(pause)] if report.pause_ms else ""
    return [
        f"{report.lora} {report.version}".strip(),
        _seconds(max(0.0, now - report.ended)),
        _bytes(report.bytes),
        f"{report.total_ms:.1f}",
        f"{report.gb_per_s:.2f}",
        f"{pause:.1f}",
        f"worker {slowest}",
        report.mode,
        f"{report.stage_ms:.1f}",
        f"{report.commit_ms:.1f}",
        f"{report.prepare_ms:.1f}",
        f"{report.join_ms:.0f}",
        str(report.attempts),
        str(len(report.workers)),
    ]


def _rollouts(snapshot: Snapshot) -> Table:
    """A column for each rollout, because a rollout has many values."""
    runs = [_rollout(one) for one in snapshot.rollouts]
    names = list(dict.fromkeys(name for run in runs for name in run))
    columns = ("", *(f"rollout {number}" for number in range(len(runs))))
    rows = [[name, *(run.get(name, "") for run in runs)] for name in names]
    return Table(columns, rows, names)


def _rollout(one: RolloutSnapshot) -> dict[str, str]:
    metrics = one.metrics
    total = "" if one.items is None else f" of {one.items:,}"
    lost = ", ".join(f"{count} {reason}" for reason, count in metrics.samples_lost.items())
    staleness = ", ".join(f"{age}: {count}" for age, count in one.staleness.items())
    values = {
        "groups taken": f"{metrics.groups_taken:,}{total}",
        "groups now": f"{metrics.groups_running} running, {metrics.groups_ready} ready",
        "groups lost": f"{metrics.groups_dropped} dropped, {metrics.groups_filtered} filtered out",
        "samples running": f"{metrics.samples_running} of at most {metrics.concurrency}",
        "samples done": f"{metrics.samples_done:,}, and {metrics.samples_retried} run again",
        "samples lost": lost or "0",
        "groups by staleness": staleness or "none yet",
        "reward": f"{_number(metrics.mean_reward)} ± {_number(metrics.reward_std)}",
        "reward within groups": f"± {_number(metrics.group_reward_std)}",
        "tokens/s": f"{metrics.tokens_per_second:,.0f}",
        "turns": f"{metrics.turns:,}",
        "response tokens": _distribution(metrics.response_tokens, ""),
        "truncated": "" if math.isnan(metrics.truncated) else f"{metrics.truncated:.0%}",
        "seconds in the engine": _distribution(metrics.turn_seconds, " s"),
        "seconds elsewhere": _distribution(metrics.tool_seconds, " s"),
    }
    values |= {f"reward {name}": _number(value) for name, value in metrics.named_rewards.items()}
    values |= {f"error {number}": text for number, text in enumerate(one.errors, 1)}
    return values


def _gateways(snapshot: Snapshot) -> Table:
    rows, keys = [], []
    for gateway in snapshot.gateways:
        rows.append(
            [gateway.url, str(gateway.running), "", _count(len(gateway.sessions), "session")]
        )
        keys.append(gateway.url)
        for one in sorted(gateway.sessions, key=lambda one: (-one.running, one.idle)):
            idle = "" if one.running else _seconds(one.idle)
            rows.append([f"  {one.id}", str(one.running), str(one.turns), idle])
            keys.append(f"{gateway.url}/{one.id}")
    return Table(("gateway, session", "running", "turns", "idle"), rows, keys)


def _hosts(snapshot: Snapshot) -> Table:
    columns = ("name", "state", "gpus", "cores", "python", "limits")
    rows = [
        [one.name, one.state, str(len(one.gpus)), str(one.cores), one.python, "; ".join(one.limits)]
        for one in snapshot.hosts
    ]
    return Table(columns, rows, [one.name for one in snapshot.hosts])


def _tokens_per_second(snapshot: Snapshot) -> str:
    rates = [one.engine.tokens_per_second for one in snapshot.workers if one.engine is not None]
    return f"{sum(rates):,.0f}"


def _distribution(values: Distribution, unit: str) -> str:
    if math.isnan(values.mean):
        return ""
    return f"mean {_number(values.mean)}{unit}, p90 {_number(values.p90)}{unit}"


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def _number(value: float) -> str:
    return "" if math.isnan(value) else f"{value:.3g}"


def _seconds(value: float) -> str:
    """Return a duration in at most four characters, up to 99 days."""
    for size, unit in ((86_400, "d"), (3_600, "h"), (60, "m")):
        if value >= size * 2:
            return f"{value / size:.0f}{unit}"
    return f"{value:.0f}s"


def _bytes(value: int) -> str:
    for size, unit in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if value >= size:
            return f"{value / size:.3g} {unit}"
    return f"{value} B"
