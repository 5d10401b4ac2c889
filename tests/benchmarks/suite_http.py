"""headgate's servers against stock ``vllm`` over HTTP, on one GPU: ``python -m tests.benchmarks.suite_http MODEL OUT``.

All servers stay up side by side and take turns: in each round every mode runs every workload once, in random order, so
that a mode is compared with stock of the same minutes. Requests are streamed completions of random token ids, sent by
processes of their own (`load`), whose CPU share is measured and shown. Which modes, workloads and servers there are
is in `workload` and `servers`; a mode runs on the server that is configured for the least beyond what it needs, so that
with ``--servers stock both`` one server runs them all (large models). Captures go to ``--files``; each round's are
awaited until the consumer has reported every request, counted from its metrics, and deleted.

Writes OUT/NAME.json after each workload of each round, so that a run that is killed loses nothing, and OUT/NAME.png;
prints the table.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tests.benchmarks.chart import draw
from tests.benchmarks.figures import Answer, Round, summarize, summary, tables
from tests.benchmarks.load import Load
from tests.benchmarks.machine import hardware, parted_cpus, stolen_s, versions
from tests.benchmarks.models import ModelSize, size_of
from tests.benchmarks.servers import CLOCKED, FEATURES, OTHERS, Server, Usage, await_ready, gpu_mib_of, start, stop
from tests.benchmarks.workload import (
    BASE,
    MODES,
    MODULE,
    MODULE_CONFIG,
    SHAPES,
    Asked,
    Mode,
    Shape,
    packed,
    pick,
    server_of,
)

DRAIN_TIMEOUT_S = 120
USUAL_MODES = [name for name, mode in MODES.items() if mode.is_usual]
BUSY_CLIENT = 0.7
SERVED_NAME = "bench"


@dataclass
class Run:
    """What is measured with.

    Attributes:
        options: Of the command line.
        size: Of the model.
        servers: Those that run.
        load: Sends the requests.
        rounds: What was measured so far.
        facts: Of each server's start.
        notes: What went wrong or is worth knowing.
        capacity: Requests per second that stock serves in a closed loop; 0 as long as no open loop needs it.
    """

    options: argparse.Namespace
    size: ModelSize
    servers: Mapping[str, Server]
    load: Load
    rounds: list[Round] = field(default_factory=list)
    facts: dict[str, dict[str, float]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    capacity: float = 0.0

    def note(self, text: str) -> None:
        """Print it at once, and keep it for the document."""
        print(text, flush=True)
        if text not in self.notes:
            self.notes.append(text)

    def measure(self, number: int, name: str, shape: Shape) -> dict[str, float]:
        """One mode with one workload.

        Raises:
            OSError: If the server does not answer.
            TimeoutError: If the load or the consumer does not come to an end.
        """
        mode = MODES[name]
        server = self.servers[server_of(mode, {key: FEATURES[key] for key in self.servers}) or ""]
        extra = {"capture_wait": True} if mode.is_capturing and self.options.capture_wait else {}
        asked = Asked(mode, shape, self.size, SERVED_NAME, number * 1000 + list(MODES).index(name), extra)
        before, delays = server.metrics() if mode.is_capturing else {}, server.delays()
        usage, stolen = server.usage(), stolen_s()
        answers, client_cpu = self.load.run(f"{server.url}/v1/completions", asked)
        figures = summarize(answers)
        used = server.usage()
        figures |= cpu_figures(usage, used, figures.get("wall_s")) | {"client_cpu": client_cpu}
        if "wall_s" in figures:
            figures["stolen_cpu"] = (stolen_s() - stolen) / figures["wall_s"]
        figures |= delay_figures(delays, server.delays())
        if errors := [answer.error for answer in answers if answer.error]:
            self.note(f"{name}: {len(errors)} of {len(answers)} requests failed, the first with {errors[0]}")
        if mode.is_capturing:
            figures |= self._captured(server, mode, before, answers, figures)
            # Not the API server's: it was asked for its counters until the last file was there.
            used |= {role: found for role, found in server.usage().items() if role == "capture"}
        return figures | cost_figures(usage, used, figures["requests"] - figures["errors"])

    def attempt(self, number: int, name: str, shape: str, **changes: float) -> dict[str, float] | None:
        """`measure`, with `changes` to the shape; None if the server or the load failed, which is noted."""
        try:
            asked = SHAPES[shape]._replace(**changes)  # type: ignore[arg-type]
            asked = asked.at_capacity(self.capacity, self.options.open_seconds) if asked.share else asked
            return self.measure(number, name, asked)
        except (OSError, EOFError) as error:
            self.note(f"{name} FAILED in round {number} of {shape}: {error!r}; it runs no more")
            return None

    def _captured(
        self,
        server: Server,
        mode: Mode,
        before: Mapping[str, float],
        answers: Sequence[Answer],
        figures: Mapping[str, float],
    ) -> dict[str, float]:
        good = [answer for answer in answers if not answer.error]
        if not good:
            return {}
        done = server.drain(before.get("consumer_requests", 0) + len(good), DRAIN_TIMEOUT_S)
        if mode.consumer == "far":
            done = server.await_files(len(good), DRAIN_TIMEOUT_S)
        after = server.metrics()
        grown = {key: value - before.get(key, 0) for key, value in after.items()}
        server.clear_files()
        dropped = grown.get("dropped_rows", 0) + grown.get("consumer_dropped_rows", 0)
        failures = ("dropped_rows", "dispatch_errors", "consumer_dropped_rows", "consumer_errors", "consumer_hangs")
        if lost := {key: grown[key] for key in failures if grown.get(key)}:
            self.note(f"{server.name}: LOST ROWS: {lost}")
        return {
            "dropped": max(dropped, figures["dropped"]),
            "gb_s": grown["consumer_bytes"] / figures["wall_s"] / 1e9,
            "gb_s_drained": grown["consumer_bytes"] / (done - min(answer.sent for answer in good)) / 1e9,
            "drain_s": done - max(answer.end for answer in good),
            **{key: grown[key] for key in ("stalls", "stall_seconds", "consumer_stalls") if key in grown},
        }

    def document(self) -> dict[str, Any]:
        """Everything that was measured, and where."""
        return {
            "title": f"{Path(self.options.model).name}, HTTP, {hardware()['gpu']}",
            "base": BASE,
            "command": sys.argv,
            "hardware": hardware(),
            "versions": versions(),
            "workloads": {name: SHAPES[name]._asdict() for name in self.options.shapes},
            "servers": self.facts,
            "notes": self.notes,
            "summary": summary(self.in_order(), BASE),
            "rounds": [asdict(one) for one in self.rounds],
        }

    def in_order(self) -> list[Round]:
        """The rounds, modes in their order: they ran in another each time."""
        return sorted(self.rounds, key=lambda one: list(MODES).index(one.mode))

    def write(self) -> None:
        """Write the document, whole or not at all."""
        target = self.options.out / f"{self.options.name}.json"
        unfinished = target.with_suffix(".tmp")
        unfinished.write_text(json.dumps(self.document(), indent=1))
        unfinished.rename(target)


def cpu_s(before: Mapping[str, Usage], after: Mapping[str, Usage]) -> dict[str, float]:
    """CPU seconds of each role between two moments."""
    return {role: usage.cpu_s - before.get(role, Usage()).cpu_s for role, usage in after.items()}


def cpu_figures(before: Mapping[str, Usage], after: Mapping[str, Usage], wall_s: float | None) -> dict[str, float]:
    """CPU seconds per second: of the API server, and of the engine core with all processes that it has started."""
    if not wall_s:
        return {}
    used = cpu_s(before, after)
    api = used.pop("api")
    return {"api_cpu": api / wall_s, "engine_cpu": sum(used.values()) / wall_s}


def cost_figures(before: Mapping[str, Usage], after: Mapping[str, Usage], requests: float) -> dict[str, float]:
    """CPU milliseconds of each role for a request, and what the roles hold afterwards."""
    if not requests:
        return {}
    found = {f"{role}_ms": 1e3 * used / requests for role, used in cpu_s(before, after).items()}
    for role, usage in after.items():
        found |= {f"{role}_rss_mib": usage.rss / 2**20, f"{role}_files": usage.files, f"{role}_threads": usage.threads}
    return found


def delay_figures(before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, float]:
    """Means of `servers.CLOCKED` over the requests of one round, in ms, and ``accepted``: the share of its drafts."""
    grown = {name: after[name] - before.get(name, 0.0) for name in after}
    count, drafted = grown.get("requests"), grown.get("drafted")
    found = {name: 1e3 * grown[name] / count for name in CLOCKED if name in grown} if count else {}
    return {**found, "accepted": grown["accepted"] / drafted} if drafted else found


def turns(run: Run, deadline: float) -> None:
    """Round after round until `deadline` (monotonic seconds), the workloads one after the other, modes shuffled."""
    rng, number, slowest = random.Random(0), 0, dict.fromkeys(run.options.shapes, 0.0)
    modes = run.options.modes
    while modes and number < run.options.rounds:
        number += 1
        for shape in run.options.shapes:
            began = time.monotonic()
            if number > 1 and began + slowest[shape] > deadline:
                return
            rng.shuffle(modes)
            for name in list(modes):
                if time.monotonic() > deadline:
                    run.note(f"out of time in round {number} of {shape}: it is not complete")
                    return
                figures = run.attempt(number, name, shape)
                if figures is None:
                    modes.remove(name)
                else:
                    run.rounds.append(Round(number, shape, name, figures))
            slowest[shape] = max(slowest[shape], time.monotonic() - began)
            run.write()


def warm_up(run: Run) -> None:
    """Every mode once with every workload, a few requests each: kernels are compiled, caches filled."""
    for shape in run.options.shapes:
        count = min(SHAPES[shape].in_flight, 16)
        for name in list(run.options.modes):
            if run.attempt(0, name, shape, in_flight=count, requests=count, tokens=4, share=0.0) is None:
                run.options.modes.remove(name)


def find_capacity(run: Run) -> None:
    """Measure what stock serves, twice, if a shape's arrivals are a share of that."""
    shares = [name for name in run.options.shapes if SHAPES[name].share]
    if not shares:
        return
    served = [run.attempt(-number, BASE, shares[0], share=0.0) or {} for number in (1, 2)]
    run.capacity = max(one.get("prompts_s", 0.0) for one in served)
    run.note(f"stock's capacity: {run.capacity:.1f} requests per second")
    if not run.capacity:
        run.options.shapes = [name for name in run.options.shapes if name not in shares]


