"""``headgate harvest``: refusals before an engine starts, how a run goes, and what a log shows of it."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner, Result

from headgate.capture.cli import app
from headgate.consumers.datasets import open_dataset
from headgate.consumers.harvest import HarvestRoot, Progress, Wanted, command
from headgate.consumers.harvest.run import LINE_S, showing
from tests.fakes.capturing import capturing
from tests.fakes.harvesting import FakeEngine, prompt_file


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, list[str]]]:
    """Models and flags of the engines that were started: fakes."""
    found: list[tuple[str, list[str]]] = []

    @contextmanager
    def running(model: str, flags: Sequence[str], wanted: Wanted, root: HarvestRoot) -> Iterator[FakeEngine]:
        found.append((model, list(flags)))
        with capturing(root.params["root"]) as files:
            yield FakeEngine(files)

    monkeypatch.setattr(command, "_running", running)
    return found


def call(folder: Path, *arguments: str, **options: str) -> Result:
    given = {
        "prompts": str(folder / "prompts.jsonl"),
        "sites": "1.post_mlp",
        "rows": "2e1",
        "to": str(folder / "root"),
        **options,
    }
    flags = [word for name, value in given.items() for word in (f"--{name.replace('_', '-')}", value)]
    return CliRunner().invoke(app, ["harvest", "example-model", *flags, *arguments])


def test_a_harvest_runs_and_goes_on(tmp_path: Path, started: list[tuple[str, list[str]]]) -> None:
    prompt_file(tmp_path / "prompts.jsonl", [8] * 9)

    first = call(tmp_path, "--dtype", "bfloat16", "-tp", "2", drop_first="1", sites="3.post_mlp,1.post_mlp")
    second = call(tmp_path, drop_first="1", sites="1.post_mlp,3.post_mlp", rows="49")

    assert first.exit_code == 0, first.output
    assert "21 rows of 1.post_mlp, 3.post_mlp from 3 prompts in" in first.stderr
    assert second.exit_code == 0, second.output
    assert started == [("example-model", ["--dtype", "bfloat16", "-tp", "2"]), ("example-model", [])]
    data = open_dataset(tmp_path / "root", tags="harvest", index=False)
    assert data.num_rows == {"1.post_mlp": 49, "3.post_mlp": 49}
    assert data.problems == ()


def test_too_few_prompts_are_said_and_fail(tmp_path: Path, started: list[Any]) -> None:
    prompt_file(tmp_path / "prompts.jsonl", [8, 8])

    done = call(tmp_path, context="6")

    assert done.exit_code == 1
    assert "2 prompts were cut to 6 tokens" in done.stderr
    assert "the prompts have no more than 12 rows; 20 were asked for" in done.stderr


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"rows": "2.5"}, "rows: expected a whole number such as 5e6, got 2.5"),
        ({"rows": "nan"}, "rows: expected a whole number"),
        ({"rows": "inf"}, "rows: expected a whole number"),
        ({"rows": "0"}, "rows: expected a whole number"),
        ({"sites": "post_mlp"}, "not a site: 'post_mlp'"),
        ({"tokens": "answer"}, "expected one of prompt, generated, all"),
        ({"prompts": "gone.txt"}, "gone.txt cannot be read"),
        ({"field": "text"}, "line 1: expected an object with the field 'text'"),
        ({"to": "s3://user:secret@bucket/run"}, "has credentials or options in it"),
        ({"spool": "spool"}, "spool: is for roots in an object store"),
    ],
)
def test_wrong_options_are_refused_before_an_engine_starts(
    tmp_path: Path, started: list[Any], options: dict[str, str], reason: str
) -> None:
    prompt_file(tmp_path / "prompts.jsonl", [8])

    done = call(tmp_path, **options)

    assert done.exit_code == 1, done.output
    assert reason in done.stderr
    assert started == []


def test_a_root_of_other_settings_is_refused_before_an_engine_starts(tmp_path: Path, started: list[Any]) -> None:
    prompt_file(tmp_path / "prompts.jsonl", [8] * 9)
    assert call(tmp_path).exit_code == 0
    started.clear()

    done = call(tmp_path, sites="3.post_mlp")

    assert done.exit_code == 1
    assert "sites ['1.post_mlp'] (now ['3.post_mlp'])" in done.stderr
    assert started == []


def test_an_interrupt_says_how_to_go_on(tmp_path: Path, started: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    prompt_file(tmp_path / "prompts.jsonl", [8] * 9)

    def interrupted(*args: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(FakeEngine, "run", interrupted)

    done = call(tmp_path)

    assert done.exit_code == 1
    assert "the same command continues" in done.stderr


def test_a_log_has_a_line_at_first_and_then_now_and_then() -> None:
    out, now = io.StringIO(), [100.0]
    with showing(Console(file=out, width=200), clock=lambda: now[0]) as report:
        for rows, seconds in ((1000, 0.0), (3000, 2.0), (4000, 1.0), (13_000, LINE_S)):
            now[0] += seconds
            report(Progress(rows=rows, wanted_rows=5_000_000, num_bytes=rows * 1_000_000, prompts=7))

    assert out.getvalue().splitlines() == [
        "1,000 of 5,000,000 rows, 0 rows/s, 1.00 GB",
        "3,000 of 5,000,000 rows, 1,000 rows/s, 3.00 GB, 4,997 s left",
        "13,000 of 5,000,000 rows, 923 rows/s, 13.00 GB, 5,403 s left",
    ]


def test_no_time_is_left_once_the_last_prompt_brought_more_rows_than_are_wanted() -> None:
    out, now = io.StringIO(), [100.0]
    with showing(Console(file=out, width=200), clock=lambda: now[0]) as report:
        for rows in (1000, 2562):
            now[0] += 1
            report(Progress(rows=rows, wanted_rows=2500, num_bytes=0, prompts=7))

    assert out.getvalue().splitlines()[-1] == "2,562 of 2,500 rows, 1,562 rows/s, 0.00 GB, 0 s left"


def test_a_terminal_has_a_bar() -> None:
    out, now = io.StringIO(), [100.0]
    with showing(Console(file=out, width=200, force_terminal=True), clock=lambda: now[0]) as report:
        for rows in (0, 2_500_000):
            now[0] += 10
            report(Progress(rows=rows, wanted_rows=5_000_000, num_bytes=rows * 1000, prompts=7))

    shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", out.getvalue())
    assert "2,500,000 of 5,000,000 rows, 250,000 rows/s, 2.50 GB" in shown
