"""Several selectors as one: the union of what each selects, in parts that have no position in common."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from headgate.capture.planning.planner import RequestPlanReader
from headgate.capture.schema.errors import RequestError
from headgate.capture.schema.limits import count_rows, use_of
from headgate.capture.schema.positions import (
    MAX_LISTED,
    MAX_SEVERAL,
    Indices,
    Message,
    Named,
    PositionSelector,
    Several,
    Span,
    parse_positions,
    parts_of,
    selector_from_wire,
)
from headgate.capture.schema.sites import HookPoint, Site
from headgate.capture.schema.spec import CaptureSpec
from headgate.consumers.feed import EXAMPLE_MODEL as MODEL
from tests.strategies import selectors

ROWS = np.arange(64, dtype=np.int64)
SITE = Site.parse("1.post_mlp")


def selected(selector: PositionSelector, num_prompt: int) -> set[int]:
    return set(ROWS[selector.mask(ROWS, np.full_like(ROWS, num_prompt))].tolist())


def read(*raw: Any, num_prompt: int = 5) -> PositionSelector:
    return parse_positions(list(raw), "p", takes_several=True).resolve(num_prompt, "p")


@given(several=st.lists(selectors(), min_size=1, max_size=5), num_prompt=st.integers(1, 24))
def test_any_of_them_selects(several: list[PositionSelector], num_prompt: int) -> None:
    try:
        each = [selector.resolve(num_prompt, "p") for selector in several]
        united = Several(tuple(several)).resolve(num_prompt, "p")
    except RequestError:
        assume(False)
        raise
    wanted = [part.wanted(num_prompt) for part in parts_of(united)]
    listed = [int(position) for part in wanted for position in part[:64] if position < 64]

    expected = set().union(*(selected(selector, num_prompt) for selector in each))
    assert sorted(listed) == sorted(expected)
    assert selected(united, num_prompt) == expected
    assert united.needs_prompt(num_prompt) == any(position < num_prompt - 1 for position in expected)
    assert united.resolve(num_prompt, "p") == united
    assert selector_from_wire(msgspec.msgpack.decode(msgspec.msgpack.encode(united.to_wire()))) == united
    assert count_rows(united, num_prompt, 40) == len([position for position in expected if position < 40])
    spec = CaptureSpec(sites=(SITE,), positions=united)
    plan = RequestPlanReader([SITE]).read(num_prompt, {3: spec})
    assert plan is not None
    assert (plan.first, len(plan.bounds)) == (min(expected), len(parts_of(united)))
    assert plan.shape.bits.tolist() == [[8] * len(parts_of(united))]


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        (["last_prompt", "all_generated"], Span(4)),
        (["all_prompt", "last_prompt"], Span(0, 5)),
        ([{"stop": 2}, {"start": 1, "stop": 4}], Span(0, 4)),
        ([{"stop": 2}, "all_generated"], Several((Span(0, 2), Span(5)))),
        ([{"stop": 1}, {"start": 3, "stop": 4}], Span(0, 6, 3)),
        ([[0], {"start": 3, "stop": 5}], Indices.of([0, 3, 4])),
        ([{"start": 1, "step": 2}, "all_generated"], Several((Span(1, 5, 2), Span(5)))),
        ([{"start": 1, "step": 2}, [1, 2]], Several((Span(2, 3), Span(1, None, 2)))),
        ([{"start": 0, "stop": 2_000_000_000}, {"start": 5, "stop": 7}], Span(0, 2_000_000_000)),
    ],
    ids=repr,
)
def test_the_parts_are_as_few_as_may_be(raw: list[Any], expected: PositionSelector) -> None:
    found = read(*raw)

    assert selected(found, 5) == selected(expected, 5)
    assert [type(part) for part in parts_of(found)] == [type(part) for part in parts_of(expected)]


def test_positions_that_are_listed_count_as_such() -> None:
    found = read([0], {"start": 3, "stop": 5}, "all_generated", num_prompt=9)
    spec = CaptureSpec(sites=(SITE,), positions=found)

    use = use_of({"rows": spec}, num_prompt=9, max_tokens=5, num_samples=2, model=MODEL, readouts={})

    assert (use.num_rows, use.num_bytes, use.num_listed) == ({"rows": 14}, {"rows": 14 * 16 * 2}, {"rows": 6})


def test_lists_of_hook_points_count_together() -> None:
    lists = [Indices.of(values) for values in ([0, 1, 4, 9], [2, 3, 5], [7, 8])]
    hooks = dict(zip((HookPoint.PRE_ATTN, HookPoint.POST_MLP), lists[1:], strict=True))
    spec = CaptureSpec(sites=(SITE,), positions=lists[0], hook_positions=hooks)

    use = use_of({"rows": spec}, num_prompt=12, max_tokens=5, num_samples=2, model=MODEL, readouts={})

    assert use.num_listed == {"rows": 2 * (4 + 3 + 2)}


@pytest.mark.parametrize(
    ("raw", "field", "message"),
    [
        (["last_prompt", "most"], r"p\[1\]", "unknown selector 'most'"),
        ([{"role": "user"}, ["x"]], r"p\[1\]\[0\]", "expected an integer, got 'x'"),
        (["all", ["all"]], r"p\[1\]\[0\]", "expected an integer, got 'all'"),
        (["last_prompt", [-9]], r"p\[1\]", "position -9 lies before the prompt"),
        (["all"] * (MAX_SEVERAL + 1), "p", f"lists {MAX_SEVERAL + 1} selectors, at most {MAX_SEVERAL}"),
        ([{"step": 2}, {"start": 1, "step": 3}], "p", "one of several selectors without an end must have step 1"),
        (
            [{"stop": 20_000}, {"start": 30_000, "stop": 50_000}],
            "p",
            f"come to 40000 positions that are not in one run; at most {MAX_LISTED}",
        ),
    ],
    ids=lambda value: str(value)[:40],
)
def test_what_cannot_be_said_is_refused_with_its_field(raw: list[Any], field: str, message: str) -> None:
    with pytest.raises(RequestError, match=rf"^{field}: .*{message}"):
        read(*raw)


MESSAGES = [Span(2, 6), Span(6, 10), Span(14, 17)]


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        ({"index": "all"}, {*range(2, 10), 14, 15, 16}),
        ({"index": "all", "start": -1}, {5, 9, 16}),
        ({"index": "all", "start": 3}, {5, 9}),
        ({"index": "all", "start": 1, "stop": -1}, {3, 4, 7, 8, 15}),
        ({"index": "all", "step": 3}, {2, 5, 6, 9, 14}),
        ({"index": "all", "start": 3, "include_generated": True}, {5, 9, *range(20, 64)}),
    ],
    ids=repr,
)
def test_parts_of_messages(raw: dict[str, Any], expected: set[int]) -> None:
    selector = parse_positions(raw, "p")
    assert isinstance(selector, Message)

    assert selector_from_wire(selector.to_wire()) == selector
    assert selected(selector.within(MESSAGES, "p").resolve(20, "p"), 20) == expected


def test_one_message_that_the_prompt_ends_with_goes_on_into_the_answer() -> None:
    selector = Message("assistant", -1, include_generated=True)

    assert selector.within([Span(14, 20)], "p").resolve(20, "p") == Span(14)


def test_a_part_that_no_message_has_is_refused() -> None:
    selector = Message(None, None, Span(4))

    with pytest.raises(RequestError, match="p: selects no position: the tokens of the messages that it means are 4, 3"):
        selector.within([Span(2, 6), Span(14, 17)], "p")


def test_others_than_captures_take_one_selector_alone() -> None:
    with pytest.raises(RequestError, match=r"^positions\[0\]: expected an integer"):
        parse_positions(["last_prompt"], "positions")

    assert parse_positions("last_prompt", "positions") == Named("last_prompt")
