"""Actions between consumers and an engine core: each comes once and in order, and what does not fit is dropped."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
import zmq

from headgate.capture.links import actions
from headgate.capture.links.actions import ActionInbox, ActionSender, actions_address, sink_of
from headgate.capture.links.peer import Channel, Endpoint
from headgate.capture.schema.consumer import MAX_BYTES, ActionTarget, NoActions, Submitted, encode_action
from headgate.capture.schema.errors import ConsumerError, UnsupportedError
from tests.deadlines import patience

TIMEOUT_S = patience(30)


@dataclass(frozen=True)
class Move:
    """An action of a test's own."""

    request: str
    by: Any = 1.0


@pytest.fixture
def address(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(actions.tempfile, "gettempdir", lambda: str(tmp_path))
    return actions_address("17")


@pytest.fixture
def inbox(address: str) -> Iterator[ActionInbox]:
    made = ActionInbox(address)
    yield made
    made.close()


def taken(inbox: ActionInbox, count: int) -> list[Submitted]:
    """So many actions, waited for."""
    found: list[Submitted] = []
    while len(found) < count:
        assert inbox.wait(TIMEOUT_S), f"{len(found)} came"
        found += inbox.take()
    return found


def test_actions_of_several_consumers_come_in_order(address: str, inbox: ActionInbox) -> None:
    sinks = [sink_of(ActionTarget(address=address), name) for name in ("one", "other")]

    for number in range(20):
        assert sinks[number % 2].submit(Move("r", number))

    found = taken(inbox, 20)
    for at, name in enumerate(("one", "other")):
        mine = [each for each in found if each.consumer == name]
        actions = [msgspec.msgpack.decode(each.action) for each in mine]
        assert actions == [["Move", {"request": "r", "by": number}] for number in range(at, 20, 2)]
    assert {each.num_dropped for each in found} == {0}
    assert inbox.take() == []


def test_what_does_not_fit_is_dropped_and_counted(
    address: str, inbox: ActionInbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(actions, "_SHARE", 4)
    sink = ActionSender(address, "one")

    took = [sink.submit(Move("r", number)) for number in range(20)]

    assert 4 <= sum(took) <= 8  # those that have come, and those on their way
    numbers = [number for number, was_taken in enumerate(took) if was_taken]
    found = taken(inbox, len(numbers))
    assert [msgspec.msgpack.decode(each.action)[1]["by"] for each in found] == numbers
    while not sink.submit(Move("r", -1)):  # until it knows that all were taken
        pass
    (last,) = taken(inbox, 1)
    assert sum(each.num_dropped for each in (*found, last)) >= 20 - sum(took)


def test_an_engine_that_is_not_there_or_gone_takes_nothing(address: str) -> None:
    sink = ActionSender(address, "one")
    assert not sink.submit(Move("r"))

    inbox = ActionInbox(address)
    assert sink.submit(Move("r"))
    (found,) = taken(inbox, 1)
    assert found.num_dropped == 1
    folder = Path(address.removeprefix("ipc://")).parent
    assert folder.stat().st_mode & 0o777 == 0o700
    inbox.close()

    assert not folder.exists()
    while sink.submit(Move("r")):  # until it hears of it
        pass


def test_an_engine_without_controllers_refuses_by_name() -> None:
    for sink in (NoActions(), sink_of(ActionTarget(refusal="start it with --steering-from-consumers"), "one")):
        with pytest.raises(ConsumerError, match=r"steering\.submit: (no engine|start it with)"):
            sink.submit(Move("r"))


def test_a_folder_of_somebody_else_is_not_used(address: str) -> None:
    folder = Path(address.removeprefix("ipc://")).parent
    folder.mkdir(mode=0o755)
    os.chmod(folder, 0o755)

    with pytest.raises(ConsumerError, match="is not this user's alone"):
        ActionSender(address, "one").submit(Move("r"))
    with pytest.raises(UnsupportedError, match="cannot be made"):
        ActionInbox(address)


def test_other_messages_are_counted_and_passed_over(address: str, inbox: ActionInbox) -> None:
    channel = Channel(zmq.Context.instance(), Endpoint(address), 1 << 20)
    for frames in ([b"x"], [b"x", b"y"], [msgspec.msgpack.encode(["one", "many"]), b"y"]):
        assert channel.send(frames, timeout_s=TIMEOUT_S)
    assert channel.close(TIMEOUT_S) == 0

    sink = ActionSender(address, "one")
    assert sink.submit(Move("r"))
    assert len(taken(inbox, 1)) == 1
    assert inbox.num_malformed == 3


def test_arrays_and_tensors_are_sent_as_numbers() -> None:
    by = {"post_mlp": {1: np.array([0.5, 1.0], np.float32), 2: torch.tensor([2.0, 3.0], dtype=torch.bfloat16)}}

    assert msgspec.msgpack.decode(encode_action(Move("r", by)), strict=False) == [
        "Move",
        {"request": "r", "by": {"post_mlp": {1: [0.5, 1.0], 2: [2.0, 3.0]}}},
    ]
    for wrong, message in (
        ({"request": "r"}, "expected an action of headgate.steering.controllers, got dict"),
        (Move, "got type"),
        (Move("r", object()), "Move cannot be sent: a object is neither plain nor an array"),
        (Move("r", b"x" * MAX_BYTES), "at most .* may; register its vectors as a module"),
    ):
        with pytest.raises(ConsumerError, match=message):
            encode_action(wrong)
