"""Positions of many requests at once: those that each request by itself has."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headgate.capture.engine.core.block_keys import note_hashed
from headgate.capture.engine.core.part_services import PartServices
from headgate.capture.engine.core.steps_in_flight import StepsInFlight


class Held:
    """A request of a scheduler: its prompt, its tokens, and how many of them were computed."""

    def __init__(self, num_prompt: int, num_generated: int, num_computed: int, status: str) -> None:
        self.num_prompt_tokens = num_prompt
        self.all_token_ids = [0] * (num_prompt + num_generated)
        self.num_tokens = num_prompt + num_generated
        self.num_computed_tokens = num_computed
        self.status = status
        self.request_id = "a"
        self.resumable = False
        self.sampling_params = None
        self.block_hashes: list[bytes] = []

    def is_finished(self) -> bool:
        return self.status == "finished"

    def update_block_hashes(self) -> None: ...


requests = st.builds(
    Held,
    num_prompt=st.integers(1, 9),
    num_generated=st.integers(0, 5),
    num_computed=st.integers(0, 14),
    status=st.sampled_from(["running"] * 8 + ["preempted", "finished"]),
)


def services(held: dict[str, Held], waiting: dict[str, Any]) -> PartServices:
    core: Any = SimpleNamespace(scheduler=SimpleNamespace(requests=held), batch_queue=None, step_fn=None)
    return PartServices(core, "part", StepsInFlight(core), waiting)


@given(
    held=st.dictionaries(st.sampled_from("abcdef"), requests), asked=st.lists(st.sampled_from("abcdefgh")).map(tuple)
)
def test_positions_are_those_of_each_request(held: dict[str, Held], asked: tuple[str, ...]) -> None:
    made = services(held, {"g": Held(3, 0, 0, "waiting")})

    found = made.positions(asked).tolist()

    known = [made.progress(req_id) for req_id in asked]
    assert found == [-1 if progress is None else progress.position for progress in known]


@pytest.mark.parametrize("status", ["running", "finished"])
def test_requests_of_one_status(status: str) -> None:
    held = {name: Held(2, 3, computed, status) for name, computed in (("a", 4), ("b", 6), ("c", 0))}

    found = services(held, {}).positions(("a", "b", "c")).tolist()

    assert found == ([4, 6, 4] if status == "running" else [-1] * 3)


def test_the_same_requests_are_asked_for_again_while_they_run_are_preempted_and_end() -> None:
    held = {name: Held(2, 3, 4, "running") for name in "ab"}
    made, asked = services(held, {}), ("a", "b")

    def run(name: str) -> None:
        held[name].num_computed_tokens += 1
        held[name].num_tokens += 1

    assert made.positions(asked).tolist() == [4, 4]
    run("a")
    assert made.positions(asked).tolist() == [5, 4]
    held["a"].num_computed_tokens, held["a"].status = 0, "preempted"
    preempted: Any = SimpleNamespace(request_id="a")
    made.preempted(preempted)
    assert made.positions(asked).tolist() == [5, 4]
    held["a"].num_computed_tokens, held["a"].status = 3, "running"
    run("b")
    assert made.positions(asked).tolist() == [5, 5]
    del held["b"]
    made.release("b")
    assert made.positions(asked).tolist() == [5, -1]


@pytest.mark.parametrize(
    ("num_generated", "num_computed", "first"),
    [(0, 0, 0), (0, 3, 3), (0, 9, 9), (1, 9, 9), (4, 12, 12), (4, 0, 12), (4, 7, 12), (1, 0, 9)],
)
def test_other_keys_are_of_the_first_row_that_was_not_computed(
    num_generated: int, num_computed: int, first: int
) -> None:
    """The row of the last token is not, also if the request was preempted, or is being computed again."""
    made = services({"a": Held(9, num_generated, num_computed, "running")}, {})

    assert made.rekey_running() == {"a": first}


class Keys:
    """Implements `BlockKeys`: a name for each phase."""

    skips_reading = False

    def __init__(self, prefill: str, decode: str) -> None:
        self.names = prefill, decode

    def of_block(self, start: int, end: int, num_prompt: int) -> tuple[tuple[str, str], ...]:
        return (("tag", self.names[start >= num_prompt]),)


@pytest.mark.parametrize(
    ("now", "num_computed", "begins_again"),
    [(Keys("new", "new"), 6, True), (Keys("old", "new"), 6, False), (Keys("new", "new"), 0, False)],
    ids=["other rows", "the same rows", "not begun"],
)
def test_a_preempted_prompt_whose_keys_change_begins_again(now: Keys, num_computed: int, begins_again: bool) -> None:
    """Nothing is salted, since nobody shares what is computed anew: the rows of before count for nothing."""
    held: Any = Held(9, 0, num_computed, "running")
    made = services({"a": held}, {})
    steps, again = made._steps, []
    steps.begin_again = lambda req_id, _: again.append(req_id)  # type: ignore[method-assign]
    made.open(SimpleNamespace(block_keys=lambda _: now, acts_on=lambda _: True))  # type: ignore[arg-type]
    note_hashed(held, Keys("old", "old"))
    steps.preempted(held)
    held.num_computed_tokens, held.status = 0, "preempted"

    assert made.rekey_running() == {"a": 0}

    assert again == ["a"] * begins_again


def test_a_preempted_prompt_whose_first_token_is_in_flight_does_not_begin_again() -> None:
    """Its rows are of the forward that the token is sampled in."""
    held: Any = Held(9, 0, 9, "running")
    made = services({"a": held}, {})
    again: list[str] = []
    made._steps.begin_again = lambda req_id, _: again.append(req_id)  # type: ignore[method-assign]
    made._salts.renew("a")
    for num_computed in (9, 4):
        held.num_computed_tokens = num_computed
        made._steps.preempted(held)
        held.num_computed_tokens = 0
        made.preempted(held)
        assert again == ["a"] * (num_computed == 4)
