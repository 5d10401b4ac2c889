"""The operator's file of keys: read and checked when the server starts, and again whenever it changes.

::

    {"keys": [{"name": "alice", "sha256": "9f86d081...", "roles": ["capture"], "tags": ["alice-*"],
               "default_tag": "alice-runs", "limits": {"max_bytes_per_day": 10737418240}}]}
"""

from __future__ import annotations

import os
import stat
import tempfile
from codecs import BOM_UTF8
from collections.abc import Callable, Collection, Mapping
from pathlib import Path

import msgspec

from headgate.capture.engine.access.access_key import AccessKey
from headgate.capture.files.reading import refusing
from headgate.capture.schema.errors import ConfigError
from headgate.capture.schema.secret_files import read_secret

Version = tuple[int, int, int]
"""A file's modification time in nanoseconds, inode and size: if none has changed, neither has the content."""


class _Document(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    keys: tuple[AccessKey, ...]


def version_of(path: Path) -> Version:
    """The version of the file that is there now.

    Raises:
        OSError: If there is none.
    """
    found = path.stat()
    return found.st_mtime_ns, found.st_ino, found.st_size


def read_keys(path: Path, roles: Callable[[], Collection[str]]) -> tuple[AccessKey, ...]:
    """Read a file of keys.

    Args:
        path: The file.
        roles: Gives the roles that there are.

    Raises:
        ConfigError: If it cannot be read, others than its owner could change it or everybody could read it, or if
            anything in it is wrong.
    """
    content = read_secret(path, "keys file")
    return parse_keys(path, content, roles)


def parse_keys(path: Path, content: bytes, roles: Callable[[], Collection[str]]) -> tuple[AccessKey, ...]:
    """Read the content of the file of keys at `path`; see `read_keys`."""
    with refusing(f"keys file {path}", ConfigError):
        keys = msgspec.json.decode(content.removeprefix(BOM_UTF8), type=_Document).keys
    _check_keys(path, keys, roles())
    return keys


def _check_keys(path: Path, keys: Collection[AccessKey], roles: Collection[str]) -> None:
    names = [key.name for key in keys]
    digests = [digest for key in keys for digest in key.digests]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ConfigError(f"keys file {path}: several keys have the name {twice[0]!r}; sha256 takes a list of digests")
    if len(set(digests)) < len(digests):
        twice = sorted(key.name for key in keys if any(digests.count(digest) > 1 for digest in key.digests))
        raise ConfigError(f"keys file {path}: the keys {', '.join(twice)} have the same sha256")
    for key in keys:
        for role in key.roles:
            if role not in roles:
                raise ConfigError(
                    f"keys file {path}: key {key.name!r} has an unknown role {role!r}; known: "
                    f"{', '.join(sorted(roles))}"
                )
        if not key.roles:
            raise ConfigError(f"keys file {path}: key {key.name!r} has no role; known: {', '.join(sorted(roles))}")


def add_entry(path: Path, entry: Mapping[str, object], roles: Callable[[], Collection[str]]) -> None:
    """Add one key to the file, which is made if there is none, and replaced as a whole.

    Raises:
        ConfigError: If the file or the entry is wrong; then the file stays as it is.
    """
    entries: list[object] = []
    before = path.stat() if path.exists() else None
    if before is not None:
        read_keys(path, roles)
        entries = msgspec.json.decode(path.read_bytes().removeprefix(BOM_UTF8))["keys"]
    content = msgspec.json.format(msgspec.json.encode({"keys": [*entries, entry]}), indent=2) + b"\n"
    parse_keys(path, content, roles)
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")  # mode 0600
    try:
        with os.fdopen(descriptor, "wb") as file:
            if before is not None:
                os.fchown(descriptor, before.st_uid, before.st_gid)
                os.fchmod(descriptor, stat.S_IMODE(before.st_mode))
            file.write(content)
            file.flush()
            os.fsync(descriptor)
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise
