"""Deadlines of tests: what ends a test that hangs, on a machine as slow as it is here and now.

A deadline is given for a quiet machine of the kind that the tests were written on, with much room, and made longer by
what is measured: how much longer a fixed piece of work takes.
"""

from __future__ import annotations

import os
import time
from collections import deque
from pathlib import Path
from typing import ClassVar

WORK, WORK_S = 1_000_000, 0.025
"""Turns of a loop, and what they take a core of such a machine."""
FRESH_S = 15.0
"""What was measured holds for so long."""
MOST = 20.0
"""Nothing is taken for slower than that: a test that hangs ends."""


class Measured:
    """What was measured last: the machine may be busy in between.

    Attributes:
        values: The last ones.
        at: When, on the monotonic clock.
    """

    values: ClassVar[deque[float]] = deque([1.0], maxlen=3)
    at: ClassVar[float] = float("-inf")


def measure() -> float:
    """How many times longer than on a quiet machine the work takes this moment."""
    began = time.perf_counter()
    for _ in range(WORK):
        pass
    return (time.perf_counter() - began) / WORK_S


def slowness() -> float:
    """How many times longer than on a quiet machine something takes now, from 1 to `MOST`.

    The longest of what the work took here the last times, and of how many processes want each core.
    """
    if time.monotonic() - Measured.at >= FRESH_S:
        waiting = os.getloadavg()[0] / (os.cpu_count() or 1)
        Measured.values.append(max(measure(), waiting, 1.0))
        Measured.at = time.monotonic()
    return min(max(Measured.values), MOST)


def patience(seconds: float) -> float:
    """A deadline of so many seconds on a quiet machine, for this one as it is now."""
    return seconds * slowness()


class Neighbours:
    """What other programs take of the processors, from the moment when this is made."""

    def __init__(self) -> None:
        self._began, self._busy_s = time.monotonic(), _busy_s()

    def share(self, own_s: float) -> float:
        """Return their share of all processors' time.

        Args:
            own_s: Processor time since then that is not theirs.
        """
        passed_s = (time.monotonic() - self._began) * (os.cpu_count() or 1)
        return max(_busy_s() - self._busy_s - own_s, 0.0) / passed_s


def _busy_s() -> float:
    """Seconds that the processors have worked, or that a hypervisor has given to other machines."""
    user, nice, system, _idle, _wait, irq, softirq, steal, *_ = Path("/proc/stat").read_text().split()[1:9]
    return sum(map(int, (user, nice, system, irq, softirq, steal))) / os.sysconf("SC_CLK_TCK")
