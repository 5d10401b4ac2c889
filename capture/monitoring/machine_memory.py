"""Memory and processors that this process may use, from which unconfigured sizes are derived.

A container may use less than its machine has: its control group, of either version, and each group above it have
limits.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

_ROOT = Path("/")
"""Where ``proc`` and ``sys`` are."""


@dataclass(frozen=True, slots=True)
class _MemoryFiles:
    """Names of a control group's files: its limit, what it uses, and the part of that which is read again at need."""

    limit: str
    usage: str
    reclaimable: str


_VERSION_2 = _MemoryFiles("memory.max", "memory.current", "inactive_file")
_VERSION_1 = _MemoryFiles("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")


def available_memory() -> int:
    """Bytes of memory that are free, or hold only what can be read again from a disk; 0 at least."""
    found = _meminfo()
    sizes = [found.get("MemAvailable", found["MemTotal"])]
    for folder, files in _groups("memory"):
        limit, used = _number(folder / files.limit), _number(folder / files.usage)
        if limit is not None and used is not None:
            sizes.append(limit - used + _table(folder / "memory.stat").get(files.reclaimable, 0))
    return max(min(sizes), 0)


def share_of_memory(part: int, least: int, most: int) -> int:
    """Bytes: one of `part` parts of the memory that is available, but not below `least` and not above `most`."""
    return max(least, min(available_memory() // part, most))


def num_processors() -> int:
    """Processors that this process may use, at least one: the ones it may run on, or its quota of their time."""
    quotas = [len(os.sched_getaffinity(0))]
    for folder, files in _groups("cpu"):
        with suppress(OSError, ValueError):
            if files is _VERSION_2:
                quota, period = (folder / "cpu.max").read_text().split()
            else:
                quota, period = ((folder / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
            if int(quota) > 0:  # -1 and "max": none
                quotas.append(-(-int(quota) // int(period)))
    return max(min(quotas), 1)


def _meminfo() -> dict[str, int]:
    """Entries of ``/proc/meminfo`` in bytes."""
    return {name.rstrip(":"): 1024 * size for name, size in _table(_ROOT / "proc/meminfo").items()}


def _groups(controller: str) -> Iterator[tuple[Path, _MemoryFiles]]:
    """The control groups of this process for a controller, and those above them; folders may be missing.

    In a container, its own group often is the root of what it sees.
    """
    base = _ROOT / "sys/fs/cgroup"
    paths = {"": "", controller: ""}
    with suppress(OSError):
        for line in (_ROOT / "proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            paths |= dict.fromkeys(controllers.split(","), path.strip("/"))
    for top, path, files in ((base, paths[""], _VERSION_2), (base / controller, paths[controller], _VERSION_1)):
        folder = top / path
        yield folder, files
        while folder != top:
            folder = folder.parent
            yield folder, files


def _number(path: Path) -> int | None:
    """A limit or a count; None if there is none."""
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdecimal() else None  # "max" if there is none


def _table(path: Path) -> Mapping[str, int]:
    """Lines of a name and a number; nothing if the file is missing."""
    found = dict[str, int]()
    with suppress(OSError):
        for line in path.read_text().splitlines():
            words = line.split()
            if len(words) > 1 and words[1].isdecimal():
                found[words[0]] = int(words[1])
    return found
