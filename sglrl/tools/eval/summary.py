"""Show the summary of an evaluation on a terminal or in a log."""

from __future__ import annotations

from rich.table import Table

from ...rollouts.evaluation import Summary


def table_of(summary: Summary) -> Table:
    """Return the summary as a table for a terminal or a log."""
    s = summary
    table = Table(title="sglrl eval", title_justify="left", show_header=False, min_width=40)
    table.add_column("what", style="bold")
    table.add_column("value")
    table.add_row("items", f"{s.items:,}")
    table.add_row("samples", f"{s.samples:,}")
    if s.mean_score is not None:
        table.add_row("mean score", f"{s.mean_score:.4f}")
    for k, share in s.pass_at_k.items():
        table.add_row(f"pass@{k}", f"{share:.2%}")
    table.add_row("truncated", f"{s.truncated:.1%}")
    table.add_row("tokens", f"{s.tokens:,}")
    if s.tokens_per_second is not None:
        table.add_row("tokens/s", f"{s.tokens_per_second:,.0f}, in {s.seconds:.1f} s")
    return table
