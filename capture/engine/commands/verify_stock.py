"""``headgate verify``: engines with headgate beside stock ones. Answers, graphs, and what it costs to be idle."""

from __future__ import annotations

import random
import statistics
from collections.abc import Iterator, Mapping, Sequence

import msgspec

from headgate.capture.monitoring.verify_checks import (
    IDLE,
    LOGPROB_TOLERANCE,
    PLAIN,
    PLAIN_AT_THE_END,
    SERVED,
    STOCK,
    Recording,
    Runs,
    SceneRequest,
    Status,
    Verdict,
    difference,
    equality,
    noise_of,
)

MAX_TOKENS = 12
LENGTHS = (1, 2, 5, 33, 17, 64, 129, 300, 9, 47, 200, 23)
"""Lengths of the prompts, so that steps mix prefills of many sizes with decodes."""
MIN_MODEL_LENGTH = 48
MAX_SCATTER = 10.0
"""Between the quartiles of a cost, in percent: beyond, it says nothing."""
MAX_NOISE = 5
"""Stock may differ from itself by this many times `LOGPROB_TOLERANCE`; beyond, nothing can be compared with it."""


def plain_requests(vocabulary: int, max_model_len: int) -> list[SceneRequest]:
    """Requests of `PLAIN`: random token ids, the same ones each time.

    Args:
        vocabulary: Number of token ids. The ends are left out, where special tokens are.
        max_model_len: No prompt is longer than fits.
    """
    rng, longest = random.Random(0), max_model_len - MAX_TOKENS - 1  # noqa: S311  (the same prompts each time)
    lengths = [min(length, longest) for length in LENGTHS]
    return [
        SceneRequest(
            label="plain",
            prompt=[rng.randrange(vocabulary // 8, vocabulary // 2) for _ in range(length)],
            max_tokens=MAX_TOKENS,
        )
        for length in lengths
    ]


def judge_weights(runs: Runs) -> Iterator[Verdict]:
    """Whether the model's weights make a wrong row differ from a right one."""
    if any(recording.facts.load_format == "dummy" for recordings in runs.values() for recording in recordings):
        yield Verdict(
            "weights tell layers apart",
            Status.WARNING,
            "vLLM's dummy weights hardly move the stream, so little is compared: use --random-weights instead",
        )


def judge_stock(runs: Runs) -> Iterator[Verdict]:
    """Stock against itself, headgate with nothing to do against stock, and headgate after its work against before."""
    stock, served = runs[STOCK], runs[SERVED][0]
    noise, tolerance = noise_of(stock), LOGPROB_TOLERANCE[served.facts.dtype]
    yield _repeats(stock, noise, tolerance)
    for kind, name in ((IDLE, "idle headgate"), (SERVED, "headgate with run counters")):
        for found in [recording.scenes[PLAIN] for recording in runs.get(kind, ())][:1]:
            moved = difference(stock[0].scenes[PLAIN], found)
            yield equality(f"{name} answers as stock does", moved, noise=noise, rounding=tolerance)
    before, after = served.scenes[PLAIN], served.scenes[PLAIN_AT_THE_END]
    left = difference(before, after)
    yield equality("captures and steering leave nothing behind", left, noise=noise_of([served]))


def _repeats(stock: Sequence[Recording], noise: float, tolerance: float) -> Verdict:
    check, num_runs = "stock repeats itself", f"{2 * len(stock)} runs in {len(stock)} engine(s)"
    if noise == 0:
        return Verdict(check, Status.PASSED, f"{num_runs} are equal, bit for bit: so everything is compared")
    text = f"logprobs of {num_runs} differ by up to {noise:.2g}"
    if not noise <= MAX_NOISE * tolerance:
        return Verdict(check, Status.FAILED, f"{text}: too much to compare anything with")
    if all(noise_of([engine]) == 0 for engine in stock):
        text = f"in each engine, bit for bit; compiled anew it answers otherwise, by up to {noise:.2g} in logprobs"
        return Verdict(check, Status.PASSED, f"{text}, which headgate may as well")
    return Verdict(check, Status.WARNING, f"{text}: everything is compared with tolerance")


def judge_graphs(runs: Runs) -> Iterator[Verdict]:
    """Every site ran in every step, and steps were replayed from CUDA graphs as often as stock's are."""
    served = runs[SERVED][0]
    yield _run_counts(served)
    yield _replays(runs[STOCK][0], served)


def _run_counts(served: Recording) -> Verdict:
    check = "every site ran in every step"
    sites = {
        f"{part} at {site} on worker {rank}": count
        for rank, worker in enumerate(served.run_counts.get(PLAIN, ()))
        for part, run_counts in worker.items()
        for site, count in run_counts.items()
    }
    if not sites:
        return Verdict(check, Status.FAILED, "no site was counted")
    # A request of so many tokens takes so many steps at least.
    most = max(MAX_TOKENS, *sites.values())
    lazy = [f"{name}: {count}" for name, count in sites.items() if count != most]
    if lazy:
        return Verdict(check, Status.FAILED, f"{len(lazy)} of {len(sites)} ran less than {most} times: {lazy[0]}")
    return Verdict(check, Status.PASSED, f"{len(sites)} counters, {most} times each")


def _replays(stock: Recording, served: Recording) -> Verdict:
    check = "steps are replayed from CUDA graphs"
    expected, found = min(stock.replays.get(PLAIN, [0])), min(served.replays.get(PLAIN, [0]))
    mode = served.facts.graph_mode
    if not expected and not found:
        return Verdict(check, Status.SKIPPED, f"stock replays none here either (cudagraph_mode {mode})")
    status = Status.FAILED if not found else Status.WARNING if found < expected else Status.PASSED
    return Verdict(check, status, f"{found} graphs replayed, by stock {expected} (cudagraph_mode {mode})")


class Cost(msgspec.Struct, frozen=True, kw_only=True):
    """The time of a decode step with headgate idle, against stock.

    Attributes:
        in_flight: Requests that are decoded together.
        stock_ms: Median of the rounds of all stock engines, in milliseconds.
        idle_ms: The same with headgate.
        percent: What headgate adds.
        low: Lower quartile over every pair of a round of stock and a round of headgate, in percent.
        high: Upper quartile.
    """

    in_flight: int
    stock_ms: float
    idle_ms: float
    percent: float
    low: float
    high: float


def idle_costs(runs: Runs) -> list[Cost]:
    """The cost for each number of requests in flight; empty if nothing was timed."""
    stock, idle = _rounds(runs.get(STOCK, ())), _rounds(runs.get(IDLE, ()))
    return [_cost(in_flight, stock[in_flight], idle[in_flight]) for in_flight in sorted(stock.keys() & idle.keys())]


def _rounds(recordings: Sequence[Recording]) -> Mapping[int, list[float]]:
    rounds: dict[int, list[float]] = {}
    for recording in recordings:
        for in_flight, values in recording.step_ms.items():
            rounds.setdefault(in_flight, []).extend(values)
    return rounds


def _cost(in_flight: int, stock: Sequence[float], idle: Sequence[float]) -> Cost:
    ratios = [100 * ours / theirs - 100 for ours in idle for theirs in stock]
    low, _, high = statistics.quantiles(ratios, n=4, method="inclusive") if len(ratios) > 1 else ratios * 3
    stock_ms, idle_ms = statistics.median(stock), statistics.median(idle)
    percent = 100 * idle_ms / stock_ms - 100
    return Cost(in_flight=in_flight, stock_ms=stock_ms, idle_ms=idle_ms, percent=percent, low=low, high=high)


def judge_costs(costs: Sequence[Cost], *, bound: float, is_limit: bool) -> Iterator[Verdict]:
    """A verdict for each cost.

    Args:
        costs: In percent.
        bound: What is accepted, in percent.
        is_limit: Whether more is a failure, and not only worth a warning; so is a cost that cannot be measured.
    """
    for cost in costs:
        check = f"idle cost, {cost.in_flight} in flight"
        figure = (
            f"{cost.percent:+.1f} % per token, quartiles {cost.low:+.1f} .. {cost.high:+.1f} % "
            f"({cost.idle_ms:.3g} ms, stock {cost.stock_ms:.3g} ms)"
        )
        problem = None
        if cost.high - cost.low > MAX_SCATTER:
            problem = "too scattered to tell: is the machine busy?"
        elif cost.percent > bound:
            problem = f"more than {bound:g} %"
        if problem is None:
            yield Verdict(check, Status.PASSED, figure)
        else:
            yield Verdict(check, Status.FAILED if is_limit else Status.WARNING, f"{figure}; {problem}")
