"""Where a server's time goes: ``python -m tests.benchmarks.profile_http MODEL OUT --modes "1 layer" "16 configs"``.

Starts the servers that the modes need, runs each mode of `workload` with the shape ``chat`` while ``py-spy`` (to be
installed, and allowed to trace) samples the engine core, the API server and the capture process, and prints for each
thread how often it was seen: holding the GIL (``gil``) or running at all (``all``), in which functions, and in
which of headgate's. The stacks lie in OUT as py-spy's raw files.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path

import psutil

from tests.benchmarks.load import Load
from tests.benchmarks.models import size_of
from tests.benchmarks.servers import FEATURES, Server, await_ready, start, stop
from tests.benchmarks.suite_http import SERVED_NAME, Run, open_modules, other_consumers, shared_flags
from tests.benchmarks.workload import MODES, SHAPES, Asked, pick, server_of

RATE_HZ, SECONDS = 200, 10
OURS = ("headgate/", "(capture/", "(steering/", "(consumers/")
TOP = 12


def pids(server: Server) -> dict[str, int]:
    """Process ids: ``api``, ``core`` (the busiest other child) and, if the server has one, ``capture``."""
    root = psutil.Process(server.process.pid)
    children = root.children(recursive=True)
    capture = [child for child in children if "headgate.capture.capture_process" in child.cmdline()]
    core = max((child for child in children if child not in capture), key=lambda child: sum(child.cpu_times()[:2]))
    return {"api": root.pid, "core": core.pid} | ({"capture": capture[0].pid} if capture else {})


def record(pid: int, out: Path, *, is_gil: bool) -> subprocess.Popen[bytes]:
    """py-spy on a process for `SECONDS`."""
    command = ["py-spy", "record", "-p", str(pid), "-r", str(RATE_HZ), "-d", str(SECONDS), "--threads", "--nonblocking"]
    gil = ["--gil"] if is_gil else []
    return subprocess.Popen([*command, *gil, "-f", "raw", "-o", str(out)], stdout=subprocess.DEVNULL)


def show(title: str, path: Path) -> None:
    """Threads of a raw file, the busiest first."""
    threads = Counter[str]()
    leaves: defaultdict[str, Counter[str]] = defaultdict(Counter)
    ours: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for line in path.read_text().splitlines():
        stack, _, count = line.rpartition(" ")
        thread, *lines = stack.split(";")
        frames = [frame.partition(":")[0] for frame in lines]
        if frames:
            threads[thread] += int(count)
            leaves[thread][frames[-1]] += int(count)
            ours[thread].update(
                dict.fromkeys((frame for frame in frames if any(part in frame for part in OURS)), int(count))
            )
    print(f"{title}: {sum(threads.values())} samples of {RATE_HZ * SECONDS}")
    for thread, count in threads.most_common(6):
        print(f"  {count:5} {thread}")
        for what, found in (("in", leaves[thread]), ("below ours", ours[thread])):
            print(f"        {what}: " + "; ".join(f"{number} {name}" for name, number in found.most_common(TOP)))


def profile(run: Run, name: str, number: int, out: Path) -> None:
    """One mode, sampled."""
    mode = MODES[name]
    server = run.servers[server_of(mode, {key: FEATURES[key] for key in run.servers}) or ""]
    shape = SHAPES[run.options.shapes[0]]._replace(requests=run.options.requests)
    url, asked = f"{server.url}/v1/completions", Asked(mode, shape, run.size, SERVED_NAME, number)
    run.load.run(url, asked)  # to warm up
    stem = name.replace(" ", "_")
    spies = {}
    for who, pid in pids(server).items():
        for kind in ("gil",) if who == "api" else ("gil", "all"):
            title = f"{stem}-{who}-{kind}"
            spies[title] = record(pid, out / f"{title}.raw", is_gil=kind == "gil")
    began = time.monotonic()
    while time.monotonic() - began < SECONDS:
        number += 1
        run.load.run(url, Asked(mode, shape, run.size, SERVED_NAME, number))
    for title, spy in spies.items():
        if spy.wait() == 0:
            show(title, out / f"{title}.raw")
        else:
            print(f"{title}: py-spy ended with status {spy.returncode}; it needs the right to trace processes")
    server.clear_files()


def read_options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line.

    Raises:
        SystemExit: If it is wrong, or py-spy is missing.
    """
    parser = argparse.ArgumentParser(prog="profile_http", description="Where a server's time goes, by py-spy.")
    parser.add_argument("model", help="model folder; see tests.benchmarks.models")
    parser.add_argument("out", type=Path, help="folder for stacks and logs")
    parser.add_argument("--modes", nargs="*", default=["1 layer", "16 configs"], help=f"of {', '.join(MODES)}")
    parser.add_argument("--shapes", nargs=1, default=["chat"], help=f"of {', '.join(SHAPES)}")
    parser.add_argument("--servers", nargs="*", default=[], help=f"of {', '.join(FEATURES)}; default: any")
    parser.add_argument("--requests", type=int, default=96, help="of one run of a mode; it is repeated")
    parser.add_argument("--files", type=Path, default=Path("/tmp"), help="folder for captures")
    parser.add_argument("--kv-gib", type=float, default=4, help="KV cache of each server; 0: as vLLM has it")
    parser.add_argument("--batched-tokens", type=int, default=8192)
    parser.add_argument("--flags", nargs=argparse.REMAINDER, default=[], help="last: other flags of all servers")
    options = parser.parse_args(arguments)
    options.tp = options.pp = 1
    try:
        options.modes = pick(options.modes, MODES, "--modes")
        options.servers = pick(options.servers, FEATURES, "--servers")
    except ValueError as error:
        parser.error(str(error))
    if shutil.which("py-spy") is None:
        parser.error("py-spy is not installed: pip install py-spy")
    return options


def main() -> int:
    """Start the servers, profile; returns the exit status."""
    options = read_options()
    options.out.mkdir(parents=True, exist_ok=True)
    has = {name: FEATURES[name] for name in options.servers}
    names = dict.fromkeys(server_of(MODES[name], has) for name in options.modes)
    size, others = size_of(options.model), other_consumers(options.modes)
    most = SHAPES[options.shapes[0]].in_flight
    with Load(4) as load:
        started = [
            start(name, shared_flags(options), options.out, options.files, size, most, others)
            for name in names
            if name is not None
        ]
        try:
            ready = await_ready(started, 400)
            run = Run(options, size, {server.name: server for server in ready}, load)
            open_modules(run)
            for index, name in enumerate(options.modes):
                profile(run, name, 1000 * index, options.out)
        finally:
            stop(started)
    return 0


if __name__ == "__main__":
    sys.exit(main())
