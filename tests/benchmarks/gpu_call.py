"""One call on a GPU host, under ten minutes: ``python -m tests.benchmarks.gpu_call CALL --out FOLDER [--dry-run]``.

A call is a few steps, each a process with a limit of its own; what it prints goes to a log, of which the end is shown.
Documents, charts and one archive of logs are copied to the folder: at most `MAX_FILES` files of `MAX_BYTES` each. The
summaries come last, where a reader of the end of the output sees them. README.md beside this says which calls
there are, what they take, and in which order to run them.
"""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from tests.benchmarks.models import MODELS, write_model

MAX_FILES = 8
MAX_BYTES = 16 << 20
LIMIT_S = 575
PYTEST = ("-m", "pytest", "-q", "-s", "-p", "no:cacheprovider", "--tb=short")
WRITES_MODELS = "tests.benchmarks.models"
SANITIZED = "many_steps_under_way and one-step and bfloat16"


@dataclass(frozen=True)
class Step:
    """One process.

    Attributes:
        name: Of its log.
        command: What is run; ``{model}``, ``{work}``, ``{files}`` and ``{left}`` (seconds) are filled in.
        limit_s: When it is stopped at the latest.
        needs: A program that must be there; the step is skipped with a word where it is not.
        lines: So many of its last lines are shown.
    """

    name: str
    command: tuple[str, ...]
    limit_s: int
    needs: str = ""
    lines: int = 12


LARGE = ("gemma3-27b", "qwen3-30b-a3b")
"""Models of which only two fit on one GPU side by side."""
SIDE_BY_SIDE = {"llama3-8b": ("stock", "installed", "both"), **dict.fromkeys(LARGE, ("stock", "both"))}
"""Servers or engines of models of which five do not fit; the last one has all features."""
SMALL_MODES = (
    *("stock", "installed", "steering idle", "named", "4 configs", "16 configs", "256 configs"),
    *("capture idle", "last_prompt", "1 layer", "all layers", "both idle", "both"),
)
LARGE_MODES = ("stock", "both idle", "named", "16 configs", "256 configs", "1 layer", "all layers", "both")
FEW = ("--modes", "stock", "both idle", "16 configs", "1 layer", "both", "--columns", "bs1", "bs16", "prefill")
ROOM = ("--kv-gib", "3", "--engine", '{{"max_num_batched_tokens": 4096}}')
"""Two large models leave 10 GB: with usual settings their prompts may have to free memory in order to get some."""
MAIN_MODES = ("stock", "installed", "both idle", "16 msgpack", "1 layer", "all layers")
PARTS_MODES = ("stock", "installed", "both idle", "1 layer forgotten", "1 layer cut", "1 layer", "1 layer far")
STEPS_MODES = ("stock", "both idle", "1 layer forgotten", "1 layer", "1 layer far", "16 msgpack")
OPS_MODES = ("stock", "ops idle", "4 ops")
GATE_SERVERS = ("stock", "no gates", "ops")
GATE_MODES = ("stock", "ops idle, no gates", "ops idle", "1 vector, no gates", "1 vector", "1 gate", "1 loop")
CONTROLLER_SERVERS = ("stock", "ops", "controllers")
CONTROLLER_MODES = ("stock", "ops idle", "controllers idle", "controllers watch", "controllers hold")
GATE_STEPS_MODES = ("stock", "ops idle", "1 vector", "1 gate", "1 loop", *CONTROLLER_MODES[3:])
SAE_SERVERS = ("stock", "features", "encode 16k", "encode 65k")
SAE_MODES = ("stock", "features idle", "16 features", "encode 16k idle", "encode 16k", "encode 65k idle", "encode 65k")
TOP_K_SERVERS = ("stock", "encode 80k", "read 16k", "read 80k")
TOP_K_MODES = ("stock", "encode 80k idle", "80k edits", "encode 80k", "read 16k", "read 80k idle", "read 80k")
ATTENTION_SERVERS = ("stock", "capture", "attention")
ATTENTION_MODES = ("stock", "capture idle", "attention idle", "attention", "attention rows")
READING_SERVERS = ("stock", "reading", "read 80k", "encode 80k")
READING_MODES = (
    *("stock", "attention idle", "attention", "lens", "lens, 4 layers", "read 80k idle", "read 80k"),
    *("encode 80k idle", "80k edits"),
)
TOP_K_CASES = ("--cases", *map(str, range(40, 48)))
"""Of `bench_reconstruction`: the SAE of 80k features."""
CROWD_SERVERS = ("stock", "both", "wide")
CROWD_MODES = ("stock", "both idle", "last_prompt", "1 layer", "4 layers", "all layers", "all layers, wide")
CROWD_SETTING = ("--kv-gib", "16", "--capture-params", "memory_bytes=25769803776")
"""Among others, memory for the rows of running requests; see docs/performance.md."""
DEFAULTS_MODES = (
    *("stock", "defaults idle", "vector shared", "1 gate", "ablation shared", "64 configs, 34 sites"),
    *("last_prompt", "1 layer", "all layers"),
)
DEFAULTS = ("--servers", "stock", "defaults", "--kv-gib", "16")
"""Servers as users have them: sizes by headgate, and nothing has processors of its own."""
OPEN_SHAPES = ("open-50", "open-70", "open-90")
OPEN_MODES = ("stock", "defaults idle", "vector shared", "1 gate", "1 layer", "all layers")
DRAFTS_MODES = ("stock", "defaults idle", "vector shared", "1 gate", "1 layer")
NGRAM = '{{"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 2, "prompt_lookup_max": 4}}'
EAGLE = '{{"method": "eagle3", "model": "{work}/llama3-8b-eagle3", "num_speculative_tokens": 3}}'
INLINE_MODES = ("stock", "both idle", "16 configs", "16 msgpack", "256 configs", "256 msgpack")


