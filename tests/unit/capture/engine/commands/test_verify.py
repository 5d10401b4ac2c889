"""``headgate verify`` as a command: engines in turn, exit statuses, the report, and what is left behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest
from typer.testing import CliRunner, Result

from headgate.capture.engine.commands import verify as command
from headgate.capture.engine.commands import verify_engine
from headgate.capture.engine.commands.verify import environment, kinds_to_run, run_engine, split_flags
from headgate.capture.monitoring.verify_checks import EAGER, IDLE, SERVED, STOCK, Recording
from headgate.capture.schema.errors import ConfigError
from tests.deadlines import patience
from tests.fakes.verify_engines import PARTS, ToyEngine, Wrong, steers

Job = dict[str, Any]
Invoke = Callable[..., Result]


class Engines:
    """Stands for `run_engine`: runs toy engines in this process, and keeps the jobs."""

    def __init__(self) -> None:
        self.jobs: list[Job] = []
        self.caches: list[str | None] = []
        self.graph_mode = "FULL"
        self.load_format = "auto"
        self.wrong = Wrong()
        self.step_ms: dict[str, float] = {STOCK: 2.0, IDLE: 2.01}
        self.ends: dict[str, tuple[int | None, str]] = {}

    def __call__(self, file: Path, log: Path, env: Mapping[str, str], timeout_s: float) -> int | None:
        job = json.loads(file.read_text())
        self.jobs.append(job)
        self.caches.append(env.get("VLLM_CACHE_ROOT"))
        kind = job["kind"]
        status, text = self.ends.get(kind, (0, "fine"))
        log.write_text(text)
        if status != 0:
            return status
        earlier = msgspec.msgpack.decode(Path(job["earlier"]).read_bytes(), type=Recording) if job["earlier"] else None
        recording = ToyEngine(kind, self.wrong if kind == SERVED else Wrong(), earlier).record()
        step_ms = {1: [self.step_ms[kind]] * 3} if job["is_timed"] else {}
        facts = msgspec.structs.replace(recording.facts, graph_mode=self.graph_mode, load_format=self.load_format)
        recording = msgspec.structs.replace(recording, step_ms=step_ms, facts=facts)
        Path(job["out"]).write_bytes(msgspec.msgpack.encode(recording))
        return 0


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch) -> Engines:
    made = Engines()
    monkeypatch.setattr(command, "run_engine", made)
    monkeypatch.setattr(command, "check_parts", lambda: PARTS)
    monkeypatch.setenv("COLUMNS", "250")
    return made


@pytest.fixture
def invoke(engines: Engines) -> Invoke:
    def call(*arguments: str) -> Result:
        return CliRunner().invoke(command.verify, list(arguments))

    return call


def test_all_is_well(invoke: Invoke, engines: Engines, tmp_path: Path) -> None:
    result = invoke("my/model", "--tensor-parallel-size", "2", "--json", str(tmp_path / "r.json"), "--dtype=float32")

    assert result.exit_code == 0, result.output
    assert [job["kind"] for job in engines.jobs] == [STOCK, IDLE, STOCK, SERVED, EAGER]
    arguments = ["--model", "my/model", "--tensor-parallel-size", "2", "--dtype=float32"]
    assert all(job["arguments"] == arguments for job in engines.jobs)
    assert "every token gets its own vector" in result.output
    assert "flags: --tensor-parallel-size 2 --dtype=float32" in result.output
    report = json.loads((tmp_path / "r.json").read_text())
    assert report["is_passed"]
    assert {verdict["status"] for verdict in report["verdicts"]} == {"passed"}
    assert report["flags"] == arguments[2:]
    assert [kind for kind, _ in report["start_s"]] == kinds_to_run(1)


def test_a_check_that_fails_is_the_exit_status(invoke: Invoke, engines: Engines, tmp_path: Path) -> None:
    engines.wrong = Wrong(steers=lambda name, site, *at: steers(name, site, *at) and site.name != "1.post_attn")

    result = invoke("my/model", "--repeats", "0", "--json", str(tmp_path / "r.json"))

    assert result.exit_code == 1
    assert "no effect at 1.post_attn" in result.output
    assert "NOT verified" in result.output
    assert not json.loads((tmp_path / "r.json").read_text())["is_passed"]
    assert [job["kind"] for job in engines.jobs] == [STOCK, STOCK, SERVED, EAGER]
    assert "idle cost" not in result.output


@pytest.mark.parametrize(
    ("graph_mode", "repeats", "kinds"),
    [
        ("FULL", 0, [STOCK, STOCK, SERVED, EAGER]),
        ("FULL", 2, [STOCK, IDLE, STOCK, IDLE, STOCK, SERVED, EAGER]),
        ("NONE", 0, [STOCK, SERVED, EAGER]),
        ("NONE", 1, [STOCK, IDLE, STOCK, SERVED, EAGER]),
    ],
)
def test_where_kernels_are_chosen_by_time_the_last_stock_engine_is_compiled_anew(
    invoke: Invoke, engines: Engines, graph_mode: str, repeats: int, kinds: list[str]
) -> None:
    engines.graph_mode = graph_mode

    invoke("my/model", "--repeats", str(repeats))

    assert [job["kind"] for job in engines.jobs] == kinds
    usual = os.environ.get("VLLM_CACHE_ROOT")
    last = len(kinds) - 1 - kinds[::-1].index(STOCK)
    anew = [index for index, cache in enumerate(engines.caches) if cache != usual]
    assert anew == ([last] if graph_mode == "FULL" else [])


@pytest.mark.parametrize(
    ("flags", "status"),
    [((), 0), (("--strict",), 1), (("--max-idle-cost", "5"), 1), (("--max-idle-cost", "15"), 0)],
)
def test_idle_cost_warns_unless_a_limit_is_set(
    invoke: Invoke, engines: Engines, flags: tuple[str, ...], status: int
) -> None:
    engines.step_ms[IDLE] = 2.2

    result = invoke("my/model", *flags)

    assert result.exit_code == status
    assert "+10.0 % per token" in result.output


def test_an_engine_that_does_not_start_is_shown_with_its_log(invoke: Invoke, engines: Engines, tmp_path: Path) -> None:
    engines.ends[SERVED] = (1, "one line\nSelfTestError: sites 3.post_mlp did not respond")

    result = invoke("my/model", "--json", str(tmp_path / "r.json"))

    assert result.exit_code == 1
    assert "the engine 4-served ended with status 1" in result.output
    assert "SelfTestError: sites 3.post_mlp did not respond" in result.output
    report = json.loads((tmp_path / "r.json").read_text())
    assert not report["is_passed"]
    assert "every engine starts and serves" in [verdict["check"] for verdict in report["verdicts"]]


def test_an_engine_that_takes_too_long_is_a_failure(invoke: Invoke, engines: Engines) -> None:
    engines.ends[STOCK] = (None, "Loading weights")

    result = invoke("my/model", "--timeout", "7")

    assert result.exit_code == 1
    assert "the engine 1-stock took more than 7 s" in result.output


def test_arguments_that_vllm_does_not_take_are_bad_usage(invoke: Invoke, engines: Engines) -> None:
    engines.ends[STOCK] = (
        verify_engine.USAGE_STATUS,
        "usage: ...\nheadgate verify: error: unrecognized arguments: --x",
    )

    result = invoke("my/model", "--x")

    assert result.exit_code == 2
    assert "unrecognized arguments: --x" in result.output
    assert command.USAGE_STATUS == verify_engine.USAGE_STATUS


@pytest.mark.parametrize(
    "arguments",
    [(), ("m", "--repeats", "-1"), ("m", "--capture-sites", "[1]"), ("m", "--max-steering-slots", "1")],
)
def test_bad_usage_starts_no_engine(invoke: Invoke, engines: Engines, arguments: tuple[str, ...]) -> None:
    assert invoke(*arguments).exit_code == 2
    assert engines.jobs == []


def test_a_vllm_that_headgate_does_not_know_is_refused(
    invoke: Invoke, engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "find_version", lambda: "0.99.0")

    result = invoke("my/model")

    assert result.exit_code == 2
    assert "found 0.99.0" in result.output
    assert engines.jobs == []


def test_logs_and_recordings_are_kept_where_the_user_says(invoke: Invoke, tmp_path: Path) -> None:
    assert invoke("my/model", "--repeats", "0", "--keep", str(tmp_path / "kept")).exit_code == 0

    names = {path.name for path in (tmp_path / "kept").iterdir()}
    assert {
        f"{number}-{kind}.{end}" for number, kind in ((1, STOCK), (3, SERVED)) for end in ("log", "msgpack")
    } < names


def test_headgates_flags_become_sections_and_the_others_stay() -> None:
    flags = ["--max-model-len", "64", "--capture-sites", '{"post_mlp": [1]}', "--max-steering-slots", "99", "-tp", "2"]

    sections, others = split_flags(flags)

    assert sections["capture"]["sites"] == {"post_mlp": [1]}
    assert sections["steering"]["max_steering_slots"] == 99
    assert others == ["--max-model-len", "64", "-tp", "2"]
    assert split_flags(["--enforce-eager"]) == ({}, ["--enforce-eager"])


def test_flags_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(ConfigError, match="max-steering-slots"):
        split_flags(["--max-steering-slots", "9", "--max-steering-configs", "9"])


def test_sections_of_the_engines() -> None:
    """Of the user's consumers only those that are checked are opened, in use; nothing limits the captures."""
    given = {
        "sites": {"post_mlp": "all"},
        "consumers": [{"name": "filesystem"}, {"name": "lens", "instance_name": "mine"}],
        "max_request_rows": 1,
        "ring_rows": 99,
    }

    section = PARTS["capture"].section(given, counts=False)

    assert [consumer["name"] for consumer in section["consumers"]] == ["memory"]
    in_use = PARTS["capture"].section(given, counts=True)["consumers"]
    assert [consumer["name"] for consumer in in_use] == ["memory", "lens"]
    assert in_use[1]["instance_name"] == "mine"
    assert (section["sites"], section["ring_rows"], section["fire_counter"]) == (given["sites"], 99, False)
    assert "max_request_rows" not in section
    assert PARTS["steering"].section({"max_steering_slots": 9}, counts=True) == {
        "max_steering_slots": 9,
        "fire_counter": True,
    }


