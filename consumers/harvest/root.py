"""The root of a harvest: the settings that it was begun with, and the prompts whose rows are durable in it.

The index of the shards alone says which prompts are done: a line of it is on the disk after the rows that it speaks of.
Beside the shards lie ``_harvest.json``, the settings, and at the end ``_headgate_manifest.json``.
"""

from __future__ import annotations

import fcntl
import os
import re
import secrets
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

import msgspec

from headgate.capture.schema.errors import CaptureFileError, ConfigError, ConsumerError
from headgate.consumers.datasets.export import MANIFEST
from headgate.consumers.filesystem.consumer import CUT_OFF
from headgate.consumers.filesystem.formats.layout import SHARD_FOLDER, Sidecar
from headgate.consumers.filesystem.formats.shard_layout import forget_requests, read_shard
from headgate.consumers.filesystem.storage.local_store import open_lock, sync_folder, write_file
from headgate.consumers.filesystem.storage.object_store import ObjectStore, open_files
from headgate.consumers.filesystem.storage.source import LocalSource, RemoteSource
from headgate.consumers.filesystem.storage.store import slug
from headgate.consumers.filesystem.uploading.remote_root import RemoteRoot
from headgate.consumers.filesystem.uploading.uploader import default_spool, is_waiting

TAG = "harvest"
"""The tag of all requests of a harvest."""
LOCK = "_harvest.lock"
UPLOAD_TIMEOUT_S = 3600.0
"""Seconds in which the files that wait on this machine must be in the store."""
_THREADS = 8
_PAUSE_S = 0.2


class HarvestFiles(Protocol):
    """The files of one root. One harvest at a time has it.

    Attributes:
        path: As `open_dataset` takes it.
        params: Parameters of the consumer `filesystem` that writes there.
    """

    path: str | Path
    params: Mapping[str, Any]

    def read(self, name: str) -> bytes | None:
        """A file of the root; None if it is not there."""
        ...

    def write(self, name: str, content: bytes) -> None:
        """Put a file into the root; it appears whole.

        Raises:
            ConfigError: In an object store, if there is one of that name.
        """
        ...

    def remove(self, name: str) -> None:
        """Remove a file; one that is not there is no error."""
        ...

    def settle(self) -> None:
        """Bring what earlier processes left on the way to the root.

        Raises:
            ConsumerError: If it cannot be brought there.
        """
        ...

    def shards(self) -> Iterator[tuple[str, list[Sidecar]]]:
        """Each shard and its requests."""
        ...

    def forget(self, shard: str, is_kept: Callable[[Sidecar], bool]) -> None:
        """Take requests out of a shard.

        Raises:
            CaptureFileError: If files cannot change there.
        """
        ...

    def close(self) -> None:
        """Let another harvest have it."""
        ...


class LocalPlace:
    """A folder; see `HarvestFiles`. It is made if it is not there."""

    def __init__(self, path: Path) -> None:
        self.path: str | Path = path
        self.params: Mapping[str, Any] = {"root": str(path)}
        self._folder = path
        self._lock = _locked(path, path / LOCK, 0o777)

    def read(self, name: str) -> bytes | None:
        try:
            return (self._folder / name).read_bytes()
        except FileNotFoundError:
            return None

    def write(self, name: str, content: bytes) -> None:
        temp = self._folder / f".{name}.{secrets.token_hex(6)}"
        try:
            write_file(temp, [memoryview(content)], fsync=True)
            temp.replace(self._folder / name)
            sync_folder(self._folder)
        finally:
            temp.unlink(missing_ok=True)

    def remove(self, name: str) -> None:
        (self._folder / name).unlink(missing_ok=True)

    def settle(self) -> None:
        """Nothing is on the way."""

    def shards(self) -> Iterator[tuple[str, list[Sidecar]]]:
        folder = self._folder / TAG / SHARD_FOLDER
        for path in sorted(folder.iterdir()) if folder.is_dir() else ():
            if path.is_dir():
                yield str(path), [part.sidecar for part in read_shard(LocalSource(), str(path))]

    def forget(self, shard: str, is_kept: Callable[[Sidecar], bool]) -> None:
        forget_requests(Path(shard), is_kept)

    def close(self) -> None:
        os.close(self._lock)


