"""A thread that runs tasks in order, behind a queue that is bounded by the memory its tasks hold."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable

from headgate.capture.schema.errors import ConsumerError

logger = logging.getLogger(__name__)

Task = Callable[[], None]

_TASK_BYTES = 1024  # what a task takes beside the rows it carries
_MAX_UNSETTLED = 128  # tasks between two calls of `settle` while the queue never runs empty


class Writer:
    """One writer thread.

    `submit` and `close` may be called from any thread. Tasks and `settle` run on the writer's thread, and unlocked.

    Args:
        name: Of the thread.
        queue_bytes: Memory that waiting tasks may hold; a larger one is taken when nothing else waits.
        settle: Called after a batch of tasks: when the queue runs empty, and now and then while it does not.
        ended: Called at the very end.
    """

    def __init__(self, name: str, *, queue_bytes: int, settle: Task, ended: Task) -> None:
        self._queue_bytes = queue_bytes
        self._settle = settle
        self._ended = ended
        self._tasks: deque[tuple[Task, int]] = deque()
        self._queued_bytes = 0
        self._closed = False
        self._changed = threading.Condition()  # guards the three above
        # A daemon: a disk that hangs must not keep the process from ending.
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, task: Task, num_bytes: int = 0, *, is_urgent: bool = True) -> None:
        """Queue a task that holds `num_bytes` of rows; wait while the queue is full.

        Args:
            task: What is to be done.
            num_bytes: Memory that it holds.
            is_urgent: Otherwise it may wait until the next task comes that is.

        Raises:
            ConsumerError: If the writer is closed, also while waiting.
        """
        num_bytes += _TASK_BYTES
        with self._changed:
            if not self._has_room(num_bytes):
                self._changed.notify_all()  # room may be taken by tasks that nobody has woken the thread for
            self._changed.wait_for(lambda: self._closed or self._has_room(num_bytes))
            if self._closed:
                raise ConsumerError("the consumer is closed")
            self._tasks.append((task, num_bytes))
            self._queued_bytes += num_bytes
            if is_urgent:
                self._changed.notify_all()

    def close(self) -> None:
        """Take no more tasks; the thread ends after those that wait. May be called again."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def join(self, timeout_s: float) -> bool:
        """Wait for the thread to end; False when time ran out."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _has_room(self, num_bytes: int) -> bool:
        return not self._tasks or self._queued_bytes + num_bytes <= self._queue_bytes

    def _run(self) -> None:
        unsettled = 0
        while (task := self._next(wait=unsettled == 0)) is not None or unsettled:
            if task is not None:
                _run_safely(task)
                unsettled += 1
            if task is None or unsettled >= _MAX_UNSETTLED:
                _run_safely(self._settle)
                unsettled = 0
        _run_safely(self._ended)

    def _next(self, *, wait: bool) -> Task | None:
        """The next task; None if there is none now or, having waited, ever."""
        with self._changed:
            if wait:
                self._changed.wait_for(lambda: self._tasks or self._closed)
            if not self._tasks:
                return None
            task, num_bytes = self._tasks.popleft()
            self._queued_bytes -= num_bytes
            self._changed.notify_all()
            return task


def _run_safely(task: Task) -> None:
    """Run a task. Tasks report their own failures; what still gets here is a bug, and must not end the thread."""
    try:
        task()
    except Exception:
        logger.exception("a task of %s failed", threading.current_thread().name)
