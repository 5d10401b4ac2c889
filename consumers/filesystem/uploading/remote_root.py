"""A root in an object store: files are written to the spool of this machine as to any local root, and then uploaded."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

from headgate.capture.monitoring.stats import Figure
from headgate.consumers.filesystem.storage.object_store import ObjectStore
from headgate.consumers.filesystem.uploading.uploader import (
    Outcome,
    Patience,
    SpoolFolder,
    UploadAnswer,
    Uploader,
    UploadUnit,
)

logger = logging.getLogger(__name__)


class RemoteRoot:
    """The way of files from a local root, `path`, to `url`. Any thread may call.

    Attributes:
        path: This process's folder of the spool, where files are to be written whole.
        spool: Holds that folder, and those of other processes with files for the same root.
        num_found: Files and folders that processes which are gone have left there.

    Args:
        url: The root.
        spool: Holds files for all roots.

    Raises:
        ConfigError: If the store cannot be used, or files cannot wait in the spool.
    """

    def __init__(self, url: str, spool: Path) -> None:
        self._store = ObjectStore(url)
        self._folder = SpoolFolder(spool, url.rstrip("/"))
        self.path, self.spool = self._folder.path, self._folder.parent
        self.num_found = len(self._folder.left)

    def start(
        self, name: str, *, threads: int, wait_s: float, numbering: bool, removed: Callable[[int, int], None]
    ) -> None:
        """Start to upload, first those files that processes which are gone have left.

        Args:
            name: Of the threads.
            threads: Files or folders uploaded at a time.
            wait_s: Seconds for which a result waits for the upload.
            numbering: As for `Uploader`.
            removed: As for `Uploader`.
        """
        self._uploader = Uploader(
            f"{name}-upload",
            self._store,
            threads=threads,
            numbering=numbering,
            removed=removed,
            ended=self._folder.close,  # not before: who takes over a folder uploads its files, too
        )
        self._patience = Patience(f"{name}-answers", wait_s)
        for unit in self._folder.left:
            self._uploader.add(unit, None, is_old=True)

    def figures(self) -> tuple[Figure, ...]:
        """Return what waits to be uploaded, and what was."""
        return self._uploader.figures()

    def after(self, written: Outcome) -> Outcome:
        """The result of a request whose files are uploaded once they are `written`."""
        outcome: Outcome = Future()
        written.add_done_callback(partial(self._upload, outcome))
        return outcome

    def upload_folder(self, path: Path) -> None:
        """Upload a folder below `path` that does not change any more, for which no result waits."""
        self._uploader.add(UploadUnit(self.path, path.relative_to(self.path).parts), None)

    def close(self, timeout_s: float) -> int:
        """Upload what is left within `timeout_s` seconds; the rest, whose number is returned, waits for the next start.

        May not be called again.
        """
        started = time.monotonic()
        left = self._uploader.close(timeout_s)
        self._patience.close()
        if left:
            logger.warning(
                "%d files and folders were not uploaded within %.1f s; they wait in %s, and the next start with this "
                "root uploads them",
                *(left, time.monotonic() - started, self.path),
            )
        return left

    def _upload(self, outcome: Outcome, written: Outcome) -> None:
        if (error := written.exception()) is not None:
            outcome.set_exception(error)
            return
        payload: dict[str, Any] = written.result()
        if not payload["paths"]:
            outcome.set_result(payload)  # nothing was recorded
            return
        paths = [Path(path).relative_to(self.path) for path in payload["paths"]]
        urls = [self._store.url("/".join((self._store.root, *path.parts))) for path in paths]
        answer = UploadAnswer(outcome, payload, urls)
        if payload["layout"] == "shards":
            answer.report()  # its shard grows on
            return
        unit = UploadUnit(self.path, paths[0].parts if payload["layout"] == "request" else paths[0].parent.parts)
        self._uploader.add(unit, answer)
        if self._uploader.is_failing:
            answer.report()
        else:
            self._patience.add(answer)
