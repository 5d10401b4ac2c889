"""The step log: one line for each step of a worker, with what was laid out and planned, for hunting off-by-one errors.

It is written where the environment variable `STEP_LOG` names a folder. `headgate.capture.engine.worker.runner` writes
the step's requests, and each part adds what it does with their rows (`WorkerHooks.headgate_describe_step`), as the
device has it: writing a line waits for the device.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from itertools import count
from pathlib import Path
from typing import Any

from headgate.capture.schema.errors import ConfigError

STEP_LOG = "HEADGATE_STEP_LOG"
"""The environment variable that names the folder of the files; without it no step is logged."""


class StepLog:
    """The log of one worker, a file with one JSON object on each line. Step thread only.

    Args:
        path: A new file, which its owner alone may read: it has the tokens of requests.

    Raises:
        OSError: If it cannot be made.
    """

    def __init__(self, path: Path) -> None:
        self._file = open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w")  # noqa: SIM115
        self._numbers = count()

    def write(self, step: Mapping[str, Any]) -> None:
        """Append a step, numbered, at once: the process may end in it."""
        self._file.write(json.dumps({"step": next(self._numbers), **step}, separators=(",", ":")) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def open_step_log(rank: int) -> StepLog | None:
    """Open the log of this process, ``rank<rank>-<process id>.jsonl`` in the folder of `STEP_LOG`; None if unset.

    Raises:
        ConfigError: If the folder, or the file in it, cannot be made.
    """
    folder = os.environ.get(STEP_LOG)
    if not folder:
        return None
    path = Path(folder) / f"rank{rank}-{os.getpid()}.jsonl"
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        return StepLog(path)
    except OSError as error:
        raise ConfigError(
            f"{STEP_LOG}={folder}: {path} cannot be written ({error}); name a folder or unset it"
        ) from error


def compact(numbers: Iterable[int]) -> str:
    """Write numbers in short: ``3:6`` for 3, 4, 5 and ``0*8`` for eight zeros, separated by commas."""
    runs: list[list[int]] = []  # first, last, how many
    for number in numbers:
        if runs:
            first, last, size = runs[-1]
            if number - last in ((0, 1) if size == 1 else (min(last - first, 1),)):
                runs[-1] = [first, number, size + 1]
                continue
        runs.append([number, number, 1])
    return ",".join(map(_shown, runs))


def _shown(run: list[int]) -> str:
    first, last, size = run
    if size == 1:
        return str(first)
    return f"{first}*{size}" if first == last else f"{first}:{last + 1}"
