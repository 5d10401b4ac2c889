"""Roots of the filesystem consumer as one data set."""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import numpy.typing as npt

from headgate.capture.monitoring import notebook
from headgate.capture.schema.errors import CaptureFileError
from headgate.capture.schema.sites import Columns, Site, sort_sites
from headgate.consumers.datasets.index import (
    EntryGroup,
    EntryTable,
    IndexedRoot,
    Problem,
    digest_of,
    open_root,
    store_local,
)
from headgate.consumers.datasets.mixing import DEFAULT_REQUESTS, DEFAULT_ROWS, MixedBatches
from headgate.consumers.datasets.selection import Selection, parse_selection, parse_sites
from headgate.consumers.datasets.view import DatasetView, Files, RangeReader, RowBatch, fingerprint_of, plain_batches
from headgate.consumers.filesystem.formats.layout import StoredReadout

if TYPE_CHECKING:
    from collections.abc import Mapping


FORMAT = "headgate-dataset"
MANIFEST_VERSION = 1


def make_manifest(
    roots: Sequence[IndexedRoot],
    views: Mapping[str, tuple[DatasetView, int]],
    table: EntryTable,
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


def _site(view: DatasetView, dropped: int) -> dict[str, Any]:
    return {
        "rows": len(view),
        "requests": view.num_requests,
        "duplicates": dropped,
        "dtype": view.dtype,
        "hidden_size": view.hidden_size,
        "fingerprint": fingerprint_of(view),
    }


def _versions(groups: Iterable[EntryGroup], name: str) -> list[str]:
    return [found for group in groups if (found := dict(group.versions).get(name)) is not None]


def _one_or_all(values: Iterable[str]) -> str | list[str] | None:
    found = sorted(set(values))
    return found[0] if len(found) == 1 else (found or None)


logger = logging.getLogger(__name__)

Sites = str | Site | Iterable[str | Site]
Numbers = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Dataset:
    """Captured rows of one or several roots; made by `open_dataset`.

    Attributes:
        roots: The roots that it was opened from.
        sites: Names of the selected sites that at least one request has, in the order of the forward pass.
        problems: Files without usable rows, with the reason.
    """

    roots: tuple[IndexedRoot, ...]
    sites: tuple[str, ...]
    problems: tuple[Problem, ...]
    _selection: Selection = field(repr=False)
    _table: EntryTable = field(repr=False)
    _root_of_unit: Numbers = field(repr=False)
    _views: dict[tuple[str, ...], tuple[DatasetView, int]] = field(default_factory=dict, repr=False)

    def __repr__(self) -> str:
        roots, sites = ", ".join(root.given for root in self.roots), ", ".join(self.sites) or "no sites"
        return f"<Dataset of {roots}: {sites}{f'; {len(self.problems)} problems' if self.problems else ''}>"

    def _repr_html_(self) -> str:
        """Return it as HTML for a notebook: its roots, and rows by site. None is read."""
        facts: dict[str, object] = {
            "roots": ", ".join(root.given for root in self.roots),
            "problems": len(self.problems),
        }
        try:
            lines = [(site, count, self.duplicates(site)) for site, count in self.num_rows.items()]
        except (CaptureFileError, ValueError) as error:
            return notebook.page("Dataset", {**facts, "rows": error})
        table = notebook.TextTable(("site", "rows", "duplicate requests"), lines, len(lines))
        return notebook.page("Dataset", facts, table)

    def rows(self, sites: Sites | None = None) -> DatasetView:
        """The rows that have a value at every one of `sites`, by default at all sites of the data set.

        A request that an earlier root has, with the same tag, id, sample and sites, is omitted.

        Raises:
            ValueError: If a site is not in the data set, or no request has all of them.
            CaptureFileError: If the sites' rows are not all of one dtype and width.
        """
        return self._view(self.sites if sites is None else parse_sites(sites))[0]

    def duplicates(self, sites: Sites | None = None) -> int:
        """Requests that `rows` omits because an earlier root has them; by default the sum over all sites."""
        if sites is not None:
            return self._view(parse_sites(sites))[1]
        return sum(self._view((site,))[1] for site in self.sites)

    @property
    def num_rows(self) -> dict[str, int]:
        """Rows by site."""
        return {site: len(self._view((site,))[0]) for site in self.sites}

    def batches(self, sites: Sites | None = None, *, batch_size: int = 4096) -> Iterator[RowBatch]:
        """All rows in the order of the files, each once; the last batch may be smaller.

        Args:
            sites: As for `rows`.
            batch_size: Rows in a batch.
        """
        return plain_batches(self.rows(sites), batch_size)

    def mixed(
        self,
        sites: Sites | None = None,
        *,
        batch_size: int = 4096,
        seed: int = 0,
        min_rows: int = DEFAULT_ROWS,
        min_requests: int = DEFAULT_REQUESTS,
        epochs: int | None = 1,
        drop_sinks: bool = False,
        part: tuple[int, int] = (0, 1),
        reads_ahead: bool = True,
    ) -> MixedBatches:
        """All rows in a random order, each once an epoch; see `MixedBatches`."""
        return MixedBatches(
            self.rows(sites),
            batch_size=batch_size,
            seed=seed,
            min_rows=min_rows,
            min_requests=min_requests,
            epochs=epochs,
            drop_sinks=drop_sinks,
            part=part,
            reads_ahead=reads_ahead,
        )

    def manifest(self, *, revision: str | None = None, tokenizer: str | None = None) -> dict[str, Any]:
        """JSON values: what the data set is made of; see `write_manifest`."""
        facts = {site: (self._view((site,))[0], self._view((site,))[1]) for site in self.sites}
        return make_manifest(self.roots, facts, self._table, self.problems, revision=revision, tokenizer=tokenizer)

    def write_manifest(
        self, path: str | os.PathLike[str], *, revision: str | None = None, tokenizer: str | None = None
    ) -> None:
        """Write `manifest` as a JSON file, in place of an older one.

        Args:
            path: Where; local.
            revision: Of the model's weights. Captured files do not say, so it is null unless it is given.
            tokenizer: Its name. Likewise.

        Raises:
            OSError: If it cannot be written.
        """
        store_manifest(path, self.manifest(revision=revision, tokenizer=tokenizer))

    def readout(self, site: str) -> StoredReadout | None:
        """Return the readout whose outputs the rows of a site are; `StoredReadout.named` splits them.

        None if they are rows of the site itself, or if there are none.
        """
        entries = self._view((site,))[0].entries
        groups = self._table.groups
        return _stored(groups[int(self._table.columns["group"][entries[0, 0]])].readout) if len(entries) else None

    def close(self) -> None:
        """Close all files but those of mixed batches. They are opened again when rows are read."""
        for view, _ in self._views.values():
            view.files.close()

    def _view(self, sites: tuple[str, ...]) -> tuple[DatasetView, int]:
        if sites not in self._views:
            self._views[sites] = self._make_view(sites)
        return self._views[sites]

    def _make_view(self, sites: tuple[str, ...]) -> tuple[DatasetView, int]:
        if missing := [site for site in sites if site not in self.sites]:
            raise ValueError(f"{', '.join(missing)}: not in the data set, which has {', '.join(self.sites) or 'none'}")
        table = self._table
        readers = [RangeReader(root) for root in self.roots]
        files = Files(table, readers, self._root_of_unit)
        entries, num_lacking = _entries_with(table, sites)
        entries, num_dropped = _without_duplicates(table, entries, self._root_of_unit)
        if num_lacking:
            logger.warning("%d requests have some of %s and are left out of rows of all of them", num_lacking, sites)
        if not len(entries) and num_lacking:
            raise ValueError(f"no request has all of {', '.join(sites)}; read the sites one by one")
        dtype, hidden_size = _shape_of(table, entries, sites)
        index, starts, stops = self._selection.row_ranges(table, entries[:, 0], files.positions)
        ends = np.cumsum(stops - starts)
        return DatasetView(sites, dtype, hidden_size, files, entries[index], starts, stops, ends), num_dropped


def open_dataset(
    roots: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    *,
    sites: Sites | None = None,
    phases: str | Sequence[str] | None = None,
    positions: object = None,
    drop_bos: bool = False,
    tags: str | Iterable[str] | None = None,
    roles: str | Iterable[str] | None = None,
    since: object = None,
    until: object = None,
    strict: bool = True,
    index: bool = True,
) -> Dataset:
    """Open roots of the filesystem consumer, of any layouts, as one data set. Rows are read when they are used.

    Args:
        roots: Folders or fsspec URLs. A request in two roots is read from the root that is named first.
        sites: ``"12.post_mlp"``, several, or None for all.
        phases: ``"prefill"``, ``"decode"``, or both.
        positions: A selector as in a request: ``"last_prompt"``, ``[0, -1]``, ``{"start": 1}``.
        drop_bos: Omit position 0.
        tags: One, or several.
        roles: One, or several: rows in messages of that role, of requests captured with ``capture_messages``. Other
            requests are omitted, with a warning. The answer is in no message.
        since: A datetime, a date or ISO text, UTC unless it says otherwise: requests written then or later.
        until: The same: requests written before.
        strict: Raise on damaged files and files of a newer headgate; otherwise omit them and list them in
            `Dataset.problems`.
        index: Keep an index beside each root (``ROOT.headgate-index``), so that the next call opens only files that
            are new or changed.

    Raises:
        ValueError: If a selector cannot be read.
        CaptureFileError: If a root is no folder, or, with `strict`, a file is torn.
        NewerFormatError: With `strict`, if a newer headgate wrote a file.
    """
    selection = parse_selection(
        sites=sites,
        phases=phases,
        positions=positions,
        drop_bos=drop_bos,
        tags=tags,
        roles=roles,
        since=since,
        until=until,
    )
    named = [roots] if isinstance(roots, str | os.PathLike) else list(roots)
    opened = tuple(open_root(root, caches=index) for root in named)
    problems = tuple(problem for root in opened for problem in root.problems)
    if strict:
        _refuse(problems)
    chosen: list[tuple[EntryTable, Any]] = [(root.table, selection.entries(root.table)) for root in opened]
    if selection.roles is not None:
        _check_roles(selection, chosen)
    table = EntryTable.merged(chosen)
    root_of_unit = np.repeat(np.arange(len(opened)), [len(root.table.units) for root in opened])
    present = {site for number in np.unique(table.columns["group"]) for site in table.groups[number].sites}
    found = [site.name for site in sort_sites(Site.parse(name) for name in present)]
    wanted = tuple(site for site in found if selection.sites is None or site in selection.sites)
    return Dataset(opened, wanted, problems, selection, table, root_of_unit)


def _refuse(problems: Sequence[Problem]) -> None:
    bad = [problem for problem in problems if problem.kind != "foreign"]
    if bad:
        more = f" (and {len(bad) - 1} more; strict=False leaves them out)" if len(bad) > 1 else ""
        raise bad[0].error(more)


def _check_roles(selection: Selection, chosen: Sequence[tuple[EntryTable, Any]]) -> None:
    """Raise if no message has one of the roles; warn of requests that do not say where their messages are."""
    known = {role for table, _ in chosen for role in table.roles}
    if any(len(table) for table, _ in chosen) and not known & (selection.roles or known):
        has = f"there are {', '.join(sorted(known))}" if known else "none was captured with capture_messages"
        raise ValueError(f"roles: no message has the role {' or '.join(sorted(selection.roles or ()))}; {has}")
    others = replace(selection, roles=None)
    num_lacking = 0
    for table, entries in chosen:
        without = others.entries(table)
        num_lacking += (len(table) if without is None else len(without)) - len(entries)
    if num_lacking:
        logger.warning(
            "%d requests were captured without capture_messages, do not say where messages are, and are left out",
            num_lacking,
        )


def _entries_with(table: EntryTable, sites: tuple[str, ...]) -> tuple[Numbers, int]:
    """``[requests, sites]``, the entry for each site, of requests that have all; and how many have only some."""
    has = np.array([[site in group.sites for site in sites] for group in table.groups], dtype=np.bool_)
    if not len(table):
        return np.empty((0, len(sites)), dtype=np.int64), 0
    count = has.sum(axis=1)[table.columns["group"]]
    whole = np.flatnonzero(count == len(sites))
    entries = np.repeat(whole[:, None], len(sites), axis=1)
    partial = np.flatnonzero((count > 0) & (count < len(sites)))
    joined = _joined(table, partial, has)
    num_lacking = len(partial) - sum(len(set(row)) for row in joined)
    if not joined:
        return entries, num_lacking
    entries = np.concatenate([entries, np.array(joined, dtype=np.int64)])
    return entries[np.argsort(entries[:, 0], kind="stable")], num_lacking


def _joined(table: EntryTable, partial: Numbers, has: npt.NDArray[np.bool_]) -> list[list[int]]:
    """Requests that several pipeline stages wrote: for each that has all sites together, the entry for each site."""
    stages: dict[tuple[int, ...], dict[int, int]] = {}
    seen: dict[tuple[int, int], int] = {}
    for entry in partial[table.columns["join"][partial] > 0]:
        join = int(table.columns["join"][entry])
        group = int(table.columns["group"][entry])
        rank = table.groups[group].pp_rank
        # An id that was used twice comes twice from each stage, in the same order.
        count = seen[join, rank] = seen.get((join, rank), 0) + 1
        for site in np.flatnonzero(has[group]):
            stages.setdefault((join, count), {})[int(site)] = int(entry)
    return [[of[site] for site in range(has.shape[1])] for of in stages.values() if len(of) == has.shape[1]]


def _without_duplicates(table: EntryTable, entries: Numbers, root_of_unit: Numbers) -> tuple[Numbers, int]:
    """`entries` without requests that an earlier root has, and their number."""
    roots = root_of_unit[table.columns["unit"][entries[:, 0]]] if len(entries) else np.empty(0)
    if len(np.unique(roots)) < 2:
        return entries, 0
    keys = table.columns["key"][entries[:, 0]]
    order = np.lexsort((roots, keys))
    is_first = np.concatenate(([True], keys[order][1:] != keys[order][:-1]))
    first = order[np.flatnonzero(is_first)[np.cumsum(is_first) - 1]]
    later = roots[order] != roots[first]
    dropped = [
        candidate
        for candidate, earlier in zip(order[later], first[later], strict=True)
        if _same(table, int(entries[candidate, 0]), int(entries[earlier, 0]))
    ]
    kept = np.ones(len(entries), dtype=np.bool_)
    kept[dropped] = False
    return entries[kept], len(dropped)


def _same(table: EntryTable, one: int, other: int) -> bool:
    """Whether two entries are of one request; equal hashes alone do not say so."""
    sample = table.columns["sample"]
    return (
        table.request_id(one) == table.request_id(other)
        and table.tag(one) == table.tag(other)
        and bool(sample[one] == sample[other])
    )


def _stored(document: str) -> StoredReadout | None:
    """Return the readout of a group of an index; None if its rows are those of sites."""
    return msgspec.json.decode(document, type=StoredReadout) if document else None


def _readout_at(document: str, site: str) -> str:
    """Return a stored readout with its key at one site alone: requests may have asked for others beside it."""
    if (stored := _stored(document)) is None:
        return ""
    return msgspec.json.encode(msgspec.structs.replace(stored, keys={"": stored.keys.get(site, "")})).decode()


def _shape_of(table: EntryTable, entries: Numbers, sites: tuple[str, ...]) -> tuple[str, int]:
    groups = np.unique(table.columns["group"][entries])
    shapes: dict[tuple[str, int, Columns, str], str] = {}
    for group in (table.groups[n] for n in groups):
        for site in sites:
            shape, columns = group.shape(site), dict(group.columns).get(site, ())
            kind = (shape.dtype, shape.width, columns, _readout_at(group.readout, site))
            shapes[kind] = f"{site}, {group.model}" if len(sites) > 1 else group.model
    if len(shapes) > 1:
        shown = "; ".join(
            f"{dtype}, width {width}{f', columns {list(map(list, columns))}' if columns else ''}"
            f"{f', outputs of the readout {readout}' if readout else ''} ({model})"
            for (dtype, width, columns, readout), model in shapes.items()
        )
        raise CaptureFileError(f"{', '.join(sites)}: rows of different kinds: {shown}; open them apart")
    return next(iter(shapes), ("float32", 0, (), ""))[:2]
