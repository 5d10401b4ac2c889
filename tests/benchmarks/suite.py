"""headgate against stock vLLM on one GPU, in one table: ``python suite.py MODEL SECONDS FOLDER [VARIANT ...]``.

All engines stay up side by side and take turns, so every round compares each mode with stock of the same minute
(`turns`). Engine cores run in processes of their own, vLLM's default. Variants and their modes:

- stock: no headgate.
- steering (`bench_steering_gpu`): idle, named, inline1, inline16, inline64.
- capture (`bench_tap_variants`): idle, all layers to the log, to files and to memory, one layer to files.

SUITE_MODES, names separated by ``;``, leaves out the other modes; BENCH_FILES is the folder that captures go to.
Writes FOLDER/suite.json (figures of every round, versions, hardware, command) and, with matplotlib, FOLDER/suite.png.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import bench_steering_gpu
import bench_tap_variants
import torch
from turns import Engine, Served, run_rounds, start, stop, table

VARIANTS = {"stock": "stock-mp", "steering": "steering", "capture": "capture"}
STOCK = "stock"


def make(variant: str, model: str) -> Served:
    """The engine of `variant`."""
    module = bench_steering_gpu if variant == "steering" else bench_tap_variants
    served = module.make(VARIANTS[variant], model)
    if wanted := os.environ.get("SUITE_MODES"):
        served.modes = [mode for mode in served.modes if mode in wanted.split(";")]
    return served


def report(engines: Sequence[Engine], command: Sequence[str]) -> dict[str, Any]:
    """Everything that was measured, and where."""
    figures = {f"{engine.name} {mode}": engine.figures(mode) for engine in engines for mode in engine.modes}
    names = ("vllm", "torch", "triton", "transformers", "headgate")
    return {
        "command": list(command),
        "gpu": torch.cuda.get_device_name(),
        "python": platform.python_version(),
        "versions": {name: version(name) for name in names},
        "milliseconds": figures,
        "ratio_to_stock": ratios(figures, f"{STOCK} idle"),
    }


def ratios(figures: Mapping[str, Mapping[str, Sequence[float]]], base: str) -> dict[str, dict[str, float]]:
    """Median over the rounds of each mode's figure, relative to stock's of the same round."""
    return {
        name: {
            column: statistics.median(a / b for a, b in zip(values, figures[base][column], strict=True))
            for column, values in columns.items()
        }
        for name, columns in figures.items()
    }


def draw(found: Mapping[str, Mapping[str, float]], target: Path) -> None:
    """A bar for each mode and figure: its time relative to stock's."""
    import matplotlib.pyplot as plt

    columns = list(next(iter(found.values())))
    figure, axes = plt.subplots(1, len(columns), figsize=(4 * len(columns), 5), sharey=True, layout="constrained")
    names = [name for name in found if not name.startswith(f"{STOCK} ")]
    for axis, column in zip(axes, columns, strict=True):
        axis.barh(names, [100 * found[name][column] - 100 for name in names])
        axis.set_title(column)
        axis.set_xlabel("time above stock, %")
        axis.axvline(0, color="black", linewidth=0.8)
    axes[0].invert_yaxis()
    figure.savefig(target, dpi=110)


def main() -> None:
    """Start all engines, time them in turns, print and write the figures."""
    model, seconds, folder, *variants = sys.argv[1:]
    target = Path(folder)
    target.mkdir(parents=True, exist_ok=True)
    engines = start(target, make, variants or list(VARIANTS), model)
    num_rounds = run_rounds(engines, float(seconds))
    lines = table(engines, dict.fromkeys(VARIANTS, STOCK))
    found = report(engines, sys.argv)
    stop(engines)
    (target / "suite.json").write_text(json.dumps(found, indent=1))
    if find_spec("matplotlib"):
        draw(found["ratio_to_stock"], target / "suite.png")
    print(f"{num_rounds} rounds, engines in turns; ratios to stock of the same round, quartiles", *lines, sep="\n")


if __name__ == "__main__":
    main()