def pytest_step(name: str, limit_s: int, *arguments: str, lines: int = 12) -> Step:
    """Tests of the repository."""
    return Step(name, (sys.executable, *PYTEST, "--basetemp={work}/pytest-" + name, *arguments), limit_s, lines=lines)


def sanitized(tool: str, limit_s: int) -> Step:
    """The staging ring's tests under a tool of compute-sanitizer; an error that it finds is the exit status."""
    checker = ("compute-sanitizer", "--tool", tool, "--error-exitcode", "86", "--print-limit", "20")
    tests = (*PYTEST, "tests/gpu/test_staging_cuda.py", "-k", SANITIZED)
    return Step(tool, (*checker, sys.executable, *tests), limit_s, needs="compute-sanitizer", lines=6)


def http(name: str, shapes: Sequence[str], limit_s: int, *more: str, can_pin: bool = True) -> Step:
    """The suite over HTTP; with `can_pin`, on eight processors or more, what runs at once has processors of its own."""
    command = (sys.executable, "-m", "tests.benchmarks.suite_http", "{model}", "{work}", "--name", name)
    pin = ("--pin",) if can_pin and (os.cpu_count() or 1) >= 8 else ()
    options = (*pin, "--seconds", "{left}", "--files", "{files}", "--shapes", *shapes, *more)
    return Step(name, (*command, *options), limit_s, lines=60)


def steps(name: str, shape: str, limit_s: int, *more: str, server: str = "both") -> Step:
    """The suite over HTTP with clocks in the engine cores."""
    found = http(name, [shape], limit_s, "--servers", "stock", server, *more)
    command = tuple(part.replace("suite_http", "profile_steps") for part in found.command)
    return replace(found, command=command)


def suite(name: str, limit_s: int, *more: str) -> Step:
    """The suite of engines."""
    command = (sys.executable, "-m", "tests.benchmarks.suite", "{model}", "{work}/" + name, "--name", name)
    return Step(name, (*command, "--seconds", "{left}", "--files", "{files}", *more), limit_s, lines=24)


