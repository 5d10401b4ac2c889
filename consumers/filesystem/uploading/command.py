"""``headgate dump upload ROOT``: files that wait on this machine for a root in an object store, without a server."""

from __future__ import annotations

from pathlib import Path
from threading import TIMEOUT_MAX
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from headgate.capture.schema.errors import ConfigError
from headgate.consumers.filesystem.uploading.remote_root import RemoteRoot
from headgate.consumers.filesystem.uploading.uploader import default_spool


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
        Console(stderr=True).print(f"[red]{escape(str(error))}[/red]", soft_wrap=True)
        raise typer.Exit(1) from error
    remote.start("dump", threads=threads, wait_s=0.0, numbering=False, removed=lambda num_bytes, num_files: None)
    found, left = remote.num_found, remote.close(timeout)
    Console().print(f"{found - left} of {found} files and folders uploaded from {remote.spool}", soft_wrap=True)
    if left:
        raise typer.Exit(1)
