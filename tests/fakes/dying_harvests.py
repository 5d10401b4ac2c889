"""Processes that harvest into an object store, each killed after some prompts, until one gets through.

``python -m tests.fakes.dying_harvests URL SPOOL PROMPTS`` prints how many there were. The store is that of the
environment.
"""

from __future__ import annotations

import os
import signal
import sys
from itertools import count
from pathlib import Path

from headgate.consumers.harvest import HarvestRoot, Wanted, open_prompts, parse_site_names, run_prompts
from tests.fakes.capturing import capturing
from tests.fakes.dying_uploads import forked
from tests.fakes.harvesting import FakeEngine, Killed

SITES = parse_site_names("1.post_mlp,3.post_mlp")
ROWS, BATCH, SHARD_BYTES, KILL_AFTER = 60, 2, 400, 3


def work(url: str, spool: Path, prompts: Path) -> None:
    """Harvest; die after a few prompts, at once, as by ``kill -9``."""
    with HarvestRoot(url, spool=spool) as root:
        with capturing(**root.params, threads=1, shard_bytes=SHARD_BYTES) as files:
            engine = FakeEngine(files, kill_after=KILL_AFTER)
            try:
                finish = run_prompts(
                    engine, open_prompts(str(prompts)), root, Wanted(sites=SITES), rows=ROWS, batch=BATCH
                )
            except Killed:
                os.kill(os.getpid(), signal.SIGKILL)
        finish()


def main(url: str, spool: Path, prompts: Path) -> int:
    """Fork processes until one ends by itself; return how many were killed."""
    for killed in count():
        died = forked(lambda: work(url, spool, prompts))
        if died != -signal.SIGKILL:
            assert died == 0
            return killed
    raise AssertionError("no process ends by itself")


if __name__ == "__main__":
    sys.stdout.write(str(main(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]))))