class RemotePlace:
    """A root in an object store; see `HarvestFiles`. Only harvests of this machine with one spool exclude each other.

    Args:
        url: ``s3://bucket/run``.
        spool: Folder where files wait for the store; the consumer's default if None.

    Raises:
        ConfigError: If the store cannot be used, or another harvest of this machine runs there.
    """

    def __init__(self, url: str, spool: Path | None) -> None:
        self.path: str | Path = url.rstrip("/")
        self._url = url.rstrip("/")
        self._store = ObjectStore(url)
        self._files, self._root = open_files(url, ConfigError)
        self._spool = (spool or default_spool()).expanduser()
        # An aborted request could not be taken out of a shard again.
        self.params: Mapping[str, Any] = {"root": self._url, "spool": str(self._spool), "keep_aborted": False}
        self._lock = _locked(self._spool, self._spool / f"{slug(self._url)}{LOCK}", 0o700)

    def read(self, name: str) -> bytes | None:
        key = f"{self._root}/{name}"
        return bytes(self._files.cat_file(key)) if self._store.exists(key) else None

    def write(self, name: str, content: bytes) -> None:
        with tempfile.NamedTemporaryFile(dir=self._spool) as file:
            file.write(content)
            file.flush()
            if not self._store.put(Path(file.name), f"{self._root}/{name}"):
                raise ConfigError(f"{self._url}/{name}: another harvest has just written it; name another root")

    def remove(self, name: str) -> None:
        if self._store.exists(f"{self._root}/{name}"):
            self._files.rm_file(f"{self._root}/{name}")

    def settle(self) -> None:
        deadline = time.monotonic() + UPLOAD_TIMEOUT_S
        while self._upload(deadline):
            time.sleep(_PAUSE_S)

    def _upload(self, deadline: float) -> bool:
        """Upload what waits; whether there is more, which a consumer of this process is about to upload."""
        remote = RemoteRoot(self._url, self._spool)
        remote.start(
            "harvest", threads=_THREADS, wait_s=0.0, numbering=False, removed=lambda num_bytes, num_files: None
        )
        left = remote.close(max(deadline - time.monotonic(), 0.0))
        is_busy = is_waiting(remote.spool, TAG)
        if left or (is_busy and time.monotonic() >= deadline):
            raise ConsumerError(
                f"files wait in {remote.spool} and could not be uploaded within {UPLOAD_TIMEOUT_S:g} s; the same "
                f"command goes on once {self._url} takes them"
            )
        return is_busy

    def shards(self) -> Iterator[tuple[str, list[Sidecar]]]:
        folder = f"{self._root}/{TAG}/{SHARD_FOLDER}"
        source = RemoteSource(self._files)
        for name in sorted(self._store.names(folder)):
            found = [part.sidecar for part in read_shard(source, f"{folder}/{name}")]
            yield f"{self._url}/{TAG}/{SHARD_FOLDER}/{name}", found

    def forget(self, shard: str, is_kept: Callable[[Sidecar], bool]) -> None:
        raise CaptureFileError(
            f"{shard}: has requests that were cut off, which cannot be taken out again in a store; name another root"
        )

    def close(self) -> None:
        os.close(self._lock)


def place_of(path: str | os.PathLike[str], spool: Path | None) -> HarvestFiles:
    """The place that a user named.

    Raises:
        ConfigError: If it cannot be used, or another harvest runs there.
    """
    text = os.fspath(path)
    if "://" in text and not text.startswith("file://"):
        return RemotePlace(text, spool)
    if spool is not None:
        raise ConfigError(f"spool: is for roots in an object store, {text} is none")
    return LocalPlace(Path(text.removeprefix("file://")))


