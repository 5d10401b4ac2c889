"""Servers on one machine: started as users start them, looked at from outside, stopped."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from tests.benchmarks import step_clocks
from tests.benchmarks.machine import Cpus, keep_on, slots_for
from tests.benchmarks.models import ModelSize
from tests.benchmarks.operations import controller_flags, gathered_sites, op_sites
from tests.benchmarks.saes import SIZES, reading_consumer, sae_flags

READY = "Application startup complete"
FEATURES: Mapping[str, frozenset[str]] = {
    "stock": frozenset(),
    "installed": frozenset(),
    "steering": frozenset({"steering"}),
    "capture": frozenset({"capture"}),
    "attention": frozenset({"capture", "attention"}),
    "reading": frozenset({"capture", "attention", "lens"}),
    "both": frozenset({"steering", "capture"}),
    "wide": frozenset({"steering", "capture", "wide"}),
    "ops": frozenset({"steering", "ops", "gates"}),
    "gathered": frozenset({"steering", "ops", "gates", "gathered"}),
    "no gates": frozenset({"steering", "ops", "no gates"}),
    "controllers": frozenset({"steering", "ops", "gates", "controllers"}),
    "defaults": frozenset({"steering", "ops", "gates", "capture", "defaults"}),
    "features": frozenset({"steering", "features"}),
    **{f"encode {name}": frozenset({"steering", f"encode {name}"}) for name in SIZES},
    **{f"read {name}": frozenset({f"read {name}"}) for name in SIZES},
}
"""What each server is configured for. ``stock`` loads no plugin at all, ``installed`` loads headgate unconfigured,
``ops``, ``no gates`` and ``controllers`` have `operations.op_sites`, ``gathered`` has
`operations.gathered_sites` beside them, ``wide`` has room for bursts of prompts
(`wide_section`), ``defaults`` has every size as headgate chooses it, and the others have an SAE of `saes`."""

SINKS = {"forget": "tests.benchmarks.sinks:ForgettingConsumer", "cut": "tests.benchmarks.sinks:CuttingConsumer"}
"""Consumers that do a part of what ``filesystem`` does."""
OTHERS = {name: f"{name}:" for name in SINKS} | {"far": "filesystem:instance_name=far,location=driver,"}
"""Consumers beside ``filesystem`` that a server may have, by what requests call them: how they are configured."""

_INIT = re.compile(r"init engine \(.*?\) took ([\d.]+) s(?:econds)?(?: \(compilation: ([\d.]+) s)?")


class Usage(NamedTuple):
    """What processes of one role have used so far, and hold now.

    Attributes:
        cpu_s: CPU seconds.
        rss: Bytes of resident memory; pages that processes share count in each.
        files: Open file descriptors.
        threads: Threads.
    """

    cpu_s: float = 0.0
    rss: int = 0
    files: int = 0
    threads: int = 0


ROLES = {"headgate.capture.capture_process": "capture", "headgate.steering.controllers": "controllers"}
"""Parts of the command lines of headgate's own processes; the others beside the API server are the engine's."""


@dataclass
class Server:
    """One server.

    Attributes:
        name: Of `FEATURES`.
        url: Its address.
        process: Its first process.
        log: Its output.
        files: Where its captures go.
        facts: What it took to start: ``start_s``, ``init_s``, ``compile_s``, ``gpu_mib``.
    """

    name: str
    url: str
    process: subprocess.Popen[bytes]
    log: Path
    files: Path
    facts: dict[str, float] = field(default_factory=dict)

    def usage(self) -> dict[str, Usage]:
        """What its processes use: ``api`` (the API server), ``engine`` (core and workers), and those of `ROLES`."""
        root = psutil.Process(self.process.pid)
        found = {"api": _usage(root)}
        for child in root.children(recursive=True):
            with suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
                command = " ".join(child.cmdline())
                role = next((role for part, role in ROLES.items() if part in command), "engine")
                before, more = found.get(role, Usage()), _usage(child)
                found[role] = Usage(*(a + b for a, b in zip(before, more, strict=True)))
        return found

    def keep_on(self, cpus: Cpus) -> None:
        """Run the API server and the engine core, with its workers, on processors of their own."""
        keep_on(self.process.pid, cpus.api)
        for child in psutil.Process(self.process.pid).children(recursive=True):
            keep_on(child.pid, cpus.engine)

    def metrics(self) -> dict[str, float]:
        """headgate's counters, summed over workers and consumers; none if there are none."""
        return counters(self._page())

    def delays(self) -> dict[str, float]:
        """Sums of what vLLM itself clocks of each request, in seconds, and their number."""
        return delays(self._page())

    def _page(self) -> str:
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=60) as answer:
            return str(answer.read().decode())

    def post(self, path: str, body: Mapping[str, Any]) -> None:
        """POST a JSON body.

        Raises:
            OSError: If it is refused.
        """
        data = json.dumps(body).encode()
        request = urllib.request.Request(f"{self.url}{path}", data, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=120) as answer:
            answer.read()

    def is_ready(self) -> bool:
        """Whether it answers.

        Raises:
            RuntimeError: If it has ended.
        """
        if self.process.poll() is not None:
            raise RuntimeError(f"{self.name} ended with status {self.process.returncode}; see {self.log}")
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=2) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False

    def drain(self, requests: float, timeout_s: float) -> float:
        """Wait until results of `requests` requests in all were reported, and say when that was.

        Raises:
            TimeoutError: If they were not in time.
        """
        return self._await("results", lambda: self.metrics().get("consumer_requests", 0), requests, timeout_s)

    def await_files(self, count: int, timeout_s: float) -> float:
        """Wait until the consumer ``far`` has published `count` files, and say when that was.

        Workers report its requests when they have sent the rows, which is earlier.

        Raises:
            TimeoutError: If they were not in time.
        """
        return self._await("files", lambda: len([*self.files.glob("far/run*/*.safetensors")]), count, timeout_s)

    def _await(self, what: str, count: Callable[[], float], wanted: float, timeout_s: float) -> float:
        deadline = time.monotonic() + timeout_s
        while (found := count()) < wanted:
            if time.monotonic() > deadline:
                raise TimeoutError(f"{self.name}: {found:.0f} of {wanted:.0f} {what} after {timeout_s} s")
            time.sleep(0.02)
        return time.monotonic()

    def clear_files(self) -> None:
        """Throw away what was captured; the next captures must go under another tag, since shards are still open."""
        for path in [*self.files.glob("run*"), *self.files.glob("far/run*")]:  # the tags of `workload`
            shutil.rmtree(path)


