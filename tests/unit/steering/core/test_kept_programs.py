"""Programs are found again as long as there is room for them; the one that was not found longest goes first."""

from __future__ import annotations

import numpy as np

from headgate.capture.schema.sites import Site
from headgate.steering.core.saes import KeptPrograms, bytes_of
from headgate.steering.programs.codes import NUM_CODES, NUM_PARAMS, Code
from headgate.steering.programs.program import Entry, Program


def test_what_was_not_found_for_the_longest_time_goes_first() -> None:
    kept: KeptPrograms[str] = KeptPrograms(max_bytes=10)
    kept.keep("a", "A", 4)
    kept.keep("b", "B", 4)
    assert kept.find("a") == "A"

    kept.keep("c", "C", 4)

    assert [kept.find(key) for key in "abc"] == ["A", None, "C"]


def test_a_key_that_is_kept_anew_counts_once() -> None:
    kept: KeptPrograms[str] = KeptPrograms(max_bytes=10)
    for name in ("first", "second"):
        kept.keep("a", name, 6)
    kept.keep("b", "B", 4)

    assert (kept.find("a"), kept.find("b")) == ("second", "B")
    kept.keep("large", "L", 11)
    assert [kept.find(key) for key in ("a", "b", "large")] == [None, None, None]
    kept.keep("b", "B", 10)
    assert kept.find("b") == "B"


def test_nothing_is_found_once_all_is_cleared() -> None:
    kept: KeptPrograms[str] = KeptPrograms(max_bytes=10)
    kept.keep("a", "A", 10)

    kept.clear()
    kept.keep("b", "B", 10)

    assert (kept.find("a"), kept.find("b")) == (None, "B")


def test_a_program_of_both_phases_counts_once() -> None:
    rows = np.ones(8, np.float32), np.zeros(8, np.float32)
    one, other = (
        Program.from_entries([Entry(Site.parse("1.post_mlp"), Code.ADD, None, row, ())], "float32") for row in rows
    )
    size = 4 * (8 + NUM_CODES + NUM_PARAMS)

    assert bytes_of(one, one) == size
    assert bytes_of(one, other) == 2 * size
