"""Notes about the steps of a sample, on their way from the engine core to the values in an answer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from headgate.capture.engine.contracts.plain_values import Document


@dataclass(slots=True)
class Notes:
    """Notes that one output of a sample brings.

    Attributes:
        by_part: In order, by the name of their part.
        end: Tokens of the prompt and of the output that were kept, if the output is the sample's last; else None.
    """

    by_part: dict[str, list[object]] = field(default_factory=dict)
    end: int | None = None

    def add(self, by_part: Mapping[str, list[object]]) -> None:
        """Take later notes in."""
        for part, notes in by_part.items():
            self.by_part.setdefault(part, []).extend(notes)


class UntoldNotes:
    """Notes about the samples of one engine request that its HTTP answer has not told yet.

    Args:
        read: Makes values of them, by name.
    """

    def __init__(self, read: Callable[[Notes], Document]) -> None:
        self._read = read
        self._by_sample: dict[int, Notes] = {}

    def put(self, index: int, notes: Notes, *, is_piece: bool) -> None:
        """Take the notes of an output of sample `index`: those since its last output, or all of them."""
        held = self._by_sample.get(index)
        if held is None or not is_piece:
            self._by_sample[index] = notes
        else:
            held.add(notes.by_part)
            held.end = notes.end

    def take(self, index: int) -> Document:
        """Return the values of whatever is untold of sample `index`; of nothing, if there is nothing."""
        return self._read(self._by_sample.pop(index, Notes()))

    def samples(self) -> list[int]:
        """Return the samples that have something untold, in order."""
        return sorted(index for index, notes in self._by_sample.items() if notes.by_part)
