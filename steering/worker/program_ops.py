"""Programs, and the reconstructions of SAEs, as one operation of the forward's graph, which no compiler looks into."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import cast

import torch
from torch import Tensor

from headgate.steering.programs.codes import InputNorm
from headgate.steering.worker.gates.reference import GateTensors
from headgate.steering.worker.program_reference import program_deltas_reference
from headgate.steering.worker.reconstruction import SaeTensors, Tables, reconstructed_deltas_reference


def _unknown() -> bool:
    return False


_has_one_row_each: Callable[[], bool] = _unknown


def ask_forwards(has_one_row_each: Callable[[], bool]) -> None:
    """Let operations ask, in this process, whether each request of the forward has one row.

    Then gates need no launches for consecutive rows of a request. Asked while a forward is launched or recorded.
    """
    global _has_one_row_each
    _has_one_row_each = has_one_row_each


def _scans() -> bool:
    return not _has_one_row_each()


@torch.library.custom_op("headgate::program_deltas", mutates_args=())
def program_deltas(
    value: Tensor,
    addend: Tensor | None,
    pool: Tensor,
    rows: Tensor,
    counts: Tensor,
    codes: Tensor,
    params: Tensor,
    groups: Tensor | None,
) -> Tensor:
    """Return what programs add to each row of ``value + addend``: float32 ``[T, hidden]``.

    `value` and `addend` may have a leading axis of 1; `rows`, `counts` and `groups` may be longer than the batch. Rows
    without a program are zero on a CPU, and not written on a GPU. The tables are those of
    `headgate.steering.kernels.run_programs.program_deltas`. No feature is read at one site and written at another,
    nothing has a gate, and no row is reconstructed.
    """
    return _run(value, addend, (pool, rows, counts, codes, params, groups, None), (None,), 0, None)


MUTATED = ("changes", "signals", "states", "sums")
"""Arguments that the operations with state write to."""

NO_SAE = (None,) * 7 + (0,)
"""Last arguments of the operations with state at a site whose SAE is not encoded."""


# No argument has a default: torch strips arguments that equal theirs, and up to 2.11 then misses the tensors that
# change.
@torch.library.custom_op("headgate::program_deltas_and_state", mutates_args=MUTATED)
def program_deltas_and_state(
    value: Tensor,
    addend: Tensor | None,
    pool: Tensor,
    rows: Tensor,
    counts: Tensor,
    codes: Tensor,
    params: Tensor,
    groups: Tensor | None,
    changes: Tensor,
    signals: Tensor,
    states: Tensor,
    gate_tokens: Tensor,
    tokens: Tensor | None,
    num_tokens: Tensor | None,
    encoder: Tensor | None,
    decoder: Tensor | None,
    numbers: Tensor | None,
    bias: Tensor | None,
    sums: Tensor | None,
    input_norm: int,
) -> Tensor:
    """Return the same where entries hand numbers on, to later sites or a request's next row, or an SAE is encoded.

    The rows that the SAE lists, which have a program each, become its reconstructions, and are summed up. `tokens` and
    what follows are `headgate.steering.worker.reconstruction.EncodedSae.tensors` and an `InputNorm`, all or none.
    `changes`, float32 ``[at least num_tokens, K]``, carries what features change that are read at one site and written
    at later ones; K is 0 where there are none. `signals`, `states` and `gate_tokens` are
    `headgate.steering.worker.gates.reference.GateTensors`, without columns where there are no gates.
    """
    sae = (tokens, num_tokens, encoder, decoder, numbers, bias, sums)
    gates = GateTensors(signals, states, gate_tokens)
    return _run(value, addend, (pool, rows, counts, codes, params, groups, changes), sae, input_norm, gates)


def _run(
    value: Tensor,
    addend: Tensor | None,
    given: Sequence[Tensor | None],
    of_sae: Sequence[Tensor | None],
    norm: int,
    of_gates: GateTensors | None,
) -> Tensor:
    value_TD = value.reshape(-1, value.shape[-1])
    addend_TD = None if addend is None else addend.reshape(value_TD.shape)
    used = slice(value_TD.shape[0])
    pool, rows, counts, codes, params, groups, changes = given
    changes = None if changes is None or not changes.shape[1] else changes
    of_tokens = [None if table is None else table[used] for table in (rows, counts, groups, changes)]
    gates = None
    if of_gates is not None and of_gates.signals.shape[1]:
        gates = of_gates._replace(signals=of_gates.signals[used], tokens=of_gates.tokens[used])
    tables = cast("Tables", (pool, *of_tokens[:2], codes, params, *of_tokens[2:], gates))
    sae = cast("SaeTensors", of_sae)
    if value.device.type != "cuda":
        if of_sae[0] is None:
            return program_deltas_reference(value_TD, addend_TD, *tables, dtype=torch.float32)
        return reconstructed_deltas_reference(value_TD, addend_TD, tables, sae, InputNorm(norm), dtype=torch.float32)
    from headgate.steering.kernels.run_programs import program_deltas as run

    if of_sae[0] is None:
        return run(value_TD, addend_TD, *tables[:-1], gates=gates, scans=_scans())
    from headgate.steering.kernels.reconstruct_rows import reconstruction_deltas

    shift_TD = torch.empty(value_TD.shape, dtype=torch.float32, device=value.device)
    delta_TD = run(value_TD, addend_TD, *tables[:-1], shift_TD, gates=gates, scans=_scans())
    return reconstruction_deltas(value_TD, addend_TD, shift_TD, *sae, InputNorm(norm), delta_TD)


@program_deltas.register_fake
@program_deltas_and_state.register_fake
def _(value: Tensor, addend: Tensor | None, pool: Tensor, *tables: Tensor | int | None) -> Tensor:
    return value.new_empty(value.shape[-2], value.shape[-1], dtype=torch.float32)
