"""A process that uploads files to S3 and kills itself at points of the way in turn, and one that goes on after it.

``python -m tests.fakes.dying_uploads URL SPOOL STRIDE`` does so below ``URL/POINT`` for point 0, STRIDE, 2 * STRIDE
and so on until one gets through alive, with the store that the environment names. Prints the last point.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from concurrent.futures import Future
from itertools import count
from pathlib import Path
from typing import Any

import s3fs

from headgate.consumers.filesystem.storage import object_store
from headgate.consumers.filesystem.storage.local_store import LocalStore
from headgate.consumers.filesystem.storage.store import Target
from headgate.consumers.filesystem.uploading.remote_root import RemoteRoot
from tests.deadlines import patience
from tests.fakes.death import Death

CALLS = ("rename", "unlink", "rmdir")
PART_BYTES = 1000
FILE = bytes(range(250)) * 12
FOLDER = {"site.bin": b"rows", "site.json": b"{}"}
WHOLE = {"tag/a.safetensors": FILE, **{f"tag/b/{name}": content for name, content in FOLDER.items()}}
TIMEOUT_S = patience(60.0)


def upload(url: str, spool: Path, point: int) -> None:
    """Write a file of several parts and a folder, and die while they are uploaded."""
    death = Death(point)
    for name in CALLS:
        setattr(os, name, death.around(getattr(os, name)))
    s3fs.S3FileSystem._call_s3 = death.around_async(s3fs.S3FileSystem._call_s3)
    root = RemoteRoot(url, spool)
    root.start("upload", threads=1, wait_s=TIMEOUT_S, numbering=False, removed=lambda num_bytes, num_files: None)
    store = LocalStore(root.path, fsync=False, numbering=False)
    file = store.publish_file(Target(("tag",), "a"), ".safetensors", [memoryview(FILE)])
    folder = store.publish_folder(
        Target(("tag",), "b"), {name: [memoryview(content)] for name, content in FOLDER.items()}
    )
    death.arm()
    for layout, published in (("request", file), ("raw", folder)):
        written: Future[dict[str, Any]] = Future()
        result = root.after(written)
        written.set_result({"layout": layout, "paths": list(published.paths), "durable": False})
        assert result.result(TIMEOUT_S)["uploaded"]
    store.close()
    root.close(TIMEOUT_S)


def go_on(url: str, spool: Path) -> None:
    """Upload what the other left."""
    root = RemoteRoot(url, spool)
    root.start("upload", threads=1, wait_s=TIMEOUT_S, numbering=False, removed=lambda num_bytes, num_files: None)
    root.close(TIMEOUT_S)


def forked(work: Callable[[], None]) -> int:
    """The exit code of a child that does `work`."""
    child = os.fork()
    if child == 0:
        work()
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def main(url: str, spool: Path, stride: int) -> int:
    """Let children die until one survives; return its point."""
    object_store.PART_BYTES = PART_BYTES
    for point in count(0, stride):
        place = f"{url}/{point}"
        died = forked(lambda: upload(place, spool, point))  # noqa: B023
        assert forked(lambda: go_on(place, spool)) == 0  # noqa: B023
        if died != -signal.SIGKILL:
            assert died == 0, f"the child failed at point {point}"
            return point
    raise AssertionError("no child survives")


if __name__ == "__main__":
    sys.stdout.write(str(main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]))))
