"""Object stores through fsspec: ``s3://``, ``gs://``, ``az://``. A key appears whole, and replaces nothing.

Files are uploaded under their final key, large ones in parts, on the condition that the key is free (``If-None-Match``
on S3 and Azure, ``ifGenerationMatch`` on GCS): there is no temporary key and no rename, which would copy every byte.

Credentials come from the environment or the machine, as the store's own tools read them, and are never in a URL.
"""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

import fsspec

from headgate.capture.schema.errors import CaptureFileError, ConfigError

logger = logging.getLogger(__name__)

PART_BYTES = 8 << 20
"""Bytes of a part of a large file; files of less than two parts are uploaded at once."""

_PARTS_AT_A_TIME = 4
_MAX_PARTS = 10_000
_S3, _GCS, _AZURE = ("s3", "s3a"), ("gs", "gcs"), ("az", "abfs", "abfss")
_WRITABLE = (*_S3, *_GCS, *_AZURE, "memory")
_LOGIN = re.compile(r"://[^/]*@")


def protocol_of(url: str) -> str:
    """The protocol of a URL; empty for a path of this machine."""
    return url.partition("://")[0] if "://" in url else ""


def check_url(url: str, error: type[ConfigError] | type[CaptureFileError]) -> None:
    """Refuse a URL with credentials in it, which would end up in logs and results; the message does not repeat them.

    Raises:
        error: If there are any.
    """
    names_account = protocol_of(url) in _AZURE and not re.search(r"://[^/]*:[^/]*@", url)
    if "?" in url or (_LOGIN.search(url) and not names_account):
        raise error(
            f"root: the {protocol_of(url)}:// URL has credentials or options in it. Name the place alone, such as "
            "s3://bucket/run, and give credentials by the environment, such as AWS_ACCESS_KEY_ID and AWS_ENDPOINT_URL"
        )


def check_writable(url: str) -> None:
    """Refuse a URL that files cannot be written to.

    Raises:
        ConfigError: If it is not of an object store, or has credentials in it.
    """
    check_url(url, ConfigError)
    if protocol_of(url) not in _WRITABLE:
        raise ConfigError(
            f"filesystem: root {url}: files can be written to folders of this machine and to object stores, whose "
            f"files appear whole: {', '.join(f'{name}://' for name in _WRITABLE[:-1])}"
        )


def open_files(url: str, error: type[ConfigError] | type[CaptureFileError]) -> tuple[Any, str]:
    """The file system of fsspec for a URL, and the path in it, without a slash at its end.

    Raises:
        error: If the URL has credentials in it, fsspec knows no such protocol, or its package is not installed.
    """
    check_url(url, error)
    try:
        files, path = fsspec.core.url_to_fs(url)
    except ImportError as missing:
        raise error(f"root {url} cannot be opened: {missing}: pip install 'headgate[remote]'") from missing
    except ValueError as unknown:
        raise error(f"root {url} cannot be opened: {unknown}") from unknown
    return files, str(path).rstrip("/")


class ObjectStore:
    """A root in an object store, for writing. Any thread may call; failures of the store are whatever it raises.

    Attributes:
        root: Its key.

    Args:
        url: ``s3://bucket/run``.

    Raises:
        ConfigError: If there is no such store or bucket, the package for it is missing, or it may not be entered.
    """

    def __init__(self, url: str) -> None:
        check_writable(url)
        self._files, self.root = open_files(url, ConfigError)
        self._given = url
        self._protocol = protocol_of(url)
        self._call_s3 = getattr(self._files, "call_s3", None)
        self._check()

    def url(self, key: str) -> str:
        """A key with its protocol, as readers take it."""
        return str(self._files.unstrip_protocol(key))

    def names(self, folder: str) -> set[str]:
        """Names of the keys below `folder`, without it; empty if there are none."""
        self._files.invalidate_cache()
        try:
            return {str(path).rstrip("/").rpartition("/")[2] for path in self._files.ls(folder, detail=False)}
        except FileNotFoundError:
            return set()

    def exists(self, key: str) -> bool:
        """Whether there is something at `key`."""
        self._files.invalidate_cache()
        return bool(self._files.exists(key))

    def put(self, path: Path, key: str) -> bool:
        """Upload a file; False if the key holds something else, which stays as it is.

        A key that holds the very bytes of the file is taken for an earlier attempt whose answer was lost. Whether it
        is free is asked before the bytes are sent, too: they would be sent in vain, and there are stores that ignore
        the condition.
        """
        if self.exists(key):
            return self.holds(path, key)
        try:
            self._files.put_file(str(path), key, mode="create", **self._options(path.stat().st_size))
        except Exception:
            if not self.exists(key):
                raise
            return self.holds(path, key)
        self._files.invalidate_cache()
        if (size := self._files.info(key)["size"]) != path.stat().st_size:
            raise OSError(f"{self.url(key)} has {size} bytes after the upload of {path.stat().st_size}")
        return True

    def holds(self, path: Path, key: str) -> bool:
        """Whether the object at `key` has the very bytes of a file."""
        size = path.stat().st_size
        if self._files.info(key)["size"] != size:
            return False
        with path.open("rb") as file:
            for start in range(0, size, PART_BYTES):
                own = file.read(PART_BYTES)
                if self._files.cat_file(key, start=start, end=start + len(own)) != own:
                    return False
        return True

    def abort_unfinished(self, path: Path, key: str) -> None:
        """Remove the parts of uploads of a file to `key` that were cut off: S3 keeps them, and bills for them.

        GCS and Azure remove theirs after a week.
        """
        if self._call_s3 is None or path.stat().st_size < 2 * PART_BYTES:
            return
        bucket, name, _ = self._files.split_path(key)
        uploads = self._call_s3("list_multipart_uploads", Bucket=bucket, Prefix=name).get("Uploads") or ()
        for upload in uploads:
            if upload["Key"] == name:
                self._call_s3("abort_multipart_upload", Bucket=bucket, Key=name, UploadId=upload["UploadId"])
                logger.info("%s: removed the parts of an upload that was cut off", self.url(key))

    def _check(self) -> None:
        """Refuse a bucket that is not there or is closed to us; a store that is down is none of both."""
        try:
            if self._call_s3 is None:
                self._files.exists(self.root)
            else:
                bucket, name, _ = self._files.split_path(self.root)
                self._call_s3("list_objects_v2", Bucket=bucket, Prefix=name, MaxKeys=1)
        except (PermissionError, FileNotFoundError) as error:
            raise ConfigError(
                f"filesystem: root {self._given} cannot be listed: {error}; name a bucket that exists, and give "
                "credentials by the environment"
            ) from error
        except Exception as error:  # noqa: BLE001  (each store has errors of its own; the first upload tries again)
            logger.warning("%s does not answer, files will wait for it on this machine: %s", self._given, error)

    def _options(self, size: int) -> dict[str, int]:
        """Options of `put_file` that bound the memory of an upload to 32 MiB, for files of up to 78 GiB."""
        options = {}
        if self._protocol in (*_S3, *_GCS):
            options["chunksize"] = max(PART_BYTES, -(-size // _MAX_PARTS))
        if self._protocol in (*_S3, *_AZURE):
            options["max_concurrency"] = _PARTS_AT_A_TIME
        return options
