"""The requests of a hub that expect results: the answers so far, and who waits for them."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence

from msgspec.structs import replace

from headgate.capture.schema.results import CaptureResult, CaptureResults, merge_samples, merge_stages

MAX_CLOSED_KEYS = 65536
"""Keys of past requests that are remembered: rows for driver-located consumers may arrive late."""


class ExpectedRequest:
    """One request: the answers so far, and the callbacks for when all are there. Guarded by the table's lock."""

    def __init__(self, instances: Sequence[str], num_samples: int, num_stages: int) -> None:
        self.instances = tuple(dict.fromkeys(instances))
        self.num_samples = num_samples
        self.num_stages = num_stages
        self.callbacks: list[Callable[[], None]] = []
        self._answers: dict[tuple[int, str], dict[int, CaptureResult]] = {}
        self._complete: set[tuple[int, str]] = set()

    @property
    def is_complete(self) -> bool:
        """Whether every consumer answered for every sample."""
        return len(self._complete) == self.num_samples * len(self.instances)

    def is_missing(self, sample: int, instance: str, stage: int, num_stages: int) -> bool:
        """Whether this is an answer that did not come yet."""
        return (
            0 <= sample < self.num_samples
            and instance in self.instances
            and 0 <= stage < num_stages <= self.num_stages
            and (sample, instance) not in self._complete
            and stage not in self._answers.get((sample, instance), {})
        )

    def add(self, sample: int, instance: str, stage: int, num_answers: int, result: CaptureResult) -> None:
        """Keep an answer; `num_answers` make the result complete."""
        answers = self._answers.setdefault((sample, instance), {})
        answers[stage] = result
        if len(answers) >= num_answers:
            self._complete.add((sample, instance))

    def results(self, missing: CaptureResult) -> CaptureResults:
        """Merge the answers so far; `missing` stands for those of consumers that did not answer for a sample."""
        samples = [
            {name: replace(self._result(sample, name, missing), key=name) for name in self.instances}
            for sample in range(self.num_samples)
        ]
        merged = {
            name: replace(merge_samples([sample[name] for sample in samples]), key=name) for name in self.instances
        }
        return CaptureResults(samples, merged)

    def _result(self, sample: int, instance: str, missing: CaptureResult) -> CaptureResult:
        if (sample, instance) not in self._complete:
            return missing
        return merge_stages(self._answers[sample, instance])


class ExpectedResults:
    """The table of a hub's requests, by their keys; `ResultHub` describes what its methods do.

    Threads: any. Callbacks run on the thread that completes a request, without the lock.

    Attributes:
        num_results: Answers that a request was waiting for.
        num_unknown: Other answers.
        missing: Stands for a result that did not come.
    """

    def __init__(self, single: Iterable[str] = ()) -> None:
        self.single = set(single)
        self.num_results = 0
        self.num_unknown = 0
        self.missing = CaptureResult(status="pending")
        self._lock = threading.Lock()
        self._requests: dict[str, ExpectedRequest] = {}
        self._closed: dict[str, None] = {}
        self._is_over = False

    def __len__(self) -> int:
        return len(self._requests)

    def add(self, key: str, request: ExpectedRequest) -> None:
        """See `ResultHub.expect`."""
        with self._lock:
            self._requests[key] = request

    def knows(self, key: str) -> bool:
        """See `ResultHub.knows`."""
        with self._lock:
            return key in self._requests or key in self._closed

    def deliver(self, key: str, sample: int, instance: str, stage: int, num_stages: int, result: CaptureResult) -> bool:
        """See `ResultHub.deliver`."""
        with self._lock:
            expected = self._requests.get(key)
            if expected is None or not expected.is_missing(sample, instance, stage, num_stages):
                self.num_unknown += 1
                return False
            self.num_results += 1
            num_answers = 1 if instance in self.single else num_stages
            expected.add(sample, instance, stage, num_answers, result)
            callbacks = tuple(expected.callbacks) if expected.is_complete else ()
        for callback in callbacks:
            callback()
        return True

    def results(self, request: ExpectedRequest) -> CaptureResults:
        """Results of a request as they are now."""
        with self._lock:
            return request.results(self.missing)

    def remove(self, key: str) -> None:
        """See `ResultHub.close`."""
        with self._lock:
            expected = self._requests.pop(key, None)
            if expected is None:
                return
            self._closed[key] = None
            if len(self._closed) > MAX_CLOSED_KEYS:
                del self._closed[next(iter(self._closed))]
            callbacks = tuple(expected.callbacks)
        for callback in callbacks:
            callback()

    def end_waits(self, missing: CaptureResult | None = None) -> None:
        """Let nobody wait any more: from now on `missing` stands for a result that did not come."""
        with self._lock:
            self.missing, self._is_over = missing or self.missing, True
            callbacks = [callback for expected in self._requests.values() for callback in expected.callbacks]
        for callback in callbacks:
            callback()

    @contextlib.contextmanager
    def watching(self, key: str, callback: Callable[[], None]) -> Iterator[ExpectedRequest]:
        """Have `callback` called when the results of `key` are complete or no more can come, or at once.

        Raises:
            KeyError: If the request is not expected, or was closed.
        """
        with self._lock:
            if key not in self._requests:
                raise KeyError("no request with this key expects results: call expect() first, and close() last")
            expected = self._requests[key]
            expected.callbacks.append(callback)
            is_complete = expected.is_complete or self._is_over
        if is_complete:
            callback()
        try:
            yield expected
        finally:
            with self._lock:
                expected.callbacks.remove(callback)
