"""An endpoint plugin that measures how long the server's event loop is held by the server's own work.

A thread asks the loop for a callback every few milliseconds, and reads the processor time that the process used until
it came. Other processes on the machine lengthen the wait and not that time, so it says the same on a busy machine.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
from argparse import Namespace
from pathlib import Path
from typing import Any

PERIOD_S = 0.005
NOTED_S = 0.02
"""Shorter holds are not noted."""

ENTRY_POINTS = """
[vllm.endpoint_plugins]
loop_watch = tests.fuzz.loop_watch:LoopWatch
"""


class LoopWatch:
    """Appends a line ``cpu_s wall_s`` to ``$LOOP_HOLDS`` for each long hold."""

    name = "loop_watch"
    required_tasks = ("generate",)

    def attach_router(self, app: Any) -> None:
        """Has no routes."""

    async def init_state(self, engine_client: object, state: object, args: Namespace) -> None:
        """Begin to watch."""
        loop, path = asyncio.get_running_loop(), Path(os.environ["LOOP_HOLDS"])
        threading.Thread(target=watch, args=(loop, path), name="loop-watch", daemon=True).start()


def watch(loop: asyncio.AbstractEventLoop, path: Path) -> None:
    """Measure until the loop is closed."""
    answered = threading.Event()
    with path.open("a", buffering=1) as file:
        while not loop.is_closed():
            answered.clear()
            cpu, wall = time.process_time(), time.monotonic()
            try:
                loop.call_soon_threadsafe(answered.set)
            except RuntimeError:  # closed meanwhile
                return
            answered.wait()
            held = time.process_time() - cpu
            waited = time.monotonic() - wall
            if held > NOTED_S or waited > 1:
                file.write(f"{held:.4f} {waited:.4f}\n")
            time.sleep(PERIOD_S)