@pytest.mark.parametrize(
    ("allowed", "stock", "served"),
    [
        ("", set(), {"headgate"}),
        ("other,headgate", {"other"}, {"other", "headgate"}),
        ("other", {"other"}, {"other", "headgate"}),
    ],
)
def test_stock_loads_every_plugin_but_headgate(allowed: str, stock: set[str], served: set[str]) -> None:
    def plugins(kind: str) -> set[str]:
        return set(filter(None, environment(kind, {"VLLM_PLUGINS": allowed})["VLLM_PLUGINS"].split(",")))

    assert (plugins(STOCK), plugins(SERVED)) == (stock, served)


def test_every_plugin_is_named_where_the_user_names_none() -> None:
    stock, served = (environment(kind, {})["VLLM_PLUGINS"].split(",") for kind in (STOCK, IDLE))

    assert "headgate" in served
    assert "headgate" not in stock
    assert environment(STOCK, {})["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"


CHILD = """
import subprocess, sys, time
worker = subprocess.Popen([sys.executable, "-c", "import sys; print('ready', flush=True); sys.stdin.read()"],
    stdin=subprocess.PIPE, stdout=subprocess.PIPE)
worker.stdout.readline()
print(worker.pid, flush=True)
{end}
"""


@pytest.fixture
def child(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], int | None]:
    """Runs a child process that starts a worker and ends as it is told; returns its exit status, or None."""

    def run(end: str, timeout_s: float = 60) -> int | None:
        (tmp_path / "toy_verify_child.py").write_text(CHILD.format(end=end))
        monkeypatch.setattr(command, "ENGINE", "toy_verify_child")
        env = {**os.environ, "PYTHONPATH": str(tmp_path)}
        return run_engine(tmp_path / "job", tmp_path / "log", env, timeout_s)

    return run


def is_running(pid: int) -> bool:
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().split()[2]
    except FileNotFoundError:
        return False


@pytest.mark.parametrize(("end", "timeout_s", "status"), [("sys.exit(3)", 60, 3), ("worker.wait()", 1, None)])
def test_an_engine_leaves_no_process_behind(
    child: Callable[..., int | None], tmp_path: Path, end: str, timeout_s: float, status: int | None
) -> None:
    assert child(end, timeout_s) == status

    pause = threading.Event()
    for worker in map(int, (tmp_path / "log").read_text().split()):  # one, unless it was too slow to start it
        assert any(not is_running(worker) or pause.wait(0.05) for _ in range(200))


def test_a_command_that_is_terminated_ends_its_engine(tmp_path: Path) -> None:
    (tmp_path / "toy_verify_child.py").write_text(CHILD.format(end="worker.wait()"))
    program = (
        "from headgate.capture.engine.commands import verify as v; v.ENGINE = 'toy_verify_child'; import sys;"
        f"sys.argv = ['verify', 'm', '--keep', {str(tmp_path)!r}]; v.verify()"
    )
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}
    process = subprocess.Popen([sys.executable, "-c", program], env=env, stdout=subprocess.DEVNULL)
    log, pause = tmp_path / "1-stock.log", threading.Event()
    for _ in range(1200):
        if log.exists() and log.read_text().endswith("\n"):
            break
        pause.wait(0.05)
    worker = int(log.read_text().split()[0])

    process.send_signal(signal.SIGTERM)

    assert process.wait(patience(60)) == 128 + signal.SIGTERM
    assert any(not is_running(worker) or pause.wait(0.05) for _ in range(200))