def drafts(name: str, shape: str, speculative_config: str = "") -> Step:
    """The suite over HTTP, all servers with one ``--speculative-config``, or with none."""
    flags = ("--flags", "--speculative-config", speculative_config) if speculative_config else ()
    return http(name, [shape], LIMIT_S, *DEFAULTS, "--modes", *DRAFTS_MODES, *flags)


def kernels(*more: str) -> Step:
    """Kernel times of idle engines."""
    command = (sys.executable, "-m", "tests.benchmarks.bench_kernels", "{model}", "{work}/kernels", *more)
    return Step("kernels", command, 420, lines=24)


def verify() -> Step:
    """What a user runs: stock twice, headgate idle, in use, and in eager mode, one engine after the other."""
    program = "from headgate.capture.cli import main; main()"
    engine = ("--load-format", "dummy", "--max-model-len", "4096", "--max-num-seqs", "64")
    report = ("--json", "{work}/verify.json", "--repeats", "0")
    return Step("verify", (sys.executable, "-c", program, "verify", "{model}", *engine, *report), 560, lines=30)


DISK = Step(
    "disk",
    (
        *("bash", "-c"),
        "dd if=/dev/zero of={files}/disk.tmp bs=4M count=500 oflag=direct 2>&1 | tail -1; rm {files}/disk.tmp; "
        "df -h {files} | tail -1",
    ),
    60,
    lines=2,
)
"""How fast the disk for captures takes 2 GB."""


