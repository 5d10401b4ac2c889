"""The switch for rewriting kernels that inductor has written for a GPU, and the count of what was rewritten.

``additional_config["headgate"]["compiler"] = {"rewrites": false}`` switches the rewrites off. They are for speed alone:
the order of arithmetic, and so every answer, stays as it is. The rest of `compiler` is not switched: operators that are
not fused, and buffers that inductor leaves out of its counts, keep answers of idle engines equal to stock's.

Two rewrites move or prefetch the loads that a GPU kernel waits for longest in front of the kernel's loops. A norm in
front of attention makes two or three passes over a row that is still in the GPU's cache. A row's slots and the norm's
weights are not: a layer's weights pass through the cache between two layers. Inductor reads the slots where they are
first used, and the norm's weights in a later pass: one way to memory after the other. In front of the first pass both
travel at once. The values that are computed, and their order, stay as they are.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass

logger = logging.getLogger(__name__)

_LOOP = re.compile(r"    for r0_offset in ")
_READ = re.compile(r"    tmp\d+ = tl\.load\((\w+) \+ \((\w+)\), (\w+)(?:, eviction_policy='\w+')?\)$")
_SHARED = re.compile(r"tl\.load\((in_ptr\d+) \+ \(((?:\d+ \+ )?)r0_\d+\), (?:r0_mask|None)\W")
_ASSIGNED = re.compile(r"    (\w+)(?:: tl\.constexpr)? = ")
_STEP = 16
"""Values from one that is fetched to the next: 32 bytes of bfloat16, a sector of the cache."""

# By one program for all: where 64 ask for the same sectors at once, Gemma's kernel takes 1.2 us longer (H200).
_FETCH = """\
    if tl.program_id(0) == 0:
        for r0_ahead in tl.range(0, r0_numel, R0_BLOCK):
            r0_fetched = tl.minimum(r0_ahead + {step} * tl.arange(0, (R0_BLOCK + {step} - 1) // {step}), r0_numel - 1)\
"""
_FETCH_ONE = """\
            tl.inline_asm_elementwise(
                "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [{address}], tl.int32, False, 1)\
"""


def hoist_loads(source: str, pointers: Collection[str]) -> str:
    """Return `source` with the loads of `pointers` between its loops in front of the first.

    Loads at an index and under a mask that are known there are moved; everything else stays where it is.

    Args:
        source: Of one kernel.
        pointers: Names of arguments to which the kernel does not write.
    """
    lines = source.split("\n")
    start = next(iter(_loops(lines)), len(lines))
    known = {found[1] for line in lines[:start] if (found := _ASSIGNED.match(line))} | {"None"}

    def is_movable(line: str) -> bool:
        read = _READ.match(line)
        return read is not None and read[1] in pointers and {read[2], read[3]} <= known

    moved = [line for line in lines[start:] if is_movable(line)]
    return "\n".join([*lines[:start], *moved, *(line for line in lines[start:] if not is_movable(line))])


def prefetch_weights(source: str) -> str:
    """Return `source` with a fetch into the cache, before its first loop, of values that later loops read for all rows.

    Args:
        source: Of one kernel, for a GPU that understands PTX.
    """
    lines = source.split("\n")
    loops = _loops(lines)
    if len(loops) < 2:
        return source
    reads = map(_SHARED.search, lines[loops[1] :])
    addresses = dict.fromkeys(f"{read[1]} + {read[2]}r0_fetched" for read in reads if read)
    if not addresses:
        return source
    fetches = [_FETCH.format(step=_STEP), *(_FETCH_ONE.format(address=address) for address in addresses)]
    return "\n".join([*lines[: loops[0]], *fetches, *lines[loops[0] :]])


def num_loops(source: str) -> int:
    """Return the number of loops over a row in a kernel's text."""
    return len(_loops(source.split("\n")))


def _loops(lines: list[str]) -> list[int]:
    return [number for number, line in enumerate(lines) if _LOOP.match(line)]


@dataclass(slots=True)
class RewriteCounts:
    """Kernels of this process that read headgate's tables. Those from inductor's caches are not written, nor counted.

    Attributes:
        excluded: Buffers left out of inductor's heuristics, summed over the graphs. No switch turns this off.
        kernels: Kernels that were written.
        norms: Reductions that go over a row in several passes, as the norms of long rows do.
        hoisted: Kernels whose loads of tables were moved.
        prefetched: Kernels that prefetch the norm's weights.
        unmatched: Norms whose loops or weights were not found in the text: a new inductor writes them otherwise.
    """

    excluded: int = 0
    kernels: int = 0
    norms: int = 0
    hoisted: int = 0
    prefetched: int = 0
    unmatched: int = 0


class Rewrites:
    """The rewrites of one process."""

    def __init__(self) -> None:
        self.is_on = True
        self.counts = RewriteCounts()

    def apply(self, source: str, pointers: Collection[str], *, is_looped: bool, understands_ptx: bool) -> str:
        """Rewrite one kernel.

        Args:
            source: As inductor wrote it.
            pointers: Names of its arguments that are headgate's tables, and that it does not write to.
            is_looped: Whether inductor says that a reduction of the kernel loops over a row.
            understands_ptx: Whether the GPU's compiler takes PTX; AMD's does not.
        """
        self.counts.kernels += 1
        is_norm = is_looped and num_loops(source) != 1  # none: the text is in a form that is not known
        self.counts.norms += is_norm
        if not self.is_on:
            return source
        hoisted = hoist_loads(source, pointers)
        result = prefetch_weights(hoisted) if understands_ptx else hoisted
        self.counts.hoisted += hoisted != source
        self.counts.prefetched += result != hoisted
        if is_norm and understands_ptx and result == hoisted:
            self._note_unmatched()
        return result

    def _note_unmatched(self) -> None:
        self.counts.unmatched += 1
        if self.counts.unmatched == 1:
            logger.warning(
                "headgate: a norm's kernel has no load of weights to prefetch: this inductor writes kernels otherwise. "
                "Answers are right; idle engines are a little slower"
            )

    def stats(self) -> Mapping[str, object]:
        """Return the switch and the counts, for ``headgate verify``."""
        return {"rewrites": self.is_on, **asdict(self.counts)}


REWRITES = Rewrites()
"""The rewrites of this process: inductor's classes are patched once for all graphs."""
