"""The manifest: from which model, files and versions a data set was made."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timezone
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from headgate.consumers.datasets.index.cache import digest_of, store_local
from headgate.consumers.datasets.index.root import IndexedRoot
from headgate.consumers.datasets.index.scan import Problem
from headgate.consumers.datasets.index.table import Group, Table
from headgate.consumers.datasets.view import RowView, fingerprint_of

FORMAT = "headgate-dataset"
MANIFEST_VERSION = 1


def make_manifest(
    roots: Sequence[IndexedRoot],
    views: Mapping[str, tuple[RowView, int]],
    table: Table,
    problems: Sequence[Problem],
    *,
    revision: str | None,
    tokenizer: str | None,
) -> dict[str, Any]:
    """JSON values that describe a data set.

    Args:
        roots: Where it is from.
        views: By site, its rows and how many requests were duplicates.
        table: The selected requests.
        problems: Files without rows.
        revision: Of the model's weights.
        tokenizer: Its name.
    """
    groups = [table.groups[number] for number in np.unique(table.columns["group"])]
    digests = [digest_of(root.table) for root in roots]
    return {
        "format": FORMAT,
        "format_version": MANIFEST_VERSION,
        "made_at": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "made_by": {"headgate": version("headgate")},
        "model": _one_or_all(group.model for group in groups),
        "revision": revision,
        "tokenizer": tokenizer,
        "dtype": _one_or_all(group.dtype for group in groups),
        "captured_by": {name: _one_or_all(_versions(groups, name)) for name in ("headgate", "vllm", "torch")},
        "num_rows": sum(len(view) for view, _ in views.values()),
        "dropped_rows": int(table.columns["dropped"].sum()),
        "sites": {site: _site(view, dropped) for site, (view, dropped) in views.items()},
        "roots": [
            {"root": root.given, "files": len(root.table.units), "index_sha256": digest}
            for root, digest in zip(roots, digests, strict=True)
        ],
        "index_sha256": sha256("".join(digests).encode()).hexdigest(),
        "problems": dict(Counter(problem.kind for problem in problems)),
    }


def store_manifest(path: str | os.PathLike[str], manifest: Mapping[str, Any]) -> None:
    """Write a manifest as JSON; it appears whole.

    Raises:
        OSError: If it cannot be written.
    """
    text = msgspec.json.format(msgspec.json.encode(manifest), indent=2) + b"\n"
    store_local(Path(path), iter([text]))


def _site(view: RowView, dropped: int) -> dict[str, Any]:
    return {
        "rows": len(view),
        "requests": view.num_requests,
        "duplicates": dropped,
        "dtype": view.dtype,
        "hidden_size": view.hidden_size,
        "fingerprint": fingerprint_of(view),
    }


def _versions(groups: Iterable[Group], name: str) -> list[str]:
    return [found for group in groups if (found := dict(group.versions).get(name)) is not None]


def _one_or_all(values: Iterable[str]) -> str | list[str] | None:
    found = sorted(set(values))
    return found[0] if len(found) == 1 else (found or None)
