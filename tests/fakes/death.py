"""The death of a process at a chosen point of its way, as by ``kill -9``."""

from __future__ import annotations

import os
import signal
from collections.abc import Awaitable, Callable
from typing import Any

MIN_HALVED = 64  # bytes; halving every remainder would make no new cases


class Death:
    """Counts system calls from `arm` on, and ends the process before or after one of them, or half-way through it."""

    def __init__(self, point: int) -> None:
        self._left = point
        self._is_armed = False

    def arm(self) -> None:
        """Let the count begin."""
        self._is_armed = True

    def point(self) -> None:
        """A place to die at."""
        if self._is_armed:
            if self._left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            self._left -= 1

    def around(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """`call` with a place to die at before and after it."""

        def called(*args: Any, **kwargs: Any) -> Any:
            self.point()
            result = call(*args, **kwargs)
            self.point()
            return result

        return called

    def half_way(self, pwritev: Callable[..., int]) -> Callable[..., int]:
        """`pwritev` in pieces, each half of what is left, with a place to die at between them."""

        def called(file: int, buffers: list[memoryview], offset: int) -> int:
            if buffers[0].nbytes < MIN_HALVED:
                return pwritev(file, buffers, offset)
            written = pwritev(file, [buffers[0][: buffers[0].nbytes // 2]], offset)
            self.point()
            return written

        return called

    def around_async(self, call: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
        """The same for a coroutine function."""

        async def called(*args: Any, **kwargs: Any) -> Any:
            self.point()
            result = await call(*args, **kwargs)
            self.point()
            return result

        return called
