"""Answers on their way from the process of the controllers: taken one by one, or left to the forward and settled."""

from __future__ import annotations

import pickle
import random
from collections import deque
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headgate.capture.schema.batch import Int32Array, Int64Array
from headgate.steering.controllers import SetSteering, SetSteeringEach, Stop
from headgate.steering.controllers.actions import Action, singles
from headgate.steering.controllers.hosting.answer_reader import AnswerReader
from headgate.steering.controllers.hosting.host import Answers
from headgate.steering.controllers.hosting.messages import ANSWERS, DONE, STEPS, Board
from headgate.steering.controllers.hosting.repeats import Repeats
from headgate.steering.programs.gate_codes import HEARD_POSITION_BITS

REQUESTS, OTHERS = ("a", "b", "c", "d"), ("c", "d", "e")
AHEAD = 2


class Rows:
    """Implements `ActingRows`: the request at place k has slot k + 1, and a row at each step's number."""

    def __init__(self) -> None:
        self.number = 0

    def find(self, req_ids: Any) -> Int64Array | None:
        places = ["abcde".index(req_id) for req_id in req_ids]
        return np.array(places, np.int64)

    def slots(self, places: Int64Array) -> Int32Array:
        return (places + 1).astype(np.int32)

    def positions(self, places: Int64Array) -> Int64Array:
        return np.full(len(places), self.number + AHEAD)


class Memory:
    """The last word of each slot: epoch, position and value."""

    def __init__(self) -> None:
        self.words: dict[int, tuple[int, int, float]] = {}

    def clear(self, slots: Int32Array) -> None:
        for slot in slots.tolist():
            self.words.pop(slot, None)

    def write(self, slots: Int32Array, epoch: int, positions: Int64Array, values: Any) -> None:
        assert values.dtype == np.float32
        for slot, position, value in zip(slots.tolist(), positions.tolist(), values.tolist(), strict=True):
            self.words[slot] = epoch, position, value


class Process:
    """Both ends: what the process does at the end of a step, and the process as the engine core sees it."""

    def __init__(self) -> None:
        self.board = Board()
        self.num_steps = self.num_answers = 0
        self.lost: str | None = None
        self.rows: Rows | None = Rows()
        self.memory = Memory()
        self.repeats = Repeats(self.board)
        self._sent: deque[bytes] = deque()

    def count_step(self) -> None:
        self.num_steps += 1
        self.board.words[STEPS] = self.num_steps

    def finish(self, *actions: tuple[str, Action]) -> None:
        """Finish the next step."""
        number = self.board.words[DONE] + 1
        if self.rows is not None:
            self.rows.number = number
        memory: Any = self.memory
        if actions and not self.repeats.say(number, actions, self.rows, memory):
            self._sent.append(pickle.dumps(self.repeats.pack(Answers(actions=list(actions)))))
            self.board.words[ANSWERS] += 1
        self.board.words[DONE] = number

    @property
    def num_behind(self) -> int:
        return self.num_steps - self.board.words[DONE]

    @property
    def has_answers(self) -> bool:
        return self.num_answers < self.board.words[ANSWERS]

    def receive(self) -> Any:
        self.num_answers += 1
        return pickle.loads(self._sent.popleft())


class Pair:
    def __init__(self) -> None:
        self.process = Process()
        process: Any = self.process
        self.reader = AnswerReader(process, ["one", "two"], lambda _: None)

    def step(self, *actions: tuple[str, Action]) -> Answers:
        self.process.count_step()
        self.process.finish(*actions)
        return self.reader.take(())


def each(*scales: float, requests: tuple[str, ...] = REQUESTS, at: list[int] | None = None) -> tuple[str, Action]:
    places = None if at is None else np.array(at, np.int64)
    return "one", SetSteeringEach(requests, "m", np.array(scales, np.float64), places)


def alike(actions: Any) -> list[tuple[str, Action]]:
    return [(name, one) for name, action in actions for one in singles([action])]


