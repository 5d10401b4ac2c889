"""Statistics of the benchmarks and how they are shown: plain numbers in, text out. No engine, no clock.

A run is a list of `Round`: one mode with one workload, measured once, beside the other modes of that round. Modes are
compared within a round, since all of them saw the same minutes of the machine then; what is shown is the median of
those ratios, with quartiles.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple


class Answer(NamedTuple):
    """What a client saw of one streamed request; times in seconds on one clock.

    Attributes:
        sent: When it began to send the request.
        first: When the first token was there.
        last: When the last token was there.
        end: When the stream was closed.
        tokens: How many were generated.
        error: What went wrong; empty if nothing did.
        dropped_rows: Captured rows that the answer says are lost.
        gaps: Seconds between chunks of tokens that follow each other.
    """

    sent: float
    first: float
    last: float
    end: float
    tokens: int
    error: str = ""
    dropped_rows: int = 0
    gaps: Sequence[float] = ()


@dataclass(frozen=True)
class Round:
    """One mode, measured once.

    Attributes:
        number: Of the round.
        shape: Name of the workload.
        mode: Name of the mode.
        figures: What was measured, by column.
    """

    number: int
    shape: str
    mode: str
    figures: Mapping[str, float]


def percentile(values: Sequence[float], share: float) -> float:
    """The value below which `share` (0 to 1) of `values` lie, between two of them linearly; NaN if there are none."""
    if not values:
        return math.nan
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def summarize(answers: Sequence[Answer]) -> dict[str, float]:
    """Latencies in ms, throughput and failures of the requests of one round.

    Columns: ``tok_s`` (generated tokens per second, from the first request sent to the last stream closed),
    ``stream_tok_s`` (tokens per second of a stream that is open, on average: times the number in flight, this is the
    throughput without the round's tail, when ever fewer are), ``prompts_s`` (requests per second),
    ``{ttft,tpot,itl,e2e}_{p50,p99}``; TPOT is left out where one token is generated. ``itl`` is over the times
    between chunks of all requests, ``tpot`` over the means of requests.
    """
    good = [answer for answer in answers if not answer.error]
    found: dict[str, float] = {"requests": len(answers), "errors": len(answers) - len(good)}
    if not good:
        return found
    wall_s = max(answer.end for answer in good) - min(answer.sent for answer in good)
    found |= {
        "wall_s": wall_s,
        "tok_s": sum(answer.tokens for answer in good) / wall_s,
        "stream_tok_s": sum(answer.tokens for answer in good) / sum(answer.end - answer.sent for answer in good),
        "prompts_s": len(good) / wall_s,
        "dropped": sum(answer.dropped_rows for answer in good),
    }
    series = {
        "ttft": [answer.first - answer.sent for answer in good],
        "tpot": [(answer.last - answer.first) / (answer.tokens - 1) for answer in good if answer.tokens > 1],
        "itl": [gap for answer in good for gap in answer.gaps],
        "e2e": [answer.end - answer.sent for answer in good],
    }
    for name, values in series.items():
        if values:
            found |= {f"{name}_p{share}": 1e3 * percentile(values, share / 100) for share in (50, 99)}
    return found


class Spread(NamedTuple):
    """A median and its quartiles."""

    low: float
    middle: float
    high: float


def spread(values: Sequence[float]) -> Spread:
    """Quartiles of `values`; of one value, itself."""
    return Spread(percentile(values, 0.25), percentile(values, 0.5), percentile(values, 0.75))


def ratios(rounds: Sequence[Round], shape: str, mode: str, column: str, base: str) -> list[float]:
    """`column` of `mode` over that of the mode `base`, for each round in which both were measured."""

    def by_number(name: str) -> dict[int, float]:
        return {
            one.number: one.figures[column]
            for one in rounds
            if (one.shape, one.mode) == (shape, name) and column in one.figures
        }

    ours, theirs = by_number(mode), by_number(base)
    return [ours[number] / theirs[number] for number in sorted(ours.keys() & theirs.keys()) if theirs[number]]


def medians(rounds: Sequence[Round], shape: str, mode: str) -> dict[str, float]:
    """The median of each column over the rounds."""
    of = [one.figures for one in rounds if (one.shape, one.mode) == (shape, mode)]
    columns = dict.fromkeys(column for figures in of for column in figures)
    return {column: statistics.median(f[column] for f in of if column in f) for column in columns}


def unique(values: Iterable[str]) -> list[str]:
    """`values` without repetitions, in order."""
    return list(dict.fromkeys(values))


COMPARED = (
    *("tok_s", "stream_tok_s", "ttft_p50", "ttft_p99", "tpot_p50", "tpot_p99", "e2e_p50", "e2e_p99"),
    *("bs1", "bs16", "bs64", "prefill", "load"),
)
"""Columns that are shown with their ratio to the base, those that a table has: over HTTP, and of an engine, in ms."""
COSTS = ("itl_p50", "itl_p99", "api_ms", "engine_ms", "capture_ms", "controllers_ms")
"""The same in a table of their own: times between tokens, and CPU milliseconds of each process for a request."""
PLAIN = (
    "server_ttft",
    "queued",
    "prefilled",
    "accepted",
    "gb_s",
    "gb_s_drained",
    "dropped",
    "errors",
    "engine_cpu",
    "api_cpu",
    "client_cpu",
    "stolen_cpu",
)
"""Columns that are shown as they are."""


def tables(rounds: Sequence[Round], base: str) -> list[str]:
    """Tables for each workload: a line for each mode, with medians and ratios to the mode `base`."""
    lines: list[str] = []
    for shape in unique(one.shape for one in rounds):
        modes = unique(one.mode for one in rounds if one.shape == shape)
        seen = {column for mode in modes for column in medians(rounds, shape, mode)}
        for compared_all, plain_all in ((COMPARED, PLAIN), (COSTS, ())):
            compared, plain = [c for c in compared_all if c in seen], [c for c in plain_all if c in seen]
            if compared or plain:
                lines += ["", *_table(rounds, base, shape, modes, compared, plain)]
    return lines[1:]


def _table(
    rounds: Sequence[Round], base: str, shape: str, modes: Sequence[str], compared: Sequence[str], plain: Sequence[str]
) -> list[str]:
    head = " ".join([*(f"{column:>25}" for column in compared), *(f"{column:>12}" for column in plain)])
    lines = [f"{shape:24} rounds {head}"]
    for mode in modes:
        found = medians(rounds, shape, mode)
        cells = [_compared_cell(rounds, shape, mode, column, base, found) for column in compared]
        cells += [f"{found[column]:12.4g}" if column in found else f"{'':12}" for column in plain]
        count = sum((one.shape, one.mode) == (shape, mode) for one in rounds)
        lines.append(f"  {mode:22} {count:6} {' '.join(cells)}".rstrip())
    return lines


def _compared_cell(
    rounds: Sequence[Round], shape: str, mode: str, column: str, base: str, found: Mapping[str, float]
) -> str:
    if column not in found:
        return f"{'':25}"
    cell = f"{found[column]:8.5g}"
    if mode != base and (each := ratios(rounds, shape, mode, column, base)):
        low, middle, high = (100 * value - 100 for value in spread(each))
        cell += f" {middle:+6.1f}% ({low:+.0f}..{high:+.0f})"
    return f"{cell:25}"


def summary(rounds: Sequence[Round], base: str) -> dict[str, Any]:
    """``{shape: {mode: {"median": {column: value}, "to_base": {column: [low, middle, high]}}}}`` for a document."""
    found: dict[str, Any] = {}
    for shape in unique(one.shape for one in rounds):
        found[shape] = {}
        for mode in unique(one.mode for one in rounds if one.shape == shape):
            middle = medians(rounds, shape, mode)
            each = {
                column: ratios(rounds, shape, mode, column, base) for column in (*COMPARED, *COSTS) if column in middle
            }
            found[shape][mode] = {
                "median": middle,
                "to_base": {column: list(spread(values)) for column, values in each.items() if values},
            }
    return found
