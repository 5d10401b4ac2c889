"""The switch for rewriting kernels that inductor has written for a GPU, and the count of what was rewritten.

``additional_config["headgate"]["compiler"] = {"rewrites": false}`` switches the rewrites off. They are for speed alone:
the order of arithmetic, and so every answer, stays as it is. The rest of `compiler` is not switched: operators that are
not fused, and buffers that inductor leaves out of its counts, keep answers of idle engines equal to stock's.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass

from headgate.capture.engine.compiler.prefetch import hoist_loads, num_loops, prefetch_weights

logger = logging.getLogger("headgate")


@dataclass(slots=True)
class RewriteCounts:
    """Kernels of this process that read headgate's tables. Those from inductor's caches are not written, nor counted.

    Attributes:
        excluded: Buffers left out of inductor's heuristics, summed over the graphs. No switch turns this off.
        kernels: Kernels that were written.
        norms: Those that go over a row in several passes, as the norms of long rows do.
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
"""Of this process: inductor's classes are patched once for all graphs."""
