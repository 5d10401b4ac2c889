"""When the consumers' calls began and how they ended: noted by the processes that run them, read when they have ended.

Every process of the machine has the same monotonic clock, so the times are those of the clients.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

FOLDER = "CHAOS_NOTES"
"""Names the folder of the notes, in the environment of a server under chaos."""


@dataclass
class Call:
    """One call of a consumer that may fail on purpose.

    Attributes:
        instance: The consumer.
        began: On the monotonic clock, as is `ended`.
        ended: Infinite if no end was noted: it is still under way, or its process was killed in it.
        has_raised: Whether it ended with an exception.
    """

    instance: str
    began: float
    ended: float = math.inf
    has_raised: bool = False


@contextmanager
def noted(instance: str) -> Iterator[None]:
    """Note the call that runs inside; a file of its own for each process."""
    _write(instance, "began")
    try:
        yield
    except BaseException:
        _write(instance, "raised")
        raise
    _write(instance, "returned")


def _write(instance: str, what: str) -> None:
    with Path(os.environ[FOLDER], f"{os.getpid()}.txt").open("a", encoding="utf-8") as file:
        file.write(f"{instance} {what} {time.monotonic()!r}\n")


def take_notes(folder: Path) -> list[Call]:
    """The calls that were noted in `folder`, whose notes are then removed; no process may write there any more."""
    calls = []
    for path in folder.iterdir():
        last: dict[str, Call] = {}  # a consumer has one thread, so its calls do not overlap
        for line in path.read_text(encoding="utf-8").splitlines():
            instance, what, at = line.split()
            if what == "began":
                last[instance] = Call(instance, float(at))
                calls.append(last[instance])
            else:
                last[instance].ended, last[instance].has_raised = float(at), what == "raised"
        path.unlink()
    return calls
