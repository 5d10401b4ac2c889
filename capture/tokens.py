"""Which token each captured row was really computed from: proof that a row is of the request it is given to."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from headgate.capture.batch import FinalState, Int64Array

SPARE_POSITIONS = 64
_UNKNOWN = -1

Int32Array = npt.NDArray[np.int32]


class TokenBook:
    """The tokens of one request's captured positions, as the device read them. For the dispatch thread.

    Args:
        num_prompt: Length of the prompt.
    """

    def __init__(self, num_prompt: int) -> None:
        self._token_ids = np.full(num_prompt + SPARE_POSITIONS, _UNKNOWN, dtype=np.int32)

    def note(self, positions: Int64Array, token_ids: Int32Array) -> None:
        """Rows at `positions`, ascending, were computed from `token_ids`."""
        top = int(positions[-1]) + 1
        if top > len(self._token_ids):
            self._grow(top)
        self._token_ids[positions] = token_ids

    def note_one(self, position: int, token_id: int) -> None:
        """The same for a single row."""
        if position >= len(self._token_ids):
            self._grow(position + 1)
        self._token_ids[position] = token_id

    def contradiction(self, final: FinalState) -> str | None:
        """What is wrong with the rows, for people; None if every one is of the request's own token."""
        num_rows = min(final.num_rows, len(self._token_ids), len(final.token_ids))
        noted, expected = self._token_ids[:num_rows], final.token_ids[:num_rows]
        wrong = np.flatnonzero((noted != _UNKNOWN) & (noted != expected))
        if not len(wrong):
            return None
        first = int(wrong[0])
        return (
            f"{len(wrong)} captured rows were not computed from the request's own tokens (position {first}: token "
            f"{noted[first]}, expected {expected[first]}), so none of them is given out; report it as a bug of headgate"
        )

    def _grow(self, size: int) -> None:
        grown = np.full(max(size, 2 * len(self._token_ids)), _UNKNOWN, dtype=np.int32)
        grown[: len(self._token_ids)] = self._token_ids
        self._token_ids = grown
