"""The log of a recipe, and a plot of logs: ``python log.py runs/sums-0 runs/sums-1``."""

import argparse
import csv
import math
import time
from pathlib import Path

COLUMNS = (
    *("step", "seconds", "heldout", "reward", "staleness", "tokens_per_s", "update_ms"),
    *("loss", "norm", "kl", "clipped"),
)


class Log:
    """Writes numbers to ``log.csv`` and, if tensorboard is installed, for TensorBoard."""

    def __init__(self, folder):
        folder.mkdir(parents=True, exist_ok=True)
        self.begun, self.path = time.perf_counter(), folder / "log.csv"
        self.path.write_text(",".join(COLUMNS) + "\n", encoding="utf-8")
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            print("tensorboard is not installed, so only log.csv is written")
            self.board = None
        else:
            self.board = SummaryWriter(folder)

    def write(self, step, **values):
        values = {"step": step, "seconds": time.perf_counter() - self.begun, **values}
        shown = {name: value for name, value in values.items() if not math.isnan(value)}
        with self.path.open("a", encoding="utf-8", newline="") as file:
            row = {name: f"{value:.6g}" for name, value in shown.items()}
            csv.DictWriter(file, COLUMNS).writerow(row)
        print("  ".join(f"{name} {value:.4g}" for name, value in shown.items()), flush=True)
        if self.board is not None:
            for name, value in shown.items():
                self.board.add_scalar(name, value, step)
            self.board.flush()


def plot(folders, output, title):
    """Draw the score of each run over the steps, and over the seconds."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.2), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    for folder in folders:
        with (folder / "log.csv").open(encoding="utf-8", newline="") as file:
            rows = [row for row in csv.DictReader(file) if row["heldout"]]
        score = [float(row["heldout"]) for row in rows]
        begun = float(rows[0]["seconds"])
        left.plot([int(row["step"]) for row in rows], score, label=folder.name)
        right.plot([float(row["seconds"]) - begun for row in rows], score, label=folder.name)
    left.set(xlabel="step", ylabel="held-out score", ylim=(0, 1.02), title=title)
    right.set(xlabel="seconds since the first step")
    left.legend(loc="lower right")
    figure.savefig(output, dpi=120)
    print(f"the plot is in {output}")


def main():
    parser = argparse.ArgumentParser(description="Plot the held-out score of runs of one recipe.")
    parser.add_argument("folders", nargs="+", type=Path, help="the outputs of runs")
    parser.add_argument("--output", default="recipe.png", help="the picture (default: recipe.png)")
    parser.add_argument("--title", default="", help="the title of the picture")
    chosen = parser.parse_args()
    plot(chosen.folders, chosen.output, chosen.title)


if __name__ == "__main__":
    main()
