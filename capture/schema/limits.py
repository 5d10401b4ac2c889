"""Limits on what clients capture, and the counts that are compared with them.

Nothing here knows where a limit comes from: the operator's settings make one `CaptureLimits`, and others, such as those
of a client's key, may be checked beside it with the same `CaptureUse`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import msgspec
import numpy as np

from headgate.capture.schema.batch import Int64Array
from headgate.capture.schema.consumer import ModelInfo, ReadoutFacts
from headgate.capture.schema.errors import RequestError
from headgate.capture.schema.positions import Indices, PositionSelector, parts_of
from headgate.capture.schema.sites import Site
from headgate.capture.schema.spec import CaptureSpec

MAX_CALL_LISTED = 1 << 20
"""Positions in the lists of one call: each prompt and sample carries its own, 8 bytes a position."""


class CaptureUse(msgspec.Struct, frozen=True, kw_only=True):
    """The most that a call could capture if it generated all it may; uses of one call's prompts add up.

    Attributes:
        num_rows: Positions, by consumer.
        num_bytes: Of the rows at all sites, by consumer.
        num_listed: Positions that are listed one by one, by consumer.
    """

    num_rows: Mapping[str, int] = {}
    num_bytes: Mapping[str, int] = {}
    num_listed: Mapping[str, int] = {}

    def __add__(self, other: CaptureUse) -> CaptureUse:
        return CaptureUse(
            num_rows=_sum(self.num_rows, other.num_rows),
            num_bytes=_sum(self.num_bytes, other.num_bytes),
            num_listed=_sum(self.num_listed, other.num_listed),
        )


def _sum(counts: Mapping[str, int], others: Mapping[str, int]) -> dict[str, int]:
    # No `Counter`: it takes 4 µs to add two of one entry, for each prompt of a call, on the event loop.
    total = dict(counts)
    for instance, count in others.items():
        total[instance] = total.get(instance, 0) + count
    return total


def use_of(
    specs: Mapping[str, CaptureSpec],
    *,
    num_prompt: int,
    max_tokens: int,
    num_samples: int,
    model: ModelInfo,
    readouts: Mapping[str, Mapping[Site, ReadoutFacts]],
) -> CaptureUse:
    """Count what one prompt could capture at most.

    Args:
        specs: By consumer, resolved.
        num_prompt: Tokens of the prompt.
        max_tokens: Tokens that may be generated.
        num_samples: The request's ``n``.
        model: The model that is served.
        readouts: By consumer, if it has any, and site.
    """
    num_positions = num_prompt + max_tokens - 1
    num_rows: dict[str, int] = {}
    num_bytes: dict[str, int] = {}
    num_listed: dict[str, int] = {}
    for instance, spec in specs.items():
        num_rows[instance] = num_bytes[instance] = 0
        for sites, positions in spec.selections:
            count = num_samples * count_rows(positions, num_prompt, num_positions)
            num_rows[instance] = max(num_rows[instance], count)
            num_bytes[instance] += count * model.position_bytes(sites, readouts.get(instance), spec.columns)
        for positions in spec.selectors:
            for part in parts_of(positions):
                if isinstance(part, Indices):
                    num_listed[instance] = num_listed.get(instance, 0) + num_samples * len(part.values)
    return CaptureUse(num_rows=num_rows, num_bytes=num_bytes, num_listed=num_listed)


def count_rows(positions: PositionSelector, num_prompt: int, num_rows: int) -> int:
    """Positions below `num_rows` that a resolved selector selects."""
    return sum(_count(part.wanted(num_prompt), num_rows) for part in parts_of(positions))


def _count(wanted: range | Int64Array, num_rows: int) -> int:
    if isinstance(wanted, range):
        return len(range(wanted.start, min(wanted.stop, num_rows), wanted.step))
    return int(np.searchsorted(wanted, num_rows))


@dataclass(frozen=True, kw_only=True, slots=True)
class CaptureLimits:
    """Limits of one call: an HTTP request with all its prompts and samples, or one prompt of `LLM`. None: no limit.

    Attributes:
        max_rows: Positions for one consumer.
        max_bytes: Bytes of rows, at all sites and for all consumers together.
        max_listed: Positions in the lists of all consumers together.
    """

    max_rows: int | None = None
    max_bytes: int | None = None
    max_listed: int = MAX_CALL_LISTED

    def check(self, use: CaptureUse) -> None:
        """Refuse what is too much.

        Args:
            use: Of the whole call so far, with what is asked now.

        Raises:
            RequestError: Naming the consumer that takes most of it.
        """
        for instance, num_rows in use.num_rows.items():
            if self.max_rows is not None and num_rows > self.max_rows:
                raise _too_much(instance, f"{num_rows} positions", self.max_rows)
        num_listed = sum(use.num_listed.values())
        if num_listed > self.max_listed:
            largest = max(use.num_listed, key=use.num_listed.__getitem__)
            raise RequestError(
                f"capture.{largest}.positions",
                f"the call lists {num_listed} positions, all prompts and samples (n) together; at most "
                f"{self.max_listed} can be. Select evenly spaced ones by start, stop and step, or send fewer prompts",
            )
        num_bytes = sum(use.num_bytes.values())
        if self.max_bytes is not None and num_bytes > self.max_bytes:
            largest = max(use.num_bytes, key=use.num_bytes.__getitem__)
            raise _too_much(largest, f"{num_bytes} bytes", self.max_bytes)


def _too_much(instance: str, amount: str, limit: int) -> RequestError:
    return RequestError(
        f"capture.{instance}",
        f"if it generated all that max_tokens allows, the call could capture {amount}; at most {limit} are allowed "
        "here, all prompts and samples (n) of a call together. Choose fewer positions or sites, lower max_tokens or n, "
        "or send fewer prompts at once",
    )


def check_tag(tag: str, allowed: Collection[str] | None, field: str) -> None:
    """Refuse a tag that is not among those allowed; None allows any.

    Raises:
        RequestError: Naming the field and the tags that are allowed.
    """
    if allowed is not None and tag not in allowed:
        raise RequestError(field, f"tag {tag!r} is not allowed; allowed: {', '.join(sorted(allowed)) or 'none'}")