RING = tuple(
    f"tests/gpu/test_{name}_cuda.py" for name in ("staging", "staging_stress", "readouts", "signals", "value_upload")
)
SETTINGS = ("-rs", "tests/gpu/test_idle_settings_gpu.py")
ON_TWO = ("--variants", "stock", "both", *FEW)
GATHERED = (
    *("--variants", "stock", "ops", "gathered", "--modes", "stock", "ops idle", "gathered idle"),
    *("--columns", "bs1", "bs16", "bs64", "prefill"),
)
ANY_MODEL = {
    "check": [
        pytest_step("staging", 120, *RING),
        pytest_step("kernels", 60, "tests/kernels"),
        pytest_step("capture", 240, "tests/gpu/test_capture_gpu.py"),
        pytest_step("steering", 300, "tests/gpu/test_steering_gpu.py"),
        sanitized("memcheck", 120),
        sanitized("racecheck", 90),
    ],
    "idle": [pytest_step("idle", 450, "tests/gpu/test_idle_gpu.py", lines=24)],
    "soak": [
        pytest_step("staging", 100, *RING),
        pytest_step("soak", 330, "tests/gpu/test_soak_gpu.py", lines=24),
    ],
    "idle-settings": [pytest_step("idle-settings", 560, *SETTINGS, "-k", "not two_gpus", lines=50)],
    "idle-parallel": [pytest_step("idle-parallel", 560, *SETTINGS, "-k", "two_gpus", lines=30)],
    "drafts-soak": [pytest_step("drafts-soak", 540, "tests/gpu/test_draft_soak_gpu.py", lines=24)],
    "changes": [pytest_step("changes", 450, "tests/gpu/test_changes_gpu.py", lines=24)],
    "race": [sanitized("memcheck", 120), sanitized("racecheck", 300)],
    "verify": [verify()],
    "models": [
        Step(
            "models",
            (sys.executable, "-m", "tests.engine.architectures", "{work}/architectures.json", "--at-once", "6", "gpu"),
            300,
            lines=24,
        )
    ],
    "quantised": [
        pytest_step("offloading", 120, "tests/gpu/test_kv_offloading_gpu.py", lines=24),
        pytest_step("quantised", 300, "tests/gpu/test_quantised_gpu.py", lines=40),
    ],
    "lora-fp8": [pytest_step("lora-fp8", 300, "tests/gpu/test_lora_fp8_gpu.py", lines=24)],
    "dynamic": [pytest_step("dynamic", 420, "tests/gpu/test_dynamic_gpu.py", lines=24)],
    "memory": [pytest_step("memory", 450, "tests/gpu/test_memory_gpu.py", lines=24)],
    "http-crowd": [
        DISK,
        http("http-crowd", ["crowd"], LIMIT_S, *CROWD_SETTING, "--servers", *CROWD_SERVERS, "--modes", *CROWD_MODES),
    ],
    "crowd": [http("crowd", ["crowd"], LIMIT_S, *DEFAULTS, "--modes", *DEFAULTS_MODES, can_pin=False)],
    "drafts-cost": [drafts("drafts", "repeats", NGRAM)],
    "plain-cost": [drafts("plain", "repeats")],
    "eagle-cost": [
        Step("eagle-model", (sys.executable, "-m", WRITES_MODELS, "{work}", "llama3-8b-eagle3"), 60),
        drafts("eagle", "chat", EAGLE),
    ],
    "crowd-open": [http("crowd-open", OPEN_SHAPES, LIMIT_S, *DEFAULTS, "--modes", *OPEN_MODES, can_pin=False)],
    "crowd-steps": [steps("crowd-steps", "crowd", LIMIT_S, *CROWD_SETTING, "--modes", *CROWD_MODES, server="wide")],
    "gates": [http("gates", ["decode"], LIMIT_S, "--servers", *GATE_SERVERS, "--modes", *GATE_MODES)],
    "controllers": [
        http("controllers", ["decode"], LIMIT_S, "--servers", *CONTROLLER_SERVERS, "--modes", *CONTROLLER_MODES)
    ],
    "gate-steps": [steps("gate-steps", "decode-512", LIMIT_S, "--modes", *GATE_STEPS_MODES, server="controllers")],
    "saes": [http("saes", ["decode"], LIMIT_S, "--servers", *SAE_SERVERS, "--modes", *SAE_MODES)],
    "lens": [
        pytest_step("lens-cuda", 60, "tests/gpu/test_lens_cuda.py", "tests/gpu/test_readouts_cuda.py"),
        Step("lens", (sys.executable, "-m", "tests.benchmarks.bench_lens", "--model", "{model}"), 400, lines=12),
    ],
    "top-k": [
        pytest_step("features-cuda", 60, "tests/gpu/test_features_cuda.py"),
        Step("selects", (sys.executable, "-m", "tests.benchmarks.bench_reconstruction", *TOP_K_CASES), 60),
        Step("reads", (sys.executable, "-m", "tests.benchmarks.bench_reconstruction", "--read", *TOP_K_CASES), 90),
        http("top-k", ["decode"], LIMIT_S, "--servers", *TOP_K_SERVERS, "--modes", *TOP_K_MODES),
    ],
    "attention": [
        http("attention", ["chat"], LIMIT_S, "--servers", *ATTENTION_SERVERS, "--modes", *ATTENTION_MODES),
    ],
    "reading": [http("reading", ["chat"], LIMIT_S, "--servers", *READING_SERVERS, "--modes", *READING_MODES)],
    "parallel": [
        pytest_step("two-gpus", 400, "tests/gpu/test_parallel_gpu.py", lines=16),
        pytest_step("experts", 330, "tests/gpu/test_experts_gpu.py", lines=16),
    ],
    "gathered-cost": [suite("gathered", LIMIT_S, "--tp", "2", *GATHERED)],
    "parallel-cost": [suite("tensor", 280, "--tp", "2", *ON_TWO), suite("pipeline", 280, "--pp", "2", *ON_TWO)],
}
"""Calls whose steps do not depend on the model."""