def heard_pair() -> Pair:
    """A pair after two actions; what follows is left to the forward."""
    pair = Pair()
    assert pair.step(each(1, 2, 3, 4)).repeat is None
    repeat = pair.step(each(2, 3, 4, 5)).repeat
    assert repeat is not None
    assert (repeat.controller, repeat.requests, repeat.module) == ("one", REQUESTS, "m")
    pair.reader.begin()
    return pair


def test_repeats_are_left_to_the_forward_until_they_are_settled():
    pair = heard_pair()

    for number, scale in enumerate((0.5, 0.25), 3):
        found = pair.step(each(scale, -scale, at=[0, 2]))
        assert (pair.reader.take_count(), found.settled, found.actions) == (2, None, [])
        epoch, position, value = pair.process.memory.words[1]
        assert (position, value) == (number + AHEAD, scale)
    assert pair.process.memory.words[2][1:] == (2 + AHEAD, 3.0)
    assert epoch > 0

    pair.reader.settle()
    found = pair.step(each(9, at=[1]))
    assert found.settled is not None
    np.testing.assert_array_equal(found.settled, [0.25, 9, -0.25, 5])
    assert pair.reader.take_count() == 0
    assert alike(found.actions) == alike([each(9, at=[1])])
    assert found.repeat is not None


def test_another_answer_settles_what_was_heard_before_it():
    pair = heard_pair()
    pair.step(each(7, at=[0]))

    found = pair.step(("two", Stop("a", "well")))
    assert found.settled is not None
    np.testing.assert_array_equal(found.settled, [7, 3, 4, 5])
    assert found.actions == [("two", Stop("a", "well"))]
    assert found.repeat is None
    assert alike(pair.step(each(1, 1, 1, 1)).actions) == alike([each(1, 1, 1, 1)])


def test_nothing_is_settled_while_the_process_is_late_and_all_is_once_it_is_gone():
    pair = heard_pair()
    pair.reader.settle()
    pair.process.count_step()
    assert pair.reader.take(()).settled is None
    pair.process.finish(each(8, at=[3]))
    pair.process.count_step()
    assert pair.reader.take(()).settled is None
    assert pair.reader.take_count() == 1
    pair.process.lost = "gone"

    found = pair.reader.take(("a",))
    assert found.settled is not None
    np.testing.assert_array_equal(found.settled, [2, 3, 4, 8])
    assert {off.controller for off in found.switched_off} == {"one", "two"}


def test_who_has_left_nothing_can_take_repeats_again():
    pair = heard_pair()
    assert pair.reader.cancel()
    assert alike(pair.step(each(1, at=[0])).actions) == alike([each(1, at=[0])])

    pair.reader.begin()
    pair.step(each(2, at=[0]))
    assert not pair.reader.cancel()
    pair.reader.settle()
    assert pair.step().settled is not None


@pytest.mark.parametrize("scale", [float("nan"), 1e7], ids=str)
def test_a_scale_that_may_be_refused_is_not_heard(scale):
    pair = heard_pair()

    found = pair.step(each(scale, at=[0]))
    assert found.settled is not None
    assert len(found.actions) == 1
    assert pair.process.memory.words[1][2] == 2.0


@pytest.mark.parametrize("at", [[4], [-1], [1, 0], [2, 2], None], ids=repr)
def test_scales_for_no_request_travel_to_who_refuses_them(at):
    pair, wrong = heard_pair(), [1.0] * (1 if at is None else len(at))
    words = dict(pair.process.memory.words)

    found = pair.step(each(*wrong, at=at))
    ((_, action),) = found.actions
    assert isinstance(action, SetSteeringEach)
    assert action.scales.tolist() == wrong
    assert found.settled is not None
    np.testing.assert_array_equal(found.settled, [2, 3, 4, 5])
    assert pair.process.memory.words == words


