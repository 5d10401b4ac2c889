"""A process that writes captures and kills itself, as by ``kill -9``, at each point of the way in turn.

``python -m tests.fakes.dying_processes ROOT LAYOUT`` forks a child for point 0, 1, 2, ... that works
in ``ROOT/POINT`` and dies at that system call, until one gets through alive. Prints the number of points.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

from tests.fakes.capturing import capturing
from tests.fakes.death import Death

CALLS = ("fsync", "link", "mkdir", "rename", "unlink")
FIRST, SECOND = "first", "second"


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
