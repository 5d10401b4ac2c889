"""Gates that stay latched in later requests of a conversation. Standard library only.

A conversation belongs to the client that named it: the same id under another key is another conversation.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from threading import Lock
from typing import NamedTuple

MAX_CONVERSATIONS = 1024
"""Conversations that are remembered: beyond them, the one that was used the longest time ago is forgotten."""
MAX_LATCH_BYTES = 256 << 20
"""Memory that they may take together, about: beyond it likewise; of a conversation that takes more than that alone, the
gates that latched first."""
_CONVERSATION_BYTES, _GATE_BYTES = 1024, 256
"""Bytes of a conversation's objects, beside its two names, and of each gate that has latched."""


class Conversation(NamedTuple):
    """A conversation: the name of the client's key, empty without one, and the id that it gave."""

    owner: str
    name: str


class LatchKey(NamedTuple):
    """A gate of a conversation, by what it does: its name does not matter."""

    conversation: Conversation
    content: bytes


class ConversationLatches:
    """The strengths that gates have latched, by conversation. Any thread."""

    def __init__(self) -> None:
        self._latched: OrderedDict[Conversation, dict[bytes, float]] = OrderedDict()
        self._num_bytes = 0
        self._lock = Lock()

    def __len__(self) -> int:
        return len(self._latched)

    @property
    def num_bytes(self) -> int:
        """Memory that is taken, about."""
        return self._num_bytes

    def find(self, key: LatchKey) -> float | None:
        """Return the strength that a gate has latched; None if it has not."""
        with self._lock:
            gates = self._latched.get(key.conversation)
            if gates is None:
                return None
            self._latched.move_to_end(key.conversation)
            return gates.get(key.content)

    def latch(self, strengths: Mapping[LatchKey, float]) -> None:
        """Remember strengths that were latched; the first one of a gate stays."""
        with self._lock:
            for key, strength in strengths.items():
                gates = self._latched.get(key.conversation)
                if gates is None:
                    gates = self._latched[key.conversation] = {}
                    self._num_bytes += _bytes_of(key.conversation)
                if key.content not in gates:
                    gates[key.content] = strength
                    self._num_bytes += _GATE_BYTES
                self._latched.move_to_end(key.conversation)
            while len(self._latched) > 1 and (
                len(self._latched) > MAX_CONVERSATIONS or self._num_bytes > MAX_LATCH_BYTES
            ):
                forgotten, gates = self._latched.popitem(last=False)
                self._num_bytes -= _bytes_of(forgotten) + _GATE_BYTES * len(gates)
            for gates in self._latched.values() if self._num_bytes > MAX_LATCH_BYTES else ():
                while self._num_bytes > MAX_LATCH_BYTES and gates:
                    del gates[next(iter(gates))]
                    self._num_bytes -= _GATE_BYTES


def _bytes_of(conversation: Conversation) -> int:
    return _CONVERSATION_BYTES + 4 * (len(conversation.owner) + len(conversation.name))
