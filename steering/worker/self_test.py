"""Start-up proof that every site steers: dummy steps through the very code that will serve.

Each batch row of a dummy step is a request of its own and is steered at one site only. So a row with unchanged output
names the site whose code did not run: because of a stale graph from a compile cache, or a module that is bypassed.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from headgate.capture.schema.errors import SelfTestError
from headgate.capture.schema.sites import Site
from headgate.steering.worker.device_tables import DeviceTables

logger = logging.getLogger("headgate")

STRENGTH = 12288.0
"""Size of the vector's values: far beyond the values of a stream, and exact in bf16, fp16 and fp32."""
SCRATCH_SLOT = 1
MIN_RESPONSE = 1e-3
"""Smallest change of a steered row's output that counts, relative to the largest value in it."""

Run = Callable[[int], Sequence[Tensor]]


def check_steering(tables: DeviceTables, sites: Sequence[Site], max_rows: int, run: Run) -> None:
    """Steer every site once, in as few dummy steps as `max_rows` requests allow, and leave the tables as new.

    Args:
        tables: The worker's.
        sites: Of the worker, in the order of the tables.
        max_rows: Requests of one dummy step, at most.
        run: Runs a dummy step of so many requests, one token each, and returns the tensors that the stage hands on.

    Raises:
        SelfTestError: Naming the sites that did not respond.
    """
    silent: list[Site] = []
    is_seen = True
    for start in range(0, len(sites), max_rows):
        chunk = range(start, min(start + max_rows, len(sites)))
        with torch.inference_mode():
            before, again = _output(run, len(chunk)), _output(run, len(chunk))
            after = _steered(tables, chunk, run)
            if before is None or again is None or after is None or not before.isfinite().all():
                is_seen = False
                continue
            silent += [sites[chunk[row]] for row in _silent_rows(before, again, after)]
    if silent:
        names = ", ".join(site.name for site in silent)
        raise SelfTestError(
            f"steering at {names} did not change a dummy step: the code there did not run. A stale compiled graph "
            "(remove vLLM's cache folder) or a model whose forward bypasses its modules"
        )
    if not is_seen:
        logger.warning(
            "steering: dummy steps of this stage show no output, or none that is finite: its sites are not checked"
        )
        return
    logger.info("steering: self-test passed, %d sites respond", len(sites))


def _steered(tables: DeviceTables, chunk: range, run: Run) -> Tensor | None:
    hidden_size = tables.pool.shape[1]
    pattern = torch.where(torch.arange(hidden_size, device=tables.pool.device) % 3 == 0, -STRENGTH, STRENGTH)
    tables.pool[SCRATCH_SLOT] = pattern.to(tables.pool.dtype)
    for row, site in enumerate(chunk):
        tables.slots[site, row] = SCRATCH_SLOT
    try:
        return _output(run, len(chunk))
    finally:
        tables.slots.zero_()
        tables.pool[SCRATCH_SLOT].zero_()


def _output(run: Run, num_rows: int) -> Tensor | None:
    """Return the output of the stage, ``[num_rows, n]`` in fp32 on the host; None if it shows none."""
    shown = [tensor.detach().reshape(-1, tensor.shape[-1])[:num_rows].float().cpu() for tensor in run(num_rows)]
    return torch.cat(shown, dim=1) if shown else None


def _silent_rows(before: Tensor, again: Tensor, after: Tensor) -> list[int]:
    """Return the rows that changed by no more than they do without steering."""
    noise = torch.nan_to_num(again - before, posinf=torch.inf).abs().amax(dim=1)
    change = torch.nan_to_num(after - before).abs().amax(dim=1)
    scale = before.abs().amax(dim=1)
    has_changed = (change > MIN_RESPONSE * scale) & (change > 4 * noise)
    silent: list[int] = torch.nonzero(~has_changed & after.isfinite().all(dim=1)).flatten().tolist()
    return silent
