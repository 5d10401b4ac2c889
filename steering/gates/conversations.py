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
        self._lock = Lock()

    def __len__(self) -> int:
        return len(self._latched)

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
                gates = self._latched.setdefault(key.conversation, {})
                gates.setdefault(key.content, strength)
                self._latched.move_to_end(key.conversation)
            while len(self._latched) > MAX_CONVERSATIONS:
                self._latched.popitem(last=False)
