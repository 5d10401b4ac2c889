"""The action of an op site: runs each batch row's program, and adds what comes out to the stream.

A program reads whole rows, which no norm's kernel can do on the way, so it is a kernel of its own: `program_deltas`
returns by how much each active row moves. To the forward's graph it is one operation, and so is the reconstruction of
an SAE: no compiler looks into them. What is added to the stream is traced, as a vector is
(`headgate.steering.worker.site_action`): rows without a program are steered as at any other site, and idle, the code
around the addition computes the same bits that it computes without it. For that, the program's kernel gets values that
are stored anyway, and copies of all others, computed from sums of their own.

At sites whose columns tensor-parallel ranks share, each rank runs a program on its own columns. Where the operator has
the rows gathered, the operation gathers them first: every rank then runs the program on the same whole rows, makes the
same decisions, and keeps the change of its own columns. The vectors of such a site are wider than its value.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, cast

import torch
from torch import Tensor, nn

from headgate.capture.engine.compiler.inductor import Inductor
from headgate.capture.engine.compiler.inductor_heuristics import exclude_buffers, install_exclusion
from headgate.capture.engine.contracts.worker_hooks import WorkerFacts
from headgate.capture.engine.model.forward_wrappers import tensor_prefix
from headgate.capture.engine.site_action import SiteValue
from headgate.capture.staging.column_shards import whole_rows
from headgate.steering.programs.codes import InputNorm
from headgate.steering.worker.gates.reference import GateTensors
from headgate.steering.worker.program_reference import program_deltas_reference
from headgate.steering.worker.reconstruction import SaeTensors, Tables, reconstructed_deltas_reference
from headgate.steering.worker.rows.vector_pool import ZERO_SLOT
from headgate.steering.worker.site_action import (
    POOL,
    SLOTS,
    Addition,
    Run,
    add_excluded,
    register_add_excluded,
)

if TYPE_CHECKING:
    from headgate.capture.engine.compiler.inductor import TensorBox


class StepPrograms(Protocol):
    """The programs of the step whose forward is launched, as its worker knows them."""

    def acts(self, active: Tensor) -> bool:
        """Return whether any row has a program at the op site whose `ACTIVE` this is."""
        ...

    def scans(self) -> bool:
        """Return whether a request with gates has several rows."""
        ...


_worker: WorkerFacts | None = None
_step: StepPrograms | None = None


def serve(facts: WorkerFacts, step: StepPrograms | None = None) -> None:
    """Let operations, in this process, ask `facts` and `step` while a forward is launched or recorded.

    What no row of a step needs is not launched: for a step of prompts, which no CUDA graph has, launches take the host
    longer than the kernels take the GPU. A recorded forward has everything, but the launches for consecutive rows of a
    request where each has one row. And, where rows are gathered, for the columns of other tensor-parallel ranks.
    """
    global _worker, _step
    _worker, _step = facts, step


def _acts(active: Tensor) -> bool:
    return _worker is None or _step is None or not _worker.runs_requests() or _step.acts(active)


def _scans() -> bool:
    if _worker is None:
        return True
    if _step is not None and _worker.runs_requests():
        return _step.scans()
    return not _worker.has_one_row_each()


def own_columns(rows: Tensor, part: int, facts: WorkerFacts | None = None) -> Tensor:
    """Return the columns of whole rows that this rank has: a view.

    Args:
        rows: ``[..., width]``.
        part: How many of the columns each rank has; several ranks may have the same.
        facts: Of this worker; None for those of `serve`.
    """
    if part == rows.shape[-1]:
        return rows
    facts = facts or _served()
    first = part * (facts.tp_rank * (rows.shape[-1] // part) // facts.tp_size)
    return rows[..., first : first + part]


def _served() -> WorkerFacts:
    if _worker is None:
        raise AssertionError("rows of several tensor-parallel ranks in a process that serves none")
    return _worker


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
    nothing has a gate, and no row is reconstructed. Where `pool` is wider than the value, the ranks have parts of rows.
    """
    return _run(value, addend, pool, (rows, counts, codes, params, groups, None), (None,), 0, None)


MUTATED = ("changes", "signals", "states", "sums")
"""Arguments that the operations with state write to."""

