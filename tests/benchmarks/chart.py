"""A chart of a benchmark's document: ``python -m tests.benchmarks.chart RUN.json [RUN.png]``. Needs matplotlib."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

CHARTED = {
    **{"tok_s": "tokens/s", "ttft_p50": "TTFT", "tpot_p50": "TPOT"},
    **{"bs1": "TPOT, 1 in flight", "bs16": "TPOT, 16 in flight", "prefill": "prefill", "load": "load"},
}
"""Columns that are drawn, where a document has them: of a run over HTTP, and of engines."""


def draw(document: Mapping[str, Any], target: Path) -> None:
    """Write a PNG: a row of axes for each workload, in each a bar for every mode, in per cent above the base."""
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    shapes: Mapping[str, Any] = document["summary"]
    columns = {shape: charted(modes) for shape, modes in shapes.items()}
    wide = max(len(found) for found in columns.values())
    tall = max(len(modes) for modes in shapes.values())
    size = (4 * wide, (0.32 * tall + 1.2) * len(shapes))
    figure, grid = plt.subplots(len(shapes), wide, figsize=size, squeeze=False, layout="constrained")
    for axes, (shape, modes) in zip(grid, shapes.items(), strict=True):
        for axis in axes[len(columns[shape]) :]:
            axis.set_axis_off()
        for axis, column in zip(axes, columns[shape], strict=False):
            bars(axis, modes, column, document["base"])
            axis.set_title(f"{shape}: {CHARTED.get(column, column)}", fontsize=9)
        for axis in axes[1:]:
            axis.set_yticklabels([])
    figure.suptitle(f"{document['title']}: per cent above {document['base']}", fontsize=10)
    figure.savefig(target, dpi=110)
    plt.close(figure)


def charted(modes: Mapping[str, Any]) -> list[str]:
    """The columns that are compared in any of `modes`: those of `CHARTED`, or all if there are none."""
    found = list(dict.fromkeys(column for mode in modes.values() for column in mode["to_base"]))
    return [column for column in CHARTED if column in found] or found


def bars(axis: Any, modes: Mapping[str, Any], column: str, base: str) -> None:
    """One axis: the medians as bars, the quartiles as whiskers."""
    names = [name for name in modes if name != base]
    spreads = [modes[name]["to_base"].get(column, (1, 1, 1)) for name in names]
    middles = [100 * middle - 100 for _, middle, _ in spreads]
    below = [100 * (middle - low) for low, middle, _ in spreads]
    above = [100 * (high - middle) for _, middle, high in spreads]
    axis.barh(names, middles, xerr=[below, above], error_kw={"linewidth": 0.8}, height=0.7)
    axis.axvline(0, color="black", linewidth=0.8)
    axis.tick_params(labelsize=7)
    axis.invert_yaxis()


def main() -> None:
    """Draw the document that is named."""
    source = Path(sys.argv[1])
    target = Path(sys.argv[2]) if len(sys.argv) > 2 else source.with_suffix(".png")
    draw(json.loads(source.read_text()), target)
    print(target)


if __name__ == "__main__":
    main()