def shared_flags(options: argparse.Namespace) -> list[str]:
    """Flags that all servers have."""
    longest = max(SHAPES[name].prompt + SHAPES[name].most_tokens for name in options.shapes)
    flags = {
        "--model": options.model,
        "--served-model-name": SERVED_NAME,
        "--load-format": "dummy",
        "--max-model-len": str(longest + 16),
        "--max-num-seqs": str(max(64, max(SHAPES[name].in_flight for name in options.shapes))),
        "--max-num-batched-tokens": str(options.batched_tokens),
        "--tensor-parallel-size": str(options.tp),
        "--pipeline-parallel-size": str(options.pp),
    }
    if options.kv_gib:
        flags |= {"--gpu-memory-utilization": "0.1", "--kv-cache-memory-bytes": str(int(options.kv_gib * 2**30))}
    return [*(part for pair in flags.items() for part in pair), *options.flags]


def read_options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line.

    Raises:
        SystemExit: If it is wrong.
    """
    parser = argparse.ArgumentParser(prog="suite_http", description="headgate against stock vLLM over HTTP.")
    parser.add_argument("model", help="model folder; see tests.benchmarks.models")
    parser.add_argument("out", type=Path, help="folder for the document, the chart and the logs")
    parser.add_argument("--name", default="http", help="of the document (default: http)")
    parser.add_argument("--modes", nargs="*", default=[], help=f"of {', '.join(MODES)}; default: the usual ones")
    parser.add_argument("--shapes", nargs="*", default=["chat", "prefill"], help=f"of {', '.join(SHAPES)}")
    parser.add_argument("--servers", nargs="*", default=[], help=f"default: all of {', '.join(FEATURES)}")
    parser.add_argument("--seconds", type=float, default=500, help="for everything, the start included")
    parser.add_argument("--rounds", type=int, default=1000, help="at most so many")
    parser.add_argument("--files", type=Path, default=Path("/tmp"), help="folder for captures, on the disk to measure")
    parser.add_argument("--capture-params", default="", help="more parameters of the consumer: KEY=VALUE,...")
    parser.add_argument("--clients", type=int, default=4, help="processes that send requests")
    parser.add_argument("--kv-gib", type=float, default=10, help="KV cache of each server; 0: as vLLM has it")
    parser.add_argument("--batched-tokens", type=int, default=8192)
    parser.add_argument("--open-seconds", type=float, default=8, help="of arrivals in an open loop")
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--pp", type=int, default=1)
    parser.add_argument("--pin", action="store_true", help="engine cores, API servers and clients on processors apart")
    parser.add_argument("--capture-wait", action="store_true", help="requests wait for their files")
    parser.add_argument("--start-timeout", type=float, default=400)
    parser.add_argument("--flags", nargs=argparse.REMAINDER, default=[], help="last: other flags of all servers")
    options = parser.parse_args(arguments)
    try:
        options.modes = pick(options.modes or USUAL_MODES, MODES, "--modes")
        options.shapes = pick(options.shapes, SHAPES, "--shapes")
        options.servers = pick(options.servers, FEATURES, "--servers")
    except ValueError as error:
        parser.error(str(error))
    if BASE not in options.modes or BASE not in options.servers:
        parser.error(f"the mode and the server {BASE!r} are what the others are compared with; name them")
    return options


def runnable(modes: Sequence[str], servers: Sequence[str]) -> list[str]:
    """Those of `modes` that some server can run."""
    has = {name: FEATURES[name] for name in servers}
    return [name for name in modes if server_of(MODES[name], has) is not None]


def other_consumers(modes: Sequence[str]) -> list[str]:
    """Those of `OTHERS` that `modes` need."""
    return sorted({MODES[name].consumer for name in modes} & OTHERS.keys())


def open_modules(run: Run) -> None:
    """Register the named module wherever it is used; forget modes whose server lacks it."""
    is_used = any(MODES[name].is_named for name in run.options.modes)
    for server in run.servers.values():
        if is_used and "steering" in FEATURES[server.name]:
            vectors = packed(MODULE_CONFIG, run.size, as_text=True)
            server.post("/v1/steering/modules/register", {"name": MODULE, "vectors": vectors})


def pin(servers: Sequence[Server], load: Load) -> None:
    """Keep what runs at the same time apart; the servers take turns, so they share."""
    cpus = parted_cpus()
    load.keep_on(cpus.clients)
    for server in servers:
        server.keep_on(cpus)


def serve(options: argparse.Namespace, load: Load) -> int:
    """Start the servers, measure, report; returns the exit status."""
    began = time.monotonic()
    needed = {server_of(MODES[name], {key: FEATURES[key] for key in options.servers}) for name in options.modes}
    names = [name for name in options.servers if name in needed]
    flags = shared_flags(options)
    most = max(SHAPES[name].in_flight for name in options.shapes)
    size = size_of(options.model)
    others = other_consumers(options.modes)
    params = options.capture_params
    started = [start(name, flags, options.out, options.files, size, most, others, params) for name in names]
    ready: list[Server] = []
    try:
        ready = await_ready(started, options.start_timeout)
        if BASE not in [server.name for server in ready]:
            print("stock did not start: nothing to compare with", flush=True)
            return 1
        options.modes = runnable(options.modes, [server.name for server in ready])
        run = Run(options, size, {server.name: server for server in ready}, load)
        for server in ready:
            memory = gpu_mib_of([server.process.pid])
            run.facts[server.name] = server.facts | ({} if memory is None else {"gpu_mib": memory})
        if options.pin:
            pin(ready, load)
        open_modules(run)
        warm_up(run)
        find_capacity(run)
        turns(run, began + options.seconds)
    finally:
        stop(ready or started)
    return report(run)


def report(run: Run) -> int:
    """Print the tables, write the document and the chart; returns the exit status: 1 if rows or requests were lost."""
    run.write()
    if find_spec("matplotlib") and run.rounds:
        draw(run.document(), run.options.out / f"{run.options.name}.png")
    document = run.document()
    print(document["title"], document["versions"], sep="\n")
    for name, facts in run.facts.items():
        print(f"  {name:10}", ", ".join(f"{key} {value:.1f}" for key, value in facts.items()))
    print(*tables(run.in_order(), BASE), sep="\n")
    busiest = max((one.figures.get("client_cpu", 0.0) for one in run.rounds), default=0.0)
    middle = statistics.median(one.figures.get("client_cpu", 0.0) for one in run.rounds) if run.rounds else 0.0
    verdict = "the clients may be the bottleneck" if busiest > BUSY_CLIENT else "the clients are no bottleneck"
    print(f"busiest client process: {busiest:.0%} of a core at most, {middle:.0%} in the median: {verdict}")
    lost = sum(one.figures.get("dropped", 0) + one.figures.get("errors", 0) for one in run.rounds)
    print(*run.notes, f"rows dropped and requests failed: {lost:.0f}", sep="\n", flush=True)
    return int(lost > 0 or not run.rounds)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; returns the exit status."""
    options = read_options(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # servers are sessions of their own: they must be stopped
    options.out.mkdir(parents=True, exist_ok=True)
    with Load(options.clients) as load:
        return serve(options, load)


if __name__ == "__main__":
    sys.exit(main())
