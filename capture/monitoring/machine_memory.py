"""The memory of this machine, from which unconfigured sizes are derived."""

from __future__ import annotations

import os
from pathlib import Path

_LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))
"""Limits of the container that this process runs in: cgroup version 2, version 1."""


def host_memory() -> int:
    """Bytes of memory of this machine, or of this container if it may use less."""
    sizes = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for path in _LIMITS:
        try:
            text = path.read_text().strip()
        except OSError:
            continue
        if text.isdecimal():  # "max" if there is none
            sizes.append(int(text))
    return min(sizes)


def share_of_memory(part: int, least: int, most: int) -> int:
    """Bytes: one of `part` parts of the memory, but not below `least` and not above `most`."""
    return max(least, min(host_memory() // part, most))
