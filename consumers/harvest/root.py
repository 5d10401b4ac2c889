"""The root of a harvest: the settings that it was begun with, and the prompts whose rows are durable in it.

The index of the shards alone says which prompts are done: a line of it is on the disk after the rows that it speaks of.
Beside the shards lie ``_harvest.json``, the settings, and at the end ``_headgate_manifest.json``.
"""

from __future__ import annotations

import fcntl
import os
import re
import secrets
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec

from headgate.capture.schema.errors import CaptureFileError, ConfigError
from headgate.consumers.datasets.export.destination import MANIFEST
from headgate.consumers.datasets.manifest import store_manifest
from headgate.consumers.filesystem.formats.layout import SHARD_FOLDER, Sidecar
from headgate.consumers.filesystem.formats.shard_layout import forget_requests, read_shard
from headgate.consumers.filesystem.storage.local_store import sync_folder, write_file
from headgate.consumers.filesystem.storage.source import LocalSource

TAG = "harvest"
"""The tag of all requests of a harvest."""
SETTINGS = "_harvest.json"
LOCK = "_harvest.lock"
_NAME = re.compile(r"prompt-(0|[1-9][0-9]*)")
_CUT_OFF = ("abort", "error")
"""Statuses of requests that ended before they had all their rows."""
_TOLD_ALONE = {"format", "format_version", "prompts"}
"""Settings that may differ when a harvest goes on: a file of prompts may have moved."""


class HarvestRoot:
    """A folder that one harvest at a time writes to. Used by one thread; a context manager.

    Attributes:
        path: The folder.

    Args:
        path: Made if it is not there.

    Raises:
        ConfigError: If it is no local folder, or another harvest runs in it.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        if "://" in os.fspath(path):
            raise ConfigError(f"{path}: a harvest needs a local folder: shards grow, which object stores do not offer")
        self.path = Path(path)
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = os.open(self.path / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise ConfigError(f"{path}: cannot be written to: {error}") from error
        try:
            # Of the process, not of the open file: an engine core that outlives a killed harvest does not hold it.
            fcntl.lockf(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(self._lock)
            raise ConfigError(f"{path}: another harvest runs in it ({error}); wait for its end") from error

    def __enter__(self) -> HarvestRoot:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._lock)

    def check(self, settings: Mapping[str, Any]) -> None:
        """Refuse a root that was begun with other settings; those that only one side knows are not compared.

        Raises:
            ConfigError: Naming each setting that differs, or if there are rows without settings.
        """
        known = self._settings()
        if known is None:
            if any(self._shards()):
                raise ConfigError(f"{self.path}: has rows with the tag {TAG!r} and no {SETTINGS}; name another root")
            return
        shared = [key for key in known if key in settings and key not in _TOLD_ALONE]
        wrong = [f"{key} {known[key]!r} (now {settings[key]!r})" for key in shared if known[key] != settings[key]]
        if wrong:
            raise ConfigError(
                f"{self.path}: its harvest was begun with other settings: {'; '.join(wrong)}. Go on with those, or "
                "name another root"
            )

    def begin(self, settings: Mapping[str, Any]) -> None:
        """Check all settings and, in a new root, put them on the disk: before any row. Raises as `check` does."""
        self.check(settings)
        if self._settings() is not None:
            return
        document = {"format": "headgate-harvest", "format_version": 1, **settings}
        text = msgspec.json.format(msgspec.json.encode(document), indent=2) + b"\n"
        temp = self.path / f".{SETTINGS}.{secrets.token_hex(6)}"
        try:
            write_file(temp, [memoryview(text)], fsync=True)
            temp.replace(self.path / SETTINGS)
            sync_folder(self.path)
        finally:
            temp.unlink(missing_ok=True)

    def finished(self) -> dict[int, int]:
        """Rows at each site, by prompt, of the prompts that are durable.

        Requests that were cut off, as when an engine died, are taken out of the index: their prompts run again.

        Raises:
            CaptureFileError: If a shard is damaged, has a prompt twice, or one that lacks rows.
        """
        found: dict[int, int] = {}
        for shard in self._shards():
            sidecars = [part.sidecar for part in read_shard(LocalSource(), str(shard))]
            if any(map(_was_cut_off, sidecars)):
                forget_requests(shard, lambda sidecar: not _was_cut_off(sidecar))
            for sidecar in sidecars:
                if _was_cut_off(sidecar):
                    continue
                index = _index_of(sidecar, shard)
                if index in found:
                    raise CaptureFileError(f"{shard}: {sidecar.request_id} is in {self.path} twice")
                if sidecar.dropped_rows:
                    raise CaptureFileError(f"{shard}: {sidecar.request_id} lacks {sidecar.dropped_rows} rows")
                found[index] = sidecar.num_rows
        return found

    def take_manifest_away(self) -> None:
        """Remove the manifest of a harvest that goes on: a root without one is not whole."""
        (self.path / MANIFEST).unlink(missing_ok=True)

    def finish(self, manifest: Mapping[str, Any]) -> None:
        """Write the manifest, the last file of a harvest."""
        store_manifest(self.path / MANIFEST, manifest)

    def _shards(self) -> list[Path]:
        folder = self.path / TAG / SHARD_FOLDER
        return sorted(path for path in folder.iterdir() if path.is_dir()) if folder.is_dir() else []

    def _settings(self) -> dict[str, Any] | None:
        path = self.path / SETTINGS
        try:
            return msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
        except FileNotFoundError:
            return None
        except msgspec.MsgspecError as error:
            raise ConfigError(f"{path}: damaged: {error}; name another root") from error


def _was_cut_off(sidecar: Sidecar) -> bool:
    return sidecar.status in _CUT_OFF


def _index_of(sidecar: Sidecar, shard: Path) -> int:
    match = _NAME.fullmatch(sidecar.request_id)
    if match is None:
        raise CaptureFileError(f"{shard}: has the request {sidecar.request_id!r}, which no harvest made")
    return int(match[1])
