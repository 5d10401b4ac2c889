"""The server of the chaos run, its processes and its faults."""

from __future__ import annotations

import json
import os
import re
import signal
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, NamedTuple

import httpx

from headgate.capture.links.hub import PREFIX
from tests.chaos import consumers, notes
from tests.chaos.workload import MODEL_NAME, STEERED_SITES, STEERING, module_body, module_name
from tests.deadlines import patience
from tests.fakes.server import Server, serving

ROOT = Path(__file__).resolve().parents[2]
ROLES = {"engine": "VLLM::EngineCor", "worker": "VLLM::Worker", "api": "VLLM::APIServer"}
"""What Linux calls the processes, in 15 letters."""
NUM_API_SERVERS = 2
NUM_BLOCKS = 24
"""KV blocks of the server, each of 32 tokens: too few for its 48 sequences, so that vLLM preempts some."""
END_S = 60.0
"""Whatever ends, or becomes idle, does so in this time on a quiet machine."""


class Process(NamedTuple):
    """One process of a server: its number, Linux' name for it, its resident memory and the processor time it took."""

    pid: int
    name: str
    rss_mib: float
    cpu_s: float


class Fleet:
    """Starts a server on a folder, harms it, and starts it again.

    Attributes:
        server: The one that runs, or None.
        files: Roots of the consumers that write files, by their names.
        temp: Where the server's temporary files go.
        notes: Where its consumers note what they do.
    """

    def __init__(self, folder: Path, model: Path, start_method: str) -> None:
        self.server: Server | None = None
        self.files = {"filesystem": folder / "files", "far": folder / "far"}
        # The names of sockets may have 107 characters, which the folder of a test may fill alone.
        self.temp = Path(tempfile.mkdtemp(prefix="chaos-"))
        self.notes = folder / "notes"
        self.notes.mkdir(parents=True)
        self._folder, self._model, self._start_method = folder, model, start_method
        self._control = folder / "control.json"
        self._stack = ExitStack()
        self._publish()
        self.set()

    def _publish(self) -> None:
        about = self._folder / "site" / "headgate_chaos-0.dist-info"
        about.mkdir(parents=True)
        (about / "METADATA").write_text("Metadata-Version: 2.1\nName: headgate-chaos\nVersion: 0\n")
        (about / "entry_points.txt").write_text(consumers.ENTRY_POINTS)

    def set(self, **values: Any) -> None:
        """Set the machine's faults, see `sitecustomize`; those that are not named are over."""
        draft = self._control.with_suffix(".new")
        draft.write_text(json.dumps(values))
        draft.rename(self._control)

    def start(self) -> Server:
        """Start the server and register the modules.

        What killed processes left in the folder for temporary files counts as old, so that the new server sweeps it.
        """
        for folder in self.temp.glob(f"{PREFIX}*"):
            os.utime(folder, (0, 0))
        path = [str(ROOT / "tests" / "chaos"), str(self._folder / "site"), str(ROOT)]
        environment = {
            "CHAOS_CONTROL": str(self._control),
            notes.FOLDER: str(self.notes),
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join([*path, *filter(None, [os.environ.get("PYTHONPATH")])]),
            "PYTHONDONTWRITEBYTECODE": "",
            "TMPDIR": str(self.temp),
            # A connection that idles for longer is closed, perhaps while the client sends its next request through it.
            "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": "600",
            "VLLM_PLUGINS": "headgate",
            "VLLM_WORKER_MULTIPROC_METHOD": self._start_method,
        }
        serves = serving(self._command(), num_servers=NUM_API_SERVERS, log_lines=100_000, **environment)
        self.server = self._stack.enter_context(serves)
        for key in STEERING:
            answer = self.server.post("/v1/steering/modules/register", **module_body(key))
            assert answer.status_code == 200, answer.text
        return self.server

    def _command(self) -> list[str]:
        stall = f"max_stall_s={consumers.MAX_STALL_S}"
        tight = f"{stall},queue_bytes=20000"
        sites = dict.fromkeys(("pre_attn", "post_attn", "post_mlp", "final_norm"), "all")
        return [
            *("-c", "from headgate.capture.cli import main; main()", "serve", str(self._model)),
            *("--served-model-name", MODEL_NAME, "--dtype", "float32", "--enforce-eager", "--block-size", "32"),
            *("--max-num-seqs", "48", "--max-num-batched-tokens", "256", "--api-server-count", str(NUM_API_SERVERS)),
            *("--num-gpu-blocks-override", str(NUM_BLOCKS)),
            *("--enable-steering", "--max-steering-slots", "96", "--capture-sites", json.dumps(sites)),
            *("--steering-sites", json.dumps({hook.value: "all" for hook in STEERED_SITES})),
            "--capture-consumers",
            *(f"filesystem:root={self.files['filesystem']}", "inline"),
            f"filesystem:instance_name=far,location=driver,root={self.files['far']}",
            *(f"moody:{stall}", f"moody:instance_name=far_moody,location=driver,{stall}", f"trickle:{stall}"),
            f"moody:instance_name=spilling,overload=spill,{tight}",
            f"moody:instance_name=dropping,overload=drop,{tight}",
        ]

    def processes(self) -> list[Process]:
        """Those of the server that run, its own and all that it has started."""
        return [] if self.server is None else list(_session(self.server.pid))

    def pids(self, role: str) -> list[int]:
        """The processes of one of `ROLES`."""
        return sorted(process.pid for process in self.processes() if process.name == ROLES[role])

    def await_end(self) -> list[Process]:
        """Wait until every process of the server has ended; returns those that have not in `END_S`."""
        until = time.monotonic() + patience(END_S)
        while (left := self.processes()) and time.monotonic() < until:
            time.sleep(0.1)
        return left

    def stop(self) -> list[Process]:
        """End the server as its operator does; returns the processes that do not end."""
        if self.server is not None:
            os.kill(self.server.pid, signal.SIGINT)
        return self.close()

    def close(self) -> list[Process]:
        """Wait for the end of a server that ends, and clear away; returns the processes that do not end."""
        left = self.await_end()
        self._stack.close()
        self.server = None
        return left

    def holdings(self) -> Counter[str]:
        """Threads and open files of all processes, by what they are, without the numbers in their names.

        Left out are what grows up to a bound by itself: pools of threads, and the folders that a store keeps open.
        """
        names = [f"{process.name}: {name}" for process in self.processes() for name in _held(process.pid)]
        roots = tuple(str(root) for root in self.files.values())
        return Counter(re.sub("[0-9]+", "", name) for name in names if not _is_bounded(name, roots))

    def idle_state(self) -> dict[str, float]:
        """What a server without requests has always as much of: queued rows, reserved slots and so on."""
        assert self.server is not None
        metrics = self._metrics()
        state = defaultdict(float, {family: metrics[family] for family in _NONE_WHEN_IDLE if family in metrics})
        steering = httpx.get(f"{self.server.url}/v1/steering", timeout=patience(30), trust_env=False).json()
        assert set(steering["modules"]) == {module_name(key) for key in STEERING}
        for slots in steering["slots"]:
            state["waiting"] += slots["waiting"]
            state["reserved"] += slots["reserved"]
        return dict(state)

    def num_preempted(self) -> int:
        """Requests that lost their KV blocks to others so far, as often as they did."""
        return int(self._metrics()["vllm:num_preemptions_total"])

    def _metrics(self) -> dict[str, float]:
        """Metrics by family, the sums over their labels."""
        assert self.server is not None
        found: defaultdict[str, float] = defaultdict(float)
        for line in httpx.get(f"{self.server.url}/metrics", timeout=patience(30), trust_env=False).text.splitlines():
            name, _, value = line.rpartition(" ")
            if not line.startswith("#"):
                found[name.partition("{")[0]] += float(value)
        return found


