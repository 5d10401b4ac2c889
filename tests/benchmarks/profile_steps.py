"""What a step takes, and which part of it: ``python -m tests.benchmarks.profile_steps MODEL OUT --servers stock both``.

`suite_http` with clocks inside the engine cores (`step_clocks`): a round has hundreds of steps, so parts of a step are
known to some microseconds where tokens per second scatter by several per cent. The options are the suite's. ``behind``
has 0.05 ms of the clocks' own.

Prints, for each mode and each kind of step, means in ms without the slowest and fastest hundredth: ``step``, the
period from a step's start to the next one's, and its percentiles; parts of it; ``ours``, the time in headgate's code
on the step thread up to the forward's launch, ``behind`` that behind the launch of the sampling, and of both capture's
and steering's (``steers``); ``decides``, what steering's half in the engine core takes; CPU time of the step thread
and of all other threads of the process; ``gpu``, how long the GPU was busy with the step, and ``gpu gap``, how long it
waited for the host before it. Writes all records to OUT/steps.npz.log.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from tests.benchmarks import suite_http
from tests.benchmarks.step_clocks import COLUMNS, FOLDER

Array = npt.NDArray[np.float64]
MOST_REQUESTS = 2
"""Arriving in a step, for it to count: more come at the start of a round only."""
CUT = 1.0
"""Per cent of steps that are left out at either end."""
PERCENTILES = (10, 50, 90, 95, 99)
"""Of the periods."""


def column(records: Array, name: str) -> Array:
    found: Array = records[:, COLUMNS.index(name)]
    return found


def total(records: Array, *names: str) -> Array:
    found: Array = sum((column(records, name) for name in names), np.zeros(len(records)))
    return found


SHOWN: dict[str, Callable[[Array], Array]] = {
    "schedule": lambda each: column(each, "schedule"),
    "execute": lambda each: execute(each),
    "sample": lambda each: total(each, "sample", "sample_v1"),
    "update": lambda each: column(each, "update"),
    "wait": lambda each: column(each, "wait"),
    "ours": lambda each: ours(each),
    "behind": lambda each: behind(each),
    "begins": lambda each: column(each, "capture_begins"),
    "ends": lambda each: column(each, "capture_ends"),
    "adds": lambda each: column(each, "capture_adds"),
    "finishes": lambda each: column(each, "capture_finishes"),
    "steers": lambda each: total(each, "steering_begins", "steering_ends"),
    "decides": lambda each: total(each, "orders", "takes", "decides"),
    "own cpu": lambda each: column(each, "own_cpu"),
    "other cpu": lambda each: column(each, "other_cpu"),
    "gpu": lambda each: column(each, "gpu"),
    "gpu gap": lambda each: column(each, "gpu_gap"),
}


def execute(records: Array) -> Array:
    """What the model runner takes to lay out and to launch a forward, without headgate's seam in it."""
    seam = column(records, "seam_prepare")
    within = np.where(seam > 0, seam - total(records, "prepare", "prepare_v1"), 0.0)
    return total(records, "execute", "execute_v1") - within


def behind(records: Array) -> Array:
    """What headgate's seam takes behind the sampling; 0 without it."""
    seam = column(records, "seam_sample")
    return np.where(seam > 0, seam - total(records, "sample", "sample_v1"), 0.0)


def ours(records: Array) -> Array:
    """What headgate's seam takes around vLLM's methods up to the forward; 0 without it."""
    around = column(records, "seam_execute") - total(records, "execute", "execute_v1")
    within = column(records, "seam_prepare") - total(records, "prepare", "prepare_v1")
    return np.where(column(records, "seam_execute") > 0, around + within, 0.0)


KINDS: dict[str, Callable[[Array, int], npt.NDArray[np.bool_]]] = {
    "decode": lambda each, full: (column(each, "tokens") == full) & (column(each, "requests") == full),
    "prompt": lambda each, full: (column(each, "new") > 0) & (column(each, "new") <= MOST_REQUESTS),
}
"""Steps in which all of the usual number of requests decode, and steps with one or two new requests."""


def read(folder: Path) -> dict[str, tuple[Array, Array]]:
    """Records and periods (seconds) of all steps but each file's last, by mode."""
    found: dict[str, list[tuple[Array, Array]]] = {}
    for path in sorted(folder.glob("*.npy")):
        records: Array = np.load(path)
        names = path.with_suffix(".txt").read_text().splitlines()
        periods = np.diff(column(records, "started"))
        for index, name in enumerate(names):
            picks = np.flatnonzero(column(records, "mode")[:-1] == index)
            found.setdefault(name, []).append((records[picks], periods[picks]))
    return {
        name: (np.concatenate([one for one, _ in each]), np.concatenate([one for _, one in each]))
        for name, each in found.items()
    }


def middle(values: Array) -> float:
    """Mean in ms without the ends, of the values that are known; NaN if none is."""
    values = values[~np.isnan(values)]
    if not len(values):
        return float("nan")
    low, high = np.percentile(values, [CUT, 100 - CUT])
    return float(1e3 * values[(values >= low) & (values <= high)].mean())


def table(folder: Path, in_flight: int) -> str:
    """Of all servers under `folder`."""
    head = "".join(f"{name:>9}" for name in ("step", *(f"p{at}" for at in PERCENTILES)))
    lines = [f"{'ms':28}{'steps':>7}{head}" + "".join(f"{name:>10}" for name in SHOWN)]
    for kind, is_kind in KINDS.items():
        for server in sorted(each for each in folder.iterdir() if each.is_dir()):
            for name, (records, periods) in sorted(read(server).items()):
                picks = np.flatnonzero(is_kind(records, in_flight))
                if len(picks) < 10:
                    continue
                shown = "".join(f"{middle(what(records[picks])):10.3f}" for what in SHOWN.values())
                title = f"{kind} {server.name} {name}"
                spread = "".join(f"{1e3 * each:9.3f}" for each in np.percentile(periods[picks], PERCENTILES))
                lines.append(f"{title:28}{len(picks):7}{middle(periods[picks]):9.3f}{spread}{shown}")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the suite with clocks; returns its exit status."""
    options = suite_http.read_options(arguments)
    os.environ[FOLDER] = str((options.out / "steps").absolute())
    status = suite_http.main(arguments)
    in_flight = max(suite_http.SHAPES[name].in_flight for name in options.shapes)
    print(table(options.out / "steps", in_flight), flush=True)
    keep(options.out / "steps", options.out / "steps.npz.log")
    return status


def keep(folder: Path, target: Path) -> None:
    """Write all records, float32, to one compressed file, under a name that `gpu_call` brings home."""
    found = {}
    for path in sorted(folder.glob("*/*.npy")):
        name = f"{path.parent.name}/{path.stem}"
        found[name] = np.load(path)
        found[name][:, COLUMNS.index("started")] -= found[name][0, COLUMNS.index("started")]
        found[f"{name}/modes"] = np.array(path.with_suffix(".txt").read_text().splitlines())
    with target.open("wb") as file:
        np.savez_compressed(file, **{k: v if v.dtype.kind == "U" else v.astype(np.float32) for k, v in found.items()})


if __name__ == "__main__":
    sys.exit(main())
