"""The step log is short, complete, and private to its owner."""

from __future__ import annotations

import json
import stat
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headgate.capture.monitoring.step_log import STEP_LOG, compact, open_step_log
from headgate.capture.schema.errors import ConfigError


def written_out(text: str) -> list[int]:
    numbers: list[int] = []
    for part in text.split(",") if text else []:
        if "*" in part:
            value, times = map(int, part.split("*"))
            numbers += [value] * times
        elif ":" in part:
            numbers += range(*map(int, part.split(":")))
        else:
            numbers.append(int(part))
    return numbers


@given(st.lists(st.integers(-2, 4)))
def test_numbers_in_short_are_the_numbers(numbers: list[int]) -> None:
    assert written_out(compact(numbers)) == numbers


def test_runs_and_repetitions_are_short() -> None:
    assert compact([7, 8, 9, 0, 0, 0, 5]) == "7:10,0*3,5"


def test_each_step_is_a_line_that_only_its_owner_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(STEP_LOG, str(tmp_path / "steps"))

    log = open_step_log(3)
    assert log is not None
    log.write({"requests": []})
    log.write({"requests": [{"id": "a"}]})

    (path,) = (tmp_path / "steps").glob("rank3-*.jsonl")
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    log.close()
    assert lines == [{"step": 0, "requests": []}, {"step": 1, "requests": [{"id": "a"}]}]
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_without_a_folder_no_step_is_logged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(STEP_LOG, raising=False)

    assert open_step_log(0) is None


def test_a_folder_that_cannot_be_made_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv(STEP_LOG, str(tmp_path / "file"))

    with pytest.raises(ConfigError, match=rf"{STEP_LOG}=.*file: .* cannot be written .*; name a folder or unset it"):
        open_step_log(0)
