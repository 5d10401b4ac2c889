"""How requests ended, from the scheduler and the front end together; see `engine_core`."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headgate.capture.engine.contracts.wire_format import Final
from headgate.capture.engine.core.request_ends import Ended, KeptTokens, SchedulerEnds, mark_kept, split_marks

TOKENS = [10, 11, 12, 13, 14, 15]


def final(status: str, tokens: list[int] = TOKENS) -> Final:
    return 2, list(tokens), status, {"steering": len(tokens)}, 1


def ended(status: str) -> Ended:
    return Ended(2, list(TOKENS), status, lambda end: {"steering": end}, 1)


def test_what_the_engine_decides_is_told_at_once() -> None:
    ends = SchedulerEnds()

    ends.end("a", ended("length"), is_decided=True)

    assert ends.pop_finals() == {"a": final("length")}
    assert ends.pop_finals() == {}


def test_what_the_front_end_decides_is_announced_and_told_later() -> None:
    ends = SchedulerEnds()

    ends.end("a", ended("length"), is_decided=False)
    assert ends.pop_finals() == {"a": None}
    ends.front_end_kept("a", KeptTokens(4, "stop"), is_running=False)

    assert ends.pop_finals() == {"a": final("stop", TOKENS[:4])}


def test_both_may_come_before_the_next_step() -> None:
    ends = SchedulerEnds()

    ends.end("a", ended("stop"), is_decided=False)
    ends.front_end_kept("a", KeptTokens(6, "stop"), is_running=False)

    assert ends.pop_finals() == {"a": final("stop")}


@pytest.mark.parametrize("num_kept", [3, 6])
def test_a_stop_string_looks_like_an_abort_to_the_engine(num_kept: int) -> None:
    ends = SchedulerEnds()

    ends.front_end_kept("a", KeptTokens(num_kept, "stop"), is_running=True)
    ends.end("a", ended("abort"), is_decided=True)

    assert ends.pop_finals() == {"a": final("stop", TOKENS[:num_kept])}


def test_the_engine_ends_a_request_on_the_way_of_the_news() -> None:
    ends = SchedulerEnds()

    ends.front_end_kept("a", KeptTokens(5, "stop"), is_running=True)
    ends.end("a", ended("length"), is_decided=False)

    assert ends.pop_finals() == {"a": final("stop", TOKENS[:5])}


def test_the_engine_knows_why_if_both_end_at_the_same_token() -> None:
    ends = SchedulerEnds()

    ends.end("a", ended("length"), is_decided=False)
    ends.front_end_kept("a", KeptTokens(6, "stop"), is_running=False)

    assert ends.pop_finals() == {"a": final("length")}


def test_a_front_end_that_gives_up_leaves_the_engine_s_word() -> None:
    ends = SchedulerEnds()

    ends.end("a", ended("stop"), is_decided=False)
    ends.pop_finals()
    ends.front_end_left("a")

    assert ends.pop_finals() == {"a": final("stop")}


def test_news_that_come_twice_or_of_unknown_requests_are_ignored() -> None:
    ends = SchedulerEnds()

    ends.end("a", ended("stop"), is_decided=False)
    for _ in range(2):
        ends.front_end_kept("a", KeptTokens(4, "stop"), is_running=False)
    ends.front_end_kept("b", KeptTokens(1, "stop"), is_running=False)
    ends.front_end_left("c")

    assert ends.pop_finals() == {"a": final("stop", TOKENS[:4])}
    assert vars(ends) == vars(SchedulerEnds())


@given(
    ids=st.lists(st.text(st.characters(exclude_characters="\0"), min_size=1), unique=True),
    kept=st.dictionaries(
        st.text(st.characters(exclude_characters="\0"), min_size=1),
        st.builds(KeptTokens, st.integers(0, 2**31), st.sampled_from(["stop", "abort"])),
    ),
)
def test_marks_travel_among_ids(ids: list[str], kept: dict[str, KeptTokens]) -> None:
    entries = [*ids, *(mark_kept(req_id, said) for req_id, said in kept.items())]

    assert split_marks(entries) == (ids, kept, [])
    assert split_marks(entries[::-1]) == (ids[::-1], kept, [])
