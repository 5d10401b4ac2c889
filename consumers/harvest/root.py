"""The root of a harvest: the settings that it was begun with, and the prompts whose rows are durable in it.

The index of the shards alone says which prompts are done: a line of it is on the disk after the rows that it speaks of.
Beside the shards lie ``_harvest.json``, the settings, and at the end ``_headgate_manifest.json``.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec

from headgate.capture.schema.errors import CaptureFileError, ConfigError
from headgate.consumers.datasets.export.destination import MANIFEST
from headgate.consumers.filesystem.consumer import CUT_OFF
from headgate.consumers.filesystem.formats.layout import Sidecar
from headgate.consumers.harvest.places import TAG, place_of

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
        """Refuse a root that was begun with other settings; those that only one side knows are not compared.

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
