"""Moments in files: each process that captures owns one, and all files of a root together are the moments.

``ROOT/moments-N.safetensors`` is replaced at once, never half, and belongs to the process that holds the lock of
``ROOT/.moments-N.lock``. A process takes the first number whose lock is free, goes on from what the file holds, and is
the only one to write it. The kernel frees the lock of a process that was killed, so the next one goes on there. Each
row is in one file alone, and merging all files counts nothing twice, however many processes there were.
"""

from __future__ import annotations

import fcntl
import itertools
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
from safetensors.numpy import save

from headgate.capture.files.reading import refusing
from headgate.capture.files.tensors import TensorFile, open_safetensors
from headgate.capture.schema.errors import CaptureFileError
from headgate.capture.schema.sites import Site
from headgate.consumers.filesystem.storage.local_store import open_lock, sync_folder, write_file
from headgate.consumers.moments.entry import MomentsEntry, MomentsKey, MomentsSettings, Phase

FORMAT = "1"
_FORMAT_KEY = "headgate.moments"
_NUM_ENTRIES = "num_entries"
"""A tensor that every file has: safetensors 0.4.3 does not read a file without one."""
Entries = dict[MomentsKey, MomentsEntry]


class _EntryHeader(msgspec.Struct, frozen=True, kw_only=True):
    """One entry's plain values; its arrays are the tensors ``{index}/...``."""

    tag: str
    site: str
    phase: Phase
    num_rows: int
    num_skipped: int
    num_sinks: int
    num_not_finite: int
    num_zeros: int
    norm_total: float
    norm_least: float | None
    norm_most: float | None
    low_rank_error: float


class _StateHeader(msgspec.Struct, frozen=True, kw_only=True):
    settings: MomentsSettings
    written_at: str
    entries: list[_EntryHeader]


class StoredMoments(msgspec.Struct, frozen=True, kw_only=True):
    """The content of one file.

    Attributes:
        settings: What it was made with.
        written_at: ISO 8601, UTC.
        entries: By key.
    """

    settings: MomentsSettings
    written_at: str
    entries: Entries


def encode_state(settings: MomentsSettings, entries: Mapping[MomentsKey, MomentsEntry]) -> bytes:
    """Return the content of a file; entries are settled first."""
    headers, tensors = [], {_NUM_ENTRIES: np.array([len(entries)])}
    for index, (key, entry) in enumerate(entries.items()):
        entry.settle()
        headers.append(_header_of(key, entry))
        buckets, counts = entry.norms.arrays()
        moments = entry.moments
        arrays = {"mean": moments.mean, "squares": moments.squares, "buckets": buckets, "counts": counts}
        if moments.scatter is not None:
            arrays["scatter"] = moments.scatter
        if moments.low_rank is not None:
            arrays["low_rank"] = moments.low_rank.rows
        tensors.update({f"{index}/{name}": np.ascontiguousarray(array) for name, array in arrays.items()})
    now = datetime.now(timezone.utc).isoformat(timespec="milliseconds")
    header = _StateHeader(settings=settings, written_at=now, entries=headers)
    return bytes(save(tensors, metadata={_FORMAT_KEY: FORMAT, "header": msgspec.json.encode(header).decode()}))


def _header_of(key: MomentsKey, entry: MomentsEntry) -> _EntryHeader:
    low_rank, norms = entry.moments.low_rank, entry.norms
    return _EntryHeader(
        tag=key.tag,
        site=key.site,
        phase=key.phase,
        num_rows=entry.moments.num_rows,
        num_skipped=entry.num_skipped,
        num_sinks=entry.num_sinks,
        num_not_finite=entry.num_not_finite,
        num_zeros=norms.num_zeros,
        norm_total=norms.total,
        norm_least=norms.least if norms.num_values else None,
        norm_most=norms.most if norms.num_values else None,
        low_rank_error=0.0 if low_rank is None else low_rank.error,
    )


def read_state(path: Path) -> StoredMoments:
    """Read one file.

    Raises:
        CaptureFileError: If it is damaged, or no file of moments.
        OSError: If it cannot be read.
    """
    with _opened(path) as (file, header):
        tensors = {name: tensor.read(tensor.dtype) for name, tensor in file.tensors.items()}
        entries = {
            MomentsKey(one.tag, Site.parse(one.site).name, one.phase): _read_entry(
                header.settings, one, tensors, f"{index}/"
            )
            for index, one in enumerate(header.entries)
        }
        if len(entries) < len(header.entries):
            raise ValueError("several entries are of one tag, site and phase")
    return StoredMoments(settings=header.settings, written_at=header.written_at, entries=entries)


