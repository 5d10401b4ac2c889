"""The switch for rewriting kernels that inductor has written for a GPU, and the count of what was rewritten.

``additional_config["headgate"]["compiler"] = {"rewrites": false}`` switches the rewrites off. They are for speed alone:
the order of arithmetic, and so every answer, stays as it is. The rest of `compiler` is not switched: operators that are
not fused, and buffers that inductor leaves out of its counts, keep answers of idle engines equal to stock's.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass

from headgate.capture.engine.compiler.prefetch import hoist_loads, prefetch_weights

logger = logging.getLogger("headgate")


@dataclass(slots=True)
class RewriteCounts:
    """Kernels of this process that read headgate's tables. Those from inductor's caches are not written, nor counted.

    Attributes:
        kernels: Kernels that were written.
        hoisted: Those whose loads of tables were moved.
        prefetched: Those that prefetch the norm's weights.
        unchanged: Those with several loops in which nothing was found to rewrite: a new inductor writes them otherwise.
    """

    kernels: int = 0
    hoisted: int = 0
    prefetched: int = 0
    unchanged: int = 0


class Rewrites:
    """The rewrites of one process."""

    def __init__(self) -> None:
        self.is_on = True
        self.counts = RewriteCounts()

    def apply(self, source: str, pointers: Collection[str], *, understands_ptx: bool) -> str:
        """Rewrite one kernel.

        Args:
            source: As inductor wrote it.
            pointers: Names of its arguments that are headgate's tables, and that it does not write to.
            understands_ptx: Whether the GPU's compiler takes PTX; AMD's does not.
        """
        self.counts.kernels += 1
        if not self.is_on:
            return source
        hoisted = hoist_loads(source, pointers)
        result = prefetch_weights(hoisted) if understands_ptx else hoisted
        self.counts.hoisted += hoisted != source
        self.counts.prefetched += result != hoisted
        if result == source and source.count("for r0_offset in ") > 1:
            self.counts.unchanged += 1
            if self.counts.unchanged == 1:
                logger.warning(
                    "headgate: a kernel that reads its tables has no load to move or prefetch: this inductor writes "
                    "kernels otherwise. Answers are right; idle engines are a little slower"
                )
        return result

    def stats(self) -> Mapping[str, object]:
        """The switch and the counts, for ``headgate verify``."""
        return {"rewrites": self.is_on, **asdict(self.counts)}


REWRITES = Rewrites()
"""Of this process: inductor's classes are patched once for all graphs."""