def _usage(process: psutil.Process) -> Usage:
    with process.oneshot():
        times = process.cpu_times()
        return Usage(times.user + times.system, process.memory_info().rss, process.num_fds(), process.num_threads())


WIDE_STAGING_BYTES = 8 << 30


def wide_section(command: Sequence[str]) -> dict[str, int]:
    """Capture's section of a server that takes bursts of prompts: two full steps on the device, several on the host."""
    step_rows = int(command[list(command).index("--max-num-batched-tokens") + 1])
    return {"ring_rows": 2 * step_rows, "staging_bytes": WIDE_STAGING_BYTES}


def stop(servers: Sequence[Server], patience_s: float = 15) -> None:
    """End servers and whatever they have started, all at once; what has not ended in time is killed."""
    families = []
    for server in servers:
        with suppress(psutil.NoSuchProcess):
            families += psutil.Process(server.process.pid).children(recursive=True)
        server.process.send_signal(signal.SIGINT)
    deadline = time.monotonic() + patience_s
    for server in servers:
        with suppress(subprocess.TimeoutExpired):
            server.process.wait(max(deadline - time.monotonic(), 0))
        server.process.kill()
        server.process.wait()
    for process in families:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    for server in servers:
        shutil.rmtree(server.files, ignore_errors=True)


def counters(page: str) -> dict[str, float]:
    """``{name: value}`` of headgate's capture counters on a page of metrics, labels summed up.

    Names are shortened: ``headgate_capture_consumer_bytes_total`` is ``consumer_bytes``.
    """
    found: dict[str, float] = {}
    for line in page.splitlines():
        if match := re.match(r"headgate_capture_(\w+?)(?:_total)?(?:\{.*\})? (\S+)$", line):
            found[match[1]] = found.get(match[1], 0.0) + float(match[2])
    return found


