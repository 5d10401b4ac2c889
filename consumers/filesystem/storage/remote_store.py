"""Publishing files through fsspec: ``s3://``, ``gs://``, ``memory://`` ...

What a remote root cannot promise:

* A name is looked up before it is taken, so two *processes* that write one name at the same moment can replace each
  other's file. Give each process its own root or tag.
* A folder of the raw layout appears file by file, the ``.json`` files last; the reader refuses one that is partial.
* Nothing is fsynced: a file is as durable as the remote store makes it.
* Files in the making are under ``.tmp`` in the root; those of killed processes stay until somebody removes them. Rows
  of long requests wait in this machine's folder for temporary files, where the next start removes them.
"""

from __future__ import annotations

import itertools
import logging
import os
import secrets
import stat
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fsspec

from headgate.capture.schema.errors import ConfigError, ConsumerError
from headgate.consumers.filesystem.storage.store import TEMP_FOLDER, Published, Target, numbered
from headgate.consumers.filesystem.storage.temp_folder import TempFolder

logger = logging.getLogger(__name__)


class RemoteStore:
    """A root on any file system that fsspec knows. Any thread may call.

    Args:
        url: The root.
        numbering: Whether a taken name is answered with the next number instead of an error.

    Raises:
        ConfigError: If fsspec has no such file system, or the package for it is not installed.
    """

    def __init__(self, url: str, *, numbering: bool) -> None:
        try:
            found: tuple[Any, str] = fsspec.core.url_to_fs(url)
        except (ImportError, ValueError) as error:
            raise ConfigError(f"filesystem: root {url} cannot be opened: {error}") from error
        self._files, self._root = found[0], found[1].rstrip("/")
        self._numbering = numbering
        self._token = f"{os.getpid()}.{secrets.token_hex(4)}"
        self._count = itertools.count()
        self._local = _open_temp_folder()

    def temp_path(self) -> Path:
        """A path in this machine's temporary folder."""
        return self._local.new_path()

    def close(self) -> None:
        """Remove local temporary files. May be called again."""
        self._local.close()

    def check_free(self, target: Target, suffix: str) -> None:
        """Raise `ConsumerError` if the name is taken and numbering is off."""
        if not self._numbering:
            self._free_name(target, suffix)

    def publish_file(self, target: Target, suffix: str, buffers: Iterable[memoryview]) -> Published:
        """Write ``{folder}/{stem}{suffix}``: under a temporary name first, then moved.

        Raises:
            OSError: If the remote store fails.
            ConsumerError: If the name is taken.
        """
        path = self._free_name(target, suffix)
        num_bytes = self._put(path, buffers)
        return Published((self._files.unstrip_protocol(path),), num_bytes, NOTHING)

    def publish_folder(self, target: Target, files: Mapping[str, Iterable[memoryview]]) -> Published:
        """Write ``{folder}/{stem}/`` with `files`, in their order. Raises as `publish_file` does."""
        folder = self._free_name(target, "")
        num_bytes = 0
        try:
            for name, buffers in files.items():
                num_bytes += self._put(f"{folder}/{name}", buffers)
        except OSError:
            self._remove(folder)
            raise
        paths = tuple(self._files.unstrip_protocol(f"{folder}/{name}") for name in files)
        return Published(paths, num_bytes, NOTHING)

    def _free_name(self, target: Target, suffix: str) -> str:
        self._files.invalidate_cache(f"{self._root}/{'/'.join(target.folder)}")
        for count in itertools.count(1):
            path = f"{self._root}/{'/'.join(target.folder)}/{numbered(target.stem, count)}{suffix}"
            if not self._files.exists(path):
                return path
            if not self._numbering:
                break
        raise ConsumerError(
            f"{path} exists and is not overwritten; give another tag or request_id, or set the parameter "
            "if_exists=number"
        )

    def _put(self, path: str, buffers: Iterable[memoryview]) -> int:
        temp = f"{self._root}/{TEMP_FOLDER}/{self._token}.{next(self._count)}"
        num_bytes = 0
        try:
            self._files.makedirs(self._files._parent(temp), exist_ok=True)
            with self._files.open(temp, "wb") as file:
                for buffer in buffers:
                    num_bytes += file.write(buffer)
            self._files.makedirs(self._files._parent(path), exist_ok=True)
            self._files.mv(temp, path)
        except OSError:
            self._remove(temp)
            raise
        return num_bytes

    def _remove(self, path: str) -> None:
        try:
            if self._files.exists(path):
                self._files.rm(path, recursive=True)
        except OSError as error:
            logger.warning("cannot remove %s: %s", path, error)


def _open_temp_folder() -> TempFolder:
    """Open this process's folder for large requests, on this machine; those of killed processes are removed.

    Raises:
        ConfigError: If it cannot be made, or somebody else made a folder of its name.
    """
    folder = Path(tempfile.gettempdir()) / f"headgate-{os.geteuid()}"
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        status = folder.lstat()
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o077:
            raise ConfigError(
                f"filesystem: {folder} is not a folder of this user alone (mode 0700); remove it, or set TMPDIR to a "
                "folder of your own"
            )
        return TempFolder(folder)
    except OSError as error:
        raise ConfigError(f"filesystem: no temporary files can be made in {folder}: {error}") from error


@dataclass(frozen=True, slots=True)
class _Nothing:
    def sync(self) -> None:
        """Nothing is pending."""


NOTHING = _Nothing()
"""Remote files wait for no sync: they are as durable as the remote store makes them."""