def test_dummy_weights_are_worth_a_warning_that_says_what_to_do(invoke: Invoke, engines: Engines) -> None:
    engines.load_format = "dummy"

    lenient = invoke("my/model", "--repeats", "0", "--load-format", "dummy")
    strict = invoke("my/model", "--repeats", "0", "--load-format", "dummy", "--strict")

    assert (lenient.exit_code, strict.exit_code) == (0, 1)
    assert "weights tell layers apart" in lenient.stdout
    assert "--random-weights" in lenient.stdout


def test_random_weights_are_served_instead_of_the_models(
    invoke: Invoke, engines: Engines, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    written: list[tuple[str, Path]] = []
    monkeypatch.setattr(command, "write_random_weights", lambda model, target, _: written.append((model, target)))

    result = invoke("my/model", "--random-weights", "--repeats", "0", "--keep", str(tmp_path))

    assert result.exit_code == 0, result.output
    assert written == [("my/model", tmp_path / "random-weights")]
    assert {job["arguments"][1] for job in engines.jobs} == {str(tmp_path / "random-weights")}
    assert "my/model (random weights)" in result.stdout


def test_random_weights_that_cannot_be_written_fail_the_verification(invoke: Invoke, tmp_path: Path) -> None:
    result = invoke(str(tmp_path / "nothing"), "--random-weights")

    assert result.exit_code == 1
    assert "could not be written" in result.output


def test_random_weights_and_a_load_format_are_refused(invoke: Invoke) -> None:
    result = invoke("my/model", "--random-weights", "--load-format=dummy")

    assert result.exit_code == 2
    assert "leave out --load-format" in result.output