_POOLS = ("ThreadPoolExec", "asyncio_", "AnyIO worker", "headgate-beside")


def _held(pid: int) -> Iterator[str]:
    """Names of a process's threads and open files."""
    with suppress(FileNotFoundError, ProcessLookupError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            with suppress(FileNotFoundError, ProcessLookupError):
                yield (task / "comm").read_text().strip()
        for file in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(FileNotFoundError, ProcessLookupError):
                yield str(file.readlink())


def _is_bounded(name: str, roots: tuple[str, ...]) -> bool:
    is_kept_folder = any(f": {root}/" in name for root in roots) and "/.tmp" not in name
    return is_kept_folder or any(f": {pool}" in name for pool in _POOLS)


_NONE_WHEN_IDLE = {
    "headgate_capture_staged_bytes",
    "headgate_capture_consumer_queue_bytes",
    "headgate_capture_consumer_spill_bytes",
    "headgate_capture_consumer_hung",
    "headgate_capture_dispatch_errors_total",
    "headgate_capture_consumer_lost_results_total",
    "headgate_steering_requests_running",
    "headgate_steering_requests_waiting",
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
}


def _session(leader: int) -> Iterator[Process]:
    page = os.sysconf("SC_PAGE_SIZE") / 2**20
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            name, _, rest = (folder / "stat").read_text().partition("(")[2].rpartition(")")
            fields = rest.split()
            if fields[0] != "Z" and int(fields[3]) == leader:
                cpu_s = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
                yield Process(int(folder.name), name, int(fields[21]) * page, cpu_s)
        except (FileNotFoundError, ProcessLookupError):
            continue  # it has ended meanwhile
