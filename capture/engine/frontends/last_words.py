"""A script's own error is the last thing that its user sees.

Python prints an uncaught error first and ends vLLM's processes afterwards, which log what they do, and that they were
ended. So engines with requests of headgate's are shut down before the error is printed, and deliver what they captured.
"""

from __future__ import annotations

import logging
import sys
import weakref
from types import TracebackType
from typing import Protocol

logger = logging.getLogger("headgate")


class Closable(Protocol):
    """A client of an engine core."""

    def shutdown(self) -> object: ...


_running: weakref.WeakSet[Closable] = weakref.WeakSet()


def shut_down_before_errors(client: Closable) -> None:
    """Shut `client` down before an error that ends the program is printed; idempotent, and keeps nothing alive."""
    _running.add(client)
    show = sys.excepthook
    if show.__module__ == __name__:
        return

    def shut_down_and_show(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        try:
            for client in list(_running):
                _running.discard(client)
                client.shutdown()
        except Exception as failure:  # noqa: BLE001  (the error that ends the program is what matters)
            logger.warning("headgate: an engine could not be shut down: %r", failure)
        finally:
            show(kind, error, trace)

    sys.excepthook = shut_down_and_show
