"""Writing files that others may be reading."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def replacing(target: Path) -> Iterator[Path]:
    """Give the path of a new file beside `target`, which takes its place in the end: readers never see half of it.

    The block writes the file. If it fails, `target` stays as it was, and the new file is removed.

    Args:
        target: The file to write; it need not exist.

    Raises:
        OSError: If it cannot be replaced.
    """
    temporary = target.with_name(f".{target.name}.{os.getpid()}.part")
    try:
        yield temporary
        temporary.replace(target)
    finally:
        temporary.unlink(missing_ok=True)
