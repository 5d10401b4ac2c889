"""What of one request has reached one consumer: the reason why no result says ``ok`` when something is missing.

Which token each captured row was really computed from: proof that a row is of the request it is given to.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from headgate.capture.schema.batch import FinalState, Int32Array, Int64Array
from headgate.capture.schema.consumer import RequestInfo
from headgate.capture.schema.results import CaptureResult

SPARE_POSITIONS = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class RowTotals:
    """The balance of a finished request. Positions that were computed in vain count for nothing.

    Attributes:
        wanted: Positions that its selector wants.
        complete: Those of them that were delivered at every site.
        dropped: Those of them that overload has cost.
        surplus: Deliveries that nobody asked for, or that came twice: above 0 only if headgate has a bug.
    """

    wanted: int
    complete: int
    dropped: int
    surplus: int

    @property
    def missing(self) -> int:
        """Wanted positions that are not complete."""
        return self.wanted - self.complete


class DeliveryAudit:
    """Counts, position by position, at how many sites a request's row was delivered.

    The expected positions come from the request's selector and its final length alone, not from what was planned:
    rows that were never computed (read from the prefix cache, for instance) are found out too.

    Args:
        request: The request; its sites are those of this worker.
    """

    def __init__(self, request: RequestInfo) -> None:
        self._request = request
        self._num_sites = np.zeros(request.num_prompt_tokens + SPARE_POSITIONS, dtype=np.int32)
        self._runs: dict[int, tuple[int, int]] = {}
        """By number of sites: consecutive positions that are not counted in yet. Most rows prolong one."""
        self._dropped: list[Int64Array] = []

    def deliver(self, positions: Int64Array, num_sites: int) -> None:
        """Note rows at `positions`, ascending, of `num_sites` sites."""
        first, last = int(positions[0]), int(positions[-1])
        if last - first + 1 == len(positions):
            self.deliver_run(first, last + 1, num_sites)
        else:
            self._make_room(last + 1)
            self._num_sites[positions] += num_sites

    def deliver_run(self, start: int, stop: int, num_sites: int) -> None:
        """Note rows at positions ``start : stop``."""
        before = self._runs.get(num_sites)
        if before is not None:
            if before[1] == start:
                start = before[0]
            else:
                self._count_in(*before, num_sites)
        self._runs[num_sites] = (start, stop)

    def drop(self, positions: Int64Array) -> None:
        """Note that rows at `positions` were lost to overload."""
        self._dropped.append(positions.copy())

    def close(self, final: FinalState) -> RowTotals:
        """Compare what was delivered with what the request wanted, now that its length is known."""
        for num_sites, run in self._runs.items():
            self._count_in(*run, num_sites)
        self._runs.clear()
        num_rows = final.num_rows
        positions = np.arange(num_rows, dtype=np.int64)
        num_prompt = np.full(num_rows, self._request.num_prompt_tokens, dtype=np.int64)
        is_wanted = self._request.spec.positions.mask(positions, num_prompt)
        delivered = np.zeros(num_rows, dtype=np.int64)
        counted = self._num_sites[:num_rows]
        delivered[: len(counted)] = counted
        expected = np.where(is_wanted, len(self._request.spec.sites), 0)
        is_complete = is_wanted & (delivered == expected)
        lost = np.unique(np.concatenate(self._dropped)) if self._dropped else positions[:0]
        lost = lost[lost < num_rows]
        return RowTotals(
            wanted=int(is_wanted.sum()),
            complete=int(is_complete.sum()),
            dropped=int((is_wanted & ~is_complete)[lost].sum()),
            surplus=int(np.maximum(delivered - expected, 0).sum()),
        )

    def _count_in(self, start: int, stop: int, num_sites: int) -> None:
        self._make_room(stop)
        self._num_sites[start:stop] += num_sites

    def _make_room(self, size: int) -> None:
        if size > len(self._num_sites):
            grown = np.zeros(max(size, 2 * len(self._num_sites)), dtype=np.int32)
            grown[: len(self._num_sites)] = self._num_sites
            self._num_sites = grown


class ConsumerRequest:
    """One request on its way to one consumer.

    Attributes:
        info: What the consumer knows of it.
        ledger: What was delivered; written by the consumer's thread, its drops under the lane's lock.
        failure: Why it ends in ``error``; None so far. This and the others are guarded by the lane's lock.
        first_site: The site by which its positions are counted: a position may lie in several blocks of a step, one
            for each set of sites.
        drop_reason: Why rows of it were dropped, for people.
        is_begun: The consumer was told of it, and not yet that it is over; the consumer's thread's own.
        ended_at: When it got its last row and its result became due, on the monotonic clock; None so far.
        is_reported: Its result is out.
    """

    __slots__ = ("drop_reason", "ended_at", "failure", "first_site", "info", "is_begun", "is_reported", "ledger")

    def __init__(self, info: RequestInfo) -> None:
        self.info = info
        self.first_site = info.spec.sites[0] if info.spec.sites else None
        self.ledger = DeliveryAudit(info)
        self.failure: str | None = None
        self.drop_reason = ""
        self.is_begun = False
        self.ended_at: float | None = None
        self.is_reported = False


def result_of(
    request: ConsumerRequest, account: RowTotals, final: FinalState, *, instance: str, row_bytes: int
) -> CaptureResult:
    """The result of a request that its consumer took, without the payload.

    Args:
        request: The request.
        account: Its balance.
        final: How it ended.
        instance: The consumer, for the text.
        row_bytes: Bytes of one row at one site.
    """
    result = CaptureResult(
        status="ok",
        num_rows=account.complete,
        num_bytes=account.complete * len(request.info.spec.sites) * row_bytes,
        dropped_rows=account.dropped,
    )
    if account.surplus:
        result.status = "error"
        result.error = (
            f"{instance}: {account.surplus} rows were delivered twice or unasked for; do not use this capture, and "
            "report it as a bug of headgate"
        )
    elif account.missing:
        result.status = "partial_error"
        result.error = f"{instance}: {_missing_text(request, account, final)}"
    return result


def _missing_text(request: ConsumerRequest, account: RowTotals, final: FinalState) -> str:
    causes = []
    if account.dropped:
        causes.append(f"{account.dropped} dropped ({request.drop_reason})")
    not_computed = account.missing - account.dropped
    if not_computed:
        causes.append(
            f"{not_computed} never captured: not computed before the request ended (status {final.status!r}) or "
            "read from the prefix cache"
        )
    return f"{account.missing} of {account.wanted} wanted positions are missing: {'; '.join(causes)}"


def failed(text: str | None) -> CaptureResult:
    """The result of a request that failed."""
    return CaptureResult(status="error", error=text)


_UNKNOWN = -1


class TokenCheck:
    """The tokens of one request's captured positions, as the device read them. For the dispatch thread.

    Args:
        num_prompt: Length of the prompt.
    """

    def __init__(self, num_prompt: int) -> None:
        self._token_ids = np.full(num_prompt + SPARE_POSITIONS, _UNKNOWN, dtype=np.int32)

    def note(self, positions: Int64Array, token_ids: Int32Array) -> None:
        """Rows at `positions`, ascending, were computed from `token_ids`."""
        top = int(positions[-1]) + 1
        if top > len(self._token_ids):
            self._grow(top)
        self._token_ids[positions] = token_ids

    def note_one(self, position: int, token_id: int) -> None:
        """The same for a single row."""
        if position >= len(self._token_ids):
            self._grow(position + 1)
        self._token_ids[position] = token_id

    def contradiction(self, final: FinalState) -> str | None:
        """What is wrong with the rows, for people; None if every one is of the request's own token."""
        num_rows = min(final.num_rows, len(self._token_ids), len(final.token_ids))
        noted, expected = self._token_ids[:num_rows], final.token_ids[:num_rows]
        wrong = np.flatnonzero((noted != _UNKNOWN) & (noted != expected))
        if not len(wrong):
            return None
        first = int(wrong[0])
        return (
            f"{len(wrong)} captured rows were not computed from the request's own tokens (position {first}: token "
            f"{noted[first]}, expected {expected[first]}), so none of them is given out; report it as a bug of headgate"
        )

    def _grow(self, size: int) -> None:
        grown = np.full(max(size, 2 * len(self._token_ids)), _UNKNOWN, dtype=np.int32)
        grown[: len(self._token_ids)] = self._token_ids
        self._token_ids = grown
