"""``headgate verify MODEL ...``: proof on the user's own machine that headgate does what it says and harms nothing."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from importlib.metadata import entry_points
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from headgate.capture.engine.commands.serve import LOADED_BY_DEFAULT, NAME
from headgate.capture.engine.commands.verify_stock import (
    Cost,
    idle_costs,
    judge_costs,
    judge_graphs,
    judge_stock,
    judge_weights,
)
from headgate.capture.engine.contracts.parts import check_parts
from headgate.capture.engine.setup.cli_flags import add_flags, translate_flags
from headgate.capture.engine.setup.settings import OUR_KEY
from headgate.capture.engine.vllm_names import check_version, find_version
from headgate.capture.monitoring.verify_checks import (
    EAGER,
    IDLE,
    SERVED,
    STOCK,
    USAGE_STATUS,
    Recording,
    Status,
    Verdict,
    VerifyFacts,
)
from headgate.capture.schema.errors import HeadgateError

COLORS = {Status.PASSED: "green", Status.WARNING: "yellow", Status.FAILED: "red", Status.SKIPPED: "dim"}


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """The report that ``--json`` writes.

    Attributes:
        model: As given.
        flags: For vLLM and headgate, as given.
        is_passed: Whether the exit status is 0.
        facts: Of the first engine; None if none was ready.
        start_s: Seconds that each engine took to be ready, in order, with its kind.
        verdicts: Every check.
        idle_costs: What was timed.
    """

    model: str
    flags: list[str]
    is_passed: bool
    facts: VerifyFacts | None
    start_s: list[tuple[str, float]]
    verdicts: list[Verdict]
    idle_costs: list[Cost]


def is_passed(verdicts: Sequence[Verdict], *, strict: bool) -> bool:
    """Whether nothing failed, and nothing is worth a warning if `strict`."""
    bad = {Status.FAILED, Status.WARNING} if strict else {Status.FAILED}
    return bool(verdicts) and not any(verdict.status in bad for verdict in verdicts)


def show(console: Console, report: Report) -> None:
    """Print the table, and under it what it holds for."""
    title = f"headgate verify {escape(report.model)}"
    table = Table("check", "result", "figure", title=title, title_justify="left", box=None)
    for verdict in report.verdicts:
        color = COLORS[verdict.status]
        table.add_row(escape(verdict.check), f"[{color}]{verdict.status.value}", escape(verdict.figure))
    console.print(table)
    if report.facts is not None:
        console.print(_about(report.facts), highlight=False, markup=False)
    console.print(f"flags: {shlex.join(report.flags) or 'none'}", highlight=False, markup=False)
    counts = {status: sum(verdict.status is status for verdict in report.verdicts) for status in Status}
    counted = ", ".join(f"{count} {status.value}" for status, count in counts.items() if count)
    color, end = ("green", "verified") if report.is_passed else ("red", "NOT verified")
    console.print(f"[bold {color}]{end}[/]: {counted}", highlight=False)


def _about(facts: VerifyFacts) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in facts.versions.items())
    return (
        f"{facts.architecture}, {facts.num_layers} layers of {facts.hidden_size}, {facts.dtype}; cudagraph_mode "
        f"{facts.graph_mode}; {facts.num_workers} worker(s); {facts.device}\n{versions}"
        + (f"\n{facts.compiler}" if facts.compiler else "")
    )


def write_json(path: Path, report: Report) -> None:
    """Write the report, its object first."""
    path.write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=2) + b"\n")


ENGINE = "headgate.capture.engine.commands.verify_engine"
RANDOM_WEIGHTS = "headgate.capture.engine.commands.random_weights"
DEFAULT_BOUND = 2.0
"""Idle cost in percent that is worth a warning."""
TAIL_LINES = 40

verify = typer.Typer(add_completion=False)


class EngineError(HeadgateError, RuntimeError):
    """An engine did not start, or ended before it was through; the message ends with its log."""


class UsageError(HeadgateError, ValueError):
    """vLLM does not take the arguments."""


@verify.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def run(
    context: typer.Context,
    model: Annotated[str, typer.Argument(help="Model folder or name, before all flags for vLLM.")],
    json_path: Annotated[Path | None, typer.Option("--json", help="Write the report to this file as well.")] = None,
    repeats: Annotated[int, typer.Option(min=0, help="Pairs of engines to time; 0 leaves the idle cost out.")] = 1,
    max_idle_cost: Annotated[
        float | None, typer.Option(help=f"Fail if idle costs more percent; without it {DEFAULT_BOUND:g} % warn.")
    ] = None,
    strict: Annotated[bool, typer.Option("--strict", help="Warnings are failures.")] = False,
    keep: Annotated[Path | None, typer.Option(help="Folder to keep logs and recordings of the engines in.")] = None,
    random_weights: Annotated[
        bool, typer.Option("--random-weights", help="Verify a text model of MODEL's configuration with random weights.")
    ] = False,
    timeout: Annotated[float, typer.Option(min=1, help="Seconds that one engine may take in all.")] = 1800,
) -> None:
    """Verify headgate with MODEL on this machine: headgate verify MODEL --tensor-parallel-size 2 --max-model-len 4096

    Takes every flag of vLLM's engine, and headgate's --capture-sites, --capture-consumers (lens, attention and
    features are checked), --steering-sites and --max-steering-slots.
    Engines are started one after the other: stock vLLM, headgate idle, stock again, headgate in use, headgate in
    eager mode. Exits with 0 if all is well, 1 if something is off, 2 if the arguments are wrong.
    """
    console = Console()
    flags = list(context.args)
    try:
        check_version(find_version() or "none")
        sections, arguments = split_flags(flags, is_random=random_weights)
    except HeadgateError as error:
        raise _refused(error) from error
    with _end_on_sigterm(), _folder(keep) as folder:
        served = str(folder / "random-weights") if random_weights else model
        session = Verification(folder, ["--model", served, *arguments], sections, timeout, console)
        verdicts = session.verify(repeats, model if random_weights else None)
    costs = idle_costs(session.runs)
    bound = DEFAULT_BOUND if max_idle_cost is None else max_idle_cost
    verdicts += judge_costs(costs, bound=bound, is_limit=max_idle_cost is not None)
    counted = f"{model} (random weights)" if random_weights else model
    report = session.report(counted, flags, verdicts, costs, is_good=is_passed(verdicts, strict=strict))
    show(console, report)
    if json_path is not None:
        write_json(json_path, report)
    raise typer.Exit(0 if report.is_passed else 1)


def _refused(error: Exception) -> typer.Exit:
    typer.secho(f"headgate verify: {error}", err=True, fg="red")
    return typer.Exit(2)


def split_flags(flags: Sequence[str], *, is_random: bool = False) -> tuple[dict[str, dict[str, object]], list[str]]:
    """The sections of ``additional_config["headgate"]`` that headgate's flags come to, and all other flags.

    Raises:
        ConfigError: If headgate's are wrong.
        UsageError: If random weights (`is_random`) would be read in another format than they are written.
        SystemExit: With status 2, if they cannot be read.
    """
    if is_random and any(flag.startswith("--load-format") for flag in flags):
        raise UsageError("--random-weights writes files in the usual format: leave out --load-format")
    parser = argparse.ArgumentParser(prog="headgate verify", add_help=False, allow_abbrev=False)
    add_flags(parser)
    ours, others = parser.parse_known_args(flags)
    translate_flags(ours)
    document = getattr(ours, "additional_config", None) or {}
    return dict(document.get(OUR_KEY) or {}), others


def kinds_to_run(repeats: int) -> list[str]:
    """The engines in their order: what is timed stands between stock engines."""
    return [STOCK, IDLE] * repeats + [STOCK, SERVED, EAGER]


@dataclass
class Verification:
    """One verification: its engines, one after the other, and what they recorded.

    Attributes:
        folder: For jobs, logs and recordings.
        arguments: For vLLM's parser.
        sections: Of headgate's configuration.
        timeout_s: Seconds that one engine may take.
        console: For progress.
        runs: What was recorded so far, by kind of engine.
    """

    folder: Path
    arguments: list[str]
    sections: dict[str, dict[str, object]]
    timeout_s: float
    console: Console
    runs: dict[str, list[Recording]] = field(default_factory=dict)
    _started: list[tuple[str, float]] = field(default_factory=list)
    _served: Path | None = None

    def verify(self, repeats: int, random_of: str | None) -> list[Verdict]:
        """Run every engine and judge; `random_of` is the model whose configuration gets random weights first.

        Raises:
            typer.Exit: If vLLM's parser does not take the arguments.
        """
        try:
            if random_of is not None:
                write_random_weights(random_of, Path(self.arguments[1]), self.timeout_s)
            self.run_all(repeats)
            return list(self.judge())
        except UsageError as error:
            raise _refused(error) from error
        except EngineError as error:
            typer.secho(str(error), err=True)
            return [Verdict("every engine starts and serves", Status.FAILED, str(error).partition("\n")[0])]

    def run_all(self, repeats: int) -> None:
        """Start every engine in turn.

        Raises:
            EngineError: If one does not do its work.
            UsageError: If vLLM's parser does not take the arguments.
        """
        waiting, number = deque(kinds_to_run(repeats)), 0
        while waiting:
            kind, number, began = waiting.popleft(), number + 1, time.monotonic()
            is_last_stock = kind == STOCK and STOCK not in waiting
            with self.console.status(f"engine {number} of {number + len(waiting)}: {kind}"):
                recording = self._run(
                    f"{number}-{kind}",
                    kind,
                    is_timed=repeats > 0 and kind in (STOCK, IDLE),
                    is_compiled_anew=is_last_stock and self._is_tuned,
                )
            self.runs.setdefault(kind, []).append(recording)
            if self._is_tuned and not repeats and number == 1:
                waiting.appendleft(STOCK)
            self._started.append((kind, recording.facts.start_s))
            seconds = time.monotonic() - began
            self.console.print(
                f"engine {number} of {number + len(waiting)}: {kind:7} {seconds:4.0f} s, ready after "
                f"{recording.facts.start_s:.0f} s",
                highlight=False,
            )

    @property
    def _is_tuned(self) -> bool:
        """Whether stock ran kernels that torch.compile chose by timing them: compiled anew, it may choose others.

        They add up in another order then, and so may headgate's, whose forward is compiled by itself.
        """
        return any(recording.facts.graph_mode != "NONE" for recording in self.runs.get(STOCK, ()))

    def judge(self) -> Iterator[Verdict]:
        """Every check but that of the idle cost."""
        yield from judge_weights(self.runs)
        yield from judge_stock(self.runs)
        yield from judge_graphs(self.runs)
        for part in check_parts().values():
            yield from part.judge(self.runs)

    def report(
        self, model: str, flags: list[str], verdicts: list[Verdict], costs: list[Cost], *, is_good: bool
    ) -> Report:
        """Make the report that is shown and written."""
        last = [recording for recordings in self.runs.values() for recording in recordings][-1:]
        facts = last[0].facts if last else None
        if facts is not None and (served := self.runs.get(SERVED)):
            facts = msgspec.structs.replace(facts, compiler=served[-1].facts.compiler)  # the last engine is eager
        return Report(
            model=model,
            flags=flags,
            is_passed=is_good,
            facts=facts,
            start_s=self._started,
            verdicts=verdicts,
            idle_costs=costs,
        )

    def _run(self, name: str, kind: str, *, is_timed: bool, is_compiled_anew: bool) -> Recording:
        log, out = self.folder / f"{name}.log", self.folder / f"{name}.msgpack"
        out.unlink(missing_ok=True)  # of an earlier verification, if the user keeps them in one folder
        if kind == SERVED:
            self._served = out
        job = {
            "kind": kind,
            "arguments": self.arguments,
            "sections": self.sections,
            "out": str(out),
            "earlier": str(self._served) if kind == EAGER else None,
            "is_timed": is_timed,
        }
        file = self.folder / f"{name}.json"
        file.write_text(json.dumps(job))
        env = environment(kind, os.environ)
        if is_compiled_anew:
            env["VLLM_CACHE_ROOT"] = str(self.folder / "compiled-anew")
        status = run_engine(file, log, env, self.timeout_s)
        tail = "\n".join(log.read_text(errors="replace").splitlines()[-TAIL_LINES:])
        if status == USAGE_STATUS:
            raise UsageError(tail.strip().splitlines()[-1])
        if status != 0 or not out.exists():
            ending = f"took more than {self.timeout_s:g} s" if status is None else f"ended with status {status}"
            raise EngineError(f"the engine {name} {ending}. The end of its log:\n{tail}")
        return msgspec.msgpack.decode(out.read_bytes(), type=Recording)


def write_random_weights(model: str, target: Path, timeout_s: float) -> None:
    """Write a model like `model` with random weights, in a process of its own, so that its memory is free again.

    Raises:
        EngineError: If that fails.
    """
    command = [sys.executable, "-m", RANDOM_WEIGHTS, model, str(target)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)  # noqa: S603
    except subprocess.TimeoutExpired:
        raise EngineError(f"random weights for {model}: writing them took more than {timeout_s:g} s") from None
    if done.returncode:
        raise EngineError(f"random weights for {model} could not be written:\n{done.stderr}")


def environment(kind: str, base: Mapping[str, str]) -> dict[str, str]:
    """The environment of an engine's process: which plugins vLLM loads, and an engine core in the same process.

    Args:
        kind: Of the engine. Stock vLLM loads every plugin but headgate.
        base: The user's.
    """
    allowed = base.get("VLLM_PLUGINS")
    found = {name for group in LOADED_BY_DEFAULT for name in entry_points(group=group).names}
    names = found if allowed is None else set(filter(None, allowed.split(",")))
    names = names - {NAME} if kind == STOCK else names | {NAME}
    settings = {"VLLM_PLUGINS": ",".join(sorted(names)), "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    return {"VLLM_WORKER_MULTIPROC_METHOD": "spawn", **base, **settings}


def run_engine(job: Path, log: Path, env: Mapping[str, str], timeout_s: float) -> int | None:
    """Run one engine to its end; returns its exit status, None if it took too long.

    Processes that outlive it are killed: its workers are in a process group of their own.
    """
    with log.open("wb") as target:
        process = subprocess.Popen(  # noqa: S603  (this Python, and a file of ours)
            [sys.executable, "-m", ENGINE, str(job)],
            env=dict(env),
            stdout=target,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        return process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        return None
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@contextmanager
def _end_on_sigterm() -> Iterator[None]:
    """Let SIGTERM unwind the stack as Ctrl-C does, so that the engine at work ends too."""

    def leave(signum: int, frame: object) -> None:
        raise SystemExit(128 + signum)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def _folder(keep: Path | None) -> Iterator[Path]:
    if keep is not None:
        keep.mkdir(parents=True, exist_ok=True)
        yield keep
        return
    with tempfile.TemporaryDirectory(prefix="headgate-verify-") as folder:
        yield Path(folder)
