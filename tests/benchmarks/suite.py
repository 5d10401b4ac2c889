"""headgate's engines against stock vLLM's, on one or more GPUs: ``python -m tests.benchmarks.suite MODEL OUT``.

`LLM`, engine cores in processes of their own, no server (`suite_http` has one). All engines stay up side by side and
take turns, so every round compares each mode with stock of the same minute (`turns`). Variants and modes are those of
`servers` and `workload`; a mode runs on the engine that is configured for the least beyond what it needs, so that with
``--variants stock both`` one engine runs them all (large models). Columns, in ms: TPOT with 1, 16 and 64 requests in
flight, prompts of 16 x 1024 tokens alone, and a load of 256 requests, 64 in flight.

Writes OUT/NAME.json after each round (a run that is killed loses nothing) and OUT/NAME.png, prints the table.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tests.benchmarks.chart import draw
from tests.benchmarks.figures import Round, summary, tables
from tests.benchmarks.machine import hardware, slots_for, versions
from tests.benchmarks.models import size_of
from tests.benchmarks.operations import gathered_sites, op_sites, operations
from tests.benchmarks.servers import FEATURES, gpu_mib_of, start_facts
from tests.benchmarks.turns import (
    BATCHES,
    JOBS,
    LOAD,
    LONG,
    NUM_RUNNING,
    PREFILL,
    Engine,
    Job,
    Served,
    open_llm,
    run_rounds,
    start,
    stop,
)
from tests.benchmarks.workload import BASE, MODES, MODULE, MODULE_CONFIG, packed, pick, server_of

SHAPE = "engine"
TIMEOUT_S = 250
"""For rows to reach a slow disk."""
ENGINE_MODES = [name for name, mode in MODES.items() if mode.is_for_engines]


class Configured(Served):
    """One variant.

    Args:
        variant: Of `FEATURES`.
        model: Its folder.
        options: Of the command line.
    """

    def __init__(self, variant: str, model: str, options: argparse.Namespace) -> None:
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"
        if variant == "stock":
            os.environ["VLLM_PLUGINS"] = "none"
        has, self._size = FEATURES[variant], size_of(model)
        self.modes = options.modes_of[variant]
        self.vocabulary = min(self.vocabulary, self._size.vocabulary)
        self._root, self._num_made, self._job = Path(tempfile.mkdtemp(dir=options.files)), 0, 0
        ours: dict[str, Any] = {}
        if "steering" in has:
            ours["steering"] = {"max_steering_slots": slots_for(self._size, NUM_RUNNING)}
        if "ops" in has:
            ours["steering"]["op_sites"] = op_sites(self._size)
        if "gathered" in has:
            ours["steering"]["gather_sites"] = gathered_sites(self._size)
        if "capture" in has:
            consumers = [{"name": "filesystem", "params": {"root": str(self._root)}}]
            ours["capture"] = {"consumers": consumers, "result_timeout_s": TIMEOUT_S}
        settings = {"additional_config": {"headgate": ours}} if ours else {}
        parallel = {"tensor_parallel_size": options.tp, "pipeline_parallel_size": options.pp}
        cache = {"kv_cache_memory_bytes": int(options.kv_gib * 2**30) or None}
        self.llm = open_llm(model, **settings, **parallel, **cache, **json.loads(options.engine))
        if "steering" in has:
            self.llm.steering.register(MODULE, vectors=packed(MODULE_CONFIG, self._size))

    def prepare(self, mode: str) -> None:
        self._num_made, self._job = 0, self._job + 1

    def params(self, mode: str, tokens: int) -> Any:
        made, asked = super().params(mode, tokens), MODES[mode]
        for name, value in asked.fields(self._size, f"job{self._job}").items():
            setattr(made, name, value)
        if asked.ops:
            made.steering_ops = operations(self._num_made % asked.configs, self._size, asked.ops)
        elif asked.configs:
            made.steering_vectors = packed(self._num_made % asked.configs, self._size)
        self._num_made += 1
        return made

    def check(self, mode: str, job: Job, outputs: Sequence[Any]) -> None:
        if MODES[mode].is_capturing:
            found = [output.capture_results["filesystem"] for output in outputs]
            assert {(result.status, result.error, result.dropped_rows) for result in found} == {("ok", None, 0)}, found
        super().check(mode, job, outputs)

    def settle(self, mode: str) -> None:
        for path in self._root.glob("job*"):  # a tag of each job
            shutil.rmtree(path)

    def report(self) -> str:
        shutil.rmtree(self._root)
        if "capture idle" not in self.modes and not any(MODES[mode].is_capturing for mode in self.modes):
            return ""
        wanted = ("steps", "rows", "bytes", "stalls", "stall_s", "dropped_rows", "dispatch_errors")
        captures = [stats["capture"] for stats in self.llm.collective_rpc("headgate_stats") if stats["capture"]]
        return "; ".join(", ".join(f"{name} {capture[name]:.6g}" for name in wanted) for capture in captures)


COLUMNS = {
    **{f"bs{batch}": (Job(batch, 64, 1), Job(batch, 64, LONG)) for batch in BATCHES},
    "prefill": (PREFILL,),
    "load": (LOAD,),
}
"""The jobs behind each column."""


def jobs_of(columns: Sequence[str]) -> list[Job]:
    """The jobs behind `columns`, as often as a round has them."""
    wanted = {job for column in columns for job in COLUMNS[column]}
    return [job for job in JOBS if job in wanted]


def rounds_of(engines: Sequence[Engine], jobs: Sequence[Job]) -> list[Round]:
    """What was measured so far, in the order of the modes; rounds that an engine did not complete are left out."""
    made, per_round = [], {job: jobs.count(job) for job in jobs}
    for engine in engines:
        for mode in dict.fromkeys(mode for mode, _ in engine.seconds):
            taken = {job: engine.seconds.get((mode, job), []) for job in per_round}
            for number in range(min(len(taken[job]) // count for job, count in per_round.items())):
                of = {job: taken[job][number * count : (number + 1) * count] for job, count in per_round.items()}
                made.append(Round(number + 1, SHAPE, mode, figures(of)))
    return sorted(made, key=lambda one: list(MODES).index(one.mode))


def figures(seconds: Mapping[Job, Sequence[float]]) -> dict[str, float]:
    """Milliseconds by column, of the seconds that one round's jobs took: for each token, or for the whole job."""
    middle = {job: 1e3 * statistics.median(values) for job, values in seconds.items()}
    found = {}
    for column, jobs in COLUMNS.items():
        if all(job in middle for job in jobs):
            short, long = middle[jobs[0]], middle[jobs[-1]]
            found[column] = (long - short) / (LONG - 1) if len(jobs) == 2 else long
    return found