NO_SAE = (None,) * 7 + (0, 0)
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
    k: int,
) -> Tensor:
    """Return the same where entries hand numbers on, to later sites or a request's next row, or an SAE is encoded.

    The rows that the SAE lists, which have a program each, become its reconstructions, and are summed up; or features
    that it selects are edited. `tokens` and what follows are
    `headgate.steering.worker.reconstruction.EncodedSae.tensors`, an `InputNorm` and `EncodedSae.k`, all or none.
    `changes`, float32 ``[at least num_tokens, K]``, carries what features change that are read at one site and written
    at later ones; K is 0 where there are none. `signals`, `states` and `gate_tokens` are
    `headgate.steering.worker.gates.reference.GateTensors`, without columns where there are no gates.
    """
    sae = (tokens, num_tokens, encoder, decoder, numbers, bias, sums)
    gates = GateTensors(signals, states, gate_tokens)
    return _run(value, addend, pool, (rows, counts, codes, params, groups, changes), sae, input_norm, gates, k)


def _run(
    value: Tensor,
    addend: Tensor | None,
    pool: Tensor,
    given: Sequence[Tensor | None],
    of_sae: Sequence[Tensor | None],
    norm: int,
    of_gates: GateTensors | None,
    k: int = 0,
) -> Tensor:
    value_TD = value.reshape(-1, value.shape[-1])
    if not _acts(cast("Tensor", given[1])):
        make = torch.empty if value.device.type == "cuda" else torch.zeros
        return make(value_TD.shape, dtype=torch.float32, device=value.device)
    addend_TD = None if addend is None else addend.reshape(value_TD.shape)
    part, width = value_TD.shape[1], pool.shape[1]
    if part == width:
        return _run_rows(value_TD, addend_TD, pool, given, of_sae, norm, of_gates, k)
    if addend_TD is not None:
        value_TD = (value_TD.float() + addend_TD.float()).to(value_TD.dtype)
    rows_TD = whole_rows(_served().gather(value_TD), width)
    delta_TD = _run_rows(rows_TD, None, pool, given, of_sae, norm, of_gates, k)
    return own_columns(delta_TD, part).contiguous()


def _run_rows(
    value_TD: Tensor,
    addend_TD: Tensor | None,
    pool: Tensor,
    given: Sequence[Tensor | None],
    of_sae: Sequence[Tensor | None],
    norm: int,
    of_gates: GateTensors | None,
    k: int,
) -> Tensor:
    used = slice(value_TD.shape[0])
    rows, counts, codes, params, groups, changes = given
    changes = None if changes is None or not changes.shape[1] else changes
    of_tokens = [None if table is None else table[used] for table in (rows, counts, groups, changes)]
    gates = None
    if of_gates is not None and of_gates.signals.shape[1]:
        gates = of_gates._replace(signals=of_gates.signals[used], tokens=of_gates.tokens[used])
    tables = cast("Tables", (pool, *of_tokens[:2], codes, params, *of_tokens[2:], gates))
    sae = cast("SaeTensors", of_sae)
    if value_TD.device.type != "cuda":
        if of_sae[0] is None:
            return program_deltas_reference(value_TD, addend_TD, *tables, dtype=torch.float32)
        return reconstructed_deltas_reference(value_TD, addend_TD, tables, sae, InputNorm(norm), k, dtype=torch.float32)
    from headgate.steering.kernels.run_programs import program_deltas as run

    if of_sae[0] is None:
        return run(value_TD, addend_TD, *tables[:-1], gates=gates, scans=_scans())
    from headgate.steering.kernels.reconstruct_rows import reconstruction_deltas

    shift_TD = torch.empty(value_TD.shape, dtype=torch.float32, device=value_TD.device)
    delta_TD = run(value_TD, addend_TD, *tables[:-1], shift_TD, gates=gates, scans=_scans())
    edits = (tables[:6], gates) if k else None
    return reconstruction_deltas(value_TD, addend_TD, shift_TD, *sae, InputNorm(norm), delta_TD, k=k, edits=edits)


@program_deltas.register_fake
@program_deltas_and_state.register_fake
def _(value: Tensor, addend: Tensor | None, pool: Tensor, *tables: Tensor | int | None) -> Tensor:
    return value.new_empty(value.shape[-2], value.shape[-1], dtype=torch.float32)


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


ROWS, ACTIVE, CODES, PARAMS = "program_rows", "program_active", "program_codes", "program_params"
GROUPS, KEPT = "program_groups", "program_kept"
STATE = ("program_changes", "gate_signals", "gate_states", "gate_tokens")
"""Tensors in which entries hand numbers on."""
WHOLE_POOL = "program_pool"
"""Its tensor is there at sites whose rows are gathered."""
_POOL, _WHOLE_POOL, _SLOTS, _ACTIVE, _KEPT = map(tensor_prefix, (POOL, WHOLE_POOL, SLOTS, ACTIVE, KEPT))
SAE = tuple(f"sae_{name}" for name in ("tokens", "num_tokens", "encoder", "decoder", "numbers", "bias", "sums"))
"""Tensors of sites whose SAE is encoded, in the order of `headgate.steering.worker.reconstruction.EncodedSae`."""
_READ = tuple(tensor_prefix(name) for name in (ROWS, ACTIVE, CODES, PARAMS, GROUPS))
_SAE = tuple(tensor_prefix(name) for name in SAE)
_STATE = tuple(tensor_prefix(name) for name in STATE)

