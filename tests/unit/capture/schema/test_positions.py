"""Selectors: what is accepted, what they select, and that every form of one selector says the same."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from headgate.capture.schema import positions
from headgate.capture.schema.errors import RequestError
from headgate.capture.schema.positions import (
    MAX_LISTED,
    MAX_POSITION,
    NAMED,
    Indices,
    Message,
    Named,
    PositionSelector,
    Span,
    parse_positions,
    run_of,
    selector_from_wire,
)
from tests.fakes.unread import Unread
from tests.strategies import selectors

PROMPTS = st.integers(1, 24)
ROWS = np.arange(64, dtype=np.int64)


def selected(selector: PositionSelector, num_prompt: int) -> list[int]:
    """Positions below 64 that `selector` wants, by its mask."""
    return list(map(int, ROWS[selector.mask(ROWS, np.full_like(ROWS, num_prompt))]))


def resolve_or_reject(selector: PositionSelector, num_prompt: int) -> PositionSelector:
    try:
        return selector.resolve(num_prompt, "positions")
    except RequestError:
        assume(False)
        raise


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        ("last_prompt", [4]),
        ("all_prompt", [0, 1, 2, 3, 4]),
        ("all_generated", list(range(5, 64))),
        ("all", list(range(64))),
        ([3, 0, 3, 9], [0, 3, 9]),
        ([-1, -5], [0, 4]),
        ([4, -1], [4]),
        (range(2, 5), [2, 3, 4]),
        ([np.int64(2)], [2]),
        ({"start": 2, "stop": 4}, [2, 3]),
        ({"start": -2}, list(range(3, 64))),
        ({"stop": -3}, [0, 1]),
        ({"start": -2, "stop": 7}, [3, 4, 5, 6]),
        ({"start": -99, "stop": 2}, [0, 1]),
        ({"step": 20}, [0, 20, 40, 60]),
        ({"start": 1, "stop": None, "step": 30}, [1, 31, 61]),
    ],
    ids=repr,
)
def test_a_selector_selects_what_the_reader_expects(raw: object, expected: list[int]) -> None:
    selector = parse_positions(raw, "positions").resolve(5, "positions")

    assert selected(selector, 5) == expected


@pytest.mark.parametrize(
    ("raw", "field", "message"),
    [
        ("last", "positions", "unknown selector 'last'; expected one of last_prompt"),
        (None, "positions", "unknown selector None"),
        (3, "positions", "unknown selector 3"),
        ([], "positions", "unknown selector"),
        ({}, "positions", "unknown selector"),
        (b"abc", "positions", "unknown selector"),
        ({"start": 1, "include_generated": True}, "positions", "unknown selector"),
        ({"begin": 1}, "positions", "unknown selector"),
        ([1, "2"], r"positions\[1\]", "expected an integer, got '2'"),
        ([True], r"positions\[0\]", "expected an integer, got True"),
        ([1.0], r"positions\[0\]", "expected an integer, got 1.0"),
        ([0, MAX_POSITION + 1], r"positions\[1\]", "beyond any context length"),
        ({"start": 1.5}, r"positions\.start", "expected an integer"),
        ({"stop": -MAX_POSITION - 1}, r"positions\.stop", "beyond any context length"),
        ({"step": 0}, r"positions\.step", "must be at least 1"),
        ({"step": -1}, r"positions\.step", "must be at least 1"),
        ({"start": 4, "stop": 4}, "positions", "selects no position"),
        ({"start": -1, "stop": -3}, "positions", "selects no position"),
        ({"role": ""}, r"positions\.role", "expected the role of a message"),
        ({"role": "user", "index": "last"}, r"positions\.index", "expected an integer"),
        ({"role": "user", "step": 0}, r"positions\.step", "must be at least 1"),
        ({"index": 0, "include_generated": 1}, r"positions\.include_generated", "expected true or false, got 1"),
        (["last_prompt", {"role": "user"}], r"positions\[0\]", "expected an integer, got 'last_prompt'"),
    ],
    ids=repr,
)
def test_what_is_no_selector_is_refused_with_its_field(raw: object, field: str, message: str) -> None:
    with pytest.raises(RequestError, match=rf"^{field}: .*{message}"):
        parse_positions(raw, "positions")


def test_a_list_that_is_too_long_is_refused_unread() -> None:
    with pytest.raises(RequestError, match=rf"^positions: lists {MAX_LISTED + 1} positions, at most {MAX_LISTED} "):
        parse_positions(Unread(MAX_LISTED + 1), "positions")


@pytest.mark.parametrize("raw", [[3, 10, 11], [2**31], [3, 2**70], [np.int64(10)]], ids=str)
def test_a_list_beyond_the_context_is_refused_with_the_first_entry_that_is(raw: list[int]) -> None:
    index = len(raw) - 1 if raw[-1] != 11 else 1
    with pytest.raises(RequestError, match=rf"^positions\[{index}\]: .*beyond "):
        parse_positions(raw, "positions", context_length=10)

    assert parse_positions([9, -5], "positions", context_length=10).resolve(5, "positions") == Indices.of([0, 9])


def test_the_fields_of_a_list_are_named_for_an_error_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    named: list[str] = []
    integer = positions._integer
    monkeypatch.setattr(positions, "_integer", lambda value, field: (named.append(field), integer(value, field))[1])

    parse_positions([*range(0, 1000, 3), -4], "positions")
    assert named == []
    with pytest.raises(RequestError):
        parse_positions([*range(1000), "a"], "positions")
    assert named == ["positions[1000]"]


def test_a_long_list_travels_as_the_bytes_that_it_is() -> None:
    selector = parse_positions([*range(0, MAX_LISTED - 1), 2**20], "positions").resolve(5, "positions")
    assert isinstance(selector, Indices)
    wire = selector.to_wire()

    received = selector_from_wire(wire)

    assert isinstance(received, Indices)
    assert received.data is wire is selector.data
    assert received.described() == {"num_listed": MAX_LISTED, "first": 0, "last": 2**20}


@pytest.mark.parametrize("raw", [[-6], [0, -6], {"start": 3, "stop": -2}, {"stop": -5}, {"start": -1, "stop": 4}])
def test_what_selects_nothing_of_this_prompt_is_refused(raw: object) -> None:
    with pytest.raises(RequestError, match=r"^capture\.x\.positions: "):
        parse_positions(raw, "capture.x.positions").resolve(5, "capture.x.positions")


@given(selector=selectors(), num_prompt=PROMPTS)
def test_negative_positions_count_from_the_end_of_the_prompt(selector: PositionSelector, num_prompt: int) -> None:
    """Before the prompt there is nothing: a bound is moved to its start, an index is refused."""
    resolved = resolve_or_reject(selector, num_prompt)

    if isinstance(selector, Indices):
        expected = sorted({ROWS[:num_prompt][value] if value < 0 else value for value in selector.values})
    elif isinstance(selector, Span):
        start, stop = (max(p + num_prompt, 0) if p < 0 else p for p in (selector.start, selector.stop or 0))
        expected = list(range(start, 64 if selector.stop is None else stop, selector.step))
    else:
        expected = selected(selector, num_prompt)
    assert selected(resolved, num_prompt) == expected
    assert expected or isinstance(selector, Named)


@given(selector=selectors(), num_prompt=PROMPTS)
def test_the_wanted_positions_are_those_of_the_mask(selector: PositionSelector, num_prompt: int) -> None:
    resolved = resolve_or_reject(selector, num_prompt)

    wanted = resolved.wanted(num_prompt)

    assert [position for position in wanted[:64] if position < 64] == selected(resolved, num_prompt)
    assert 0 <= wanted[0] <= wanted[-1] <= MAX_POSITION


@given(selector=selectors(), lengths=st.lists(PROMPTS, min_size=1, max_size=4))
def test_a_run_is_what_the_selector_selects_of_each_prompt(selector: PositionSelector, lengths: list[int]) -> None:
    """Data sets cut rows by it, for all lengths at once and without resolving the selector."""
    run = run_of(selector, np.array(lengths, np.int64))

    assert (run is None) == (isinstance(selector, Indices) or (isinstance(selector, Span) and selector.step > 1))
    for number, num_prompt in enumerate(lengths if run is not None else ()):
        try:
            expected = selected(selector.resolve(num_prompt, "positions"), num_prompt)
        except RequestError:  # nothing of a prompt of that length
            expected = []
        assert run is not None
        assert [each for each in range(64) if run[0][number] <= each < run[1][number]] == expected


@given(values=st.sets(st.integers(0, 9), min_size=1).map(sorted))
def test_a_list_is_a_range_where_it_is_evenly_spaced(values: list[int]) -> None:
    wanted = Indices.of(values).wanted(4)

    distances = {after - before for before, after in pairwise(values)}
    assert isinstance(wanted, range) == (len(distances) <= 1)
    assert list(wanted) == values


@given(selector=selectors(), num_prompt=PROMPTS)
def test_the_prompt_is_needed_if_a_position_before_its_last_is_wanted(
    selector: PositionSelector, num_prompt: int
) -> None:
    resolved = resolve_or_reject(selector, num_prompt)

    assert resolved.needs_prompt(num_prompt) == any(p < num_prompt - 1 for p in selected(resolved, num_prompt))


@given(selector=selectors(), num_prompt=PROMPTS)
def test_the_wire_returns_an_equal_selector(selector: PositionSelector, num_prompt: int) -> None:
    resolved = resolve_or_reject(selector, num_prompt)

    received = selector_from_wire(msgspec.msgpack.decode(msgspec.msgpack.encode(resolved.to_wire())))

    assert received == resolved
    assert hash(received) == hash(resolved)


@given(selector=selectors(), num_prompt=PROMPTS)
def test_resolving_twice_changes_nothing(selector: PositionSelector, num_prompt: int) -> None:
    resolved = resolve_or_reject(selector, num_prompt)

    assert resolved.resolve(num_prompt, "positions") == resolved


def test_one_mask_serves_rows_of_requests_with_different_prompts() -> None:
    rows, num_prompt = np.array([2, 2, 3], dtype=np.int64), np.array([2, 3, 4], dtype=np.int64)

    masks = {name: Named(name).mask(rows, num_prompt).tolist() for name in NAMED}

    assert masks == {
        "last_prompt": [False, True, True],
        "all_prompt": [False, True, True],
        "all_generated": [True, False, False],
        "all": [True, True, True],
    }


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ({"role": "user", "index": 0}, Message("user", 0)),
        ({"role": "user"}, Message("user", -1)),
        ({"index": 2}, Message(None, 2)),
    ],
)
def test_a_message_is_only_for_chats_and_never_gets_past_the_front_end(raw: Any, message: Message) -> None:
    selector = parse_positions(raw, "positions")

    assert selector == message
    assert selector_from_wire(selector.to_wire()) == message
    assert selector.needs_prompt(5)
    with pytest.raises(RequestError, match=r"^positions: .*chat"):
        selector.resolve(5, "positions")
    with pytest.raises(AssertionError, match="front end"):
        selector.mask(ROWS, ROWS)
    with pytest.raises(AssertionError, match="front end"):
        selector.wanted(5)