def steps_of(call: str, model: str) -> list[Step]:
    """The steps of a call.

    Raises:
        ValueError: If there is no such call.
    """
    few = SIDE_BY_SIDE.get(model, ())
    modes = ("--modes", *(("installed",) if "installed" in few else ()), *LARGE_MODES) if few else ()
    servers, engines = (("--servers", *few), ("--variants", *few)) if few else ((), ())
    three = ("--servers", "stock", "installed", "both", "--modes", *MAIN_MODES)
    own = (*FEW, *ROOM) if model in LARGE else modes or ("--modes", *SMALL_MODES)
    calls = {
        **ANY_MODEL,
        "kernels": [kernels(*(("--variants", "stock", "both") if few else ()))],
        "http-inline": [
            http("http-inline", ["chat"], LIMIT_S, "--servers", "stock", "both", "--modes", *INLINE_MODES),
        ],
        "http": [DISK, http("http", ["chat", "prefill"], LIMIT_S, *servers, *modes)],
        "http-decode": [
            DISK,
            http("http-decode", ["decode"], LIMIT_S, "--servers", "stock", "both", "--modes", *LARGE_MODES),
        ],
        "http-parts": [
            http("http-parts", ["short"], LIMIT_S, "--servers", "stock", "installed", "both", "--modes", *PARTS_MODES),
        ],
        "steps": [steps("steps", "short", LIMIT_S, "--modes", *STEPS_MODES)],
        "ops": [
            kernels("--variants", "stock", "ops"),
            http("ops", ["decode"], LIMIT_S, "--servers", "stock", "ops", "--modes", *OPS_MODES),
        ],
        "http-main": [DISK, http("http-main", ["chat", "decode"], LIMIT_S, *three)],
        "suite": [DISK, suite(model, LIMIT_S, *engines, *own)],
        "tiny": [
            pytest_step("pure", 120, "tests/unit/benchmarks/test_benchmarks.py"),
            http("tiny", ["tiny"], LIMIT_S, "--servers", "stock", "both", "--modes", "stock", "both", "--rounds", "1"),
        ],
    }
    if call not in calls:
        raise ValueError(f"no call {call!r}; known: {', '.join(calls)}")
    return calls[call]


@dataclass
class Outcome:
    """What came of a step."""

    step: Step
    status: str
    seconds: float
    tail: str


class Runner:
    """Runs the steps of a call.

    Args:
        options: Of the command line.
    """

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        self._began = time.monotonic()
        self._model: Path = options.folder
        self._work: Path = options.work

    @property
    def left_s(self) -> float:
        """Seconds of the call that are left."""
        return float(self._options.seconds) - (time.monotonic() - self._began)

    def command(self, step: Step, limit_s: float) -> list[str]:
        """What is run; a benchmark ends by itself a little before it is stopped."""
        filled = {"model": self._model, "work": self._work, "files": self._options.files, "left": int(limit_s - 25)}
        command = [part.format(**filled) for part in step.command]
        benchmark = step.command[1:2] == ("-m",) and step.command[2] not in ("pytest", WRITES_MODELS)
        last = command.index("--flags") if "--flags" in command else len(command)
        return [*command[:last], *(self._options.more if benchmark else []), *command[last:]]

    def run(self, step: Step) -> Outcome:
        """One step, to its end or to its limit."""
        limit_s, began = min(step.limit_s, self.left_s - 8), time.monotonic()
        if step.needs and shutil.which(step.needs) is None:
            return Outcome(step, f"skipped: {step.needs} is not on this machine", 0, "")
        if limit_s < 30:
            return Outcome(step, f"skipped: {limit_s:.0f} s are left", 0, "")
        log = self._work / f"{step.name}.log"
        environment = {**os.environ, "GPU_TEST_MODEL": str(self._model), "SOAK_TIMEOUT_S": str(int(limit_s - 20))}
        print(f"== {step.name}: at most {limit_s:.0f} s", flush=True)
        with log.open("wb") as target:
            process = subprocess.Popen(
                self.command(step, limit_s),
                stdout=target,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
            )
            status = wait(process, limit_s)
        lines = log.read_text(errors="replace").strip().splitlines()
        tail = "\n".join(line[:400] for line in lines[-step.lines :])
        print(f"== {step.name}: {status}", flush=True)
        return Outcome(step, status, time.monotonic() - began, tail)

    def collect(self) -> None:
        """Copy documents and charts, and all logs in one archive."""
        out: Path = self._options.out
        out.mkdir(parents=True, exist_ok=True)
        found = sorted([*self._work.rglob("*.json"), *self._work.rglob("*.png")])
        found = [path for path in found if not any(part.endswith(".cache") for part in path.parts)]
        small = [path for path in found if path.stat().st_size <= MAX_BYTES and "pytest-" not in str(path)]
        for path in small[: MAX_FILES - 1]:
            shutil.copy(path, out / path.name)
        with tarfile.open(out / f"logs-{self._options.call}-{self._options.model}.tgz", "w:gz") as archive:
            for path in sorted(self._work.rglob("*.log")):
                if path.stat().st_size <= MAX_BYTES:
                    archive.add(path, str(path.relative_to(self._work)))


