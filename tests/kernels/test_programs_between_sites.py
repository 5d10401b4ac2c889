"""Features that are read at one site and written at another, against the definition of programs."""

from __future__ import annotations

import pytest
import torch

from headgate.steering.programs.codes import Code, Flag, with_change
from headgate.steering.worker.program_reference import program_deltas_reference
from tests.kernels.test_run_programs import (
    ACTIVATIONS,
    EDITS,
    FEATURE_PARAMS,
    OPERATIONS,
    Entry,
    Example,
    features,
    run_programs,
)


def halves(*features: Entry) -> tuple[list[Entry], list[Entry]]:
    """Features as they are read at one site, and written at another; the second is written first."""
    order = [(change, entry) for change, entry in zip((3, 0, 4, 1), features, strict=False)]
    read = [
        Entry(with_change(entry.code - Code.FEATURE + Code.READ_FEATURE, change), entry.read, 0, entry.params)
        for change, entry in order
    ]
    for entry in read:
        entry.params = (entry.params[0], 1.0, *entry.params[2:])
    code = Code.WRITE_FEATURE
    return read, [
        Entry(with_change(code, change), 0, entry.write, (0.0, entry.params[1])) for change, entry in reversed(order)
    ]


@pytest.mark.parametrize("edit", EDITS, ids=lambda edit: edit.name)
@pytest.mark.parametrize("activation", ACTIVATIONS, ids=lambda activation: activation.name)
@pytest.mark.parametrize("flag", [0, Flag.IF_ACTIVE], ids=["always", "if-active"])
def test_a_feature_is_read_at_one_site_and_written_at_another(activation, edit, flag):
    code = Code.FEATURE | activation | edit | flag
    whole = [Entry(code, 1 + at, 3 + at, (*FEATURE_PARAMS[:4], 0.8 + at, *FEATURE_PARAMS[5:])) for at in range(3)]
    read, written = halves(*whole)
    together = Example([whole], [0, 1, 1, 0, 1, 1], width=72)
    first, second = (Example([program], together.rows, 72, has_changes=True) for program in (read, written))
    untouched = first.tables.changes.clone()
    changes = first.tables.changes

    none = run_programs.program_deltas(together.value, None, *first.tables.arguments()[:-1], changes)
    delta = run_programs.program_deltas(second.value + 7, None, *second.tables.arguments()[:-1], changes)

    active = together.tables.counts > 0
    assert not none[active].any()
    torch.testing.assert_close(delta[active].double(), together.expected()[active], rtol=0, atol=2e-5)
    assert torch.equal(changes[~active], untouched[~active])
    assert torch.equal(changes[:, [1, 2]], untouched[:, [1, 2]])


def test_a_site_reads_some_features_and_writes_others():
    read, written = halves(*features(4))
    program = [OPERATIONS["linear"], *written[:2], *features(3), *read[:2]]
    example = Example([program, [OPERATIONS["add"]]], [1, 0, 2, 1], width=100, has_changes=True)
    arguments, expected = example.tables.arguments(), example.tables.arguments()

    delta = run_programs.program_deltas(example.value, None, *arguments)

    wanted = program_deltas_reference(example.value, None, *expected)
    active = example.tables.counts > 0
    torch.testing.assert_close(delta[active].double(), wanted[active], rtol=0, atol=2e-5)
    torch.testing.assert_close(arguments[-1], expected[-1], rtol=0, atol=2e-5)
    assert torch.equal(arguments[-1][1:3], example.tables.changes[1:3])
    assert not torch.equal(arguments[-1][0], example.tables.changes[0])
