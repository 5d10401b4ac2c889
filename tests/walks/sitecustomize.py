"""Python imports this module first in every process of a traced server: it notes which files of headgate's run.

``$WALKS_FOLDER`` names a folder with a file `board`, whose first byte is the number of the walk at the moment, and
`seen`, to which each process appends a line ``process, walk, file`` when it first runs a function of that file.
"""

from __future__ import annotations

import mmap
import os
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

ROOT = str(Path(__file__).resolve().parents[2])
PACKAGES = tuple(f"{ROOT}/{name}/" for name in ("capture", "steering", "consumers"))


class Tracer:
    """Begins to trace a thread when it imports headgate, and every thread that starts after that from its start.

    As a finder of modules it finds none.

    Args:
        folder: With the files that the module's docstring names.
    """

    def __init__(self, folder: Path) -> None:
        with (folder / "board").open("r+b") as file:
            self._board = mmap.mmap(file.fileno(), 1)
        self._file = os.open(folder / "seen", os.O_WRONLY | os.O_APPEND)
        self._seen = set[tuple[int, int, str]]()
        self._others = set[str]()

    def find_spec(self, name: str, path: Sequence[str] | None, target: object = None) -> None:
        if name.partition(".")[0] == "headgate" and sys.getprofile() is None:
            threading.setprofile(self._called)
            sys.setprofile(self._called)

    def _called(self, frame: FrameType, event: str, argument: object) -> None:
        file = frame.f_code.co_filename
        if event != "call" or file in self._others:
            return
        path = file.replace("/.types/headgate/", "/")  # a git work tree imports its own files from there
        if not path.startswith(PACKAGES):
            self._others.add(file)
            return
        entry = os.getpid(), self._board[0], file
        if entry not in self._seen and frame.f_code.co_name != "<module>":
            self._seen.add(entry)
            os.write(self._file, f"{_process()}\t{entry[1]}\t{path.removeprefix(ROOT + '/')}\n".encode())


def _process() -> str:
    """What the process is for people: the program that it runs, or vLLM's name for it."""
    words = sys.orig_argv
    if "headgate.capture.links" in words:
        program = words[words.index("headgate.capture.links") + 1]
        return "capture" if program.startswith("headgate.capture") else "controllers"
    import multiprocessing

    name = multiprocessing.current_process().name
    return "engine" if name.startswith(("EngineCore", "VllmWorker", "Process-")) else "front end"


if "WALKS_FOLDER" in os.environ:
    sys.meta_path.insert(0, Tracer(Path(os.environ["WALKS_FOLDER"])))  # type: ignore[arg-type]