Norm = tuple[InputNorm, int] | None
"""Norm and k of the site's encoded SAE; None at sites without one."""


def operation(facts: WorkerFacts) -> Addition:
    """Return the ways to run programs in this worker; registers their lowerings where the forward is compiled."""
    if facts.device.type == "cuda":
        if not facts.is_compiled:
            return Addition(run_unfused, run_and_keep=run_and_keep_unfused, reapply=reapply_unfused)
        register_program_deltas()
        register_add_selected()
        return Addition(run_traced, unfused=run_unfused, run_and_keep=run_and_keep_traced, reapply=reapply_traced)
    if not facts.is_compiled:
        return Addition(run_plain, run_and_keep=run_and_keep_plain, reapply=reapply_plain)
    register_steered_rows()
    register_add_excluded()
    return Addition(run_gathered, run_and_keep=run_and_keep_gathered, reapply=reapply_gathered)


def reconstructing(ways: Addition, norm: tuple[InputNorm, int]) -> Addition:
    """Return the same ways for a site whose SAE, with its norm and k, is encoded; what is reapplied was computed
    before."""
    made = Addition(_with_norm(ways.run, norm), *(each and _with_norm(each, norm) for each in ways[1:]))
    return made._replace(reapply=ways.reapply)


def _with_norm(run: Callable[..., Tensor], norm: tuple[InputNorm, int]) -> Run:
    def run_with_norm(module: nn.Module, hook: str, site: SiteValue) -> Tensor:
        return run(module, hook, site, norm)

    return run_with_norm


def run_plain(module: nn.Module, hook: str, site: SiteValue, norm: Norm = None) -> Tensor:
    """Steer where the forward runs as written, and not on a GPU."""
    return _add_plain(site, _steered_rows(module, hook, site, norm))


def run_and_keep_plain(module: nn.Module, hook: str, site: SiteValue, norm: Norm = None) -> Tensor:
    """Do the same, and keep what was added for `reapply_plain`."""
    return _add_plain(site, _keep(module, hook, _steered_rows(module, hook, site, norm)))


def reapply_plain(module: nn.Module, hook: str, site: SiteValue) -> Tensor:
    """Add to the stream what `run_and_keep_plain` added to the mid stream."""
    return _add_plain(site, _kept(module, hook, site))


def run_gathered(module: nn.Module, hook: str, site: SiteValue, norm: Norm = None) -> Tensor:
    """Steer where torch.compile makes C++ of the forward; idle, it computes the same bits as without steering."""
    return _add_gathered(site, _steered_rows(module, hook, site, norm))


def run_and_keep_gathered(module: nn.Module, hook: str, site: SiteValue, norm: Norm = None) -> Tensor:
    """Do the same, and keep what was added for `reapply_gathered`."""
    return _add_gathered(site, _keep(module, hook, _steered_rows(module, hook, site, norm)))


def reapply_gathered(module: nn.Module, hook: str, site: SiteValue) -> Tensor:
    """Add to the stream what `run_and_keep_gathered` added to the mid stream."""
    return _add_gathered(site, _kept(module, hook, site))


def run_traced(module: nn.Module, hook: str, site: SiteValue, norm: Norm = None) -> Tensor:
    """Steer where torch.compile fuses the addition into the kernel of the following norm."""
    return _add_traced(module, hook, site, _deltas(module, hook, site, norm))


def run_and_keep_traced(module: nn.Module, hook: str, site: SiteValue, norm: Norm = None) -> Tensor:
    """Do the same, and keep what was added for `reapply_traced`."""
    return _add_traced(module, hook, site, _keep(module, hook, _deltas(module, hook, site, norm)))


def reapply_traced(module: nn.Module, hook: str, site: SiteValue) -> Tensor:
    """Add to the stream what `run_and_keep_traced` added to the mid stream."""
    return _add_traced(module, hook, site, getattr(module, _KEPT + hook))


def run_unfused(module: nn.Module, hook: str, site: SiteValue, norm: Norm = None) -> Tensor:
    """Steer on a GPU where nothing is compiled, or where the addition must not be fused with the norm."""
    return _add_unfused(module, hook, site, _deltas(module, hook, site, norm))


