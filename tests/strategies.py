"""Hypothesis strategies: selectors, specs, and schedules as a model runner may lay them out.

A schedule is interpreted from a tape of bytes instead of being drawn choice by choice: that makes thousands of them
cheap, and they still shrink, since the first alternative of every choice is the plain one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import numpy as np
from hypothesis import strategies as st

from headgate.capture.schema.batch import BatchView, Int64Array
from headgate.capture.schema.errors import RequestError
from headgate.capture.schema.positions import NAMED, Indices, Named, PositionSelector, Span
from headgate.capture.schema.sites import FINAL_NORM_SITE, INNER_HOOKS, HookPoint, Site, sort_sites
from headgate.capture.schema.spec import CaptureSpec

SITES = sort_sites([*(Site(layer, hook) for layer in range(2) for hook in HookPoint.__members__.values()
                      if hook is not HookPoint.FINAL_NORM and hook not in INNER_HOOKS), FINAL_NORM_SITE])  # fmt: skip
"""Every site of a model with two layers."""

BITS = (0, 1, 2, 62)
"""Bits of the consumers that requests name; the last is the highest that fits."""

TAPE_BYTES = 250
"""Choices of a schedule of 14 steps; shorter tapes would leave most of them plain."""

Specs = Mapping[int, CaptureSpec]


def selectors(max_position: int = 24) -> st.SearchStrategy[PositionSelector]:
    """Selectors as parsed, negative positions included, for prompts of up to `max_position` tokens."""
    position = st.integers(-max_position, max_position)
    indices = st.sets(position, min_size=1, max_size=5).map(lambda values: Indices.of(tuple(values)))
    spans = st.builds(Span, start=position, stop=st.none() | position, step=st.integers(1, 4))
    return st.one_of(st.sampled_from(tuple(NAMED)).map(Named), spans, indices)


def site_sets(sites: Sequence[Site] = SITES) -> st.SearchStrategy[tuple[Site, ...]]:
    """Some of `sites`, at least one, in their order. One draw, where a set would cost one for each site."""
    return st.integers(1, 2 ** len(sites) - 1).map(
        lambda chosen: tuple(site for index, site in enumerate(sites) if chosen >> index & 1)
    )


def specs(sites: Sequence[Site] = SITES) -> st.SearchStrategy[CaptureSpec]:
    """What one consumer wants of one request, not resolved."""
    hooks = st.sampled_from(sorted({site.hook for site in sites}))
    own = st.dictionaries(hooks, selectors(), max_size=2)
    return st.builds(CaptureSpec, sites=site_sets(sites), positions=selectors(), hook_positions=own)


def profiles(sites: Sequence[Site] = SITES) -> st.SearchStrategy[list[Specs]]:
    """A few things that requests may ask for, the first being nothing."""
    profile = st.dictionaries(st.sampled_from(BITS), specs(sites), min_size=1)
    return st.lists(profile, min_size=1, max_size=4).map(lambda chosen: [{}, *chosen])


def resolved(profile: Specs, num_prompt: int) -> dict[int, CaptureSpec]:
    """`profile` for a prompt of that length; what such a prompt cannot serve is left out."""
    found = {}
    for bit, spec in profile.items():
        with suppress(RequestError):
            found[bit] = spec.with_positions(lambda selector: selector.resolve(num_prompt, "positions"))
    return found


@dataclass(frozen=True)
class Arrival:
    """A request that the worker is told of before a step."""

    req_id: str
    num_prompt: int
    specs: dict[int, CaptureSpec]


@dataclass(frozen=True)
class Step:
    """What happens before a step, in this order, and its batch."""

    left: tuple[str, ...]
    arrived: tuple[Arrival, ...]
    view: BatchView


@dataclass
class _Running:
    req_id: str
    num_prompt: int
    num_rows: int  # positions that are computed before the request ends
    num_computed: int
    num_known: int  # tokens that there are: what a recomputation may take in one chunk
    is_preempted: bool = False


@dataclass
class _Tape:
    tape: bytes
    at: int = 0

    def below(self, stop: int) -> int:
        """The next choice, from 0 to `stop` exclusive; 0 at the end of the tape."""
        self.at += 1
        return self.tape[self.at - 1] % stop if self.at <= len(self.tape) else 0

    def seldom(self) -> bool:
        return self.below(8) == 7


@dataclass
class _Simulation:
    """A scheduler with chunked prefill, prefix cache, preemption, aborts and async scheduling."""

    tape: _Tape
    profiles: Sequence[Specs]
    running: list[_Running] = field(default_factory=list)
    gone: list[str] = field(default_factory=list)
    num_arrived: int = 0

    def step(self) -> Step:
        left = tuple(request.req_id for request in [*self.running] if self._leaves(request))
        self.running = [request for request in self.running if request.req_id not in left]
        self.gone.extend(left)
        arrived = tuple(self._arrive() for _ in range(self.tape.below(3)))
        for request in self.running:
            if self.tape.seldom():
                self._preempt(request)
        return Step(left, arrived, self._lay_out())

    def _leaves(self, request: _Running) -> bool:
        """A request stays one step too long if the next step was under way when it stopped (async scheduling)."""
        is_over = request.num_computed >= request.num_rows and not self.tape.seldom()
        return is_over or self.tape.seldom()

    def _arrive(self) -> Arrival:
        """A new id, the id of a request that has left, or a running one that starts afresh."""
        reused = self.gone + [request.req_id for request in self.running] if self.tape.seldom() else []
        if reused:
            req_id = reused[self.tape.below(len(reused))]
            self.running = [request for request in self.running if request.req_id != req_id]
        else:
            req_id, self.num_arrived = f"request-{self.num_arrived}", self.num_arrived + 1
        num_prompt = 1 + self.tape.below(20)
        cached = self.tape.below(num_prompt) if self.tape.below(2) else 0
        num_rows = num_prompt + self.tape.below(12)
        self.running.append(_Running(req_id, num_prompt, num_rows, cached, num_prompt))
        return Arrival(req_id, num_prompt, resolved(self.profiles[self.tape.below(len(self.profiles))], num_prompt))

    def _preempt(self, request: _Running) -> None:
        request.num_known = max(request.num_known, request.num_computed)
        request.num_computed = self.tape.below(request.num_computed + 1)  # what is still in the prefix cache
        request.is_preempted = True

    def _lay_out(self) -> BatchView:
        batch = []
        for request in self.running:
            request.is_preempted = request.is_preempted and self.tape.below(2) == 1
            if not request.is_preempted and not self.tape.seldom():
                batch.append((request, self._chunk(request)))
        if batch and self.tape.below(2):  # the runner reorders its batch
            turn = self.tape.below(len(batch))
            batch = batch[turn:] + batch[:turn][::-1]
        counts = np.array([count for _, count in batch], dtype=np.int64)
        computed = np.array([request.num_computed for request, _ in batch], dtype=np.int64)
        for request, count in batch:
            request.num_computed += count
        return BatchView(tuple(request.req_id for request, _ in batch), self._starts(counts), counts, computed)

    def _chunk(self, request: _Running) -> int:
        """Tokens in this step: a chunk of what is known, else the token that was sampled last."""
        num_left = request.num_known - request.num_computed
        if num_left <= 0:
            return 1
        return num_left if self.tape.below(2) == 0 else 1 + self.tape.below(num_left)

    def _starts(self, counts: Int64Array) -> Int64Array:
        """Mostly one request after the other; now and then with rows between them, or not in the batch's order."""
        if self.tape.seldom():
            gaps = np.array([self.tape.below(3) for _ in counts], dtype=np.int64)
            ends: Int64Array = np.cumsum((counts + gaps)[::-1])[::-1]
            return ends - counts
        return (np.cumsum(counts) - counts).astype(np.int64)


@st.composite
def schedules(draw: st.DrawFn, sites: Sequence[Site] = SITES, num_steps: int = 14) -> list[Step]:
    """Steps of a worker, from the first on."""
    simulation = _Simulation(_Tape(draw(st.binary(min_size=TAPE_BYTES, max_size=TAPE_BYTES))), draw(profiles(sites)))
    return [simulation.step() for _ in range(num_steps)]