def read_settings(path: Path) -> MomentsSettings:
    """Read the settings of one file; raises as `read_state` does."""
    with _opened(path) as (_, header):
        return header.settings


@contextmanager
def _opened(path: Path) -> Iterator[tuple[TensorFile, _StateHeader]]:
    """Open one file; whatever is wrong with it becomes a `CaptureFileError`."""
    file = open_safetensors(path, CaptureFileError)
    if file.texts.get(_FORMAT_KEY) != FORMAT:
        raise CaptureFileError(
            f"{path}: not a file of moments of format {FORMAT}; its format is {file.texts.get(_FORMAT_KEY)!r}"
        )
    with refusing(path, CaptureFileError, "not a file of moments, or damaged"):
        yield file, msgspec.json.decode(file.texts["header"], type=_StateHeader)


def _read_entry(
    settings: MomentsSettings, header: _EntryHeader, tensors: Mapping[str, npt.NDArray[Any]], prefix: str
) -> MomentsEntry:
    def read(name: str, *shape: int) -> npt.NDArray[Any]:
        array = tensors[prefix + name]
        if array.dtype != np.float64 or array.shape != shape:
            raise ValueError(f"tensor {prefix}{name}: {array.dtype} {array.shape}, expected float64 {shape}")
        return array

    width = settings.width_of(header.site)
    mean, squares = read("mean", width), read("squares", width)  # before anything of that width is made
    entry = MomentsEntry(settings, header.site)
    entry.num_skipped, entry.num_sinks = header.num_skipped, header.num_sinks
    entry.num_not_finite = header.num_not_finite
    moments, norms = entry.moments, entry.norms
    moments.num_rows = header.num_rows
    moments.mean, moments.squares = mean, squares
    if moments.scatter is not None:
        moments.scatter = read("scatter", width, width)
    if moments.low_rank is not None:
        num_rows = min(len(tensors[f"{prefix}low_rank"]), settings.rank)
        moments.low_rank.rows, moments.low_rank.error = read("low_rank", num_rows, width), header.low_rank_error
    pairs = zip(tensors[f"{prefix}buckets"].tolist(), tensors[f"{prefix}counts"].tolist(), strict=True)
    norms.counts, norms.num_zeros, norms.total = dict(pairs), header.num_zeros, header.norm_total
    if header.norm_least is not None and header.norm_most is not None:
        norms.least, norms.most = header.norm_least, header.norm_most
    return entry


def state_files(root: Path) -> list[Path]:
    """Every file of moments in a root, by name."""
    return sorted(root.glob("moments-*.safetensors"))


def merge_states(states: Iterable[tuple[Path, StoredMoments]]) -> StoredMoments | None:
    """Merge files of one root; None if there is none. The time is that of the oldest.

    Raises:
        CaptureFileError: If their settings differ.
    """
    merged: StoredMoments | None = None
    for path, state in states:
        if merged is None:
            merged = state
            continue
        merged.settings.check_same(state.settings, str(path))
        for key, entry in state.entries.items():
            if key in merged.entries:
                merged.entries[key].merge(entry)
            else:
                merged.entries[key] = entry
        merged = msgspec.structs.replace(merged, written_at=min(merged.written_at, state.written_at))
    return merged


class OwnedFile:
    """The file of moments that this process owns, as long as it lives or until `close`.

    Attributes:
        path: Where it is; it may not exist yet.

    Args:
        root: Made if it does not exist; on a file system with locks.

    Raises:
        OSError: If the root cannot be written to, or has no locks.
    """

    def __init__(self, root: Path) -> None:
        root.mkdir(parents=True, exist_ok=True)
        for number in itertools.count():
            lock = open_lock(root / f".moments-{number}.lock")
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(lock)
            except BaseException:
                os.close(lock)
                raise
            else:
                break
        self._lock: int | None = lock
        self.path = root / f"moments-{number}.safetensors"
        self._part = root / f".moments-{number}.part"
        self._part.unlink(missing_ok=True)  # of a process that was killed while it wrote

    def replace(self, content: bytes) -> None:
        """Put `content` in the place of what is there, and on the disk.

        Raises:
            OSError: If the disk takes no more; what was there stays.
        """
        try:
            write_file(self._part, [memoryview(content)], fsync=True)
            os.replace(self._part, self.path)
        finally:
            self._part.unlink(missing_ok=True)
        sync_folder(self.path.parent)

    def close(self) -> None:
        """Leave the file to others. May be called again."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None