def run_and_keep_unfused(module: nn.Module, hook: str, site: SiteValue, norm: Norm = None) -> Tensor:
    """Do the same, and keep what was added for `reapply_unfused`."""
    return _add_unfused(module, hook, site, _keep(module, hook, _deltas(module, hook, site, norm)))


def reapply_unfused(module: nn.Module, hook: str, site: SiteValue) -> Tensor:
    """Add to the stream what `run_and_keep_unfused` added to the mid stream."""
    return _add_unfused(module, hook, site, getattr(module, _KEPT + hook))


def _deltas(module: nn.Module, hook: str, site: SiteValue, norm: Norm) -> Tensor:
    """Return by how much the programs move each row: fp32 ``[T, hidden]``, undefined where none is active."""
    tables = [_whole_pool(module, hook), *[getattr(module, name + hook) for name in _READ]]
    state, sae = _state(module, hook, norm), _sae(module, hook, norm)
    if state:
        deltas: Tensor = program_deltas_and_state(site.value, site.addend, *tables, *state, *sae)
        return deltas
    deltas = program_deltas(site.value, site.addend, *tables)
    return deltas


def _steered_rows(module: nn.Module, hook: str, site: SiteValue, norm: Norm) -> Tensor:
    tables = [_whole_pool(module, hook), *[getattr(module, name + hook) for name in (_SLOTS, *_READ)]]
    state, sae = _state(module, hook, norm), _sae(module, hook, norm)
    if state:
        rows: Tensor = steered_rows_and_state(site.value, site.addend, *tables, *state, *sae)
        return rows
    rows = steered_rows(site.value, site.addend, *tables)
    return rows


def _whole_pool(module: nn.Module, hook: str) -> Tensor:
    """Return the vectors of programs; where rows are gathered, they are as wide as whole rows."""
    found: Tensor = getattr(module, _WHOLE_POOL + hook, getattr(module, _POOL + hook))
    return found


def _state(module: nn.Module, hook: str, norm: Norm) -> tuple[Tensor, ...]:
    """Return the tensors in which entries hand numbers on; none where no entry can, and no SAE is encoded."""
    found = tuple(getattr(module, name + hook) for name in _STATE)
    return found if norm is not None or found[0].shape[1] or found[1].shape[1] else ()


def _sae(module: nn.Module, hook: str, norm: Norm) -> Sequence[Tensor | int | None]:
    """Return the last arguments of the operations with state."""
    return NO_SAE if norm is None else (*[getattr(module, name + hook) for name in _SAE], int(norm[0]), norm[1])


def _keep(module: nn.Module, hook: str, added: Tensor) -> Tensor:
    getattr(module, _KEPT + hook)[: added.shape[0]].copy_(added)
    return added


def _kept(module: nn.Module, hook: str, site: SiteValue) -> Tensor:
    kept: Tensor = getattr(module, _KEPT + hook)[: site.carry.shape[-2]]
    return kept.to(site.carry.dtype)


def _to_carry(added: Tensor, site: SiteValue) -> Tensor:
    return added if site.gain is None else added / site.gain


def _add_plain(site: SiteValue, added: Tensor) -> Tensor:
    return site.carry + _to_carry(added, site)


def _add_gathered(site: SiteValue, added: Tensor) -> Tensor:
    carry: Tensor = add_excluded(site.carry, _to_carry(added, site))
    return carry


def _add_traced(module: nn.Module, hook: str, site: SiteValue, deltas: Tensor) -> Tensor:
    tables = [getattr(module, name + hook) for name in (_ACTIVE, _POOL, _SLOTS)]
    carry: Tensor = add_selected(site.carry, deltas, *tables, _scale(site))
    return carry


def _add_unfused(module: nn.Module, hook: str, site: SiteValue, deltas: Tensor) -> Tensor:
    tables = [getattr(module, name + hook) for name in (_ACTIVE, _POOL, _SLOTS)]
    carry: Tensor = add_selected_unfused(site.carry, deltas, *tables, _scale(site))
    return carry


def _scale(site: SiteValue) -> float:
    return 1.0 if site.gain is None else 1.0 / site.gain


