"""``headgate keys``: makes clients' keys and checks the file that holds their digests; makes the keys of hosts."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from headgate.capture.engine.access.access_key import digest_of, make_key
from headgate.capture.engine.access.key_ring import add_entry, known_roles, read_keys
from headgate.capture.links.network import NetworkKeys, write_keys
from headgate.capture.schema.errors import ConfigError

keys = typer.Typer(add_completion=False, no_args_is_help=True, help="Make keys of clients and of hosts.")

_File = Annotated[Path, typer.Argument(help="JSON file of keys, for headgate serve --headgate-keys FILE.")]


@keys.command()
def add(
    file: _File,
    name: Annotated[str, typer.Argument(help="Who gets the key; quotas and the audit go by it.")],
    role: Annotated[list[str], typer.Option(help="capture, steer or admin; may be repeated.")],
    tag: Annotated[list[str] | None, typer.Option(help="Tag of captures that it may set, such as 'alice-*'.")] = None,
    consumer: Annotated[list[str] | None, typer.Option(help="Consumer that it may name.")] = None,
) -> None:
    """Make a key, print it once, and add its digest to the file. Limits are written into the file by hand."""
    key = make_key()
    entry: dict[str, object] = {"name": name, "sha256": digest_of(key), "roles": role}
    entry.update({field: values for field, values in (("tags", tag), ("consumers", consumer)) if values})
    try:
        add_entry(file, entry, known_roles)
    except (ConfigError, OSError) as error:
        _fail(error)
    typer.echo(f"Added {name} to {file}. This is its key, shown now and never again:", err=True)
    typer.echo(key)


@keys.command()
def new(
    file: Annotated[Path | None, typer.Argument(help="The file to make; nothing else is printed then.")] = None,
) -> None:
    """Make the keys with which the hosts of one engine know each other: in a file, or printed.

    Every host gets the same: the file, named with --headgate-network-keys, or what is printed, in the environment
    variable HEADGATE_NETWORK_KEYS. Their holder can read what is captured, and send results in a worker's place.
    """
    made = NetworkKeys.make()
    if file is None:
        typer.echo(made.text)
        return
    try:
        write_keys(file, made)
    except ConfigError as error:
        _fail(error)


@keys.command("hash")
def hash_key() -> None:
    """Read a key from standard input and print the digest that stands for it in the file."""
    text = typer.prompt("Key", hide_input=True, err=True) if sys.stdin.isatty() else sys.stdin.read()
    if not text.strip():
        _fail(ConfigError("the key is empty"))
    typer.echo(digest_of(text.strip()))


@keys.command()
def check(file: _File) -> None:
    """Read the file as the server does, and list its keys."""
    try:
        found = read_keys(file, known_roles)
    except ConfigError as error:
        _fail(error)
    for key in found:
        about = ", ".join(key.roles) + (" (expired)" if key.is_expired() else "")
        typer.echo(f"{key.name}: {about}")


def _fail(error: Exception) -> NoReturn:
    typer.secho(str(error), err=True, fg="red")
    raise typer.Exit(1)
