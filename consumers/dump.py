"""``headgate dump ls ROOT``, ``show ROOT REQUEST``, ``export`` and ``upload``: folders of captured rows."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from datetime import datetime, timezone
from pathlib import Path
from threading import TIMEOUT_MAX
from typing import Annotated, Any, NoReturn

import msgspec
import numpy as np
import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from headgate.capture.schema.errors import CaptureFileError, ConfigError
from headgate.capture.schema.sites import HookPoint, Site
from headgate.consumers.datasets.export import export_captures
from headgate.consumers.filesystem.uploading.remote_root import RemoteRoot
from headgate.consumers.filesystem.uploading.uploader import default_spool
from headgate.consumers.reader import CaptureFolder, StoredCapture, open_captures

app = typer.Typer(help="Look into folders of captured rows.", no_args_is_help=True, add_completion=False)
app.command("export")(export_captures)

Root = Annotated[str, typer.Argument(metavar="ROOT", help="The filesystem consumer's root: a folder or an fsspec URL.")]
Tag = Annotated[str | None, typer.Option(help="Only this tag.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]


@app.command("ls")
def list_captures(
    root: Root,
    tag: Tag = None,
    probe: Annotated[str | None, typer.Option(help="Only requests recorded because this probe fired.")] = None,
    as_json: AsJson = False,
) -> None:
    """List the requests in a folder."""
    folder = _open(root)
    captures = [
        capture
        for capture in folder
        if tag in (None, capture.tag) and probe in (None, (capture.metadata["if_probe"] or {}).get("probe"))
    ]
    if as_json:
        _print_json([_entry(capture) for capture in captures])
    else:
        _print_table(captures)
    _warn_of_damage(folder)


@app.command("show")
def show_capture(
    root: Root,
    request: Annotated[str, typer.Argument(metavar="REQUEST", help="The request's id, as `ls` shows it.")],
    tag: Tag = None,
    as_json: AsJson = False,
) -> None:
    """Show one request: its metadata and, for every site, norms, extremes and the number of NaNs."""
    folder = _open(root)
    captures = folder.find(request, tag)
    if not captures:
        _fail(f"{root}: no capture of request {request!r}" + (f" with tag {tag!r}" if tag else ""))
    if as_json:
        _print_json([{**c.metadata, "paths": c.paths, "statistics": statistics(c)} for c in captures])
    else:
        for capture in captures:
            _print_capture(capture)
    _warn_of_damage(folder)


def statistics(capture: StoredCapture) -> list[dict[str, Any]]:
    """For every site: the mean and largest row norm, the smallest and largest value, and how many are not finite.

    Norms and extremes are of the finite rows and values, in float64; None where there are none.
    """
    return [{"site": site.name, **_of_rows(capture.numpy(site))} for site in capture.sites]


def _of_rows(rows: np.ndarray[Any, Any]) -> dict[str, Any]:
    is_finite = np.isfinite(rows)
    norms = np.linalg.norm(rows[is_finite.all(axis=1)].astype(np.float64), axis=1)
    values = rows[is_finite]
    return {
        "rows": len(rows),
        "mean_norm": float(norms.mean()) if norms.size else None,
        "max_norm": float(norms.max()) if norms.size else None,
        "min": float(values.min()) if values.size else None,
        "max": float(values.max()) if values.size else None,
        "num_nan": int(np.isnan(rows).sum()),
        "num_inf": int(np.isinf(rows).sum()),
    }


@app.command("upload")
def upload_waiting(
    root: Annotated[
        str, typer.Argument(metavar="ROOT", help="The root as the server had it, such as s3://bucket/run.")
    ],
    spool: Annotated[
        Path | None, typer.Option(metavar="PATH", help="The server's parameter spool; its default if left out.")
    ] = None,
    threads: Annotated[int, typer.Option(min=1, help="Files or folders uploaded at a time.")] = 8,
    timeout: Annotated[
        float, typer.Option(min=0, max=TIMEOUT_MAX, metavar="SECONDS", help="Time that all of it may take.")
    ] = 3600.0,
) -> None:
    """Upload files that servers which ended could not upload any more. Those of running servers are left to them."""
    try:
        remote = RemoteRoot(root, spool or default_spool())
    except ConfigError as error:
        _fail(str(error))
    remote.start("dump", threads=threads, wait_s=0.0, numbering=False, removed=lambda num_bytes, num_files: None)
    found, left = remote.num_found, remote.close(timeout)
    Console().print(f"{found - left} of {found} files and folders uploaded from {remote.spool}", soft_wrap=True)
    if left:
        raise typer.Exit(1)


def _open(root: str) -> CaptureFolder:
    try:
        return open_captures(root, strict=False)
    except CaptureFileError as error:
        _fail(str(error))


def _fail(message: str) -> NoReturn:
    Console(stderr=True).print(f"[red]{escape(message)}[/red]", soft_wrap=True)
    raise typer.Exit(1)


def _warn_of_damage(folder: CaptureFolder) -> None:
    """Print the files that could not be read, and set the exit status."""
    console = Console(stderr=True)
    for error in folder.damaged:
        console.print(f"[red]damaged:[/red] {escape(str(error))}", soft_wrap=True)
    if folder.damaged:
        raise typer.Exit(1)


def _print_json(document: Any) -> None:
    typer.echo(msgspec.json.format(msgspec.json.encode(document), indent=2))


def _entry(capture: StoredCapture) -> dict[str, Any]:
    return {
        "tag": capture.tag,
        "request_id": capture.request_id,
        "name": capture.name,
        "layout": capture.layout,
        "sites": [site.name for site in capture.sites],
        "num_rows": capture.num_rows,
        "num_bytes": capture.num_bytes,
        "dropped_rows": capture.metadata["dropped_rows"],
        "status": capture.metadata["status"],
        "written_at": capture.metadata["written_at"],
        "if_probe": capture.metadata["if_probe"],
        "paths": capture.paths,
    }


def _print_table(captures: list[StoredCapture]) -> None:
    table = Table(box=None, header_style="bold", pad_edge=False)
    for title in ("tag", "request", "layout", "sites"):
        table.add_column(title, overflow="fold")
    for title in ("rows", "size", "age"):
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("ended", no_wrap=True)
    now = datetime.now(timezone.utc)
    for capture in captures:
        dropped = capture.metadata["dropped_rows"]
        table.add_row(
            escape(capture.tag),
            escape(capture.name),
            capture.layout,
            describe_sites(capture.sites),
            f"{capture.num_rows:,}" + (f" [red]-{dropped:,}[/red]" if dropped else ""),
            describe_bytes(capture.num_bytes),
            _age(capture, now),
            escape(capture.metadata["status"]),
        )
    console = Console()
    if captures:
        console.print(table)
    num_rows, num_bytes = sum(c.num_rows for c in captures), sum(c.num_bytes for c in captures)
    total = f"{_count(len(captures), 'request')}, {_count(num_rows, 'row')}, {describe_bytes(num_bytes)}"
    console.print(f"[dim]{total}[/dim]")


def _print_capture(capture: StoredCapture) -> None:
    console, metadata = Console(), capture.metadata
    phases = {phase: stop - start for phase, (start, stop) in metadata["phases"].items()}
    console.print(f"[bold]{escape(capture.tag)}/{escape(capture.name)}[/bold]  [dim]{capture.layout}[/dim]")
    facts = {
        "model": f"{metadata['model']}, {metadata['dtype']}, hidden size {metadata['hidden_size']}",
        "request": f"{metadata['client_request_id']} (in the engine: {metadata['engine_request_id']})",
        "tokens": f"{metadata['num_prompt_tokens']:,} of the prompt, {metadata['num_tokens']:,} in all; "
        f"ended: {metadata['status']}",
        "rows": f"{capture.num_rows:,}: {phases['prefill']:,} of the prompt, {phases['decode']:,} generated, "
        f"{metadata['dropped_rows']:,} dropped",
        **({"fired": _fired(metadata["if_probe"])} if metadata["if_probe"] else {}),
        "positions": f"{metadata['selector']}: {_ends(capture.positions)}",
        "written": f"{metadata['written_at']} by {', '.join(' '.join(v) for v in metadata['versions'].items())}",
        "files": "\n".join(capture.paths),
    }
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="dim")
    table.add_column(overflow="fold")
    for name, text in facts.items():
        table.add_row(name, escape(text))
    console.print(table)
    console.print(_statistics_table(capture))


def _fired(decision: Mapping[str, Any]) -> str:
    """``anger above 0.5 on 3 of 40 rows of 12.post_mlp: 17, 18, 21; highest 0.9 at 18``."""
    listed = ", ".join(map(str, decision["positions"]))
    more = ", ..." if decision["num_fired"] > len(decision["positions"]) else ""
    return (
        f"{decision['probe']} above {decision['above']:.4g} on {decision['num_fired']:,} of "
        f"{_count(decision['num_scored'], 'row')} of {decision['site']}: {listed}{more}; highest "
        f"{decision['highest']:.4g} at {decision['at']}"
    )


def _statistics_table(capture: StoredCapture) -> Table:
    """Return a line for each site, such as ``3.hook_z[0:4][8:12]`` where only these columns were kept.

    A site whose rows a readout read has its consumer's name: ``12.post_mlp (features)``.
    """
    table = Table(box=None, header_style="bold", pad_edge=False)
    columns = capture.metadata.get("columns") or {}
    table.add_column("site")
    for title in ("rows", "mean norm", "max norm", "min", "max", "NaN", "inf"):
        table.add_column(title, justify="right")
    for line in statistics(capture):
        bad = [f"[red]{line[key]:,}[/red]" if line[key] else "0" for key in ("num_nan", "num_inf")]
        numbers = ["-" if line[key] is None else f"{line[key]:.4g}" for key in ("mean_norm", "max_norm", "min", "max")]
        kept = "".join(f"[{start}:{stop}]" for start, stop in columns.get(line["site"], ()))
        read = f" ({readout['consumer']})" if (readout := capture.metadata.get("readout")) else ""
        table.add_row(escape(line["site"] + kept + read), f"{line['rows']:,}", *numbers, *bad)
    return table


def describe_sites(sites: Iterable[Site]) -> str:
    """``post_mlp 0-3,7; final_norm``: hook points, each with its layers."""
    layers: dict[HookPoint, list[int]] = {}
    for site in sites:
        layers.setdefault(site.hook, []).append(site.layer)
    return "; ".join(
        hook.value if hook is HookPoint.FINAL_NORM else f"{hook.value} {_ranges(sorted(of_hook))}"
        for hook, of_hook in layers.items()
    )


def describe_bytes(num_bytes: float) -> str:
    """``512 B``, ``1.4 MiB``."""
    if num_bytes < 1024:
        return f"{num_bytes:.0f} B"
    units = ("KiB", "MiB", "GiB", "TiB")
    power = min(int(math.log(num_bytes, 1024)), len(units))
    return f"{num_bytes / 1024**power:.1f} {units[power - 1]}"


def _ranges(numbers: list[int]) -> str:
    """``0-3,7`` for 0, 1, 2, 3, 7."""
    spans: list[list[int]] = []
    for number in numbers:
        if spans and number == spans[-1][1] + 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in spans)


def _age(capture: StoredCapture, now: datetime) -> str:
    seconds = (now - datetime.fromisoformat(capture.metadata["written_at"])).total_seconds()
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.0f} {unit}"
    return f"{max(seconds, 0):.0f} s"


def _ends(positions: np.ndarray[Any, Any]) -> str:
    return "none" if not len(positions) else f"{positions[0]} to {positions[-1]}"


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}" + ("" if number == 1 else "s")
