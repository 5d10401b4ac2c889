"""An S3 store in this process, moto's over HTTP: it can go down, come back with what it held, and fail on request."""

from __future__ import annotations

import asyncio
import itertools
import logging
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import fsspec
import pytest
from fsspec import asyn

Hook = Callable[[str, str], str | None]
"""Gets method and path with query of each request; returns a status to answer it with, or None."""

POLL_S = 0.02
"""Between two looks of the server at whether it is to stop."""

_BUCKETS = itertools.count()


class S3Server:
    """Serves at one address from `start` to `stop`, as often as one likes, always the same buckets.

    Attributes:
        bucket: The newest; empty after `make_bucket`.
        requests: Method and path with query of all requests.
        refuses: Asked before a request is served; with a status, it is not.
        loses: Asked the same; with a status, the request is served, and its answer replaced.
    """

    def __init__(self) -> None:
        self.bucket = ""
        self.requests: list[tuple[str, str]] = []
        self.refuses: Hook = lambda method, path: None
        self.loses: Hook = lambda method, path: None
        self._port = 0
        self._server: Any = None
        self._thread: threading.Thread | None = None

    @property
    def endpoint(self) -> str:
        """Its address, once it was started."""
        return f"http://127.0.0.1:{self._port}"

    def make_bucket(self) -> None:
        """Go on with a new bucket, without faults."""
        self.refuses = self.loses = lambda method, path: None
        self.bucket = f"bucket-{next(_BUCKETS)}"
        self.files().call_s3("create_bucket", Bucket=self.bucket)
        self.requests.clear()

    def start(self) -> None:
        """Serve."""
        from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
        from werkzeug.serving import make_server

        logging.getLogger("werkzeug").setLevel(logging.ERROR)
        self._app = DomainDispatcherApplication(create_backend_app)
        self._server = make_server("127.0.0.1", self._port, self._serve, threaded=True)
        self._port = self._server.server_port
        self._thread = threading.Thread(target=self._server.serve_forever, args=(POLL_S,), name="s3-server")
        self._thread.start()

    def stop(self) -> None:
        """Go down: connections are refused. May be called again."""
        if self._thread is not None:
            self._server.shutdown()
            self._server.server_close()
            self._thread.join()
            self._thread = None

    def objects(self) -> dict[str, bytes]:
        """The content of the bucket by key, read past the server."""
        return {name: key.value for name, key in self._held().keys.items()}

    def unfinished(self) -> list[str]:
        """Keys of multipart uploads that were neither completed nor aborted."""
        return [upload.key_name for upload in self._held().multiparts.values()]

    def put(self, key: str, content: bytes) -> None:
        """Put an object into the bucket, past the server."""
        from moto.s3.models import s3_backends

        s3_backends["123456789012"]["aws"].put_object(self.bucket, key, content)

    def files(self) -> Any:
        """The store as fsspec has it."""
        return fsspec.filesystem("s3")

    def _held(self) -> Any:
        from moto.s3.models import s3_backends

        return s3_backends["123456789012"]["aws"].buckets[self.bucket]

    def _serve(self, environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        method, path = environ["REQUEST_METHOD"], f"{environ['PATH_INFO']}?{environ['QUERY_STRING']}"
        self.requests.append((method, path))
        if refused := self.refuses(method, path):
            environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
            return _empty(refused, start_response)
        if lost := self.loses(method, path):
            list(self._app(environ, lambda *answer: None))
            return _empty(lost, start_response)
        served: Iterable[bytes] = self._app(environ, start_response)
        return served


def _empty(status: str, start_response: Any) -> list[bytes]:
    start_response(status, [("Content-Length", "0")])
    return [b""]


def start_threads() -> None:
    """Start the threads that fsspec keeps for as long as the process lives: its loop's, and one for look-ups of names.

    They would pass for leaked threads of the first test otherwise.
    """
    loop = asyn.get_loop()
    loop.set_default_executor(ThreadPoolExecutor(1))
    asyn.sync(loop, asyncio.to_thread, int)


@contextmanager
def s3_server() -> Iterator[S3Server]:
    """A store, stopped, which s3fs finds by the environment; it fails at once, without retries of its own."""
    import s3fs

    server = S3Server()
    server.start()
    server.stop()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ENDPOINT_URL", server.endpoint)
        patch.setenv("AWS_ACCESS_KEY_ID", "test")
        patch.setenv("AWS_SECRET_ACCESS_KEY", "test")
        patch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        patch.setenv("AWS_MAX_ATTEMPTS", "1")
        patch.setattr(s3fs.S3FileSystem, "retries", 1)
        patch.setattr("moto.s3.models.S3_UPLOAD_PART_MIN_SIZE", 1)
        s3fs.S3FileSystem.clear_instance_cache()
        yield server
        s3fs.S3FileSystem.clear_instance_cache()
