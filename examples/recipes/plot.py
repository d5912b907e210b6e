"""Plot the held-out score of runs of one recipe: ``python plot.py runs/sums-0 runs/sums-1``."""

import argparse
import csv
from pathlib import Path

from matplotlib.figure import Figure


def plot(folders, output, title):
    """Draw the score of each run over the steps, and over the seconds."""
    figure = Figure(figsize=(9, 3.2), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    for folder in folders:
        with (folder / "log.csv").open(newline="") as file:
            rows = [row for row in csv.DictReader(file) if row["heldout"]]
        score = [float(row["heldout"]) for row in rows]
        begun = float(rows[0]["seconds"])
        left.plot([int(row["step"]) for row in rows], score, label=folder.name)
        right.plot([float(row["seconds"]) - begun for row in rows], score, label=folder.name)
    left.set(xlabel="step", ylabel="held-out score", ylim=(0, 1.02), title=title)
    right.set(xlabel="seconds since the first step")
    left.legend(loc="lower right")
    figure.savefig(output, dpi=120)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folders", nargs="+", type=Path, help="the outputs of runs")
    parser.add_argument("--output", default="recipe.png", help="the picture (default: recipe.png)")
    parser.add_argument("--title", default="", help="the title of the picture")
    chosen = parser.parse_args()
    plot(chosen.folders, chosen.output, chosen.title)


if __name__ == "__main__":
    main()
