"""The small chat model that the examples and tests serve; see `headgate.capture.engine.commands.demo_model`.

Usage, from the repository: ``.venv/bin/python examples/model.py``; prints the folder. ``HEADGATE_CACHE`` names
another cache folder than ``.cache``.
"""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

from headgate.capture.engine.commands import demo_model
from headgate.capture.engine.commands.demo_model import ModelError, say

__all__ = ["ModelError", "cache_dir", "ensure_model", "main"]


def cache_dir() -> Path:
    """The folder for everything that is made once: ``HEADGATE_CACHE``, else ``.cache`` of the repository."""
    return Path(os.environ.get("HEADGATE_CACHE") or Path(__file__).resolve().parent.parent / ".cache")


def ensure_model() -> Path:
    """Return the model's folder in this repository's cache; see `demo_model.ensure_model`."""
    return demo_model.ensure_model(cache_dir())


def main() -> int:
    """Make the model and print its folder."""
    if shutil.disk_usage(Path(__file__).parent).free < 1 << 30:
        say("warning: less than 1 GiB of disk is free")
    try:
        print(ensure_model())
    except ModelError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
