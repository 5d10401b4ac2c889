"""``headgate dump export ROOT --to PATH --format npy|parquet|webdataset|saelens``."""

from __future__ import annotations

import io
import os
import shutil
import tarfile
from collections.abc import Callable, Iterator
from enum import Enum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import msgspec
import numpy as np
import numpy.typing as npt
import typer
from rich.console import Console
from rich.markup import escape

from headgate.capture.schema.errors import CaptureFileError
from headgate.capture.schema.sites import Site
from headgate.consumers.datasets.dataset import Dataset, open_dataset, store_manifest
from headgate.consumers.datasets.view import DatasetView, RowBatch, check_positive, plain_batches, typed
from headgate.consumers.filesystem.storage.store import site_file

if TYPE_CHECKING:
    import pyarrow as pa


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


_BATCH_ROWS = 4096


def export_npy(view: DatasetView, folder: Path) -> dict[str, Any]:
    """Write ``{site}.npy`` ``[rows, hidden]``, ``positions.npy``, ``token_ids.npy`` and ``requests.jsonl``.

    Rows are float16 if the model is, else float32; row i of every array is one token. A line of ``requests.jsonl`` has
    a request's ``request_id``, ``tag`` and ``rows``, their first and end.

    Raises:
        ValueError: If there are no rows.
    """
    if not len(view):
        raise ValueError("no rows are selected: there is nothing to export")
    kind = np.float16 if view.dtype == "float16" else np.float32
    arrays = {
        site: _new_array(folder / f"{site_file(Site.parse(site))}.npy", kind, len(view), view.hidden_size)
        for site in view.sites
    }
    columns = {name: _new_array(folder / f"{name}.npy", np.int64, len(view)) for name in ("positions", "token_ids")}
    for batch in plain_batches(view, _BATCH_ROWS):
        where = slice(int(batch.numbers[0]), int(batch.numbers[-1]) + 1)
        for site, array in arrays.items():
            array[where] = batch.numpy(site)
        columns["positions"][where] = batch.positions
        columns["token_ids"][where] = batch.token_ids
    for array in (*arrays.values(), *columns.values()):
        array.flush()
    with (folder / "requests.jsonl").open("wb") as file:
        for request, first, end in view.request_ranges():
            line = {"request_id": view.request_id(request), "tag": view.tag(request), "rows": [first, end]}
            file.write(msgspec.json.encode(line) + b"\n")
    return {"format": "npy", "rows": len(view), "left_out_rows": 0}


def _new_array(path: Path, kind: Any, *shape: int) -> np.memmap[Any, Any]:
    """A file of zeros, mapped for writing."""
    made: np.memmap[Any, Any] = np.lib.format.open_memmap(path, "w+", kind, shape)  # type: ignore[no-untyped-call]
    return made


FILE_ROWS = 262_144


def arrow_batches(view: DatasetView) -> Iterator[pa.RecordBatch]:
    """All rows in order as record batches. Needs the package ``pyarrow``.

    Columns: ``request_id`` and ``tag`` (text), ``position`` and ``token_id`` (int64), and one for each site by its
    name, a list of `hidden_size` values: float16 if the model is, else float32.
    """
    import pyarrow as pa

    schema = _schema(view)
    for batch in plain_batches(view, _BATCH_ROWS):
        columns = [
            pa.array(batch.request_ids, pa.string()),
            pa.array(batch.tags, pa.string()),
            pa.array(batch.positions),
            pa.array(batch.token_ids),
            *(_rows(batch, site) for site in view.sites),
        ]
        yield pa.RecordBatch.from_arrays(columns, schema=schema)


def export_parquet(view: DatasetView, folder: Path, *, file_rows: int = FILE_ROWS) -> dict[str, Any]:
    """Write ``part-00000.parquet`` and so on, with the columns of `arrow_batches`.

    Args:
        view: The rows.
        folder: Where.
        file_rows: Rows in a file; all but the last have so many, rounded up to a batch.
    """
    import pyarrow.parquet as pq

    check_positive(file_rows, "file_rows")
    number = written = 0
    writer: Any = None
    try:
        for batch in arrow_batches(view):
            if writer is None:
                writer = pq.ParquetWriter(folder / f"part-{number:05d}.parquet", batch.schema, compression="zstd")
            writer.write_batch(batch)
            written += batch.num_rows
            if written >= file_rows:
                writer.close()
                writer, number, written = None, number + 1, 0
    finally:
        if writer is not None:
            writer.close()
    return {"format": "parquet", "rows": len(view), "left_out_rows": 0}


