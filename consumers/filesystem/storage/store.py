"""What a layout needs of the place it writes to."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from headgate.consumers.filesystem.storage.names import Target


class Settling(Protocol):
    """Something that many requests share and that must be on the disk before their results say so.

    Hashable: equal ones are settled once for all the requests of a batch.
    """

    def settle(self) -> None:
        """Put it on the disk.

        Raises:
            OSError: If that fails: the requests that wait for it then end with an error.
        """
        ...


@dataclass(frozen=True, slots=True)
class Published:
    """Files that are in their place.

    Attributes:
        paths: Where they are.
        num_bytes: What they take together.
        settling: What must still be settled before they survive a power cut.
    """

    paths: tuple[str, ...]
    num_bytes: int
    settling: Settling


class Store(Protocol):
    """A place for files. Any thread may call."""

    def temp_path(self) -> Path:
        """A local path for a file of one's own."""
        ...

    def check_free(self, target: Target, suffix: str) -> None:
        """Raise `ConsumerError` if the target's name is taken."""
        ...

    def publish_file(self, target: Target, suffix: str, buffers: Iterable[memoryview]) -> Published:
        """Make ``{folder}/{stem}{suffix}`` appear, whole."""
        ...

    def publish_folder(self, target: Target, files: Mapping[str, Iterable[memoryview]]) -> Published:
        """Make ``{folder}/{stem}/`` appear with all of `files`."""
        ...

    def close(self) -> None:
        """Remove temporary files. May be called again."""
        ...
