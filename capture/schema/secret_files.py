"""Files that hold secrets: keys and tokens. One check for all of them, of the very file that is read."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from headgate.capture.schema.errors import ConfigError

MAX_BYTES = 4 << 20
"""Largest size of such a file: some ten thousand keys."""


def read_secret(path: Path, what: str, *, is_reader: bool = False) -> bytes:
    """Read a file of secrets.

    The group may read it, as volumes of secrets in Kubernetes have it; other users may do nothing.

    Args:
        path: The file; links are followed.
        what: Name of the setting, for messages.
        is_reader: The secret is shown to a server, and does not open this one: the file may belong to another user.

    Raises:
        ConfigError: If it cannot be read, is too long, belongs to another user than this one or root, others may read
            or change it, or its group may change it.
    """
    try:
        with path.open("rb") as file:
            _check(path, what, os.fstat(file.fileno()), is_reader=is_reader)
            content = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"{what} {path}: {error.strerror or error}") from error
    if len(content) > MAX_BYTES:
        raise ConfigError(f"{what} {path}: has more than {MAX_BYTES} bytes")
    return content


def _check(path: Path, what: str, found: os.stat_result, *, is_reader: bool) -> None:
    if not stat.S_ISREG(found.st_mode):
        raise ConfigError(f"{what} {path}: is no regular file")
    if found.st_uid not in (0, os.geteuid()) and not is_reader:
        raise ConfigError(
            f"{what} {path}: belongs to the user {found.st_uid}, who could let anybody in; run chown {os.geteuid()} "
            f"{path}"
        )
    if found.st_mode & (stat.S_IRWXO | stat.S_IWGRP):
        raise ConfigError(
            f"{what} {path}: its mode {stat.S_IMODE(found.st_mode):04o} lets other users read or change it; run "
            f"chmod 600 {path} (in Kubernetes: defaultMode: 0400)"
        )