def _schema(view: DatasetView) -> pa.Schema:
    import pyarrow as pa

    kind = pa.float16() if view.dtype == "float16" else pa.float32()
    facts = [("request_id", pa.string()), ("tag", pa.string()), ("position", pa.int64()), ("token_id", pa.int64())]
    return pa.schema([*facts, *((site, pa.list_(kind, view.hidden_size)) for site in view.sites)])


def _rows(batch: RowBatch, site: str) -> pa.Array:
    import pyarrow as pa

    values = np.ascontiguousarray(batch.numpy(site)).reshape(-1)
    return pa.FixedSizeListArray.from_arrays(pa.array(values), batch.view.hidden_size)


_HOOKS = {
    "pre_attn": "hook_resid_pre",
    "post_attn": "hook_resid_mid",
    "post_mlp": "hook_resid_post",
    "attn_out": "hook_attn_out",
    "mlp_out": "hook_mlp_out",
}


def hook_name(site: str) -> str:
    """TransformerLens' name of a site: ``blocks.12.hook_resid_post`` for ``12.post_mlp``.

    Raises:
        ValueError: If it has none with the same values.
    """
    parsed = Site.parse(site)
    if parsed.hook.value not in _HOOKS:
        raise ValueError(f"{site}: TransformerLens has no hook with these values; known: {', '.join(_HOOKS)}")
    return f"blocks.{parsed.layer}.{_HOOKS[parsed.hook.value]}"