CLOCKED = {
    "server_ttft": "time_to_first_token_seconds",
    "queued": "request_queue_time_seconds",
    "prefilled": "request_prefill_time_seconds",
}
"""vLLM's histograms: from the request's object in the API server to its first token; of that, waiting in the engine
core, and from the first step to the first token. What a client waits beyond the first is its body's way and reading."""


DRAFTS = {"drafted": "spec_decode_num_draft_tokens_total", "accepted": "spec_decode_num_accepted_tokens_total"}
"""vLLM's counters, on servers with speculative decoding."""


def delays(page: str) -> dict[str, float]:
    """``{name: seconds}`` of `CLOCKED` on a page of metrics, ``requests``, and tokens of `DRAFTS`, summed over engines.

    What the page does not have is left out: another vLLM may call it otherwise.
    """
    series = {name: f"{histogram}_sum" for name, histogram in CLOCKED.items()}
    series["requests"] = f"{CLOCKED['server_ttft']}_count"
    series |= DRAFTS
    lines = {name: re.findall(rf"^vllm:{one}(?:\{{.*\}})? (\S+)$", page, re.MULTILINE) for name, one in series.items()}
    return {name: sum(map(float, values)) for name, values in lines.items() if values}


def publish_plugins(folder: Path) -> None:
    """Let processes that have `folder` and the repository's root on their path find `SINKS` and the step clocks."""
    about = folder / "headgate_benchmark_plugins-0.dist-info"
    about.mkdir(parents=True, exist_ok=True)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: headgate-benchmark-plugins\nVersion: 0\n")
    lines = [f"{name} = {target}" for name, target in SINKS.items()]
    lines = ["[vllm.capture_consumers]", *lines, "[vllm.general_plugins]", step_clocks.ENTRY_POINT, ""]
    (about / "entry_points.txt").write_text("\n".join(lines))


def environment(name: str, folder: Path, others: Sequence[str]) -> dict[str, str]:
    """The environment of a server; for the arguments see `start`."""
    made = {
        **os.environ,
        "PYTHONUNBUFFERED": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_USE_FLASHINFER_SAMPLER": os.environ.get("VLLM_USE_FLASHINFER_SAMPLER", "0"),  # as in `turns`
        "VLLM_CACHE_ROOT": str(folder / f"{name}.cache"),  # each compiles for itself
    }
    plugins = {"stock": "none", "installed": ""}.get(name, "headgate")
    has_clocks = bool(os.environ.get(step_clocks.FOLDER))
    if has_clocks:
        made[step_clocks.FOLDER] = str(Path(os.environ[step_clocks.FOLDER]) / name)
        plugins = plugins and f"{plugins},{step_clocks.PLUGIN}"
    if plugins:
        made["VLLM_PLUGINS"] = plugins
    if has_clocks or SINKS.keys() & set(others):
        publish_plugins(folder / "plugins")
        made["PYTHONPATH"] = os.pathsep.join([str(folder / "plugins"), os.environ.get("PYTHONPATH", "")])
    return made


