"""Work that is done on another thread, ahead of when its result is wanted."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Generic, TypeVar

T = TypeVar("T")


class Ahead(Generic[T]):
    """A call that runs from now on, on a thread of its own, and whose result is wanted later.

    The thread ends with the call, so there is nothing to close. A process that is forked meanwhile has no such thread,
    and calls again.

    Args:
        call: Called once, and in a forked copy again: it must not depend on how far the first call came.
        name: Of the thread.
    """

    def __init__(self, call: Callable[[], T], name: str) -> None:
        self._call = call
        self._process = os.getpid()
        self._future: Future[T] = Future()
        threading.Thread(target=self._run, name=name).start()

    def wait(self) -> None:
        """Wait for the end of the call, whatever comes of it."""
        if self._process == os.getpid():
            self._future.exception()

    def result(self) -> T:
        """Wait for the end of the call, and return what it returned or raise what it raised."""
        return self._future.result() if self._process == os.getpid() else self._call()

    def _run(self) -> None:
        try:
            self._future.set_result(self._call())
        except BaseException as error:  # noqa: BLE001  (whatever it is, it is for who wants the result to see)
            self._future.set_exception(error)
