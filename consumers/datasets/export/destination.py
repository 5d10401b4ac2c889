"""The folder that an export goes to, and the facts that each export writes beside the rows."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from headgate.consumers.datasets.dataset import store_manifest

MANIFEST = "_headgate_manifest.json"  # readers of whole folders pass over names that begin so


def new_folder(path: str | os.PathLike[str]) -> Path:
    """Make the folder of an export.

    Raises:
        ValueError: If there is something in it: nothing is overwritten.
    """
    folder = Path(path)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"{folder}: exists and is not an empty folder; nothing is overwritten, name another")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def finish(folder: Path, manifest: dict[str, Any], **facts: Any) -> dict[str, Any]:
    """Write the manifest, the last file of an export: one without it was cut off. Returns it."""
    whole = {**manifest, "export": facts}
    store_manifest(folder / MANIFEST, whole)
    return whole