def start(
    name: str,
    command: Sequence[str],
    folder: Path,
    files: Path,
    size: ModelSize,
    most: int,
    others: Sequence[str] = (),
    params: str = "",
) -> Server:
    """Start a server; it is not awaited.

    Args:
        name: Of `FEATURES`.
        command: Flags of ``vllm serve`` that all servers share, the model's among them.
        folder: For its log and its compile cache.
        files: Folder for a folder of its captures.
        size: Of the model.
        most: Requests at a time, which it can steer each in another way, where it is configured for steering.
        others: Of `OTHERS`, for a server that captures to have them, too.
        params: More of the consumer ``filesystem``: ``KEY=VALUE,...``.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    own_files = files / f"captures-{os.getpid()}-{name}"
    own_files.mkdir(parents=True)
    flags = ["--host", "127.0.0.1", "--port", str(port), "--shutdown-timeout", "10"]
    flags += steering_flags(name, folder, size, most)
    flags += capturing_flags(name, folder, size, own_files, others, params)
    if "wide" in FEATURES[name]:
        flags += ["--additional-config", json.dumps({"headgate": {"capture": wide_section(command)}})]
    log = folder / f"{name}.log"
    with log.open("wb") as target:
        process = subprocess.Popen(
            [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *command, *flags],
            stdout=target,
            stderr=subprocess.STDOUT,
            env=environment(name, folder, others),
        )
    return Server(name, f"http://127.0.0.1:{port}", process, log, own_files)


def capturing_flags(
    name: str, folder: Path, size: ModelSize, files: Path, others: Sequence[str], params: str
) -> list[str]:
    """Flags of a server that say what it captures and for which consumers; for the arguments see `start`."""
    has, layer = FEATURES[name], size.num_layers // 2
    consumers, sites = list[str](), dict[str, list[int]]()
    if "capture" in has:
        consumers += [f"filesystem:{','.join(filter(None, [f'root={files}', params]))}"]
        consumers += [f"{OTHERS[other]}root={files / other}" for other in others]
    if read := next((sae for sae in SIZES if f"read {sae}" in has), ""):
        consumers += [reading_consumer(read, folder, size)]
        sites |= {"post_mlp": [layer]}
    if "attention" in has:
        consumers += ["attention"]
        sites |= {"post_mlp": [layer], "q": [layer], "k": [layer]}
    if "lens" in has:
        consumers += ["lens"]
        sites |= {"post_mlp": sorted({layer, *size.four_layers})}
    flags = ["--capture-consumers", *consumers] if consumers else []
    return flags + (["--capture-sites", json.dumps(sites)] if sites else [])


def steering_flags(name: str, folder: Path, size: ModelSize, most: int) -> list[str]:
    """Flags of a server that say how it steers; for the arguments see `start`."""
    has, flags = FEATURES[name], list[str]()
    if "steering" in has:
        flags += ["--enable-steering"]
        flags += [] if "defaults" in has else ["--max-steering-slots", str(slots_for(size, most))]
    if "ops" in has:
        flags += ["--steering-op-sites", json.dumps(op_sites(size))]
    if "gathered" in has:
        flags += ["--steering-gather-sites", json.dumps(gathered_sites(size))]
    if "no gates" in has:
        flags += ["--max-steering-gates", "0", "--max-steering-rules", "0"]
    if "controllers" in has:
        flags += controller_flags(folder, size)
    encoded = next((sae for sae in SIZES if f"encode {sae}" in has), "")
    if encoded or "features" in has:
        flags += sae_flags(encoded, folder, size)
    return flags


def await_ready(servers: Sequence[Server], timeout_s: float) -> list[Server]:
    """Those of `servers` that come up; the others are reported and stopped."""
    began = time.monotonic()
    waiting, ready = list(servers), []
    while waiting and time.monotonic() - began < timeout_s:
        for server in list(waiting):
            try:
                if not server.is_ready():
                    continue
                seconds = time.monotonic() - began
                server.facts = {"start_s": seconds, **start_facts(server.log.read_text(errors="replace"))}
                print(f"{server.name} is ready after {seconds:.0f} s", flush=True)
                ready.append(server)
            except RuntimeError as error:
                print(f"FAILED to start: {error}\n{server.log.read_text(errors='replace')[-1500:]}", flush=True)
                stop([server], 0)
            waiting.remove(server)
        time.sleep(0.1)
    for server in waiting:
        print(f"FAILED to start: {server.name} is not ready after {timeout_s:.0f} s; see {server.log}", flush=True)
        stop([server], 0)
    return sorted(ready, key=list(servers).index)


def start_facts(log: str) -> dict[str, float]:
    """``init_s`` (profile, KV cache, warm-up) and ``compile_s``, from what vLLM logs."""
    found = _INIT.findall(log)
    names = ("init_s", "compile_s")
    return {name: float(text) for name, text in zip(names, found[-1], strict=True) if text} if found else {}


def gpu_mib_of(pids: Sequence[int]) -> float | None:
    """GPU memory of these processes and all that they have started, in MiB; None where nvidia-smi does not say."""
    try:
        shown = subprocess.run(
            ["nvidia-smi", "--query-compute-apps=pid,used_memory", "--format=csv,noheader,nounits"],
            capture_output=True,
            text=True,
            timeout=20,
            check=True,
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    family = set(pids)
    for pid in pids:
        family |= {child.pid for child in psutil.Process(pid).children(recursive=True)}
    rows = [line.split(",") for line in shown.splitlines() if line.count(",") == 1]
    numbers = [(int(pid), float(used)) for pid, used in rows if pid.strip().isdigit() and used.strip().isdigit()]
    mine = [used for pid, used in numbers if pid in family]
    return sum(mine) if mine else None
