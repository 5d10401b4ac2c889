"""Draws the chart of the README: ``python -m tests.benchmarks.cost_chart DOCUMENT.json OUT.png``.

The document has `modes`: for each mode the change of tokens per second against stock in per cent, by the number of
requests in flight.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt

COLORS = {"16": "#2b6cb0", "256": "#a0aec0"}


def draw(document: Path, out: Path) -> None:
    """Draw horizontal bars, one group for each mode, and write `out`."""
    modes: dict[str, dict[str, float]] = json.loads(document.read_text())["modes"]
    figure, axes = plt.subplots(figsize=(9, 4.2), layout="constrained")
    height = 0.38
    for index, load in enumerate(COLORS):
        places = [(row + (index - 0.5) * height, mode[load]) for row, mode in enumerate(modes.values()) if load in mode]
        bars = axes.barh(
            [place for place, _ in places],
            [value for _, value in places],
            height=height,
            color=COLORS[load],
            label=f"{load} requests in flight",
        )
        axes.bar_label(bars, labels=[f"{value:+.1f} %" for _, value in places], padding=4, fontsize=9)
    axes.set_yticks(range(len(modes)), list(modes))
    axes.invert_yaxis()
    axes.set_xlim(-32, 6)
    axes.axvline(0, color="black", linewidth=0.8)
    axes.set_xlabel("tokens per second against stock vLLM, per cent")
    axes.legend(loc="upper left", frameon=False)
    axes.spines[["top", "right", "left"]].set_visible(False)
    figure.savefig(out, dpi=110)
    plt.close(figure)


def main() -> None:
    """Read the arguments and draw."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("document", type=Path)
    parser.add_argument("out", type=Path)
    options = parser.parse_args()
    draw(options.document, options.out)


if __name__ == "__main__":
    main()
