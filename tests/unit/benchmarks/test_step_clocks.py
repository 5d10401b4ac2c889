"""The clocks in an engine core: what they note of a step, and what is made of it."""

from __future__ import annotations

from importlib.metadata import distributions
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.benchmarks import step_clocks
from tests.benchmarks.profile_steps import KINDS, SHOWN, column, read, table
from tests.benchmarks.servers import environment, publish_plugins
from tests.benchmarks.step_clocks import COLUMNS, Clocks


class Core:
    """Schedules what it is given, one step after the other."""

    def __init__(self, clocks: Clocks, steps: list[Any]) -> None:
        self.scheduler = SimpleNamespace(has_requests=lambda: bool(steps))
        schedule = clocks.timed("schedule", lambda: steps.pop(0) if steps else scheduled())
        execute = clocks.timed("execute", lambda: sum(range(1000)))

        def step(core: Core) -> None:
            schedule()
            execute()

        self.step = clocks.stepping(step)


SPEC = {"sites": {"post_mlp": [1, 2], "final_norm": []}}


def scheduled(*consumers: str | None, tokens: int = 0, requests: int = 0) -> Any:
    new = [
        SimpleNamespace(
            sampling_params=SimpleNamespace(
                extra_args={"headgate": {"capture": {"specs": {name: SPEC}}}} if name else None
            )
        )
        for name in consumers
    ]
    return SimpleNamespace(
        scheduled_new_reqs=new,
        num_scheduled_tokens=dict.fromkeys(range(requests), 1),
        total_num_scheduled_tokens=tokens,
    )


def run(folder: Path, *consumers: str | None) -> None:
    folder.mkdir(parents=True)
    decodes = [scheduled(tokens=2, requests=2)] * 12
    steps = [step for name in consumers for step in (scheduled(name, tokens=8, requests=1), *decodes)]
    core = Core(Clocks(folder), steps)
    while steps:
        core.step(core)
    assert not list(folder.iterdir())  # nothing is written while requests run
    core.step(core)


def test_steps_are_noted_by_what_their_requests_capture(tmp_path: Path) -> None:
    run(tmp_path / "both", None, "filesystem")

    found = read(tmp_path / "both")

    assert {name: len(records) for name, (records, _) in found.items()} == {"idle": 13, "filesystem 3": 12}
    for records, periods in found.values():
        assert records.shape[1] == len(COLUMNS)
        assert (column(records, "execute") > 0).all()
        assert (column(records, "execute") + column(records, "schedule") <= column(records, "step")).all()
        assert (periods >= column(records, "step")).all()
        assert (SHOWN["execute"](records) == column(records, "execute")).all()
        assert KINDS["decode"](records, 2).sum() >= 11
        assert KINDS["prompt"](records, 2).sum() == 1


def test_the_table_has_a_line_for_each_mode_that_has_steps_of_a_kind(tmp_path: Path) -> None:
    run(tmp_path / "both", None, "filesystem")
    run(tmp_path / "stock", None)

    title, *lines = table(tmp_path, 2).splitlines()

    assert [line.split()[:3] for line in lines] == [
        ["decode", "both", "filesystem"],
        ["decode", "both", "idle"],
        ["decode", "stock", "idle"],
    ]
    assert len({len(line) for line in (title, *lines)}) == 1


def test_what_is_ours_is_what_lies_around_the_methods_of_vllm() -> None:
    times = {"seam_execute": 9.0, "execute": 7.0, "seam_prepare": 3.0, "prepare": 2.0}
    records = np.array([[times.get(name, 0.0) for name in COLUMNS], [1.0] * len(COLUMNS)])
    records[1, [COLUMNS.index("seam_execute"), COLUMNS.index("seam_prepare")]] = 0  # stock

    assert SHOWN["ours"](records).tolist() == [3.0, 0.0]
    assert SHOWN["execute"](records)[0] == 6.0


def test_servers_have_clocks_only_where_they_are_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = environment("stock", tmp_path, [])
    monkeypatch.setenv(step_clocks.FOLDER, str(tmp_path / "steps"))

    stock, installed, both = (environment(name, tmp_path, []) for name in ("stock", "installed", "both"))

    assert plain["VLLM_PLUGINS"] == "none"
    assert step_clocks.FOLDER not in plain
    assert stock["VLLM_PLUGINS"] == "none,step_clocks"
    assert both["VLLM_PLUGINS"] == "headgate,step_clocks"
    assert "VLLM_PLUGINS" not in installed
    assert both[step_clocks.FOLDER] == str(tmp_path / "steps" / "both")


def test_vllm_finds_the_clocks(tmp_path: Path) -> None:
    publish_plugins(tmp_path)

    points = [point for one in distributions(path=[str(tmp_path)]) for point in one.entry_points]

    (found,) = [point for point in points if point.group == "vllm.general_plugins"]
    assert found.name == step_clocks.PLUGIN
    assert found.load() is step_clocks.register