def export_saelens(view: DatasetView, folder: Path, *, context_size: int) -> dict[str, Any]:
    """Write a data set of ``datasets``: float32 ``{hook_name}`` ``[context_size, hidden]``, and ``token_ids``.

    The rows of all requests, one after the other, are cut into contexts, as SAELens does with texts; rows at the end
    that do not fill one are left out and counted in the manifest. Needs the package ``datasets``.

    Args:
        view: The rows.
        folder: Where; an empty folder.
        context_size: Rows in a context; SAELens wants the same number in its configuration.

    Raises:
        ValueError: If the rows do not fill one context.
    """
    from datasets import Array2D, Dataset, Features, Sequence, Value

    num_contexts = len(view) // context_size
    if not num_contexts:
        raise ValueError(f"{len(view)} rows do not fill a context of {context_size}; give a smaller context_size")
    names = {site: hook_name(site) for site in view.sites}
    features: dict[str, Any] = {
        name: Array2D(shape=(context_size, view.hidden_size), dtype="float32") for name in names.values()
    }
    features["token_ids"] = Sequence(Value("int32"), length=context_size)
    cache = folder / ".cache"
    made = Dataset.from_generator(
        _contexts,
        features=Features(features),
        gen_kwargs={"view": view, "names": names, "context_size": context_size, "num_contexts": num_contexts},
        cache_dir=str(cache),
        writer_batch_size=max(1, (64 << 20) // (context_size * view.hidden_size * 4 * len(names))),
    )
    made.save_to_disk(str(folder))
    made.cleanup_cache_files()
    shutil.rmtree(cache)
    return {
        "format": "saelens",
        "rows": num_contexts * context_size,
        "left_out_rows": len(view) - num_contexts * context_size,
        "context_size": context_size,
    }


def _contexts(
    view: DatasetView, names: dict[str, str], context_size: int, num_contexts: int
) -> Iterator[dict[str, Any]]:
    for number in range(num_contexts):
        start, stop = number * context_size, (number + 1) * context_size
        rows = view.read(start, stop)
        example: dict[str, Any] = {
            name: typed(rows[site], view.dtype).astype(np.float32, copy=False) for site, name in names.items()
        }
        yield example | {"token_ids": view.token_ids(np.arange(start, stop, dtype=np.int64)).astype(np.int32)}


TAR_BYTES = 1 << 30


def export_webdataset(view: DatasetView, folder: Path, *, tar_bytes: int = TAR_BYTES) -> dict[str, Any]:
    """Write ``000000.tar`` and so on.

    The sample of a request is ``{key}.json`` (``request_id``, ``tag``), ``{key}.positions.npy``,
    ``{key}.token_ids.npy`` (int64 ``[rows]``) and for each site ``{key}.12_post_mlp.npy`` ``[rows, hidden]``, float16
    if the model is, else float32.

    Args:
        view: The rows. One request's are in memory at a time.
        folder: Where.
        tar_bytes: Size at which a tar file is full.
    """
    number = 0
    tar: tarfile.TarFile | None = None
    try:
        for index, (request, first, end) in enumerate(view.request_ranges()):
            if tar is None:
                tar = tarfile.open(folder / f"{number:06d}.tar", "w")  # noqa: SIM115  (open over several samples)
            for name, data in _sample(view, request, first, end):
                member = tarfile.TarInfo(f"{index:09d}.{name}")
                member.size = len(data)
                tar.addfile(member, io.BytesIO(data))
            if tar.offset >= tar_bytes:
                tar.close()
                tar, number = None, number + 1
    finally:
        if tar is not None:
            tar.close()
    return {"format": "webdataset", "rows": len(view), "left_out_rows": 0}


def _sample(view: DatasetView, request: int, first: int, end: int) -> Iterator[tuple[str, bytes]]:
    numbers = np.arange(first, end, dtype=np.int64)
    yield "json", msgspec.json.encode({"request_id": view.request_id(request), "tag": view.tag(request)})
    yield "positions.npy", _npy(view.positions(numbers))
    yield "token_ids.npy", _npy(view.token_ids(numbers))
    for site, rows in view.read(first, end).items():
        yield f"{site_file(Site.parse(site))}.npy", _npy(typed(rows, view.dtype))


def _npy(array: npt.NDArray[Any]) -> bytes:
    file = io.BytesIO()
    np.save(file, array, allow_pickle=False)
    return file.getvalue()


class Format(str, Enum):
    """Forms of an export."""

    NPY = "npy"
    PARQUET = "parquet"
    WEBDATASET = "webdataset"
    SAELENS = "saelens"


Export = Callable[[DatasetView, Path], dict[str, Any]]


def export_captures(
    roots: Annotated[list[str], typer.Argument(metavar="ROOT...", help="Roots of the filesystem consumer.")],
    to: Annotated[str, typer.Option("--to", help="A new folder.", metavar="PATH")],
    form: Annotated[Format, typer.Option("--format", help="Of the files.")],
    sites: Annotated[list[str] | None, typer.Option("--site", help="Only this site; may be repeated.")] = None,
    phase: Annotated[str | None, typer.Option(help="Only prefill or only decode.")] = None,
    tags: Annotated[list[str] | None, typer.Option("--tag", help="Only this tag; may be repeated.")] = None,
    roles: Annotated[list[str] | None, typer.Option("--role", help="Only messages of this role; repeatable.")] = None,
    drop_bos: Annotated[bool, typer.Option("--drop-bos", help="Leave out position 0.")] = False,
    context_size: Annotated[int, typer.Option(min=1, help="Rows of a context; saelens alone.")] = 128,
    skip_damaged: Annotated[bool, typer.Option("--skip-damaged", help="Leave out what cannot be read.")] = False,
) -> None:
    """Write captured rows as files of other tools. Rows have a value at every selected site."""
    exports: dict[Format, Export] = {
        Format.NPY: export_npy,
        Format.PARQUET: export_parquet,
        Format.WEBDATASET: export_webdataset,
        Format.SAELENS: partial(export_saelens, context_size=context_size),
    }
    try:
        data = open_dataset(
            roots,
            sites=sites,
            phases=phase,
            tags=tags,
            roles=roles or None,
            drop_bos=drop_bos,
            strict=not skip_damaged,
            index=False,
        )
        written = export(data, to, exports[form])
    except (CaptureFileError, ValueError, OSError) as error:
        _fail(str(error))
    except ImportError as error:
        _fail(f"{error}: pip install 'headgate[datasets]'")
    for problem in data.problems:
        if problem.kind != "foreign":
            Console(stderr=True).print(f"[red]{problem.kind}:[/red] {escape(problem.message)}", soft_wrap=True)
    facts = written["export"]
    left_out = f", {facts['left_out_rows']:,} left out" if facts["left_out_rows"] else ""
    Console().print(f"{facts['rows']:,} rows of {', '.join(data.sites)} in {escape(to)}{left_out}", soft_wrap=True)


def export(data: Dataset, to: str, write: Export) -> dict[str, Any]:
    """Write all rows of a data set, and its manifest as the last file; return that.

    Raises:
        ValueError: If nothing is selected, or something is in the folder.
    """
    if not data.sites:
        raise ValueError("no rows are selected: there is nothing to export")
    view = data.rows()
    folder = new_folder(to)
    return finish(folder, data.manifest(), **write(view, folder))


def _fail(message: str) -> NoReturn:
    Console(stderr=True).print(f"[red]{escape(message)}[/red]", soft_wrap=True)
    raise typer.Exit(1)