def _locked(folder: Path, lock: Path, mode: int) -> int:
    """An open lock file that this process holds; the folder is made with `mode` if it is not there."""
    try:
        folder.mkdir(mode=mode, parents=True, exist_ok=True)
        file = open_lock(lock)
    except OSError as error:
        raise ConfigError(f"{folder}: cannot be written to: {error}") from error
    try:
        # A lock of the process, not of the open file: an engine core that outlives a killed harvest does not hold it.
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(file)
        raise ConfigError(f"{folder}: another harvest runs in it ({error}); wait for its end") from error
    return file


SETTINGS = "_harvest.json"
_NAME = re.compile(r"prompt-(0|[1-9][0-9]*)")
_TOLD_ALONE = {"format", "format_version", "prompts"}
"""Settings that may differ when a harvest goes on: a file of prompts may have moved."""


class HarvestRoot:
    """A root that one harvest at a time writes to. Used by one thread; a context manager.

    Attributes:
        path: The folder, or the URL, as `open_dataset` takes it.
        params: Parameters of the consumer `filesystem` that writes there.

    Args:
        path: A folder, made if it is not there, or the URL of a place in an object store.
        spool: Folder of this machine where files wait for an object store; the consumer's default if None.

    Raises:
        ConfigError: If it cannot be written to, or another harvest runs in it.
    """

    def __init__(self, path: str | os.PathLike[str], *, spool: Path | None = None) -> None:
        self._place = place_of(path, spool)
        self.path = self._place.path
        self.params = self._place.params

    @property
    def is_remote(self) -> bool:
        """Whether it is in an object store."""
        return not isinstance(self.path, Path)

    def __enter__(self) -> HarvestRoot:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._place.close()

    def check(self, settings: Mapping[str, Any]) -> None:
        """Refuse a root that was begun with other settings; settings that only one side knows are not compared.

        Raises:
            ConfigError: Naming each setting that differs, or if there are rows without settings.
        """
        known = self._settings()
        if known is None:
            if any(True for _ in self._place.shards()):
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
        self._place.write(SETTINGS, _json(document))

    def finished(self) -> dict[int, int]:
        """Rows at each site, by prompt, of the prompts that are durable.

        Requests that were cut off, as when an engine died, are taken out of the index: their prompts run again.

        What an earlier process left on the way to an object store is brought there first.

        Raises:
            CaptureFileError: If a shard is damaged, has a prompt twice, or one that lacks rows.
            ConsumerError: If the store does not take what waits for it.
        """
        self._place.settle()
        found: dict[int, int] = {}
        for shard, sidecars in self._place.shards():
            if any(map(_was_cut_off, sidecars)):
                self._place.forget(shard, lambda sidecar: not _was_cut_off(sidecar))
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
        self._place.remove(MANIFEST)

    def finish(self, manifest: Mapping[str, Any]) -> None:
        """Write the manifest, the last file of a harvest."""
        self._place.remove(MANIFEST)
        self._place.write(MANIFEST, _json(manifest))

    def _settings(self) -> dict[str, Any] | None:
        text = self._place.read(SETTINGS)
        if text is None:
            return None
        try:
            return msgspec.json.decode(text, type=dict[str, Any])
        except msgspec.MsgspecError as error:
            raise ConfigError(f"{self.path}/{SETTINGS}: damaged: {error}; name another root") from error


def _json(document: Mapping[str, Any]) -> bytes:
    return msgspec.json.format(msgspec.json.encode(document), indent=2) + b"\n"


def _was_cut_off(sidecar: Sidecar) -> bool:
    return sidecar.status in CUT_OFF


def _index_of(sidecar: Sidecar, shard: str) -> int:
    match = _NAME.fullmatch(sidecar.request_id)
    if match is None:
        raise CaptureFileError(f"{shard}: has the request {sidecar.request_id!r}, which no harvest made")
    return int(match[1])
