"""The type of what crosses processes and what operators write: objects of plain values."""

from __future__ import annotations

from collections.abc import Mapping

Document = Mapping[str, object]
"""None, numbers, texts, bytes, and lists and dicts of these, by name. Its reader checks it."""