def document(options: argparse.Namespace, engines: Sequence[Engine], facts: dict[str, Any]) -> dict[str, Any]:
    """Everything that was measured, and where."""
    rounds, machine = rounds_of(engines, jobs_of(options.columns)), hardware()
    size = f", TP={options.tp}, PP={options.pp}" if options.tp * options.pp > 1 else ""
    return {
        "title": f"{Path(options.model).name}, engine, {machine['gpu']}{size}",
        "base": BASE,
        "command": sys.argv,
        "hardware": machine,
        "versions": versions(),
        "jobs": [job._asdict() for job in dict.fromkeys(jobs_of(options.columns))],
        "engines": facts,
        "summary": summary(rounds, BASE),
        "rounds": [asdict(one) for one in rounds],
    }


def read_options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line.

    Raises:
        SystemExit: If it is wrong.
    """
    parser = argparse.ArgumentParser(prog="suite", description="headgate's engines against stock vLLM's.")
    parser.add_argument("model", help="model folder; see tests.benchmarks.models")
    parser.add_argument("out", type=Path, help="folder for the document, the chart and the logs")
    parser.add_argument("--name", default="suite", help="of the document (default: suite)")
    parser.add_argument("--variants", nargs="*", default=[], help=f"default: all of {', '.join(FEATURES)}")
    parser.add_argument("--modes", nargs="*", default=[], help=f"default: all of {', '.join(ENGINE_MODES)}")
    parser.add_argument("--columns", nargs="*", default=[], help=f"default: all of {', '.join(COLUMNS)}")
    parser.add_argument("--seconds", type=float, default=500, help="for everything, the start included")
    parser.add_argument("--files", type=Path, default=Path("/tmp"), help="folder for captures, on the disk to measure")
    parser.add_argument("--kv-gib", type=float, default=4, help="KV cache of each engine; 0: as vLLM has it")
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--pp", type=int, default=1)
    parser.add_argument("--engine", default="{}", metavar="JSON", help="other settings of all engines")
    options = parser.parse_args(arguments)
    try:
        options.variants = pick(options.variants, FEATURES, "--variants")
        modes = pick(options.modes, {name: MODES[name] for name in ENGINE_MODES}, "--modes")
        options.columns = pick(options.columns, COLUMNS, "--columns")
    except ValueError as error:
        parser.error(str(error))
    if BASE not in options.variants or BASE not in modes:
        parser.error(f"the mode and the variant {BASE!r} are what the others are compared with; name them")
    has = {name: FEATURES[name] for name in options.variants}
    options.modes_of = {name: [mode for mode in modes if server_of(MODES[mode], has) == name] for name in has}
    options.variants = [name for name in options.variants if options.modes_of[name]]
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Start all engines, time them in turns, print and write the figures; returns the exit status."""
    options, began = read_options(arguments), time.monotonic()
    options.out.mkdir(parents=True, exist_ok=True)
    engines = start(options.out, partial(Configured, options=options), options.variants, options.model)
    if BASE not in [engine.name for engine in engines]:
        print("stock did not start: nothing to compare with", flush=True)
        stop(engines)
        return 1
    facts: dict[str, Any] = {}
    for engine in engines:
        log = (options.out / f"{engine.name}.log").read_text(errors="replace")
        memory = gpu_mib_of([engine.process.pid])
        facts[engine.name] = {"start_s": engine.start_s, **start_facts(log), **({"gpu_mib": memory} if memory else {})}
    target = options.out / f"{options.name}.json"

    def write() -> None:
        target.write_text(json.dumps(document(options, engines, facts), indent=1))

    jobs = jobs_of(options.columns)
    run_rounds(engines, options.seconds - (time.monotonic() - began), write, jobs)
    write()
    found = document(options, engines, facts)
    if find_spec("matplotlib") and found["rounds"]:
        draw(found, target.with_suffix(".png"))
    print(found["title"], found["versions"], sep="\n")
    for name, each in facts.items():
        print(f"  {name:10}", ", ".join(f"{key} {value:.1f}" for key, value in each.items()))
    print(*tables(rounds_of(engines, jobs), BASE), sep="\n", flush=True)
    is_whole = len(engines) == len(options.variants) and all(engine.modes for engine in engines)
    stop(engines)
    return 0 if is_whole else 1


if __name__ == "__main__":
    sys.exit(main())
