"""``headgate verify``: its report, as a table and for machines."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

import msgspec
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from headgate.capture.engine.commands.verify_stock import Cost
from headgate.capture.monitoring.verify_checks import Facts, Status, Verdict

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
    facts: Facts | None
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
    told = ", ".join(f"{count} {status.value}" for status, count in counts.items() if count)
    color, end = ("green", "verified") if report.is_passed else ("red", "NOT verified")
    console.print(f"[bold {color}]{end}[/]: {told}", highlight=False)


def _about(facts: Facts) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in facts.versions.items())
    return (
        f"{facts.architecture}, {facts.num_layers} layers of {facts.hidden_size}, {facts.dtype}; cudagraph_mode "
        f"{facts.graph_mode}; {facts.num_workers} worker(s); {facts.device}\n{versions}"
        + (f"\n{facts.compiler}" if facts.compiler else "")
    )


def write_json(path: Path, report: Report) -> None:
    """Write the report, its object first."""
    path.write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=2) + b"\n")