def wait(process: subprocess.Popen[bytes], limit_s: float) -> str:
    """How it ended. At the limit it is asked to end, and then it is killed with all that it has started."""
    try:
        code = process.wait(limit_s)
        return "passed" if code == 0 else f"FAILED with status {code}"
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            process.wait(5)
        return f"FAILED: stopped after {limit_s:.0f} s"
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def read_options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line.

    Raises:
        SystemExit: If it is wrong.
    """
    parser = argparse.ArgumentParser(prog="gpu_call", description="One call on a GPU host, under ten minutes.")
    parser.add_argument(
        "call",
        help="check, race, idle, idle-settings, idle-parallel, soak, drafts-soak, drafts-cost, eagle-cost, "
        "plain-cost, changes, lora-fp8, models, quantised, verify, "
        "memory, kernels, http, http-main, http-crowd, "
        "crowd, crowd-open, "
        "http-parts, http-inline, ops, gates, saes, http-decode, suite, parallel, parallel-cost, or tiny: a trial",
    )
    parser.add_argument("model", nargs="?", default="gemma3-4b", help=f"of {', '.join(MODELS)} (default: gemma3-4b)")
    parser.add_argument("--layers", type=int, help="so many of the model's layers: engines start sooner")
    parser.add_argument("--out", type=Path, required=True, help="folder for what is kept")
    parser.add_argument("--work", type=Path, help="folder for everything else (default: in /tmp, named after the call)")
    parser.add_argument(
        "--models", type=Path, default=Path("/tmp/models"), help="folder of model folders; made if missing"
    )
    parser.add_argument("--files", type=Path, default=Path("/tmp"), help="folder for captures, on the disk to measure")
    parser.add_argument("--seconds", type=float, default=LIMIT_S, help=f"for the whole call (default: {LIMIT_S})")
    parser.add_argument("--dry-run", action="store_true", help="print the commands and end")
    parser.add_argument("--more", nargs=argparse.REMAINDER, default=[], help="last: other options of the benchmarks")
    options = parser.parse_args(arguments)
    if options.call == "tiny":
        options.model = "tiny"
    options.work = options.work or Path(f"/tmp/gpu-call-{options.call}-{options.model}")
    if options.model not in MODELS:
        parser.error(f"no model {options.model!r}; known: {', '.join(MODELS)}")
    options.folder = options.models / (f"{options.model}-{options.layers}" if options.layers else options.model)
    try:
        options.steps = steps_of(options.call, options.model)
    except ValueError as error:
        parser.error(str(error))
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a call; returns the exit status: 0 if every step passed or was skipped."""
    options = read_options(arguments)
    runner = Runner(options)
    if options.dry_run:
        for step in options.steps:
            print(f"{step.name} ({step.limit_s} s): {shlex.join(runner.command(step, step.limit_s))}")
        return 0
    options.work.mkdir(parents=True, exist_ok=True)
    if not (options.folder / "config.json").exists():
        write_model(options.model, options.folder, **({"num_hidden_layers": options.layers} if options.layers else {}))
    outcomes = []
    for step in options.steps:
        outcomes.append(runner.run(step))
        runner.collect()  # after each step: a call that is cut off has what came before
    for outcome in outcomes:
        print(f"\n== {outcome.step.name}: {outcome.status}", outcome.tail, sep="\n")
    print("\n" + "\n".join(f"{one.step.name:12} {one.seconds:5.0f} s  {one.status}" for one in outcomes), flush=True)
    return int(any(outcome.status.startswith("FAILED") for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main())
