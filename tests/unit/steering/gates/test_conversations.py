"""Latches of conversations: the last ones are remembered, in bounded memory."""

from __future__ import annotations

import pytest

from headgate.steering.gates import conversations
from headgate.steering.gates.conversations import Conversation, ConversationLatches, LatchKey


def key(name: str, gate: int = 0) -> LatchKey:
    return LatchKey(Conversation("", name), gate.to_bytes(32, "little"))


def test_conversations_that_were_used_last_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conversations, "MAX_CONVERSATIONS", 2)
    latches = ConversationLatches()
    latches.latch({key("a"): 0.25, key("b"): 0.5})

    assert latches.find(key("a")) == 0.25
    latches.latch({key("c"): 1.0})

    assert [latches.find(key(name)) for name in "abc"] == [0.25, None, 1.0]
    assert len(latches) == 2


def test_the_memory_of_conversations_with_many_gates_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conversations, "MAX_LATCH_BYTES", 10_000)
    latches = ConversationLatches()
    latches.latch({key("old", gate): 1.0 for gate in range(20)})
    latches.latch({key("new", gate): 1.0 for gate in range(20)})

    assert latches.find(key("old")) is None
    assert latches.find(key("new")) == 1.0
    for gate in range(20, 1000):
        latches.latch({key("new", gate): 1.0})
        assert latches.num_bytes <= 10_000

    assert latches.find(key("new", 999)) == 1.0
    assert latches.find(key("new", 0)) is None


def test_the_first_strength_of_a_gate_stays() -> None:
    latches = ConversationLatches()
    latches.latch({key("a"): 0.25})
    before = latches.num_bytes
    latches.latch({key("a"): 0.75})

    assert (latches.find(key("a")), latches.num_bytes) == (0.25, before)
