"""Which failures of requests the chaos run excuses, by what its consumers noted."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.chaos import notes
from tests.chaos.clients import Outcome
from tests.chaos.consumers import BROKEN, MAX_STALL_S
from tests.chaos.excuses import SLACK_S, Faults, Span, unexcused
from tests.chaos.notes import Call, noted, take_notes
from tests.chaos.workload import CALM, Shot, Workload

LATE = "trickle: was hung or shut down when the request began"
STUCK = f"trickle: hung: one call took longer than {MAX_STALL_S:g} s"
RAISED = f"trickle: RuntimeError: {BROKEN}"


def shot(moods: Mapping[str, str]) -> Shot:
    """A request that waits for its captures."""
    found = Workload(1).next(CALM)
    values = {name: getattr(found, name) for name in Shot.__dataclass_fields__}
    return Shot(**{**values, "moods": moods, "waits": True})


def failed(error: str, began: float, ended: float, mood: str = "fine") -> Outcome:
    """A request whose capture by ``trickle`` failed with `error`."""
    result = {"status": "error", "error": error, "dropped_rows": 0}
    outcome = Outcome(shot=shot({"trickle": mood}), began=began, ended=ended, status=200)
    outcome.results = {"trickle": result}
    return outcome


def is_excused(outcome: Outcome, *calls: Call, faults: Faults | None = None) -> bool:
    return not unexcused([outcome], faults or Faults(), calls)


@pytest.mark.parametrize("error", [LATE, STUCK])
@pytest.mark.parametrize(
    ("began", "ended", "excused"),
    [
        (90.0, 100.0 + MAX_STALL_S - 2 * SLACK_S, False),
        (90.0, 100.0 + MAX_STALL_S, True),
        (128.0, 129.0, True),
        (130.0 + 2 * SLACK_S, 135.0, False),
    ],
    ids=["before it was hung", "as it hung", "at its end", "after it"],
)
def test_a_hang_excuses_who_ran_while_it_was_known(error: str, began: float, ended: float, excused: bool) -> None:
    assert is_excused(failed(error, began, ended), Call("trickle", 100.0, 130.0)) == excused


def test_a_call_without_an_end_hangs_for_ever() -> None:
    assert is_excused(failed(LATE, 900.0, 901.0), Call("trickle", 100.0))


def test_a_mood_is_no_excuse_for_being_hung_where_no_call_was_long() -> None:
    short = Call("trickle", 100.0, 100.0 + MAX_STALL_S - 2 * SLACK_S)

    assert not is_excused(failed(LATE, 90.0, 110.0, mood="hang"), short)


def test_another_consumer_is_no_excuse() -> None:
    calls = Call("moody", 100.0, 130.0), Call("moody", 130.0, 130.1, has_raised=True)

    assert not is_excused(failed(LATE, 90.0, 140.0), *calls)
    assert not is_excused(failed(RAISED, 90.0, 140.0), *calls)


@pytest.mark.parametrize(("began", "ended", "excused"), [(99.0, 101.0, True), (100.3, 101.0, False)])
def test_a_call_that_raised_excuses_those_that_were_there(began: float, ended: float, excused: bool) -> None:
    assert is_excused(failed(RAISED, began, ended), Call("trickle", 100.0, 100.2, has_raised=True)) == excused


def test_a_request_that_asked_for_it_may_be_broken() -> None:
    assert is_excused(failed(RAISED, 99.0, 101.0, mood="raise"))


def test_a_full_disk_excuses_only_who_writes_to_it() -> None:
    faults = Faults(full=[Span(90.0, 110.0)])

    assert not is_excused(failed("trickle: No space left on device", 99.0, 101.0), faults=faults)


def test_what_is_written_after_the_answer_may_meet_a_disk_that_is_full_by_then() -> None:
    outcome = failed(LATE, began=80.0, ended=89.0)

    assert [Span(90.0, 110.0).meets(outcome, after_s=after_s) for after_s in (0.0, 0.9, 1.1)] == [False, False, True]
    assert not Span(70.0, 79.0).meets(outcome, after_s=5.0)


def test_calls_are_noted_as_they_were(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(notes.FOLDER, str(tmp_path))
    times = iter([1.0, 2.0, 3.0, 4.5, 5.0, 6.0])
    monkeypatch.setattr(notes, "time", SimpleNamespace(monotonic=lambda: next(times)))

    with noted("moody"), pytest.raises(ValueError, match="no"), noted("trickle"):
        raise ValueError("no")
    with noted("trickle"):
        calls = take_notes(tmp_path)

    assert calls == [
        Call("moody", 1.0, 4.5),
        Call("trickle", 2.0, 3.0, has_raised=True),
        Call("trickle", 5.0, math.inf),
    ]


def test_notes_have_the_clock_of_the_clients(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(notes.FOLDER, str(tmp_path))
    began = time.monotonic()

    with noted("moody"):
        pass

    (call,) = take_notes(tmp_path)
    assert began <= call.began <= call.ended <= time.monotonic()
