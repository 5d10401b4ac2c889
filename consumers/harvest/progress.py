"""The progress of a harvest on a terminal, as a bar, or in a log, as lines."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from headgate.consumers.harvest.run import Progress, Report

LINE_S = 10.0
"""Seconds between two lines of a log."""


@contextmanager
def showing(console: Console, clock: Callable[[], float] = time.monotonic) -> Iterator[Report]:
    """Show what is reported: rows, rows per second, gigabytes and the time left.

    Args:
        console: A terminal gets a bar; anything else gets a line at the first batch, then every `LINE_S` seconds.
        clock: Seconds.
    """
    speed = _Speed(clock)
    if not console.is_terminal:
        yield _Lines(console, speed, clock)
        return
    columns = (BarColumn(), TextColumn("{task.description}"), TimeRemainingColumn())
    with Bar(*columns, console=console) as bar:
        task = bar.add_task("", total=None)

        def show(progress: Progress) -> None:
            text = f"{_rows(progress)}, {speed.of(progress):,.0f} rows/s, {progress.num_bytes / 1e9:.2f} GB"
            bar.update(task, completed=progress.rows, total=progress.wanted_rows, description=text)

        yield show


class _Speed:
    """Rows per second of this run, since the first report."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._first: tuple[float, int] | None = None

    def of(self, progress: Progress) -> float:
        """The speed at a report."""
        now = self._clock()
        if self._first is None:
            self._first = now, progress.rows
        seconds = now - self._first[0]
        return (progress.rows - self._first[1]) / seconds if seconds > 0 else 0.0


class _Lines:
    """Reports as lines of a log."""

    def __init__(self, console: Console, speed: _Speed, clock: Callable[[], float]) -> None:
        self._console = console
        self._speed = speed
        self._clock = clock
        self._count = 0
        self._last = 0.0

    def __call__(self, progress: Progress) -> None:
        speed, now = self._speed.of(progress), self._clock()
        self._count += 1
        if self._count > 2 and now - self._last < LINE_S:
            return
        self._last = now
        rows_left = max(progress.wanted_rows - progress.rows, 0)  # the last prompt brings more than are wanted
        left = f", {rows_left / speed:,.0f} s left" if speed else ""
        line = f"{_rows(progress)}, {speed:,.0f} rows/s, {progress.num_bytes / 1e9:.2f} GB{left}"
        self._console.print(line, soft_wrap=True, highlight=False)


def _rows(progress: Progress) -> str:
    return f"{progress.rows:,} of {progress.wanted_rows:,} rows"
