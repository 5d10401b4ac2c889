"""The backlog against a list: numbers, bounds, and what is given up."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from headgate.capture.schema.errors import ConsumerError
from headgate.consumers.stream.consumer import Backlog

MAX_BYTES, MAX_AWAY_S = 40, 10.0


class Backlogs(RuleBasedStateMachine):
    """Puts of a consumer, acknowledgements of readers that come and go, and time."""

    @initialize()
    def begin(self) -> None:
        self.now = 0.0
        self.all: list[bytes] = []
        self.first = 0
        self.is_read = False
        self.left_at = 0.0
        self.gave_up = False
        self.backlog = Backlog(MAX_BYTES, wait_s=0.0, max_away_s=MAX_AWAY_S, clock=lambda: self.now)

    @rule(sizes=st.lists(st.integers(1, 15), max_size=3))
    def put(self, sizes: list[int]) -> None:
        batches = [bytes([len(self.all) % 251]) * size for size in sizes]
        is_away = not self.is_read and self.now - self.left_at >= MAX_AWAY_S
        has_room = self.num_bytes + sum(sizes) <= MAX_BYTES
        if sum(sizes) <= MAX_BYTES // 2 and has_room and not self.gave_up:
            assert self.backlog.put([memoryview(batch) for batch in batches]) == (
                len(self.all),
                len(self.all) + len(sizes),
            )
            self.all += batches
            return
        with pytest.raises(ConsumerError):
            self.backlog.put([memoryview(batch) for batch in batches])
        if sum(sizes) <= MAX_BYTES // 2 and is_away:
            self.first, self.gave_up = len(self.all), True

    @precondition(lambda self: self.is_read)
    @rule(share=st.floats(0, 1))
    def acknowledge(self, share: float) -> None:
        number = self.first + round(share * (len(self.all) - self.first))
        self.backlog.acknowledge(number)
        self.first = number

    @rule()
    def come_or_leave(self) -> None:
        self.is_read = not self.is_read
        if self.is_read:
            self.backlog.reader_came()
            self.gave_up = False
        else:
            self.backlog.reader_left()
            self.left_at = self.now

    @rule(seconds=st.floats(0, 8))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds

    @property
    def num_bytes(self) -> int:
        return sum(map(len, self.all[self.first :]))

    @invariant()
    def what_is_kept_is_what_was_not_acknowledged(self) -> None:
        assert self.backlog.span == (self.first, len(self.all))
        assert self.num_bytes <= MAX_BYTES
        for number in range(self.first, len(self.all)):
            kept = self.backlog.get(number, lambda: True)
            assert kept is not None
            assert bytes(kept) == self.all[number]


TestBacklogs = Backlogs.TestCase


@given(kept=st.integers(0, 3))
def test_the_end_comes_after_the_last_batch(kept: int) -> None:
    backlog = Backlog(100, wait_s=0, max_away_s=1)
    backlog.put([memoryview(b"x")] * kept)
    backlog.end()

    assert [backlog.get(number, lambda: True) is None for number in range(kept + 1)] == [False] * kept + [True]
    assert backlog.wait_until_taken(0) == kept
    with pytest.raises(ConsumerError, match="being closed"):
        backlog.put([memoryview(b"x")])
    backlog.acknowledge(kept)
    assert backlog.wait_until_taken(0) == 0


def test_a_batch_that_is_gone_is_no_end() -> None:
    backlog = Backlog(100, wait_s=0, max_away_s=1)
    backlog.put([memoryview(b"x")] * 2)
    backlog.acknowledge(1)

    with pytest.raises(LookupError, match="batch 0 is gone; the first that is kept is 1"):
        backlog.get(0, lambda: True)
    assert backlog.get(0, lambda: False) is None
