"""The contract of a controller as a test class: subclass it, and its tests are yours; and a feed that drives one.

::

    class TestMyController(ControllerContract):
        def make(self):
            return MyController(module="calm")

`ControllerFeed` hands a controller requests and steps as an engine does, without an engine and without threads.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

import numpy as np

from headgate.steering.controllers.actions import SetGlobal, SetScale, SetSteering, SingleAction, Stop, singles
from headgate.steering.controllers.controller import Controller, RequestView, StepReadings
from headgate.steering.controllers.loading import read_probes

_ACTIONS = (SetSteering, SetGlobal, SetScale, Stop)


class ControllerFeed:
    """Requests of a controller, and their steps.

    Args:
        controller: To drive.
    """

    def __init__(self, controller: Controller) -> None:
        self._controller = controller
        self._probes = tuple(read_probes("under test", controller))
        self._tokens: dict[str, list[int]] = {}
        self._num_prompt: dict[str, int] = {}
        self._reported: dict[str, int] = {}

    def begin(self, request: str, prompt: Sequence[int]) -> None:
        """Begin a request with the tokens of its prompt."""
        self._tokens[request], self._num_prompt[request], self._reported[request] = list(prompt), len(prompt), 0
        self._controller.request_begins(self._view(request))

    def step(self, scores: Mapping[str, Sequence[float] | float]) -> list[SingleAction]:
        """Read rows of some requests, and return the controller's actions, actions for several requests one by one.

        The rows of a prompt come first; each row after them generates a token.

        Args:
            scores: By request, one for each of its next rows; equal for all probes.
        """
        rows: list[tuple[str, int, float]] = []
        for request, given in scores.items():
            for value in given if isinstance(given, Sequence) else [given]:
                position = self._reported[request]
                self._reported[request] += 1
                if position >= len(self._tokens[request]):
                    self._tokens[request].append(position % 100)
                rows.append((request, position, value))
        values = np.array([value for *_, value in rows], np.float32)
        readings = StepReadings(
            requests=tuple(request for request, *_ in rows),
            positions=np.array([position for _, position, _ in rows], np.int64),
            is_prompt=np.array([position < self._num_prompt[request] for request, position, _ in rows], np.bool_),
            scores={name: values.copy() for name in self._probes},
            tokens=[self._tokens[request] for request, *_ in rows],
        )
        return list(singles(self._controller.step(readings)))

    def end(self, request: str) -> None:
        """End a request."""
        view = self._view(request)
        del self._tokens[request]
        self._controller.request_ends(view)

    def _view(self, request: str) -> RequestView:
        tokens = tuple(self._tokens[request])
        return RequestView(request=request, num_prompt_tokens=self._num_prompt[request], token_ids=tokens)


class ControllerContract(ABC):
    """Tests of the properties that an engine relies on; subclass it as ``Test...``."""

    @abstractmethod
    def make(self) -> Controller:
        """Return a new controller."""

    def test_it_names_probes_that_the_forward_can_read(self) -> None:
        assert read_probes("under test", self.make())

    def test_it_takes_prompts_in_chunks_and_generated_rows_of_several_requests(self) -> None:
        feed = ControllerFeed(self.make())
        feed.begin("a", [1, 2, 3, 4, 5])
        _check(feed.step({"a": [0.5, -0.5, 2.0]}), {"a"})
        feed.begin("b", [7])
        _check(feed.step({"a": [0.1, 0.2], "b": [3.0]}), {"a", "b"})
        for at in range(20):
            _check(feed.step({"a": math.sin(at), "b": 4 * math.cos(at)}), {"a", "b"})

    def test_it_takes_scores_that_are_no_numbers(self) -> None:
        feed = ControllerFeed(self.make())
        feed.begin("a", [1])
        for score in (0.1, math.nan, math.inf, -math.inf, 0.2):
            _check(feed.step({"a": score}), {"a"})

    def test_requests_end_at_any_time_and_their_ids_come_again(self) -> None:
        feed = ControllerFeed(self.make())
        for _ in range(3):
            feed.begin("a", [1, 2])
            feed.begin("b", [1, 2])
            feed.end("b")  # before it had a step
            _check(feed.step({"a": [1.0, 2.0]}), {"a"})
            _check(feed.step({"a": 3.0}), {"a"})
            feed.end("a")

    def test_requests_do_not_depend_on_one_another_s_ids(self) -> None:
        answers = []
        for name in ("a", "another"):
            feed = ControllerFeed(self.make())
            feed.begin(name, [1, 2])
            steps = [feed.step({name: [0.3, 0.6]}), *(feed.step({name: score}) for score in (2.0, -2.0, 0.5))]
            answers.append(repr(steps).replace(repr(name), "it"))
        assert answers[0] == answers[1]


def _check(actions: Sequence[SingleAction], running: set[str]) -> None:
    for action in actions:
        assert isinstance(action, _ACTIONS), f"{action!r} is no action"
        if isinstance(action, SetSteering | Stop):
            assert action.request in running, f"{action!r} is for a request that does not run"
        if not isinstance(action, Stop):
            assert math.isfinite(action.scale), f"{action!r} has no finite scale"
        if isinstance(action, SetSteering | SetGlobal):
            assert len(action.given) <= 1, f"{action!r} turns several contents on"
