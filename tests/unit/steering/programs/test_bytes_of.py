"""The bytes that kept programs count."""

from __future__ import annotations

import numpy as np

from headgate.capture.schema.sites import Site
from headgate.steering.programs.codes import NUM_CODES, NUM_PARAMS, Code
from headgate.steering.programs.program import Entry, Program, bytes_of


def test_a_program_of_both_phases_counts_once() -> None:
    rows = np.ones(8, np.float32), np.zeros(8, np.float32)
    one, other = (
        Program.from_entries([Entry(Site.parse("1.post_mlp"), Code.ADD, None, row, ())], "float32") for row in rows
    )
    size = 4 * (8 + NUM_CODES + NUM_PARAMS)

    assert bytes_of(one, one) == size
    assert bytes_of(one, other) == 2 * size