@torch.library.custom_op("headgate::steered_rows", mutates_args=())
def steered_rows(
    value: Tensor,
    addend: Tensor | None,
    pool: Tensor,
    slots: Tensor,
    rows: Tensor,
    active: Tensor,
    codes: Tensor,
    params: Tensor,
    groups: Tensor,
) -> Tensor:
    """Return what steers each row on a CPU, ``[T, hidden]`` in the pool's dtype: its vector, or its program's delta.

    Args:
        value: ``[..., T, hidden]``; with `addend` the site's value.
        addend: As `value`, or None.
        pool: ``[slots, hidden]``, or as wide as whole rows where tensor-parallel ranks have parts of them.
        slots: int32, at least T: slot of each row's vector.
        rows: As `headgate.steering.worker.program_action.program_deltas` takes them, and what follows.
        active: int32, at least T: entries of each row's program; 0 for none.
    """
    run = partial(program_deltas, value, addend, pool, rows, active, codes, params, groups)
    return _vectors_or(value, pool, slots, active, run)


@torch.library.custom_op("headgate::steered_rows_and_state", mutates_args=MUTATED)
def steered_rows_and_state(
    value: Tensor,
    addend: Tensor | None,
    pool: Tensor,
    slots: Tensor,
    rows: Tensor,
    active: Tensor,
    codes: Tensor,
    params: Tensor,
    groups: Tensor,
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
    k: int,
) -> Tensor:
    """Return the same where entries hand numbers on, to later sites or a request's next row, or an SAE is encoded.

    `changes` and what follows are those of `headgate.steering.worker.program_action.program_deltas_and_state`.
    """
    tables = (rows, active, codes, params, groups, changes)
    gates = (signals, states, gate_tokens)
    sae = (tokens, num_tokens, encoder, decoder, numbers, bias, sums, input_norm, k)
    run = program_deltas_and_state
    return _vectors_or(value, pool, slots, active, partial(run, value, addend, pool, *tables, *gates, *sae))


def _vectors_or(value: Tensor, pool: Tensor, slots: Tensor, active: Tensor, deltas: Callable[[], Tensor]) -> Tensor:
    """Return each row's vector, or what `deltas` gives it where a program is active; not called if none is."""
    num_tokens = value.shape[-2]
    vectors = own_columns(pool, value.shape[-1])[slots[:num_tokens]].to(value.dtype)
    is_active = active[:num_tokens] != 0
    if not bool(is_active.any()):
        return vectors
    return torch.where(is_active[:, None], deltas().to(value.dtype), vectors)


@steered_rows.register_fake
@steered_rows_and_state.register_fake
def _(value: Tensor, addend: Tensor | None, pool: Tensor, *tables: Tensor | int | None) -> Tensor:
    return value.new_empty(value.shape[-2], value.shape[-1])


@torch.library.custom_op("headgate::add_selected", mutates_args=())
def add_selected(carry: Tensor, deltas: Tensor, active: Tensor, pool: Tensor, slots: Tensor, scale: float) -> Tensor:
    """Return the carry plus `scale` times each row's delta where one is active, else its vector.

    Args:
        carry: ``[..., T, hidden]``.
        deltas: fp32, at least ``[T, hidden]``.
        active: int32, at least T.
        pool: ``[slots, hidden]``.
        slots: int32, at least T; `ZERO_SLOT` adds nothing.
        scale: Factor of what is added.

    `register_add_selected` must have been called before inductor meets it.
    """
    return _selected(carry, deltas, active, pool, slots, scale)


def _selected(carry: Tensor, deltas: Tensor, active: Tensor, pool: Tensor, slots: Tensor, scale: float) -> Tensor:
    num_tokens = carry.shape[-2]
    vectors = pool[slots[:num_tokens]].float()
    added = torch.where((active[:num_tokens] != 0)[:, None], deltas[:num_tokens], vectors)
    return (carry.float() + added * scale).to(carry.dtype)


@add_selected.register_fake
def _(carry: Tensor, deltas: Tensor, active: Tensor, pool: Tensor, slots: Tensor, scale: float) -> Tensor:
    return torch.empty_like(carry)


@torch.library.custom_op("headgate::add_selected_unfused", mutates_args=())
def add_selected_unfused(
    carry: Tensor, deltas: Tensor, active: Tensor, pool: Tensor, slots: Tensor, scale: float
) -> Tensor:
    """Return the same as `add_selected`, by code that the compiler does not look into."""
    if carry.device.type != "cuda":
        return _selected(carry, deltas, active, pool, slots, scale)
    from headgate.steering.kernels.add_rows import add_rows

    rows = carry.reshape(-1, carry.shape[-1])
    return add_rows(rows, pool, slots[: rows.shape[0]], scale, deltas, active).view(carry.shape)


@add_selected_unfused.register_fake
def _(carry: Tensor, deltas: Tensor, active: Tensor, pool: Tensor, slots: Tensor, scale: float) -> Tensor:
    return torch.empty_like(carry)
