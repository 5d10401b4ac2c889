"""A process that writes captures and kills itself, as by ``kill -9``, at each point of the way in turn.

``python -m tests.fakes.dying_processes ROOT LAYOUT`` forks a child for point 0, 1, 2, ... that works
in ``ROOT/POINT`` and dies at that system call, until one gets through alive. Prints the number of points.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.fakes.capturing import capturing

CALLS = ("fsync", "link", "mkdir", "rename", "unlink")
MIN_HALVED = 64  # bytes; halving every remainder would make no new cases
FIRST, SECOND = "first", "second"


class Death:
    """Counts system calls from `arm` on, and ends the process before or after one of them, or half-way through it."""

    def __init__(self, point: int) -> None:
        self._left = point
        self._is_armed = False

    def arm(self) -> None:
        """Let the count begin."""
        self._is_armed = True

    def point(self) -> None:
        """A place to die at."""
        if self._is_armed:
            if self._left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            self._left -= 1

    def around(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """`call` with a place to die at before and after it."""

        def called(*args: Any, **kwargs: Any) -> Any:
            self.point()
            result = call(*args, **kwargs)
            self.point()
            return result

        return called

    def half_way(self, pwritev: Callable[..., int]) -> Callable[..., int]:
        """`pwritev` in pieces, each half of what is left, with a place to die at between them."""

        def called(file: int, buffers: list[memoryview], offset: int) -> int:
            if buffers[0].nbytes < MIN_HALVED:
                return pwritev(file, buffers, offset)
            written = pwritev(file, [buffers[0][: buffers[0].nbytes // 2]], offset)
            self.point()
            return written

        return called


def live(root: Path, layout: str, point: int) -> None:
    """Write a request, then another one and die."""
    death = Death(point)
    for name in CALLS:
        setattr(os, name, death.around(getattr(os, name)))
    os.pwritev = death.half_way(os.pwritev)
    with capturing(root, layout=layout, threads=1) as files:
        files.feed.whole(files.request(client_id=FIRST))
        death.arm()
        files.feed.whole(files.request(client_id=SECOND, prompt=3, output=2))


def main(root: Path, layout: str) -> int:
    """Let children die until one survives; return how many did."""
    for point in range(10_000):
        child = os.fork()
        if child == 0:
            live(root / str(point), layout, point)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        if os.waitstatus_to_exitcode(status) != -signal.SIGKILL:
            assert os.waitstatus_to_exitcode(status) == 0, f"the child failed at point {point}"
            return point
    raise AssertionError("no child survives")


if __name__ == "__main__":
    sys.stdout.write(str(main(Path(sys.argv[1]), sys.argv[2])))
