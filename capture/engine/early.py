"""Reads of one value a row, in a kernel that inductor has written for a GPU, moved in front of the kernel's loops.

Gemma's norm in front of attention makes two passes over a row. Inductor reads a row's slots where they are first used,
between the passes: behind a barrier, and what depends on them waits for them, 0.3 us in each layer. In front of the
first pass they have arrived by then. What is computed, and in which order, stays as it is.
"""

from __future__ import annotations

import re
from collections.abc import Collection

_LOOP = re.compile(r"    for r0_offset in ")
_READ = re.compile(r"    tmp\d+ = tl\.load\((\w+) \+ \((\w+)\), (\w+)(?:, eviction_policy='\w+')?\)$")
_ASSIGNED = re.compile(r"    (\w+)(?:: tl\.constexpr)? = ")


def read_early(source: str, pointers: Collection[str]) -> str:
    """`source` with the reads of `pointers` between its loops in front of the first.

    Moved is what reads at an index and under a mask that are known there; everything else stays where it is.

    Args:
        source: Of one kernel.
        pointers: Names of arguments to which the kernel does not write.
    """
    lines = source.split("\n")
    start = next((number for number, line in enumerate(lines) if _LOOP.match(line)), len(lines))
    known = {found[1] for line in lines[:start] if (found := _ASSIGNED.match(line))} | {"None"}

    def is_early(line: str) -> bool:
        read = _READ.match(line)
        return read is not None and read[1] in pointers and {read[2], read[3]} <= known

    moved = [line for line in lines[start:] if is_early(line)]
    return "\n".join([*lines[:start], *moved, *(line for line in lines[start:] if not is_early(line))])
