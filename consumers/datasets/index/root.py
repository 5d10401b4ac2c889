"""Opening a root: its index if there is a valid one, and a look into the files that it does not know."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from headgate.capture.schema.errors import CaptureFileError, NewerFormatError
from headgate.consumers.datasets.index.cache import (
    ForeignIndexError,
    load_local,
    read_index,
    store_local,
    write_index,
)
from headgate.consumers.datasets.index.scan import Problem, list_root, read_units
from headgate.consumers.datasets.index.table import Table, TableBuilder, Unit
from headgate.consumers.filesystem.storage.object_store import open_files
from headgate.consumers.filesystem.storage.source import LocalSource, Source, open_source

logger = logging.getLogger(__name__)

INDEX_SUFFIX = ".headgate-index"


@dataclass(frozen=True)
class IndexedRoot:
    """A root and its requests.

    Attributes:
        given: As the user named it.
        path: Its path in its file system.
        source: Its file system, for reading.
        files: The same as fsspec has it; None for this machine.
        table: Its requests.
        problems: Files that give no rows.
        num_opened: Units that had to be opened, as the index did not know them.
    """

    given: str
    path: str
    source: Source
    files: Any
    table: Table
    problems: list[Problem]
    num_opened: int


def index_path(root: str) -> str:
    """Where the index of a root lies: beside it, or in it if nothing can lie beside it, as in a whole bucket."""
    parent = root.rpartition("/")[0]
    return f"{root}{INDEX_SUFFIX}" if parent else f"{root}/{INDEX_SUFFIX}"


def open_root(root: str | os.PathLike[str], *, caches: bool) -> IndexedRoot:
    """Open a root; with `caches`, read its index and write it anew if it was not up to date.

    Raises:
        CaptureFileError: If there is no such folder.
    """
    given = os.fspath(root)
    source, path = open_source(given)
    if not source.is_folder(path):
        raise CaptureFileError(f"{given}: no such folder")
    files = None if isinstance(source, LocalSource) else open_files(given, CaptureFileError)[0]
    listing = list_root(files, path)
    known, may_write = _cached(files, path) if caches else (None, False)
    if known is not None and known[0].units == listing.units:
        return IndexedRoot(given, path, source, files, known[0], [*listing.problems, *known[1]], 0)
    table, problems, num_opened = _updated(source, path, listing.units, known)
    if may_write:
        _store(files, path, table, problems)
    return IndexedRoot(given, path, source, files, table, [*listing.problems, *problems], num_opened)


Known = tuple[Table, list[Problem]]


def _updated(source: Source, root: str, units: list[Unit], known: Known | None) -> tuple[Table, list[Problem], int]:
    """A table of `units`: those that the index knows from there, the others from their files."""
    builder = TableBuilder()
    problems: list[Problem] = []
    old = set(known[0].units) if known else set()
    if known is not None and old:
        table, noted = known
        kept = {unit.name for unit in units if unit in old}
        chosen = np.array([unit.name in kept for unit in table.units], dtype=np.bool_)
        numbers = np.cumsum(chosen) - 1
        part = replace(table, columns=dict(table.columns), units=[u for u in table.units if u.name in kept])
        entries = np.flatnonzero(chosen[table.columns["unit"]])
        part.columns["unit"] = numbers[table.columns["unit"]].astype(np.int32)
        builder.add_table(part, entries)
        problems += [problem for problem in noted if problem.path.removeprefix(f"{root}/") in kept]
    new = [unit for unit in units if unit not in old]
    problems += read_units(source, root, new, builder)
    return _in_order(builder.build(), units), problems, len(new)


def _in_order(table: Table, units: list[Unit]) -> Table:
    """The table with its units in the order of `units`, so that one set of files has one index."""
    if table.units == units:
        return table
    rank = {unit: number for number, unit in enumerate(units)}
    numbers = np.array([rank[unit] for unit in table.units], dtype=np.int32)
    columns = dict(table.columns)
    columns["unit"] = numbers[columns["unit"]]
    order = np.argsort(columns["unit"], kind="stable")
    builder = TableBuilder()
    builder.add_table(replace(table, columns=columns, units=units), order)
    return builder.build()


def _cached(files: Any, root: str) -> tuple[Known | None, bool]:
    """The index of a root, if there is a whole one, and whether it may be written anew."""
    path = index_path(root)
    if files is None:
        data = load_local(Path(path))
    else:
        data = np.frombuffer(files.cat_file(path), dtype=np.uint8) if files.exists(path) else None
    if data is None:
        return None, True
    try:
        table, problems, of_root = read_index(data, path)
    except (ForeignIndexError, NewerFormatError) as error:
        logger.warning("%s; it is left as it is, and the root is read without an index", error)
        return None, False
    except CaptureFileError as error:
        logger.warning("%s; the index is made anew", error)
        return None, True
    # Names are relative, so an index moves along with its root; problems name whole paths.
    moved = [
        problem._replace(path=problem.path.replace(of_root, root, 1), message=problem.message.replace(of_root, root))
        for problem in problems
    ]
    return (table, moved), True


def _store(files: Any, root: str, table: Table, problems: list[Problem]) -> None:
    path = index_path(root)
    blocks = write_index(root, table, problems)
    try:
        if files is None:
            store_local(Path(path), blocks)
        else:
            files.pipe_file(path, b"".join(blocks))
    except OSError as error:
        logger.warning("%s: the index could not be kept, the next time opens every file again: %s", path, error)
