"""Packages that publish consumers, written to a folder of ``sys.path``."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from headgate.capture.schema.registry import GROUP


def install_plugin(folder: Path, distribution: str, source: str, entries: Mapping[str, str]) -> None:
    """Put a package that publishes consumers into a folder of ``sys.path``: ``{name: attribute}``."""
    module = f"consumers_of_{distribution}"
    (folder / f"{module}.py").write_text(source)
    info = folder / f"{distribution}-1.5.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 1.5\n")
    lines = [f"{name.replace('_', '-')} = {module}:{attribute}" for name, attribute in entries.items()]
    (info / "entry_points.txt").write_text("\n".join([f"[{GROUP}]", *lines]))
