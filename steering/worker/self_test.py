"""Start-up proof that every site steers: dummy steps through the same code that will serve.

Each batch row of a dummy step is a request of its own and is steered at one site only. So a row with unchanged output
names the site whose code did not run: because of a stale graph from a compile cache, or a module that is bypassed.
Op sites are driven twice: with a vector, and with a program that adds one.

Attention has no keys and values to look at in a dummy step, so its output says nothing about its input: what is not
seen of `attn_in` is said, and is no error.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from headgate.capture.schema.errors import SelfTestError
from headgate.capture.schema.sites import HookPoint, Site
from headgate.steering.programs.codes import CODE, WRITE, WRITE_SCALE, Code
from headgate.steering.worker.tables.device_tables import DeviceTables

logger = logging.getLogger("headgate")

STRENGTH = 12288.0
"""Size of the vector's values: far beyond the values of a stream, and exact in bf16, fp16 and fp32."""
SCRATCH_SLOT = 1
MIN_RESPONSE = 1e-3
"""Smallest change of a steered row's output that counts, relative to the largest value in it."""

Run = Callable[[int], Sequence[Tensor]]


def check_steering(
    tables: DeviceTables, sites: Sequence[Site], max_rows: int, run: Run, op_sites: Sequence[Site] = ()
) -> None:
    """Steer every site once, in as few dummy steps as `max_rows` requests allow, and leave the tables as new.

    Args:
        tables: The worker's.
        sites: Sites of the worker, in the order of the tables.
        max_rows: Requests of one dummy step, at most.
        run: Runs a dummy step of so many requests, one token each, and returns the tensors that the stage hands on.
        op_sites: The sites of `sites` where programs act, in the order of the tables.

    Raises:
        SelfTestError: Naming the sites that did not respond.
    """
    silent, is_seen = _silent_sites(sites, max_rows, run, partial(_add_vectors, tables))
    silent_ops, is_op_seen = _silent_sites(op_sites, max_rows, run, partial(_add_programs, tables))
    unseen = {site for site in (*silent, *silent_ops) if site.hook is HookPoint.ATTN_IN}
    names = [site.name for site in silent if site not in unseen]
    names += [f"{site.name} (operations)" for site in silent_ops if site not in unseen]
    if names:
        raise SelfTestError(
            f"steering at {', '.join(names)} did not change a dummy step: the code there did not run. A stale compiled "
            "graph (remove vLLM's cache folder) or a model whose forward bypasses its modules"
        )
    if not (is_seen and is_op_seen):
        logger.warning(
            "steering: dummy steps of this stage show no output, or none that is finite: its sites are not checked"
        )
        return
    if unseen:
        logger.info(
            "steering: attn_in of %d layers is not checked: attention looks at nothing in dummy steps. headgate verify "
            "checks it with real requests",
            len(unseen),
        )
    num_sites, num_op_sites = len({*sites} - unseen), len({*op_sites} - unseen)
    logger.info("steering: self-test passed, %d sites respond, %d of them to operations", num_sites, num_op_sites)


def _silent_sites(
    sites: Sequence[Site], max_rows: int, run: Run, steer: Callable[[range], None]
) -> tuple[list[Site], bool]:
    """Return the sites that do not respond to `steer`, and whether all steps showed their output."""
    silent: list[Site] = []
    is_seen = True
    for start in range(0, len(sites), max_rows):
        chunk = range(start, min(start + max_rows, len(sites)))
        with torch.inference_mode():
            before, again = _output(run, len(chunk)), _output(run, len(chunk))
            steer(chunk)
            try:
                after, after_again = _output(run, len(chunk)), _output(run, len(chunk))
            finally:
                steer(range(0))
            if before is None or again is None or after is None or after_again is None or not before.isfinite().all():
                is_seen = False
                continue
            # Mamba's dummy steps hand on memory that was never written, until the vector outweighs it.
            rows = _silent_rows(before, again, after) & _silent_rows(after, after_again, before)
            silent += [sites[chunk[row]] for row in sorted(rows)]
    return silent, is_seen


def _add_vectors(tables: DeviceTables, chunk: range) -> None:
    """Steer the sites of `chunk` with a vector, each in a batch row of its own; an empty one takes all back."""
    _write_scratch(tables, is_on=bool(chunk))
    if not chunk:
        tables.slots.zero_()
    for row, site in enumerate(chunk):
        tables.slots[site, row] = SCRATCH_SLOT


def _add_programs(tables: DeviceTables, chunk: range) -> None:
    """Do the same at op sites, with a program that adds the vector."""
    programs = tables.programs
    if programs is None:
        raise AssertionError("op sites without tables of programs")
    _write_scratch(tables, is_on=bool(chunk))
    if not chunk:
        for table in (tables.rows, programs.active, programs.counts, programs.codes, programs.params):
            table.zero_()
    for row, site in enumerate(chunk):
        table_row = row + 1
        tables.rows[row] = table_row
        programs.active[site, row] = programs.counts[site, table_row] = 1
        programs.codes[site, table_row, 0, CODE] = Code.ADD
        programs.codes[site, table_row, 0, WRITE] = SCRATCH_SLOT
        programs.params[site, table_row, 0, WRITE_SCALE] = 1.0


def _write_scratch(tables: DeviceTables, *, is_on: bool) -> None:
    hidden_size = tables.pool.shape[1]
    pattern = torch.where(torch.arange(hidden_size, device=tables.pool.device) % 3 == 0, -STRENGTH, STRENGTH)
    tables.pool[SCRATCH_SLOT] = pattern.to(tables.pool.dtype) * int(is_on)


def _output(run: Run, num_rows: int) -> Tensor | None:
    """Return the output of the stage, ``[num_rows, n]`` in fp32 on the host; None if it shows none."""
    shown = [tensor.detach().reshape(-1, tensor.shape[-1])[:num_rows].float().cpu() for tensor in run(num_rows)]
    return torch.cat(shown, dim=1) if shown else None


def _silent_rows(before: Tensor, again: Tensor, after: Tensor) -> set[int]:
    """Return the rows that changed by no more than they do between two equal steps, `before` and `again`."""
    noise = torch.nan_to_num(again - before, posinf=torch.inf).abs().amax(dim=1)
    change = torch.nan_to_num(after - before).abs().amax(dim=1)
    scale = before.abs().amax(dim=1)
    has_changed = (change > MIN_RESPONSE * scale) & (change > 4 * noise)
    return set(torch.nonzero(~has_changed & after.isfinite().all(dim=1)).flatten().tolist())