def test_rows_beyond_those_that_words_can_name_are_not_heard():
    pair = Pair()
    pair.step(each(1, 2, 3, 4))
    assert pair.process.rows is not None
    pair.process.rows.positions = lambda places: np.full(len(places), 1 << HEARD_POSITION_BITS)  # type: ignore[method-assign]

    found = pair.step(each(1, 2, 3, 4))
    assert found.repeat is None
    assert len(found.actions) == 1


def test_requests_are_those_of_each_action():
    pair = Pair()
    both = [each(1, 2, 3, 4), ("two", each(5, 6, 7, requests=OTHERS)[1])]
    assert alike(pair.step(each(0, 0, 0, 0)).actions) == alike([each(0, 0, 0, 0)])
    for _ in range(3):
        assert alike(pair.step(*both).actions) == alike(both)
    assert alike(pair.step(*both[::-1]).actions) == alike(both[::-1])
    assert alike(pair.step(each(9, 9, 9, 9)).actions) == alike([each(9, 9, 9, 9)])


class Chance:
    """Controllers that act by chance, and an engine core that leaves repeats to the forward by chance.

    Attributes:
        said: The last scale of each request, by controller; likewise `known`, to the engine core.
        num_said: Scales in all; likewise `num_known`.
    """

    def __init__(self, seed: int) -> None:
        self.draw, self.pair = random.Random(seed), Pair()
        self.said: dict[tuple[str, str], float] = {}
        self.known: dict[tuple[str, str], float] = {}
        self.num_said = self.num_known = 0
        self.heard_of: tuple[str, tuple[str, ...]] | None = None
        self.was_late = False

    def act(self) -> tuple[str, Action]:
        name, requests = self.draw.choice([("one", REQUESTS)] * 6 + [("two", OTHERS)])
        at = sorted(self.draw.sample(range(len(requests)), self.draw.randint(1, len(requests))))
        scales = [self.draw.random() for _ in at]
        self.said.update({(name, requests[place]): scale for place, scale in zip(at, scales, strict=True)})
        self.num_said += len(at)
        return name, each(*scales, requests=requests, at=None if len(at) == len(requests) else at)[1]

    def take(self) -> None:
        found = self.pair.reader.take(())
        self.num_known += self.pair.reader.take_count()
        if found.settled is not None:
            assert self.heard_of is not None
            name, requests = self.heard_of
            pairs = zip(requests, found.settled.tolist(), strict=True)
            self.known.update({(name, one): scale for one, scale in pairs if scale == scale})
            self.heard_of = None
        for name, action in found.actions:
            for one in singles([action]):
                assert isinstance(one, SetSteering)
                self.known[name, one.request] = one.scale
                self.num_known += 1
        if found.repeat is not None and self.heard_of is None and self.draw.random() < 0.5:
            self.heard_of = found.repeat.controller, found.repeat.requests
            self.pair.reader.begin()
        if self.heard_of is None and not self.pair.process.num_behind:
            assert self.known == self.said

    def step(self) -> None:
        process = self.pair.process
        process.count_step()
        if self.draw.random() < 0.1:
            process.rows = None if process.rows is not None else Rows()
        if self.draw.random() < 0.9:
            while process.num_behind:
                process.finish(*(self.act() for _ in range(self.draw.choice([0, 1, 1, 1, 1, 1, 2]))))
        if self.heard_of is not None and self.draw.random() < 0.2:
            self.pair.reader.settle()
        self.was_late = not self.was_late and self.draw.random() < 0.3  # then its answers come behind the next step
        if not self.was_late:
            self.take()


@settings(max_examples=200, deadline=None)
@given(seed=st.integers(0, 10**9))
def test_whatever_is_left_and_settled_the_engine_core_knows_the_last_scales(seed):
    chance = Chance(seed)
    for _ in range(40):
        chance.step()
    while chance.pair.process.num_behind:
        chance.pair.process.finish()
    chance.pair.reader.settle()
    chance.take()
    chance.take()

    assert (chance.known, chance.num_known) == (chance.said, chance.num_said)
