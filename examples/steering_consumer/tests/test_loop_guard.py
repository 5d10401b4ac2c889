"""The consumer by itself: when it ends a request."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from headgate_loop_guard import LoopGuard

from headgate.capture import ConfigError, ConsumerContext, RowBlock, RowSpan, Site, SpecContext
from headgate.consumers.feed import EXAMPLE_MODEL, ExampleRequest, Feed
from headgate.steering.controllers import Stop

PARAMS = {"site": "1.post_mlp", "patience": 3}


class Submitted:
    """In place of an engine: takes actions while it has room."""

    def __init__(self) -> None:
        self.actions: list[object] = []
        self.has_room = True

    def submit(self, action: object) -> bool:
        if self.has_room:
            self.actions.append(action)
        return self.has_room


@pytest.fixture
def submitted() -> Submitted:
    return Submitted()


@pytest.fixture
def feed(submitted: Submitted) -> Feed:
    context = ConsumerContext(instance_name="loop_guard", model=EXAMPLE_MODEL)
    return Feed(LoopGuard(PARAMS, replace(context, steering=submitted)))


def request() -> ExampleRequest:
    context = SpecContext(instance_name="loop_guard", model=EXAMPLE_MODEL, params=PARAMS, client_request_id="r")
    return ExampleRequest(LoopGuard.validate_client_spec({}, context), "r", prompt=2, output=9)


def write(feed: Feed, asked: ExampleRequest, rows: Any, first: int) -> None:
    positions = torch.arange(first, first + len(rows)).numpy()
    span = RowSpan(request=asked.info, start=0, stop=len(rows))
    feed.write([RowBlock(sites=(Site.parse("1.post_mlp"),), rows=rows[None], positions=positions, spans=(span,))])


def test_a_request_that_repeats_itself_is_ended_once(feed: Feed, submitted: Submitted) -> None:
    asked, rows = request(), torch.eye(4, EXAMPLE_MODEL.hidden_size)
    feed.begin(asked)

    write(feed, asked, rows[[0, 1, 2, 0, 1, 3]], 2)
    assert submitted.actions == []
    submitted.has_room = False
    write(feed, asked, rows[[0, 1, 2]], 8)
    assert submitted.actions == []
    submitted.has_room = True
    write(feed, asked, rows[[0, 1]], 11)

    assert submitted.actions == [Stop("r", "goes round in circles")]
    assert feed.finish(asked) == {"ended": True}


def test_other_parameters_are_refused() -> None:
    with pytest.raises(ConfigError, match="unknown parameter 'sites'"):
        LoopGuard.check_params({**PARAMS, "sites": []})
    with pytest.raises(ConfigError, match="needs site"):
        LoopGuard.check_params({})
