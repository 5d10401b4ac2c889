"""How torch.compile's inductor handles the operations of programs: what it hands them, and what it fuses with norms."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from headgate.capture.engine.compiler.inductor import Inductor
from headgate.capture.engine.compiler.inductor_heuristics import exclude_buffers, install_exclusion
from headgate.steering.worker.rows.vector_pool import ZERO_SLOT

if TYPE_CHECKING:
    from headgate.capture.engine.compiler.inductor import TensorBox


def register_program_deltas() -> None:
    """Let inductor, in this process, hand `program_deltas` what is stored anyway, and compute all else once more.

    Raises:
        UnsupportedError: If this torch has another inductor.
    """
    for op in (torch.ops.headgate.program_deltas, torch.ops.headgate.program_deltas_and_state):
        _register_reader(op.default, is_stored_taken=True)


def register_steered_rows() -> None:
    """Let inductor, in this process, hand `steered_rows` copies of the value: storing it would change a norm's bits.

    Raises:
        UnsupportedError: If this torch has another inductor.
    """
    for op in (torch.ops.headgate.steered_rows, torch.ops.headgate.steered_rows_and_state):
        _register_reader(op.default, is_stored_taken=False)


def _register_reader(op: Any, *, is_stored_taken: bool) -> None:
    inductor = Inductor("steering")
    call = inductor.fallback_handler(op, add_to_fallback_set=False)
    taken = inductor.stored_or_apart if is_stored_taken else inductor.computed_again

    @inductor.register_lowering(op, type_promotion_kind=None)
    def lower(value: TensorBox, addend: TensorBox | None, *tables: TensorBox | int | None) -> TensorBox:
        if inductor.is_first_argument_of(torch.ops.headgate.add_selected_unfused.default):
            value.realize()  # will be stored for that, so it is here, too
        return call(taken(value), None if addend is None else taken(addend), *tables)


def register_add_selected() -> None:
    """Let inductor, in this process, fuse `add_selected` into kernels whose blocks stay as they are without it.

    Raises:
        UnsupportedError: If this torch has another inductor.
    """
    inductor = Inductor("steering")
    install_exclusion("steering")
    ops = inductor.ops

    @inductor.register_lowering(torch.ops.headgate.add_selected.default, type_promotion_kind=None)
    def lower(
        carry: TensorBox, deltas: TensorBox, active: TensorBox, pool: TensorBox, slots: TensorBox, scale: float
    ) -> TensorBox:
        deltas.realize()
        value_at, delta_at, count_at, vector_at, slot_at = (
            one.make_loader() for one in (carry, deltas, active, pool, slots)
        )
        exclude_buffers(deltas, active, pool, slots)

        def steered(index: Any) -> Any:
            *_, token, column = index
            count, slot = count_at([token]), slot_at([token])
            row = ops.indirect_indexing(slot, pool.get_size()[0], check=False, wrap_neg=False)
            is_active = ops.ne(count, ops.constant(0, active.get_dtype()))
            has_vector = ops.ne(slot, ops.constant(ZERO_SLOT, slots.get_dtype()))
            delta = ops.masked(is_active, lambda: delta_at([token, column]), 0.0)  # type: ignore[arg-type]
            vector = ops.masked(has_vector, lambda: vector_at([row, column]), 0.0)  # type: ignore[arg-type]
            added = ops.where(is_active, delta, vector)
            if scale != 1:
                added = ops.mul(added, ops.constant(scale, torch.float32))
            return ops.add(value_at(index), added)

        return inductor.counted_as(carry, steered)
